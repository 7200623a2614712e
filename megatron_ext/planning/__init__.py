"""Plans the layout of a training run: model sizes, memory, time, cuts, a bound and a search."""
