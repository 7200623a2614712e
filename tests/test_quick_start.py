"""The commands of README for a newcomer run, and print what it shows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import REPO, bash


def shown_and_commands(heading: str) -> tuple[list[str], list[str]]:
    """Return the lines that a section of README shows, and the commands before them."""
    text = (REPO / "README.md").read_text(encoding="utf-8")
    section = text.split(f"{heading}\n", 1)[1]
    fenced = re.findall(
        r"^```(\w*)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL
    )
    commands = next(block for language, block in fenced if not language)
    shown = next(block for language, block in fenced if language == "text")
    return shown.splitlines(), commands.splitlines()


def shape(line: str) -> str:
    """Return what is the same in every run: numbers, causes and the best schedule are not."""
    line = " ".join(re.sub(r"\d+(\.\d+)?(E[+-]\d+)?", "#", line).split())
    line = re.sub(r"(?<=busy # ms; ).*(?=; peak memory)", "CAUSES", line)
    line = re.sub(r"\S+(?=/checkpoints|/log\.txt)", "OUT", line)
    return re.sub(r"^[a-z].* # # #\*?$", "SCHEDULE # # #", line)


def assert_shown(shown: list[str], printed: str) -> None:
    """Every line that README shows is printed, in its order; `...` stands for any lines."""
    found = [shape(line) for line in printed.splitlines()]
    position, anywhere = 0, True
    for line in shown:
        if line.strip() == "...":
            anywhere = True
            continue
        wanted = shape(line)
        reachable = found[position:] if anywhere else found[position : position + 1]
        assert wanted in reachable, f"README shows {line!r}; printed was\n{printed}"
        position += reachable.index(wanted) + 1
        anywhere = False


@pytest.mark.e2e
@pytest.mark.usefixtures("a_training_loop")
@pytest.mark.slow
def test_what_did_it_do(tmp_path: Path) -> None:
    shown, (train, *explain) = shown_and_commands("### Inspect the result")
    assert [command.split()[:2] for command in explain] == [
        ["megatron-ext", "aggregate"], ["megatron-ext", "report"], ["megatron-ext", "plan"]
    ]  # fmt: skip
    here = {"cwd": tmp_path, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    trained = bash("-c", train.replace("examples/", f"{REPO}/examples/"), **here)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    done = bash("-ec", "\n".join(explain), **here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_shown(shown, done.stdout)
    assert (tmp_path / explain[1].split()[-1] / "report.html").stat().st_size > 10_000
    flags = re.split(r"\nflags.*:\n", done.stdout)[1]
    assert "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule" in flags
    # README's first command ends in the same way, but at its exit interval.
    end = shown_and_commands("## Two commands")[0][1:]
    end = ["..." if line.startswith("stops after") else line for line in end]
    assert_shown(end, trained.stdout)
