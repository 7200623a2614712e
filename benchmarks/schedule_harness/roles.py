"""One rank of a disaggregated job, on emulated stages and on a small GPT."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.config.active import Active, Pipeline, activate_configuration
from megatron_ext.config.pipeline_config import Disaggregation, PipelineConfig
from megatron_ext.disaggregation import step, worlds
from megatron_ext.disaggregation.job import Job, current
from megatron_ext.disaggregation.ranks import RankMap
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.schedules import Costs, Schedule, generate, simulate
from megatron_ext.schedules.table.placement import linear

from .megatron_core import make_config
from .ops import OpTimes
from .stage import MESSAGE_SHAPE, EmulatedStage, Probe
from .systems import System

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind, Placement

    from .ops import Sizes

__all__ = ["Case", "Trained", "measure_training"]


@dataclass(frozen=True)
class Case(System):
    """One way to run a pipeline, with or without roles."""

    schedule: str
    """fbd or 1f1b."""
    tp: int = 1
    """Tensor-parallel ranks that one forward rank stands in for."""
    activations: str = "recompute"
    """Of fbd: what backward ranks start from. Of 1f1b: keep, or recompute in full."""
    replicas: int = 1
    """Of the pipeline, of which one is run."""

    def num_processes(self, pp: int) -> int:
        """Return how many are started; tensor-parallel ranks of a stage are one here."""
        return 2 * pp if self.schedule == "fbd" else pp

    def num_devices(self, pp: int) -> int:
        """Return how many devices it stands for."""
        return self.replicas * pp * (self.tp + 1 if self.schedule == "fbd" else self.tp)

    @property
    def checkpoints(self) -> bool:
        """True if a layer is computed again in its backward."""
        return self.activations == ("ship" if self.schedule == "fbd" else "recompute")

    def computed(self, pp: int, num_microbatches: int) -> float:
        """Return the simulated step in forwards of a stage."""
        options = {"activations": self.activations} if self.schedule == "fbd" else {}
        table = generate(self.schedule, self.num_processes(pp), num_microbatches, **options)
        again = 0.5 if self.schedule == "1f1b" and self.checkpoints else 0.0  # of either gradient
        costs = _RoleCosts(1.0, 1.0 + again, 1.0 + again, tp=self.tp)
        return simulate(table, costs).makespan * table.num_stages / table.pp

    def placement(self, pp: int) -> Placement:
        """Return where the stages are, of either role."""
        return linear(pp)

    def times(self, sizes: Sizes) -> OpTimes:
        """Return how long the ops of this rank have to take."""
        place = RankMap(1, sizes.pp, 1).place(int(os.environ["RANK"]))
        merges = self.schedule == "fbd" and place.role == "forward"
        return _RoleTimes(sizes.forward_s, 1.0, self.tp if merges else 1)

    def join(self, pp: int, backend: str, timeout_s: float) -> None:
        """Join the job: both roles of it."""
        if self.schedule == "1f1b":
            super().join(pp, backend, timeout_s)
            return
        job = Job(RankMap(1, pp, 1), int(os.environ["RANK"]), self.activations, timeout_s)
        config = PipelineConfig(disaggregation=Disaggregation(activations=self.activations))
        activate_configuration(Active(config, job=job))
        worlds.join(backend)

    def probe(self, times: OpTimes, device: torch.device) -> Probe:
        """Return what records this rank, and meets the ranks of both roles."""
        return Probe(times) if self.schedule == "1f1b" else _RoleProbe(times)

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Callable[[], None]:
        """Return the function that runs one step on this rank."""
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
        if self.schedule == "1f1b":
            run = forward_backward
            settings = PipelineConfig(schedule="1f1b", transport="shm")
            activate_configuration(Active(settings, Pipeline(settings, pp, num_microbatches)))
        else:
            run = functools.partial(step.forward_backward, None)  # nothing is evaluated here
        # What an op does beside its sleep is part of its time: the probe has to see both ends.
        for kind, name in (("F", "forward"), ("B", "backward")):
            setattr(StageCompute, name, _timed(getattr(StageCompute, name), probe, kind))
        config = make_config(pp)
        config.num_layers, config.timers = 8, None
        stage = _Stage(config, probe, checkpoints=self.checkpoints)
        return lambda: run(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=[stage],
            num_microbatches=num_microbatches,
            seq_length=MESSAGE_SHAPE[0],
            micro_batch_size=MESSAGE_SHAPE[1],
            forward_only=False,
        )


@dataclass(frozen=True)
class _RoleTimes(OpTimes):
    """Times where a forward rank does the work of several."""

    tp: int

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the time of one op."""
        return super().seconds(kind, stage, microbatch) * (self.tp if kind == "F" else 1)


@dataclass(frozen=True)
class _RoleCosts(Costs):
    """The same for the simulator."""

    tp: int = 1

    def durations(self, schedule: Schedule) -> dict[Any, list[float]]:
        found = super().durations(schedule)
        if schedule.disaggregated:
            found["F"] = [self.tp * time for time in found["F"]]
        return found


@dataclass
class _RoleProbe(Probe):
    """Meets through the store of the job: torch.distributed joins ranks of one role only."""

    met: int = 0

    def meet(self) -> None:
        """Wait for the ranks of both roles."""
        store, self.met = worlds.shared_store(), self.met + 1
        where, job = f"benchmark/{self.met}", current()
        assert job is not None
        if store.add(where, 1) == job.ranks.num_ranks:
            store.set(f"{where}: all are here", "")
        store.wait([f"{where}: all are here"])


def _timed(method: Callable[..., Any], probe: Probe, kind: Kind) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(*args: Any, **keywords: Any) -> Any:
        with probe.op(kind, 0, 0):
            return method(*args, **keywords)

    return timed


class _Stage(torch.nn.Module):
    """An emulated stage in a block of one layer, where shipped layers are looked for."""

    def __init__(self, config: Any, probe: Probe, *, checkpoints: bool) -> None:
        super().__init__()
        self.config, self.vp_stage, self.model_type = config, None, None
        self.input: torch.Tensor | None = None
        self.block = TransformerBlock.__new__(TransformerBlock)  # nothing else of a real one
        torch.nn.Module.__init__(self.block)
        self.block.layers = torch.nn.ModuleList([EmulatedStage(probe)])
        self.first = torch.nn.Parameter(torch.zeros(MESSAGE_SHAPE))
        self.checkpoints = checkpoints

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        x = self.first if self.input is None else self.input
        [layer] = self.block.layers
        if not self.checkpoints:
            return layer(x)

        def computed(hidden: torch.Tensor, _mask: None, context: None) -> tuple[Any, None]:
            return layer(hidden), context

        return random.checkpoint(computed, False, x, None, None)[0]


def _forward_step(_data: Iterator[Any] | None, stage: _Stage) -> tuple[Any, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        return output.sum(), torch.tensor(1, dtype=torch.int), {}

    return stage(), loss


@dataclass(frozen=True)
class Trained:
    """Time and memory of one process of a real training."""

    role: str
    stage: int
    peak_mib: float
    """Resident memory above that before the first step."""
    weights_ms: float
    """For each step, what new weights cost: a forward rank from their announcement until they are
    here, a backward rank until it goes on."""
    step_ms: float


def measure_training(flags: list[str]) -> Trained:
    """Train as one rank and return what it needed."""
    from megatron_ext import devices
    from tests.ranks import train_here

    devices.current()  # before Megatron is imported
    from megatron.training import get_args, training

    found: dict[str, float] = {}
    train = training.train

    def status_mib(name: str) -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))

    @functools.wraps(train)
    def measured(*args: Any, **kwargs: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = status_mib("VmRSS")
        begin_s = time.perf_counter()
        result = train(*args, **kwargs)
        found["step_ms"] = 1e3 * (time.perf_counter() - begin_s) / get_args().train_iters
        found["peak_mib"] = status_mib("VmHWM") - before
        return result

    training.train = measured
    train_here("gpt", flags)
    job = current()
    role = "both" if job is None else job.role
    weights_s = 0.0 if job is None else step.weights_s()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return Trained(role, stage, found["peak_mib"], 1e3 * weights_s, found["step_ms"])
