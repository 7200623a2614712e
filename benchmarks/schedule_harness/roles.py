"""One rank of a disaggregated job, on emulated stages and on a small GPT."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.message import Message
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.schedules import Costs, Schedule, generate, simulate
from megatron_ext.transport.base import Expected
from megatron_ext.transport.native_transport import NativeTransport

from .stage import MESSAGE_SHAPE

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Case", "Measured", "Trained", "measure_steps", "measure_training"]

_WARM_UP = 2
"""Steps that do not count."""
_BACKWARD = 2.0
"""Of a stage, in forwards."""


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
        """True if a layer is computed again in its backward."""
        return self.activations == ("ship" if self.way == "fbd" else "recompute")

    def computed(self, message: float = 0.0) -> float:
        """Return the simulated step in forwards of a stage; a message takes `message` of them."""
        options = {"activations": self.activations} if self.way == "fbd" else {}
        schedule = generate(self.way, self.num_processes, self.num_microbatches, **options)
        share = schedule.pp / schedule.num_stages
        again = 0.5 if self.way == "1f1b" and self.checkpoints else 0.0  # of either gradient
        costs = _RoleCosts(1.0, 1.0 + again, 1.0 + again, latency=share * message, tp=self.tp)
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


@dataclass
class _Pace:
    """Makes ops take their time by sleeping for what is left of it.

    What the host does in an op is part of its time, as on a GPU, whose kernels hide it. Sleeps end
    late, and something is left to do after the last one. So each op aims at an earlier end, by as
    much as those of its kind were late so far, on the median.
    """

    _over_s: float = 0.0
    """When the op that runs is over, as far as it has spent its time."""
    _earlier_s: float = 0.0
    """By how much earlier it aims to end."""
    _late_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind: how late each op would have ended with its own end as its aim."""

    @contextmanager
    def op(self, kind: str) -> Iterator[None]:
        """Take what runs inside as one op."""
        late_s = self._late_s.setdefault(kind, [])
        self._earlier_s = statistics.median(late_s) if late_s else 0.0
        self._over_s = time.perf_counter()
        yield
        late_s.append(time.perf_counter() - self._over_s + self._earlier_s)

    def spend(self, seconds: float) -> None:
        """Take the time of an op, or of a part of it."""
        self._over_s += seconds
        time.sleep(max(0.0, self._over_s - self._earlier_s - time.perf_counter()))


class _Sleeping(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: _Pace, seconds: float) -> torch.Tensor:
        ctx.pace, ctx.seconds = pace, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.pace.spend(ctx.seconds)
        return gradient.clone(), None, None


class _Layer(torch.nn.Module):
    def __init__(self, pace: _Pace, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.pace, self.forward_s, self.backward_s = pace, forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pace.spend(self.forward_s)
        return _Sleeping.apply(x, self.pace, self.backward_s)


class _Stage(torch.nn.Module):
    """A stage of one layer with one weight, as Megatron's schedules take it."""

    def __init__(self, config: Any, layer: _Layer, *, checkpoints: bool) -> None:
        super().__init__()
        self.config, self.vp_stage, self.model_type = config, None, None
        self.weight = torch.nn.Parameter(torch.zeros(MESSAGE_SHAPE[-1]))
        self.input: torch.Tensor | None = None
        # Shipped layers are looked for in blocks; this one has nothing else of a real one.
        self.block = TransformerBlock.__new__(TransformerBlock)
        torch.nn.Module.__init__(self.block)
        self.block.layers = torch.nn.ModuleList([layer])
        self.checkpoints = checkpoints

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        x = torch.zeros(MESSAGE_SHAPE) if self.input is None else self.input
        [layer] = self.block.layers
        if not self.checkpoints:
            return layer(x + self.weight)

        def computed(hidden: torch.Tensor, _mask: None, context: None) -> tuple[Any, None]:
            return layer(hidden), context

        output, _ = random.checkpoint(computed, False, x + self.weight, None, None)
        return output


def _forward_step(_data: Iterator[Any] | None, stage: _Stage) -> tuple[Any, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        return output.sum(), torch.tensor(1, dtype=torch.int), {}

    return stage(), loss


class Measured(NamedTuple):
    """Measurements of one rank."""

    steps: list[tuple[float, float]]
    """When each step began and ended, by the clock of the machine."""
    messages: list[float]
    """When this rank sent, or had, each message that ranks 0 and 1 tried before."""


def measure_steps(case: Case, forward_s: float, steps: int) -> Measured:
    """Run steps as one rank."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    run, store, forward_cost = _join(case)

    def meet(where: str) -> None:
        if store.add(where, 1) == case.num_processes:
            store.set(f"{where}: all are here", "")
        store.wait([f"{where}: all are here"])

    messages = _try_messages(store) if case.num_processes > 1 else []
    config = TransformerConfig(
        num_layers=8,
        hidden_size=MESSAGE_SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
    )
    config.timers = None
    pace = _Pace()
    # What an op does beside its sleep is part of its time: `_Pace` has to see both ends of it.
    for name in ("forward", "backward"):
        original = getattr(StageCompute, name)

        def paced(*args: Any, name: str = name, original: Any = original, **keywords: Any) -> Any:
            with pace.op(name):
                return original(*args, **keywords)

        setattr(StageCompute, name, paced)
    layer = _Layer(pace, forward_cost * forward_s, _BACKWARD * forward_s)
    stage = _Stage(config, layer, checkpoints=case.checkpoints)
    times = []
    for number in range(_WARM_UP + steps):
        meet(f"step {number}")
        begin_s = time.perf_counter()
        run(
            forward_step_func=_forward_step,
            data_iterator=None,
            model=[stage],
            num_microbatches=case.num_microbatches,
            seq_length=MESSAGE_SHAPE[0],
            micro_batch_size=MESSAGE_SHAPE[1],
            forward_only=False,
        )
        times.append((begin_s, time.perf_counter()))
    meet("the end")
    return Measured(times[_WARM_UP:], messages)


def _try_messages(store: Store, count: int = 25) -> list[float]:
    """Send messages of a stage's size from rank 0 to rank 1, now and then as in a step.

    Returns:
        When each was about to be sent, or was here; nothing on other ranks.
    """
    rank = int(os.environ["RANK"])
    if rank > 1:
        return []
    wire = NativeTransport(store, rank, [1 - rank], run_id="messages", wire="shm")
    keys = [Message("F", 1, microbatch) for microbatch in range(count)]
    wire.begin([Expected(0, key, MESSAGE_SHAPE, torch.float32) for key in keys if rank], 8)
    times = []
    for key in keys:
        if rank:
            wire.recv(0, key, 60.0)
            times.append(time.perf_counter())
        else:
            time.sleep(10e-3)  # caches grow cold between two messages of a step
            times.append(time.perf_counter())
            wire.isend(torch.zeros(MESSAGE_SHAPE), 1, key)
    wire.flush(60.0)
    wire.close()
    return times


def _join(case: Case) -> tuple[Callable[..., Any], Store, float]:
    """Join the job; return what runs a step, what all ranks share, and what a forward costs."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_ext.config.active import Active, Pipeline, activate_configuration
    from megatron_ext.config.pipeline_config import Disaggregation, PipelineConfig

    if case.way == "1f1b":
        from megatron_ext.runtime.entry import forward_backward

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp)
        config = PipelineConfig(schedule="1f1b", transport="shm")
        pipeline = Pipeline(config, case.pp, case.num_microbatches)
        activate_configuration(Active(config, pipeline))
        return forward_backward, dist.distributed_c10d._get_default_store(), 1.0

    from megatron_ext.disaggregation import step, worlds
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.disaggregation.ranks import RankMap

    job = Job(RankMap(1, case.pp, 1), int(os.environ["RANK"]), case.activations, 60.0)
    config = PipelineConfig(disaggregation=Disaggregation(activations=case.activations))
    activate_configuration(Active(config, job=job))
    worlds.join("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp)
    run = functools.partial(step.forward_backward, None)  # nothing is evaluated here
    return run, worlds.shared_store(), float(case.tp) if job.role == "forward" else 1.0


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
    from megatron.core import parallel_state

    from megatron_ext import devices
    from megatron_ext.disaggregation import step
    from megatron_ext.disaggregation.job import current
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
