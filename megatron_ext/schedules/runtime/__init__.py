"""Runs tables of actions on Megatron's forward and backward steps.

`entry.forward_backward` stands in for Megatron's schedules. The only part of `schedules` that
imports torch and Megatron.
"""
