"""Schedules as data: actions, placement, derived messages, and a proof that a table completes."""
