"""Patches that verify the effect of features during the first steps.

`patches/effects.py` holds the checks and their reasons. They run at other places than the
patches whose effect they verify.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches import effects
from megatron_ext.patches.registry import REGISTRY, Args, Call, Kwargs, Patch

__all__ = ["PATCHES", "is_not_logged", "logged"]

_TRAINING = "megatron.training.training"
_STEPS = 2
"""Number of steps to check: by then tied copies have been filled, and updated once."""


@dataclass
class _Progress:
    """Progress of the checks under a configuration."""

    steps: int = 0
    """Training steps."""
    logged: bool = False


def _looked_at() -> _Progress | None:
    """Return the progress if there is anything to check: a schedule, a transport or roles."""
    found = active.active()
    if found is None or not (found.job or found.pipeline or found.transport_only):
        return None
    return found.state(_Progress)


def _is_due() -> bool:
    progress = _looked_at()
    return progress is not None and progress.steps < _STEPS


def is_not_logged() -> bool:
    """Return whether the first line of the log is still to be checked."""
    progress = _looked_at()
    return progress is not None and not progress.logged


def _watched(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the schedule with checks around its first training steps."""
    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only") or not _is_due():
            return schedule(*args, **kwargs)
        progress, model = active.required().state(_Progress), kwargs["model"]
        _before(model if isinstance(model, list) else [model], progress.steps)
        try:
            result = schedule(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            _explain(error)
            raise
        progress.steps += 1
        return result

    return run


def _before(chunks: list[Any], step: int) -> None:
    from megatron_ext.disaggregation import job

    if job.has_role("forward"):
        effects.check_frozen(chunks)
    chosen = active.pipeline()
    if chosen is not None and chosen.is_folded:
        effects.check_tied(chosen, chunks, step=step)
    if chosen is None or step != 1:
        return
    if chosen.full.splits_backward:
        recorded = "split_backward.linear" in REGISTRY.acted
        effects.check_split(chosen, chunks, recorded=recorded)


def _explain(error: Exception) -> None:
    """Replace the error of a loss without labels by its cause."""
    chosen = active.pipeline()
    if chosen is not None and chosen.is_folded and "placement.batch" not in REGISTRY.acted:
        raise effects.labels_missing(chosen) from error


def logged(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Check the first line of the log."""
    found = active.required()
    found.state(_Progress).logged = True
    chosen, messages = found.pipeline, found.transport_only
    if chosen is not None:
        effects.check_table(chosen, ran="schedules.forward_backward" in REGISTRY.acted)
        if chosen.is_folded:
            effects.check_logged(chosen, args[0] if args else kwargs["loss_dict"])
    if messages is not None and messages.pp > 1:
        effects.check_messages(messages, used="pipeline.messages" in REGISTRY.acted)
    return call(*args, **kwargs)


def _gloo_is_off() -> bool:
    from megatron_ext import devices

    value, _reason = devices.current().argument_defaults.get(
        "enable_gloo_process_groups", (True, "")
    )
    return value is False


def _without_gloo(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    effects.check_gloo(off=True)
    return call(*args, **kwargs)


PATCHES = (
    Patch(
        id="effects.steps",
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        fn=_watched,
        when=_is_due,
        order=-20,
        feature="effects",
        reason="does not verify in the first steps that tied copies are equal, forward ranks "
        "frozen, weight gradients postponed and labels present on the last stage",
    ),
    Patch(
        id="effects.logged",
        target=f"{_TRAINING}:training_log",
        fn=logged,
        when=is_not_logged,
        order=-20,
        feature="effects",
        reason="does not verify at the first log line that the table ran and the loss arrived",
    ),
    Patch(
        id="effects.gloo",
        target=f"{_TRAINING}:setup_model_and_optimizer",
        fn=_without_gloo,
        when=_gloo_is_off,
        order=-20,
        feature="effects",
        reason="does not verify that the groups which the device's defaults switch off are absent",
    ),
)
