"""Records one rank's spans in its trace file during training.

The recorder collects an iteration's spans and writes them in a single call when the iteration ends.
On asynchronous devices, the start and end of a span are events in the device's stream, which are
read when all of them have completed.
"""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_ext.config import active
from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.errors import UserError
from megatron_ext.files import cannot_write, write_text
from megatron_ext.schedules.table import table_files
from megatron_ext.tracing.records import FILE_NAME, FORMAT, SCHEDULE_FILE, Header

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Device
    from megatron_ext.schedules.table.actions import Schedule

_LOG = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors caused by other use of the disk rather than by a user's mistake."""

_WAIT_NS = 20_000
"""Shortest wait to record. Shorter waits are noise: any receive on a device waits briefly."""

_PARTS = (
    "stage",
    "microbatch",
    "slice",
    "part",
    "header",
)
"""Attributes that, together with the kind, distinguish messages between two ranks."""
_EXCHANGES = 1000
"""Added to a rank's row number to get its second row: the stream for exchanges between experts."""

# Called once per iteration, because encoding each span separately would slow down
# training.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _title(name: str, attributes: Mapping[str, Any]) -> str:
    """Return the text that a viewer shows for a span."""
    if name == "wait":
        if "on" in attributes:
            return f"wait for rank {attributes['on']}"
        return f"wait: {attributes['cause']}"
    microbatch = attributes.get("microbatch")
    number = attributes.get("iteration", microbatch)
    if number is None:
        return name
    return f"{name} {number}"


class HostClock:
    """The host's time in nanoseconds, on the clock that all processes on the host share."""

    def begin(self) -> int:
        """Start an iteration; return its start time."""
        return self.stamp()

    def stamp(self) -> int:
        """Return the current time."""
        return time.monotonic_ns()

    def resolve(self, stamps: list[int], _timeout_s: float | None) -> list[int]:
        """Return the stamps' times without waiting, because all of them have passed."""
        return stamps


class DeviceClock:
    """Times in a device's stream, measured with timing events.

    A stamp marks the completion of all earlier work.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def begin(self) -> int:
        """Start an iteration on an idle device, so that host and device agree on its start."""
        self._device.synchronize()  # once per iteration; stamps within it do not wait
        # These two lines read the same moment on both clocks, so keep them together.
        self._base = self.stamp()
        self._begin_ns = time.monotonic_ns()
        return self._begin_ns

    def stamp(self) -> Any:
        """Record an event in the stream."""
        event = self._device.timing_event()
        event.record()
        return event

    def resolve(self, stamps: list[Any], timeout_s: float | None) -> list[int] | None:
        """Wait for all events; return their times in nanoseconds on the host's clock.

        Returns None if the device does not reach the last event within the time-out.
        """
        # Poll, because `synchronize` has no time-out.
        if timeout_s is not None:
            until = time.monotonic() + timeout_s
            while not stamps[-1].query():
                if time.monotonic() >= until:
                    return None
                time.sleep(0.01)
        self._device.synchronize()
        times_ns = []
        for event in stamps:
            # torch returns milliseconds. The value is negative for an event before the iteration.
            elapsed_ns = round(self._base.elapsed_time(event) * 1e6)
            times_ns.append(self._begin_ns + max(0, elapsed_ns))
        return times_ns


class Recorder:
    """One rank's trace.

    The first traced iteration creates the file, because the ranks in the groups are known by then.
    If the disk is full, tracing stops with a warning and training continues.

    Args:
        identity: Returns the run's folder, this rank's header and, on the first rank, the table for
            a full batch, if there is one.
        clock: The host's clock or a device's clock.
        sampling: The iterations to record: the first few in each interval; if None, no iterations
            are recorded.
    """

    def __init__(
        self,
        identity: Callable[[], tuple[Path, Header, Schedule | None]],
        clock: HostClock | DeviceClock | None = None,
        sampling: Tracing | None = Tracing(),  # noqa: B008 - it is frozen
    ) -> None:
        self.active = False
        """True while an iteration is being traced."""
        self.notes: dict[str, Any] = {}
        """Values that describe the current iteration; observers add them while it runs."""
        self.wires: dict[int, str] = {}
        """Global rank of a peer -> the wire that carries messages to and from this peer."""
        self._identity = identity
        self._clock = clock or HostClock()
        self._sampling = sampling
        self._file: IO[str] | None = None
        self._index = -1
        self._number = 0
        self._begin_ns = 0
        self._spans: list[tuple[str, Any, Any, Mapping[str, Any]]] = []
        """The iteration's spans: name, start and end stamps, attributes."""

    def begin_iteration(self, number: int) -> None:
        """Start the iteration with this number; end the previous iteration if it is still open."""
        self.end_iteration()
        self._index += 1
        self._number = number
        self.notes = {}
        sampling = self._sampling
        if sampling is None:
            return
        index_in_interval = self._index % sampling.interval
        if index_in_interval >= sampling.num_iterations:
            return
        # Open the file here, because its name contains ranks in groups that do not exist earlier.
        if self._file is None:
            self._open()
        if self._file is not None:
            self._begin_ns = self._clock.begin()
            self.active = True

    def stamp(self) -> Any:
        """Return the current time, for `add`: nanoseconds on the host, an event on a device."""
        return self._clock.stamp()

    def add(
        self,
        name: str,
        begin: Any,
        attributes: Mapping[str, Any],
        end: Any = None,
    ) -> None:
        """Record a span from `begin` to now, or to `end`."""
        # Tracing may have stopped after `begin` was stamped.
        if not self.active:
            return
        if end is None:
            end = self._clock.stamp()
        self._spans.append((name, begin, end, attributes))

    def end_iteration(self, timeout_s: float | None = None) -> None:
        """Write the current iteration, if it is traced.

        With a time-out, the iteration is dropped if the device has not finished it by then.
        """
        if not self.active:
            return
        # Clear this first: if the device has failed, the lines below raise an error and
        # must not run again at exit.
        self.active = False
        end = self._clock.stamp()  # exclude our own work below
        # Take the spans out first, so that they are dropped if the device has failed.
        spans = self._spans
        self._spans = []
        # Resolve all stamps with a single wait for the device.
        stamps: list[Any] = []
        for _, begin, span_end, _ in spans:
            stamps.append(begin)
            stamps.append(span_end)
        stamps.append(end)
        times_ns = self._clock.resolve(stamps, timeout_s)
        if times_ns is None:
            return
        begin_times_ns = times_ns[:-1:2]
        end_times_ns = times_ns[1::2]
        end_ns = times_ns[-1]
        events = []
        for index, (name, _, _, attributes) in enumerate(spans):
            begin_ns = begin_times_ns[index]
            span_end_ns = end_times_ns[index]
            is_noise = name == "wait" and span_end_ns - begin_ns < _WAIT_NS
            if not is_noise:
                events.append(self._event(name, begin_ns, span_end_ns, attributes))
        # With a device, the iteration lasts until both the host and the device are done.
        if isinstance(self._clock, DeviceClock):
            end_ns = time.monotonic_ns()
        figures = {
            "iteration": self._number,
            "wires": self.wires,
            **self.notes,
        }
        # Put the iteration last, because readers use it to recognise a complete line.
        events.append(self._event("iteration", self._begin_ns, end_ns, figures))
        # Continue the list that the first line opened: write a comma, then the events without
        # brackets.
        list_text = _encode(events)
        self._put(f",{list_text[1:-1]}\n")

    def _event(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the Chrome-trace event for a span."""
        # Chrome traces use microseconds.
        event: dict[str, Any] = {
            "name": _title(name, attributes),
            "cat": name,
            "ph": "X",
            **self._row,
            "ts": begin_ns / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "args": attributes,
        }
        if name == "exchange":
            event["tid"] += _EXCHANGES
        elif name in ("send", "receive") and "for" in attributes:
            event["bind_id"] = self._message_number(attributes)
            direction = "flow_out" if name == "send" else "flow_in"
            event[direction] = True
        return event

    def _message_number(self, attributes: Mapping[str, Any]) -> int:
        """Return the number that viewers use to connect a message's two ends with an arrow.

        The sender and the receiver compute it independently. Unlike string hashes, Python's integer
        hashes are the same in every process. JavaScript can represent 53-bit integers.
        """
        sender = attributes.get("from", self._rank)
        receiver = attributes.get("to", self._rank)
        kind = ord(attributes["for"])
        parts = [attributes.get(key, 0) for key in _PARTS]
        message = self._number, sender, receiver, kind, *parts
        lowest_53_bits = (1 << 53) - 1
        return hash(message) & lowest_53_bits

    def close(self) -> None:
        """Write the current iteration and end the list. The recorder cannot be used afterwards."""
        self.end_iteration()
        if self._file is not None:
            self._put("]\n")
        # `_put` closes the file if the disk is full.
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Create the file and write its first line, unless the disk is full.

        Raises:
            UserError: The file cannot be written for another reason.
        """
        directory, header, table = self._identity()
        self._path = directory / SCHEDULE_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Replace the table from a previous run in the same folder, or readers would apply it to
            # this run.
            if header.rank == 0:
                self._path.unlink(missing_ok=True)
                if table is not None:
                    write_text(self._path, table_files.json_text(table))
            file_name = FILE_NAME.format(header.data, header.pipeline, header.tensor)
            self._path = directory / file_name
            attempt = active.attempt()
            if attempt and header.rank == 0 and self._path.exists():
                _LOG.warning(
                    "--trace: restart %s in the same processes replaces the trace of the steps "
                    "before it in %s",
                    attempt,
                    directory,
                )
            # Replace the old file instead of truncating it, because someone may be reading it.
            self._path.unlink(missing_ok=True)
            self._file = self._path.open("x", encoding="utf-8")
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._give_up(error)
                return
            raise UserError(
                f"--trace cannot write {self._path}: {error.strerror}; choose another folder with "
                f"--trace-dir, or remove --trace"
            ) from error
        self._rank = header.rank
        _, pipeline_size, _ = header.sizes
        process = header.data * pipeline_size + header.pipeline
        self._row = {
            "pid": process,
            "tid": header.tensor,
        }
        # Omit the closing bracket, because later lines continue the list.
        list_text = _encode(self._first_events(header))
        self._put(f"{list_text[:-1]}\n")

    def _first_events(self, header: Header) -> list[dict[str, Any]]:
        """Return the events on the first line: the header and the row names."""
        process = self._row["pid"]
        process_name = f"data {header.data} pipeline {header.pipeline}"
        row_name = f"rank {header.rank} on {header.host}"
        events: list[dict[str, Any]] = [
            {
                "name": "run",
                "ph": "M",
                "args": {"format": FORMAT, **asdict(header)},
            },
            {
                "name": "process_name",
                "ph": "M",
                "pid": process,
                "args": {"name": process_name},
            },
            {
                "name": "process_sort_index",
                "ph": "M",
                "pid": process,
                "args": {"sort_index": process},
            },
            {
                "name": "thread_name",
                "ph": "M",
                **self._row,
                "args": {"name": row_name},
            },
        ]
        if header.settings.get("pairs"):
            exchanges_row = {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": self._row["tid"] + _EXCHANGES,
                "args": {"name": f"{row_name}, exchanges of experts"},
            }
            events.append(exchanges_row)
        return events

    def _put(self, line: str) -> None:
        """Append a line to the file; stop tracing on failure."""
        assert self._file is not None
        try:
            self._file.write(line)
            self._file.flush()  # if the rank is killed later, the line is in the file
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Stop tracing; a full disk must not stop training."""
        remedy = "this rank stops tracing, and training continues"
        _LOG.warning("--trace: %s", cannot_write(self._path, error, remedy))
        self._sampling = None
        self.active = False
        self._spans.clear()
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):  # closing tries to write the buffered data again
                file.close()
