"""Fingerprints of tensors: every change of bits shows, and about how large it is."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.tracing import fingerprint
from megatron_ext.tracing.fingerprint import Fingerprints

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def _bits(tensor: torch.Tensor) -> int:
    return int(Fingerprints().of(tensor).bits)


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
    words = other.view(-1).view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    )
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


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


def _with_half_the_features_negated(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    other[..., ::2].neg_()
    return other


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def _sixteenth(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 16


def _with_rows_in_reverse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


def _with_rows_shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0)


_CHANGES = (
    _negated,
    _with_half_the_features_negated,
    _doubled,
    _sixteenth,
    _with_rows_in_reverse,
    _with_rows_shifted,
)


def _many_rows() -> AbstractContextManager[object]:
    """Read a small tensor as a matrix of many rows, as a large one is."""
    return mock.patch.object(fingerprint, "_COLUMNS", 64)


_POWERS = st.integers(0, 9).map(lambda exponent: 1 << exponent)


@settings(deadline=None)
@given(
    st.one_of(_POWERS, st.integers(2, 300)).filter(lambda count: count > 1),
    st.one_of(_POWERS, st.integers(1, 300)),
    st.sampled_from(_TYPES),
    st.sampled_from(_CHANGES),
    st.integers(0, 1000),
)
def test_a_change_of_all_elements_alike_changes_them(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    change: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
) -> None:
    tensor = _random([num_rows, num_columns], dtype, seed)
    other = change(tensor)
    with _many_rows():
        assert (_bits(other) == _bits(tensor)) == torch.equal(other, tensor)


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ([256, 256], _negated),
        ([768, 1024], _negated),
        ([256, 256], _with_half_the_features_negated),
        ([512, 16384], _doubled),
        ([128, 16384], _sixteenth),
    ],
)
def test_so_does_one_of_a_large_tensor(
    shape: list[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = (
        _random(shape, torch.float32, 3).abs() + 1
    )  # without zeros, which a factor leaves
    assert _bits(change(tensor)) != _bits(tensor)


def test_zeros_and_bytes_of_ones_have_other_bits() -> None:
    """Words whose bits are all 1 are NaN, as in memory that was filled to be deterministic."""
    zeros = torch.zeros(4, 32, dtype=torch.int32)
    assert _bits((zeros - 1).view(torch.float32)) != _bits(zeros.view(torch.float32))


def test_they_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _random([96, 256], torch.bfloat16, 1)
    bits = _bits(tensor)
    for num_words in (1, 1000, 5000, 1 << 20):
        monkeypatch.setitem(fingerprint._BLOCK_WORDS, "cpu", num_words)
        assert _bits(tensor) == bits


def test_they_depend_neither_on_strides_nor_on_the_place_in_memory() -> None:
    tensor = _random([6, 35], torch.bfloat16, 1)
    moved = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].reshape(6, 35)
    for other in (tensor.t().contiguous().t(), moved):
        assert _bits(other) == _bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_do_not_depend_on_the_strides_of_a_vector(dtype: torch.dtype) -> None:
    vector = _random([64], dtype, 1)
    for strided in (vector[::2], vector[:1].expand(32)):
        assert _bits(strided) == _bits(strided.clone())


_LENGTHS = st.one_of(_POWERS, st.integers(0, 3000))


@pytest.mark.skipif(
    fingerprint.native_fingerprint() is None
    and not os.environ.get("MEGATRON_EXT_REQUIRE_NATIVE"),
    reason="the native core is not installed",
)
@settings(deadline=None)
@given(st.integers(1, 40), _LENGTHS, st.integers(0, 1000))
def test_the_native_core_computes_what_torch_computes(
    num_rows: int, num_columns: int, seed: int
) -> None:
    assert fingerprint.native_fingerprint() is not None
    tensor = _random([num_rows, num_columns], torch.float32, seed)
    native = Fingerprints().of(tensor)
    with mock.patch.object(fingerprint, "native_fingerprint", return_value=None):
        by_torch = Fingerprints().of(tensor)
    assert native.bits == by_torch.bits
    assert native.bits.dtype == by_torch.bits.dtype
    tolerance = 1e-5 * float(tensor.norm())
    torch.testing.assert_close(native.sizes, by_torch.sizes, rtol=0, atol=tolerance)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_norm_of_a_tensor_with_a_value_that_is_not_finite(value: float) -> None:
    tensor = torch.ones(4, 32)
    tensor[2, 3] = value
    assert not math.isfinite(Fingerprints().of(tensor).sizes[0])


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


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors, as their projections tell it."""
    fingerprints = Fingerprints()
    near, far = (fingerprints.of(tensor).sizes for tensor in (first, second))
    return float((near[1:] - far[1:]).square().mean().sqrt())


def _row(num_columns: int, seed: int) -> torch.Tensor:
    return _random([1, num_columns], torch.float32, seed)


def _ones(num_columns: int, _seed: int) -> torch.Tensor:
    return torch.ones(1, num_columns)


def _alternating(num_columns: int, _seed: int) -> torch.Tensor:
    return torch.tensor([1.0, -1.0]).repeat(num_columns)[None, :num_columns]


@settings(deadline=None)
@given(
    st.one_of(_POWERS, st.integers(1, 300)),
    st.one_of(_POWERS, st.integers(1, 300)),
    st.sampled_from([_row, _ones, _alternating]),
    st.integers(0, 1000),
)
def test_projections_see_a_bias_that_is_the_same_in_all_rows(
    num_rows: int, num_columns: int, bias: Callable[[int, int], torch.Tensor], seed: int
) -> None:
    tensor = _random([num_rows, num_columns], torch.float32, seed)
    change = bias(num_columns, seed).expand(num_rows, num_columns)
    with _many_rows():
        distance = _distance(tensor, tensor + change)
    assert 0.02 < distance / float(change.norm()) < 5


@pytest.mark.parametrize("num_rows", [2, 4, 8, 16, 24, 256])
def test_projections_see_a_bias_in_rows_of_the_matrix(num_rows: int) -> None:
    """Rows of 16384 elements are rows of the matrix as which a tensor is read."""
    tensor = _random([num_rows, 16384], torch.float32, 1)
    change = _row(16384, 2).expand(num_rows, 16384)
    assert 0.15 < _distance(tensor, tensor + change) / float(change.norm()) < 4


def test_projections_are_not_rounded_under_autocast() -> None:
    tensor = _random([64, 64], torch.float32, 1)
    sizes = Fingerprints().of(tensor).sizes
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Fingerprints().of(tensor).sizes, sizes)
