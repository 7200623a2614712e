"""`pretrain_gpt.py` for a wheel of megatron-core, which lacks upstream's script."""
