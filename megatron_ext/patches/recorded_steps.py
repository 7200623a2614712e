"""Patches that record each training step's results, for `megatron-ext compare`."""

from __future__ import annotations

from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name
from megatron_ext.tracing import step_records

_TRAINING = "megatron.training.training"
# Run outside the disaggregation patches, which replace the log on forward ranks.
PATCHES = PatchTable(feature="compare", of=step_records.requested, order=-20)


@PATCHES.row("steps.first", f"{_TRAINING}:train")
def _observe(
    _record: step_records.StepRecord,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not announce its first step, which must be recorded."""
    # `requested` has created the record and added it to the observers.
    return call(*args, **kwargs)


@PATCHES.row("steps.log", f"{_TRAINING}:training_log")
def _log(
    record: step_records.StepRecord,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron logs rounded losses, which hide small differences between runs."""
    step = by_name(call, args, kwargs)
    skipped: bool | None = bool(step["skipped_iter"])
    if active.has_role("forward"):
        skipped = None  # the backward ranks decide
    record.add(
        step["iteration"],
        step["loss_dict"],
        step["grad_norm"],
        skipped=skipped,
        learning_rate=step["learning_rate"],
    )
    return call(*args, **kwargs)


@PATCHES.row("steps.exit", f"{_TRAINING}:checkpoint_and_decide_exit")
def _end(
    record: step_records.StepRecord,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """Megatron counts --exit-interval from the first run, but `compare` trains for a given number
    of steps from any checkpoint.
    """
    should_exit = call(*args, **kwargs) or record.is_complete
    record.begin()  # start after evaluations and saves, which are not part of a step
    return should_exit
