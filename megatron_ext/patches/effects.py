"""Checks during the first steps that features have their intended effect.

A patch can be in place without effect, because Megatron no longer calls its target. No comparison
of functions shows that, and losses keep falling. A failed check raises `EffectMissing`, which names
the patch.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_ext.config import active
from megatron_ext.errors import EffectMissing
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.upstream import releases

# Number of steps to check: by then tied copies have been filled, and updated once.
_STEPS = 2

PATCHES = PatchTable(feature="effects", order=-20)


def in_use() -> active.Active | None:
    """Return what is in force if it has a schedule, a transport or roles; else None."""
    found = active.active()
    if found is None or not (found.job or found.pipeline or found.transport_only):
        return None
    return found


def _is_due() -> bool:
    found = in_use()
    return found is not None and found.checked_steps < _STEPS


def not_logged() -> active.Active | None:
    """Return what is in force while the first line of the log is still to be checked."""
    found = in_use()
    return None if found is None or found.is_log_checked else found


def _acted(*patches: str) -> bool:
    # Checks go by what our patches did in the steps that ran, on this rank: a program that does
    # something else than upstream's is none of our business.
    return not REGISTRY.acted.isdisjoint(patches)


def _missing(feature: str, effect: str, found: str, patch: str) -> EffectMissing:
    installed, tested = releases.core_version() or "(none)", releases.reference().version
    return EffectMissing(
        f"{feature}: {effect}, but {found}; the patch {patch} should ensure this (see "
        f"`megatron-ext patches list`). Megatron {installed} is installed; leave {feature} out, or "
        f"use the version that it was tested with: pip install megatron-core=={tested}"
    )


def another_schedule(name: str) -> EffectMissing:
    """Return the error of a schedule that is in force, while another one runs."""
    return _missing(
        f"--pipeline-schedule {name}",
        "steps run its table",
        "the first step ran another schedule",
        "schedules.forward_backward",
    )


@PATCHES.row(
    "effects.steps",
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    when=_is_due,
)
def _watched(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not check in the first steps that copies are equal, forward ranks frozen."""
    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _is_due():
            return schedule(*args, **kwargs)
        found, model = active.required(), kwargs["model"]
        trains = not kwargs.get("forward_only")
        # Before the step: what it trains on must be right already, and its failure may hide why.
        if trains or not found.is_evaluation_checked:
            _check_model(model if isinstance(model, list) else [model], found.checked_steps)
        result = schedule(*args, **kwargs)
        found.checked_steps += trains
        found.is_evaluation_checked = True
        return result

    return run


def _check_model(chunks: list[Any], step: int) -> None:
    if active.has_role("forward") and not _acted(
        "disaggregation.model", "disaggregation.model_of_builders"
    ):
        trained = sum(p.requires_grad for chunk in chunks for p in chunk.parameters())
        if trained:
            raise _missing(
                "--forward-backward-disaggregating",
                "forward ranks keep no gradients",
                f"{trained} weights of this one require some",
                "disaggregation.model",
            )
    chosen = active.pipeline()
    if chosen is not None and chosen.is_folded:
        from megatron_ext.runtime.folded import differing_copies

        differ = differing_copies(chunks)
        if differ is None:
            return
        flag, found = f"--pipeline-schedule {chosen.name}", active.required()
        effect = "the copies of the tied embedding on the first rank are equal"
        if not step and found.requested is not None and found.host is None:
            # A program with a training loop of its own, which calls `configure` with its sizes.
            raise EffectMissing(
                f"{flag}: {effect}, but {differ}; call "
                "megatron_ext.runtime.folded.tie_embeddings(chunks) after building the model"
            )
        raise _missing(
            flag, effect, differ, "placement.tied_gradients" if step else "placement.tied_weights"
        )


@PATCHES.row("effects.logged", "megatron.training.training:training_log", of=not_logged)
def logged(found: active.Active, call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not verify at the first log line that the table ran and the loss arrived."""
    # Once: what had no effect in the steps before the first line will have none later.
    found.is_log_checked = True
    chosen, messages = found.pipeline, found.transport_only
    if chosen is not None and not _acted("schedules.forward_backward"):
        raise another_schedule(chosen.name)
    if chosen is not None and chosen.is_folded:
        losses = args[0] if args else kwargs["loss_dict"]
        if not losses and not _acted("placement.train_step", "bridge.train_step"):
            raise _missing(
                f"--pipeline-schedule {chosen.name}",
                "the loss, which is on the first rank, is brought to the rank that logs",
                "there was none",
                "placement.train_step",
            )
    if messages is not None and messages.pp > 1 and not _acted("pipeline.messages"):
        raise _missing(
            f"--pipeline-transport {messages.transport}",
            "it carries tensors between stages",
            "the first step sent nothing through it",
            "pipeline.messages",
        )
    return call(*args, **kwargs)
