"""Outputs that are rounded differently: by how much, and always in the same way."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.tracing.rounding import rounded_differently, with_first


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_about_half_of_the_elements_change_by_few_units_in_the_last_place(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(64, 64, generator=generator, dtype=torch.float64).to(dtype)
    rounded = rounded_differently(tensor, "mlp", 1, 0)
    assert rounded.dtype == dtype
    relative = ((rounded.double() - tensor.double()) / tensor.double()).abs()
    assert relative.max() <= 2 * torch.finfo(dtype).eps
    assert 0.3 < (rounded != tensor).double().mean() < 0.9


def test_the_same_tensor_is_rounded_in_the_same_way() -> None:
    """As a forward that is recomputed must be."""
    tensor = torch.ones(64)
    first = rounded_differently(tensor, "mlp", 1, 0)
    assert torch.equal(first, rounded_differently(tensor, "mlp", 1, 0))
    assert not torch.equal(first, rounded_differently(tensor, "mlp", 1, 1))


def test_the_other_outputs_of_a_module_stay() -> None:
    first, bias, replacement = torch.ones(1), torch.zeros(1), torch.ones(1)
    assert with_first(first, first, replacement) is replacement
    output = with_first((first, bias), first, replacement)
    assert output[0] is replacement
    assert output[1] is bias
