"""Plans a training run's layout: model sizes, memory, time, cuts, bounds and the search."""
