"""The embedded trainer: upstream's pretraining command line on megatron.core alone.

It stands in for `pretrain_gpt.py` and `pretrain_bert.py` where no Megatron-LM tree is found. It
takes upstream's flags for what it supports, gives the same losses and reads and writes the same
checkpoints; for anything else it says that Megatron-LM's own script is needed. It stays small on
purpose.
"""
