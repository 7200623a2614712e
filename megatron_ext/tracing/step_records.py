"""Records each step's losses and gradient norm in full precision, along with its time and memory.

Megatron's log rounds these numbers to a few digits. Each rank writes JSON lines to `rank-R.jsonl`
in a folder: first its identity, then one line per step. `megatron-ext compare` enables this for its
launches with two environment variables, even if they use Megatron's own schedules.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.upstream.signatures import megatron_arguments

FOLDER = "MEGATRON_EXT_STEPS_FOLDER"
"""Environment variable: the folder for all ranks' files. Without it, nothing is recorded."""
LIMIT = "MEGATRON_EXT_STEPS_LIMIT"
"""Environment variable: number of steps after which training stops."""


class StepRecord:
    """One rank's file, and the steps recorded in it.

    Args:
        path: The file. Its folder is created.
        limit: Number of steps after which `is_complete` is true.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._num_steps = 0
        self._begin_s: float | None = None
        """Start of the current step; None for the first step, whose start is not reported."""
        self._file: IO[str] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all steps are recorded."""
        return self._num_steps >= self._limit

    def begin(self) -> None:
        """Record the start of the next step."""
        self._begin_s = time.monotonic()

    def add(
        self,
        iteration: int,
        losses: Mapping[str, Any],
        gradient_norm: Any,
        *,
        skipped: bool,
    ) -> None:
        """Append a step that has just finished.

        Args:
            iteration: The step's number, counted over all resumed runs.
            losses: One-element tensors, by name; empty except on the last stage.
            gradient_norm: A number, a one-element tensor, or None if it was not computed.
            skipped: Whether the optimizer skipped the weight update.
        """
        # The conversions wait for the device, so read the clock after them.
        loss_values = {name: float(loss) for name, loss in losses.items()}
        norm = None if gradient_norm is None else float(gradient_norm)
        now_s = time.monotonic()
        duration_s = None
        if self._begin_s is not None:
            duration_s = now_s - self._begin_s
        step = {
            "iteration": iteration,
            "losses": loss_values,
            "gradient_norm": norm,
            "skipped": skipped,
            "duration_s": duration_s,
            "consumed_samples": getattr(
                megatron_arguments(), "consumed_train_samples", None
            ),
            "memory_bytes": devices.current().peak_memory_bytes(),
        }
        self._append(step)
        self._num_steps += 1

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Use line buffering, so that the file contains all steps even if the rank is killed
            # later.
            self._file = self._path.open("w", encoding="utf-8", buffering=1)
            self._file.write(json.dumps(_header()) + "\n")
        self._file.write(json.dumps(content) + "\n")


def _header() -> dict[str, Any]:
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "host": socket.gethostname(),
        "device": devices.current().name,
        "seq_length": getattr(megatron_arguments(), "seq_length", None),
    }


def requested() -> StepRecord | None:
    """Return the active configuration's record; None if the environment does not request one."""
    folder = os.environ.get(FOLDER)
    in_force = active.active()
    if not folder or in_force is None:
        return None
    if not isinstance(in_force.steps, StepRecord):
        # Use the launcher's number, because torch.distributed numbers each role of a disaggregated
        # job from 0.
        rank = os.environ.get("RANK", "0")
        path = Path(folder) / f"rank-{rank}.jsonl"
        in_force.steps = StepRecord(path, int(os.environ[LIMIT]))
    return in_force.steps
