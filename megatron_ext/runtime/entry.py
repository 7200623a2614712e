"""Replaces Megatron's schedules with `forward_backward`, which accepts the same keyword arguments.

While a schedule is active, the patched `get_forward_backward_func` of
`megatron.core.pipeline_parallel` returns this function (`patches/schedules.py`). The function has
the same contract as `forward_backward_pipelining_with_interleaving` in
`megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import repeat, tee
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import get_model_config

from megatron_ext.config import active
from megatron_ext.config.incompatible import (
    SET_FOR_TE,
    refuse_built,
    why_not_split,
)
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.compute import Call
from megatron_ext.runtime.feature import features
from megatron_ext.runtime.program import shape_between_stages
from megatron_ext.runtime.runtime import Runtime, in_force
from megatron_ext.upstream.signatures import (
    default_groups,
    is_multi_module,
    needed_of_models,
)

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.data_order import ReportOrder
    from megatron_ext.runtime.offloading import Offloading
    from megatron_ext.runtime.program import Shapes, Table

_Model = torch.nn.Module | list[torch.nn.Module]
_TORCHS_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""torch classes that reduce gradients in hooks during the backward pass."""


_INDEPENDENT_OF_NUMBERS = {
    "mtp_num_layers": 0,
    "moe_layer_freq": 1,
    "apply_query_key_layer_scaling": False,
    "window_attn_skip_freq": 0,
    "no_rope_freq": 0,
}
"""Setting that can make a layer depend on its number -> the value for which it does not."""
_LOG = logging.getLogger(__name__)


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: _Model,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one step of the active schedule; takes the same keywords as Megatron's own schedules.

    Returns:
        The loss function's reports in micro-batch order; empty on ranks without the last stage.

    Raises:
        ScheduleError: The schedule is incompatible with the model, the ranks or the micro-batches.
        TransportError: A message timed out, or a peer failed.
    """
    pipeline = active.pipeline()
    if pipeline is None:
        raise ScheduleError(
            "this schedule's configuration is no longer active; call "
            "get_forward_backward_func again"
        )
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    iterators = _one_for_each(data_iterator, len(chunks))
    if (p2p_communicator is None) != (pg_collection is None):
        raise ScheduleError("pass both p2p_communicator and pg_collection, or neither")
    refuse_modules(pg_collection)
    groups = default_groups() if pg_collection is None else pg_collection
    runtimes = in_force()
    runtime = runtimes.by_group.get(id(groups.pp))
    # This is the model's first step.
    if runtime is None or not runtime.checked_chunks.issuperset(chunks):
        _check_models(chunks)
        _check_layer_numbers(pipeline, groups.pp.rank(), chunks)
        _refuse_torchs_wrappers(pipeline, chunks)
        _refuse_settings(pipeline, chunks)
        for feature in features():
            feature.refuse_model(pipeline, chunks, forward_step_func)
        if runtime is not None:
            runtime.admit(chunks)
    config = get_model_config(chunks[0])
    length = decoder_seq_length or seq_length
    shapes = _shapes(
        config,
        groups,
        length,
        micro_batch_size,
        adjust_tensor_shapes_fn,
    )
    if runtime is None:
        runtime = Runtime(
            pipeline,
            groups,
            chunks,
            iterators,
            config,
            shapes,
            length,
        )
        runtimes.by_group[id(groups.pp)] = runtime
    # If the table depends on the lengths in the data, read the step's data first.
    read_ahead = None
    if not forward_only:
        read_ahead = runtime.read_ahead(iterators, num_microbatches)
    report_order: ReportOrder | None = read_ahead
    if read_ahead is not None:
        table = runtime.table_of_step(read_ahead)
        iterators = list(read_ahead.iterators)
    else:
        table = runtime.table(num_microbatches, backward=not forward_only)
        data_order = None if forward_only else runtime.data_order(table, config)
        if data_order is not None:
            iterators = [data_order.iterator(items) for items in iterators]
        report_order = data_order
    call = Call(
        forward_step_func=forward_step_func,
        data=runtime.data(iterators),
        chunks=chunks,
        config=config,
        num_microbatches=num_microbatches,
        cp_group_size=groups.cp.size(),
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        seq_length=length,
        read_ahead=read_ahead,
    )
    with _timed(config), _offloading(config, runtimes.offloading, table):
        compute = runtime.run(
            table,
            call,
            shapes,
            force_all_reduce=bool(force_all_reduce),
        )
        compute.finalize(groups, force_all_reduce=force_all_reduce)
    reports = compute.reports
    if report_order is not None:
        reports = report_order.in_file_order(reports, groups.tp, chunks)
    return [report for _, report in sorted(reports.items())]


def _shapes(
    config: Any,
    groups: ProcessGroupCollection,
    length: int,
    micro_batch_size: int,
    adjust: Callable[..., Any] | None,
) -> Shapes:
    """Return the shapes of activations (F) and gradients (B) that stages receive.

    `adjust` is the caller's function for adjusting shapes.
    """
    shape = shape_between_stages(config, groups, length, micro_batch_size)
    received: Any = [shape]
    sent = list(received)
    if adjust is not None:
        received, sent = adjust(received, sent)
    # If lengths vary, shapes are sent with the tensors.
    if config.variable_seq_lengths or config.mtp_standalone:
        return {
            "F": [None] * len(received),
            "B": [None] * len(sent),
        }
    return {
        "F": [tuple(shape) for shape in received],
        "B": [tuple(shape) for shape in sent],
    }


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Time a step with the timer that Megatron's own schedules use."""
    if not config.timers:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


@contextmanager
def _offloading(config: Any, offloading: Offloading, table: Table) -> Iterator[None]:
    """Reload offloaded activations in the table's order if Megatron offloads any."""
    if not getattr(config, "fine_grained_activation_offloading", False):
        yield
        return
    offloading.begin_step(table.schedule.rows[table.rank])
    yield
    offloading.end_step()


def refuse_modules(groups: Any) -> None:
    """Reject multi-module jobs (MIMO), which have a separate pipeline for each module.

    Raises:
        ScheduleError: The groups belong to several modules.
    """
    if is_multi_module(groups):
        raise ScheduleError(
            "schedule_pg_collection is for several modules (MIMO), but a table has one pipeline; "
            "remove --pipeline-schedule to run Megatron's own schedule"
        )


def _one_for_each(data: Any, num_chunks: int) -> list[Any]:
    """Return one data iterator per chunk; if there is only one iterator, all chunks share it."""
    iterators = list(data) if isinstance(data, (list, tuple)) else [data]
    present = [iterator for iterator in iterators if iterator is not None]
    num_different = len(set(map(id, present)))
    if len(iterators) == num_chunks and num_different == len(present):
        return iterators
    # The list may hold the same iterator several times. If each chunk took the next item, it would
    # get another micro-batch's labels.
    if len(iterators) == num_chunks and num_different == 1:
        shared_iterators = iter(_one_for_each(present[0], len(present)))
        return [
            None if iterator is None else next(shared_iterators)
            for iterator in iterators
        ]
    if len(iterators) == num_chunks:
        raise ScheduleError(
            f"data_iterator holds {len(present)} iterators, of which only {num_different} differ; "
            "pass one iterator per chunk, or a single one that all chunks share"
        )
    if len(iterators) != 1:
        raise ScheduleError(
            f"data_iterator has {len(iterators)} iterators, but this rank holds {num_chunks} model "
            "chunks; pass one iterator per chunk, or a single one that all chunks share"
        )
    [shared] = iterators
    if shared is None:
        return iterators * num_chunks
    if not hasattr(shared, "__next__"):
        raise ScheduleError(
            f"data_iterator is a {type(shared).__name__}, which this rank's {num_chunks} model "
            "chunks cannot share; pass an iterator, such as iter(data_loader), or a list with one "
            "iterator per chunk"
        )
    # Use `tee` because each chunk reads all micro-batches, at its own pace; `map(next, ...)`
    # because Megatron's RerunDataIterator has no __iter__; and `copy` because forward steps write
    # into the items that they read.
    items = map(next, repeat(shared))
    return [map(copy, branch) for branch in tee(items, num_chunks)]


def _check_models(chunks: Sequence[torch.nn.Module]) -> None:
    """Check that models have every attribute that Megatron's steps read; name what is missing."""
    # Check before the first step: in the middle of a step, a missing attribute would crash this
    # rank while its peers wait for its tensors.
    for chunk in chunks:
        # The attribute may be on the wrappers, DDP and Float16Module, or on the model itself.
        modules = [chunk]
        inner = getattr(chunk, "module", None)
        while isinstance(inner, torch.nn.Module):
            modules.append(inner)
            inner = getattr(inner, "module", None)
        missing = []
        for name in needed_of_models():
            has_attribute = any(hasattr(module, name) for module in modules)
            if not has_attribute:
                missing.append(f"`{name}`")
        if missing:
            model_name = type(modules[-1]).__name__
            raise ScheduleError(
                f"{model_name} lacks {', '.join(missing)}; Megatron's steps need "
                "`config` (a TransformerConfig), `model_type` (ModelType.encoder_or_decoder) and "
                "`set_input_tensor(tensors)` in each model chunk; see docs/your-model.md"
            )


def _check_layer_numbers(
    pipeline: Pipeline,
    rank: int,
    chunks: Sequence[torch.nn.Module],
) -> None:
    """Check that Megatron numbers the model's layers in the order that the stages run them.

    Raises:
        ScheduleError: The model was built without the schedule's layout, and a layer's computation
            depends on its number.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    # Without a layout, Megatron assigns chunks to the ranks in turn, which is correct for
    # interleaved stages.
    placement = pipeline.placement
    stages = placement.stages_of[rank]
    takes_turns = all(
        stage == chunk * placement.num_ranks + rank
        for chunk, stage in enumerate(stages)
    )
    config = get_model_config(chunks[0])
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if takes_turns or layout is not None:
        return
    modules: list[torch.nn.Module] = []
    for chunk in chunks:
        modules += chunk.modules()
    is_numbered = any(isinstance(module, TransformerBlock) for module in modules)
    if not is_numbered:
        return
    for name, independent in _INDEPENDENT_OF_NUMBERS.items():
        value = getattr(config, name, independent)
        if value not in (None, independent):
            raise ScheduleError(
                f"the model was built without the layout of {pipeline.name}, so its layers are "
                f"numbered as on other stages, and {name} = {value} depends on these numbers; "
                "build it from TransformerConfig(**build.transformer, ...), where build is "
                "configure's result"
            )
    if rank == 0:
        _LOG.warning(
            "the model was built without the layout of %s, so checkpoints name its layers "
            "differently than with other schedules; build it from "
            "TransformerConfig(**build.transformer, ...), where build is configure's result",
            pipeline.name,
        )


def _refuse_settings(
    pipeline: Pipeline,
    chunks: Sequence[torch.nn.Module],
) -> None:
    """Check the objects that a program built its model from, as they are now.

    Raises:
        ArgumentsError: The schedule conflicts with their settings.
        ScheduleError: The schedule splits backward passes, which their settings do not support.
    """
    in_force = active.required()
    # With flags, all settings have been checked, and Megatron builds the objects from them.
    if in_force.requested is None:
        return
    # They were checked when they were created, but perhaps under another configuration,
    # and a program may have changed them since.
    for chunk in chunks:
        config = get_model_config(chunk)
        # Layers that defer their weight gradients are right under every schedule.
        refuse_built(config, in_force.config, pipeline, ignored=SET_FOR_TE)
        if pipeline.full.splits_backward and (reason := why_not_split(config)):
            raise ScheduleError(reason)
        gradient_config = getattr(chunk, "ddp_config", None)
        if gradient_config is not None:
            refuse_built(gradient_config, in_force.config, pipeline)


def _refuse_torchs_wrappers(
    pipeline: Pipeline,
    chunks: Sequence[torch.nn.Module],
) -> None:
    """Reject torch's data parallelism if its hooks would run before gradients are complete."""
    table = pipeline.full
    has_twins = table.placement.twins == 2
    is_dynamic = pipeline.dynamic is not None
    breaks_hooks = table.splits_backward or has_twins or is_dynamic
    if not breaks_hooks:
        return
    wrappers = set(_TORCHS_WRAPPERS)
    config = get_model_config(chunks[0])
    if config.no_sync_func is not None and config.grad_sync_func is not None:
        # `no_sync_func` disables DDP's hooks for the whole step, and `grad_sync_func`
        # reduces the gradients. FSDP's hooks move gradients in any case.
        wrappers.remove("DistributedDataParallel")
    for chunk in chunks:
        for module in chunk.modules():
            for base in type(module).__mro__:
                # Compare names, because importing torch's FSDP takes a second.
                has_wrappers_name = base.__name__ in wrappers
                if has_wrappers_name and base.__module__.startswith("torch."):
                    raise ScheduleError(
                        f"a model chunk holds torch's {base.__name__}, whose hooks reduce "
                        f"gradients in the backward pass, but {table.label} computes weight "
                        "gradients later, or in a different order on each replica; wrap chunks in "
                        "Megatron's DistributedDataParallel, or use 1f1b without --use-dpp"
                    )
