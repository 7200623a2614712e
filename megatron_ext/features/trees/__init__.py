"""Stages that exchange trees of tensors, and routes that send a tensor past stages.

A model declares both with `megatron_ext.routes`. See docs/boundaries.md.
"""
