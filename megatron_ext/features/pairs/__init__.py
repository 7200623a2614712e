"""Runs a forward and a backward of two micro-batches as one action, with Megatron's plans."""
