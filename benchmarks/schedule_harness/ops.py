"""The records of a rank and the nominal durations of its ops.

The parent of the ranks imports this too, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind

__all__ = ["HIDDEN", "SEQUENCE_LENGTH", "Op", "OpTimes", "Peaks", "ScaledTimes", "Sizes", "Step"]

SEQUENCE_LENGTH = 1024
"""Of the emulated model, in tokens: enough for slices of any cost."""


HIDDEN = 64
"""Width of the real model, which has a layer on each rank and one attention head."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    pp: int
    num_microbatches: int
    forward_s: float
    """Forward of one device share; both gradients take as long."""
    warmup: int
    steps: int
    timeout_s: float
    """For every wait."""


class Op(NamedTuple):
    """One executed action of one rank; times are of the machine's monotonic clock, in seconds."""

    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Time from its begin to its end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class OpTimes:
    """Durations of ops."""

    forward_s: float
    """Forward of one device share (1/pp of the model); both gradients take as long."""
    share: float
    """Part of a device share that one stage is."""
    slices: Mapping[Kind, Sequence[float]] = field(
        default_factory=lambda: dict.fromkeys(("F", "B", "I", "W"), (1.0,)),
        kw_only=True,
        hash=False,  # simulations are cached by the times of their ops
    )
    """By kind: the shares of a micro-batch's slices in its time."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the time of one op; in sliced tables, micro-batches are slices."""
        seconds = self.forward_s * self.share * (2 if kind == "B" else 1)
        return seconds * self.slices[kind][microbatch % len(self.slices[kind])]

    def of(self, op: Op) -> float:
        """Return the time that an op should have taken."""
        return self.seconds(op.kind, op.stage, op.microbatch)


@dataclass(frozen=True)
class ScaledTimes(OpTimes):
    """Ops take as long as their micro-batch costs."""

    scales: tuple[float, ...]
    """By place in the table: cost over that of the mean micro-batch."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the time of one op."""
        return super().seconds(kind, stage, microbatch) * self.scales[microbatch]


class Step(NamedTuple):
    """Records of one rank in one step."""

    begin_s: float
    end_s: float
    ops: list[Op]
    peak_live: float
    """Activations of stages, in whole micro-batches."""
    cpu_s: float = 0.0
    """Processor time of the rank."""
    host_waits: Mapping[str, int] = {}
    """By line: how often the host waited for its device."""


class Peaks(NamedTuple):
    """What one rank of the real model keeps at most."""

    saved_bytes: int
    """Tensors in graphs, and operands of weight gradients that W will compute."""
    keys_bytes: int
    """Keys, values and their gradients that layers keep between slices."""
    planned: float
    """Activations of the table, in micro-batches."""
    planned_keys: float
    """Keys and values of the table, in micro-batches."""
