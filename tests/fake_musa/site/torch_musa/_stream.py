"""Streams and events. Work is done when it is submitted, so only the time of an event is real."""

import time

import torch

import torch_musa

from ._device import _lazy_init, device_index

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
    """A stream of a device; every one behaves as the default stream."""

    def __new__(cls, device=None, priority=0):
        index = device_index(device, optional=True)
        return super().__new__(cls, torch.device("musa", index), priority=priority)

    @property
    def musa_stream(self):
        return self.stream_id

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Event:
    """A point in time of the submitting thread, which is the time at which the work was done."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._timing = enable_timing
        self._time_s = None

    def record(self, stream=None):
        stream = torch_musa.current_stream() if stream is None else stream
        if not isinstance(stream, Stream):
            raise TypeError(f"expected a torch_musa.Stream, got {type(stream).__name__}")
        self._time_s = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end_event):
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_s is None or end_event._time_s is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time_s - self._time_s) * 1e3


def current_stream(device=None):
    _lazy_init()
    return Stream(device)


default_stream = current_stream


def set_stream(stream):
    if stream is not None and not isinstance(stream, Stream):
        raise AttributeError(f"'{type(stream).__name__}' object has no attribute 'device_index'")


class StreamContext:
    """Context manager that selects a stream."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        set_stream(self.stream)

    def __exit__(self, *_):
        pass


def stream(stream):
    return StreamContext(stream)


def is_current_stream_capturing():
    return False
