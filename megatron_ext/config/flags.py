"""Our command-line flags, and their one translation into a `PipelineConfig`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.config import (
    disaggregation_flags,
    schedule_flags,
    trace_flags,
    transport_flags,
)
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.devices import CHOICES
from megatron_ext.errors import ArgumentsError

__all__ = ["DROPPED", "add_arguments", "naming_flags", "pipeline_config"]

DROPPED = {"--data-impl": "datasets are always the memory-mapped ones"}
"""Flags that Megatron-LM has dropped, each with the reason why it is not needed any more. They are
accepted with a notice and have no effect."""

_FLAG_OF = {
    "schedule": "--pipeline-schedule",
    "pipeline_ranks": "--pipeline-model-parallel-size",
    "costs": "--pipeline-costs",
    "dynamic": "--use-dpp",
    "policy": "--dpp-policy",
    "extra_activations": "--dpp-extra-activations",
    "transport": "--pipeline-transport",
    "device_path": "--pipeline-device-path",
    "checksums": "--pipeline-checksum",
    "node_ips": "--node-ips",
    "disaggregation": disaggregation_flags.FLAG,
    "tracing": "--trace",
    "interval": "--trace-interval",
    "iterations": "--trace-iterations",
    "hang_timeout_s": "--hang-timeout",
    "message_timeout_s": "--distributed-timeout-minutes, in seconds,",
}
"""Flag by the field that it sets, for error messages."""


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our group of flags to a parser, once.

    Args:
        parser: Upstream's parser or the embedded trainer's.

    Returns:
        The same parser.
    """
    if any(group.title == "megatron_ext" for group in parser._action_groups):
        return parser
    group = parser.add_argument_group(title="megatron_ext")
    group.add_argument(
        "--device-backend",
        choices=CHOICES,
        default=PipelineConfig.device,
        help="Device that Megatron runs on. auto picks CUDA, else MUSA, else the CPU. Programs "
        "that build their arguments themselves set MEGATRON_EXT_DEVICE instead.",
    )
    group.add_argument(
        "--ext-list-patches",
        action="store_true",
        help="Print the table of patches on rank 0 before training.",
    )
    schedule_flags.add_flags(group)
    disaggregation_flags.add_flags(group)
    trace_flags.add_flags(group)
    for flag, reason in DROPPED.items():
        group.add_argument(flag, metavar="VALUE", help=f"Ignored: {reason}.")
    return parser


def pipeline_config(args: Namespace) -> PipelineConfig:
    """Translate the flags into a configuration.

    Missing settings get their defaults: a namespace that upstream built from a YAML file holds
    none of our flags.

    Args:
        args: Parsed arguments with upstream's names, as the user gave them.

    Raises:
        ArgumentsError: The flags contradict each other.
        ScheduleError: The schedule does not exist.
    """
    with naming_flags(args):
        return PipelineConfig(
            **schedule_flags.schedule_fields(args),
            **transport_flags.transport_fields(args),
            disaggregation=disaggregation_flags.disaggregation(args),
            tracing=trace_flags.tracing(args),
            hang_timeout_s=getattr(args, "hang_timeout", None),
            microbatch_rng=bool(getattr(args, "microbatch_rng", False)),
            device=getattr(args, "device_backend", None) or PipelineConfig.device,
        )


@contextmanager
def naming_flags(args: Namespace) -> Iterator[None]:
    """Make errors of a configuration name flags instead of fields.

    Args:
        args: Parsed arguments; several flags may have chosen the schedule.

    Raises:
        ArgumentsError: In place of a `ConfigurationError` raised inside.
    """
    try:
        yield
    except ConfigurationError as error:
        raise ArgumentsError(error.worded({**_FLAG_OF, **_given_by(args)})) from None


def _given_by(args: Namespace) -> dict[str, str]:
    """Return the flag that chose the schedule, with and without its value."""
    name = getattr(args, "pipeline_schedule", None)
    if name is not None:
        return {"chosen": f"--pipeline-schedule {name}", "chooser": "--pipeline-schedule"}
    bitpipe = getattr(args, "enable_bitpipe_schedule", False)
    flag = "--enable-bitpipe-schedule" if bitpipe else "--use-dpp"
    return {"chosen": flag, "chooser": flag}
