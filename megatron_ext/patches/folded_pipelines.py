"""Patches for pipelines whose last stage is on the first rank (V and W placements).

Upstream assumes that the first and last stages are on different ranks and identifies them by rank.
These patches act only while a schedule with such a placement is active, because they would break
upstream's own schedules.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

from megatron_ext.config import active
from megatron_ext.errors import DataError
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, always

_STATE = "megatron.core.parallel_state"
_STAGES = "megatron.core.pipeline_parallel.utils"
_GRADS = "megatron.core.distributed.finalize_model_grads"
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout"
_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_PARALLEL = "megatron.core.dist_checkpointing.strategies.fully_parallel"

STAGES_ENTRY = "stages of megatron_ext"
"""The entry of a checkpoint's metadata that holds the stages of a folded placement."""

PATCHES = PatchTable(feature="schedules", when=active.is_folded)


@PATCHES.row(
    "placement.layers",
    f"{_LAYOUT}:PipelineParallelLayerLayout.from_str",
    of=active.pipeline,
)
def _place_layers(
    chosen: active.Pipeline,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron places a layout's stages round-robin, but V and W placements do not."""
    from megatron_ext.runtime.folded import placed_layout

    parsed = call(*args, **kwargs)
    if parsed.pipeline_model_parallel_size != chosen.placement.num_ranks:
        return parsed
    return placed_layout(parsed.input_data, chosen.placement)


@PATCHES.row(
    "placement.segments",
    "megatron.core.ssm.mamba_hybrid_layer_allocation:select_pipeline_segment",
    of=active.pipeline,
    since=(0, 17),
    until=(0, 18),
)
@PATCHES.row(
    "placement.segments",
    "megatron.core.models.hybrid.hybrid_layer_allocation:select_pipeline_segment",
    of=active.pipeline,
    since=(0, 18),
)
def _place_segment(
    chosen: active.Pipeline,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> tuple[list[str], int]:
    """Megatron places a hybrid pattern's segments round-robin, but V and W placements do not."""
    pattern, *further_args = args
    segments = pattern.split("|")
    stages_of = chosen.placement.stages_of
    if len(segments) != chosen.placement.num_stages:
        return cast("tuple[list[str], int]", call(*args, **kwargs))
    names = ("pp_group", "vp_stage")
    further_arguments = dict(zip(names, further_args, strict=False), **kwargs)
    # Upstream deals out segments round-robin, so reorder them to give each rank its own
    # stages' segments.
    dealt: list[str] = []
    for stages_of_chunk in zip(*stages_of, strict=True):
        dealt += [segments[stage] for stage in stages_of_chunk]
    layers, _ = call("|".join(dealt), *further_args, **kwargs)
    rank = further_arguments["pp_group"].rank()
    chunk = further_arguments["vp_stage"]
    stage = stages_of[rank][chunk]
    num_layers_before = sum(len(segment) for segment in segments[:stage])
    return layers, num_layers_before


@PATCHES.row(
    "placement.is_pp_last_stage", f"{_STAGES}:is_pp_last_stage", kind="replace"
)
@PATCHES.row(
    "placement.get_pp_last_rank", f"{_STAGES}:get_pp_last_rank", kind="replace"
)
@PATCHES.row(
    "placement.get_pipeline_model_parallel_last_rank",
    f"{_STATE}:get_pipeline_model_parallel_last_rank",
    kind="replace",
)
def _of_first_rank(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron assumes that the last rank holds the last stage, but the first rank does."""
    # Look up the function on every call, because it may be patched too.
    twin_name = call.__name__.replace("last", "first")
    twin = getattr(sys.modules[call.__module__], twin_name)
    return twin(*args, **kwargs)


@PATCHES.row(
    "placement.is_pipeline_last_stage",
    f"{_STATE}:is_pipeline_last_stage",
    kind="replace",
)
def _is_last_stage(
    _call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """Megatron assumes that the last rank holds the last stage."""
    names = ("ignore_virtual", "vp_stage")
    arguments = dict(zip(names, args, strict=False), **kwargs)
    state = sys.modules[_STATE]
    chunks = state.get_virtual_pipeline_model_parallel_world_size()
    # Megatron's function defaults to True.
    if not arguments.get("ignore_virtual", True) and chunks is not None:
        assert arguments.get("vp_stage") is not None, (
            "ranks hold several chunks; pass vp_stage"
        )
        if arguments["vp_stage"] != chunks - 1:
            return False
    return bool(state.get_pipeline_model_parallel_rank() == 0)


@PATCHES.row("placement.embedding_groups", f"{_STATE}:initialize_model_parallel")
def _embed_on_first_rank(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron puts the last rank in the embedding group, so the first rank would wait for it
    forever.
    """
    # The first rank holds both embedding copies, so the group contains only that rank.

    def first(ranks: list[int]) -> list[int]:
        return ranks[:1]

    return call(
        *args,
        **{
            **kwargs,
            "get_embedding_ranks": first,
            "get_position_embedding_ranks": first,
        },
    )


@PATCHES.row(
    "placement.tied_gradients",
    f"{_GRADS}:_allreduce_word_embedding_grads",
    kind="replace",
)
def _sum_in_place(
    _call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron sums tied embeddings' gradients across ranks, but both copies are on one rank."""
    from megatron_ext.runtime.folded import sum_tied_gradients

    sum_tied_gradients(args[0] if args else kwargs["model"])


@PATCHES.row(
    "placement.no_embeddings",
    f"{_GRADS}:_allreduce_word_embedding_grads",
    when=lambda: active.active() is not None,
)
def _skip_without_embeddings(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron reads an attribute that custom modules lack to see whether the embedding is tied."""
    from megatron_ext.runtime.folded import language_model

    chunks = args[0] if args else kwargs["model"]
    if any(language_model(chunk) is not None for chunk in chunks):
        call(*args, **kwargs)


@PATCHES.row("placement.tied_weights", f"{_TRAINING}:get_model")
@PATCHES.row(
    "placement.tied_weights_of_builders",
    "megatron.training.models.dist_utils:prepare_existing_model_chunks_for_distributed_training",
    since=(0, 19),
)
def _tie(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron fills the copy of a tied embedding from another rank, so a copy on the same rank
    would stay zero.
    """
    from megatron_ext.runtime.folded import tie_embeddings

    chunks = call(*args, **kwargs)
    tie_embeddings(chunks)
    return chunks


@PATCHES.row("placement.train_step", f"{_TRAINING}:train_step")
def _share_step(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The last rank logs the losses, but only the first rank has them."""
    from megatron_ext.runtime.folded import share_losses, share_mtp_losses

    losses, *further_results = call(*args, **kwargs)
    share_mtp_losses()
    return share_losses(losses), *further_results


@PATCHES.row("placement.evaluate", f"{_TRAINING}:evaluate")
def _share_evaluation(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The last rank logs the losses, but only the first rank has them."""
    from megatron_ext.runtime.folded import share_losses

    losses, *further_results = call(*args, **kwargs)
    if losses is not None:  # None if the time limit has been reached
        losses = share_losses(losses)
    return losses, *further_results


@PATCHES.row(
    "placement.optimizer_stages",
    f"{_CHECKPOINTING}:_build_sharded_state_dict_metadata",
)
def _note_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not record the stages in a checkpoint, so it would load other stages'
    optimizer state.
    """
    # For a local checkpoint, Megatron builds this when it loads, too. That is right, because
    # each placement has a separate folder for them (`config/restarts.py`).
    metadata = call(*args, **kwargs)
    metadata[STAGES_ENTRY] = stages_of_run(args[0] if args else kwargs["args"])
    return metadata


@PATCHES.row(
    "placement.optimizer_state",
    f"{_CHECKPOINTING}:generate_state_dict",
    when=always,
)
def _refuse_other_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron checks only the parallel sizes, so it would load other stages' optimizer state."""
    check_optimizer_state(args, kwargs, args[0] if args else kwargs["args"])
    return call(*args, **kwargs)


def check_optimizer_state(args: Args, kwargs: Kwargs, settings: Any) -> None:
    """Check that a checkpoint's optimizer state fits this run's stages.

    Args:
        args: The positional arguments of `generate_state_dict`.
        kwargs: Its other arguments.
        settings: The run's settings under Megatron's argument names.

    Raises:
        DataError: The state is stored by rank, and was saved with other stages.
    """
    optimizer = args[2] if len(args) > 2 else kwargs["optimizer"]
    options = kwargs.get("optim_sd_kwargs") or {}
    if optimizer is None or not options.get("is_loading"):
        return
    saved_format = options["metadata"].get("distrib_optim_sharding_type")
    module = sys.modules["megatron.core.optimizer.distrib_optimizer"]
    # Different stages can load only formats that index the state by parameter.
    fits = module.DistributedOptimizer.checkpoint_fully_reshardable_formats
    if saved_format is None or saved_format in fits:
        return
    saved_stages = options["metadata"].get(STAGES_ENTRY)
    if saved_stages is None:
        has_same_stages = not active.is_folded()
    else:
        has_same_stages = saved_stages == stages_of_run(settings)
    if not has_same_stages:
        raise DataError(
            f"the checkpoint's optimizer state is in {saved_format} format, which only fits "
            "the stages it was saved with; resume once under the old schedule with "
            "--dist-ckpt-optim-fully-reshardable (and without --non-persistent-ckpt-type=local) "
            "and save, or load only the weights with --no-load-optim"
        )


@PATCHES.row(
    "placement.tied_checkpoint",
    f"{_PARALLEL}:distribute_main_replicas_with_precomputed_distribution",
)
def _save_once(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Megatron assigns tensors to replicas by name, so it would save both embedding copies."""
    from megatron_ext.runtime.folded import keep_one_main_copy

    call(*args, **kwargs)
    keep_one_main_copy(args[0] if args else kwargs["sharded_state_dict"])


@PATCHES.row(
    "placement.tied_local",
    "megatron.core.dist_checkpointing.tensor_aware_state_dict:"
    "MCoreTensorAwareStateDict.to_state_dict",
)
@PATCHES.row(
    "placement.tied_loading", f"{_PARALLEL}:FullyParallelLoadStrategyWrapper.load"
)
def _load_apart(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron loads both copies of an embedding into one tensor, so two weights would update the
    same optimizer moment.
    """
    from megatron_ext.runtime.folded import with_own_tensors

    return with_own_tensors(call(*args, **kwargs))


def check_format(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Reject checkpoints that identify tensors by rank and chunk instead of by layer."""
    loaded = call(*args, **kwargs)
    kind = loaded[3]
    # Local checkpoints identify tensors this way too, but each placement has a separate
    # folder (`config/restarts.py`).
    if kind is not None and kind.name not in ("GLOBAL", "LOCAL"):
        raise DataError(
            f"{loaded[1]} is in {kind.name.lower()} format, which only fits the stages it was "
            "saved with; convert it to torch_dist (--ckpt-convert-format) with Megatron's own "
            "schedule"
        )
    return loaded


def stages_of_run(args: Any) -> str:
    """Describe each rank's stages, by chunk; empty if Megatron places the chunks.

    `args` are the run's settings under Megatron's argument names.
    """
    chosen = active.pipeline()
    if chosen is None or not chosen.is_folded:
        return ""
    cut = args.pipeline_model_parallel_layout or getattr(
        args, "hybrid_layer_pattern", None
    )
    ranks = []
    for rank, stages in enumerate(chosen.placement.stages_of):
        stages_of_rank = " and ".join(str(stage) for stage in stages)
        ranks.append(f"{rank}: {stages_of_rank}")
    return f"ranks {', '.join(ranks)} of {cut}"


@PATCHES.row("placement.file_stages", f"{_CHECKPOINTING}:generate_state_dict")
def _name_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """With --ckpt-format torch, Megatron names layers by rank and chunk, not by stage."""
    state = call(*args, **kwargs)
    settings = args[0] if args else kwargs["args"]
    if settings.ckpt_format == "torch":
        # Megatron compares the version with numbers, so loading the file without this
        # package fails. Megatron would ignore any other entry and load the weights into
        # the wrong layers.
        state["checkpoint_version"] = (
            f"{state['checkpoint_version']} {stages_of_run(settings)}"
        )
    return state


@PATCHES.row(
    "placement.checkpoint_format",
    f"{_CHECKPOINTING}:_load_base_checkpoint",
    when=always,
)
def _check_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron reads formats that identify layers by rank, so it would load the wrong layers."""
    loaded = call(*args, **kwargs)
    # `name` is this rank's file, two levels below the checkpoint's folder.
    state, name, _, kind = loaded
    if kind is None or kind.name != "LEGACY":
        if not active.is_folded():
            return loaded
        return check_format(lambda: loaded, None, (), {})
    # `_name_stages` added the stages to the version; give Megatron only the number.
    version_text = str(state.get("checkpoint_version", 0))
    version, _, saved_stages = version_text.partition(" ")
    if saved_stages:
        state["checkpoint_version"] = float(version)
    # With --use-checkpoint-args, Megatron first loads just the arguments, before any
    # schedule is active.
    if kwargs.get("rank0") and active.active() is None:
        return loaded
    settings = args[1] if len(args) > 1 else kwargs["args"]
    stages = stages_of_run(settings)
    megatrons = "Megatron's own"
    num_saved_chunks = 0
    for entry in state:
        if re.fullmatch(r"model\d*", entry):
            num_saved_chunks += 1
    num_chunks = getattr(settings, "virtual_pipeline_model_parallel_size", None) or 1
    # If the file lacks a chunk, Megatron silently trains it from random weights.
    has_other_chunks = num_saved_chunks not in (0, num_chunks)
    lacks_chunks = has_other_chunks and active.pipeline() is not None
    if saved_stages != stages or lacks_chunks:
        raise DataError(
            f"the stages of {Path(name).parents[1]} are {saved_stages or megatrons} "
            f"({num_saved_chunks} per rank), but this run's stages are {stages or megatrons} "
            f"({num_chunks} per rank), and --ckpt-format torch names layers by position; "
            "load it with the schedule it was saved with, or use that schedule to convert it: "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    return loaded


@PATCHES.row(
    "placement.batch",
    "megatron.training.utils:get_batch_on_this_tp_rank",
    until=(0, 18),
)
@PATCHES.row(
    "placement.batch", "megatron.core.utils:get_batch_on_this_tp_rank", since=(0, 18)
)
def _with_fields_of_both_ends(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron sends a rank only the first stage's fields, even if it also has the last stage."""
    # Megatron decides by rank and ignores the chunk: a rank with the first stage gets
    # only that stage's fields. MTP stages get the fields for both ends, so pretend to
    # be one.
    return call(*args[:1], **{**kwargs, "mtp_on_this_rank": True})
