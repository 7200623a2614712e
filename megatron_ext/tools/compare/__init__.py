"""`megatron-ext compare`: what a schedule is worth, and whether its numbers are the same."""
