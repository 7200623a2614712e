"""Patches on distributed checkpoints."""

from __future__ import annotations

import copyreg
import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]


_COMMON = "megatron.core.dist_checkpointing.strategies.common"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _start_without_main(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Start the queue's process without the training script, which it does not need."""
    # A spawned process first imports its parent's main script if that is a file.
    names = vars(sys.modules["__main__"])
    path = names.pop("__file__", None)
    try:
        return call(*args, **kwargs)
    finally:
        if path is not None:
            names["__file__"] = path


@cache
def _enums_are_written_as_getattr() -> bool:
    """Return whether this Python pickles a member of an enum as a call of `getattr`."""

    class Probe(enum.Enum):
        MEMBER = 0

    return Probe.MEMBER.__reduce_ex__(2)[0] is getattr


def _with_enums_by_value(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Write Megatron's enums as later Pythons do: the class, called with the value."""
    from megatron.core.safe_globals import SAFE_GLOBALS

    classes = [each for each in SAFE_GLOBALS if isinstance(each, type)]
    with _by_value([each for each in classes if issubclass(each, enum.Enum)]):
        return call(*args, **kwargs)


@contextmanager
def _by_value(classes: list[type[enum.Enum]]) -> Iterator[None]:
    new = [each for each in classes if each not in copyreg.dispatch_table]
    for each in new:
        copyreg.pickle(each, lambda member: (type(member), (member.value,)))
    try:
        yield
    finally:
        for each in new:
            del copyreg.dispatch_table[each]


def _rows(old: str, new: str, **common: Any) -> Iterator[Patch]:
    """Yield one patch of a method of 0.16 that is a function from 0.17 on."""
    module = new.partition(":")[0]
    yield Patch(target=f"{module}:{old}", until="0.17", required=False, **common)
    yield Patch(target=new, since="0.17", required=False, **common)


PATCHES = (
    *_rows(
        "TorchCommonSaveStrategy.save_common",
        f"{_COMMON}:save_common",
        id="dist_checkpointing.enums_by_value",
        fn=_with_enums_by_value,
        when=_enums_are_written_as_getattr,
        reason="Python 3.11.0 to 3.11.3 pickle enums in a way that torch's loader refuses, so no "
        "run goes on from a checkpoint that was saved there",
    ),
    *_rows(
        "_get_write_results_queue",
        f"{_WRITER}:get_write_results_queue",
        id="dist_checkpointing.queue_process",
        fn=_start_without_main,
        reason="the process behind the queue imports the training script, which takes seconds, "
        "and fails if the script needs `python -m megatron_ext` to find Megatron",
    ),
)
