"""Messages show words of a user or of a file in a bounded, printable way."""

from __future__ import annotations

import copy
import pickle
import subprocess
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.errors import (
    ConfigurationError,
    HangError,
    MegatronExtError,
    PeerAborted,
    UpstreamMismatch,
    line_of,
    reason_of,
)

HUGE = "x" * 1_000_000


def test_long_words_are_shortened_and_their_length_is_told() -> None:
    line = line_of(f"node:1: {HUGE!r} is not a host; write NAME")
    assert len(line) < 400
    assert line.startswith("node:1: 'xxx")
    assert "(1000002 characters)" in line
    assert line.endswith("xxx' is not a host; write NAME")


def test_long_lines_are_shortened() -> None:
    assert len(line_of("many words " * 100_000)) < 2100


def test_usual_messages_stay_as_they_are() -> None:
    text = "größer als 3: " + "/a/path/of/some/length" * 8 + "\nsecond line"
    assert line_of(text) == text


def test_characters_that_steer_a_terminal_are_escaped() -> None:
    assert line_of("a\x1b[31mred\r\udc80") == "a\\x1b[31mred\\r\\udc80"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EOFError(), "it is truncated"),
        (KeyError(), "KeyError"),
        (ValueError("\n\n  first\nsecond"), "first"),
        (OSError(28, "No space left on device", "/x"), "No space left on device"),
    ],
)
def test_every_error_has_a_reason(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    "line",
    [
        ["launch", "--hostfile", "{hosts}", "--", "x.py"],
        ["plan", "--pp", HUGE],
        ["plan", "--pp", "4", "--microbatches", "8", "--schedule", HUGE],
        ["plot", HUGE, "--pp", "4", "--microbatches", "8"],
        ["status", HUGE],
        ["report", "--trace-dir", HUGE],
        ["upstream", HUGE],
        [HUGE],
    ],
)
def test_no_command_echoes_a_huge_word(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text(f"{HUGE}/\n")
    line = [word.format(hosts=tmp_path / "hosts") for word in line]
    try:
        code = main(line)
    except SystemExit as ended:  # argparse
        code = ended.code
    told = capsys.readouterr()
    assert code == 2
    assert len(told.err) < 4000
    assert told.err.splitlines()[-1].count("x") > 100


def test_a_dry_run_shows_what_would_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    said = "\x1b[31mred'\\ é\n"
    words = ["launch", "--hostfile", str(tmp_path / "hosts"), "--dry-run", "--per-node"]
    assert main([*words, "--", "printf", "%s", said]) == 0
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    command = shown.splitlines()[-1].partition(" && ")[2]
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout == said


@pytest.mark.parametrize("flag", ["--include", "--exclude"])
def test_doctor_needs_a_hostfile_to_choose_from(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", flag, "node1"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{flag} selects hosts from a hostfile; add --hostfile FILE" in line


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("{slices:4} excludes {pairs}; its braces {word}", word="{}"),
        HangError("rank 3 makes no progress", rank=3),
        PeerAborted("1F0 did not come", "rank 2: out of memory"),
        UpstreamMismatch(
            "module:name",
            expected="a",
            actual="b",
            installed="1",
            supported="2",
            remedy="pip",
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_copied_whole(error: MegatronExtError) -> None:
    # As NVRx does with the state of a rank that failed, and torch with that of a worker.
    for copied in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)
