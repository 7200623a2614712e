"""Code shared by all benchmarks."""
