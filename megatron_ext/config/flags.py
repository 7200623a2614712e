"""Our command-line flags, and the one frozen object that the rest of the package reads.

Arguments flow one way: `add_arguments` puts our group on a parser (upstream's or the embedded
trainer's), `ExtConfig.from_args` reads the parsed values, and everything behind it sees only the
`ExtConfig`. Features make objects of their own of their flags, in `prepare` and `check`: a schedule
becomes a `Choice`, disaggregation a `Job`, tracing a session.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext import devices
from megatron_ext.config import disaggregation_flags as disaggregation
from megatron_ext.config import schedule_flags, trace_flags
from megatron_ext.trace import session

__all__ = ["DROPPED", "ExtConfig", "add_arguments", "check", "prepare"]

DROPPED = {"--data-impl": "datasets are always the memory-mapped ones"}
"""Flags of older command lines that Megatron-LM has dropped: accepted, with a notice, for nothing.
Why nothing is lost."""


@dataclass(frozen=True)
class ExtConfig:
    """The settings of this package for one run; field names are flag names with underscores."""

    device_backend: str = "auto"
    """Which device backend to use: auto, cuda, musa or cpu."""
    ext_list_patches: bool = False
    """Whether rank 0 prints the table of patches before training."""

    @classmethod
    def from_args(cls, args: Namespace) -> ExtConfig:
        """Read our settings from parsed arguments.

        Settings that are missing get their defaults: a namespace that upstream built from a YAML
        file holds none of our flags.
        """
        found: dict[str, Any] = {
            field.name: getattr(args, field.name)
            for field in fields(cls)
            if getattr(args, field.name, None) is not None
        }
        return cls(**found)


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
        choices=devices.CHOICES,
        default=ExtConfig.device_backend,
        help="Device that the whole of Megatron runs on. auto takes CUDA, else MUSA, else the CPU. "
        "MEGATRON_EXT_DEVICE does the same for programs that build their arguments themselves.",
    )
    group.add_argument(
        "--ext-list-patches",
        action="store_true",
        help="Print the table of patches on rank 0 before training.",
    )
    schedule_flags.add_flags(group)
    disaggregation.add_flags(group)
    trace_flags.add_flags(group)
    for flag, reason in DROPPED.items():
        group.add_argument(flag, metavar="VALUE", help=f"Ignored: {reason}.")
    return parser


def prepare(args: Namespace) -> None:
    """Act on our flags before Megatron validates the arguments.

    Calling it again with the same arguments, which upstream's tools may do, changes nothing.

    Args:
        args: Parsed arguments with upstream's names; changed in place.

    Raises:
        ArgumentsError: The flags contradict each other.
        ScheduleError: There is no such schedule, or none for these sizes.
    """
    disaggregated = disaggregation.prepare(args)
    schedule_flags.prepare(args, tables=not disaggregated)


def check(args: Namespace) -> None:
    """Compare what Megatron made of the arguments with what was prepared, and tell what runs.

    Raises:
        ArgumentsError: They differ.
    """
    disaggregation.check(args)
    schedule_flags.check(args)
    session.start(args)
