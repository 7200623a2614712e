"""Events shared by several processes, in shared memory: two counts, and a failure flag.

On a device that computes at once, a copy before such an event is done slightly later by a thread of
the recording process, as on a real device: another process must wait for the event, or else it sees
unwritten memory. On a device that runs behind the host, streams record the event and wait for it
(`csrc/shared_events.h`).
"""

import functools
import mmap
import os
import queue
import struct
import threading
import time
from pathlib import Path

import torch

_LATE_S = 0.002
_STUCK_S = 60.0
_RECORDED, _DONE, _FAILED = range(3)
_HANDLE = struct.Struct("<ii56x")


class SharedEvent:
    """An event of this process (`file` is None), or one created by another process."""

    def __init__(self, pid=None, file=None):
        self.pid = pid
        self._file = os.memfd_create("fake_musa_event") if file is None else file
        if pid is None:
            os.ftruncate(self._file, mmap.PAGESIZE)
        self._number = None
        if torch.ops.fake_musa.is_async():
            number = torch.ops.fake_musa.shared_event_open(
                self._file, pid or os.getpid()
            )
            self._number = number
        else:
            self._words = memoryview(mmap.mmap(self._file, mmap.PAGESIZE)).cast("q")

    def __del__(self):
        if self._number is not None:
            torch.ops.fake_musa.shared_event_close(self._number)
        os.close(self._file)

    @classmethod
    def opened(cls, handle):
        pid, file = _HANDLE.unpack(handle)
        try:
            return cls(pid, os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR))
        except OSError as error:
            raise RuntimeError(
                f"MUSA error: invalid resource handle ({error})"
            ) from None

    def handle(self):
        return _HANDLE.pack(os.getpid(), self._file)

    def record(self, stream):
        if self._number is not None:
            place = stream.device_index, stream.stream_id
            torch.ops.fake_musa.shared_event_record(self._number, *place)
            return
        count = torch.ops.fake_musa.stream_submitted(stream.stream_id)
        self._words[_RECORDED] += 1
        due_s = time.monotonic() + _LATE_S
        _device().put((self, due_s, self._words[_RECORDED], stream.stream_id, count))

    def end(self, number, stream, count):
        try:
            torch.ops.fake_musa.stream_run(stream, count)
        except RuntimeError:
            self._words[_FAILED] = 1
        self._words[_DONE] = max(number, self._words[_DONE])

    def wait(self, stream):
        """Make a stream wait until everything recorded so far is done."""
        if self._number is None:
            self.synchronize()
            return
        place = stream.device_index, stream.stream_id
        torch.ops.fake_musa.shared_event_wait(self._number, *place)

    def query(self):
        if self._number is not None:
            return torch.ops.fake_musa.shared_event_query(self._number)
        return self._words[_DONE] >= self._words[_RECORDED]

    def synchronize(self):
        """Wait for everything recorded so far."""
        if self._number is not None:
            self._synchronize_queued()
            return
        number, begin_s = self._words[_RECORDED], time.monotonic()
        while self._words[_DONE] < number:
            if time.monotonic() - begin_s > _STUCK_S:
                raise RuntimeError("MUSA error: an event of another process never came")
            if not _lives(self.pid):
                raise RuntimeError("MUSA error: the process of an event is gone")
            time.sleep(_LATE_S / 4)
        if self._words[_FAILED]:
            raise RuntimeError(
                "MUSA error: work before an event of another process has failed"
            )

    def _synchronize_queued(self):
        stream = torch.musa.Stream()
        self.wait(stream)
        stream.synchronize()


@functools.cache
def _device():
    """Run the thread that emulates the device."""
    jobs = queue.SimpleQueue()
    threading.Thread(target=_run, args=(jobs,), daemon=True).start()
    return jobs


def _run(jobs):
    while True:
        event, due_s, *times = jobs.get()
        time.sleep(max(0.0, due_s - time.monotonic()))
        event.end(*times)
        del event


def _lives(pid):
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except OSError:
        return False
