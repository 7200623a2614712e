"""Stands in for the batch-invariant kernels of Megatron 0.16 where Triton is not installed.

`megatron.training` imports `megatron/core/transformer/custom_layers/batch_invariant_kernels.py`
whether its mode is used or not. Later releases import it without Triton.
"""

from __future__ import annotations


def is_batch_invariant_mode_enabled() -> bool:
    """Return False: without Triton the mode cannot have been enabled."""
    return False


def enable_batch_invariant_mode() -> None:
    """Refuse the mode.

    Raises:
        UserError: Always; the kernels are Triton's.
    """
    # Here, so that no name of ours stays in Megatron's module after an undo.
    from megatron_ext.devices.lacks import TRITON_ONLY
    from megatron_ext.errors import UserError

    raise UserError(TRITON_ONLY[0].message)
