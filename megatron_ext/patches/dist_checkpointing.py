"""Patches on distributed checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]


@cache
def _without_psutil() -> bool:
    return find_spec("psutil") is None


_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _start_without_main(
    call: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Start the queue's process without the training script.

    A spawned process first imports the main script of its parent, where that has a file. The
    process behind this queue needs nothing of it.
    """
    names = vars(sys.modules["__main__"])
    path = names.pop("__file__", None)
    try:
        return call(*args, **kwargs)
    finally:
        if path is not None:
            names["__file__"] = path


def _resident_bytes(
    _call: Callable[..., Any], _instance: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> int:
    """Return what psutil would: the resident memory of this process."""
    from megatron_ext import compat

    return compat.rss_bytes()


PATCHES = (
    Patch(
        id="dist_checkpointing.process_memory",
        target=f"{_WRITER}:_process_memory",
        kind="replace",
        fn=_resident_bytes,
        when=_without_psutil,
        reason="psutil, which megatron-core does not require, is used for a log line of the "
        "writer processes; without it they die and saving hangs",
    ),
    *(
        Patch(
            id="dist_checkpointing.queue_process",
            target=f"{_WRITER}:{name}",
            fn=_start_without_main,
            required=False,
            reason="the process behind the queue imports the training script, which takes seconds, "
            "and fails where the script needs `python -m megatron_ext` to find Megatron",
            since=since,
            until=until,
        )
        for name, since, until in (
            ("_get_write_results_queue", None, "0.17"),
            ("get_write_results_queue", "0.17", None),
        )
    ),
)
