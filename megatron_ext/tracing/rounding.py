"""Rounds the outputs of modules differently, to learn by how much rounding changes a training.

Two runs that sum in different orders differ by rounding. A run whose outputs are changed in their
last digits, at random, shows how such differences grow through the layers and steps of one model
with its data, in its precision. It says nothing about any order, so a faulty order is not learned.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch


def rounded_differently(tensor: torch.Tensor, *seeds: object) -> torch.Tensor:
    """Return a tensor whose elements differ by at most about two roundings of its dtype.

    A forward that is computed again gets the same tensor again, and so do tensor-parallel ranks
    that hold copies of a tensor.

    Args:
        tensor: Values of any shape and floating-point dtype.
        seeds: What identifies the tensor, such as the name of its module and its micro-batch.
    """
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(zlib.crc32(repr(seeds).encode()))
    wide = torch.promote_types(tensor.dtype, torch.float32)
    noise = torch.rand(
        tensor.shape, generator=generator, dtype=wide, device=tensor.device
    )
    # In `[-1, 1)` spacings of the dtype.
    factor = 1 + (2 * noise - 1) * torch.finfo(tensor.dtype).eps
    return (tensor.to(wide) * factor).to(tensor.dtype)


def with_first(output: Any, first: torch.Tensor, replacement: torch.Tensor) -> Any:
    """Return a module's output with one of its tensors replaced."""
    if isinstance(output, torch.Tensor):
        return replacement
    values = [replacement if value is first else value for value in output]
    return values if isinstance(output, list) else tuple(values)
