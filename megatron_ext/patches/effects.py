"""Patches that check, during the first steps, that features do what they are for.

What is checked, and why that is needed, is in `megatron_ext/effects.py`. They sit at other places
than the patches whose effect they look at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_ext import effects
from megatron_ext.patches.registry import REGISTRY, Patch

__all__ = ["PATCHES"]

_TRAINING = "megatron.training.training"
_STEPS = 2
"""After so many steps nothing new can come up: the copies were filled, and updated once."""

_Args = tuple[Any, ...]
_Keywords = dict[str, Any]


class _Progress:
    """Which schedule is looked at, and how many of its training steps were."""

    def __init__(self) -> None:
        self.of: object = None
        self.steps = 0
        self.logged = False

    def begin(self, of: object) -> None:
        """Start anew for another choice or job."""
        if self.of is not of:
            self.of, self.steps, self.logged = of, 0, False


_progress = _Progress()


def _in_use() -> object:
    """Return what is looked at: a schedule, a transport or a disaggregated job; or None."""
    from megatron_ext.config import choice
    from megatron_ext.disaggregation import job

    return job.current() or choice.current() or choice.for_messages()


def _is_due() -> bool:
    of = _in_use()
    return of is not None and not (_progress.of is of and _progress.steps >= _STEPS)


def _is_not_logged() -> bool:
    of = _in_use()
    return of is not None and not (_progress.of is of and _progress.logged)


def _watched(call: Callable[..., Any], _instance: Any, args: _Args, kwargs: _Keywords) -> Any:
    """Return the schedule such that its first training steps are looked at."""
    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only") or not _is_due():
            return schedule(*args, **kwargs)
        _progress.begin(_in_use())
        model = kwargs["model"]
        _before(model if isinstance(model, list) else [model])
        try:
            result = schedule(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            _explain(error)
            raise
        _progress.steps += 1
        return result

    return run


def _before(chunks: list[Any]) -> None:
    from megatron_ext.config import choice
    from megatron_ext.disaggregation import job

    if job.has_role("forward"):
        effects.check_frozen(chunks)
    chosen = choice.current()
    if chosen is not None and choice.folded():
        effects.check_tied(chosen, chunks, step=_progress.steps)
    if chosen is None or _progress.steps != 1:
        return
    if chosen.schedule(chosen.num_microbatches).splits_backward:
        recorded = "split_backward.linear" in REGISTRY.acted
        effects.check_split(chosen, chunks, recorded=recorded)


def _explain(error: Exception) -> None:
    """Raise what is behind the error of a loss without labels, if that is what it is."""
    from megatron_ext.config import choice

    chosen = choice.current()
    if chosen is not None and choice.folded() and "placement.batch" not in REGISTRY.acted:
        raise effects.labels_missing(chosen) from error


def _logged(call: Callable[..., Any], _instance: Any, args: _Args, kwargs: _Keywords) -> Any:
    """Look at what is logged first."""
    from megatron_ext.config import choice
    from megatron_ext.disaggregation import job

    _progress.begin(_in_use())
    _progress.logged = True
    chosen, messages = choice.current(), choice.for_messages()
    if job.current() is None and chosen is not None:
        effects.check_table(chosen, ran="schedules.forward_backward" in REGISTRY.acted)
        if choice.folded():
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


def _without_gloo(call: Callable[..., Any], _instance: Any, args: _Args, kwargs: _Keywords) -> Any:
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
        reason="looks at the first steps: tied copies are equal, forward ranks are frozen, weight "
        "gradients wait, the last stage has labels",
    ),
    Patch(
        id="effects.logged",
        target=f"{_TRAINING}:training_log",
        fn=_logged,
        when=_is_not_logged,
        order=-20,
        feature="effects",
        reason="looks at the first line that is logged: the table ran, and the loss has arrived",
    ),
    Patch(
        id="effects.gloo",
        target=f"{_TRAINING}:setup_model_and_optimizer",
        fn=_without_gloo,
        when=_gloo_is_off,
        order=-20,
        feature="effects",
        reason="looks at the groups: those that the device's defaults switch off are not there",
    ),
)
