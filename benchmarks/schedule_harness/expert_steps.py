"""Steps of stages with experts: systems, their measurement on a rank, and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.schedules import Costs, registered, simulate
from megatron_ext.schedules.table.placement import loop

from . import rank
from .metrics import peak, seconds_of
from .ops import Op, OpTimes
from .systems import Own, System

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules import Kind, Placement

    from .ops import Sizes, Step
    from .stage import Probe

__all__ = [
    "LAYERS",
    "ExpertFigures",
    "ExpertTimes",
    "OwnExperts",
    "Part",
    "StockExperts",
    "expert_figures",
    "expert_systems",
    "measure_experts",
]

LAYERS = 4
"""On 1/pp of the model."""
Part = Literal["attention", "dispatch", "experts", "combine"]


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


class _WithExperts(System):
    def probe(self, times: OpTimes, device: torch.device) -> Probe:
        """Return what records this rank: the parts of a layer take their time on the device."""
        from .experts import ExpertProbe

        return ExpertProbe(times, device)


@dataclass(frozen=True)
class OwnExperts(_WithExperts, Own):
    """A table of this package, whose stages have experts."""

    experts: int = 2
    """Ranks that exchange tokens."""

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Callable[[], None]:
        """Return the function that runs one step on this rank."""
        from . import experts

        assert isinstance(probe, experts.ExpertProbe)
        pipeline = self.pipeline(pp, num_microbatches, timeout_s)
        return experts.prepare_own(pipeline, probe, self.experts)


@dataclass(frozen=True)
class StockExperts(_WithExperts):
    """Megatron's interleaved schedule with two chunks, whose stages have experts."""

    overlaps: bool
    """True if its own overlap of their communication is on."""
    experts: int = 2
    """Ranks that exchange tokens."""

    def placement(self, pp: int) -> Placement:
        """Return where the stages are."""
        return loop(pp, 2)

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Callable[[], None]:
        """Return the function that runs one step on this rank."""
        from . import experts

        assert isinstance(probe, experts.ExpertProbe)
        return experts.prepare(
            self.placement(pp), num_microbatches, probe, self.experts, overlaps=self.overlaps
        )


def expert_systems(experts: int) -> list[System]:
    """Return Megatron's own overlap and all tables, each of them with pairs and without."""
    systems: list[System] = [
        StockExperts("megatron-core interleaved, overlap", overlaps=True, experts=experts),
        StockExperts("megatron-core interleaved", overlaps=False, experts=experts),
    ]
    for name, generator in registered().items():
        for variant in generator.variants:
            if name == "gpipe" or variant.get("overlap"):
                continue  # no backward before the last forward; the pass makes pairs itself
            label = " ".join([name, *(f"{key}={value}" for key, value in variant.items())])
            for pairs in (True, False):
                made: dict[str, Any] = {"transport": "torch", "pairs": pairs, "experts": experts}
                label_of = f"{label}, pairs" if pairs else label
                systems.append(OwnExperts(label_of, name, dict(variant), **made))
    return systems


def measure_experts(system: System, sizes: Sizes, shares: Sequence[float]) -> list[Step]:
    """Return what this rank recorded: a step of each share of all-to-all, then again.

    Args:
        system: What is measured.
        sizes: Its `steps` are the repetitions.
        shares: All-to-all over computation.
    """
    share = system.share(sizes.pp)
    draws = [ExpertTimes(sizes.forward_s, share, all_to_all=part) for part in shares]
    return rank.measure(system, sizes, draws * sizes.steps)


@dataclass(frozen=True)
class ExpertFigures:
    """The figures of one system for one share of all-to-all, in its shortest step.

    Other load on the machine only adds time.
    """

    seconds: list[float]
    """Of each step, from its first rank's begin until all devices are idle."""
    work_s: float
    """Computation of one rank."""
    bound_s: float | None
    """Simulated time of the table where a pair takes the larger of computation and all-to-all."""
    plain_s: float | None
    """The same of the table without pairs."""
    hidden: float | None
    """Part of what pairs could hide that they hid; None: there are no pairs."""
    of_all: float
    """Part of all all-to-all that ran behind computation."""
    activations: float
    """On the worst rank, in those of one micro-batch on 1/pp of the model."""

    @property
    def step_s(self) -> float:
        """The shortest step."""
        return min(self.seconds)


def expert_figures(
    steps: Sequence[Sequence[Step]],
    system: System,
    sizes: Sizes,
    shares: Sequence[float],
) -> dict[float, ExpertFigures]:
    """Return the figures of a measurement by share of all-to-all.

    Args:
        steps: By rank of the world, what `measure_experts` returned.
        system: What was measured.
        sizes: How much was run.
        shares: Those of the measurement.
    """
    found = {}
    for number, part in enumerate(shares):
        times = ExpertTimes(sizes.forward_s, system.share(sizes.pp), all_to_all=part)
        seconds, of_all, kept = [], [], 0.0
        hidden: list[float | None] = []
        for ranks in zip(*(row[number :: len(shares)] for row in steps), strict=True):
            seconds.append(seconds_of(ranks))
            saved = could = total = 0.0
            for step in ranks:
                kept = max(kept, times.share * peak(step.ops))
                total += sum(map(times.exchange_s, step.ops))
                for one, two in pairwise(step.ops):
                    if one.kind == "F" and one.begin_s == two.begin_s:
                        exchange_s = times.exchange_s(one) + times.exchange_s(two)
                        work_s = sum(times.seconds(op.kind, op.stage, 0) for op in (one, two))
                        saved += exchange_s + work_s - one.duration_s
                        could += min(exchange_s, work_s)
            hidden.append(saved / could if could else None)
            of_all.append(saved / total if total else 0.0)
        bound_s = plain_s = None
        if isinstance(system, Own):
            costs = Costs(1 + part, 1 + part, 1, all_to_all=part / (1 + part))
            bound_s, plain_s = (
                sizes.forward_s
                * simulate(each.pipeline(sizes.pp, sizes.num_microbatches).full, costs).makespan
                for each in (system, replace(system, pairs=False))
            )
        found[part] = ExpertFigures(
            seconds=seconds,
            work_s=3 * sizes.forward_s * sizes.num_microbatches,
            bound_s=bound_s,
            plain_s=plain_s,
            hidden=hidden[seconds.index(min(seconds))],
            of_all=of_all[seconds.index(min(seconds))],
            activations=kept,
        )
    return found
