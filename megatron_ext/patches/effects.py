"""Checks that features have their intended effect during the first training steps.

If Megatron no longer calls a patch's target, the patch has no effect, and neither the drift guard
nor the losses reveal it. A failed check raises `EffectMissing`, which names the patch.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_ext.config import active
from megatron_ext.errors import EffectMissing
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.upstream import releases

# Number of steps to check: the check before the second step covers the first update of
# tied copies.
_STEPS = 2

PATCHES = PatchTable(feature="effects", order=-20)


def in_use() -> active.Active | None:
    """Return the active configuration if it has a schedule, a transport or roles, else None."""
    in_force = active.active()
    if in_force is None:
        return None
    if in_force.job or in_force.pipeline or in_force.transport_only:
        return in_force
    return None


def _is_used() -> bool:
    return in_use() is not None


def not_logged() -> active.Active | None:
    """Return the active configuration until the first log line has been checked, then None."""
    in_force = in_use()
    if in_force is None or in_force.is_log_checked:
        return None
    return in_force


def _acted(*patch_ids: str) -> bool:
    # Check which patches have run on this rank so far, because a program's training
    # loop may differ from upstream's.
    return not REGISTRY.acted.isdisjoint(patch_ids)


def _missing(
    feature: str,
    effect: str,
    observation: str,
    patch_id: str,
) -> EffectMissing:
    installed_version = releases.core_version() or "(none)"
    tested_version = releases.reference().version
    return EffectMissing(
        f"{feature}: expected that {effect}, but {observation}; the patch {patch_id} should ensure "
        f"this (see `megatron-ext patches list`). Megatron {installed_version} is installed; "
        f"remove {feature}, or use the version it was tested with: pip install "
        f"megatron-core=={tested_version}"
    )


def another_schedule(name: str) -> EffectMissing:
    """Return the error for a first step that ran a schedule other than the active one."""
    return _missing(
        f"--pipeline-schedule {name}",
        "steps run its table",
        "the first step ran a different schedule",
        "schedules.forward_backward",
    )


@PATCHES.row(
    "effects.steps",
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    when=_is_used,
)
def _watched(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not check during the first steps that tied copies are identical and forward
    ranks are frozen.
    """
    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Megatron's training loop fetches this function once and calls it every step.
        in_force = in_use()
        if in_force is None:
            return schedule(*args, **kwargs)
        model = kwargs["model"]
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        num_checked = in_force.checked_steps.get(chunks[0])
        if num_checked == _STEPS:
            return schedule(*args, **kwargs)
        is_training = not kwargs.get("forward_only")
        # Check before the step: bad inputs may make the step itself fail with an error
        # that hides the cause.
        if is_training or num_checked is None:
            _check_frozen(chunks)
            _check_copies(chunks, in_force)
        result = schedule(*args, **kwargs)
        # Do not count evaluations, which do not update the copies.
        in_force.checked_steps[chunks[0]] = (num_checked or 0) + is_training
        return result

    return run


def _check_frozen(chunks: list[Any]) -> None:
    """Check that no weight on a forward rank requires a gradient.

    Raises:
        EffectMissing: Some weights require a gradient.
    """
    if not active.has_role("forward"):
        return
    if _acted("disaggregation.model", "disaggregation.model_of_builders"):
        return
    num_trained = 0
    for chunk in chunks:
        num_trained += sum(weight.requires_grad for weight in chunk.parameters())
    if num_trained:
        raise _missing(
            "--forward-backward-disaggregating",
            "forward ranks keep no gradients",
            f"{num_trained} weights on this rank require gradients",
            "disaggregation.model",
        )


def _check_copies(chunks: list[Any], in_force: active.Active) -> None:
    """Check, on a rank with the first and last stage, that both embedding copies are identical.

    Raises:
        EffectMissing: The copies differ.
    """
    pipeline = in_force.pipeline
    if pipeline is None or not pipeline.is_folded:
        return
    from megatron_ext.runtime.folded import differing_copies

    difference = differing_copies(chunks)
    if difference is None:
        return
    flag = f"--pipeline-schedule {pipeline.name}"
    effect = "the copies of the tied embedding on the first rank are identical"
    is_first_step = not in_force.checked_steps.get(chunks[0])
    # The program has its own training loop and calls `configure` with its sizes.
    has_own_loop = in_force.requested is not None and in_force.host is None
    if is_first_step and has_own_loop:
        raise EffectMissing(
            f"{flag}: {effect}, but {difference}; call "
            "megatron_ext.runtime.folded.tie_embeddings(chunks) after building the model"
        )
    patch_id = "placement.tied_gradients"
    if is_first_step:
        patch_id = "placement.tied_weights"
    raise _missing(flag, effect, difference, patch_id)


@PATCHES.row("effects.logged", "megatron.training.training:training_log", of=not_logged)
def logged(
    in_force: active.Active,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not verify at the first log line that the table ran and the loss arrived."""
    # One check is enough: a feature that has had no effect by the first log line will
    # have none later.
    in_force.is_log_checked = True
    pipeline = in_force.pipeline
    if pipeline is not None and not _acted("schedules.forward_backward"):
        raise another_schedule(pipeline.name)
    if pipeline is not None and pipeline.is_folded:
        losses = args[0] if args else kwargs["loss_dict"]
        _check_losses_arrived(pipeline, losses)
    messages = in_force.transport_only
    if messages is not None and messages.pp > 1 and not _acted("pipeline.messages"):
        raise _missing(
            f"--pipeline-transport {messages.transport}",
            "it carries tensors between stages",
            "the first step sent nothing through it",
            "pipeline.messages",
        )
    return call(*args, **kwargs)


def _check_losses_arrived(pipeline: active.Pipeline, losses: Any) -> None:
    if not losses and not _acted("placement.train_step", "bridge.train_step"):
        raise _missing(
            f"--pipeline-schedule {pipeline.name}",
            "the loss, which is on the first rank, reaches the rank that logs",
            "it did not",
            "placement.train_step",
        )
