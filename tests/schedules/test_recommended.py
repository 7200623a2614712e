"""Recommendations of `plan` and of error messages, pasted: training accepts all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.schedules import registered
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks, start_script
from tests.tools.trace.runs import write_run

MODEL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --eval-interval 1000 "
)
SIZES = range(2, 9)
PAPER = "--pipeline-schedule bitpipe --bitpipe-order paper"
CHOOSING = r"--pipeline-schedule \S+|--enable-bitpipe-schedule|--bitpipe-order \S+"


def pasted(*cases: tuple[str, int]) -> list[Any]:
    """Return what comes of each command line on so many processes, or the error."""
    require_training()
    return run_ranks(1, outcomes, [("gpt", MODEL + f, world) for f, world in cases])[0]


def flags_of(printed: str) -> list[str]:
    """Return the command lines that `plan` prints below `flags:`."""
    listed = re.split(r"\nflags.*:\n", printed)[1].split("\n\n", maxsplit=1)[0]
    return [
        re.split(r"\s{2,}", line.strip(), maxsplit=1)[1] for line in listed.splitlines()
    ]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the command lines that `plan` recommends."""
    assert cli.main(["plan", *arguments]) == 0
    return flags_of(capsys.readouterr().out)


def world_of(flags: str) -> int:
    """Return the processes that a command line is for."""
    found = re.search(r"--pipeline-model-parallel-size (\d+)", flags)
    assert found is not None, flags
    return int(found[1]) * (2 if "--forward-backward-disaggregating" in flags else 1)


def refused(cases: list[tuple[str, int]]) -> list[str]:
    """Return the messages about those command lines that cannot be trained with."""
    results = pasted(*cases)
    return [
        f"{flags}: {result}"
        for (flags, _), result in zip(cases, results, strict=True)
        if isinstance(result, str)
    ]


def test_training_takes_everything_that_plan_recommends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = []
    for pp in SIZES:
        for m in (1, pp + 1, 2 * pp, 17):
            for options in (
                [],
                ["--use-dpp", "--comm", "0.2"],
                ["--costs", "1,1.21,0.7"],
            ):
                size = ["--pp", str(pp), "--microbatches", str(m)]
                for flags in planned(capsys, *size, *options):
                    model = f"--num-layers {12 * pp} --global-batch-size {m}"
                    dynamic = " --use-dpp" if "--use-dpp" in options else ""
                    cases.append((f"{flags} {model}{dynamic}", world_of(flags)))
    assert not refused(cases)


@pytest.mark.parametrize("options", [["--chunks", "3"], ["--schedule", "fbd"]])
def test_options_of_plan_can_be_trained_with(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    cases = []
    for pp in (2, 4, 8):
        for flags in planned(capsys, "--pp", str(pp), "--microbatches", "8", *options):
            model = f"--num-layers {12 * pp} --global-batch-size 8"
            cases.append((f"{flags} {model}", world_of(flags)))
    assert not refused(cases)


@pytest.mark.parametrize("traced", ["1f1b", "zb-h1"])
def test_training_takes_everything_that_a_forecast_recommends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, traced: str
) -> None:
    cases = []
    for pp in SIZES:
        m, layers = 2 * pp + pp // 2 % 2, 4 * pp
        directory = write_run(
            tmp_path / str(pp), schedule=traced, pp=pp, microbatches=m,
            settings={"num_layers": layers},
        )  # fmt: skip
        for flags in planned(capsys, "--trace-dir", str(directory)):
            model = f"--num-layers {layers} --global-batch-size {m}"
            cases.append((f"{flags} {model}", world_of(flags)))
    assert not refused(cases)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2, 4), (4, 6)], ids=str)
def test_the_first_recommendation_trains(
    capsys: pytest.CaptureFixture[str], size: tuple[int, int]
) -> None:
    pp, m = size
    first = planned(capsys, "--pp", str(pp), "--microbatches", str(m))[0]
    flags = f"{MODEL} {first} --num-layers {2 * pp} --global-batch-size {m} --log-interval 1"
    run = start_script(pp, "pretrain_gpt.py", flags.split())
    assert run.exit_codes == [0] * pp, run.describe()
    assert any(re.search(r"iteration +5/ +5 ", log) for log in run.logs), run.describe()


def test_training_takes_what_its_messages_recommend() -> None:
    """Each remedy in place of what was refused. Some command lines have several mistakes."""
    todo = [
        f"--pipeline-model-parallel-size {pp} {chosen} --num-layers {4 * pp + 1} "
        f"--global-batch-size {batch}"
        for pp in SIZES
        for chosen in [*map("--pipeline-schedule {}".format, registered()), PAPER]
        for batch in (1, 2 * pp - 1, 2 * pp + 1)
    ]
    rounds = 0
    while todo:
        rounds += 1
        assert rounds <= 5, f"remedies that lead to no end: {todo[:4]}"
        cases = [(flags, world_of(flags)) for flags in todo]
        results = zip(todo, pasted(*cases), strict=True)
        remedies = (remedies_of(*one) for one in results if isinstance(one[1], str))
        todo = sorted({remedy for several in remedies for remedy in several})
    assert rounds > 1


def remedies_of(flags: str, message: str) -> list[str]:
    """Return the command lines that a message recommends in place of a refused one."""
    found = []
    for flag, pattern in REMEDIES:
        told = re.search(pattern, message)
        if told is not None:
            found += [
                changed(flags, f"{flag} {number}") for number in told.groups() if number
            ]
            break
    assert found, f"no remedy for {flags} in: {message}"
    named = re.search(r", or (--pipeline-schedule \S+), which accepts any", message)
    if named is not None:
        found.append(changed(flags, named[1]))
    return found


REMEDIES = (
    (
        "--pipeline-model-parallel-size",
        r"use --pipeline-model-parallel-size (\d+)(?: or (\d+))?",
    ),
    ("--global-batch-size", r"use --global-batch-size (\d+)(?: or (\d+))?"),
)
"""By flag: where a message says values that it may have."""


def changed(flags: str, remedy: str) -> str:
    """Return a command line with a remedy in place of what it replaces."""
    flag = remedy.split(maxsplit=1)[0]
    if flag in ("--pipeline-schedule", "--enable-bitpipe-schedule"):
        return f"{re.sub(CHOOSING, '', flags)} {remedy}"
    return re.sub(rf"{flag} \S+", remedy, flags)
