"""Forecasts the memory that a job needs if its micro-batches are cut into slices by length."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_ext.config.feature_rules import MemoryNeeded
from megatron_ext.features.lengths.length_slices import (
    automatic_slice_tokens,
    equal_cost_bounds,
    slices_needed,
)
from megatron_ext.features.lengths.length_tables import schedule_by_length
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.schedules.table.memory import activation_peaks, measure

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.planning.layout_forecast import Layout


def memory_by_length(pipeline: Pipeline, plan: Layout) -> MemoryNeeded:
    """Return the memory needed if all micro-batches have the maximum length; see `memory_needed`.

    Raises:
        ScheduleError: The longest micro-batch cannot be cut, or no order was found.
    """
    longest = plan.job.sequence
    microbatches = pipeline.num_microbatches
    slice_tokens = pipeline.config.slice_tokens
    if not isinstance(slice_tokens, int):
        total_tokens = longest * microbatches
        slice_tokens = automatic_slice_tokens(longest, total_tokens, pipeline.pp)
    model = plan.job.model
    cost = pipeline.config.length_costs
    if cost is None:
        cost = LengthCost.of_model(model.hidden, model.ffn)
    count = slices_needed(longest, slice_tokens)
    bounds = equal_cost_bounds([longest], count, cost)
    widths = [end - begin for begin, end in pairwise(bounds)]
    # This many micro-batches fill the pipeline; more would not increase the peak.
    num_simulated = min(microbatches, 2 * pipeline.pp)
    table, _ = schedule_by_length(pipeline, [widths] * num_simulated, cost)
    stash_ratio = pipeline.config.stash_ratio
    whole_peaks = activation_peaks(pipeline.full, stash_ratio)
    peaks = activation_peaks(table, stash_ratio)
    no_buffers = (0.0,) * pipeline.pp
    buffers = measure(table).keys_and_values or no_buffers
    # The size of the buffers for one micro-batch on 1/pp of the model.
    buffer_gib = _keys_and_values_gib(plan) / pipeline.pp
    # From the forecast for whole micro-batches, subtract the activations that slices do not keep,
    # and add the buffers for keys and values.
    needed_gib = []
    for rank, whole_gib in enumerate(plan.memory_gib):
        saved_share = 1 - peaks[rank] / whole_peaks[rank]
        saved_gib = plan.kept_gib[rank] * saved_share
        buffers_gib = buffers[rank] * buffer_gib
        needed_gib.append(whole_gib - saved_gib + buffers_gib)
    max_gib = max(needed_gib)
    rank = needed_gib.index(max_gib)
    assumption = (
        f"if all micro-batches have {longest} tokens, in slices of about {slice_tokens}, and "
        f"keeps {peaks[rank]:.3g} of these micro-batches; time depends on the lengths in each "
        "step and is not forecast"
    )
    remedy = "lower --pipeline-slice-tokens or --seq-length, or use more devices"
    return MemoryNeeded(rank, max_gib, assumption, remedy)


def _keys_and_values_gib(plan: Layout) -> float:
    """Return the GiB for one micro-batch's keys and values, on one tensor-parallel rank."""
    model = plan.job.model
    sizes = plan.sizes
    # Latent attention expands its keys and values for every head.
    heads = model.heads if model.is_latent else model.query_groups
    width_of_head = model.head_size + model.value_size
    width = heads * width_of_head / sizes.tp
    tokens = plan.job.sequence * sizes.micro_batch
    # Two bytes per value.
    return 2 * tokens * width * model.num_layers / (1 << 30)
