"""Pictures of simulated schedules, as text and as SVG."""
