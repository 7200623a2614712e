"""The emulated stage, and the probe that records its ops and live activations.

A stage computes `y = A(x + z) + weights(x)` and sleeps for the duration of the forward. `A` is the
identity, and its backward sleeps for the duration of the input gradient. The weights are one of
Megatron's linear layers, real but tiny, so splitting the backward works as with real models.
Computing the weight gradient sleeps for its duration. An op sleeps until its nominal end, so its
duration includes autograd's work, as on a GPU, where kernels hide the host's work. Ops still end
late, because sleeps do (by 0.2 ms with four processes on two cores), and because autograd has work
to do after the last sleep. The probe therefore tracks how late each kind of op ends and shortens
the sleep by that much, so half of the ops end late and half end early.

The parameter `z` gives the first stage an input gradient to compute, like an embedding would. `x +
z` is the stage's activation, which both `A` and the linear layer save.

If messages take time, the sender stamps each one with the machine's monotonic clock, in the bits of
its first two elements, which stages ignore, and the receiver does not see it until later. This
package's executor polls the transport, so a transport hides messages until they are due (`own.py`).
With other runtimes, the stage itself waits.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.runtime.split import SplitBackward
from megatron_ext.schedules import Kind, Schedule

from .ops import SEQUENCE_LENGTH, NoisyTimes, Op, OpTimes

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

MESSAGE_SHAPE = (SEQUENCE_LENGTH, 1, 16)
"""Sequence, batch, hidden: 64 KiB in fp32."""
_STEP_S = 10e-6
"""Amount by which the estimated lateness of ops is corrected after each op."""


def stamp(tensor: torch.Tensor) -> None:
    """Write the current time into a tensor, in place."""
    tensor.data.view(-1)[:2].view(torch.int64)[0] = time.perf_counter_ns()


def sent_s(tensor: torch.Tensor) -> float:
    """Return the time at which a tensor was stamped."""
    return 1e-9 * int(tensor.detach().view(-1)[:2].view(torch.int64))


def oversleep_s(num_samples: int = 25) -> float:
    """Return how late a sleep ends, as the median over a few millisecond sleeps."""
    found_s = []
    for _ in range(num_samples):
        begin_s = time.perf_counter()
        time.sleep(1e-3)
        found_s.append(time.perf_counter() - begin_s - 1e-3)
    return statistics.median(found_s)


@dataclass
class Probe:
    """Records one rank's ops and counts the activations that its stages keep alive."""

    times: OpTimes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where stages keep their tensors."""
    records: list[tuple[int, Kind, int, float, float]] = field(default_factory=list)
    """Ops as plain tuples, which are converted to `Op` when no op is waiting."""
    peak_live: float = 0
    """Maximum number of stage activations alive at once, in whole micro-batches."""
    cpu_s: float = 0.0
    """Processor time that this thread spent in ops."""
    splitting: bool = False
    """Whether the backward step that started last defers its weight gradient."""
    current: tuple[int, int] = (0, 0)
    """(stage, micro-batch) of the running op."""
    waits: bool = False
    """Whether stages wait for late messages themselves, because none of our transports hides
    them."""
    _late_s: float = field(default_factory=oversleep_s)
    """How late a sleep ends."""
    _over_s: float = 0.0
    """When the running op ends, given the time it has spent so far."""
    _kind: Kind = "F"
    """Kind of the running op."""
    _later_s: dict[Kind, float] = field(default_factory=dict)
    """By kind: how late its ops end, as a median."""
    _alive: list[tuple[StorageWeakRef, float]] = field(default_factory=list)

    def meet(self) -> None:
        """Wait for all ranks, immediately before a step."""
        gc.collect()
        torch.distributed.barrier()

    def finish(self) -> int:
        """End a step, and return how often the host waited for its device during the step."""
        return 0

    def op(
        self, kind: Kind, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Record the work inside this context as one op."""
        return _RecordedOp(self, kind, stage, microbatch)

    def begin(self, kind: Kind, current: tuple[int, int], begin_s: float) -> None:
        """Record which op is running and since when."""
        self.current, self._kind, self._over_s = current, kind, begin_s

    def correct(self) -> None:
        """Update how late ops of this kind end. Call this just before an op ends."""
        late_s = self._later_s.setdefault(self._kind, self._late_s)
        is_late = time.perf_counter() > self._over_s
        self._later_s[self._kind] = late_s + (_STEP_S if is_late else -_STEP_S)

    def spend(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Spend the time of an op or of a part of it, without using the processor."""
        self._over_s += self.times.seconds(kind, stage, microbatch)
        late_s = self._later_s.get(self._kind, self._late_s)
        time.sleep(max(0.0, self._over_s - late_s - time.perf_counter()))

    def wait_for(self, kind: Kind, tensor: torch.Tensor) -> None:
        """Sleep until the op's input is due. The sleep does not count as part of the op."""
        seen_s = sent_s(tensor) + self.times.latency_s(kind, *self.current)
        time.sleep(max(0.0, seen_s - self._late_s - time.perf_counter()))
        self._over_s = max(self._over_s, time.perf_counter())

    def keep(self, activation: torch.Tensor) -> None:
        """Count a new activation as alive until no graph and no stash holds its storage."""
        self._alive = [alive for alive in self._alive if not alive[0].expired()]
        share = len(activation) / MESSAGE_SHAPE[0]
        self._alive.append((StorageWeakRef(activation.untyped_storage()), share))
        self.peak_live = max(self.peak_live, sum(share for _, share in self._alive))

    def chunk(
        self, config: TransformerConfig, vp_stage: int | None, number: int
    ) -> Chunk:
        """Return a stage's chunk."""
        return Chunk(self, config, vp_stage, number)

    def record_plans(
        self, split: SplitBackward | None = None, table: Schedule | None = None
    ) -> None:
        """Record what the chunks' plans run, from now on. Does nothing in this class.

        Args:
            split: Splits backwards.
            table: The table, which shows which backwards are split.
        """

    def take(self) -> tuple[list[Op], float]:
        """Return the ops and the peak since the last call."""
        recorded = [Op(*record) for record in self.records], self.peak_live
        self.records, self.peak_live = [], 0
        return recorded


class _RecordedOp:
    """Records the body of a `with` statement as one op.

    The probe does its work between the two time stamps, where the op's time hides it, so the time
    between two ops belongs entirely to the runtime. For the same reason, this is not a generator.
    """

    __slots__ = ("_begin_cpu_s", "_begin_s", "_name", "_probe")

    def __init__(self, probe: Probe, kind: Kind, stage: int, microbatch: int) -> None:
        self._begin_s = time.perf_counter()
        self._probe, self._name = probe, (stage, kind, microbatch)

    def __enter__(self) -> None:
        self._begin_cpu_s = time.thread_time()
        stage, kind, microbatch = self._name
        self._probe.begin(kind, (stage, microbatch), self._begin_s)

    def __exit__(self, *_: object) -> None:
        probe = self._probe
        probe.correct()
        probe.cpu_s += time.thread_time() - self._begin_cpu_s
        probe.records.append((*self._name, self._begin_s, time.perf_counter()))


class Passing(torch.autograd.Function):
    """The identity, which keeps its input until its gradient has passed through a function."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, passes: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.passes = passes
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.passes(gradient), None


def weight_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply Megatron's linear to an activation `[s, b, h]`, with a weight of one column.

    Use only one feature, so the product takes microseconds, and detach it, because the stage
    computes the input gradient.
    """
    product: torch.Tensor = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
        input=x.detach()[..., :1],
        weight=weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=torch.distributed.group.WORLD,  # unused, but avoids Megatron's groups
    )
    return product


class EmulatedStage(torch.nn.Module):
    """One stage of the emulated model."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe = probe
        hidden = MESSAGE_SHAPE[-1]
        self.z = torch.nn.Parameter(torch.zeros(hidden, device=probe.device))
        self.weight = torch.nn.Parameter(torch.zeros(hidden, 1, device=probe.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stage's output."""
        op = self.probe.current
        if self.probe.waits and op[0] > 0:
            self.probe.wait_for("F", x)
        activation = x + self.z
        self.probe.keep(activation)
        # Run this before the linear, and therefore after it in a backward, so
        # ops end with their sleep.
        output: torch.Tensor = Passing.apply(
            activation, partial(self._input_gradient, op)
        )
        from_weights = weight_product(activation, self.weight)
        output = output + Passing.apply(
            from_weights, partial(self._weight_gradient, op)
        )
        self.probe.spend("F", *op)
        if self.probe.waits:
            stamp(output)
        return output

    def _input_gradient(
        self, op: tuple[int, int], gradient: torch.Tensor
    ) -> torch.Tensor:
        """Spend the time of `A`'s backward."""
        times = self.probe.times
        if (
            self.probe.waits
            and isinstance(times, NoisyTimes)
            and op[0] < len(times.rank_of) - 1
        ):
            self.probe.current = op
            self.probe.wait_for("B", gradient)
        self.probe.spend("I", *op)
        if self.probe.waits:
            gradient = gradient.clone()
            stamp(gradient)
        return gradient

    def _weight_gradient(
        self, op: tuple[int, int], gradient: torch.Tensor
    ) -> torch.Tensor:
        """Spend the time of the linear's weight gradient just before it, unless W does."""
        if not self.probe.splitting:
            self.probe.spend("W", *op)
        return gradient


class Chunk(torch.nn.Module):
    """A stage in the form of a model chunk for Megatron's schedules."""

    runs_in_slices = True
    build_schedule_plan: Callable[[Iterator[Any]], Any]
    """Only for chunks with experts."""

    def __init__(
        self, probe: Probe, config: TransformerConfig, vp_stage: int | None, number: int
    ) -> None:
        super().__init__()
        self.number = number
        """The stage's global index."""
        self.stage = EmulatedStage(probe)
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Set the input for the next forward."""
        [self._input] = tensors

    def forward(self, data: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Run on the input that was set, or otherwise on the next data item."""
        output: torch.Tensor = self.stage(self._given(data))
        return output

    def _given(self, data: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        if self._input is not None:
            return self._input
        return next(data)["tokens"].T[..., None].expand(-1, -1, MESSAGE_SHAPE[-1])


def first(tensors: Any) -> Any:
    """Return a tensor, or a list's only tensor."""
    return tensors[0] if isinstance(tensors, list) else tensors
