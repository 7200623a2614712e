"""The embedded trainer: upstream's pretraining command line on megatron.core alone.

It replaces `pretrain_gpt.py` and `pretrain_bert.py` if there is no Megatron-LM tree. It accepts
upstream's flags for the features that it supports, gives the same losses, and reads and writes the
same checkpoints; for other features it refers to Megatron-LM's own script. It stays small on
purpose.
"""
