"""Formats the output of `megatron-ext plan --devices`: tables, explanations, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron_ext.planning.layer_costs import ASSUMPTIONS, mode_name, parameters
from megatron_ext.planning.waiting import room_in
from megatron_ext.text_table import aligned

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.layout_forecast import Layout
    from megatron_ext.planning.layout_search import SearchResult
    from megatron_ext.planning.waiting import WaitingWeights

UNLIMITED_GIB = 1e9
"""Device memory assumed when forecasting a layout that does not fit."""
_BAR_WIDTH = 50
# The first column contains a layout's position and its step time.
_TABLE_HEADS = (
    "  step s|MFU %|TFLOP/s|GiB|worst share|tp|pp|cp|ep|batch|number|schedule|recompute"
)
_PLAN_FIELDS = (
    *(
        "step_s",
        "bound_s",
        "mfu",
        "memory_gib",
        "static_gib",
        "kept_gib",
        "schedule",
        "pairs",
    ),
    *("hidden", "layout", "shares", "limit", "techniques"),
)
_SIZE_FIELDS = ("tp", "pp", "cp", "ep", "micro_batch")
_COMPARED = (
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "micro_batch",
    "schedule",
    "pairs",
    "recompute",
)
"""Fields used to compare two layouts."""


def flags_of(plan: Layout) -> str:
    """Return all of a plan's flags, including those for precision and loss."""
    job = plan.job
    # Without the precision flags, a run with the pasted flags would train in fp32.
    flags = f"{plan.flags} {job.techniques.precision_flags}"
    if job.fused_loss:
        flags += " --cross-entropy-loss-fusion"
    return flags


def as_dict(plan: Layout) -> dict[str, Any]:
    """Return a plan's figures, keyed by their names in `plan --json`."""
    figures = {name: getattr(plan, name) for name in _PLAN_FIELDS}
    figures["flags"] = flags_of(plan)
    figures |= {name: getattr(plan.sizes, name) for name in _SIZE_FIELDS}
    figures |= {
        "num_microbatches": plan.sizes.num_microbatches,
        "vp": plan.chunks,
        "recompute": mode_name(plan.sizes.mode),
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "tflops_per_gpu": plan.tflops,
        # A layout that does not fit was forecast with unlimited memory.
        "fits": plan.job.device.memory_gib < UNLIMITED_GIB,
    }
    return figures


def result_as_dict(result: SearchResult) -> dict[str, Any]:
    """Return the output of `plan --json`; `waiting_weights` refers to the first plan."""
    free_memory = _room_for_waiting(result.plans[0])
    return {
        "bound_s": result.bound_s,
        "gap": result.gap,
        "is_complete": result.is_complete,
        "sizes": result.num_sizes,
        "evaluated": result.num_evaluated,
        "plans": [as_dict(plan) for plan in result.plans],
        "waiting_weights": 0 if free_memory is None else free_memory.number,
    }


def result_lines(
    result: SearchResult, took_s: float, device: DeviceKind
) -> Iterator[str]:
    """Yield the output lines: layouts, bound, memory and flags."""
    plans = result.plans
    job = result.plans[0].job
    weights, active_weights = parameters(job.model, job.device)
    # In a model with experts, each token uses only some of the parameters.
    size = f"{weights / 1e9:.4g} billion parameters"
    if active_weights < weights:
        size += f", {active_weights / 1e9:.3g} active"
    yield (
        f"{job.model.name} ({size}) on {job.num_devices} x {job.device.name}: {job.global_batch} "
        f"sequences of {job.sequence} tokens, {job.techniques.precision}\n"
    )
    rows = [_TABLE_HEADS.split("|")]
    rows += [_row(number, plan) for number, plan in enumerate(plans, start=1)]
    yield aligned(rows)
    state = "" if result.is_complete else "interrupted; "
    yield (
        f"\n{state}bound: no choice of sizes, schedule and cut takes less than "
        f"{result.bound_s:.3f} s; the first layout is within {100 * result.gap:.1f} %\n"
        f"{result.num_evaluated} layouts of {result.num_sizes} sizes in {took_s:.1f} s; worst "
        "share: share of the work on the busiest rank; batch, number: size and number of "
        "micro-batches"
    )
    yield from _memory_lines(plans[0], device)
    free_memory = _room_for_waiting(plans[0])
    if free_memory is not None:
        yield (
            f"\n--pipeline-waiting-weights {free_memory.number} fits with the first layout, "
            f"because {free_memory}; it fills the time that ranks spend waiting for tokens, and "
            "it needs --transformer-impl local"
        )
    if len(plans) > 1:
        yield f"\nflags of the first {len(plans)}:"
    else:
        yield "\nflags:"
    for number, plan in enumerate(plans, start=1):
        yield f"  {number}  {flags_of(plan)}"
    if plans[0].techniques:
        yield f"\nthe forecast of the first layout includes {plans[0].techniques}"


def _room_for_waiting(plan: Layout) -> WaitingWeights | None:
    """Return how many W may wait in a layout's free memory, or None if its W cannot wait."""
    # A layout that was forecast with unlimited memory does not fit.
    if plan.job.device.memory_gib >= UNLIMITED_GIB:
        return None
    return room_in(plan)


def _row(number: int, plan: Layout) -> list[str]:
    sizes = plan.sizes
    schedule = plan.schedule
    if plan.chunks > 1:
        schedule += f" chunks={plan.chunks}"
    if plan.pairs:
        schedule += f", pairs hide {100 * plan.hidden:.0f} %"
    return [
        f"{number} {plan.step_s:.3f}",
        f"{100 * plan.mfu:.1f}",
        f"{plan.tflops:.0f}",
        f"{max(plan.memory_gib):.1f}",
        f"{100 * max(plan.shares):.2f} %",
        *[str(getattr(sizes, name)) for name in _SIZE_FIELDS],
        str(sizes.num_microbatches),
        schedule,
        mode_name(sizes.mode),
    ]


def _memory_lines(plan: Layout, device: DeviceKind) -> Iterator[str]:
    """Yield each rank's memory with a bar."""
    # The forecast for two mirrored pipelines contains only one pipeline's ranks.
    is_mirrored = len(plan.memory_gib) != plan.sizes.pp
    pipeline = ", one of two mirrored pipelines" if is_mirrored else ""
    yield f"\nmemory per rank in the first layout{pipeline}, out of {device.memory_gib:g} GiB:"
    # A layout that does not fit needs more memory than the device has, so scale the
    # bars to the larger of the two.
    full_bar_gib = max(device.memory_gib, *plan.memory_gib)
    for rank, memory_gib in enumerate(plan.memory_gib):
        bar = "#" * round(_BAR_WIDTH * memory_gib / full_bar_gib)
        yield f"  {rank:>3}  {memory_gib:6.1f}  {bar}"


def explanation_lines(plans: Sequence[Layout], device: DeviceKind) -> Iterator[str]:
    """Yield why the second layout is slower and the assumptions with their sources."""
    first = plans[0]
    yield f"\nlargest overhead: {first.limit}"
    if len(plans) > 1:
        yield _why_slower(plans[1], first)
    yield "\nassumptions:"
    for name, text in ASSUMPTIONS.items():
        yield f"  {name}: {text}"
    yield f"\n{device.name}:"
    for device_field in fields(device):
        name = device_field.name
        source = device.sources.get(name, "assumed")
        # Measured factors get one line per part of the model.
        if name == "measured":
            for part, factors in device.measured:
                factor_text = " ".join(f"{factor:.2f}" for factor in factors)
                yield f"  {part} x {factor_text}: {source}"
        elif name not in ("name", "sources", "seconds"):
            yield f"  {name} {getattr(device, name):g}: {source}"


def _why_slower(second: Layout, first: Layout) -> str:
    second_figures = as_dict(second)
    first_figures = as_dict(first)
    changes = []
    for name in _COMPARED:
        if second_figures[name] != first_figures[name]:
            changes.append(f"{name} {second_figures[name]}")
    return (
        f"the second layout, with {', '.join(changes)}, is {second.step_s - first.step_s:.3f} s "
        f"slower: the bound for its schedule is {second.bound_s:.3f} s (first: "
        f"{first.bound_s:.3f} s), its pipeline takes {second.pipeline_s:.3f} s "
        f"({first.pipeline_s:.3f} s), and reductions and optimizer take "
        f"{second.step_s - second.pipeline_s:.3f} s ({first.step_s - first.pipeline_s:.3f} s); it "
        f"needs {max(second.memory_gib):.1f} GiB ({max(first.memory_gib):.1f} GiB)"
    )
