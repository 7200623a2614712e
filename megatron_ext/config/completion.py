"""Completes a configuration with the settings that depend on the model and the job's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.schedules.generators.catalog import default_schedule
from megatron_ext.schedules.table.memory import stash_ratio

if TYPE_CHECKING:
    from megatron_ext.config.cut import UserCut
    from megatron_ext.config.pipeline_config import PipelineConfig


def completed(
    settings: Mapping[str, Any], cut: UserCut, config: PipelineConfig
) -> PipelineConfig:
    """Return a configuration with all settings that depend on the job filled in.

    Args:
        settings: The job's settings, by Megatron's argument names.
        cut: How these settings cut the model.
        config: The user's configuration.

    Raises:
        ArgumentsError: The sizes imply different numbers of stages per rank.
    """
    # Disaggregation implies a schedule, whose stages Megatron builds from its own
    # flags.
    if config.disaggregation is not None:
        # Both roles must draw the same random numbers. Always set this, because the
        # flags do not reveal every random number that a model draws.
        return replace(config, microbatch_rng=True)
    # A dynamic order without a schedule starts from the table for Megatron's own schedule.
    if config.schedule is None and config.dynamic is not None:
        config = replace(config, schedule=default_schedule(cut.chunks))
    if config.schedule is None:
        return config
    chunks = _chunks(cut, config)
    config = replace(config, chunks=chunks)
    for rules in feature_rules():
        config = rules.completed(config, settings)
    return with_stash(config, settings)


def _chunks(cut: UserCut, config: PipelineConfig) -> int | None:
    """Return the number of stages on each rank, if the schedule supports different numbers."""
    generator = config.generator
    if config.chunks is not None:
        return config.chunks
    if generator is None or not generator.free_chunks:
        return None
    # If the cut gives one stage per rank or is uneven, use the schedule's default;
    # `stage_arguments` then cuts the model accordingly.
    chunks = cut.chunks_if_even
    if chunks is None or chunks == 1:
        return generator.num_chunks
    return chunks


@dataclass(frozen=True)
class _WholeLayers:
    """The layers that are recomputed as a whole."""

    share: float = 0.0
    """Fraction of all layers that are recomputed as a whole."""
    at_a_time: int = 1
    """Number of layers that are recomputed together, from one saved input."""


def with_stash(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """Return a configuration whose `stash_ratio` accounts for the memory held between I and W.

    Args:
        config: The configuration. An existing ratio is kept.
        settings: The job's settings, or the fields of a `TransformerConfig`.
    """
    # If the user set a ratio, W also stays where the table places it.
    if config.stash_ratio > 1:
        return config
    granularity = settings.get("recompute_granularity")
    # The deprecated form of --recompute-granularity=selective.
    if settings.get("recompute_activations"):
        granularity = "selective"
    recomputed_layers = _WholeLayers()
    if granularity == "full":
        recomputed_layers = _recomputed_layers(config, settings)
    recomputed: tuple[str, ...] = ()
    if granularity == "selective":
        recomputed = settings.get("recompute_modules") or ()
    offloaded: tuple[str, ...] = ()
    if settings.get("fine_grained_activation_offloading"):
        offloaded = settings.get("offload_modules") or ()
    is_te = settings.get("transformer_impl") == "transformer_engine"
    # Megatron's own layers save only their part of the sequence and gather it again
    # later.
    keeps_gathered = is_te and find_spec("transformer_engine") is not None
    ratio = stash_ratio(
        settings.get("tensor_model_parallel_size", 1),
        sequence_parallel=bool(settings.get("sequence_parallel")),
        keeps_gathered=keeps_gathered,
        recomputed=recomputed,
        offloaded=offloaded,
        recomputed_layers=recomputed_layers.share,
        kept_inputs=1 / recomputed_layers.at_a_time,
        divides_inputs=bool(settings.get("distribute_saved_activations")),
    )
    # If all layers are recomputed, run W right after I, so that a rank holds the
    # operands for only one W at a time: a recomputed layer holds 16 to 44 times as much
    # memory between I and W as before I. A table loaded from a file keeps its order.
    at_once = config.weights_at_once
    if recomputed_layers.share == 1 and config.generator is not None:
        at_once = True
    return replace(config, stash_ratio=ratio, weights_at_once=at_once)


def _recomputed_layers(
    config: PipelineConfig, settings: Mapping[str, Any]
) -> _WholeLayers:
    """Return the layers that Megatron recomputes as a whole under full granularity."""
    count = settings.get("recompute_num_layers") or 1
    if settings.get("recompute_method") != "block":
        return _WholeLayers(share=1.0, at_a_time=count)
    # The block method recomputes only the first `count` layers of each stage.
    chunks = config.chunks
    if not chunks:
        chunks = 1
        generator = config.generator
        if generator is not None:
            # Each of two mirrored pipelines has `num_chunks` stages on half of the ranks counted
            # below.
            chunks = generator.num_chunks // generator.twins
    # `count` is per stage, so multiply it by the number of stages.
    recomputed = count * chunks * settings["pipeline_model_parallel_size"]
    num_layers = settings.get("num_layers") or recomputed
    share = min(1.0, recomputed / num_layers)
    return _WholeLayers(share=share)
