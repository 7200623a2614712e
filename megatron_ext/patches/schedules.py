"""Patches that run the chosen schedule, carry its messages, and tie random numbers to data."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__"


def is_chosen() -> bool:
    """Return whether a schedule of ours runs."""
    return active.pipeline() is not None


def _refuse(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> Any:
    from megatron_ext.config.pipeline_config import ConfigurationError

    raise ConfigurationError(
        "configure was given no sizes, and no host that knows them came before the first step; "
        "give {pipeline_ranks}, {num_microbatches} and {num_layers}, or train with "
        "megatron.bridge's pretrain or finetune"
    )


def _ours(_call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.runtime.entry import forward_backward, refuse_modules

    # Releases differ in what they pass: whatever of it are process groups is checked.
    for groups in (*args, *kwargs.values()):
        refuse_modules(groups)
    return forward_backward


def _carries_messages() -> bool:
    return is_chosen() or active.transport_only() is not None


def _check_built(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Check a configuration object of Megatron's when it is complete."""
    from torch import distributed

    from megatron_ext.config.entrances import count_recomputation
    from megatron_ext.config.incompatible import refuse_built

    call(*args, **kwargs)
    found = active.required()
    pipeline = found.pipeline or found.transport_only
    assert pipeline is not None
    # A configuration object may be built before the process group.
    ranks = distributed.get_world_size() if distributed.is_initialized() else found.world_size
    refuse_built(instance, found.config, pipeline, ranks)
    count_recomputation(instance)


def _check_without_overlap(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Have Megatron check everything but its own overlap, whose limits are wider in pairs."""
    # Off while Megatron checks: its rules of the overlap are those of its interleaved schedule.
    given = {name: getattr(instance, name) for name in _CHECKED_WITH_OVERLAP}
    vars(instance).update(dict.fromkeys(given, False))
    try:
        call(*args, **kwargs)
    finally:
        vars(instance).update(given)


# The overlap, and what Megatron accepts only with it.
_CHECKED_WITH_OVERLAP = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "ep_overlap_early_attn_memory_release",
)


def _draw_by_microbatch(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a forward of Megatron's own schedules, which place chunks round-robin."""
    from megatron.core import parallel_state

    from megatron_ext.runtime.compute import rng_of_this_step

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    # Megatron deals chunks out round-robin.
    stage = (kwargs.get("vp_stage") or 0) * ranks + rank
    with rng_of_this_step(stage, kwargs["current_microbatch"]):
        return call(*args, **kwargs)


def _begin_iteration(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    active.begin_iteration(kwargs["iteration"])
    return call(*args, **kwargs)


def log_statistics_of(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Train, then log statistics of the steps."""
    from megatron_ext.runtime.runtime import log_own_statistics, log_statistics

    try:
        trained = call(*args, **kwargs)
    except SystemExit:
        # Megatron (`--exit-interval`) or other code may end a single rank here: on this path no
        # rank may wait for another.
        log_own_statistics()
        raise
    log_statistics()
    return trained


def _skip_batches(_call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Skip the batches of an iteration on this rank, without communication."""
    training = sys.modules["megatron.training.training"]
    given = args[0] if args else kwargs["data_iterator"]
    iterators = given if isinstance(given, list) else [given]
    # As the step that is skipped would: Megatron's machine may run it again, and rewinds the data.
    while training.get_rerun_state_machine().should_run_forward_backward(given):
        for iterator in iterators:
            if iterator is not None:
                for _ in range(training.get_num_microbatches()):
                    next(iterator)


def _check_packing(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Refuse what Megatron's packing scheduler would misplace or undo."""
    from megatron_ext.config.pipeline_config import ConfigurationError

    pipeline = active.pipeline()
    assert pipeline is not None
    if pipeline.placement.rank_of[-1] != pipeline.placement.num_ranks - 1:
        raise ConfigurationError(
            "{schedule} {name} has its last stage on another rank than the last, where Megatron's "
            "packing scheduler takes the labels; use 1f1b, gpipe, zb-h1 or interleaved",
            name=pipeline.config.schedule,
        )
    if pipeline.config.balance == "pack":
        raise ConfigurationError(
            "{balance} pack deals out to the replicas what Megatron's packing scheduler has dealt "
            "out already; use {balance} order"
        )
    return call(*args, **kwargs)


def _send_own_storage(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Send detached aliases, which keep the storage alive until the send is complete."""
    # The interleaved schedule frees an output (it swaps the tensor's `.data`) while its overlapped
    # send is in flight. Holding the tensor does not help then; an alias has its own reference to
    # the storage. Later upstream releases delay the freeing instead.
    names = ("tensor_send_prev", "tensor_send_next")
    sent = {name: tensor.detach() for name in names if (tensor := kwargs.get(name)) is not None}
    return call(*args, **{**kwargs, **sent})


def _has_messages_of_ours() -> bool:
    return active.transport_only() is not None


def _in_steps(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.runtime.megatron_messages import stepwise

    return stepwise(call(*args, **kwargs))


def _over_ours(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.runtime.megatron_messages import communicate

    # The shape travels with the tensor; outside of a step (None) the call is not one of a pipeline.
    without_shape = {name: value for name, value in kwargs.items() if name != "tensor_shape"}
    done = communicate(**without_shape)
    return call(*args, **kwargs) if done is None else done


def _allow_streams(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Check hyper-connections as in one stage, then the pipeline as of a model without them."""
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


def _offload_by_table(call: Call, _instance: Any, _args: Args, kwargs: Kwargs) -> None:
    """Have the saved tensors of a forward return in the table's order."""
    from megatron_ext.runtime.runtime import in_force

    in_force().offloading.begin_forward(call, kwargs)


def _forward_begun(_call: Call, manager: Any, _args: Args, _kwargs: Kwargs) -> Any:
    """Return what keeps the saved tensors of the forward that runs; None in evaluations."""
    return manager.cur_forward_chunk()


def _await_return(call: Call, handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the computation wait for the copies of a saved tensor, to the host and back."""
    import torch

    tag = args[0]
    if not isinstance(tag, torch.Tensor):  # from 0.19 on one that stayed is its own tag
        group, stream = handler.offload_groups[tag[0] - 1], torch.cuda.current_stream()
        group.wait_offload_event(stream)
        group.wait_reload_event(stream)
    return call(*args, **kwargs)


PATCHES = (
    Patch(
        id="schedules.forward_backward",
        target=f"{_SCHEDULES}:get_forward_backward_func",
        fn=_ours,
        kind="replace",
        when=is_chosen,
        feature="schedules",
        reason="runs Megatron's own schedules only, not the table of --pipeline-schedule",
    ),
    Patch(
        id="schedules.awaited_sizes",
        target=f"{_SCHEDULES}:get_forward_backward_func",
        fn=_refuse,
        kind="replace",
        when=lambda: (found := active.active()) is not None and not found.is_sized,
        feature="schedules",
        reason="would train under Megatron's own schedule although another one was requested",
    ),
    Patch(
        id="schedules.model_config",
        target=_CONFIG,
        fn=_check_built,
        when=_carries_messages,
        order=10,  # before split_backward.config sets fields of its own
        feature="schedules",
        reason="programs that call megatron_ext.configure show their settings nowhere else, and "
        "some exclude the schedule",
    ),
    Patch(
        id="schedules.pairs",
        target=_CONFIG,
        fn=_check_without_overlap,
        when=lambda: (pipeline := active.pipeline()) is not None and pipeline.config.pairs,
        order=20,  # inside schedules.model_config, which reads the true settings
        feature="schedules",
        reason="checks its own overlap of expert communication, under its interleaved schedule; "
        "pairs need neither virtual stages nor half precision",
    ),
    Patch(
        id="schedules.gradient_config",
        target="megatron.core.distributed.distributed_data_parallel_config:"
        "DistributedDataParallelConfig.__post_init__",
        fn=_check_built,
        when=_carries_messages,
        feature="schedules",
        reason="programs that call megatron_ext.configure show how gradients are reduced nowhere "
        "else, and some ways exclude split backwards",
    ),
    Patch(
        id="schedules.offloading",
        target="megatron.core.pipeline_parallel.fine_grained_activation_offload:"
        "FineGrainedActivationOffloadingInterface.init_chunk_handler",
        fn=_offload_by_table,
        when=is_chosen,
        feature="schedules",
        reason="derives from the virtual stages in which order backwards fetch offloaded "
        "activations, and a table has its own",
    ),
    Patch(
        id="schedules.offloaded_forward",
        target="megatron.core.pipeline_parallel.fine_grained_activation_offload:"
        "PipelineOffloadManager.pop_forward_chunk",
        fn=_forward_begun,
        kind="replace",
        when=is_chosen,
        feature="schedules",
        reason="takes a forward for finished once all that it offloads has left, so a stage of one "
        "layer, which keeps its own, would take the place of the next",
    ),
    Patch(
        id="schedules.returned_activation",
        target="megatron.core.pipeline_parallel.fine_grained_activation_offload:"
        "ChunkOffloadHandler.tensor_pop",
        fn=_await_return,
        when=is_chosen,
        feature="schedules",
        reason="reads a saved tensor before its copy has ended, where groups are nested (attn_norm "
        "around qkv_linear) or a backward follows its own forward in the first step",
    ),
    Patch(
        id="schedules.microbatch_rng",
        target=f"{_SCHEDULES}:forward_step",
        fn=_draw_by_microbatch,
        when=lambda: active.draws_by_microbatch() and not is_chosen(),
        feature="schedules",
        reason="dropout depends on the order of computation; with --microbatch-rng Megatron's own "
        "schedules draw the same masks as all others",
    ),
    Patch(
        id="schedules.iteration",
        target="megatron.training.training:train_step",
        fn=_begin_iteration,
        when=active.draws_by_microbatch,
        feature="schedules",
        reason="does not pass the number of the training step to schedules, which need it to seed "
        "a micro-batch",
    ),
    Patch(
        id="schedules.skipped_iterations",
        target="megatron.training.training:dummy_train_step",
        fn=_skip_batches,
        kind="replace",
        reason="reads batches from one iterator, but ranks with several chunks have a list of "
        "them, and middle ranks none: --iterations-to-skip would end the training",
    ),
    Patch(
        id="schedules.measured",
        target="megatron.training.training:train",
        fn=log_statistics_of,
        when=is_chosen,
        feature="schedules",
        reason="does not log at the end of training how much of it was idle or out of the table's "
        "order",
    ),
    *(
        Patch(
            id=f"schedules.{name}",
            target=f"megatron.core.datasets.data_schedule:{function}",
            fn=_check_packing,
            when=is_chosen,
            since="0.20",
            feature="schedules",
            reason="takes the last rank for the one with the last stage, and deals out samples to "
            "replicas, which --pipeline-balance pack does too",
        )
        for name, function in (
            ("packing", "wrap_data_iterator"),
            ("packed_batch", "get_batch_on_this_rank_for_sequence_packing"),
        )
    ),
    Patch(
        id="pipeline.sends_own_storage",
        target=f"{_P2P}:_p2p_ops",
        fn=_send_own_storage,
        reason="overlapped sends of the interleaved schedule read memory that is freed meanwhile: "
        "wrong activations, NaN or a hang",
    ),
    Patch(
        id="pipeline.steps_of_messages",
        target=f"{_SCHEDULES}:get_forward_backward_func",
        fn=_in_steps,
        when=_has_messages_of_ours,
        feature="transport",
        reason="does not announce the messages of a step, which a transport needs at its start",
    ),
    Patch(
        id="pipeline.messages",
        target=f"{_P2P}:P2PCommunicator._communicate",
        fn=_over_ours,
        when=_has_messages_of_ours,
        feature="transport",
        reason="sends over torch.distributed only, not over --pipeline-transport",
    ),
    Patch(
        id="pipeline.streams",
        target=_CONFIG,
        fn=_allow_streams,
        when=lambda: (
            (found := active.active()) is not None
            and any((found.pipeline, found.transport_only, found.job))
        ),
        since="0.20",
        feature="transport",
        reason="refuses hyper-connections with several stages, because its messages have "
        "hidden_size; ours have the shape of what a stage hands on, n streams wide",
    ),
)
