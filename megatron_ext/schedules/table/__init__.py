"""Schedules as data: actions, placement, derived messages, and the proof that tables complete."""
