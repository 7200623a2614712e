"""The script that trains: upstream's own, or one for GPT on a wheel of megatron-core."""
