"""Stands in for the batch-invariant kernels of Megatron 0.16 if Triton is not installed.

`megatron.training` imports `megatron/core/transformer/custom_layers/batch_invariant_kernels.py`
even if the mode is off. Later releases can import it without Triton.
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
    # Import here, so that after an undo none of our names stay in Megatron's module.
    from megatron_ext.devices.lacks import TRITON_ONLY
    from megatron_ext.errors import UserError

    raise UserError(TRITON_ONLY[0].message)
