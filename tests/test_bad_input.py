"""Numbers and files that nobody should give: one line, exit code 2, no traceback, bounded time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.tracing.records import SCHEDULE_FILE
from tests.tools.trace.runs import trace_of, write_run

pytestmark = pytest.mark.timeout(60)

NUMBERS = ("0", "-1", "nan", "inf", "1e308", "9" * 30, "", "½")
SIZES = {"--pp": "4", "--microbatches": "8", "--chunks": "2", "--costs": "1,1,1", "--comm": "0"}
ARENAS = {
    "--pp": "4", "--microbatches": "8", "--seq-length": "8", "--micro-batch-size": "1",
    "--hidden-size": "8", "--preflight-timeout": "5",
}  # fmt: skip
JOB = {
    "--nproc": "1", "--num-microbatches": "4", "--master-port": "29501", "--grace": "1",
    "--preflight-timeout": "5",
}  # fmt: skip
MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 128"
COMMANDS: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "plan": (["plan", "--schedule", "interleaved"], SIZES, []),
    "plan all": (["plan", "--use-dpp"], {k: v for k, v in SIZES.items() if k != "--chunks"}, []),
    "plan --trace-dir": (["plan", "--trace-dir", "RUN"], {"--memory-gib": "1"}, []),
    "plan --devices": (
        ["plan"],
        {
            "--devices": "8xh100", "--global-batch-size": "64", "--seq-length": "4096",
            "--memory-gib": "80",
        },
        ["--", *MODEL.split()],
    ),
    "plot": (["plot", "interleaved", "zb-v"], {**SIZES, "--chunks": "2"}, []),
    "aggregate": (
        ["aggregate", "--trace-dir", "RUN"], {}, []
    ),
    "doctor": (["doctor"], ARENAS, []),
    "launch": (
        ["launch", "--hostfile", "HOSTS", "--dry-run"],
        JOB,
        ["--", "pretrain_gpt.py", "--micro-batch-size", "1"],
    ),
}  # fmt: skip
FINE = {
    "--comm": ("0",),
    "--grace": ("0",),
    "--preflight-timeout": ("0",),
    "--memory-gib": ("1e308", "9" * 30),
}
"""Values of the list that mean something."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a traced run."""
    return write_run(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hostfile."""
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n")
    return path


def outcome(arguments: list[str]) -> int:
    """Return the exit code of a command; an exception of it fails the test."""
    try:
        return cli.main(arguments)
    except SystemExit as error:  # of argparse
        return int(error.code or 0)


def assert_refused(code: int, captured: pytest.CaptureFixture[str]) -> None:
    out, err = captured.readouterr()
    told = [line for line in err.splitlines() if "error: " in line]
    assert (code, len(told)) == (2, 1), out + err
    assert len(told[0]) < 1000


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("command", "flag"),
    [(name, flag) for name, (_, flags, _) in COMMANDS.items() for flag in flags],
)
def test_numbers(
    capsys: pytest.CaptureFixture[str],
    run_folder: Path,
    hosts: Path,
    command: str,
    flag: str,
    number: str,
) -> None:
    if number in FINE.get(flag, ()):
        pytest.skip("means something")
    begin, flags, rest = COMMANDS[command]
    places = {"RUN": str(run_folder), "HOSTS": str(hosts)}
    given = {**flags, flag: f"1,{number},1" if flag == "--costs" else number}
    sizes = [f"{name}={value}" for name, value in given.items()]
    assert_refused(outcome([places.get(word, word) for word in begin] + sizes + rest), capsys)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: min(100, 2 * len(content) // 3)])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[::7] = bytes(byte ^ 0x55 for byte in content[::7])
    path.write_bytes(content)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _nested(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def _unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGE = (_empty, _truncated, _flipped, _directory, _pipe, _endless, _nested, _unreadable)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["plan", "plot", "doctor"])
def test_tables(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    damage: Callable[[Path], None],
) -> None:
    path = tmp_path / "table.csv"
    cli.main(["plot", "zb-v", "--pp", "4", "--microbatches", "8", "-o", str(path)])
    capsys.readouterr()
    damage(path)
    named = [f"csv:{path}"] if command == "plot" else ["--schedule", f"csv:{path}"]
    sizes = [f"{flag}={value}" for flag, value in ARENAS.items()] if command == "doctor" else []
    assert_refused(outcome([command, *named, *sizes]), capsys)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["schedule", "traces"])
@pytest.mark.parametrize("command", ["plan --trace-dir", "aggregate --trace-dir", "report"])
def test_traces(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    file: str,
    damage: Callable[[Path], None],
) -> None:
    """A Chrome trace needs no table; all else is needed."""
    directory = write_run(tmp_path)
    paths = [directory / SCHEDULE_FILE]
    if file == "traces":
        paths = [trace_of(directory, rank) for rank in range(4)]
    for path in paths:
        damage(path)
    code = outcome([*command.split(), str(directory)])
    if file == "schedule" and command != "plan --trace-dir" and code == 0:
        return
    assert_refused(code, capsys)


@pytest.mark.parametrize("damage", [damage for damage in DAMAGE if damage is not _nested])
@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_hostfiles(
    capsys: pytest.CaptureFixture[str],
    hosts: Path,
    command: str,
    damage: Callable[[Path], None],
) -> None:
    damage(hosts)
    rest = ["--dry-run", "--", "pretrain_gpt.py"] if command == "launch" else []
    assert_refused(outcome([command, "--hostfile", str(hosts), *rest]), capsys)
