"""The launcher's environment variables; each configuration reads them once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ArgumentsError

__all__ = ["FLAGS", "Environment", "requested_flags"]

FLAGS = "MEGATRON_EXT_FLAGS"
"""Flags of this package for programs that do not parse Megatron's command line."""


def requested_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the words of `MEGATRON_EXT_FLAGS`, split as by a shell; none if it is not set.

    Raises:
        ArgumentsError: A quotation does not end.
    """
    text = environ.get(FLAGS, "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentsError(f"{FLAGS} is {text!r}: {error}; close the quotation") from None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Place of this process among those that the launcher started together."""

    local_rank: int = 0
    """Number of this process on its host."""
    local_world_size: int | None = None
    """Processes on this host; None: all of the job."""
    run: tuple[str, str] = ("", "")
    """torchrun's run id and restart count; empty without torchrun."""
    rendezvous_host: str = "localhost"
    """Where processes find each other: torchrun's MASTER_ADDR."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables that torchrun and compatible launchers set."""
        size = environ.get("LOCAL_WORLD_SIZE")
        return cls(
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            local_world_size=None if size is None else int(size),
            run=(
                environ.get("TORCHELASTIC_RUN_ID", ""),
                environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            ),
            rendezvous_host=environ.get("MASTER_ADDR") or "localhost",
        )

    def ranks_per_node(self, world_size: int) -> int:
        """Return the number of ranks on this host."""
        return self.local_world_size or world_size
