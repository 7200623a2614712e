"""Patches on `megatron.training.arguments`: our flags, the device's defaults, the rules for both.

Upstream parses up to three times in one process (in-process restart and checkpoint tools parse
again), so nothing here may depend on being called once.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.errors import ArgumentsError
from megatron_ext.patches.registry import Patch
from megatron_ext.signatures import flag_destination

__all__ = ["PATCHES", "check_arguments", "prepare_parser"]

_LOG = logging.getLogger(__name__)
_MODULE = "megatron.training.arguments"


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to a parser that has upstream's, and set what the device in use needs.

    Args:
        parser: Upstream's parser, or the embedded trainer's, with all upstream flags in place.

    Returns:
        The same parser.
    """
    from megatron_ext import devices
    from megatron_ext.config.flags import add_arguments

    add_arguments(parser)
    device = devices.current()
    known = {action.dest: action for action in parser._actions}
    backend = known.get("distributed_backend")
    if backend is not None and device.distributed_backend not in (backend.choices or ()):
        backend.choices = [*(backend.choices or ()), device.distributed_backend]
    for dest, (value, _reason) in device.argument_defaults.items():
        here = flag_destination(dest, known)
        if here is not None:
            parser.set_defaults(**{here: value})
    return parser


def check_arguments(args: Namespace) -> None:
    """Refuse arguments that contradict each other or the device in use.

    `--distributed-backend` alone is corrected instead, with a notice: scripts written for GPUs name
    NCCL as a matter of course, and there is only one possible backend on each device.

    Raises:
        ArgumentsError: What is wrong, one line for each mistake.
        UpstreamMismatch: The Megatron in use is not the one that active patches were written for.
    """
    from megatron_ext import devices
    from megatron_ext.config.flags import ExtConfig
    from megatron_ext.patches.registry import REGISTRY

    REGISTRY.raise_mismatches()
    _tell_dropped(args)
    device = devices.current()
    asked = ExtConfig.from_args(args).device_backend
    if asked not in {"auto", device.name} and not _is_of_forward_rank(args, device.name):
        raise ArgumentsError(
            f"--device-backend {asked} came after the {device.name} backend was armed (Megatron "
            f"was imported before the arguments were known); set MEGATRON_EXT_DEVICE={asked} too"
        )
    errors = []
    for dest, (value, reason) in device.argument_defaults.items():
        here = flag_destination(dest, vars(args)) or dest
        found = getattr(args, here, value)
        if found == value:
            continue
        if dest == "distributed_backend":
            _LOG.warning("--distributed-backend %s: %s is used, %s", found, value, reason)
            args.distributed_backend = value
            continue
        flag = f"--{here.replace('_', '-')}"
        errors.append(f"{flag} is {found!r}, {device.name} needs {value!r}: {reason}")
    errors.extend(device.argument_errors(args))
    if errors:
        raise ArgumentsError("\n".join(errors))


def _is_of_forward_rank(args: Namespace, name: str) -> bool:
    """Tell whether a device is that of forward ranks, which may differ from all others."""
    return getattr(args, "fbd_forward_device", None) == name


def _tell_dropped(args: Namespace) -> None:
    from megatron_ext.config.flags import DROPPED

    for flag, reason in DROPPED.items():
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None and getattr(args, "rank", 0) == 0:
            _LOG.warning("%s %s is ignored: Megatron-LM has dropped it, %s", flag, value, reason)


def _add_flags(
    call: Callable[..., ArgumentParser], _instance: Any, args: tuple[Any, ...], kwargs: Any
) -> ArgumentParser:
    return prepare_parser(call(*args, **kwargs))


def _validate(
    call: Callable[..., Namespace], _instance: Any, args: tuple[Any, ...], kwargs: Any
) -> Namespace:
    """Check ours first, then upstream's, whose assertions are about what the user typed.

    A schedule rewrites some of that in between: it is hosted under other sizes than it has.
    """
    from megatron_ext.config import flags

    given = args[0] if args else kwargs["args"]
    check_arguments(given)
    flags.prepare(given)
    try:
        validated = call(*args, **kwargs)
    except (AssertionError, ArithmeticError, ValueError) as error:
        raise ArgumentsError(f"Megatron-LM refused the arguments: {_told(error)}") from error
    flags.check(validated)
    _show_patches(validated)
    return validated


def _told(error: Exception) -> str:
    """Return an error's message, or the line that raised it where upstream gave none.

    A division by a size of zero says too little by itself.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{place.line} ({Path(place.filename).name}:{place.lineno})"
    if isinstance(error, ArithmeticError):
        return f"{error}: {line}"
    return str(error) or line


def _show_patches(args: Namespace) -> None:
    from megatron_ext.config.flags import ExtConfig
    from megatron_ext.patches.listing import text_table
    from megatron_ext.patches.registry import REGISTRY

    if ExtConfig.from_args(args).ext_list_patches and getattr(args, "rank", 0) == 0:
        for line in text_table(REGISTRY.rows()).splitlines():
            _LOG.warning("%s", line)


def _attach_config(
    call: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Hang our settings on the model's configuration, where code without arguments finds them.

    Not a dataclass field: upstream generates command-line flags from the fields of its
    configuration. Runs for each micro-batch (`get_batch` builds a configuration), so it is cheap.
    """
    from megatron_ext.config.flags import ExtConfig

    config = call(*args, **kwargs)
    config.megatron_ext = ExtConfig.from_args(args[0] if args else kwargs["args"])
    assert dataclasses.is_dataclass(config)
    return config


PATCHES = (
    Patch(
        id="arguments.flags",
        target=f"{_MODULE}:add_megatron_arguments",
        fn=_add_flags,
        feature="arguments",
        reason="adds the flags of megatron_ext and the defaults that the device in use needs",
    ),
    Patch(
        id="arguments.validate",
        target=f"{_MODULE}:validate_args",
        fn=_validate,
        feature="arguments",
        reason="refuses flags that exclude each other or the device, before anything is started",
    ),
    *(
        Patch(
            id="arguments.config",
            target=f"{module}:core_transformer_config_from_args",
            fn=_attach_config,
            feature="arguments",
            reason="carries the settings of megatron_ext on the model's configuration",
            since=since,
            until=until,
        )
        for module, since, until in (
            (_MODULE, None, "0.18"),
            ("megatron.training.argument_utils", "0.18", None),
        )
    ),
)
