"""Patches that run the chosen schedule, carry its messages and seed micro-batches."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.patches import effects
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, always

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__"
_OFFLOAD = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
_PACKING = "megatron.core.datasets.data_schedule"
_TRAINING = "megatron.training.training"


def is_chosen() -> bool:
    """Return whether one of our schedules is active."""
    return active.pipeline() is not None


PATCHES = PatchTable(feature="schedules", when=is_chosen)


def _was_not_taken() -> bool:
    """Return whether a schedule was requested but is not active."""
    from megatron_ext.config.flags import requested_flags

    in_force = active.active()
    if in_force is None:
        return bool(requested_flags())
    return not in_force.is_sized


@PATCHES.row(
    "schedules.awaited_sizes",
    f"{_SCHEDULES}:get_forward_backward_func",
    kind="replace",
    when=_was_not_taken,
)
def _refuse(
    _call: Call,
    _instance: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> Any:
    """Megatron would train with its own schedule even though another one was requested."""
    from megatron_ext.config.flags import FLAGS
    from megatron_ext.errors import ConfigurationError

    if active.active() is None:
        raise ConfigurationError(
            f"{FLAGS} is set, but only programs with Megatron's command line and megatron.bridge's "
            "pretrain and finetune read it; call megatron_ext.configure instead"
        )
    raise ConfigurationError(
        "configure was called without sizes, and no host has supplied them before the first step; "
        "pass pipeline_ranks, num_microbatches and num_layers, or train with "
        "megatron.bridge's pretrain or finetune"
    )


@PATCHES.row(
    "schedules.forward_backward",
    f"{_SCHEDULES}:get_forward_backward_func",
    kind="replace",
)
def _run_table(
    _call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron runs only its own schedules, not the table that --pipeline-schedule selects."""
    from megatron_ext.runtime.entry import forward_backward, refuse_modules

    # The arguments differ between releases, and any may hold process groups: check all.
    for groups in (*args, *kwargs.values()):
        refuse_modules(groups)
    return forward_backward


@PATCHES.row(
    "schedules.same_choice",
    "megatron.core.parallel_state:initialize_model_parallel",
    of=active.choice,
    order=-10,
)
def _agree(
    choice: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Ranks with different devices may choose different schedules, whose groups would not match."""
    from megatron_ext.runtime.program import check_same_choice

    check_same_choice(choice)
    return call(*args, **kwargs)


def _carries_messages() -> bool:
    return is_chosen() or active.transport_only() is not None


@PATCHES.row(
    "schedules.model_config",
    _CONFIG,
    when=_carries_messages,
    of=active.active,
    order=10,  # inside split_backward.config, so it reads the fields before they change
)
@PATCHES.row(
    "schedules.gradient_config",
    "megatron.core.distributed.distributed_data_parallel_config:"
    "DistributedDataParallelConfig.__post_init__",
    when=_carries_messages,
    of=active.active,
)
def _check_built(
    in_force: active.Active,
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Some Megatron settings conflict with the schedule, and programs that call configure have no
    arguments to check earlier.
    """
    from megatron_ext.config.entrances import count_recomputation
    from megatron_ext.config.incompatible import refuse_built

    call(*args, **kwargs)
    # Scripts with Megatron's command line may create a configuration per micro-batch;
    # their flags have already been checked.
    if in_force.requested is None and in_force.runtimes is not None:
        return
    pipeline = in_force.pipeline or in_force.transport_only
    assert pipeline is not None
    refuse_built(instance, in_force.config, pipeline)
    count_recomputation(instance)


def stage_of_chunk(chunk: int) -> int:
    """Return the stage of one of this rank's chunks under Megatron's round-robin placement."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return int(chunk * ranks + parallel_state.get_pipeline_model_parallel_rank())


@PATCHES.row(
    "schedules.microbatch_rng",
    f"{_SCHEDULES}:forward_step",
    when=lambda: active.draws_by_microbatch() and not is_chosen(),
)
def _draw_by_microbatch(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron draws dropout masks in execution order, but --microbatch-rng ties them to
    micro-batches.
    """
    from megatron_ext.runtime.compute import rng_of_this_step

    # Without virtual stages, Megatron passes None.
    stage = stage_of_chunk(kwargs.get("vp_stage") or 0)
    with rng_of_this_step(stage, kwargs["current_microbatch"]):
        return call(*args, **kwargs)


@PATCHES.row(
    "schedules.iteration", f"{_TRAINING}:train_step", when=active.draws_by_microbatch
)
def _begin_iteration(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not pass schedules the iteration, which they use to seed micro-batches."""
    active.begin_iteration(kwargs["iteration"])
    return call(*args, **kwargs)


@PATCHES.row("schedules.measured", f"{_TRAINING}:train")
def log_statistics_of(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """After training, Megatron does not log how long ranks were idle or how often they deviated
    from the table's order.
    """
    from megatron_ext.runtime.runtime import log_statistics

    try:
        result = call(*args, **kwargs)
    except SystemExit:
        # Megatron (`--exit-interval`) or other code exits here, possibly on only one
        # rank, so do not wait for the other ranks.
        log_statistics(of_all=False)
        raise
    log_statistics()
    return result


@PATCHES.row(
    "schedules.skipped_iterations",
    f"{_TRAINING}:dummy_train_step",
    kind="replace",
    when=always,
    feature="core",
)
def _skip_batches(
    _call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron reads batches from one iterator, but ranks with several chunks have a list of
    iterators and middle ranks have none, so --iterations-to-skip would raise an error.
    """
    training = sys.modules[_TRAINING]
    data_iterator = args[0] if args else kwargs["data_iterator"]
    rerun_machine = training.get_rerun_state_machine()
    skip_batches(rerun_machine, data_iterator, training.get_num_microbatches())


def skip_batches(rerun_machine: Any, data_iterator: Any, num_batches: int) -> None:
    """Read the batches that a skipped step would have read.

    Args:
        rerun_machine: Megatron's rerun state machine, which may rewind the data and run the step
            again.
        data_iterator: The rank's iterator, or a list with one iterator per chunk; None if the rank
            reads no data.
        num_batches: Number of batches to read from each iterator.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while rerun_machine.should_run_forward_backward(data_iterator):
        for iterator in iterators:
            if iterator is None:
                continue
            for _ in range(num_batches):
                next(iterator)


@PATCHES.row(
    "schedules.packed_statistics",
    f"{_TRAINING}:consume_seqlen_stats_in_iteration",
    of=active.pipeline,
    since=(0, 18),
)
def _count_tokens_once(
    pipeline: active.Pipeline,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> tuple[float | None, ...]:
    """Megatron counts packed sequences once per stage on a rank."""
    placement = pipeline.placement
    num_chunks = placement.num_stages // placement.num_ranks
    means = []
    for total in call(*args, **kwargs):
        mean = None if total is None else total / num_chunks
        means.append(mean)
    return tuple(means)


@PATCHES.row(
    "schedules.packing",
    f"{_PACKING}:wrap_data_iterator",
    of=active.pipeline,
    since=(0, 20),
)
@PATCHES.row(
    "schedules.packed_batch",
    f"{_PACKING}:get_batch_on_this_rank_for_sequence_packing",
    of=active.pipeline,
    since=(0, 20),
)
def _check_packing(
    pipeline: active.Pipeline,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron's packing scheduler assumes that the last rank holds the last stage, and it
    distributes samples across replicas as --pipeline-balance pack does.
    """
    from megatron_ext.errors import ConfigurationError

    last_rank = pipeline.placement.num_ranks - 1
    rank_of_last_stage = pipeline.placement.rank_of[-1]
    if rank_of_last_stage != last_rank:
        raise ConfigurationError(
            "{schedule:{c.schedule}} does not place its last stage on the last rank, where "
            "Megatron's packing scheduler reads the labels; use 1f1b, gpipe, zb-h1 or interleaved",
            c=pipeline.config,
        )
    if pipeline.config.balance == "pack":
        raise ConfigurationError(
            "{balance:pack} distributes samples that Megatron's packing scheduler has already "
            "distributed; use {balance:order}"
        )
    return call(*args, **kwargs)


@PATCHES.row(
    "pipeline.sends_own_storage", f"{_P2P}:_p2p_ops", when=always, feature="core"
)
def _send_aliases(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron's overlapped sends in interleaved schedules read freed memory, which causes wrong
    values, NaN or a hang.
    """
    # The interleaved schedule frees an output (by swapping the tensor's `.data`) while
    # its overlapped send is in flight. Holding the tensor does not prevent that, but an
    # alias references the storage itself. Later upstream releases free it later.
    kwargs = {**kwargs}
    for name in ("tensor_send_prev", "tensor_send_next"):
        tensor = kwargs.get(name)
        if tensor is not None:
            kwargs[name] = tensor.detach()
    return call(*args, **kwargs)


@PATCHES.row(
    "pipeline.steps_of_messages",
    f"{_SCHEDULES}:get_forward_backward_func",
    when=lambda: active.transport_only() is not None,
    feature="transport",
)
def _in_steps(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not announce a step's messages, but a transport must know them in advance."""
    from megatron_ext.runtime.runtime import in_force

    schedule = call(*args, **kwargs)

    def step(**keywords: Any) -> Any:
        # A program may keep this function after `deconfigure`.
        if active.transport_only() is None:
            return schedule(**keywords)
        return in_force().megatron_pipelines.step(schedule, keywords)

    return step


@PATCHES.row(
    "pipeline.messages",
    f"{_P2P}:P2PCommunicator._communicate",
    when=_carries_messages,
    feature="transport",
)
def _send_over_transport(
    _call: Call,
    _instance: Any,
    _args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron sends only over torch.distributed, not over --pipeline-transport, and its own
    schedule would run instead of ours if a program fetched it before calling configure.
    """
    from megatron_ext.runtime.runtime import in_force

    step = in_force().megatron_pipelines.running
    if step is None:
        raise _error_of_stock_schedule()
    kwargs = {**kwargs}
    kwargs.pop("tensor_shape", None)  # the shape is sent with the tensor
    return step.communicate(**kwargs)


def _error_of_stock_schedule() -> Exception:
    """Return the error for running Megatron's own schedule when another one was chosen."""
    pipeline = active.pipeline()
    if pipeline is not None and active.required().requested is None:  # chosen by flags
        return effects.another_schedule(pipeline.name)
    configured = "a transport" if pipeline is None else f"schedule {pipeline.name}"
    return ScheduleError(
        f"Megatron's own schedule is running although {configured} was configured; call "
        "get_forward_backward_func after configure, or call deconfigure first"
    )


@PATCHES.row(
    "pipeline.streams",
    _CONFIG,
    when=lambda: effects.in_use() is not None,
    since=(0, 20),
    feature="transport",
)
def _allow_streams(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron rejects hyper-connections with several stages because its messages are hidden_size
    wide, but ours have the shape of the stage's output, n streams wide.
    """
    if (
        not instance.enable_mhc_connections
        or instance.pipeline_model_parallel_size == 1
    ):
        call(*args, **kwargs)
        return
    # First create a single-stage copy, whose __post_init__ checks everything else about
    # hyper-connections. Then hide them from the real configuration's check.
    replace(
        instance,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    recomputed_modules = instance.recompute_modules
    instance.enable_mhc_connections = False
    if recomputed_modules is not None:
        instance.recompute_modules = [
            name for name in recomputed_modules if name != "mhc"
        ]
    try:
        call(*args, **kwargs)
    finally:
        instance.enable_mhc_connections = True
    if recomputed_modules is not None and "mhc" in recomputed_modules:
        instance.recompute_modules.append("mhc")


@PATCHES.row(
    "schedules.offloading",
    f"{_OFFLOAD}:FineGrainedActivationOffloadingInterface.init_chunk_handler",
)
def _offload_by_table(
    call: Call,
    _instance: Any,
    _args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron derives the activation reload order from the virtual stages, but the table defines
    that order.
    """
    from megatron_ext.runtime.runtime import in_force

    in_force().offloading.begin_forward(call, kwargs)


@PATCHES.row(
    "schedules.offloaded_forward",
    f"{_OFFLOAD}:PipelineOffloadManager.pop_forward_chunk",
    kind="replace",
)
def _begun_forward(
    _call: Call,
    manager: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> Any:
    """Megatron considers a forward pass finished once everything it offloads has left the device,
    so a one-layer stage, which keeps its activations, would take the next forward pass's place.
    """
    return manager.cur_forward_chunk()  # None in evaluations


@PATCHES.row(
    "schedules.returned_activation", f"{_OFFLOAD}:ChunkOffloadHandler.tensor_pop"
)
def _await_return(
    call: Call,
    handler: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron reads a saved tensor before its copy is complete if groups are nested (attn_norm
    around qkv_linear) or a backward pass immediately follows its forward pass in the first step.
    """
    import torch

    tag = args[0]
    # Since 0.19, the tag of a tensor that was not offloaded is the tensor itself.
    if not isinstance(tag, torch.Tensor):
        group_number, *_ = tag
        # Megatron numbers groups from 1.
        group = handler.offload_groups[group_number - 1]
        stream = torch.cuda.current_stream()
        group.wait_offload_event(stream)
        group.wait_reload_event(stream)
    return call(*args, **kwargs)
