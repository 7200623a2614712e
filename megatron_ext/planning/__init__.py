"""Plans the layout of a training run, with a lower bound: sizes, memory, time, cuts, search."""
