"""A forward and a backward of two micro-batches as one action, by Megatron's schedule plans."""
