"""Stages that exchange trees of tensors, and routes that carry a tensor past stages.

A model declares both with `megatron_ext.routes`; docs/boundaries.md shows how.
"""
