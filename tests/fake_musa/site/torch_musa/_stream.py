"""Streams and events.

On a device that computes at once, computation is done as soon as it is submitted, and so is all
work in the default stream. Other streams do non-blocking copies as late as allowed: when something
waits for them. On a device that runs behind the host, all streams work asynchronously, and events
are points in them.
"""

import time

import torch

import torch_musa

from ._device import _lazy_init, device_index
from ._shared_event import SharedEvent

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "is_current_stream_capturing",
    "set_stream",
    "stream",
]


class Stream(torch.Stream):
    """A stream of a device."""

    def __new__(cls, device=None, priority=0, **identity):
        if identity:
            return super().__new__(cls, **identity)
        index = device_index(device, optional=True)
        return super().__new__(cls, torch.device("musa", index), priority=priority)

    @staticmethod
    def priority_range():
        return 0, -1  # accepted, and not emulated

    @property
    def musa_stream(self):
        return self.stream_id

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        self.record_event().synchronize()

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class _PointAtOnce:
    """A point in a stream of a device that computes at once."""

    def __init__(self):
        self._stream = self._count = 0
        self.time_s = None

    def record(self, stream):
        self.time_s = time.perf_counter()
        self._stream = stream.stream_id
        self._count = torch.ops.fake_musa.stream_submitted(self._stream)

    def wait(self, stream):
        self.synchronize("")  # waits on a device cannot tell the difference

    def query(self):
        return torch.ops.fake_musa.stream_done(self._stream, self._count)

    def synchronize(self, reason, timeout_s=None):
        torch.ops.fake_musa.stream_run(self._stream, self._count)
        return True


class _PointInQueue:
    """A point in a stream of a device that runs behind the host."""

    def __init__(self):
        self._number = torch.ops.fake_musa.event_new()
        self._recorded = False

    def __del__(self):
        torch.ops.fake_musa.event_delete(self._number)

    @property
    def time_s(self):
        return (
            torch.ops.fake_musa.event_time_s(self._number) if self._recorded else None
        )

    def record(self, stream):
        self._recorded = True
        torch.ops.fake_musa.event_record(
            self._number, stream.device_index, stream.stream_id
        )

    def wait(self, stream):
        stream = torch_musa.current_stream() if stream is None else stream
        torch.ops.fake_musa.event_wait(
            self._number, stream.device_index, stream.stream_id
        )

    def query(self):
        return torch.ops.fake_musa.event_query(self._number)

    def synchronize(self, reason, timeout_s=None):
        limit_s = 1e9 if timeout_s is None else timeout_s
        return torch.ops.fake_musa.event_synchronize(self._number, reason, limit_s)


class Event:
    """A point in a stream, and when it was passed (or submitted, if there are no queues)."""

    def __init__(
        self, enable_timing=False, blocking=False, interprocess=False, external=False
    ):
        self._timing = enable_timing
        self._point = (
            _PointInQueue() if torch.ops.fake_musa.is_async() else _PointAtOnce()
        )
        self._shared = SharedEvent() if interprocess else None
        if enable_timing and interprocess:
            raise RuntimeError(
                "MUSA error: an event of several processes takes no time"
            )

    @classmethod
    def from_ipc_handle(cls, device, handle):
        event = cls()
        event._shared = SharedEvent.opened(handle)
        return event

    def ipc_handle(self):
        if self._shared is None:
            raise RuntimeError(
                "MUSA error: the event was not made with interprocess=True"
            )
        return self._shared.handle()

    def record(self, stream=None):
        stream = torch_musa.current_stream() if stream is None else stream
        if not isinstance(stream, Stream):
            raise TypeError(
                f"expected a torch_musa.Stream, got {type(stream).__name__}"
            )
        if self._shared is not None:
            self._shared.record(stream)
        self._point.record(stream)

    def wait(self, stream=None):
        if self._is_of_others():
            self._shared.wait(torch_musa.current_stream() if stream is None else stream)
        else:
            self._point.wait(stream)

    def query(self):
        return self._shared.query() if self._is_of_others() else self._point.query()

    def synchronize(self):
        if self._is_of_others():
            self._shared.synchronize()
        else:
            self._point.synchronize("synchronize an event")

    def elapsed_time(self, end_event):
        if not (self._timing and end_event._timing):
            raise RuntimeError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._point.time_s is None or end_event._point.time_s is None:
            raise RuntimeError(
                "Both events must be recorded before calculating elapsed time."
            )
        return (end_event._point.time_s - self._point.time_s) * 1e3

    def _is_of_others(self):
        return self._shared is not None and self._shared.pid is not None


_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


def _stream(device, stream_id):
    return Stream(stream_id=stream_id, device_index=device, device_type=_TYPE)


def current_stream(device=None):
    _lazy_init()
    index = device_index(device, optional=True)
    return _stream(index, torch.ops.fake_musa.current_stream(index))


def default_stream(device=None):
    _lazy_init()
    return _stream(device_index(device, optional=True), 0)


def set_stream(stream):
    if stream is None:
        return
    if not isinstance(stream, Stream):
        raise AttributeError(
            f"'{type(stream).__name__}' object has no attribute 'device_index'"
        )
    torch.ops.fake_musa.set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """Context manager that selects a stream."""

    def __init__(self, stream):
        self.stream = stream
        self._before = None

    def __enter__(self):
        if self.stream is not None:
            self._before = current_stream(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *_):
        set_stream(self._before)


def stream(stream):
    return StreamContext(stream)


def is_current_stream_capturing():
    return False
