"""Rounds module outputs differently to learn how much rounding changes a training run.

Two runs that sum in different orders differ by rounding errors. A run with random changes in the
last digits of its outputs shows how such differences grow through the model's layers and steps,
with its data and precision. The changes do not depend on any order, so tolerances learned from such
a run do not hide a wrong order.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch


def rounded_differently(tensor: torch.Tensor, *seeds: object) -> torch.Tensor:
    """Return a copy whose elements differ by at most about two roundings in the tensor's dtype.

    The result depends only on the tensor and the seeds, so a recomputed forward pass and
    tensor-parallel ranks with copies of the tensor get the same result.

    Args:
        tensor: A tensor of any shape and floating-point dtype.
        seeds: Values that identify the tensor, such as its module's name and its micro-batch.
    """
    generator = torch.Generator(device=tensor.device)
    # Do not use `hash`: it differs between processes, but all ranks must draw the same numbers.
    text = repr(seeds)
    generator.manual_seed(zlib.crc32(text.encode()))
    # Compute in float32 or wider: in bfloat16, `1 + noise * eps` would be rounded to 1 or 1 + eps.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    noise = torch.rand(
        tensor.shape,
        generator=generator,
        dtype=wide,
        device=tensor.device,
    )
    relative_spacing = torch.finfo(tensor.dtype).eps
    # `2 * noise - 1` is uniform in `[-1, 1)`, in units of the dtype's relative spacing.
    factor = 1 + (2 * noise - 1) * relative_spacing
    rounded = tensor.to(wide) * factor
    return rounded.to(tensor.dtype)


def with_first(output: Any, first: torch.Tensor, replacement: torch.Tensor) -> Any:
    """Return a module's output with one of its tensors replaced."""
    if isinstance(output, torch.Tensor):
        return replacement
    values = []
    for value in output:
        # Compare identities: `==` would compare elements.
        if value is first:
            values.append(replacement)
        else:
            values.append(value)
    if isinstance(output, list):
        return values
    return tuple(values)
