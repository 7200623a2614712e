"""The observation of this process: its recorder and its watchdog, if enabled.

Call `start` when the arguments are known. Without observation `current` is None, and this package
takes no part in training.
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import files
from megatron_ext.config import active
from megatron_ext.tools.trace.activity import OUTSIDE, Activity
from megatron_ext.tools.trace.recorder import (
    DeviceClock,
    HostClock,
    Recorder,
    Sampling,
    check_writable,
)
from megatron_ext.tools.trace.records import Header, directory_name
from megatron_ext.tools.trace.watchdog import Watchdog
from megatron_ext.version import __version__

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["Run", "Session", "close", "current", "is_observing", "start"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The description of a run in its trace."""

    schedule: Schedule | None = None
    """The table of a full batch; None: there is no pipeline, or no table of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Whatever may explain a time: sizes, schedule, parallelism."""
    iterations_done: Callable[[], int] = lambda: 0
    """Training steps before the first of this process, asked for when that begins."""


@dataclass
class Session:
    """Who observes this process."""

    recorder: Recorder | None
    watchdog: Watchdog | None
    activity: Activity = field(default_factory=Activity)
    activation_bytes: dict[int, int] = field(default_factory=dict)
    """By stage: what a forward keeps for its backward, once it was measured."""
    forwards: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of Megatron's own schedules, by the identity of an output that is kept for its backward:
    (chunk, micro-batch)."""
    in_optimizer: bool = False
    """Whether an optimizer's step is under way."""

    def begin_step(self) -> None:
        """Note that a training step begins."""
        self.activity.now("begins a step")
        if self.watchdog is not None:
            self.watchdog.start()
        if self.recorder is not None:
            self.recorder.begin_iteration()

    def end_step(self) -> None:
        """Note that a training step has ended, with the optimizer's part of it or by an error."""
        self.activity.now(OUTSIDE)
        if self.recorder is not None:
            if self.activation_bytes:
                mean = sum(self.activation_bytes.values()) // len(self.activation_bytes)
                self.recorder.notes["activation_bytes"] = mean
            self.recorder.end_iteration()

    def run(self, what: str, collective: str, call: Callable[[], Any]) -> Any:
        """Run a collective operation as a span of this name."""
        self.activity.now(f"is in {collective}", collective=collective)
        if self.recorder is None:
            return call()
        with self.recorder.span(what):
            return call()

    def close(self) -> None:
        """End what observes."""
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.recorder is not None:
            self.recorder.close()


@dataclass
class _Observation:
    """Whether anybody observes this process under a configuration."""

    session: Session | None = None

    def close(self) -> None:
        """End it."""
        found, self.session = self.session, None
        if found is not None:
            found.close()


def start(run: Run) -> None:
    """Observe this process as the active configuration says; end any earlier observation.

    Args:
        run: Description of the run, for its trace.
    """
    close()
    configuration = active.required()
    wanted, timeout_s = configuration.config.tracing, configuration.config.hang_timeout_s
    if wanted is None and timeout_s is None:
        return
    found = Session(None, None)
    if timeout_s is not None:
        found.watchdog = Watchdog(found.activity, timeout_s)
    if wanted is not None:
        found.recorder = _recorder(run, Sampling(wanted.interval, wanted.num_iterations))
    configuration.state(_Observation).session = found
    atexit.register(close)


def current() -> Session | None:
    """Return the observation of this process, or None."""
    configuration = active.active()
    return None if configuration is None else configuration.state(_Observation).session


def is_observing() -> bool:
    """Return whether this process is observed."""
    return current() is not None


def close() -> None:
    """End the observation of this process."""
    configuration = active.active()
    if configuration is not None:
        configuration.state(_Observation).close()


def _recorder(run: Run, sampling: Sampling) -> Recorder:
    from megatron_ext import devices

    device = devices.current()
    on_host = device.timing_event() is None
    clock = HostClock() if on_host else DeviceClock(device)
    return Recorder(
        lambda: _identity(run),
        clock,
        sampling,
        memory_bytes=device.peak_memory_bytes,
        first_iteration=lambda: run.iterations_done() + 1,
    )


def _identity(run: Run) -> tuple[Path, Header]:
    """Return the folder of the run and the identity of this rank; needs Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    from megatron_ext.disaggregation import job as disaggregation

    sizes = (
        groups.get_data_parallel_world_size(with_context_parallel=True),
        groups.get_pipeline_model_parallel_world_size(),
        groups.get_tensor_model_parallel_world_size(),
    )
    rank = dist.get_rank()
    place = (
        groups.get_data_parallel_rank(with_context_parallel=True),
        groups.get_pipeline_model_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
    )
    job = disaggregation.current()
    if job is not None:  # forward ranks are the first half of the pipeline
        rank, place = job.rank, (place[0], job.position, place[2])
        sizes = sizes[0], 2 * sizes[1], job.ranks.tp
    config = active.required().config
    assert config.tracing is not None
    dynamic = config.dynamic is not None
    directory = config.tracing.directory or Path("benchmark") / directory_name(
        sizes, dynamic=dynamic
    )
    header = Header(
        rank,
        *place,
        sizes=sizes,
        host=socket.gethostname(),
        clock=_boot(),
        clock_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        settings={"device": _device_name(), "cpus": _cpus(), **run.settings},
        versions=_versions(),
    )
    if header.rank == 0:
        _write_schedule(run.schedule, Path(directory))
    return Path(directory), header


def _write_schedule(table: Schedule | None, directory: Path) -> None:
    """Write the table of the run beside the traces; that of Megatron's own schedule if it runs."""
    from megatron_ext.schedules.table import table_files
    from megatron_ext.tools.trace.measured_costs import SCHEDULE_FILE

    path = directory / SCHEDULE_FILE
    with check_writable(path):
        directory.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if table is not None:
            files.write_text(path, table_files.json_text(table))


def _boot() -> str:
    """Return the identity of this host's clock since its boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _cpus() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def _device_name() -> str:
    from megatron_ext import devices

    return devices.current().name


def _versions() -> dict[str, str]:
    from importlib import metadata

    names = ("megatron-core", "torch")
    found = {name: metadata.version(name) for name in names}
    return {"megatron_ext": __version__, **found, "python": platform.python_version()}
