"""Chooses how many W may wait on a rank: `--pipeline-waiting-weights auto`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.config.automatic import question_of
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.pipeline_config import AUTO
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.planning import choice
from megatron_ext.schedules.generators.catalog import CSV_PREFIX

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.waiting import WaitingWeights


@dataclass(frozen=True)
class WaitingChoice:
    """The number that `--pipeline-waiting-weights auto` chooses for a job."""

    number: int
    reason: str
    """The reason why no W can wait, or the memory that the waiting W need."""
    basis: str = ""
    """The devices that the number was chosen for. Empty if the number does not depend on them."""


def waiting_choice(
    args: Namespace, config: PipelineConfig, device: DeviceKind | None
) -> WaitingChoice:
    """Return the number of W that fit into the memory left free in the planner's forecast.

    Args:
        args: Megatron's arguments before its validation, or equivalent sizes.
        config: The completed configuration, which names a schedule.
        device: Description of the devices, or None if unknown.
    """
    try:
        free_memory = _room_for_waiting(args, config, device)
    except (ArgumentsError, ScheduleError) as error:
        # Run without waiting W and log the reason, but not its remedy.
        reason, _, _remedy = str(error).partition("; ")
        return WaitingChoice(0, reason)
    assert device is not None, "a forecast needs the memory of the device"
    basis = f"for {device.name} with {free_memory.limit_gib:.1f} GiB"
    return WaitingChoice(free_memory.number, str(free_memory), basis)


def _room_for_waiting(
    args: Namespace, config: PipelineConfig, device: DeviceKind | None
) -> WaitingWeights:
    """Return the number of W that may wait in a job, together with the memory that they need.

    Raises:
        ArgumentsError: A setting is incompatible with waiting W, or the memory cannot be forecast.
        ScheduleError: The schedule is incompatible with waiting W or has no forecast.
    """
    if not config.pairs:
        raise ArgumentsError("no actions run as pairs")
    for rule in RULES.get("waiting_weights", ()):
        if rule.refuses(args):
            raise ArgumentsError(f"with {rule.flag} {rule.reason}")
    assert config.schedule is not None, "only tables have pairs"
    if config.schedule.startswith(CSV_PREFIX):
        raise ScheduleError(f"the planner has no forecast for {config.schedule}")
    if device is None:
        raise ArgumentsError("the memory of the job's devices is unknown")
    # `question_of` describes a job for any schedule, so remove this schedule's settings.
    undecided = replace(
        config,
        schedule=AUTO,
        chunks=None,
        options={},
        waiting_weights=0,
    )
    _, judge = question_of(args, undecided, device)
    if isinstance(judge, choice.ByForecast):
        return judge.waiting_weights(config.schedule, config.chunks)
    assert isinstance(judge, choice.ByTable)
    raise ArgumentsError(f"memory cannot be forecast ({judge.reason})")
