"""Shows the logs of all hosts, each line with its source, in bounded memory.

A thread writes, because a terminal or a pipe may block for any time. If it blocks for long, lines
are dropped and counted; the files on the hosts still have them.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from megatron_ext.upstream.person_view import PersonView

__all__ = ["Display"]

_MAX_BYTES = 8 << 20
_PATIENCE_S = 1.0
_CLOSE_S = 5.0
_ITERATION = re.compile(rb"iteration\s+(\d+)/\s*\d+ \|")


class Display:
    """The display of a job's log lines.

    Args:
        output: A binary stream; the caller closes it.
        log: A file that gets every line; the caller closes it.
        view: Shortens what `output` gets; None: every line, with its source.
    """

    def __init__(
        self, output: BinaryIO, log: BinaryIO | None = None, view: PersonView | None = None
    ) -> None:
        self._output = output
        self._log = log
        self._view = view
        self.iteration = 0
        """The last iteration of the training that a line named."""
        self.is_stopping = False
        """Whether the user has stopped the job: a view has no errors to show then."""
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._broken = False
        self.left_out = 0
        """Lines that were not shown."""
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    async def show(self, prefix: str, data: bytes) -> None:
        """Show whole lines, or drop them if the display blocks for a second."""
        mark = f"[{prefix}] ".encode()
        text = mark + data[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        for found in _ITERATION.findall(data):
            self.iteration = int(found)
        if self._log is not None:
            with suppress(OSError):  # a full disk; the hosts still have the lines
                self._log.write(text)
                self._log.flush()
        if self._view is not None:
            lines = data.decode(errors="replace").splitlines()
            shown = [each for line in lines for each in self._view.feed(line, prefix)]
            shown = [] if self.is_stopping else shown
            text = "".join(f"{line}\n" for line in shown).encode(errors="replace")
        waited_s = 0.0
        while not self._put(text):
            if waited_s >= _PATIENCE_S:
                self.left_out += data.count(b"\n")
                return
            await asyncio.sleep(0.02)
            waited_s += 0.02

    def _put(self, text: bytes) -> bool:
        """Queue text if there is room, or if the reader has exited."""
        with self._changed:
            if self._broken:
                return True
            if self._num_bytes + len(text) > _MAX_BYTES:
                return False
            self._waiting.append(text)
            self._num_bytes += len(text)
            self._changed.notify()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                text = b"".join(self._waiting)
                self._waiting.clear()
            try:
                self._output.write(text)
                self._output.flush()
            except (OSError, ValueError):
                # The reader of our output has exited (`| head`): the job continues.
                with self._changed:
                    self._broken = True
            with self._changed:
                self._num_bytes -= len(text)

    def close(self) -> None:
        """Write the rest; times out if the display blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
