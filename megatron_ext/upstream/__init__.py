"""The Megatron that runs: its tree, release and signatures, and how its failures look."""
