"""Pictures of simulated schedules: as characters and as SVG."""
