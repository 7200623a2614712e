"""Files that users name for an output: links, devices, pipes, and what was there before."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.files import replacing, write_text
from tests.tools.trace.runs import write_run

ROOT = Path(__file__).resolve().parent.parent


def _aggregate(run: Path, output: Path) -> list[str]:
    return ["aggregate", "--trace-dir", str(run), "-o", str(output)]


def _report(run: Path, output: Path) -> list[str]:
    return ["report", "--trace-dir", str(run), "-o", str(output)]


def _plot(run: Path, output: Path) -> list[str]:
    return ["plot", "1f1b", "--pp", "2", "--microbatches", "4", "-o", str(output)]


COMMANDS: dict[str, tuple[Callable[[Path, Path], list[str]], str]] = {
    "aggregate": (_aggregate, ".json"),
    "report": (_report, ".html"),
    "plot": (_plot, ".svg"),
}
"""Command line that writes a file, and the ending of that file's name."""


@pytest.fixture(params=COMMANDS)
def command(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Callable, str]:
    (tmp_path / "out").mkdir()
    run = write_run(tmp_path, iterations=1)
    line, ending = COMMANDS[request.param]

    def call(output: Path) -> tuple[int, str]:
        code = main(line(run, output))
        return code, capsys.readouterr().err

    return call, ending


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path, command) -> None:
    run, ending = command
    (tmp_path / "elsewhere").mkdir()
    aim = tmp_path / "elsewhere" / "aim"
    aim.write_text("before")
    aim.chmod(0o640)
    link = tmp_path / "out" / f"link{ending}"
    link.symlink_to("../elsewhere/aim")
    assert run(link) == (0, "")
    assert link.is_symlink()
    assert aim.read_text() not in ("", "before")
    assert stat.S_IMODE(aim.stat().st_mode) == 0o640, (
        "a file that is replaced keeps its mode"
    )
    assert _entries(tmp_path / "elsewhere") == ["aim"]
    assert _entries(tmp_path / "out") == [link.name]


def test_a_link_whose_file_is_yet_to_be_made_makes_it(tmp_path: Path, command) -> None:
    run, ending = command
    link = tmp_path / "out" / f"link{ending}"
    link.symlink_to(tmp_path / "aim")
    assert run(link) == (0, "")
    assert link.is_symlink()
    assert (tmp_path / "aim").stat().st_size > 100


def test_a_pipe_is_written_into(tmp_path: Path, command) -> None:
    run, ending = command
    pipe = tmp_path / "out" / f"pipe{ending}"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(
        target=lambda: read.append(pipe.read_bytes()), daemon=True
    )
    reader.start()
    assert run(pipe) == (0, "")
    reader.join(60)
    assert len(read[0]) > 100
    if ending == ".json":
        assert json.loads(read[0])
    assert pipe.is_fifo()
    assert _entries(tmp_path / "out") == [pipe.name]


def test_a_device_is_written_into(tmp_path: Path, command) -> None:
    run, ending = command
    device = tmp_path / "out" / f"device{ending}"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_text("this user may use it")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")
    assert run(device) == (0, "")
    assert device.is_char_device()
    assert _entries(tmp_path / "out") == [device.name]


def test_a_full_disk_is_one_line(tmp_path: Path, command) -> None:
    run, ending = command
    link = tmp_path / f"full{ending}"
    link.symlink_to("/dev/full")
    code, told = run(link)
    assert (code, len(told.splitlines())) == (2, 1), told
    assert f"{link} cannot be written: No space left on device" in told


@pytest.mark.parametrize("kind", ["missing folder", "folder", "loop"])
def test_what_cannot_be_a_file_is_one_line(tmp_path: Path, command, kind: str) -> None:
    run, ending = command
    output = tmp_path / ("missing/x" if kind == "missing folder" else "x")
    output = output.with_suffix(ending)
    if kind == "folder":
        output.mkdir()
    elif kind == "loop":
        output.symlink_to(output.name)
    code, told = run(output)
    assert (code, len(told.splitlines())) == (2, 1), told
    assert f"{output} cannot be written: " in told


def _limited(argument_list: list[str], size: int) -> subprocess.CompletedProcess[str]:
    """Run a command whose files may have this size only, which stands for a full disk."""
    code = (
        "import resource, signal, sys\n"
        "from megatron_ext.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *argument_list],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_EXT_DEVICE": "cpu"},
    )  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_what_was_there_survives_a_disk_that_fills_up(
    tmp_path: Path, name: str
) -> None:
    run = write_run(tmp_path, iterations=1)
    line, ending = COMMANDS[name]
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / f"x{ending}"
    output.write_text("before")
    done = _limited(line(run, output), 1000)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"{output} cannot be written: File too large" in done.stderr
    assert output.read_text() == "before"
    assert _entries(tmp_path / "out") == [output.name], "no rest of the new one is left"


def test_a_file_is_seen_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_text(path, "one")
    with replacing(path) as scratch:
        scratch.write_text("two")
        assert path.read_text() == "one"
    assert path.read_text() == "two"
    with pytest.raises(UnicodeEncodeError), replacing(path) as scratch:
        scratch.write_text("three" + 10_000 * " " + "\udc80", encoding="utf-8")
    assert path.read_text() == "two"
    assert _entries(tmp_path) == ["x"]


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "text")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
