"""The observation of this process: its recorder and its watchdog, if there are any.

`start` is called when the arguments are known. As long as nobody observes, `current` is None and
nothing of this package takes part in training.
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import files
from megatron_ext.config import choice as schedule_choice
from megatron_ext.config.trace_flags import hang_timeout_s, sampling
from megatron_ext.trace.activity import OUTSIDE, Activity
from megatron_ext.trace.recorder import DeviceClock, HostClock, Recorder, check_writable
from megatron_ext.trace.records import Header, directory_name
from megatron_ext.trace.watchdog import Watchdog
from megatron_ext.version import __version__

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Schedule

__all__ = ["Session", "close", "current", "is_observing", "is_tracing", "start"]

_SETTINGS = (
    "pipeline_schedule", "enable_bitpipe_schedule", "use_dpp", "dpp_policy",
    "dpp_extra_activations", "pipeline_transport", "pipeline_costs", "world_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "micro_batch_size", "global_batch_size", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "num_experts",
    "params_dtype", "recompute_granularity", "overlap_grad_reduce", "overlap_param_gather",
    "use_distributed_optimizer", "sequence_parallel",
)  # fmt: skip


@dataclass
class Session:
    """Who observes this process."""

    args: Namespace
    recorder: Recorder | None
    watchdog: Watchdog | None
    activity: Activity = field(default_factory=Activity)
    activation_bytes: dict[int, int] = field(default_factory=dict)
    """By stage: what a forward keeps for its backward, once it was measured."""
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
        """Run something that all ranks of some groups take part in, as a span of this name."""
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


_session: Session | None = None


def start(args: Namespace) -> None:
    """Observe this process as the flags say; called again, the flags of then count.

    Raises:
        ArgumentsError: The flags are impossible.
    """
    global _session
    close()
    wanted, timeout_s = sampling(args), hang_timeout_s(args)
    if wanted is None and timeout_s is None:
        return
    found = Session(args, None, None)
    if timeout_s is not None:
        found.watchdog = Watchdog(found.activity, timeout_s)
    if wanted is not None:
        found.recorder = _recorder(args, wanted)
    _session = found
    atexit.register(close)


def current() -> Session | None:
    """Return the observation of this process, or None."""
    return _session


def is_observing() -> bool:
    """Tell whether anybody observes this process."""
    return _session is not None


def is_tracing() -> bool:
    """Tell whether an iteration is being recorded at this moment."""
    return _session is not None and _session.recorder is not None and _session.recorder.active


def close() -> None:
    """End the observation of this process."""
    global _session
    found, _session = _session, None
    if found is not None:
        found.close()


def _recorder(args: Namespace, wanted: Any) -> Recorder:
    from megatron_ext import devices

    device = devices.current()
    on_host = device.timing_event() is None
    clock = HostClock() if on_host else DeviceClock(device)
    return Recorder(
        lambda: _identity(args),
        clock,
        wanted,
        memory_bytes=device.peak_memory_bytes,
        first_iteration=lambda: getattr(args, "iteration", 0) + 1,
    )


def _identity(args: Namespace) -> tuple[Path, Header]:
    """Return the folder of the run and who this rank is; Megatron's groups are there by now."""
    import torch.distributed as dist
    from megatron.core import parallel_state as groups

    from megatron_ext.config.choice import current as chosen
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
    choice = chosen()
    dynamic = choice is not None and choice.dynamic is not None
    directory = args.trace_dir or Path("benchmark") / directory_name(sizes, dynamic=dynamic)
    header = Header(
        rank,
        *place,
        sizes=sizes,
        host=socket.gethostname(),
        clock=_boot(),
        clock_ns=time.monotonic_ns(),
        wall_ns=time.time_ns(),
        settings=_settings(args),
        versions=_versions(),
    )
    if header.rank == 0:
        _write_schedule(args, Path(directory))
    return Path(directory), header


def _write_schedule(args: Namespace, directory: Path) -> None:
    """Leave the table of the run beside the traces, Megatron's own where that is what runs."""
    from megatron_ext.schedules.representation import json_io
    from megatron_ext.trace.measured_costs import SCHEDULE_FILE

    table = _table(args)
    path = directory / SCHEDULE_FILE
    with check_writable(path):
        directory.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if table is not None:
            files.write_text(path, json_io.dumps(table))


def _table(args: Namespace) -> Schedule | None:
    """Return the table of a full batch; None where there is no pipeline, or no table of it."""
    from megatron_ext.config.choice import current as chosen
    from megatron_ext.disaggregation import job as disaggregation
    from megatron_ext.errors import ScheduleError
    from megatron_ext.schedules.generators.catalog import generate

    choice, pp = chosen(), args.pipeline_model_parallel_size
    if choice is not None:
        return choice.schedule(choice.num_microbatches)
    count = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    job = disaggregation.current()
    if job is not None:
        return job.schedule(count)
    if pp < 2:
        return None
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None)
    try:
        return generate("interleaved" if chunks else "1f1b", pp, count, chunks)
    except ScheduleError:
        return None  # Megatron runs what we have no table for


def _boot() -> str:
    """Return what distinguishes the clock of this host, since it was booted, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _settings(args: Namespace) -> dict[str, Any]:
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    found: dict[str, Any] = {"device": _device_name(), "cpus": cpus}
    for name in _SETTINGS:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            found[name] = value if isinstance(value, bool | int | float) else str(value)
    found.setdefault("pipeline_schedule", "Megatron's own")
    found["transport"] = found.get("pipeline_transport", "torch")
    choice = schedule_choice.current()
    if choice is not None:  # with what other flags imply
        found |= {"pipeline_schedule": choice.name, "transport": choice.transport}
        if choice.dynamic is not None:
            found["dpp_policy"] = choice.dynamic.policy
            found["dpp_extra_activations"] = choice.dynamic.extra_activations
    return found


def _device_name() -> str:
    from megatron_ext import devices

    return devices.current().name


def _versions() -> dict[str, str]:
    from importlib import metadata

    names = ("megatron-core", "torch")
    found = {name: metadata.version(name) for name in names}
    return {"megatron_ext": __version__, **found, "python": platform.python_version()}
