"""Patches for `megatron.training.arguments`: our flags, the device's defaults, and the checks."""

from __future__ import annotations

import logging
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from megatron_ext.errors import ArgumentsError, message_of, parser_line
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.registry import REGISTRY

_LOG = logging.getLogger(__name__)
_MODULE = "megatron.training.arguments"

PATCHES = PatchTable(feature="arguments")


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to a parser that already has upstream's, and set the device's defaults."""
    from megatron_ext import devices
    from megatron_ext.config.flags import (
        FLAGS,
        MEGATRON_FIELDS,
        add_arguments,
        parse_words,
        requested_flags,
    )

    # Allow for repeated calls: upstream creates up to three parsers per process,
    # because in-process restarts and checkpoint tools parse the flags again.
    add_arguments(parser)
    parser.error = partial(_refuse, parser)  # type: ignore[method-assign]
    # Flags in the environment variable become defaults, so the command line overrides them.
    requested = parse_words(requested_flags(), FLAGS)
    parser.set_defaults(**vars(requested))
    device = devices.current()
    for action in parser._actions:
        convert = action.type
        if not callable(convert):
            continue
        module = getattr(convert, "__module__", "")
        if module.startswith("megatron."):
            action.type = _Converter(convert, has_choices=action.choices is not None)
    action_of = {action.dest: action for action in parser._actions}
    # Upstream's choices cover only the backends for CUDA devices and hosts; add this
    # device's backend.
    backend = action_of.get("distributed_backend")
    if backend is not None:
        choices = list(backend.choices or ())
        if device.distributed_backend not in choices:
            backend.choices = [*choices, device.distributed_backend]
    for dest, (value, _reason) in device.argument_defaults.items():
        # Newer releases name some arguments after their configuration fields.
        config_field = MEGATRON_FIELDS.get(dest, dest)
        for name in {dest, config_field} & action_of.keys():
            parser.set_defaults(**{name: value})
    for action in parser._actions:
        _repair_help(action, parser.prog)
    return parser


def _repair_help(action: Action, program: str) -> None:
    """Escape the % signs in an invalid help text: a bare % in Megatron 0.19 breaks `--help`."""
    text = action.help or ""
    try:
        _ = text % {**vars(action), "prog": program}
    except (KeyError, TypeError, ValueError):
        action.help = text.replace("%", "%%")


class _Converter:
    """Wraps a Megatron converter so that argparse reports every failure as an invalid value."""

    def __init__(self, convert: Callable[[str], Any], *, has_choices: bool) -> None:
        self._convert = convert
        self._has_choices = has_choices
        self.__name__ = getattr(convert, "__name__", "value")

    def __call__(self, word: str) -> Any:
        try:
            return self._convert(word)
        except (ArgumentTypeError, TypeError, ValueError):
            raise
        except Exception as error:  # such as an enumeration's KeyError
            if self._has_choices:
                return word  # argparse then rejects the word and lists the choices
            raise ValueError(str(error)) from error


@PATCHES.row("arguments.flags", f"{_MODULE}:add_megatron_arguments")
def _add_flags(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> ArgumentParser:
    """Megatron does not define megatron_ext's flags or the current device's defaults."""
    return prepare_parser(call(*args, **kwargs))


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """Print one line on one rank and exit; argparse would print hundreds of lines on every rank."""
    from megatron_ext.upstream import failure

    failure.report(ArgumentsError(parser_line(parser, message)))
    raise SystemExit(2)


@PATCHES.row("arguments.validate", f"{_MODULE}:validate_args")
def _validate(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Namespace:
    """Megatron does not check whether flags conflict with each other, a schedule or the device."""
    from megatron_ext.config import active, entrances
    from megatron_ext.patches.listing import text_table
    from megatron_ext.upstream.scripts import is_pretraining

    settings = args[0] if args else kwargs["args"]
    in_force = active.active()
    was_configured_by_code = (
        in_force is not None
        and in_force.requested is not None
        and in_force.host is None
    )
    if was_configured_by_code:
        raise ArgumentsError(
            "megatron_ext.configure was called, but programs with Megatron's command line select "
            "their schedule with flags; use the flags, or call deconfigure first"
        )
    REGISTRY.raise_mismatches()
    # Run before upstream's checks: a schedule sets Megatron up with different sizes, so
    # it changes some arguments, from which upstream must derive other values.
    script_defaults = None
    # Upstream's tools also validate arguments but do not train.
    if is_pretraining(sys.argv[0]):
        script_defaults = args[1] if len(args) > 1 else kwargs.get("defaults", {})
    entrances.prepare(settings, script_defaults=script_defaults)
    try:
        validated: Namespace = call(*args, **kwargs)
    except (AssertionError, ArithmeticError, ValueError) as error:
        raise ArgumentsError(
            f"Megatron-LM refused the arguments: {message_of(error)}"
        ) from error
    entrances.check(validated)
    lists_patches = getattr(validated, "ext_list_patches", False)
    is_first_rank = getattr(validated, "rank", 0) == 0
    if lists_patches and is_first_rank:
        for line in text_table(REGISTRY.rows()).splitlines():
            _LOG.warning("%s", line)
    return validated


@PATCHES.row("arguments.yaml", "megatron.training.yaml_arguments:validate_yaml")
def _validate_yaml(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Namespace:
    """With --yaml-cfg, Megatron ignores all flags, including the one that selects the schedule."""
    from megatron_ext.config.flags import DESTINATIONS, requested_flags

    settings = args[0] if args else kwargs["args"]
    all_words = (*sys.argv, *requested_flags())
    flags = {word.partition("=")[0] for word in all_words}
    for dest in sorted(DESTINATIONS):
        flag = f"--{dest.replace('_', '-')}"
        if dest in vars(settings) or flag in flags:
            raise ArgumentsError(
                f"{flag} has no effect with --yaml-cfg, which replaces all flags; remove "
                "--yaml-cfg and pass Megatron's arguments as flags"
            )
    validated: Namespace = call(*args, **kwargs)
    return validated
