"""Replaces the module with Megatron 0.16's batch-invariant kernels if Triton is not installed.

`megatron.training` imports `megatron/core/transformer/custom_layers/batch_invariant_kernels.py`
even if the mode is off. From 0.17 on, that module can be imported without Triton.
"""

from __future__ import annotations


def is_batch_invariant_mode_enabled() -> bool:
    """Return False: without Triton the mode cannot have been enabled."""
    return False


def enable_batch_invariant_mode() -> None:
    """Reject the mode.

    Raises:
        UserError: Always; the kernels need Triton.
    """
    # Import here, so that none of our names become attributes of a Megatron module.
    from megatron_ext.devices.lacks import TRITON_ONLY
    from megatron_ext.errors import UserError

    raise UserError(TRITON_ONLY[0].message)
