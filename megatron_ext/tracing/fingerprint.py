"""The fingerprint of a tensor: a hash of its bits, and values that show how far two tensors differ.

Everything is computed on the tensor's device, without a copy to the host: a fingerprint is two
small tensors, which the caller reads when the device is otherwise idle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NUM_PROJECTIONS = 4
_COLUMNS = 16384
"""Columns of the matrix that a large tensor is read as. Sums over its rows are as fast as memory
only if a row is this long."""
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd constant without a pattern, as a signed number


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, on its device."""

    bits: torch.Tensor
    """`[2]`, int64. Sums of integers, which are the same on every device and for any number of
    threads."""
    sizes: torch.Tensor
    """`[1 + NUM_PROJECTIONS]`, float32: the norm, then projections onto fixed signs. The norm of
    the difference of two tensors is about that of the difference of their projections."""

    @property
    def text(self) -> str:
        """The bits as text. Reading them waits for the device."""
        return bits_text(*self.bits.tolist())


def bits_text(by_row: int, by_column: int) -> str:
    """Return the two sums of a fingerprint as text."""
    return f"{by_row % 2**64:016x}{by_column % 2**64:016x}"


class Fingerprints:
    """Computes fingerprints, and caches the constants that they need."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._signs: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor of any shape and floating-point dtype."""
        with torch.no_grad():
            matrix = _as_matrix(tensor.detach())
            return Fingerprint(self._bits(matrix), self._sizes(matrix))

    def _bits(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return weighted sums of the sums of rows and of columns.

        Summing 32-bit words over a dimension takes a fifth of the time of a weighted sum over all
        of them. A changed element changes both results; elements that have been swapped change at
        least one.
        """
        words = matrix.view(torch.int32)
        hashes = []
        for dimension in (0, 1):
            sums = words.sum(dimension, dtype=torch.int32).to(torch.int64)
            hashes.append((sums * self._weights_of(len(sums), words.device)).sum())
        return torch.stack(hashes)

    def _sizes(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the norm and the projections.

        All projections have the same signs by row, so that the matrix is read once for them. Those
        by column make them independent, unless all of a difference is in one column.
        """
        values = matrix.to(torch.float32)
        num_rows, num_columns = values.shape
        [by_row] = self._signs_of(1, num_rows, values.device)
        by_column = self._signs_of(NUM_PROJECTIONS, num_columns, values.device)
        projections = by_column @ (by_row @ values)
        return torch.cat([torch.linalg.vector_norm(values).reshape(1), projections])

    def _weights_of(self, count: int, device: torch.device) -> torch.Tensor:
        """Return `[count]` odd 64-bit numbers."""
        key = count, device
        if key not in self._weights:
            numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX
            self._weights[key] = (numbers ^ (numbers >> 29)) | 1
        return self._weights[key]

    def _signs_of(self, num_vectors: int, count: int, device: torch.device) -> torch.Tensor:
        """Return `[num_vectors, count]` values of 1 and -1."""
        key = num_vectors, count, device
        if key not in self._signs:
            total = num_vectors * count
            numbers = torch.arange(total, dtype=torch.int64, device=device) + num_vectors * 7919
            numbers = numbers * _MIX
            numbers = (numbers ^ (numbers >> 31)) * _MIX
            signs = ((numbers >> 40) & 1) * 2 - 1
            self._signs[key] = signs.to(torch.float32).reshape(num_vectors, count)
        return self._signs[key]


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a matrix whose rows are whole 32-bit words, padded with zeros."""
    flat = tensor.reshape(-1)
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
