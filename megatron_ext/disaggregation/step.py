"""One training step of one role: what runs in place of Megatron's schedules.

Contract: `forward_backward_pipelining_without_interleaving` of
`megatron/core/pipeline_parallel/schedules.py`. A forward rank runs the F of its row without a graph
and sends what it makes to both roles; a backward rank runs the R and B of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_ext.disaggregation.job import Job, current
from megatron_ext.disaggregation.link import RoleLink
from megatron_ext.disaggregation.rows import BackwardRow, ForwardRow, Row
from megatron_ext.disaggregation.ship import Layers
from megatron_ext.disaggregation.weights import WeightReceiver, WeightSender
from megatron_ext.disaggregation.worlds import beat
from megatron_ext.schedules.representation.validation import validate
from megatron_ext.schedules.runtime.compute import Call, StageCompute
from megatron_ext.schedules.runtime.local_devices import device_of
from megatron_ext.schedules.runtime.microbatches import MicrobatchData
from megatron_ext.schedules.runtime.tables import Table
from megatron_ext.signatures import default_groups

__all__ = ["forward_backward", "link_of_this_rank", "step_done", "weights_s"]


@dataclass
class _Runtime:
    """What lasts from step to step."""

    job: Job
    link: RoleLink
    sender: WeightSender | None
    receiver: WeightReceiver | None
    layers: Layers | None
    """Those of this stage, where their inputs are shipped."""
    tables: dict[int, Table] = field(default_factory=dict)
    """By number of micro-batches."""
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
    row = _row(runtime, call, chunks)
    timer = config.timers and config.timers("forward-backward", log_level=1)
    if timer:
        timer.start(barrier=config.barrier_with_L1_time)
    try:
        compute = row.run()
    except BaseException as error:
        runtime.link.abort(str(error))
        raise
    if runtime.job.role == "backward" and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func(
            chunks,
            _tokens(compute, chunks) if config.calculate_per_token_loss else None,
            pg_collection=default_groups(),
            force_all_reduce=call.get("force_all_reduce"),
        )
    if timer:
        timer.stop()
    if runtime.job.role == "forward":
        return []
    return [report for _, report in sorted(compute.reports.items())]


def _row(runtime: _Runtime, call: dict[str, Any], chunks: list[torch.nn.Module]) -> Row:
    """Return what this process runs in one step."""
    job, config, count = runtime.job, get_model_config(chunks[0]), call["num_microbatches"]
    groups, iterators = default_groups(), call["data_iterator"]
    kind = ForwardRow if job.role == "forward" else BackwardRow
    return kind(
        job,
        runtime.link,
        _table(runtime, count),
        Call(
            forward_step_func=call["forward_step_func"],
            data=[MicrobatchData(i) for i in _as_list(iterators)],
            chunks=chunks,
            config=config,
            num_microbatches=count,
            cp_group_size=groups.cp.size(),
            forward_only=job.role == "forward",
            collect_non_loss_data=bool(call.get("collect_non_loss_data")),
            first_val_step=call.get("first_val_step"),
        ),
        _shape(config, groups, call),
        runtime.layers,
        force_all_reduce=bool(call.get("force_all_reduce")),
    )


def _table(runtime: _Runtime, num_microbatches: int) -> Table:
    """Return the table for a number of micro-batches, validated once."""
    if num_microbatches not in runtime.tables:
        schedule = runtime.job.schedule(num_microbatches)
        validate(schedule)
        table = Table(schedule, runtime.job.position, slots=num_microbatches)
        runtime.tables[num_microbatches] = table
    return runtime.tables[num_microbatches]


def _tokens(compute: StageCompute, chunks: Sequence[torch.nn.Module]) -> torch.Tensor:
    """Number of tokens of this rank; those without the last stage have counted none."""
    device = device_of(chunks)
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


def weights_s() -> float:
    """Return what a transfer of new weights cost this process so far, on average.

    On a forward rank that is the time from the news that there are new weights until they are here,
    on a backward rank the time until it can go on.
    """
    assert _runtime is not None
    side = _runtime.sender or _runtime.receiver
    assert side is not None
    return side.busy_s / max(1, side.num_transfers)


def _ready(chunks: Sequence[torch.nn.Module]) -> _Runtime:
    """Return the runtime, made at the first use, once forward ranks have the latest weights."""
    global _runtime
    job = current()
    assert job is not None
    if _runtime is None or _runtime.job is not job:
        link = RoleLink(job, device_of(chunks))
        forward = job.role == "forward"
        _runtime = _Runtime(
            job,
            link,
            None if forward else WeightSender(job, link, chunks),
            WeightReceiver(job, link, chunks) if forward else None,
            _shipped_layers(job, chunks),
        )
        if _runtime.sender is not None:
            _runtime.sender.send(updated=True)
    if _runtime.receiver is not None:
        for _ in range(_runtime.due):
            _runtime.receiver.receive()
        _runtime.due = 0
    return _runtime


def _shipped_layers(job: Job, chunks: Sequence[torch.nn.Module]) -> Layers | None:
    if job.activations != "ship":
        return None
    layers = Layers(chunks[0])
    if job.role == "forward":
        layers.watch()
    return layers


def _as_list(iterators: Any) -> list[Any]:
    return iterators if isinstance(iterators, list) else [iterators]


def _shape(config: Any, groups: Any, call: dict[str, Any]) -> tuple[int, ...]:
    """Shape of what goes from stage to stage: [sequence, micro-batch, hidden]."""
    length = call.get("decoder_seq_length") or call["seq_length"]
    divisor = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    return (length // divisor, call["micro_batch_size"], config.hidden_size)
