"""Makes the layout of a training run, and proves its answer: sizes, memory, time, cuts, search."""
