"""The fingerprint of a tensor: a hash of its bits, and values that show how far two tensors differ.

Everything is computed on the tensor's device, without a copy to the host: a fingerprint is two
small tensors, which the caller reads when the device is otherwise idle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

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


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, on its device."""

    bits: torch.Tensor
    """`[2]`, int64. Sums of integers, which are the same on every device and for any number of
    threads."""
    sizes: torch.Tensor
    """`[1 + NUM_PROJECTIONS]`, float32: the norm, then projections onto fixed vectors. The
    norm of the difference of two tensors is about that of the difference of their projections."""

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
        self._factors: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._weights: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of a tensor of any shape and floating-point dtype."""
        with torch.no_grad():
            matrix = _as_matrix(tensor.detach())
            return Fingerprint(self._bits(matrix), self._sizes(matrix))

    def _bits(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return weighted sums of the sums of rows and of columns, over mixed words.

        Sums of the words themselves would lose what changes all of them alike: changed signs add
        2 ** 31 to each word, which is 0 for an even number of words. So each word is first mixed in
        a way that is not linear and depends on its column. The sums wrap around, because wider
        ones take several times as long.
        """
        words = matrix.view(torch.int32)
        num_columns = words.shape[1]
        mixing_factors = self._factors_of(num_columns, words.device).to(torch.int32)
        block_words = _BLOCK_WORDS.get(words.device.type, _BLOCK_WORDS["other"])
        sums_of_columns = torch.zeros(
            num_columns, dtype=torch.int32, device=words.device
        )
        sums_of_rows = []
        for block in words.split(max(1, block_words // num_columns)):
            mixed = block * mixing_factors
            mixed ^= mixed >> 16
            sums_of_columns += mixed.sum(0, dtype=torch.int32)
            sums_of_rows.append(mixed.sum(1, dtype=torch.int32))
        hashes = []
        for sums in (sums_of_columns, torch.cat(sums_of_rows)):
            factors = self._factors_of(len(sums), words.device)
            hashes.append((sums.to(torch.int64) * factors).sum())
        return torch.stack(hashes)

    def _sizes(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the norm and the projections.

        Each projection has weights of its own by row and by column, so that they are independent
        whether a difference is in one row or column or the same in all of them.
        """
        values = matrix.to(torch.float32)
        num_rows, num_columns = values.shape
        by_row = self._weights_of("rows", num_rows, values.device)
        by_column = self._weights_of("columns", num_columns, values.device)
        sizes = [torch.linalg.vector_norm(values)]
        # A program may train under autocast, which would round the products. A product of two
        # matrices could be rounded too, to TF32, so each projection reads the values once.
        with torch.autocast(values.device.type, enabled=False):
            for row_weights, column_weights in zip(by_row, by_column, strict=True):
                sizes.append((row_weights @ values) @ column_weights)
        return torch.stack(sizes)

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
