"""Starts the training script: upstream's own, or a GPT script for a megatron-core wheel."""
