"""The baselines of `benchmarks/transport.py`."""
