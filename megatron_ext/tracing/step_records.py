"""Records each step's losses and gradient norm in full precision, and what ran the step.

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
from typing import IO, TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.observer import Observer
from megatron_ext.tracing.digest_files import MEGATRONS
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import StageCompute

FOLDER = "MEGATRON_EXT_STEPS_FOLDER"
"""Environment variable: the folder for all ranks' files. Without it, nothing is recorded."""
LIMIT = "MEGATRON_EXT_STEPS_LIMIT"
"""Environment variable: number of steps after which training stops."""


class StepRecord(Observer):
    """One rank's file, and the steps recorded in it.

    Args:
        configuration: The configuration whose steps are recorded.
        path: The file. Its folder is created.
        limit: Number of steps after which `is_complete` is true.
    """

    def __init__(self, configuration: active.Active, path: Path, limit: int) -> None:
        self._configuration = configuration
        self._path = path
        self._limit = limit
        self._num_steps = 0
        self._begin_s: float | None = None
        """Start of the current step; None for the first step, whose start is not reported."""
        self._file: IO[str] | None = None
        self._wires: set[str] = set()
        """The wires of all transports opened so far."""
        self._num_departures = 0
        """Number of the configuration's departures that have been written."""
        self._schedule = MEGATRONS
        """The table that ran the current step."""
        self._is_carried = False
        """Whether our transport carried the messages of the current step."""
        self._num_slices: int | None = None
        """Number of slices in the most finely sliced micro-batch; None unless slices depend on
        lengths."""

    def connected(self, wires: Mapping[int, str]) -> None:
        """Keep the names of the wires."""
        self._wires |= set(wires.values())

    def begin_carried_step(self) -> None:
        """Record that our transport carries the messages of Megatron's own schedule."""
        self._is_carried = True

    def begin_step(self, compute: StageCompute) -> None:
        """Record which table runs the step."""
        schedule = compute.table.schedule
        self._schedule = schedule.name
        self._is_carried = True
        if schedule.is_for_one_step:
            self._num_slices = schedule.num_slices

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
        skipped: bool | None,
        learning_rate: float | None,
    ) -> None:
        """Append a step that has just finished.

        Args:
            iteration: The step's number, counted across resumed runs.
            losses: One-element tensors, by name; empty except on the last stage.
            gradient_norm: A number, a one-element tensor, or None if it was not computed.
            skipped: Whether the optimizer skipped the weight update; None if this rank has no
                optimizer.
            learning_rate: The logged learning rate; None if this rank does not know it.
        """
        # The conversions wait for the device, so read the clock after them.
        loss_values = {name: float(loss) for name, loss in losses.items()}
        norm = None
        if gradient_norm is not None:
            norm = float(gradient_norm)
        now_s = time.monotonic()
        duration_s = None
        if self._begin_s is not None:
            duration_s = now_s - self._begin_s
        arguments = megatron_arguments()
        wires = sorted(self._wires) if self._is_carried else None
        departures = self._configuration.departures
        step = {
            "iteration": iteration,
            "losses": loss_values,
            "gradient_norm": norm,
            "skipped": skipped,
            "learning_rate": learning_rate,
            "duration_s": duration_s,
            "consumed_samples": getattr(arguments, "consumed_train_samples", None),
            "memory_bytes": devices.current().peak_memory_bytes(),
            "schedule": self._schedule,
            "wires": wires,
            "num_slices": self._num_slices,
            "departures": departures[self._num_departures :],
        }
        self._append(step)
        self._num_steps += 1
        self._num_departures = len(departures)
        # Reset these now: a step that is not run by a table reports nothing.
        self._schedule = MEGATRONS
        self._is_carried = False
        self._num_slices = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            # Append, because steps under an earlier configuration count too. Use line buffering, so
            # that the file contains all steps even if the rank is killed later.
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
            if is_new:
                header_line = json.dumps(_header())
                self._file.write(header_line + "\n")
        step_line = json.dumps(content)
        self._file.write(step_line + "\n")


def _header() -> dict[str, Any]:
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "host": socket.gethostname(),
        "device": devices.current().name,
        "seq_length": getattr(megatron_arguments(), "seq_length", None),
    }


def requested() -> StepRecord | None:
    """Return this process's record; None if the environment does not request one.

    The first call for a configuration creates its record; make that call before the first step.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    in_force = active.active()
    # A program may deactivate its configuration between two steps. The later steps count too.
    if in_force is None:
        in_force = active.Active(PipelineConfig())
        active.activate_configuration(in_force)
    for observer in in_force.observers:
        if isinstance(observer, StepRecord):
            return observer
    # Use the launcher's rank, because torch.distributed numbers the ranks of each role
    # in a disaggregated job from 0.
    rank = os.environ.get("RANK", "0")
    path = Path(folder) / f"rank-{rank}.jsonl"
    limit = int(os.environ[LIMIT])
    record = StepRecord(in_force, path, limit)
    in_force.observers.append(record)
    return record
