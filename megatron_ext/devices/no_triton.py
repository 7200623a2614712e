"""Stands in for Megatron's batch-invariant kernels where Triton is not installed.

Upstream's module (`megatron/core/transformer/custom_layers/batch_invariant_kernels.py`) imports
Triton at its top, and `megatron.training` imports that module whether the mode is used or not. This
one lets the import pass; asking for the mode is an error that says what it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def is_batch_invariant_mode_enabled() -> bool:
    """Return False: without Triton the mode cannot have been enabled."""
    return False


def enable_batch_invariant_mode() -> None:
    """Refuse the mode.

    Raises:
        UserError: Always; the kernels are Triton's.
    """
    # Here, so that no name of ours stays in Megatron's module after an undo.
    from megatron_ext.errors import UserError

    raise UserError(
        "--batch-invariant-mode needs Triton, which is not installed; pip install triton (it needs "
        "a CUDA GPU to run), or leave the flag out"
    )


def disable_batch_invariant_mode() -> None:
    """Do nothing: the mode is off."""


@contextlib.contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Run a block in the mode; only turning it off is possible here.

    Raises:
        UserError: `enabled` is true.
    """
    if enabled:
        enable_batch_invariant_mode()
    yield
