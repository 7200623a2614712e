"""The Megatron that runs: its tree, its release, its signatures, and the runner of its scripts."""
