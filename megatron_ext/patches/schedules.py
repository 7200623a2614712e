"""Patches that run the chosen schedule, carry its messages, and tie random numbers to data."""

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
    """Return whether a schedule of ours runs."""
    return active.pipeline() is not None


PATCHES = PatchTable(feature="schedules", when=is_chosen)


def _was_not_taken() -> bool:
    """Return whether a schedule was requested that nothing has put in force."""
    from megatron_ext.config.flags import requested_flags

    found = active.active()
    return bool(requested_flags()) if found is None else not found.is_sized


@PATCHES.row(
    "schedules.awaited_sizes",
    f"{_SCHEDULES}:get_forward_backward_func",
    kind="replace",
    when=_was_not_taken,
)
def _refuse(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> Any:
    """Megatron would train under its own schedule although another one was requested."""
    from megatron_ext.config.flags import FLAGS
    from megatron_ext.config.pipeline_config import ConfigurationError

    if active.active() is None:
        raise ConfigurationError(
            f"{FLAGS} is set, but only programs with Megatron's command line and megatron.bridge's "
            "pretrain or finetune read it; call megatron_ext.configure instead"
        )
    raise ConfigurationError(
        "configure was given no sizes, and no host that knows them came before the first step; "
        "give pipeline_ranks, num_microbatches and num_layers, or train with "
        "megatron.bridge's pretrain or finetune"
    )


@PATCHES.row(
    "schedules.forward_backward", f"{_SCHEDULES}:get_forward_backward_func", kind="replace"
)
def _ours(_call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron runs its own schedules only, not the table of --pipeline-schedule."""
    from megatron_ext.runtime.entry import forward_backward, refuse_modules

    # Releases differ in what they pass: whatever of it are process groups is checked.
    for groups in (*args, *kwargs.values()):
        refuse_modules(groups)
    return forward_backward


def _carries_messages() -> bool:
    return is_chosen() or active.transport_only() is not None


@PATCHES.row(
    "schedules.model_config",
    _CONFIG,
    when=_carries_messages,
    of=active.active,
    order=10,  # before split_backward.config sets fields of its own
)
@PATCHES.row(
    "schedules.gradient_config",
    "megatron.core.distributed.distributed_data_parallel_config:"
    "DistributedDataParallelConfig.__post_init__",
    when=_carries_messages,
    of=active.active,
)
def _check_built(
    found: active.Active, call: Call, instance: Any, args: Args, kwargs: Kwargs
) -> None:
    """Programs that call configure show settings nowhere else, and some exclude the schedule."""
    from megatron_ext.config.entrances import count_recomputation
    from megatron_ext.config.incompatible import refuse_built

    call(*args, **kwargs)
    # Scripts with Megatron's command line make one for each micro-batch, of checked flags.
    if found.requested is None and found.runtimes is not None:
        return
    pipeline = found.pipeline or found.transport_only
    assert pipeline is not None
    refuse_built(instance, found.config, pipeline)
    count_recomputation(instance)


@PATCHES.row(
    "schedules.pairs",
    _CONFIG,
    when=lambda: (pipeline := active.pipeline()) is not None and pipeline.config.pairs,
    order=20,  # inside schedules.model_config, which reads the true settings
)
def _check_without_overlap(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Megatron checks its own overlap, of its interleaved schedule; pairs have other limits."""
    # The overlap, and what Megatron accepts only with it. Off while Megatron checks: its rules are
    # those of its interleaved schedule.
    names = (
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release",
    )
    given = {name: getattr(instance, name) for name in names}
    vars(instance).update(dict.fromkeys(given, False))
    try:
        call(*args, **kwargs)
    finally:
        vars(instance).update(given)


def stage_of_chunk(chunk: int) -> int:
    """Return the stage of a chunk of this rank, where Megatron deals chunks out round-robin."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    return int(chunk * ranks + parallel_state.get_pipeline_model_parallel_rank())


@PATCHES.row(
    "schedules.microbatch_rng",
    f"{_SCHEDULES}:forward_step",
    when=lambda: active.draws_by_microbatch() and not is_chosen(),
)
def _draw_by_microbatch(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron draws dropout in the order of computation, --microbatch-rng by micro-batch."""
    from megatron_ext.runtime.compute import rng_of_this_step

    stage = stage_of_chunk(kwargs.get("vp_stage") or 0)
    with rng_of_this_step(stage, kwargs["current_microbatch"]):
        return call(*args, **kwargs)


@PATCHES.row("schedules.iteration", f"{_TRAINING}:train_step", when=active.draws_by_microbatch)
def _begin_iteration(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not pass the number of a step to schedules, which seed micro-batches by it."""
    active.begin_iteration(kwargs["iteration"])
    return call(*args, **kwargs)


@PATCHES.row("schedules.measured", f"{_TRAINING}:train")
def log_statistics_of(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not log after training how much was idle or out of the table's order."""
    from megatron_ext.runtime.runtime import log_statistics

    try:
        trained = call(*args, **kwargs)
    except SystemExit:
        # Megatron (`--exit-interval`) or others may end a single rank here: nobody may wait.
        log_statistics(of_all=False)
        raise
    log_statistics()
    return trained


@PATCHES.row(
    "schedules.skipped_iterations",
    f"{_TRAINING}:dummy_train_step",
    kind="replace",
    when=always,
    feature="core",
)
def _skip_batches(_call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Megatron reads batches from one iterator, but ranks with several chunks have a list of
    them, and middle ranks none: --iterations-to-skip would end the training.
    """
    training = sys.modules[_TRAINING]
    given = args[0] if args else kwargs["data_iterator"]
    skip_batches(training.get_rerun_state_machine(), given, training.get_num_microbatches())


def skip_batches(machine: Any, given: Any, count: int) -> None:
    """Read `count` batches from each of the data iterators `given`, as the skipped step would.

    Megatron's rerun state machine may run the step again, and rewinds the data.
    """
    while machine.should_run_forward_backward(given):
        for iterator in given if isinstance(given, list) else [given]:
            if iterator is not None:
                for _ in range(count):
                    next(iterator)


@PATCHES.row(
    "schedules.packed_statistics",
    f"{_TRAINING}:consume_seqlen_stats_in_iteration",
    of=active.pipeline,
    since=(0, 18),
)
def _count_tokens_once(
    pipeline: active.Pipeline, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> tuple[float | None, ...]:
    """Megatron counts packed sequences once for each stage of a rank, and for each slice."""
    placement = pipeline.placement
    times = placement.num_stages // placement.num_ranks * pipeline.config.slices
    return tuple(None if sums is None else sums / times for sums in call(*args, **kwargs))


@PATCHES.row(
    "schedules.packing", f"{_PACKING}:wrap_data_iterator", of=active.pipeline, since=(0, 20)
)
@PATCHES.row(
    "schedules.packed_batch",
    f"{_PACKING}:get_batch_on_this_rank_for_sequence_packing",
    of=active.pipeline,
    since=(0, 20),
)
def _check_packing(
    pipeline: active.Pipeline, call: Call, _instance: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Megatron takes the last rank for the one with the last stage, and deals out samples to
    replicas, which --pipeline-balance pack does too.
    """
    from megatron_ext.config.pipeline_config import ConfigurationError

    if pipeline.placement.rank_of[-1] != pipeline.placement.num_ranks - 1:
        raise ConfigurationError(
            f"--pipeline-schedule {pipeline.config.schedule} has its last stage on another rank "
            "than the last, where Megatron's packing scheduler takes the labels; use 1f1b, gpipe, "
            "zb-h1 or interleaved"
        )
    if pipeline.config.balance == "pack":
        raise ConfigurationError(
            "--pipeline-balance pack deals out to the replicas what Megatron's packing scheduler "
            "has dealt out already; use --pipeline-balance order"
        )
    return call(*args, **kwargs)


@PATCHES.row("pipeline.sends_own_storage", f"{_P2P}:_p2p_ops", when=always, feature="core")
def _send_own_storage(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Overlapped sends of interleaved chunks read freed memory: wrong values, NaN or a hang."""
    # The interleaved schedule frees an output (it swaps the tensor's `.data`) while its overlapped
    # send is in flight. Holding the tensor does not help then; an alias has its own reference to
    # the storage. Later upstream releases delay the freeing instead.
    names = ("tensor_send_prev", "tensor_send_next")
    sent = {name: tensor.detach() for name in names if (tensor := kwargs.get(name)) is not None}
    return call(*args, **{**kwargs, **sent})


@PATCHES.row(
    "pipeline.steps_of_messages",
    f"{_SCHEDULES}:get_forward_backward_func",
    when=lambda: active.transport_only() is not None,
    feature="transport",
)
def _in_steps(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not announce the messages of a step, which a transport needs at its start."""
    from megatron_ext.runtime.runtime import in_force

    schedule = call(*args, **kwargs)

    def step(**keywords: Any) -> Any:
        if active.transport_only() is None:  # a program may keep it beyond deconfigure
            return schedule(**keywords)
        return in_force().stock.step(schedule, keywords)

    return step


@PATCHES.row(
    "pipeline.messages",
    f"{_P2P}:P2PCommunicator._communicate",
    when=_carries_messages,
    feature="transport",
)
def _over_ours(_call: Call, _instance: Any, _args: Args, kwargs: Kwargs) -> Any:
    """Megatron sends over torch.distributed only, not over --pipeline-transport; and its own
    schedule, which a program may have got before configure, would run in place of ours.
    """
    from megatron_ext.runtime.runtime import in_force

    step = in_force().stock.running
    if step is None:
        chosen = active.pipeline()
        if chosen is not None and active.required().requested is None:  # flags chose it
            raise effects.another_schedule(chosen.name)
        what = f"schedule {chosen.name}" if chosen else "a transport"
        raise ScheduleError(
            f"Megatron's own schedule runs although {what} was configured; call "
            "get_forward_backward_func after configure, or deconfigure first"
        )
    # The shape travels with the tensor.
    without_shape = {name: value for name, value in kwargs.items() if name != "tensor_shape"}
    return step.communicate(**without_shape)


@PATCHES.row(
    "pipeline.streams",
    _CONFIG,
    when=lambda: effects.in_use() is not None,
    since=(0, 20),
    feature="transport",
)
def _allow_streams(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Megatron refuses hyper-connections with several stages, because its messages have
    hidden_size; ours have the shape of what a stage hands on, n streams wide.
    """
    if not instance.enable_mhc_connections or instance.pipeline_model_parallel_size == 1:
        call(*args, **kwargs)
        return
    replace(  # a copy of one stage, for the checks of its own __post_init__
        instance,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    recomputed = instance.recompute_modules
    instance.enable_mhc_connections = False
    if recomputed is not None:
        instance.recompute_modules = [name for name in recomputed if name != "mhc"]
    try:
        call(*args, **kwargs)
    finally:
        instance.enable_mhc_connections = True
    if recomputed is not None and "mhc" in recomputed:
        instance.recompute_modules.append("mhc")


@PATCHES.row(
    "schedules.offloading",
    f"{_OFFLOAD}:FineGrainedActivationOffloadingInterface.init_chunk_handler",
)
def _offload_by_table(call: Call, _instance: Any, _args: Args, kwargs: Kwargs) -> None:
    """Megatron derives from virtual stages in which order activations return; tables have one."""
    from megatron_ext.runtime.runtime import in_force

    in_force().offloading.begin_forward(call, kwargs)


@PATCHES.row(
    "schedules.offloaded_forward",
    f"{_OFFLOAD}:PipelineOffloadManager.pop_forward_chunk",
    kind="replace",
)
def _forward_begun(_call: Call, manager: Any, _args: Args, _kwargs: Kwargs) -> Any:
    """Megatron takes a forward for finished once all that it offloads has left, so a stage of
    one layer, which keeps its own, would take the place of the next.
    """
    return manager.cur_forward_chunk()  # None in evaluations


@PATCHES.row("schedules.returned_activation", f"{_OFFLOAD}:ChunkOffloadHandler.tensor_pop")
def _await_return(call: Call, handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron reads a saved tensor before its copy has ended, where groups are nested
    (attn_norm around qkv_linear) or a backward follows its own forward in the first step.
    """
    import torch

    tag = args[0]
    if not isinstance(tag, torch.Tensor):  # from 0.19 on one that stayed is its own tag
        group, stream = handler.offload_groups[tag[0] - 1], torch.cuda.current_stream()
        group.wait_offload_event(stream)
        group.wait_reload_event(stream)
    return call(*args, **kwargs)
