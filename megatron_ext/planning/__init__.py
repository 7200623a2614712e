"""Plans a training run's layout: model sizes, memory, time, cuts, a bound and a search."""
