"""What the launcher told this process in its environment; read once for a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Environment"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where this process is among those that were started together."""

    local_rank: int = 0
    """Number of this process on its host."""
    local_world_size: int | None = None
    """Processes on this host; None: all of the job."""
    run: tuple[str, str] = ("", "")
    """Of torchrun: the run, and how often its processes were started again."""
    rendezvous_host: str = "localhost"
    """Where processes find each other."""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables that torchrun sets, and those who start processes like it."""
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
        """Return how many ranks of a job run on this host."""
        return self.local_world_size or world_size
