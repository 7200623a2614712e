"""Lengths of samples, drawn from what is published about training data.

General fine-tuning data: the mixture of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, table
7), which gives the share and the mean length of six kinds of examples. How lengths spread around
these means is not published: log-normal with sigma 0.8, an assumption. Long instructions: LongAlign
(Bai et al. 2024, arXiv 2401.18058) has examples of 8k to 64k tokens, LongMIT (Chen et al. 2024,
https://github.com/WowCZ/LongMIT/issues/3) nearly uniform ones of 4k to 128k. How many of them are
among general data is an assumption too: 3 %, uniform over that range.

The parent of the ranks imports this, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from megatron_ext.schedules.search.length_balance import LengthCost

__all__ = ["WORKLOADS", "Workload"]

_KINDS = (
    (52.66, 974.0),  # general English
    (14.89, 753.3),  # code
    (3.01, 520.5),  # multilingual
    (8.14, 297.8),  # exam-like
    (21.19, 661.6),  # reasoning and tools
    (0.11, 38135.6),  # long context
)
"""Percent of the examples and their mean length in tokens."""

_SIGMA = 0.8
_LONG_SHARE = 0.03

_LLAMA_3_8B = LengthCost.of_model(4096, 14336, gated=True, query_width=4096, key_width=1024)


@dataclass(frozen=True)
class Workload:
    """Where lengths come from, and what they cost: a layer of Llama 3 8B."""

    what: str
    max_tokens: int
    """Of a micro-batch; longer samples are cut."""
    long_range: tuple[int, int] | None = None
    """Lengths of long instructions, if there are any."""
    cost: LengthCost = _LLAMA_3_8B

    @property
    def attention(self) -> float:
        """Cost of attention at the greatest length, over the rest."""
        return self.cost.quadratic * self.max_tokens / self.cost.linear

    def batch(self, num_packs: int, seed: int) -> list[int]:
        """Return the lengths of one global batch: what fills so many packs in file order."""
        drawn = random.Random(seed)
        lengths: list[int] = []
        room = 0
        while True:
            length = self._length(drawn)
            if length > room:
                if not num_packs:
                    return lengths
                num_packs -= 1
                room = self.max_tokens
            lengths.append(length)
            room -= length

    def _length(self, drawn: random.Random) -> int:
        if self.long_range is not None and drawn.random() < _LONG_SHARE:
            return min(self.max_tokens, drawn.randint(*self.long_range))
        [(_, mean)] = drawn.choices(_KINDS, [share for share, _ in _KINDS])
        length = round(drawn.lognormvariate(log(mean) - _SIGMA**2 / 2, _SIGMA))
        return min(self.max_tokens, max(1, length))


WORKLOADS = {
    "sft": Workload("general fine-tuning", 1 << 16),
    "long-64k": Workload("3 % of 8k to 64k tokens among them", 1 << 16, (1 << 13, 1 << 16)),
    "long-128k": Workload("3 % of 4k to 128k tokens among them", 1 << 17, (1 << 12, 1 << 17)),
}
