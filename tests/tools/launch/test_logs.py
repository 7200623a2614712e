"""From the files of the ranks to the terminal: whole lines, bounded memory, nothing blocked."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from megatron_ext.tools.launch import tail
from megatron_ext.tools.launch.display import Display
from megatron_ext.tools.launch.tail import LogFiles, last_lines


def rank_log(directory: Path, local_rank: int, stream: str = "stdout") -> Path:
    path = directory / "ranks" / "x_1" / "attempt_0" / str(local_rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read(logs: LogFiles, *, final: bool = False) -> list[tuple[str, bytes]]:
    return [(chunk.source, chunk.data) for chunk in logs.read(final=final)]


def test_lines_are_handed_on_whole_and_only_of_the_ranks_asked_for(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path, 4, [1], {"output.log": ""})
    assert read(logs) == []  # there are no files yet
    rank_log(tmp_path, 0).write_bytes(b"not shown\n")
    with rank_log(tmp_path, 1).open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert read(logs) == [("5", b"one\n")]
        assert read(logs) == []
        file.write(b"o\nthree")
        (tmp_path / "output.log").write_bytes(b"hello\n")
        assert sorted(read(logs)) == [("", b"hello\n"), ("5", b"two\n")]
        assert read(logs, final=True) == [("5", b"three\n")]
    logs.close()


def test_a_line_without_an_end_does_not_grow_for_ever(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_bytes(b"x" * (tail.CHUNK_BYTES + 10))
    logs = LogFiles(tmp_path, 0, [0], {})
    [(_, data)] = read(logs)
    assert data == b"x" * tail.CHUNK_BYTES + b"\n"
    logs.close()


def test_who_is_far_behind_gets_the_newest_lines_and_is_told(tmp_path: Path) -> None:
    path = rank_log(tmp_path, 0)
    with path.open("wb") as file:
        file.truncate(tail.MAX_BEHIND_BYTES + 1)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
    logs = LogFiles(tmp_path, 0, [0], {})
    data = b""
    while found := read(logs):
        data += b"".join(chunk for _, chunk in found)
    assert data.startswith(b"... ")
    assert f"bytes are not shown here; they are in {path}".encode() in data
    assert data.endswith(b"the last line\n")
    assert len(data) < 4 << 20
    logs.close()


def test_last_lines_of_a_file_that_may_be_large_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"\na\nb\n\xff\n")
    assert last_lines(path, 2) == ["b", "\ufffd"]
    assert last_lines(tmp_path / "gone", 2) == []


def test_a_terminal_that_takes_nothing_loses_lines_but_holds_nobody_up() -> None:
    reading, writing = os.pipe()
    line = b"x" * 999 + b"\n"
    received = bytearray()

    async def flood(display: Display) -> None:
        for _ in range(100):
            await display.show("host:0", line * 200)
        await display.show("host:0", line)

    with os.fdopen(writing, "wb") as output:
        display = Display(output)
        flooding = threading.Thread(target=lambda: asyncio.run(flood(display)))
        flooding.start()
        flooding.join(2.0)  # longer than its patience; it must have left lines out by now
        assert display.left_out > 0
        with os.fdopen(reading, "rb") as terminal:
            reader = threading.Thread(target=lambda: received.extend(terminal.read()))
            reader.start()
            flooding.join(30)
            assert not flooding.is_alive()
            display.close()
            output.close()
            reader.join(30)
    assert received.count(b"\n") + display.left_out == 20_001
    assert all(shown.startswith(b"[host:0] x") for shown in bytes(received).splitlines())


def test_a_reader_that_went_away_ends_the_display_and_not_the_job() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = os.fdopen(writing, "wb", buffering=0)
    display = Display(output)
    for _ in range(20):
        asyncio.run(display.show("a", b"line\n" * 100_000))
    display.close()
    assert display.left_out == 0
    output.close()
