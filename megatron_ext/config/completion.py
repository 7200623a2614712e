"""Completes a configuration with what it leaves to the model and to the sizes of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.schedules.generators.catalog import base_table
from megatron_ext.schedules.table.memory import stash_ratio

if TYPE_CHECKING:
    from megatron_ext.config.cut import UserCut
    from megatron_ext.config.pipeline_config import PipelineConfig

# Where pairs would train another model, see RULES["unpaired"].
_UNPAIRED = ("fp4", "sft", "dataloader_inter_document_masking")


def completed(settings: Mapping[str, Any], cut: UserCut, config: PipelineConfig) -> PipelineConfig:
    """Return a configuration with what it leaves to the model and the sizes of a job.

    Args:
        settings: Those of the job, by the names of Megatron's arguments.
        cut: How they cut the model.
        config: As the user wants it.

    Raises:
        ArgumentsError: What the sizes say about the stages of each rank does not go together.
    """
    # Roles bring their schedule along, whose stages Megatron makes of its own flags.
    if config.disaggregation is not None:
        # Both roles must draw the same numbers, and flags do not tell all that a model draws.
        return replace(config, microbatch_rng=True)
    if config.schedule is None and config.dynamic is not None:
        config = replace(config, schedule=base_table(cut.chunks))
    if config.schedule is None:
        return config
    config = replace(config, chunks=_chunks(cut, config), pairs=_has_pairs(settings, config))
    return with_stash(config, settings)


def _chunks(cut: UserCut, config: PipelineConfig) -> int | None:
    """Return the stages of each rank, where the schedule leaves their number open."""
    generator = config.generator
    if config.chunks is not None or generator is None or not generator.free_chunks:
        return config.chunks
    # If the cut gives one stage per rank or does not divide, the schedule's default counts, and
    # `stage_arguments` cuts the model by it.
    chunks = cut.chunks_if_even
    if chunks is None or chunks == 1:
        return generator.num_chunks
    return chunks


def _has_pairs(settings: Mapping[str, Any], config: PipelineConfig) -> bool:
    """Return whether forwards and backwards run as pairs."""
    # The sizes that `configure` gets say nothing of experts: then the program's word counts.
    if "num_experts" not in settings and config.pairs:
        return True
    # Pairs hide the communication of experts, which one rank alone does not have.
    expert_ranks = settings.get("expert_model_parallel_size") or 1
    if not settings.get("num_experts") or expert_ranks == 1:
        return False
    if config.pairs:
        return True
    # Rules drop the flag there, with a line (`incompatible.dropped`).
    if config.slices > 1 or any(settings.get(dest) for dest in _UNPAIRED):
        return False
    return bool(settings.get("overlap_moe_expert_parallel_comm"))


@dataclass(frozen=True)
class _WholeLayers:
    """Layers of a stage that are recomputed as a whole."""

    share: float = 0.0
    """Of all layers."""
    at_a_time: int = 1
    """Layers between two inputs that are kept."""


def with_stash(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """Return a configuration that counts what layers hold between I and W, if it does not yet.

    It follows from settings of the job, or from the fields of a `TransformerConfig`.
    """
    if config.stash_ratio > 1:
        return config
    granularity = settings.get("recompute_granularity")
    if settings.get("recompute_activations"):
        granularity = "selective"
    whole = _WholeLayers()
    if granularity == "full":
        whole = _recomputed_layers(config, settings)
    recomputed: tuple[str, ...] = ()
    if granularity == "selective":
        recomputed = settings.get("recompute_modules") or ()
    offloaded: tuple[str, ...] = ()
    if settings.get("fine_grained_activation_offloading"):
        offloaded = settings.get("offload_modules") or ()
    is_te = settings.get("transformer_impl") == "transformer_engine"
    ratio = stash_ratio(
        settings.get("tensor_model_parallel_size", 1),
        sequence_parallel=bool(settings.get("sequence_parallel")),
        # Megatron's own layers keep their part of a sequence and gather it again.
        keeps_gathered=is_te and find_spec("transformer_engine") is not None,
        recomputed=recomputed,
        offloaded=offloaded,
        recomputed_layers=whole.share,
        kept_inputs=1 / whole.at_a_time,
        divides_inputs=bool(settings.get("distribute_saved_activations")),
    )
    # The order of a file is the user's.
    at_once = config.weights_at_once or (whole.share == 1 and config.generator is not None)
    return replace(config, stash_ratio=ratio, weights_at_once=at_once)


def _recomputed_layers(config: PipelineConfig, settings: Mapping[str, Any]) -> _WholeLayers:
    """Return which layers Megatron recomputes as a whole with full granularity."""
    count = settings.get("recompute_num_layers") or 1
    if settings.get("recompute_method") != "block":
        return _WholeLayers(share=1.0, at_a_time=count)
    # So many of each stage; the others are not recomputed.
    chunks = config.chunks
    if not chunks:
        generator = config.generator
        chunks = 1 if generator is None else generator.num_chunks // generator.twins
    recomputed = count * chunks * settings["pipeline_model_parallel_size"]
    num_layers = settings.get("num_layers") or recomputed
    return _WholeLayers(share=min(1.0, recomputed / num_layers))
