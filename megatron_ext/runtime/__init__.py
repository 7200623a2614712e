"""Executes schedule tables through Megatron's own forward and backward steps.

`entry.forward_backward` replaces Megatron's schedules. This is the only part of `schedules` that
imports torch and Megatron.
"""
