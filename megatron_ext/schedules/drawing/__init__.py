"""Pictures of simulated schedules: characters and SVG."""
