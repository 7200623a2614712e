"""Patches on distributed checkpoints."""

from __future__ import annotations

import sys
from typing import Any

from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]


_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _start_without_main(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Start the queue's process without the training script.

    A spawned process first imports its parent's main script if that is a file. The process behind
    this queue does not need it.
    """
    names = vars(sys.modules["__main__"])
    path = names.pop("__file__", None)
    try:
        return call(*args, **kwargs)
    finally:
        if path is not None:
            names["__file__"] = path


PATCHES = tuple(
    Patch(
        id="dist_checkpointing.queue_process",
        target=f"{_WRITER}:{name}",
        fn=_start_without_main,
        required=False,
        reason="the process behind the queue imports the training script, which takes seconds, "
        "and fails if the script needs `python -m megatron_ext` to find Megatron",
        since=since,
        until=until,
    )
    for name, since, until in (
        ("_get_write_results_queue", None, "0.17"),
        ("get_write_results_queue", "0.17", None),
    )
)
