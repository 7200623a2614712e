"""Runs the training script: upstream's own, or a replacement for wheels of megatron-core."""
