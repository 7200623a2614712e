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
"""Flags of older command lines that Megatron-LM has dropped: accepted, with a notice, for nothing.
Why nothing is lost."""

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
"""Flags by the field that they set, for error messages."""


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
        help="Device that the whole of Megatron runs on. auto takes CUDA, else MUSA, else the CPU. "
        "MEGATRON_EXT_DEVICE does the same for programs that build their arguments themselves.",
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
    """Translate the flags.

    Settings that are missing get their defaults: a namespace that upstream built from a YAML file
    holds none of our flags.

    Args:
        args: Parsed arguments with upstream's names, as the user gave them.

    Raises:
        ArgumentsError: The flags contradict each other.
        ScheduleError: There is no such schedule.
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
    """Name flags instead of fields in the errors of a configuration.

    Args:
        args: What was given; a schedule may have been chosen by several flags.

    Raises:
        ArgumentsError: What was a `ConfigurationError` inside.
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
