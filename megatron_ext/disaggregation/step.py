"""Runs a training step for one role and, between steps, exchanges values with the other role.

The step replaces `forward_backward_pipelining_without_interleaving` in
`megatron/core/pipeline_parallel/schedules.py` and has the same arguments and results. A forward
rank runs the F actions in its row without a graph and sends the outputs to both roles. A backward
rank runs the R and B actions in its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.utils import get_model_config

from megatron_ext.config import active
from megatron_ext.devices import device_of
from megatron_ext.disaggregation.role_compute import (
    BackwardCompute,
    ForwardCompute,
    RoleEnds,
)
from megatron_ext.disaggregation.ship import layers_of
from megatron_ext.disaggregation.weights import WeightReceiver, WeightSender
from megatron_ext.disaggregation.worlds import (
    RoleRuntime,
    beat,
    hand_over,
    roles_in_force,
)
from megatron_ext.errors import ScheduleError, TransportError, reason_for_peers
from megatron_ext.runtime.compute import (
    Call,
    MicrobatchData,
    StageCompute,
    log_ignored_input,
)
from megatron_ext.runtime.connect import open_native, through_host
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.feature import features
from megatron_ext.runtime.ordering import Order
from megatron_ext.runtime.program import Table, make_program, shape_between_stages
from megatron_ext.runtime.sync import Sync, TrainingSync
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.validation import validate
from megatron_ext.transport.base import find_lost_peer
from megatron_ext.transport.observed import observed
from megatron_ext.upstream.signatures import default_groups

if TYPE_CHECKING:
    from megatron_ext.config.roles import Job
    from megatron_ext.transport.base import Transport

# How long to wait, after some other error, for the news that a neighbour has died.
_NOTICED_S = 2.0


def forward_backward(
    megatron_schedule: Callable[..., list[Any]], **call: Any
) -> list[Any]:
    """Run one step for this process's role.

    Args:
        megatron_schedule: Megatron's own schedule, which forward ranks use for evaluation among
            themselves.
        **call: The keyword arguments of Megatron's schedules.

    Returns:
        The loss function's reports per micro-batch; empty on ranks that do not compute the loss.

    Raises:
        ScheduleError: The program changes the tensor shapes between stages.
    """
    if call.get("adjust_tensor_shapes_fn") is not None:
        raise ScheduleError(
            "adjust_tensor_shapes_fn, which distillation sets, changes what stages exchange, but "
            "the roles exchange only one tensor; remove --forward-backward-disaggregating"
        )
    model = call["model"]
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    runtime = _ready(chunks)
    config = get_model_config(chunks[0])
    # During an evaluation, only forward ranks call this function, once per batch, and
    # `evaluation` has already fetched the weights for all batches. Both roles make all
    # other calls, so they can exchange weights here.
    if not runtime.is_evaluating:
        runtime.weights.transfer()
    if call.get("forward_only"):
        # Backward ranks wait for the evaluation to finish, provided that it makes
        # progress.
        beat()
        with _explaining_failures(runtime.wire):
            groups = default_groups()
            shape = _shape(config, groups, call)
            # With several residual streams, messages are wider than the hidden size that
            # Megatron's schedule assumes.
            is_wider = shape is not None and shape[-1] != config.hidden_size
            if is_wider and groups.pp.size() > 1:
                call["adjust_tensor_shapes_fn"] = lambda _received, _sent: (
                    [shape],
                    [shape],
                )
            return megatron_schedule(**call)
    timer = config.timers and config.timers("forward-backward", log_level=1)
    if timer:
        timer.start(barrier=config.barrier_with_L1_time)
    try:
        compute = _run(runtime, call, chunks)
    except BaseException as error:
        # Otherwise, the neighbours would wait until they time out.
        runtime.wire.abort(reason_for_peers(error))
        raise
    force_all_reduce = call.get("force_all_reduce")
    compute.finalize(default_groups(), force_all_reduce=force_all_reduce)
    if timer:
        timer.stop()
    if runtime.job.role == "forward":
        return []
    return [report for _, report in sorted(compute.reports.items())]


def _run(
    runtime: RoleRuntime,
    call: dict[str, Any],
    chunks: list[torch.nn.Module],
) -> StageCompute:
    """Run this process's table row once."""
    job = runtime.job
    layers = runtime.layers
    config = get_model_config(chunks[0])
    is_forward = job.role == "forward"
    data_iterator = call["data_iterator"]
    num_microbatches = call["num_microbatches"]
    table = _table_of(runtime, num_microbatches)
    iterators = [data_iterator]
    if isinstance(data_iterator, list):
        iterators = data_iterator
    step = Call(
        forward_step_func=call["forward_step_func"],
        data=[MicrobatchData(iterator) for iterator in iterators],
        chunks=chunks,
        config=config,
        num_microbatches=num_microbatches,
        cp_group_size=default_groups().cp.size(),
        forward_only=is_forward,
        collect_non_loss_data=bool(call.get("collect_non_loss_data")),
        first_val_step=call.get("first_val_step"),
    )
    shape = _shape(config, default_groups(), call)
    num_layers = None
    if layers is not None:
        num_layers = len(layers)
    compute: ForwardCompute | BackwardCompute
    # Forward ranks have no gradients to reduce, so they use this default, which does nothing.
    sync = Sync()
    if is_forward:
        compute = ForwardCompute(
            step,
            table,
            handed_on=[shape],
            job=job,
            layers=layers,
        )
    else:
        compute = BackwardCompute(
            step,
            table,
            handed_on=[shape],
            layers=layers,
        )
        sync = TrainingSync(
            config,
            chunks,
            table,
            compute.splits,
            force_all_reduce=bool(call.get("force_all_reduce")),
        )
    observers = active.required().observers
    for observer in observers:
        observer.begin_step(compute)
    with sync:
        ends = RoleEnds(job, shape, config.pipeline_dtype, num_layers)
        executor = Executor(
            table=table,
            program=make_program(table, ends),
            order=Order(table),
            compute=compute,
            sync=sync,
            transport=runtime.wire,
            timeout_s=job.timeout_s,
            name_of=job.name_of,
            observers=observers,
        )
        executor.run()
    compute.check_data()
    if compute.ignored_inputs and not runtime.has_ignored_input:
        runtime.has_ignored_input = True
        log_ignored_input(*compute.ignored_inputs[0])
    return compute


def _table_of(runtime: RoleRuntime, num_microbatches: int) -> Table:
    """Return this process's table row; build it once per number of micro-batches."""
    job = runtime.job
    table = runtime.tables.get(num_microbatches)
    if table is None:
        schedule = job.schedule(num_microbatches)
        validate(schedule)
        slots = min(num_microbatches, job.window // 2 + 1)
        table = Table(
            schedule,
            job.position,
            slots=slots,
            window=job.window,
        )
        runtime.tables[num_microbatches] = table
    return table


@contextmanager
def evaluation(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Fetch the backward ranks' weights once for all evaluation steps in the block."""
    runtime = _ready(chunks)
    runtime.weights.transfer()
    runtime.is_evaluating = True
    try:
        yield
    finally:
        runtime.is_evaluating = False


def _ready(chunks: Sequence[torch.nn.Module]) -> RoleRuntime:
    """Return the runtime, which the first call creates."""
    job = active.job()
    roles = roles_in_force()
    assert job is not None
    runtime = roles.runtime
    if runtime is None:
        # This check is collective over a pipeline, so all of the pipeline's ranks raise
        # the error.
        group = default_groups().pp
        for feature in features():
            placement = linear(job.ranks.pp)
            feature.refuse_roles(chunks, placement, group)
        wire = _open_wire(job, device_of(chunks))
        layers = None
        if job.activations == "ship":
            layers = layers_of(chunks[0])
        weights: WeightReceiver | WeightSender
        if job.role == "forward":
            weights = WeightReceiver(job, wire, chunks)
        else:
            weights = WeightSender(job, wire, chunks)
        runtime = RoleRuntime(job, wire, weights, layers)
        roles.runtime = runtime
    return runtime


def _shape(config: Any, groups: Any, call: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the activation shape between stages; None if each message carries its own shape."""
    # A separate stage for multi-token prediction passes on hidden states for several depths.
    if config.variable_seq_lengths or config.mtp_standalone:
        return None
    length = call.get("decoder_seq_length") or call["seq_length"]
    micro_batch_size = call["micro_batch_size"]
    return shape_between_stages(config, groups, length, micro_batch_size)


# -- the connection to neighbours in both roles ----------------------------------------------------


def _open_wire(job: Job, device: torch.device) -> Transport:
    """Open a transport from this process to its neighbours in both roles, by global rank.

    Raises:
        TransportError: A neighbour does not connect, or the wire cannot reach it.
    """
    config = active.required().config
    assert config.wire != "torch", "the configuration refuses it"
    # The neighbours are the same stage in the other role (in all replicas, if each
    # replica holds a shard of the weights), and the adjacent stages in both roles. The
    # relation is symmetric, so both ends open each connection.
    place = job.place
    ranks = job.ranks
    neighbours = {ranks.rank(twin) for twin in job.weight_partners}
    for stage in (place.pp - 1, place.pp + 1):
        if stage not in range(ranks.pp):
            continue
        adjacent = place._replace(pp=stage)
        neighbours.add(ranks.rank(adjacent))
        for twin in ranks.twins(adjacent):
            neighbours.add(ranks.rank(twin))
    host = open_native(
        active.name_transport("roles"),
        roles_in_force().store,
        job.rank,
        ranks.num_ranks,
        sorted(neighbours),
        wire=config.wire,
        # Messages may stay in their slots while computation uses them.
        slots=job.window + 2,
        slot_bytes=job.message_bytes,
        timeout_s=job.timeout_s,
        device=device,
    )
    # Copy tensors through host memory, because the configuration rejects `device_path` ipc for
    # disaggregation.
    transport = through_host(host, device, job.timeout_s)
    observers = active.required().observers
    return observed(transport, observers)


@contextmanager
def _explaining_failures(wire: Transport) -> Iterator[None]:
    """Name the dead neighbour if torch.distributed fails in the block.

    Raises:
        TransportError: A neighbour has died; the message names it.
    """
    try:
        yield
    except RuntimeError as error:
        # torch.distributed does not name the rank that died, but this transport does.
        try:
            find_lost_peer(wire, _NOTICED_S)
        except TransportError as lost_peer:
            wire.abort(reason_for_peers(lost_peer))
            raise lost_peer from error
        wire.abort(reason_for_peers(error))
        raise


# -- exchanges of values between the roles, which every rank in a job calls ------------------------

_LOSSES = "evaluation losses"
_PROGRESS = (
    "iteration",
    "num_floating_point_operations_so_far",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
)


def shared_progress(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Make forward ranks resume from the checkpoint that backward ranks loaded.

    Args:
        counters: Training counters, keyed by the names of Megatron's arguments.

    Returns:
        The counters from the checkpoint, with the same keys.
    """
    # Some releases lack some of these counters.
    own_progress = {}
    for name in _PROGRESS:
        if name in counters:
            own_progress[name] = counters[name]
    progress: dict[str, Any] = hand_over(
        "checkpoint progress",
        own_progress,
        to="forward",
        pause=time.sleep,
    )
    own_consumed = counters["consumed_train_samples"]
    consumed = progress.get("consumed_train_samples", own_consumed)
    # With --rampup-batch-size, the number of micro-batches depends on the consumed samples.
    update_num_microbatches(consumed_samples=consumed, verbose=False)
    return progress


def share_exit(chunks: Sequence[torch.nn.Module], *, is_over: bool) -> bool:
    """Return whether backward ranks have decided to stop training after this step."""
    wire = _ready(chunks).wire
    decision = hand_over(
        "end of training",
        is_over,
        to="forward",
        pause=wire.poll,
    )
    return bool(decision)


def receive_evaluation(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Send the weights to forward ranks and return their evaluation losses.

    The losses are fp32 tensors on the host.
    """
    runtime = _ready(chunks)
    runtime.weights.transfer()
    losses = hand_over(
        _LOSSES,
        {},
        to="backward",
        pause=runtime.wire.poll,
    )
    tensors = {}
    for name, loss in losses.items():
        tensors[name] = torch.tensor(loss, dtype=torch.float32)
    return tensors


def send_evaluation(
    chunks: Sequence[torch.nn.Module],
    losses: Mapping[str, torch.Tensor],
) -> None:
    """Send evaluation losses from forward ranks to backward ranks, which log them."""
    values = {name: loss.tolist() for name, loss in losses.items()}
    wire = _ready(chunks).wire
    hand_over(
        _LOSSES,
        values,
        to="backward",
        pause=wire.poll,
    )
