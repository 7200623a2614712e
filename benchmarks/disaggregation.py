"""Forward/backward disaggregation: predicted and measured step times, and memory.

    python benchmarks/disaggregation.py [--quick]

Sleeping stages run under the disaggregated executor and under this package's 1F1B, both over shared
memory, and are compared with a simulation in which messages take no time. The goal is to deviate by
at most 3 %. After that, a GPT is trained in each of these ways to measure memory.

Prints the tables in `docs/disaggregation.md`. Takes about 10 minutes.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.distributed.elastic.utils.store import barrier

from benchmarks.harness import ranks
from benchmarks.harness.command import machine, markdown, options
from benchmarks.harness.megatron_core import batches, forward_step, make_config
from benchmarks.harness.metrics import seconds_of
from benchmarks.harness.ops import OpTimes, Sizes
from benchmarks.harness.stage import MESSAGE_SHAPE, Chunk, Probe
from benchmarks.harness.systems import Own, Run, System, own
from megatron_ext.config import active
from megatron_ext.config.active import Active, activate_configuration
from megatron_ext.config.pipeline_config import (
    Activations,
    Disaggregation,
    PipelineConfig,
)
from megatron_ext.config.roles import Job, RankMap
from megatron_ext.devices import host
from megatron_ext.disaggregation import step, worlds
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.schedules import Costs, Kind, Placement, Schedule, generate, simulate
from megatron_ext.schedules.table.placement import linear
from tests.ranks import run_ranks

_ACTIVATIONS: tuple[Activations, ...] = ("recompute", "ship")
_BAR, _FORWARD_S, _NUM_MICROBATCHES = 0.03, 0.04, 8
_STEP_HEAD = ("", "TP", "PP", "computed", "measured", "time", "devices")
_TRAINING_HEAD = ("8 layers, hidden size 256, PP 2", "MiB, first stage, backward rank",
                  "forward rank")  # fmt: skip
_MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --train-iters 4 "
    "--eval-iters 0 --eval-interval 4 --lr 1e-4 --min-lr 1e-5 --mock-data "
    "--tokenizer-type NullTokenizer "
    "--vocab-size 1000 --num-workers 0 --log-interval 100 --hidden-dropout 0 --attention-dropout 0 "
    "--pipeline-model-parallel-size 2 --global-batch-size "
)
_RECOMPUTE = (
    " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
_FBD = " --forward-backward-disaggregating"


@dataclass(frozen=True)
class Disaggregated(System):
    """A pipeline of forward ranks and backward ranks."""

    activations: Activations
    """How backward ranks get their activations."""
    tp: int = 1
    """Number of tensor-parallel ranks that one forward rank replaces. Here, a single backward rank
    emulates all of a stage's."""

    def placement(self, pp: int) -> Placement:
        return linear(pp)

    def times(self, sizes: Sizes) -> OpTimes:
        role = RankMap(1, sizes.pp, 1).place(int(os.environ["RANK"])).role
        return _RoleTimes(sizes.forward_s, 1.0, self.tp if role == "forward" else 1)

    def join(self, pp: int, backend: str, timeout_s: float) -> None:
        job = Job(
            RankMap(1, pp, 1), int(os.environ["RANK"]), self.activations, timeout_s
        )
        config = PipelineConfig(
            disaggregation=Disaggregation(activations=self.activations)
        )
        activate_configuration(Active(config, job=job))
        worlds.join(backend)

    def probe(self, times: OpTimes, device: torch.device) -> Probe:
        return _RoleProbe(times)

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Run:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
        # An op's time includes its work besides the sleep, so the probe has to see both
        # ends.
        StageCompute.forward = _timed(StageCompute.forward, probe, "F")  # type: ignore[method-assign]
        StageCompute.backward = _timed(StageCompute.backward, probe, "B")  # type: ignore[method-assign]
        config = make_config(pp)
        config.num_layers, config.timers = 8, None
        stage = _Stage(probe, config, checkpoints=self.activations == "ship")
        return lambda: step.forward_backward(
            # Megatron's schedule is only used for evaluation,
            # which does not happen here.
            forward_backward,
            forward_step_func=forward_step,
            data_iterator=batches(probe),
            model=[stage],
            num_microbatches=num_microbatches,
            seq_length=MESSAGE_SHAPE[0],
            micro_batch_size=MESSAGE_SHAPE[1],
            forward_only=False,
        )


@dataclass(frozen=True)
class _RoleTimes(OpTimes):
    """Times if one forward rank does the work of several."""

    tp: int

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        return super().seconds(kind, stage, microbatch) * (
            self.tp if kind == "F" else 1
        )


@dataclass(frozen=True)
class _RoleCosts(Costs):
    """The same costs, for the simulator."""

    tp: int = 1

    def durations(self, schedule: Schedule) -> dict[Any, list[float]]:
        durations = super().durations(schedule)
        if schedule.disaggregated:
            durations["F"] = [self.tp * time for time in durations["F"]]
        return durations


@dataclass
class _RoleProbe(Probe):
    """Meets through the job's store: torch.distributed only connects ranks of the same role."""

    met: int = 0

    def meet(self) -> None:
        job, self.met = active.job(), self.met + 1
        assert job is not None
        barrier(
            worlds.roles_in_force().store, job.ranks.num_ranks, f"benchmark/{self.met}"
        )


def _timed(method: Callable[..., Any], probe: Probe, kind: Kind) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **keywords: Any) -> Any:
        with probe.op(kind, 0, 0):
            return method(*args, **keywords)

    return timed


class _Stage(Chunk):
    """An emulated stage inside a one-layer block, which is where shipped layers are expected."""

    def __init__(self, probe: Probe, config: Any, *, checkpoints: bool) -> None:
        super().__init__(probe, config, None, 0)
        self.block = TransformerBlock.__new__(
            TransformerBlock
        )  # nothing else that a real block has
        torch.nn.Module.__init__(self.block)
        self.block.layers = torch.nn.ModuleList([self.stage])
        self.checkpoints = checkpoints

    def forward(self, data: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        x = self._given(data).requires_grad_()
        [layer] = self.block.layers

        def computed(
            hidden: torch.Tensor, _mask: None, context: None
        ) -> tuple[Any, None]:
            return layer(hidden), context

        output: torch.Tensor
        if self.checkpoints:
            output = random.checkpoint(computed, False, x, None, None)[0]
        else:
            output = layer(x)
        return output


@dataclass(frozen=True)
class Trained:
    """One process's memory in a real training run."""

    role: str
    stage: int
    peak_mib: float
    """Growth of resident memory, starting just before the first step."""


def measure_training(flags: list[str]) -> Trained:
    """Train as one rank and return how much memory that took."""
    from megatron_ext import devices
    from tests.ranks import train_here

    devices.current()  # must precede the import of Megatron
    from megatron.training import training

    peak_mib = 0.0
    train = training.train

    @functools.wraps(train)
    def measured(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak_mib
        host.reset_peak_rss()
        before = host.rss_bytes()
        result = train(*args, **kwargs)
        peak_mib = (host.peak_rss_bytes() - before) / 2**20
        return result

    training.train = measured
    train_here("gpt", flags)
    job = active.job()
    role = "both" if job is None else job.role
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return Trained(role, stage, peak_mib)


class Row(NamedTuple):
    """One row of the first table. Step times are in units of a stage's forward."""

    name: str
    tp: int
    pp: int
    computed: float
    measured: float
    devices: float
    """Number of devices, relative to 1F1B with the same number of stages."""


WAYS = {
    "1F1B": (2, "32"),
    "1F1B, full recomputation": (2, "32" + _RECOMPUTE),
    "recompute": (4, "32" + _FBD),
    "ship": (4, "32" + _FBD + _RECOMPUTE + " --fbd-activations ship"),
}
"""Rows of the second table -> number of ranks, and flags."""


def cases() -> list[Own | Disaggregated]:
    """Return the systems in the first table. 1F1B is the reference."""
    return [
        own("1F1B", "1f1b"),
        Disaggregated("plain, recompute", "recompute"),
        Disaggregated("plain, ship", "ship"),
        *(
            Disaggregated(f"merged, {way}", way, tp)
            for tp in (2, 4)
            for way in _ACTIVATIONS
        ),
    ]


def measure_row(system: Own | Disaggregated, pp: int, steps: int) -> Row:
    """Measure one row of the first table."""
    sizes = Sizes(pp, _NUM_MICROBATCHES, _FORWARD_S, 2, steps)
    if isinstance(system, Own):
        tp = 1
        roles = 1
        table = system.pipeline(pp, _NUM_MICROBATCHES).full
    else:
        tp = system.tp
        roles = 2
        table = generate(
            "fbd", 2 * pp, _NUM_MICROBATCHES, activations=system.activations
        )
    makespan = simulate(table, _RoleCosts(tp=tp)).makespan
    by_rank = ranks.run(ranks.measure, system, sizes, replicas=roles, repeats=tp)
    seconds = map(seconds_of, zip(*by_rank, strict=True))
    units = statistics.median(step_s / _FORWARD_S for step_s in seconds)
    print(f"{system.name}, pp {pp}, tp {tp}: {units:.2f}", file=sys.stderr)
    devices = 1.0 if roles == 1 else (tp + 1) / tp
    return Row(
        system.name, tp, pp, makespan * table.num_stages / table.pp, units, devices
    )


def steps_as_markdown(rows: list[Row]) -> str:
    """Return the first table. Figures are relative to 1F1B with the same number of stages."""
    reference = {row.pp: row for row in rows if row.name == "1F1B"}
    lines = []
    off = []
    for row in rows:
        than = reference[row.pp]
        deviation = row.measured / row.computed - 1
        off.append((deviation, f"{row.name}, TP {row.tp}, PP {row.pp}"))
        lines.append((
            row.name,
            str(row.tp) if row.name.startswith("merged") else "any",
            str(row.pp),
            f"{row.computed:g}",
            f"{row.measured:.2f}",
            f"{row.measured / than.measured:.2f}",
            f"{row.devices:g}",
        ))  # fmt: skip
    worst, where = max(off, key=lambda entry: abs(entry[0]))
    return (
        f"{markdown(_STEP_HEAD, lines)}\n\n{sum(abs(entry) > _BAR for entry, _ in off)} of "
        f"{len(rows)} rows are off by more than {100 * _BAR:g} %; the worst: {100 * worst:+.1f} % "
        f"({where})."
    )


def training_as_markdown(trained_by_way: dict[str, list[Trained]]) -> str:
    """Return the second table."""

    def most_mib(processes: list[Trained], *roles: str) -> str:
        values = [process.peak_mib for process in processes if process.role in roles]
        return f"{max(values):.0f}" if values else ""

    rows = []
    for name, processes in trained_by_way.items():
        first_stage = [process for process in processes if process.stage == 0]
        backward_mib = most_mib(first_stage, "both", "backward")
        rows.append((name, backward_mib, most_mib(first_stage, "forward")))
    return markdown(_TRAINING_HEAD, rows)


def main() -> None:
    """Measure and print both tables."""
    args = options(__doc__, "one stage, one step, no training").parse_args()
    ranks.clean_up_when_terminated()
    pps, steps = ((1,), 1) if args.quick else ((4,), 3)
    rows = [measure_row(system, pp, steps) for pp in pps for system in cases()]
    print(
        f"<!-- step: begin -->\n{_NUM_MICROBATCHES} micro-batches. Forwards of a stage, "
        f"{1e3 * _FORWARD_S:g} ms each; the median of {steps} steps; {machine()}. Time and devices "
        "are relative to 1F1B with the same stages.\n\n"
        f"{steps_as_markdown(rows)}\n<!-- step: end -->",
        flush=True,
    )
    trained: dict[str, list[Trained]] = {}
    for name, (num_ranks, flags) in {} if args.quick else WAYS.items():
        words = (_MODEL + flags).split()
        trained[name] = run_ranks(num_ranks, measure_training, words, timeout_s=300)
        print(f"trained: {name}", file=sys.stderr)
    if trained:
        print(
            f"<!-- training: begin -->\n{training_as_markdown(trained)}\n<!-- training: end -->"
        )


if __name__ == "__main__":
    from benchmarks import (
        disaggregation,  # ranks look up what they run by its module's name
    )

    disaggregation.main()
