"""A sample's cost as a function of its length.

Attention is quadratic in the length, and everything else is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from megatron_ext.errors import ScheduleError


@dataclass(frozen=True)
class LengthCost:
    """The cost of a sample with L tokens: `linear * L + quadratic * L^2`, in any unit.

    Raises:
        ScheduleError: A coefficient is negative, or both are 0.
    """

    linear: float
    """Factor of L: projections and the feed-forward network."""
    quadratic: float
    """Factor of L^2: attention."""

    def __post_init__(self) -> None:
        """Check the coefficients."""
        if min(self.linear, self.quadratic) < 0 or not self.linear + self.quadratic > 0:
            raise ScheduleError(
                f"a sample of L tokens cannot cost {self.linear:g} * L + {self.quadratic:g} * L^2; "
                "use non-negative coefficients, at least one positive, for example 1,0.0001"
            )

    def attention_share(self, length: int) -> float:
        """Return attention's share of a sample's cost, between 0 and 1."""
        return self.quadratic * length / (self.linear + self.quadratic * length)

    @classmethod
    def parse(cls, text: str) -> LengthCost:
        """Parse `A,B`, for example `1,0.0001`.

        Raises:
            ScheduleError: The text is not two valid numbers.
        """
        try:
            linear, quadratic = map(float, text.split(","))
        except ValueError:
            raise ScheduleError(
                f"the cost of a length must be two numbers A,B, for A*L + B*L^2, for example "
                f"1,0.0001; got {text!r}"
            ) from None
        return cls(linear, quadratic)

    @classmethod
    def of_model(
        cls,
        hidden_size: int,
        ffn_hidden_size: int | None = None,
        *,
        gated: bool = False,
        query_width: int | None = None,
        key_width: int | None = None,
    ) -> LengthCost:
        """Return the floating-point operations in one layer's forward pass with causal attention.

        Count two operations per weight and token for the query and output projections, keys and
        values, and the feed-forward network's matrices. Count two operations per product in Q K^T
        and in A V; the causal mask removes half of them. With the defaults, this is
        24 h^2 L + 2 h L^2: the count in Narayanan et al. 2021 (arXiv 2104.04473, appendix), with
        half of its attention. A backward pass takes twice as many operations, so the ratio is the
        same.

        Args:
            hidden_size: h, the model width.
            ffn_hidden_size: Width of the feed-forward network or, for mixtures of experts, the
                total width of the experts that process a token. If None, 4h.
            gated: Whether the feed-forward network has a third matrix, as in SwiGLU.
            query_width: Number of heads times head width. If None, h.
            key_width: Number of key-value groups times head width. If None, the query width.

        Raises:
            ScheduleError: A width is not positive.
        """
        if hidden_size < 1:
            raise ScheduleError(
                f"a model of width {hidden_size} has no cost; use 1 or more"
            )
        query_width = query_width or hidden_size
        key_width = key_width or query_width
        # A gated network has two up-projections and one down-projection.
        num_projections = 3 if gated else 2
        ffn = num_projections * (ffn_hidden_size or 4 * hidden_size)
        weights = hidden_size * (2 * query_width + 2 * key_width + ffn)
        return cls(2.0 * weights, 2.0 * query_width)

    def of_length(self, length: int) -> float:
        """Return the cost of one sample with `length` tokens."""
        return self.linear * length + self.quadratic * length * length

    def of_pack(self, lengths: Sequence[int]) -> float:
        """Return the cost of a micro-batch whose samples do not attend to each other."""
        # Sum exactly, so that the cost does not depend on the order of the samples.
        return fsum(map(self.of_length, lengths))
