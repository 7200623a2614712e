"""Shows the user the output lines from a job's ranks and from the launcher."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from megatron_ext.tools.launch.runs import RANK_MARK

if TYPE_CHECKING:
    from megatron_ext.upstream.person_view import PersonView

_CLOSE_S = 5.0
# A chunk is one message from an agent, at most a few hundred KiB
# (`agent._CHUNK_BYTES`).
_MAX_CHUNKS = 32
_PATIENCE_S = 1.0
_MARKED = re.compile(RANK_MARK + rb"(\d+) ")
_ITERATION = re.compile(rb"iteration\s+(\d+)/\s*\d+ \|")


def say(text: str) -> None:
    """Print a line from the launcher. A closed terminal must not stop the job."""
    with suppress(OSError):
        print(f"megatron-ext: {text}", file=sys.stderr, flush=True)  # noqa: T201


class Display:
    """Shows the output lines from all hosts with bounded memory.

    Ranks write their complete output to files on their hosts, and torchrun follows the files of the
    ranks that are shown. A terminal or a pipe may block for any length of time, so a separate
    thread writes to it. If it blocks for a long time, the display drops output and counts the
    dropped lines. Every line goes to the log and, unless a view shortens it, to the output. The
    display closes neither the log nor the output.
    """

    def __init__(
        self,
        output: BinaryIO,
        log: BinaryIO,
        view: PersonView | None = None,
    ) -> None:
        self._output = output
        self._log = log
        self._view = view
        self._chunks: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_CHUNKS)
        self.iteration = 0
        """The last training iteration that appeared in a line."""
        self.is_stopping = False
        """True if the user has stopped the job, in which case the view shows no errors."""
        self.left_out = 0
        """Number of lines that were not shown."""
        self._is_blocked = False
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def show(self, host: str, data: bytes) -> None:
        """Show output from a host, or drop it if the display blocks for a second."""
        # A connection's thread runs this, and the host at the other end waits as long as that
        # thread does. After one time-out, drop chunks immediately until the display writes again,
        # because the report that the job has finished follows them on the same connection.
        timeout_s = 0 if self._is_blocked else _PATIENCE_S
        try:
            self._chunks.put((host, data), timeout=timeout_s)
        except queue.Full:
            self._is_blocked = True
            self.left_out += data.count(b"\n")

    def close(self) -> None:
        """Write the remaining output, unless the display blocks for too long."""
        with suppress(queue.Full):
            self._chunks.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._is_blocked = False
            host, data = chunk
            complete: list[bytes] = []
            short: list[bytes] = []
            marked_lines = data.removesuffix(b"\n").split(b"\n")
            for marked in marked_lines:
                source = host
                line = marked
                mark = _MARKED.match(marked)
                if mark is not None:
                    rank = mark[1].decode()
                    source = f"{host}:{rank}"
                    # torchrun repeats the mark within a line if it has read the line in parts.
                    line = _MARKED.sub(b"", marked)
                prefix = source.encode()
                complete.append(b"[%s] %s" % (prefix, line))
                iteration_match = _ITERATION.search(line)
                if iteration_match is not None:
                    self.iteration = int(iteration_match[1])
                if self._view is not None and not self.is_stopping:
                    text = line.decode(errors="replace")
                    view_lines = self._view.feed(text, source)
                    short += map(str.encode, view_lines)
            # The log comes first, because writing to a terminal may block for any length of time.
            self._write(self._log, complete)
            shown = complete if self._view is None else short
            self._write(self._output, shown)
        if self._view is not None and not self.is_stopping:
            view_lines = self._view.flush()
            self._write(self._output, map(str.encode, view_lines))

    def _write(self, file: BinaryIO, lines: Iterable[bytes]) -> None:
        # A full disk, or a reader that has exited (`| head`), must not stop the job. The hosts keep
        # the complete output. If `close` gave up waiting, the log may be closed by now
        # (ValueError).
        with suppress(OSError, ValueError):
            file.write(b"\n".join([*lines, b""]))
            file.flush()
