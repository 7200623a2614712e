"""From the output of the ranks to the terminal: whole lines, bounded memory, nothing blocked."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

from megatron_ext.tools.launch import agent
from megatron_ext.tools.launch.agent import last_lines
from megatron_ext.tools.launch.display import Display
from megatron_ext.upstream.person_view import PersonView


def forwarded(*pieces: bytes, every_line: bool = False) -> tuple[list[str], bytes]:
    """Return what an agent makes of a job's output that comes in pieces: messages, its own log."""
    reading, writing = os.pipe()
    log, sent, seen = io.BytesIO(), [], threading.Event()

    def send(message: dict[str, str]) -> None:
        sent.append(message["text"])
        seen.set()

    with os.fdopen(reading, "rb") as output:
        thread = threading.Thread(
            target=agent._forward, args=(output, log, send, every_line)
        )
        thread.start()
        for piece in pieces:
            seen.clear()
            os.write(writing, piece)
            seen.wait(0.2)  # most pieces are read alone then
        os.close(writing)
        thread.join(30)
        assert not thread.is_alive()
    return sent, log.getvalue()


def test_lines_of_ranks_are_sent_whole_and_the_others_kept() -> None:
    sent, log = forwarded(b"\x1e5 one\n\x1e5 tw", b"o\nits own\n", b"\x1e4 end")
    assert "".join(sent) == "\x1e5 one\n\x1e5 two\n\x1e4 end\n"
    assert all(text.endswith("\n") for text in sent)
    assert log == b"its own\n"
    sent, log = forwarded(b"a\n\xff", every_line=True)
    assert "".join(sent).encode(errors="surrogateescape") == log == b"a\n\xff\n"


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    chunk = b"x" * (agent._CHUNK_BYTES // 2)
    sent, _ = forwarded(*[chunk] * 5, every_line=True)
    assert len(sent) > 1
    assert sum(len(text.rstrip("\n")) for text in sent) == 5 * len(chunk)


def test_last_lines_of_a_file_that_may_be_large_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\na\nb\n\xff\n")
    assert last_lines(path, 2) == ["b", "\ufffd"]
    assert last_lines(tmp_path / "gone", 2) == []


def test_lines_are_shown_with_host_and_rank() -> None:
    output, log = io.BytesIO(), io.BytesIO()
    display = Display(output, log)
    display.show(
        "a", b"\x1e3 one\n\x1e0 iteration 7/ 9 | loss\x1e0  1.5 |\nof a command\n"
    )
    display.close()
    assert output.getvalue().decode().splitlines() == [
        "[a:3] one", "[a:0] iteration 7/ 9 | loss 1.5 |", "[a] of a command",
    ]  # fmt: skip
    assert log.getvalue() == output.getvalue()
    assert display.iteration == 7


def test_a_view_shows_a_traceback_whose_end_it_does_not_know() -> None:
    output, ended = (
        io.BytesIO(),
        b"Traceback (most recent call last):\n  in next\nStopIteration\n",
    )
    display = Display(output, io.BytesIO(), PersonView())
    for rank in b"0", b"1":
        display.show(
            "a", b"".join(b"\x1e%s %s\n" % (rank, line) for line in ended.splitlines())
        )
    display.close()
    assert output.getvalue() == ended


def test_a_terminal_that_takes_nothing_loses_lines_but_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    line = b"x" * 999 + b"\n"
    received = bytearray()

    def flood(display: Display) -> None:
        for _ in range(100):
            display.show("host", line * 200)
        display.show("host", line)

    with os.fdopen(writing, "wb") as output:
        display = Display(output, io.BytesIO())
        flooding = threading.Thread(target=flood, args=(display,))
        flooding.start()
        flooding.join(
            2.0
        )  # longer than its patience; it must have left lines out by now
        assert display.left_out > 0
        patience_s, put = [], display._chunks.put

        def put_and_note(chunk: Any, timeout: float) -> None:
            patience_s.append(timeout)
            put(chunk, timeout=timeout)

        display._chunks.put = put_and_note
        for _ in range(100):  # as many as a job may still have said when it ends
            display.show("host", line)
        display._chunks.put = put
        assert set(patience_s) == {0}
        with os.fdopen(reading, "rb") as terminal:
            reader = threading.Thread(target=lambda: received.extend(terminal.read()))
            reader.start()
            flooding.join(30)
            assert not flooding.is_alive()
            display.close()
            output.close()
            reader.join(30)
    assert received.count(b"\n") + display.left_out == 20_101
    assert all(shown.startswith(b"[host] x") for shown in bytes(received).splitlines())


def test_a_reader_that_went_away_ends_the_display_and_not_the_job() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = os.fdopen(writing, "wb", buffering=0)
    display = Display(output, io.BytesIO())
    for _ in range(20):
        display.show("a", b"line\n" * 100_000)
    display.close()
    assert display.left_out == 0
    output.close()
