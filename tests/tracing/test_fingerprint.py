"""Fingerprints of tensors: every change of bits shows, and about how large it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.tracing.fingerprint import Fingerprints

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def _bits(tensor: torch.Tensor) -> list[int]:
    return Fingerprints().of(tensor).bits.tolist()


def _random(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@settings(deadline=None)
@given(_SHAPES, st.sampled_from(_TYPES), st.integers(0, 1000), st.data())
def test_a_last_bit_changes_them(
    shape: list[int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = _random(shape, dtype, seed)
    other = tensor.clone()
    index = data.draw(st.integers(0, tensor.numel() - 1))
    words = other.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    words[index] ^= 1
    assert _bits(other) != _bits(tensor)


@settings(deadline=None)
@given(_SHAPES, st.sampled_from(_TYPES), st.integers(0, 1000), st.data())
def test_elements_that_have_changed_places_change_them(
    shape: list[int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = _random(shape, dtype, seed)
    numbers = st.integers(0, tensor.numel() - 1)
    first, second = data.draw(numbers), data.draw(numbers)
    other = tensor.clone()
    flat = other.view(-1)
    flat[first], flat[second] = tensor.view(-1)[second], tensor.view(-1)[first]
    assert (_bits(other) == _bits(tensor)) == torch.equal(other, tensor)


def test_they_depend_neither_on_strides_nor_on_the_place_in_memory() -> None:
    tensor = _random([6, 35], torch.bfloat16, 1)
    moved = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].reshape(6, 35)
    for other in (tensor.t().contiguous().t(), moved):
        assert _bits(other) == _bits(tensor)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_projections_tell_how_far_tensors_are_apart(size: float, seed: int) -> None:
    tensor = _random([64, 100], torch.float32, seed)
    change = size * _random([64, 100], torch.float32, seed + 100)
    fingerprints = Fingerprints()
    near, far = (fingerprints.of(t).sizes for t in (tensor, tensor + change))
    distance = float((near[1:] - far[1:]).square().mean().sqrt())
    # Four projections: within a factor of a few.
    assert 0.15 < distance / float(change.norm()) < 4
    assert float(near[0]) == pytest.approx(float(tensor.norm()))
