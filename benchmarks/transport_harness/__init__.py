"""What `benchmarks/transport.py` measures beside the transports."""
