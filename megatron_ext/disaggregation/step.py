"""One training step of one role: what runs in place of Megatron's schedules.

Contract: `forward_backward_pipelining_without_interleaving` of
`megatron/core/pipeline_parallel/schedules.py`. A forward rank runs the F of its row without a graph
and sends what it makes to both roles; a backward rank runs the R and B of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import get_model_config

from megatron_ext.disaggregation.job import Job, current
from megatron_ext.disaggregation.link import RoleLink
from megatron_ext.disaggregation.weights import WeightReceiver, WeightSender
from megatron_ext.disaggregation.worlds import beat
from megatron_ext.errors import MegatronExtError
from megatron_ext.schedules import randomness
from megatron_ext.schedules.runtime.compute import Call, StageCompute
from megatron_ext.schedules.runtime.groups import default_groups
from megatron_ext.schedules.runtime.microbatches import MicrobatchData
from megatron_ext.schedules.runtime.rng import microbatch_rng
from megatron_ext.schedules.runtime.sync import GradientSync, ParameterSync
from megatron_ext.schedules.runtime.tables import Table
from megatron_ext.schedules.validate import validate
from megatron_ext.transport.base import Expected, Key

if TYPE_CHECKING:
    from megatron_ext.schedules.comms import Operation
    from megatron_ext.schedules.runtime.compute import Tensors

__all__ = ["forward_backward", "link_of_this_rank", "step_done"]


@dataclass
class _Runtime:
    """What lasts from step to step."""

    job: Job
    link: RoleLink
    sender: WeightSender | None
    receiver: WeightReceiver | None
    due: int = 1
    """Transfers of weights that a forward rank has not taken yet; the first makes roles equal."""


_runtime: _Runtime | None = None


def forward_backward(stock: Callable[..., list[Any]], **call: Any) -> list[Any]:
    """Run one step of this process' role; keywords as of Megatron's own schedules.

    Evaluation needs no roles: forward ranks run it among themselves.

    Args:
        stock: Megatron's own schedule.
        call: What it takes.

    Returns:
        What the loss function reported, by micro-batch; empty where no loss is computed.
    """
    model = call["model"]
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    runtime = _ready(chunks)
    if call.get("forward_only"):
        beat()
        with runtime.link.explaining_failures():
            return stock(**call)
    config = get_model_config(chunks[0])
    groups = default_groups()
    iterators = call["data_iterator"]
    step = _Step(
        runtime,
        Table(
            runtime.job.schedule(call["num_microbatches"]),
            runtime.job.position,
            slots=call["num_microbatches"],
        ),
        Call(
            forward_step_func=call["forward_step_func"],
            data=[MicrobatchData(i) for i in _as_list(iterators)],
            chunks=chunks,
            config=config,
            num_microbatches=call["num_microbatches"],
            cp_group_size=groups.cp.size(),
            forward_only=runtime.job.role == "forward",
            collect_non_loss_data=bool(call.get("collect_non_loss_data")),
            first_val_step=call.get("first_val_step"),
        ),
        _shape(config, groups, call),
        force_all_reduce=bool(call.get("force_all_reduce")),
    )
    timer = config.timers and config.timers("forward-backward", log_level=1)
    if timer:
        timer.start(barrier=config.barrier_with_L1_time)
    try:
        compute = step.run()
    except BaseException as error:
        runtime.link.abort(str(error))
        raise
    if runtime.job.role == "backward" and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            chunks,
            _tokens(compute, chunks) if config.calculate_per_token_loss else None,
            pg_collection=groups,
            force_all_reduce=call.get("force_all_reduce"),
        )
    if timer:
        timer.stop()
    if runtime.job.role == "forward":
        return []
    return [report for _, report in sorted(compute.reports.items())]


def _tokens(compute: StageCompute, chunks: Sequence[torch.nn.Module]) -> torch.Tensor:
    """Number of tokens of this rank; those without the last stage have counted none."""
    device = next(chunks[0].parameters()).device
    total = torch.zeros((), dtype=torch.int, device=device)
    return total if compute.num_tokens is None else total + compute.num_tokens


def step_done(chunks: Sequence[torch.nn.Module], *, updated: bool) -> None:
    """Bring new weights on their way; to be called after each training step on every rank.

    Args:
        chunks: The model of this rank, in its wrappers.
        updated: On a backward rank, whether the optimizer changed its weights.
    """
    runtime = _ready(chunks)
    if runtime.sender is not None:
        runtime.sender.send(updated=updated)
    else:
        runtime.due += 1


def link_of_this_rank(chunks: Sequence[torch.nn.Module]) -> RoleLink:
    """Return the link, opened at the first use; forward ranks take new weights over first."""
    return _ready(chunks).link


def _ready(chunks: Sequence[torch.nn.Module]) -> _Runtime:
    """Return the runtime, made at the first use, once forward ranks have the latest weights."""
    global _runtime
    job = current()
    assert job is not None
    if _runtime is None or _runtime.job is not job:
        link = RoleLink(job, next(chunks[0].parameters()).device)
        forward = job.role == "forward"
        _runtime = _Runtime(
            job,
            link,
            None if forward else WeightSender(job, link, chunks),
            WeightReceiver(job, link, chunks) if forward else None,
        )
        if _runtime.sender is not None:
            _runtime.sender.send(updated=True)
    if _runtime.receiver is not None:
        for _ in range(_runtime.due):
            _runtime.receiver.receive()
        _runtime.due = 0
    return _runtime


def _as_list(iterators: Any) -> list[Any]:
    return iterators if isinstance(iterators, list) else [iterators]


def _shape(config: Any, groups: Any, call: dict[str, Any]) -> tuple[int, ...]:
    """Shape of what goes from stage to stage: [sequence, micro-batch, hidden]."""
    length = call.get("decoder_seq_length") or call["seq_length"]
    divisor = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return (length // divisor, call["micro_batch_size"], config.hidden_size)


class _Step:
    """The row of one process, once."""

    def __init__(
        self,
        runtime: _Runtime,
        table: Table,
        call: Call,
        shape: tuple[int, ...],
        *,
        force_all_reduce: bool,
    ) -> None:
        validate(table.schedule)
        self._job, self._link, self._table, self._call = runtime.job, runtime.link, table, call
        self._shape = shape
        self._compute = StageCompute(call, table)
        self._gradients = GradientSync(
            call.config, call.chunks, table, force_all_reduce=force_all_reduce
        )
        self._parameters = ParameterSync(call.config, call.chunks, table)

    def run(self) -> StageCompute:
        """Run it, and wait until everything sent has left."""
        self._link.begin(self._expected(), self._table.slots)
        operations = self._table.operations
        stage = self._job.place.pp
        with self._gradients:
            self._parameters.before(stage)
            for number, operation in enumerate(operations, start=1):
                inputs = self._inputs(operation)
                with self._gradients.around(operation.action, is_last=number == len(operations)):
                    outputs = self._run(operation, inputs)
                self._send(operation, outputs)
            self._gradients.after(stage)
        self._link.flush()
        left = self._compute.unfinished()
        if left:
            raise MegatronExtError(f"{self._table.schedule.label} ended with {left[0]} to be done")
        return self._compute

    def _expected(self) -> list[Expected]:
        dtype = self._call.config.pipeline_dtype
        return [
            Expected(self._link.source(needs.peer), Key(*needs.tag), self._shape, dtype)
            for operation in self._table.operations
            if (needs := operation.needs) is not None
        ]

    def _inputs(self, operation: Operation) -> Tensors:
        needs = operation.needs
        if needs is None:
            return [None]
        tensor = self._link.recv(needs.peer, Key(*needs.tag))
        return [tensor.requires_grad_() if operation.action.kind == "R" else tensor]

    def _run(self, operation: Operation, inputs: Tensors) -> Tensors:
        stage, kind, microbatch = operation.action
        if kind == "B":
            return self._compute.backward(stage, microbatch, inputs, split=False)
        if kind == "R":
            return self._compute.forward(stage, microbatch, inputs, is_first=microbatch == 0)
        drawn = (
            microbatch_rng(randomness.iteration(), stage, microbatch)
            if randomness.enabled()
            else nullcontext()
        )
        with torch.no_grad(), drawn:
            return self._compute.forward(stage, microbatch, inputs, is_first=microbatch == 0)

    def _send(self, operation: Operation, outputs: Tensors) -> None:
        for transfer in (operation.makes, operation.copies):
            if transfer is not None:
                [tensor] = outputs
                assert tensor is not None
                self._link.send(tensor, transfer.peer, Key(*transfer.tag))
        stage, kind, _ = operation.action
        if kind == "R" and stage < self._table.schedule.num_stages - 1:
            self._compute.release(outputs)
