"""Our command-line flags, and their one translation into a `PipelineConfig`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from megatron_ext.config import (
    disaggregation_flags,
    schedule_flags,
    stages,
    trace_flags,
    transport_flags,
)
from megatron_ext.config.pipeline_config import ConfigurationError, PipelineConfig
from megatron_ext.config.sized_pipeline import base_table
from megatron_ext.devices import CHOICES
from megatron_ext.errors import ArgumentsError

__all__ = [
    "DROPPED",
    "FIELD_OF",
    "add_arguments",
    "completed",
    "flag_names",
    "parse_words",
    "pipeline_config",
    "read_words",
    "said_by",
]

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
    "slices": "--pipeline-slices",
    "balance": "--pipeline-balance",
    "length_costs": "--pipeline-length-costs",
    "transport": "--pipeline-transport",
    "device_path": "--pipeline-device-path",
    "checksums": "--pipeline-checksum",
    "node_ips": "--node-ips",
    "variable_seq_lengths": "--variable-seq-lengths",
    "disaggregation": disaggregation_flags.FLAG,
    "tracing": "--trace",
    "interval": "--trace-interval",
    "iterations": "--trace-iterations",
    "hang_timeout_s": "--hang-timeout",
    "message_timeout_s": "--distributed-timeout-minutes, in seconds,",
}
"""Flag by the field that it sets, for error messages."""

FIELD_OF = {flag: field for field, flag in _FLAG_OF.items()}
"""The other way round."""


class _Parser(ArgumentParser):
    """A parser of our flags alone, whose mistakes are exceptions."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the words."""
        raise ArgumentsError(message)


def parse_words(words: Sequence[str], source: str) -> Namespace:
    """Return what words say that are flags of this package and nothing else.

    Args:
        words: As on a command line.
        source: Where they come from, for error messages.

    Raises:
        ArgumentsError: One is no flag of ours, or has no such value.
    """
    parser = add_arguments(_Parser(prog=source, add_help=False, allow_abbrev=False))
    try:
        return parser.parse_args(list(words))
    except ArgumentsError as error:
        raise ArgumentsError(
            f"{source} is {' '.join(words)!r}: {error}; it takes the flags of megatron_ext alone, "
            "such as --pipeline-schedule zb-v --pipeline-transport shm"
        ) from None


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a training command line, read without Megatron's parser.

    A flag without a value is a switch; `--no-` and `--disable-` turn one off. Numbers are numbers.

    Raises:
        ArgumentsError: A flag of ours has no such value.
    """
    own = add_arguments(_Parser(prog="the command line", add_help=False, allow_abbrev=False))
    parsed, others = own.parse_known_args(list(words))
    found: dict[str, Any] = {}
    values: list[Any] = []
    for word in others:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            values = [_number(value)] if equals else []
            dest = flag[2:].replace("-", "_")
            found[_DEST_OF.get(dest, dest)] = values
        else:
            values.append(_number(word))
    settings = {
        dest: all_[0] if len(all_) == 1 and dest not in _SEVERAL else all_ or True
        for dest, all_ in found.items()
    }
    for dest in list(settings):
        positive = dest.removeprefix("no_")
        if positive != dest and settings[dest] is True:
            settings[positive] = not settings.pop(dest)
    if settings.pop("disable_bias_linear", False):
        settings["add_bias_linear"] = False
    return {**vars(parsed), **settings}


_DEST_OF = {
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "overlap_p2p_communication": "overlap_p2p_comm",
}
"""Destination of flags of Megatron's that are not named after it."""

_SEVERAL = ("rampup_batch_size", "recompute_modules")
"""Flags of Megatron's that take several values."""


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our group of flags to a parser, once.

    Args:
        parser: Upstream's parser.

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
    try:
        return PipelineConfig(
            **schedule_flags.schedule_fields(args),
            **transport_flags.transport_fields(args),
            disaggregation=disaggregation_flags.disaggregation(args),
            tracing=trace_flags.tracing(args),
            hang_timeout_s=getattr(args, "hang_timeout", None),
            variable_seq_lengths=bool(getattr(args, "variable_seq_lengths", False)),
            microbatch_rng=bool(getattr(args, "microbatch_rng", False)),
            device=getattr(args, "device_backend", None) or PipelineConfig.device,
        )
    except ConfigurationError as error:
        raise ArgumentsError(error.worded(flag_names(args))) from None


def said_by(words: Sequence[str], source: str) -> dict[str, object]:
    """Return the settings that words change, by the names of their arguments.

    Args:
        words: As on a command line.
        source: Where they come from, for error messages.

    Raises:
        ArgumentsError: One is no flag of ours, or has no such value.
    """
    usual = vars(parse_words([], source))
    given = vars(parse_words(words, source))
    return {dest: value for dest, value in given.items() if value != usual[dest]}


def completed(args: Namespace, config: PipelineConfig) -> PipelineConfig:
    """Return a configuration with what it leaves to the sizes of a job.

    Args:
        args: Those, with upstream's names.
        config: As a program gave it.

    Raises:
        ArgumentsError: What the sizes say about the stages of each rank does not go together.
    """
    name, chunks = config.schedule, config.chunks
    if name is None and config.dynamic is not None:
        name = base_table(stages.chunks_of_megatron(args))
    if name is not None and chunks is None:
        chunks = stages.num_chunks(args, name)
    fields = {} if config.stash_ratio > 1 else schedule_flags.stash_fields(args, name, chunks)
    return replace(config, schedule=name, chunks=chunks, **fields)


def flag_names(args: Namespace) -> dict[str, str]:
    """Return the flag of each field, for messages; several flags may have chosen the schedule."""
    return {**_FLAG_OF, **_given_by(args)}


def _given_by(args: Namespace) -> dict[str, str]:
    """Return the flag that chose the schedule, with and without its value."""
    name = getattr(args, "pipeline_schedule", None)
    if name is not None:
        return {"chosen": f"--pipeline-schedule {name}", "chooser": "--pipeline-schedule"}
    bitpipe = getattr(args, "enable_bitpipe_schedule", False)
    flag = "--enable-bitpipe-schedule" if bitpipe else "--use-dpp"
    return {"chosen": flag, "chooser": flag}
