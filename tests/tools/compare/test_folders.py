"""`megatron-ext compare --folders`: digests that other launchers' trainings recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.tracing.digest_files import VARIABLE, Header, Writer
from tests.examples.test_configure import PROGRAM, losses
from tests.tools.compare.digests import SLICED, changed, step_records, write


def compare(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megatron-ext", "compare", *words])
    return cli.main(["compare", *words])


def test_equal_folders_end_with_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write(tmp_path / name, step_records())) for name in ("one", "two")]
    assert compare(monkeypatch, "--folders", *folders) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no difference in 32 tensors over 1 steps, counting the initial weights as one",
        "schedules: Megatron's own and Megatron's own",
        "tolerance: none, all bits must be equal",
    ]


def test_a_folder_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "one", step_records())
    (tmp_path / "link").symlink_to(folder)
    words = str(folder), str(tmp_path / "link")
    assert compare(monkeypatch, "--folders", *words) != 0
    assert "--folders got the same folder twice" in capsys.readouterr().err


def test_a_folder_without_the_digests_of_all_ranks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, each host wrote its ranks' digests to its own disk."""
    folders = []
    for name in ("one", "two"):
        header = Header(0, num_ranks=2)
        folders.append(str(write(tmp_path / name, step_records(), header=header)))
    assert compare(monkeypatch, "--folders", *folders) != 0
    assert "has digests of 1 of 2 ranks" in capsys.readouterr().err


def test_runs_that_share_only_their_initial_weights_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = [item for item in step_records() if item.kind == "weights"]
    complete = str(write(tmp_path / "one", weights, step_records()))
    died_early = str(write(tmp_path / "two", weights))
    assert compare(monkeypatch, "--folders", complete, died_early) != 0
    assert "no complete training step in common" in capsys.readouterr().err


def test_nan_in_both_runs_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = []
    for item in step_records():
        if (item.kind, item.stage) == ("forward", 2):
            item = item._replace(norm=float("nan"))
        records.append(item)
    folders = [str(write(tmp_path / name, records)) for name in ("one", "two")]
    assert compare(monkeypatch, "--folders", *folders) == 1
    assert "the output of layer 2 is not finite in both runs" in capsys.readouterr().out
    assert compare(monkeypatch, "--json", "--folders", *folders) == 1


@pytest.mark.parametrize("is_shorter", [True, False])
def test_runs_of_unequal_length_are_unproven(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_shorter: bool,
) -> None:
    """Nothing is known about the steps that only one of them has."""
    steps = [step_records()] * 3
    long = str(write(tmp_path / "long", *steps))
    short = str(write(tmp_path / "short", *steps[:2]))
    folders = [long, short] if is_shorter else [short, long]
    assert compare(monkeypatch, "--folders", *folders) == 1
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict.startswith("no difference in 64 tensors over 2 steps")
    assert "equality is unproven, because the runs have " in verdict
    assert "steps, of which they share 2; record both for the same steps" in verdict
    assert compare(monkeypatch, "--json", "--folders", *folders) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["gap"].startswith("the runs have ")


def test_a_step_that_not_all_ranks_completed_is_unproven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank was killed in both runs, in the same step."""
    folders = []
    for name in ("one", "two"):
        for rank in range(2):
            steps = [step_records()] * (2 - rank)
            write(tmp_path / name, *steps, header=Header(rank, num_ranks=2))
        folders.append(str(tmp_path / name))
    assert compare(monkeypatch, "--folders", *folders) == 1
    assert "not all ranks completed step 2" in capsys.readouterr().out


def test_a_step_that_ran_another_schedule_is_unproven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = str(write(tmp_path / "one", step_records(), step_records()))
    candidate = tmp_path / "two"
    writer = Writer(candidate, Header(0, schedule="zb-v"))
    writer.step(1, step_records(), "zb-v")
    writer.step(2, step_records(), "Megatron's own")
    writer.close()
    assert compare(monkeypatch, "--folders", reference, str(candidate)) == 1
    shown = capsys.readouterr().out
    assert "two: step 2 ran Megatron's own instead of zb-v" in shown
    assert "\nschedules: Megatron's own and zb-v\n" in shown


def test_files_of_an_earlier_run_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("one", "two"):
        write(tmp_path / name, step_records(), header=Header(0, num_ranks=1))
        write(tmp_path / name, step_records(), header=Header(1, num_ranks=2))
        folders.append(str(tmp_path / name))
    assert compare(monkeypatch, "--folders", *folders) != 0
    assert "has digests of several runs" in capsys.readouterr().err


def test_what_only_one_run_has_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = [item for item in step_records() if item.stage != 3]
    folders = [
        str(write(tmp_path / "one", step_records())),
        str(write(tmp_path / "two", fewer)),
    ]
    assert compare(monkeypatch, "--folders", *folders) == 0
    assert (
        "not compared: 5 kinds of tensors that only the reference has, such as backward of "
        "decoder.layers.3"
    ) in capsys.readouterr().out


def test_a_difference_is_named_and_ends_with_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "one", step_records())
    second = write(tmp_path / "two", changed(step_records(), ("forward", 1, 2)))
    assert compare(monkeypatch, "--folders", str(first), str(second)) == 3
    assert capsys.readouterr().out.startswith(
        "first difference: iteration 1, micro-batch 1: the output of layer 2 differs by 0.5"
    )
    assert compare(monkeypatch, "--json", "--folders", str(first), str(second)) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == 3
    difference = answer["difference"]
    assert (difference["kind"], difference["layer"], difference["microbatches"]) == (
        "forward",
        2,
        [1],
    )
    assert difference["candidate"]["action"] == "2F1"
    assert difference["sentence"].startswith("first difference: iteration 1")


def test_a_third_folder_gives_the_tolerances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, header in (
        ("one", Header(0)), ("two", SLICED), ("three", Header(0, rounded=True)),
    ):  # fmt: skip
        folders.append(str(write(tmp_path / name, step_records(), header=header)))
    assert compare(monkeypatch, "--folders", *folders) == 0
    assert (
        "4 times the differences of each module's tensors in" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folders", "a"], "--folders got 1; pass the folders of the reference"),
        (["--folders", "a", "b", "--self"], "remove --self"),
        (["--folders", "a", "b", "--steps", "9"], "remove --steps"),
        (["--folders", "a", "b", "--nproc", "2"], "remove --nproc 2"),
        (
            ["--folders", "a", "b", "--", "pretrain_gpt.py"],
            "remove the command after --",
        ),
        (
            ["--folders", "a", "b"],
            "a has no digests; run the training with MEGATRON_EXT_DIGESTS=a",
        ),
        (
            ["--folders", "a b", "c"],
            "run the training with MEGATRON_EXT_DIGESTS='a b'",
        ),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare(monkeypatch, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ext: error: ")
    assert message in line


def test_a_third_folder_without_digests_says_how_to_record_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write(tmp_path / name, step_records())) for name in ("one", "two")]
    third = tmp_path / "three"
    assert compare(monkeypatch, "--folders", *folders, str(third)) == 2
    remedy = f"MEGATRON_EXT_DIGESTS={third} MEGATRON_EXT_DIGESTS_ROUNDING=1"
    assert f"run the training with {remedy}" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_lower_precision_needs_a_learned_tolerance(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    precision: str,
) -> None:
    """The stated tolerance is for single precision."""
    headers = (
        Header(0, precision=precision),
        replace(SLICED, precision=precision),
    )
    folders = []
    for name, header in zip(("one", "two"), headers, strict=True):
        folders.append(str(write(tmp_path / name, step_records(), header=header)))
    assert compare(monkeypatch, "--folders", *folders) == 0
    hint = "the stated tolerance is for float32, but the runs compute in bfloat16"
    assert (hint in capsys.readouterr().out) == (precision == "bfloat16")


@pytest.mark.slow
def test_a_program_with_its_own_loop_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its step is no `pretrain` of Megatron's, and torchrun launches it."""
    broken = tmp_path / "broken.py"
    text = PROGRAM.read_text()
    loss = "losses.mean(), losses.mean().item()"
    assert loss in text
    broken.write_text(
        text.replace(loss, loss.replace("losses.mean(),", "losses.mean() * 1.0001,"))
    )
    for name, words, program in (
        ("own", (), PROGRAM), ("zb-v", ("zb-v",), PROGRAM), ("broken", ("zb-v",), broken),
    ):  # fmt: skip
        monkeypatch.setenv(VARIABLE, str(tmp_path / name))
        losses(*words, program=program)
    folders = [str(tmp_path / name) for name in ("own", "zb-v", "broken")]
    assert compare(monkeypatch, "--folders", *folders[:2]) == 0
    assert "over 4 steps" in capsys.readouterr().out
    assert compare(monkeypatch, "--folders", folders[0], folders[2]) == 3
    assert (
        "the gradient of the output of model differs by 0.0001"
        in capsys.readouterr().out
    )
