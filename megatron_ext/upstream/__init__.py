"""The Megatron that runs: its tree, release and signatures, and how to explain its failures."""
