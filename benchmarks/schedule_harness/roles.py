"""Disaggregated jobs on emulated stages and on a small GPT, one rank of each."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.schedules import Costs, Schedule, generate, simulate

from .stage import oversleep_s

__all__ = ["Case", "Trained", "measure_steps", "measure_training"]

COSTS = Costs(1.0, 1.0, 1.0)
_RECOMPUTED = Costs(1.0, 1.5, 1.5)
"""The backward contains another forward."""
_SHAPE = (64, 1, 256)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    way: str
    """fbd or 1f1b."""
    pp: int
    num_microbatches: int
    tp: int = 1
    """Tensor-parallel ranks that one forward rank stands in for."""
    activations: str = "recompute"
    """Of fbd: what backward ranks start from. Of 1f1b: keep, or recompute in full."""

    @property
    def num_processes(self) -> int:
        """Processes that are started; tensor-parallel ranks of a stage are one here."""
        return 2 * self.pp if self.way == "fbd" else self.pp

    @property
    def num_devices(self) -> int:
        """Devices that it stands for."""
        return (self.tp + 1) * self.pp if self.way == "fbd" else self.tp * self.pp

    @property
    def checkpoints(self) -> bool:
        """Whether a layer is computed again in its backward."""
        return self.activations == ("ship" if self.way == "fbd" else "recompute")

    def schedule(self) -> Schedule:
        """Return its table."""
        options = {"activations": self.activations} if self.way == "fbd" else {}
        return generate(self.way, self.num_processes, self.num_microbatches, **options)

    def computed(self) -> float:
        """Return the simulated step in forwards of a stage."""
        schedule = self.schedule()
        share = schedule.pp / schedule.num_stages
        costs: Costs = _RoleCosts(tp=self.tp)
        if self.way == "1f1b" and self.checkpoints:
            costs = _RECOMPUTED
        return simulate(schedule, costs).makespan / share


@dataclass(frozen=True)
class _RoleCosts(Costs):
    """Costs where a forward rank does the work of several."""

    tp: int = 1

    def durations(self, schedule: Schedule) -> dict[Any, list[float]]:
        found = super().durations(schedule)
        if schedule.disaggregated:
            found["F"] = [self.tp * time for time in found["F"]]
        return found


class _Sleeping(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class _SleepingLayer(torch.nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        late_s = oversleep_s()
        self.seconds = max(0.0, forward_s - late_s), max(0.0, backward_s - late_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds[0])
        return _Sleeping.apply(x, self.seconds[1])


class _Block(TransformerBlock):  # type: ignore[misc]
    """Where shipped layers are looked for."""

    def __init__(self, layer: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)  # nothing of a real block
        self.layers = torch.nn.ModuleList([layer])


class SleepingStage(torch.nn.Module):
    """A stage of one layer with one weight, as Megatron's schedules take it."""

    def __init__(
        self, config: Any, forward_s: float, backward_s: float, *, checkpoints: bool
    ) -> None:
        super().__init__()
        self.config, self.vp_stage, self.model_type = config, None, None
        self.weight = torch.nn.Parameter(torch.zeros(_SHAPE[-1]))
        self.input: torch.Tensor | None = None
        self.block = _Block(_SleepingLayer(forward_s, backward_s))
        self.checkpoints = checkpoints

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Take what the stage before sent."""
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        """Return the stage's output."""
        x = torch.zeros(_SHAPE) if self.input is None else self.input
        [layer] = self.block.layers
        if not self.checkpoints:
            return layer(x + self.weight)

        def computed(hidden: torch.Tensor, _mask: None, context: None) -> tuple[Any, None]:
            return layer(hidden), context

        output, _ = random.checkpoint(computed, False, x + self.weight, None, None)
        return output


def _forward_step(_data: Iterator[Any] | None, stage: SleepingStage) -> tuple[Any, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        return output.sum(), torch.tensor(1, dtype=torch.int), {}

    return stage(), loss


def measure_steps(case: Case, forward_s: float, steps: int) -> list[tuple[float, float]]:
    """Return when each step of this rank began and ended."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    run, barrier, forward_cost = _prepare(case)
    config = TransformerConfig(
        num_layers=8,
        hidden_size=_SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    config.timers = None
    stage = SleepingStage(
        config,
        forward_cost * forward_s,
        COSTS.backward * forward_s,
        checkpoints=case.checkpoints,
    )
    times = []
    for _ in range(steps + 1):
        barrier()
        begin_s = time.perf_counter()
        run(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=[stage],
            num_microbatches=case.num_microbatches,
            seq_length=_SHAPE[0],
            micro_batch_size=_SHAPE[1],
            forward_only=False,
        )
        times.append((begin_s, time.perf_counter()))
    barrier()
    return times[1:]


def _prepare(case: Case) -> tuple[Callable[..., Any], Callable[[], object], float]:
    """Join the job; return what runs a step, what waits for all ranks, and what a forward costs."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if case.way == "1f1b":
        from megatron_ext.schedules.choice import Choice, use
        from megatron_ext.schedules.runtime.entry import forward_backward

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp)
        use(Choice("1f1b", case.pp, case.num_microbatches, transport="shm"))
        return forward_backward, dist.barrier, 1.0

    from megatron_ext.disaggregation import job as disaggregation
    from megatron_ext.disaggregation import step, worlds
    from megatron_ext.disaggregation.ranks import RankMap

    job = disaggregation.Job(
        RankMap(1, case.pp, 1), int(os.environ["RANK"]), case.activations, 60.0
    )
    disaggregation.use(job)
    worlds.join(Namespace(distributed_backend="gloo"))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp)
    rounds = iter(range(10**6))

    def everyone() -> None:
        store, key = worlds.shared_store(), f"round {next(rounds)}"
        if store.add(key, 1) == case.num_processes:
            store.set(f"{key} begins", "")
        store.wait([f"{key} begins"])

    def run(**call: Any) -> None:
        step.forward_backward(_no_evaluation, **call)

    return run, everyone, float(case.tp) if job.role == "forward" else 1.0


def _no_evaluation(**_call: Any) -> list[Any]:
    raise AssertionError("nothing is evaluated here")


@dataclass(frozen=True)
class Trained:
    """What one process of a real training needed."""

    role: str
    stage: int
    peak_mib: float
    """Resident memory above that before the first step."""
    weights_ms: float
    """For each step, what new weights cost: a forward rank from the news of them until they are
    here, a backward rank until it goes on."""
    step_ms: float


def measure_training(flags: list[str]) -> Trained:
    """Train as one rank and return what it needed."""
    from megatron.core import parallel_state

    from megatron_ext.disaggregation import step
    from megatron_ext.disaggregation.job import current
    from megatron_ext.training import main as trainer

    found: dict[str, float] = {}

    class Measured(trainer.Trainer):  # type: ignore[misc]
        def run(self) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak
            before = _status_mib("VmRSS")
            begin_s = time.perf_counter()
            super().run()
            found["step_ms"] = 1e3 * (time.perf_counter() - begin_s) / self.args.train_iters
            found["peak_mib"] = _status_mib("VmHWM") - before

    trainer.Trainer = Measured  # type: ignore[misc]
    trainer.main("gpt", flags)
    job = current()
    role = "both" if job is None else job.role
    weights_s = 0.0 if job is None else step.weights_s()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return Trained(role, stage, found["peak_mib"], 1e3 * weights_s, found["step_ms"])


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {name} in /proc/self/status")
