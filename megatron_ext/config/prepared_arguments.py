"""Prepares a training job for a configuration, at the two points where Megatron allows it.

`prepare` runs between parsing and Megatron's own validation: it translates the flags, works out the
arguments that Megatron needs to host the pipeline, and activates the configuration. `check` runs
after the validation and compares what Megatron computed with what was prepared.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config import announcements, hosting, roles, trace_flags
from megatron_ext.config.active import (
    Active,
    activate_configuration,
    clear_configuration,
    required,
)
from megatron_ext.config.device_flags import device_arguments
from megatron_ext.config.flags import DROPPED, completed, naming_flags, pipeline_config
from megatron_ext.config.incompatible import RULES, refuse
from megatron_ext.errors import ArgumentsError
from megatron_ext.tools.trace import session

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig

__all__ = ["check", "prepare", "rewritten"]

_REWRITTEN = "megatron_ext_rewritten"
"""The attribute in which `_rewrite` keeps (old, new) of the arguments that it changed."""


def prepare(args: Namespace, asked: PipelineConfig | None = None) -> None:
    """Activate a configuration, and set the arguments that let Megatron host it.

    A second call with the same arguments changes nothing; upstream's tools may make one.

    Args:
        args: Parsed arguments with upstream's names; changed in place.
        asked: The argument of `configure`; None: the flags say what to run.

    Raises:
        ArgumentsError: The flags contradict each other, or Megatron's own flags.
        ScheduleError: The schedule does not exist, or not for these sizes.
    """
    clear_configuration()
    given = _as_given(args)
    config = pipeline_config(given) if asked is None else completed(given, asked)
    if config.disaggregation is not None and roles.has_dropout(given):
        config = replace(config, microbatch_rng=True)  # both roles must draw the same masks
    if config.draws_by_microbatch:
        refuse("--microbatch-rng", given, RULES["microbatch_rng"])
    if config.balance == "pack":
        refuse("--pipeline-balance pack", given, RULES["pack"])
    if config.variable_seq_lengths:
        refuse("--variable-seq-lengths", given, RULES["lengths"])
    seed: int | None = given.seed if config.draws_by_microbatch else None
    world_size = int(getattr(given, "world_size", None) or 1)
    found, wanted = Active(config, world_size=world_size, seed=seed, asked=asked), {}
    if config.disaggregation is not None:
        job = roles.job_of(given, config)
        found, wanted = replace(found, job=job), roles.role_arguments(given, job)
    elif config.schedule is None:
        found = replace(found, transport_only=hosting.transport_only_of(given, config))
    else:
        with naming_flags(given) if asked is None else nullcontext():
            pipeline = hosting.pipeline_of(given, config)
        found, wanted = replace(found, pipeline=pipeline), hosting.hosted_arguments(given, pipeline)
    _rewrite(args, {**wanted, **_lengths(given, config), **device_arguments(given, config)})
    _tell_dropped(given)
    if found.pipeline is not None and getattr(given, "microbatch_group_size_per_vp_stage", None):
        hosting.tell(
            given,
            "--microbatch-group-size-per-virtual-pipeline-stage has no effect: the order of "
            "micro-batches is part of the schedule",
        )
    activate_configuration(found)


def _lengths(given: Namespace, config: PipelineConfig) -> dict[str, Any]:
    """Return the arguments for sequences of different lengths.

    Megatron refuses them with the allgather dispatcher, its default, in models without experts too.
    """
    if not config.variable_seq_lengths or getattr(given, "num_experts", None):
        return {}
    return {"moe_token_dispatcher_type": "alltoall"}


def _tell_dropped(args: Namespace) -> None:
    for flag, reason in DROPPED.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            message = "%s %s is ignored: Megatron-LM has dropped it, %s"
            hosting.tell(args, message, flag, value, reason)


def check(args: Namespace) -> None:
    """Compare Megatron's completed arguments with the prepared ones; log what runs.

    Raises:
        ArgumentsError: They differ, or Megatron builds layers that the schedule cannot use.
    """
    found = required()
    if found.config.variable_seq_lengths:
        args.variable_seq_lengths = True  # no flag of Megatron's; its validation clears it
    try:
        activate_configuration(_checked(args, found))
    except ArgumentsError:
        clear_configuration()
        raise
    _tell_what_runs(args)
    session.start(trace_flags.run_of(args, required()))


def _checked(args: Namespace, found: Active) -> Active:
    if found.job is not None:
        roles.check_roles(args)
    if found.pipeline is None:
        return found
    hosting.check_pipeline(args, found.pipeline)
    pipeline = hosting.with_splittable_layers(args, found.pipeline)
    return found if pipeline is found.pipeline else replace(found, pipeline=pipeline)


def _tell_what_runs(args: Namespace) -> None:
    found = required()
    job = found.job
    if job is not None:
        if job.rank == 0:
            hosting.tell(args, "%s", roles.roles_in_words(args, job))
        return
    if getattr(args, "rank", 0) != 0:
        return
    if found.transport_only is not None:
        over = found.transport_only.transport
        hosting.tell(args, "pipeline schedule: Megatron's own; messages over %s", over)
    if found.pipeline is not None:
        hosting.tell(args, "%s", announcements.running(found.pipeline))
        slower = None
        if found.config.dynamic is not None:
            slower = announcements.warning(found.pipeline)
        if slower is not None:
            hosting.tell(args, "%s", slower)


def _as_given(args: Namespace) -> Namespace:
    """Return the arguments as they were before `_rewrite`; later changes by others stay."""
    given = Namespace(**vars(args))
    for dest, (old, new) in vars(given).pop(_REWRITTEN, {}).items():
        if getattr(given, dest, None) == new:
            setattr(given, dest, old)
    return given


def rewritten(args: Namespace) -> dict[str, Any]:
    """Return the arguments that `prepare` changed, with their new values."""
    return {dest: new for dest, (_old, new) in getattr(args, _REWRITTEN, {}).items()}


def _rewrite(args: Namespace, wanted: dict[str, Any]) -> None:
    """Set arguments for Megatron and remember the old values. Nothing else changes arguments."""
    given = _as_given(args)
    vars(args).update(vars(given))
    vars(args).pop(_REWRITTEN, None)
    if wanted:
        changes = {dest: (getattr(args, dest, None), value) for dest, value in wanted.items()}
        vars(args).update({**wanted, _REWRITTEN: changes})
