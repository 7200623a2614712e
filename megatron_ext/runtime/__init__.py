"""Runs schedule tables using Megatron's own forward and backward steps.

`entry.forward_backward` replaces Megatron's schedules. Unlike `megatron_ext/schedules/`, this
package depends on torch and Megatron.
"""
