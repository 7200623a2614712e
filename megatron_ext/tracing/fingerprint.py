"""Tensor fingerprints: a hash of the bits, and values that show how much two tensors differ.

Fingerprints are computed on the tensor's device, without copying the tensor to the host. A
fingerprint consists of two small tensors, which the caller reads when the device is idle anyway.
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
"""Columns of the matrix that a large tensor is viewed as. Sums over the rows reach memory speed
only if rows are this long."""
_BLOCK_WORDS = {"cpu": 1 << 18, "other": 1 << 26}
"""Number of words that are hashed at a time: on a CPU, they fit in the cache; on other devices,
this limits temporary memory."""
# An odd constant with irregular bits, 2^64 divided by the golden ratio, as a signed 64-bit number.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


_NativeFingerprint = Callable[..., tuple[int, list[float]]]
"""The native core's function; `transport/_C.pyi` describes its arguments."""


def native_fingerprint() -> _NativeFingerprint | None:
    """Return the native core's function; None if torch's operators compute fingerprints."""
    try:
        function: _NativeFingerprint = require_native().fingerprint
    except (TransportError, AttributeError):
        return None  # the core was not built, or was built from older sources
    return function


class Fingerprint(NamedTuple):
    """A tensor's fingerprint, on the tensor's device."""

    bits: torch.Tensor
    """`[]`, int64. A sum of integers, so it does not depend on the device or the number of
    threads."""
    sizes: torch.Tensor
    """`[1 + NUM_PROJECTIONS]`, float32: the norm, then projections onto fixed vectors. The
    difference between two tensors' projections estimates the norm of the tensors' difference."""

    @property
    def text(self) -> str:
        """The bits as text. Reading them waits for the device."""
        return bits_text(int(self.bits))


def bits_text(bits: int) -> str:
    """Return the bits of a fingerprint as text."""
    # torch's sums are signed, so map negative ones to 2^63 and above.
    return f"{bits % 2**64:016x}"


class Fingerprints:
    """Computes fingerprints and caches the constants that they need."""

    def __init__(self) -> None:
        self._native = native_fingerprint()
        """None if the native core is not installed."""
        self._factors: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor of any shape and floating-point dtype."""
        with torch.no_grad():
            matrix = _as_matrix(tensor.detach())
            is_native = (
                matrix.device.type == "cpu"
                and matrix.dtype == torch.float32
                and type(matrix) is torch.Tensor  # subclasses may store it differently
            )
            if is_native and self._native is not None:
                return self._of_floats(matrix, self._native)
            # Under autocast, the products would be rounded to a lower precision.
            with torch.autocast(matrix.device.type, enabled=False):
                return self._of_matrix(matrix)

    def _of_floats(
        self, matrix: torch.Tensor, native: _NativeFingerprint
    ) -> Fingerprint:
        """Return the fingerprint of a float32 matrix in host memory.

        The native core reads the matrix once and is five times as fast as torch's operators.
        """
        device = matrix.device
        num_rows, num_columns = matrix.shape
        row_factors = self._factors_of(num_rows, device)
        row_weights = self._weights_of("rows", num_rows, device)
        column_factors = self._factors_of(num_columns, device)
        column_weights = self._weights_of("columns", num_columns, device)
        row_addresses = row_factors.data_ptr(), row_weights.data_ptr()
        column_addresses = column_factors.data_ptr(), column_weights.data_ptr()
        hash_value, norm_and_projections = native(
            matrix.data_ptr(),
            (num_rows, num_columns),
            rows=row_addresses,
            columns=column_addresses,
        )
        bits = torch.tensor(hash_value, dtype=torch.int64, device=device)
        sizes = torch.tensor(
            norm_and_projections,
            dtype=torch.float32,
            device=device,
        )
        return Fingerprint(bits, sizes)

    def _of_matrix(self, matrix: torch.Tensor) -> Fingerprint:
        """Return a matrix's fingerprint, reading each block from memory once."""
        device = matrix.device
        num_rows, num_columns = matrix.shape
        words = matrix.view(torch.int32)
        # In a 16-bit dtype, a word holds two values.
        words_per_row = words.shape[1]
        block_words = _BLOCK_WORDS.get(device.type, _BLOCK_WORDS["other"])
        block_rows = max(1, block_words // words_per_row)
        block_rows = min(num_rows, block_rows)
        sums = _Sums(words[:block_rows], num_columns)
        column_factors = self._factors_of(words_per_row, device)
        mixing_factors = column_factors.to(torch.int32)
        row_factors = self._factors_of(num_rows, device)
        row_terms = row_factors.to(torch.int32)
        row_weights = self._weights_of("rows", num_rows, device)
        # Compute both sums over each block while it is in the cache.
        for first in range(0, num_rows, block_rows):
            rows = slice(first, first + block_rows)
            sums.add_words(words[rows], mixing_factors, row_terms[rows])
            sums.add_values(matrix[rows], row_weights[:, rows])
        # Weight each column's sum differently, so that swapping columns changes the hash.
        column_sums = sums.words.to(torch.int64)
        bits = (column_sums * column_factors).sum()
        column_weights = self._weights_of("columns", num_columns, device)
        projections = (sums.values * column_weights).sum(1)
        block_norms = torch.stack(sums.norms)
        norm = torch.linalg.vector_norm(block_norms)
        sizes = torch.cat([norm.reshape(1), projections])
        return Fingerprint(bits, sizes)

    def _factors_of(self, count: int, device: torch.device) -> torch.Tensor:
        """Return `[count]` odd 64-bit numbers."""
        key = count, device
        if key not in self._factors:
            numbers = torch.arange(
                1,
                count + 1,
                dtype=torch.int64,
                device=device,
            )
            numbers = numbers * _MIX
            mixed = numbers ^ (numbers >> 29)
            # Factors are odd, because multiplying by an even number would lose the highest bit.
            self._factors[key] = mixed | 1
        return self._factors[key]

    def _weights_of(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """Return `[NUM_PROJECTIONS, count]` values of either sign with a mean square of 1.

        Their magnitudes vary, because equal numbers of 1 and -1 would cancel and hide a difference
        that is the same in all rows. No value is near 0, which would hide a difference in a single
        row.
        """
        key = name, count, device
        if key not in self._weights:
            # Row and column weights use separate ranges of numbers, so that they are independent.
            total = NUM_PROJECTIONS * count
            first = total if name == "rows" else 0
            numbers = torch.arange(
                first,
                first + total,
                dtype=torch.int64,
                device=device,
            )
            # Reuse the name, because each of these vectors may be as large as a weight.
            numbers = (numbers + 7919) * _MIX
            numbers = (numbers ^ (numbers >> 31)) * _MIX
            # Bit 40 decides the sign, and the 16 bits above it the magnitude.
            signs = ((numbers >> 40) & 1) * 2 - 1
            # Magnitudes are uniform in [0.5, 1.5), whose mean square is 13/12.
            magnitudes = 0.5 + ((numbers >> 41) & 0xFFFF) / 2**16
            weights = signs * magnitudes / math.sqrt(13 / 12)
            weights = weights.to(torch.float32)
            self._weights[key] = weights.reshape(NUM_PROJECTIONS, count)
        return self._weights[key]


class _Sums:
    """Sums over a matrix's rows, block by block."""

    def __init__(self, first_words: torch.Tensor, num_values: int) -> None:
        self.words = torch.zeros_like(first_words[0])
        """`[columns]`, int32: sums of mixed words, which wrap around because wider sums take
        several times as long."""
        self.values = torch.zeros(
            NUM_PROJECTIONS,
            num_values,
            device=first_words.device,
        )
        """`[NUM_PROJECTIONS, num_values]`: sums of values, weighted by row."""
        self.norms: list[torch.Tensor] = []
        """The norm of each block."""
        self._mixed = torch.empty_like(first_words)
        self._shifted = torch.empty_like(first_words)

    def add_words(
        self,
        words: torch.Tensor,
        factors: torch.Tensor,
        terms: torch.Tensor,
    ) -> None:
        """Add a block's words, mixed with the column factors and the row terms.

        A sum of the words themselves would miss a change that is the same in all of them: flipping
        the signs adds 2 ** 31 to each word, which adds up to 0 over an even number of words. So
        each word is first mixed by a nonlinear function that depends on its position.
        """
        # Reuse the buffers, because they are in the cache.
        num_rows = len(words)
        mixed = self._mixed[:num_rows]
        shifted = self._shifted[:num_rows]
        torch.addcmul(terms[:, None], words, factors, out=mixed)
        torch.bitwise_right_shift(mixed, 16, out=shifted)
        mixed ^= shifted
        self.words += mixed.sum(0, dtype=torch.int32)

    def add_values(self, block: torch.Tensor, row_weights: torch.Tensor) -> None:
        """Add a block's values.

        Each projection has different weights for rows and for columns, so projections are
        independent, regardless of whether a difference is in one row or column or the same in all
        of them.
        """
        values = block.to(torch.float32)
        self.norms.append(torch.linalg.vector_norm(values))
        # A matrix-matrix product could use TF32, so compute each projection as a matrix-vector
        # product.
        for sums, weights in zip(self.values, row_weights, strict=True):
            sums.addmv_(values.t(), weights)


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a matrix whose rows are whole 32-bit words, padded with zeros."""
    # `reshape` preserves a vector's stride, such as 0 after an expansion.
    flat = tensor.reshape(-1).contiguous()
    count = flat.numel()
    # Choose the longest row that needs no padding, because padding copies the tensor.
    num_columns = _COLUMNS
    while num_columns > 16 and count % num_columns:
        num_columns //= 2
    num_in_last_row = count % num_columns
    if num_in_last_row or count == 0:
        padding = flat.new_zeros(num_columns - num_in_last_row)
        flat = torch.cat([flat, padding])
    # A view as 32-bit words must start at a word boundary.
    elif flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()
    return flat.reshape(-1, num_columns)
