"""Layouts of the planner, run as stages that sleep what their own layers cost by its forecast."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.incompatible import RULES
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layout_search import Layout, Question, forecast, search, stage_parts
from megatron_ext.planning.model_sizes import sizes_of_flags
from megatron_ext.schedules import Kind

from . import ranks
from .metrics import seconds_of
from .ops import OpTimes, Sizes
from .stage import Probe
from .systems import Own, Run

RANKS = 8
_MODEL = (
    "--num-layers 30 --hidden-size 2048 --num-attention-heads 16 --swiglu --vocab-size 128000 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408 "
    "--moe-layer-freq ([0]*6+[1]*24) --ffn-hidden-size 5632 --seq-length 4096"
)
"""Dense layers first, then those of experts, and a vocabulary that weighs several of them."""
_STEP_S = 1.0
"""About what a step takes."""
_MESSAGE_S = 250e-6
"""From the end of a sleep to the begin of the next one on another rank, over shared memory."""


def slowed() -> tuple[Question, float]:
    """Return what is planned, and how many times as slow as an H100 its stages sleep."""
    job = Question(
        model=sizes_of_flags(_MODEL.split(), "30 layers"),
        device=DEVICES["h100"],
        num_devices=RANKS,
        global_batch=16,
        sequence=4096,
        pair_rules=RULES["pairs"],
        fixed={"tp": 1, "cp": 1, "ep": 1, "recompute": frozenset()},
    )
    first = search(replace(job, fixed={**job.fixed, "pp": RANKS}), keep=1).plans[0]
    factor = _STEP_S / first.pipeline_s
    device = replace(job.device, message_s=_MESSAGE_S / factor, link_bytes=1e18)
    return replace(job, device=device), factor


def layouts(job: Question, pps: Sequence[int], batches: Sequence[int]) -> Iterator[Layout]:
    """Yield every layout of these numbers of ranks and sizes of micro-batches, with its cut."""
    for pp in pps:
        for micro_batch in batches:
            for chunks in (1, 2, 3, 4):
                fixed = {**job.fixed, "pp": pp, "micro_batch": micro_batch, "vp": chunks}
                found = search(replace(job, fixed=fixed), keep=1000).plans
                yield from found
                if chunks == 1:
                    plan = forecast(job, found[0].sizes, "gpipe", 1)
                    assert plan is not None
                    yield plan


@dataclass(frozen=True)
class _CutTimes(OpTimes):
    """Times of a cut."""

    stages: tuple[dict[Kind, float], ...] = ()
    """By stage: seconds of each kind of action."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        return self.stages[stage][kind]


@dataclass(frozen=True)
class _Planned(Own):
    """A layout on all ranks: as many pipelines beside each other as it has replicas."""

    ranks: int = 0
    """Of one pipeline."""
    own_times: OpTimes | None = None

    def times(self, sizes: Sizes) -> OpTimes:
        assert self.own_times is not None
        return self.own_times

    def prepare(self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float) -> Run:
        return super().prepare(self.ranks, num_microbatches, probe, timeout_s)


def measured_s(plan: Layout, factor: float, steps: int) -> float:
    """Return the median time of a step of a layout's pipeline, in seconds of the H100.

    Args:
        plan: What is run.
        factor: How many times as slow as an H100 its stages sleep.
        steps: How many are measured, after another.
    """
    stages: list[dict[Kind, float]] = []
    for part in stage_parts(plan):
        forward_s, input_s, weight_s = (
            factor * each for each in (part.forward, part.input, part.weight)
        )
        stages.append({"F": forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s})
    sizes = plan.sizes
    chunks = {"chunks": plan.chunks} if plan.schedule == "interleaved" else {}
    system = _Planned(
        plan.schedule, plan.schedule, chunks, transport="shm", ranks=sizes.pp,
        own_times=_CutTimes(0.0, 1.0, stages=tuple(stages)),
    )  # fmt: skip
    longest = factor * plan.pipeline_s / sizes.num_microbatches
    run = Sizes(RANKS, sizes.num_microbatches, longest, warmup=1, steps=steps)
    by_step = zip(*ranks.run(ranks.measure, system, run), strict=True)
    return statistics.median(map(seconds_of, by_step)) / factor
