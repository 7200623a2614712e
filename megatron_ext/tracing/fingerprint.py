"""The fingerprint of a tensor: a hash of its bits, and values that show how far two tensors differ.

Everything is computed on the tensor's device, without a copy to the host: a fingerprint is two
small tensors, which the caller reads when the device is otherwise idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import require_native

NUM_PROJECTIONS = 4
_COLUMNS = 16384
"""Columns of the matrix that a large tensor is read as. Sums over its rows are as fast as memory
only if a row is this long."""
_BLOCK_WORDS = {"cpu": 1 << 18, "other": 1 << 26}
"""Words that are hashed at a time: on a CPU as many as stay in its cache, elsewhere as many as its
memory can spare."""
_MIX = 0x9E3779B97F4A7C15 - (
    1 << 64
)  # an odd constant without a pattern, as a signed number


_NativeFingerprint = Callable[..., tuple[int, list[float]]]
"""The function of the native core; its arguments: `transport/_C.pyi`."""


def native_fingerprint() -> _NativeFingerprint | None:
    """Return the native core's function; None: torch's operators compute fingerprints."""
    try:
        function: _NativeFingerprint = require_native().fingerprint
    except (TransportError, AttributeError):
        return None  # it was not built, or from an earlier source tree
    return function


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, on its device."""

    bits: torch.Tensor
    """`[]`, int64. A sum of integers, which is the same on every device and for any number of
    threads."""
    sizes: torch.Tensor
    """`[1 + NUM_PROJECTIONS]`, float32: the norm, then projections onto fixed vectors. The
    norm of the difference of two tensors is about that of the difference of their projections."""

    @property
    def text(self) -> str:
        """The bits as text. Reading them waits for the device."""
        return bits_text(int(self.bits))


def bits_text(bits: int) -> str:
    """Return the bits of a fingerprint as text."""
    return f"{bits % 2**64:016x}"


class Fingerprints:
    """Computes fingerprints, and caches the constants that they need."""

    def __init__(self) -> None:
        self._native = native_fingerprint()
        """None: the native core is not installed."""
        self._factors: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor of any shape and floating-point dtype."""
        with torch.no_grad():
            matrix = _as_matrix(tensor.detach())
            is_native = (
                matrix.device.type == "cpu"
                and matrix.dtype == torch.float32
                and type(matrix) is torch.Tensor  # others may store it differently
            )
            if is_native and self._native is not None:
                return self._of_floats(matrix, self._native)
            # A program may train under autocast, which would round the products.
            with torch.autocast(matrix.device.type, enabled=False):
                return self._of_matrix(matrix)

    def _of_floats(
        self, matrix: torch.Tensor, native: _NativeFingerprint
    ) -> Fingerprint:
        """Return the fingerprint of a matrix of float32 in the host's memory.

        The native core reads the matrix once, and takes a fifth of the time of torch's operators.
        """
        shape = num_rows, num_columns = matrix.shape[0], matrix.shape[1]
        device = matrix.device
        row_factors = self._factors_of(num_rows, device)
        row_weights = self._weights_of("rows", num_rows, device)
        column_factors = self._factors_of(num_columns, device)
        column_weights = self._weights_of("columns", num_columns, device)
        bits, sizes = native(
            matrix.data_ptr(),
            shape,
            rows=(row_factors.data_ptr(), row_weights.data_ptr()),
            columns=(column_factors.data_ptr(), column_weights.data_ptr()),
        )
        return Fingerprint(
            torch.tensor(bits, dtype=torch.int64, device=device),
            torch.tensor(sizes, dtype=torch.float32, device=device),
        )

    def _of_matrix(self, matrix: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a matrix, of which each block is read from memory once."""
        device, num_rows = matrix.device, len(matrix)
        words = matrix.view(torch.int32)
        block_words = _BLOCK_WORDS.get(device.type, _BLOCK_WORDS["other"])
        block_rows = min(num_rows, max(1, block_words // words.shape[1]))
        sums = _Sums(words[:block_rows], matrix.shape[1])
        column_factors = self._factors_of(words.shape[1], device)
        mixing_factors = column_factors.to(torch.int32)
        row_terms = self._factors_of(num_rows, device).to(torch.int32)
        row_weights = self._weights_of("rows", num_rows, device)
        for first in range(0, num_rows, block_rows):
            rows = slice(first, first + block_rows)
            sums.add_words(words[rows], mixing_factors, row_terms[rows])
            sums.add_values(matrix[rows], row_weights[:, rows])
        bits = (sums.words.to(torch.int64) * column_factors).sum()
        column_weights = self._weights_of("columns", matrix.shape[1], device)
        projections = (sums.values * column_weights).sum(1)
        norm = torch.linalg.vector_norm(torch.stack(sums.norms))
        return Fingerprint(bits, torch.cat([norm.reshape(1), projections]))

    def _factors_of(self, count: int, device: torch.device) -> torch.Tensor:
        """Return `[count]` odd 64-bit numbers."""
        key = count, device
        if key not in self._factors:
            numbers = (
                torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX
            )
            self._factors[key] = (numbers ^ (numbers >> 29)) | 1
        return self._factors[key]

    def _weights_of(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """Return `[NUM_PROJECTIONS, count]` values of either sign, whose mean square is 1.

        Their sizes differ, because as many signs of 1 as of -1 would add up to 0 and hide a
        difference that is the same in all rows. None is near 0, which would hide one in one row.
        """
        key = name, count, device
        if key not in self._weights:
            total = NUM_PROJECTIONS * count
            first = total if name == "rows" else 0
            numbers = (
                torch.arange(first, first + total, dtype=torch.int64, device=device)
                + 7919
            )
            numbers = numbers * _MIX
            numbers = (numbers ^ (numbers >> 31)) * _MIX
            signs = ((numbers >> 40) & 1) * 2 - 1
            fractions = ((numbers >> 41) & 0xFFFF) / 2**16
            weights = signs * (0.5 + fractions) / math.sqrt(13 / 12)
            self._weights[key] = weights.to(torch.float32).reshape(
                NUM_PROJECTIONS, count
            )
        return self._weights[key]


class _Sums:
    """Sums over the rows of a matrix, block by block."""

    def __init__(self, first_words: torch.Tensor, num_values: int) -> None:
        self.words = torch.zeros_like(first_words[0])
        """`[columns]`: of mixed words. They wrap around, because wider sums take several times as
        long."""
        self.values = torch.zeros(
            NUM_PROJECTIONS, num_values, device=first_words.device
        )
        """`[NUM_PROJECTIONS, num_values]`: of values with the weights of their rows."""
        self.norms: list[torch.Tensor] = []
        """Of blocks."""
        self._mixed = torch.empty_like(first_words)
        self._shifted = torch.empty_like(first_words)

    def add_words(
        self, words: torch.Tensor, factors: torch.Tensor, terms: torch.Tensor
    ) -> None:
        """Add the words of a block, mixed with the factors of columns and the terms of rows.

        Sums of the words themselves would lose what changes all of them alike: changed signs add
        2 ** 31 to each word, which is 0 for an even number of words. So each word is first mixed in
        a way that is not linear and depends on its place.
        """
        # Memory that is used again is in the cache.
        mixed, shifted = self._mixed[: len(words)], self._shifted[: len(words)]
        torch.addcmul(terms[:, None], words, factors, out=mixed)
        torch.bitwise_right_shift(mixed, 16, out=shifted)
        mixed ^= shifted
        self.words += mixed.sum(0, dtype=torch.int32)

    def add_values(self, block: torch.Tensor, row_weights: torch.Tensor) -> None:
        """Add the values of a block.

        Each projection has weights of its own by row and by column, so that they are independent
        whether a difference is in one row or column or the same in all of them.
        """
        values = block.to(torch.float32)
        self.norms.append(torch.linalg.vector_norm(values))
        # A product of two matrices could be rounded, to TF32, so each projection reads the values.
        for sums, weights in zip(self.values, row_weights, strict=True):
            sums.addmv_(values.t(), weights)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a matrix whose rows are whole 32-bit words, padded with zeros."""
    # A vector keeps its stride, such as 0 after an expansion, through `reshape`.
    flat = tensor.reshape(-1).contiguous()
    count = flat.numel()
    num_columns = _COLUMNS
    while num_columns > 16 and count % num_columns:
        num_columns //= 2
    if count % num_columns or count == 0:
        padding = num_columns - count % num_columns
        flat = torch.cat([flat, flat.new_zeros(padding)])
    elif flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()  # a view as 32-bit words must start at a word boundary
    return flat.reshape(-1, num_columns)
