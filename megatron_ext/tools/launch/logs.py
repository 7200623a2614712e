"""Log lines on the launcher's terminal.

Ranks write to files on their own host, which stay complete whatever happens to the launcher.
torchrun follows the files of the ranks to show, and puts `MARK` and the rank before each line.
"""

from __future__ import annotations

import queue
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from megatron_ext.upstream.person_view import PersonView

MARK = b"\x1e"
_MARKED = re.compile(MARK + rb"(\d+) ")
_ITERATION = re.compile(rb"iteration\s+(\d+)/\s*\d+ \|")
_MAX_CHUNKS = 32
_PATIENCE_S = 1.0
_CLOSE_S = 5.0


class Display:
    """Shows the lines of all hosts in bounded memory.

    A thread writes, because a terminal or a pipe may block for any time. If it blocks for long,
    output is dropped and counted; the files on the hosts still have it. The log gets every line,
    and so does the output, unless a view shortens it. Neither is closed.
    """

    def __init__(self, output: BinaryIO, log: BinaryIO, view: PersonView | None = None) -> None:
        self._output, self._log, self._view = output, log, view
        self._chunks: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_CHUNKS)
        self.iteration = 0
        """The last iteration of the training that a line named."""
        self.is_stopping = False
        """True if the user has stopped the job: a view has no errors to show then."""
        self.left_out = 0
        """Lines that were not shown."""
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def show(self, host: str, data: bytes) -> None:
        """Show output of a host, or drop it if the display blocks for a second."""
        try:
            # In the thread of a connection: its host would wait as long as we do.
            self._chunks.put((host, data), timeout=_PATIENCE_S)
        except queue.Full:
            self.left_out += data.count(b"\n")

    def close(self) -> None:
        """Show the rest; times out if the display blocks."""
        with suppress(queue.Full):
            self._chunks.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_broken = False
        while (chunk := self._chunks.get()) is not None:
            host, data = chunk
            every, shown = [], []
            for marked in data.removesuffix(b"\n").split(b"\n"):
                rank = _MARKED.match(marked)
                source = f"{host}:{rank[1].decode()}" if rank else host
                # torchrun repeats the mark within a line that pauses.
                line = _MARKED.sub(b"", marked) if rank else marked
                every.append(b"[%s] %s\n" % (source.encode(), line))
                if found := _ITERATION.search(line):
                    self.iteration = int(found[1])
                if self._view is not None and not self.is_stopping:
                    shown += self._view.feed(line.decode(errors="replace"), source)
            text = b"".join(every)
            with suppress(OSError, ValueError):  # a full disk; the hosts still have the lines
                self._log.write(text)
                self._log.flush()
            if self._view is not None:
                text = "".join(f"{line}\n" for line in shown).encode()
            if text and not is_broken:
                try:
                    self._output.write(text)
                    self._output.flush()
                except (OSError, ValueError):
                    is_broken = True  # the reader of our output is gone (`| head`); the job goes on
