"""Every command of README and the documents, as it stands there.

What is cheap is run: plans, drawings, dry runs, and each script of a model with `--dry-run`. Of
the others the arguments are parsed, by the parser that would parse them: they train for minutes,
need a trace, a run, other hosts or a package index, and tests of their own run them.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from megatron_ext import cli
from tests.examples.scripts import REPO, bash
from tests.test_readme import DOCUMENTS, command_lines, text_of, tracked

_PLACEHOLDER = re.compile(r"\.\.\.|\$\w+|FLAGS")


def found(*programs: str) -> list[tuple[dict[str, str], list[str]]]:
    """The different commands of these programs, each with the variables that it sets."""
    lines = [line for path in DOCUMENTS for line in command_lines(text_of(path))]
    return [
        line
        for n, line in enumerate(lines)
        if line[1][0] in programs and line not in lines[:n]
    ]


def named(lines: list[tuple[dict[str, str], list[str]]]) -> list[object]:
    return [pytest.param(*line, id=" ".join(line[1][1:])[:90]) for line in lines]


def is_run(words: list[str]) -> bool:
    """Whether a command of ours needs nothing but itself."""
    if words[1] in ("plan", "plot"):
        # `zb-late` is the schedule that its document adds; tests/schedules/test_docs.py draws it.
        return not {"--trace-dir", "--calibrate", "zb-late"} & set(words)
    return words[1] == "launch" and "--dry-run" in words


OURS = found("megatron-ext")
SCRIPTS = [line for line in found("bash") if line[1][1].startswith("examples/")]
LAUNCHED = found("torchrun")


def test_there_are_commands_of_each_kind() -> None:
    run = [words[1] for _, words in OURS if is_run(words)]
    assert {"plan", "plot", "launch"} <= set(run)
    assert len(run) >= 10
    assert len(SCRIPTS) >= 30
    assert len(LAUNCHED) >= 10


# The layout of DeepSeek-V3 on 2,048 devices is a search of minutes on a slow machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("variables", "words"), named([line for line in OURS if is_run(line[1])])
)
def test_a_command_of_ours_runs(
    variables: dict[str, str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostfiles").symlink_to(REPO / "hostfiles")
    (tmp_path / "examples").symlink_to(REPO / "examples")
    (tmp_path / "pretrain_gpt.py").touch()
    lengths = "\n".join(str(1 + 977 * n % 4001) for n in range(4000))
    (tmp_path / "lengths.txt").write_text(lengths, encoding="utf-8")
    (tmp_path / "here.json").write_text('{"base": "h100"}', encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(words[1:]) == 0
    assert printed.getvalue().strip()
    for output in (words[n + 1] for n, word in enumerate(words) if word == "-o"):
        assert (tmp_path / output).stat().st_size > 100


@pytest.mark.parametrize(
    "words", [words for _, words in OURS if not is_run(words)], ids=" ".join
)
def test_a_command_of_ours_is_understood(words: list[str]) -> None:
    args = cli.build_parser().parse_args(words[1:])
    assert callable(args.run)


def with_devices(hostfile: str, folder: Path) -> str:
    """Return a file of the same hosts with 8 devices each, or of four where any may be named.

    A dry run asks no host how many it has.
    """
    named = REPO / hostfile
    hosts = [f"10.0.0.{n}" for n in range(1, 5)]
    if hostfile != "FILE":
        hosts = [
            line for line in text_of(named).splitlines() if not line.startswith("#")
        ]
    copy = folder / "hosts"
    copy.write_text("".join(f"{host} slots=8\n" for host in hosts))
    return str(copy)


@pytest.mark.parametrize(("variables", "words"), named(SCRIPTS))
def test_a_script_of_a_model_starts_something(
    variables: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    arguments = [word for word in words[2:] if not _PLACEHOLDER.fullmatch(word)]
    # Some take the number of this machine as their first word.
    first = ["0"] if any(word.startswith("$") for word in words[2:3]) else []
    for n, word in enumerate(arguments[:-1]):
        if word == "--hostfile" and arguments[n + 1] != "hostfiles/localhost":
            arguments[n + 1] = with_devices(arguments[n + 1], tmp_path)
    if "HOSTFILE" in variables:
        variables = {
            **variables,
            "HOSTFILE": with_devices(variables["HOSTFILE"], tmp_path),
        }
    done = bash(words[1], *first, *arguments, "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
    assert re.search(r"pretrain_(gpt|bert)\.py", done.stdout)


@pytest.mark.parametrize("words", [words for _, words in LAUNCHED], ids=" ".join)
def test_a_command_of_torchrun_is_understood(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    given = [word for word in words[1:] if not _PLACEHOLDER.fullmatch(word)]
    args = get_args_parser().parse_args(given)
    if args.module:
        assert args.training_script == "megatron_ext"
        script, *flags = args.training_script_args
        assert script in ("pretrain_gpt.py", "pretrain_bert.py")
    else:
        assert args.training_script in tracked()
        flags = args.training_script_args
    assert not [
        flag for flag in flags if flag.startswith("-") and not flag.startswith("--")
    ]
