"""The records of a rank and the nominal durations of its ops.

The parent of the ranks imports this too, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_ext.schedules import Kind

SEQUENCE_LENGTH = 1024
"""Of the emulated model, in tokens: enough for slices of any cost."""
LAYERS = 4
"""Of a model with experts, on 1/pp of it."""
Part = Literal["attention", "dispatch", "experts", "combine"]
"""Of such a layer."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    pp: int
    num_microbatches: int
    forward_s: float
    """Forward of one device share; both gradients take as long."""
    warmup: int
    steps: int
    timeout_s: float = 60.0
    """For every wait."""

    @property
    def work(self) -> int:
        """Undisturbed work of a rank, in forwards."""
        return 3 * self.num_microbatches

    @property
    def work_s(self) -> float:
        """The same in seconds."""
        return self.work * self.forward_s


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
        return super().seconds(kind, stage, microbatch) * self.scales[microbatch]


@dataclass(frozen=True)
class ExpertTimes(OpTimes):
    """How long each op computes, and how long the all-to-all of its layers takes."""

    all_to_all: float = field(default=0.0, kw_only=True)
    """All-to-all in a forward or an input gradient, over the computation there."""

    def part_s(self, part: Part, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the time of a part of one layer."""
        layer_s = self.seconds(kind, stage, microbatch) / (LAYERS * self.share)
        exchanges = part in ("dispatch", "combine")
        return layer_s / 2 * (self.all_to_all if exchanges else 1)

    def exchange_s(self, op: Op) -> float:
        """Return the time of all-to-all in an op."""
        if op.kind == "W":
            return 0.0
        return self.all_to_all * self.seconds("F", op.stage, op.microbatch)


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
