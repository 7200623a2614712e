"""`megatron-ext compare`, from its words to its answer: on CPU ranks, and without any."""

from __future__ import annotations

import argparse
import html
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.tools.compare import rounds, run
from megatron_ext.tools.compare.compare_commands import add_subcommand, launch_words
from megatron_ext.tools.compare.locate import Comparison, Difference, Origin
from megatron_ext.tools.compare.operators import OperatorComparison
from megatron_ext.tools.launch import launch_commands, slurm
from megatron_ext.tracing.digest_files import MEGATRONS, OPERATORS, ROUNDING
from megatron_ext.tracing.digest_files import VARIABLE as DIGESTS
from megatron_ext.tracing.step_records import FOLDER, LIMIT
from tests.commands import run_package
from tests.ranks import require_training
from tests.tools.compare.records import LOSSES, write

RECIPE = (
    "pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 2 "
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --min-lr 1e-4 "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --eval-interval 1000 "
    "--num-workers 0 --split 98,1,1 --make-vocab-size-divisible-by 16 "
    "--no-create-attention-mask-in-dataloader --pipeline-model-parallel-size 2"
)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


def test_a_comparison_has_a_value_for_every_setting_that_launches_read() -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    launch_commands.add_subcommands(subparsers)
    add_subcommand(subparsers)
    of_launch = vars(parser.parse_args(["launch"]))
    of_compare = vars(parser.parse_args(["compare"]))
    # Restarts and what is shown belong to the runs, which are jobs of `launch`.
    assert set(of_launch) - set(of_compare) == {
        "max_restarts",
        "restart_window",
        "show",
    }


@pytest.mark.slow
def test_two_ranks_train_the_same_numbers_under_zb_h1(tmp_path: Path) -> None:
    require_training()
    done = run_package(
        "compare", "--steps", "4", "--rounds", "1", "--json", "-o", "out", "--",
        *RECIPE.split(), "--save", "mine", "--pipeline-schedule", "zb-h1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    own, zb_h1 = answer["runs"]
    assert (own["label"], zb_h1["label"]) == ("Megatron's own", "zb-h1")
    assert zb_h1["judgement"] == "equal"
    assert zb_h1["flags"] == ["--pipeline-schedule", "zb-h1"]
    for row in (own, zb_h1):
        assert row["num_steps"] == 4
        assert row["step_s"] > 0
        assert row["tokens_per_s"] > 0
        assert row["memory_bytes"] > 1 << 20
        assert 0 <= row["bubble_ratio"] < 1
    for row, schedule in ((own, MEGATRONS), (zb_h1, "zb-h1")):
        [steps] = row["rounds"]
        assert [step["schedules"] for step in steps] == [[schedule]] * 4
        assert all((step["wires"] is None) == (row is own) for step in steps)
    [steps] = own["rounds"]
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    # More digits than the log prints, and each step's own.
    assert len({step["losses"]["lm loss"] for step in steps}) == 4
    assert json.loads(Path("out/results.json").read_text()) == answer
    assert not Path("mine").exists(), "no run writes into the user's folder"
    assert not Path("out/weights").exists()


class Launches:
    """Stands in for `launch`: writes the records that a run's ranks would, or fails."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.changing_run = 0
        """The run whose last loss is another one; 0: none."""
        self.losses: dict[str, Sequence[float]] = {}
        """By a word of the command: the losses of a run with it."""
        self.failing = ""
        """A word of the command of a run that fails."""
        self.failing_code = 1
        self.failing_run = 0
        """Number of a run that fails; 0: none."""
        self.failing_reason = "localhost: rank 1 was killed by SIGKILL"
        self.failing_environment = ""
        """A variable of a run that fails."""
        self.falling_back = ""
        """A word of the command of runs whose last two steps run Megatron's own schedule."""
        self.departures: dict[str, Sequence[str]] = {}
        """Variable of the environment -> the departures of a run with it."""
        self.rounded_losses: Sequence[float] = LOSSES
        """The losses of a run that is rounded differently."""
        self.stops_after = 0
        """Runs after which Ctrl-C comes; 0: it does not."""

    def __call__(
        self,
        words: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        stop: run.Stop,
        progress: object,
    ) -> run.Ended:
        self.words.append(list(words))
        self.environments.append(dict(environment))
        log_path.write_text("")
        if len(self.words) == self.stops_after:
            os.kill(os.getpid(), signal.SIGINT)
            return run.Ended(130, "interrupted")
        is_failing = bool(self.failing) and self.failing in words
        is_failing = is_failing or self.failing_environment in environment
        if is_failing or len(self.words) == self.failing_run:
            return run.Ended(self.failing_code, self.failing_reason)
        if "--save" in words:
            Path(words[words.index("--save") + 1]).mkdir()
        if folder := environment.get(DIGESTS):
            Path(folder).mkdir(parents=True)
        if folder := environment.get(FOLDER):
            losses = next(
                (self.losses[word] for word in words if word in self.losses), LOSSES
            )
            if ROUNDING in environment:
                losses = self.rounded_losses
            if len(self.words) == self.changing_run:
                losses = (*losses[:-1], losses[-1] + 1e-9)
            departures: Sequence[str] = ()
            for variable in environment:
                departures = self.departures.get(variable, departures)
            schedules = self.schedules(words, len(losses))
            write(Path(folder), losses, schedules=schedules, departures=departures)
        return run.Ended(0, "")

    def schedules(self, words: Sequence[str], num_steps: int) -> list[str]:
        """Return the schedule of each step."""
        schedules = [MEGATRONS] * num_steps
        if "--pipeline-schedule" in words:
            name = words[words.index("--pipeline-schedule") + 1]
            schedules = [name] * num_steps
        if self.falling_back in words:
            schedules[-2:] = [MEGATRONS] * 2
        return schedules


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    stand_in = Launches()
    monkeypatch.setattr(run, "launch", stand_in)
    return stand_in


def compare(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["megatron-ext", "compare", *words])
    return cli.main(["compare", *words])


def test_a_dry_run_says_what_would_run_and_starts_nothing(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = [*RECIPE.split(), "--save", "mine", "--pipeline-schedule", "zb-h1"]
    words = ["--dry-run", "--with", "zb-v", "-o", "out", "--", *recipe]
    assert compare(monkeypatch, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "saves weights to start from, then trains 6 runs of 20 steps:" in lines
    assert "Megatron's own: the reference" in lines
    assert "zb-h1: all numbers bit-equal" in lines
    assert any(
        line.startswith("zb-v: losses within 0.0001 and gradient") for line in lines
    )
    assert "  --pipeline-schedule zb-v" in lines
    assert launches.words == []
    assert not Path("out").exists()


def test_a_dry_run_refuses_what_a_run_would(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        compare(monkeypatch, "--dry-run", "--with", "zb-z", "--", *RECIPE.split()) == 2
    )
    assert "zb-z" in capsys.readouterr().err
    assert launches.words == []


@pytest.mark.parametrize(
    ("option", "flags", "message"),
    [
        ("--with", "zb-h1 --load other", "--with --load: all runs start from the same"),
        ("--with", "zb-h1 --ckpt-step=2", "move --ckpt-step to the script's flags"),
        (
            "--reference",
            "gpipe --exit-interval 2",
            "--steps sets the length of each run",
        ),
        ("--with", "zb-h1 --save mine", "no run writes to your checkpoints"),
    ],
)
def test_a_candidate_cannot_change_what_all_runs_share(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    flags: str,
    message: str,
) -> None:
    """Other weights would be compared, or the flag would be overridden without a word."""
    words = [option, flags, "--", *RECIPE.split(), "--pipeline-schedule", "zb-v"]
    assert compare(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
    assert launches.words == []


def test_a_dry_run_does_without_torch() -> None:
    """Its import would take most of the time."""
    words = [
        "compare",
        "--dry-run",
        "--",
        *RECIPE.split(),
        "--pipeline-schedule",
        "zb-h1",
    ]
    program = (
        "import sys; from megatron_ext import cli; "
        f"sys.argv = ['megatron-ext', *{words}]; assert cli.main({words}) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rounds_run_to_and_fro_from_the_same_weights(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    words = ["--with", "gpipe", "-o", "out", "--nproc", "2", "--", *recipe]
    assert compare(monkeypatch, *words) == 0
    schedules = []
    for launched in launches.words:
        assert launched[:3] == ["--nproc", "2", "--"]
        is_ours = "--pipeline-schedule" in launched
        schedules.append(
            launched[launched.index("--pipeline-schedule") + 1] if is_ours else "own"
        )
    assert schedules == ["own", "own", "zb-h1", "gpipe", "gpipe", "zb-h1", "own"]
    weights = str(Path("out/weights").absolute())
    first, *others = launches.words
    assert first[first.index("--save") + 1] == weights
    assert all(launched[launched.index("--load") + 1] == weights for launched in others)
    assert not Path(weights).exists()
    shown = capsys.readouterr()
    assert shown.out.count("bit-equal") == 4
    assert (
        "run 7 of 7: Megatron's own, round 2: 100.0 ms per step, 5 steps" in shown.err
    )


@pytest.mark.parametrize("option", [[], ["--speed-only"], ["--self"]])
def test_a_candidate_that_falls_back_after_the_third_step_is_unproven(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: list[str],
) -> None:
    """Its numbers are equal, but they and its time are those of Megatron's own schedule."""
    launches.falling_back = "zb-h1"
    words = [
        *option,
        "-o",
        "out",
        "--",
        *RECIPE.split(),
        "--pipeline-schedule",
        "zb-h1",
    ]
    assert compare(monkeypatch, *words) == 1
    shown = capsys.readouterr().out
    reason = "Megatron's own ran instead of zb-h1 in 2 of 5 steps, first in iteration 4"
    assert reason in shown
    for praise in ("bit-equal", "1.00 x", "as fast", "Flags to keep"):
        assert praise not in shown
    answer = json.loads(Path("out/results.json").read_text())
    row = answer["runs"][1]
    assert (row["judgement"], row["speed"]) == ("unproven", None)
    steps = row["rounds"][0]
    assert [step["schedules"] for step in steps[2:4]] == [["zb-h1"], [MEGATRONS]]
    assert html.escape(reason) in Path("out/compare.html").read_text()


def test_a_reference_that_falls_back_proves_nothing(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.falling_back = "gpipe"
    words = ["--reference", "gpipe", "--with", "zb-h1", "-o", "out", "--"]
    assert compare(monkeypatch, *words, *RECIPE.split()) == 1
    shown = capsys.readouterr().out
    assert "\nzb-h1: gpipe: Megatron's own ran instead of gpipe in 2 of 5" in shown
    assert "bit-equal" not in shown
    assert "as fast" not in shown


def test_a_transport_that_carries_nothing_is_named(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--with=--pipeline-transport shm", "-o", "out", "--", *RECIPE.split()]
    assert compare(monkeypatch, *words) == 1
    assert (
        "torch.distributed ran instead of --pipeline-transport in 5 of 5 steps"
        in capsys.readouterr().out
    )


def test_a_calibration_that_falls_back_teaches_nothing(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.losses["--pipeline-slices"] = _slightly_other(1e-5)
    launches.rounded_losses = LOSSES[:-1]
    words = ["--calibrate", "--rounds", "1", "--with", SLICES, "-o", "out"]
    assert compare(monkeypatch, *words, "--", *RECIPE.split()) == 1
    shown = capsys.readouterr().out
    assert (
        "stated one applies: it trained 4 steps, but the reference trained 5" in shown
    )


def test_other_numbers_end_with_exit_code_3(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.losses["zb-h1"] = (*LOSSES[:-1], LOSSES[-1] + 1e-9)
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "-o", "out", "--", *recipe) == 3
    assert "2.3e-10 at 5" in capsys.readouterr().out


@pytest.mark.parametrize("code", [1, 2])
def test_a_killed_rank_is_said_and_the_other_runs_go_on(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    """With exit code 2 a rank has refused its flags, which only it could judge."""
    launches.failing, launches.failing_code = "gpipe", code
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    words = ["--with", "--pipeline-schedule gpipe", "-o", "out", "--", *recipe]
    assert compare(monkeypatch, *words) == code
    assert len(launches.words) == 6, "a contender that has failed does not run again"
    shown = capsys.readouterr().out
    assert "gpipe: round 1: localhost: rank 1 was killed by SIGKILL" in shown
    assert "\ngpipe failed; " in shown


OUT_OF_MEMORY = "localhost: rank 0: OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("failing_run", "code", "message", "rounds_kept"),
    [
        # The recipe does not fit, before or after its weights are saved.
        (1, 1, "Megatron's own: the run that saves weights: ", [0, 0, 0]),
        (2, 1, "Megatron's own: round 1: ", [0, 0, 0]),
        # A candidate does not fit, in the first or in the second round.
        (3, 1, "zb-h1: round 1: ", [2, 0, 2]),
        (6, 1, "zb-h1: round 2: ", [2, 1, 2]),
        # Its ranks refuse what only they can judge.
        (3, 2, "zb-h1: round 1: ", [2, 0, 2]),
    ],
)
def test_a_run_that_fails_is_named_in_one_line_and_the_others_are_kept(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing_run: int,
    code: int,
    message: str,
    rounds_kept: list[int],
) -> None:
    launches.failing_run, launches.failing_code = failing_run, code
    launches.failing_reason = OUT_OF_MEMORY
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "--with", "gpipe", "-o", "out", "--", *recipe) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(message)] == [
        f"{message}{OUT_OF_MEMORY}"
    ]
    if any(rounds_kept):
        answer = json.loads(Path("out/results.json").read_text())
        assert [len(row["rounds"]) for row in answer["runs"]] == rounds_kept
    assert not Path("out/weights").exists()


def test_a_run_with_fewer_steps_is_named(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.losses["zb-h1"] = LOSSES[:-1]
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "--with", "gpipe", "-o", "out", "--", *recipe) == 3
    shown = capsys.readouterr().out
    assert (
        shown.count("\nzb-h1: it trained 4 steps, but the reference trained 5\n") == 1
    )
    answer = json.loads(Path("out/results.json").read_text())
    assert [len(row["rounds"]) for row in answer["runs"]] == [2, 2, 2]


def test_a_script_that_is_not_deterministic_is_named(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.changing_run = 2  # the first round of the reference
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "-o", "out", "--", *recipe) == 0
    shown = capsys.readouterr().out
    assert (
        "\nMegatron's own: two runs with the same flags differ; see compare --self\n"
        in shown
    )
    assert "\nzb-h1: the recipe is not deterministic" in shown


@pytest.mark.parametrize(
    ("stops_after", "num_rounds"),
    [(4, [1, 1]), (5, [1, 2])],
    ids=["candidate", "reference"],
)
def test_ctrl_c_keeps_what_was_measured_and_removes_the_weights(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stops_after: int,
    num_rounds: list[int],
) -> None:
    """The second round, whose order is reversed, is stopped in either run."""
    launches.stops_after = stops_after
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "-o", "out", "--", *recipe) == 130
    assert len(launches.words) == stops_after
    assert not Path("out/weights").exists()
    answer = json.loads(Path("out/results.json").read_text())
    assert [len(row["rounds"]) for row in answer["runs"]] == num_rounds
    assert [row["judgement"] for row in answer["runs"]] == ["reference", "equal"]
    shown = capsys.readouterr()
    assert "the answer covers the runs that have finished" in shown.err
    assert "failed" not in shown.out


def test_ctrl_c_before_any_run_has_ended_names_no_failure(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.stops_after = 1  # while weights are saved
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "-o", "out", "--", *recipe) == 130
    assert "no run has finished" in capsys.readouterr().out


def test_speed_only_and_load_make_no_weights(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "--speed-only", "-o", "a", "--", *recipe) == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    loaded = [*recipe, "--load", str(tmp_path)]
    assert compare(monkeypatch, "-o", "b", "--", *loaded) == 0
    assert len(launches.words) == 8
    assert not any("--save" in words for words in launches.words)
    assert all("--finetune" not in words for words in launches.words)


def test_a_recipe_against_itself(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "--self", "-o", "out", "--", *recipe) == 0
    assert all("zb-h1" in words for words in launches.words)
    assert len(launches.words) == 3
    assert "the recipe is deterministic" in capsys.readouterr().out


def test_a_recipe_that_does_not_repeat_itself(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.changing_run = 3
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, "--self", "-o", "out", "--", *recipe) == 3
    verdict = "the recipe is not deterministic: two runs differ from iteration 5 on."
    assert verdict in capsys.readouterr().out


FORWARD_OF_LAYER_2 = Difference(
    iteration=3,
    microbatches=(1,),
    num_microbatches=4,
    kind="forward",
    layer=2,
    module="mlp",
    name="decoder.layers.2.mlp",
    reference=Origin("1F1", 1, ""),
    candidate=Origin("1F1", 1, ""),
    relative=0.5,
)


OLD_TORCH = "recording operators requires torch 2.10 or later, but torch is 2.9.1"


@pytest.mark.parametrize("unavailable", ["", OLD_TORCH])
def test_what_differs_is_located_by_short_runs(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unavailable: str,
) -> None:
    """Two record the digests of all tensors, two more the operators of the layer that differs."""
    launches.losses["zb-h1"] = (*LOSSES[:2], *(2 * loss for loss in LOSSES[2:]))
    folders: list[tuple[Path, Path, Path | None]] = []

    def compare_digests(
        reference: Path, candidate: Path, rounded: Path | None
    ) -> Comparison:
        folders.append((reference, candidate, rounded))
        return Comparison(FORWARD_OF_LAYER_2, 3, 99, "none, all bits must be equal", ())

    def first_operator(
        reference: Path, candidate: Path, tolerance: float
    ) -> OperatorComparison:
        operator_folders.append((reference, candidate))
        assert tolerance == 0
        return OperatorComparison(
            "first operator that differs in it: aten.mm", are_equal=False
        )

    operator_folders: list[tuple[Path, Path]] = []
    monkeypatch.setattr(rounds, "compare_digests", compare_digests)
    monkeypatch.setattr(rounds, "first_operator", first_operator)
    monkeypatch.setattr(rounds, "why_unavailable", lambda: unavailable)
    launches.departures[DIGESTS] = ["each W runs at its place"]
    recipe = [*RECIPE.split(), "--pipeline-schedule", "zb-h1"]
    words = ["--with", "gpipe", "--locate", "--rounds", "1", "-o", "out", "--", *recipe]
    assert compare(monkeypatch, *words) == 3
    own, candidate = launches.environments[4:6]
    assert own[LIMIT] == candidate[LIMIT] == "3", (
        "digests are recorded up to the difference"
    )
    assert folders == [(Path(own[DIGESTS]), Path(candidate[DIGESTS]), None)]
    shown = capsys.readouterr().out
    assert "zb-h1: in a run with digests: each W runs at its place" in shown
    assert (
        "zb-h1: first difference: iteration 3, micro-batch 1: the output of layer 2"
        in shown
    )
    if unavailable:
        assert len(launches.words) == 6, "gpipe is equal, so nothing of it is located"
        assert f"zb-h1: the operator could not be located: {OLD_TORCH}" in shown
        return
    assert len(launches.words) == 8
    own, candidate = launches.environments[6:]
    assert own[OPERATORS] == candidate[OPERATORS] == "3:1:forward:decoder.layers.2"
    assert operator_folders == [(Path(own[DIGESTS]), Path(candidate[DIGESTS]))]
    assert "zb-h1: first operator that differs in it: aten.mm" in shown
    assert not Path("out/weights").exists()


SLICES = "--pipeline-schedule 1f1b --pipeline-slices 2 --transformer-impl local"


def _slightly_other(by: float) -> Sequence[float]:
    return (*LOSSES[:-1], LOSSES[-1] * (1 + by))


@pytest.mark.parametrize(("by", "code"), [(3e-5, 0), (6e-5, 3)])
def test_a_rounded_run_of_the_reference_gives_the_tolerance(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: float,
    code: int,
) -> None:
    """Both differences are within what is stated for all models."""
    launches.losses["--pipeline-slices"] = _slightly_other(by)
    launches.rounded_losses = _slightly_other(1e-5)
    words = [
        "--calibrate",
        "--rounds",
        "1",
        "--with",
        SLICES,
        "-o",
        "out",
        "--",
        *RECIPE.split(),
    ]
    assert compare(monkeypatch, *words) == code
    assert launches.environments[-1][ROUNDING] == "1"
    assert "--pipeline-slices" not in launches.words[-1]
    shown = capsys.readouterr()
    allowance = "4e-05 of a loss and 1e-06 of a norm, learned by --calibrate"
    assert f"rounded differently: allows {allowance}" in shown.err
    assert allowance in shown.out


def test_a_rounded_run_that_fails_leaves_what_was_measured(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.losses["--pipeline-slices"] = _slightly_other(1e-5)
    launches.failing_environment = ROUNDING
    words = [
        "--calibrate",
        "--rounds",
        "1",
        "--with",
        SLICES,
        "-o",
        "out",
        "--",
        *RECIPE.split(),
    ]
    assert compare(monkeypatch, *words) == 1
    shown = capsys.readouterr().out
    assert (
        "no tolerance was learned, so the stated one applies: localhost: rank 1"
        in shown
    )
    assert "0.0001 of a loss and 0.001 of a norm, stated for all models" in shown


def test_no_tolerance_is_learned_if_rounding_changes_everything(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four times the difference would allow any loss."""
    launches.rounded_losses = _slightly_other(0.5)
    words = ["--calibrate", "--rounds", "1", "--with", SLICES, "-o", "out"]
    assert compare(monkeypatch, *words, "--", *RECIPE.split()) == 1
    shown = capsys.readouterr().out
    assert "no tolerance was learned, so the stated one applies: that run" in shown
    assert "differ by more than rounding explains" in shown


@pytest.mark.parametrize("locates", [True, False])
def test_digests_of_a_rounded_run_are_kept_for_locate(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, *, locates: bool
) -> None:
    words = ["--calibrate", "--rounds", "1", "--with", SLICES, "-o", "out"]
    words += ["--locate"] * locates
    assert compare(monkeypatch, *words, "--", *RECIPE.split()) == 0
    assert Path(launches.environments[-1][DIGESTS]).exists() == locates


def test_a_failed_candidate_needs_no_tolerance(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launches.failing = "--pipeline-slices"
    words = ["--calibrate", "--rounds", "1", "--with", SLICES, "-o", "out"]
    assert compare(monkeypatch, *words, "--", *RECIPE.split()) == 1
    assert not any(ROUNDING in environment for environment in launches.environments)
    assert "--calibrate has nothing to learn" in capsys.readouterr().err


def test_a_dry_run_tells_of_the_run_that_is_rounded_differently(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--dry-run", "--calibrate", "--with", SLICES, "--", *RECIPE.split()]
    assert compare(monkeypatch, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "saves weights to start from, then trains 4 runs of 20 steps, and the reference "
        "once more, rounded differently:"
    ) in lines
    [requirement] = [line for line in lines if line.startswith("1f1b")]
    assert "within what --calibrate learns, because Megatron's flags" in requirement


def test_a_batch_job_is_not_submitted_with_a_candidate_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        slurm, "run", lambda *_words, **_settings: pytest.fail("it was submitted")
    )
    words = ["--slurm=-N 1", "--with", "zb-z", "--", *RECIPE.split()]
    assert compare(monkeypatch, *words) == 2
    assert "zb-z" in capsys.readouterr().err


def test_bits_need_no_tolerance(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--calibrate",
        "--rounds",
        "1",
        "--with",
        "zb-h1",
        "-o",
        "out",
        "--",
        *RECIPE.split(),
    ]
    assert compare(monkeypatch, *words) == 0
    assert len(launches.words) == 3
    assert "--calibrate has nothing to learn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", *RECIPE.split()], "nothing to compare with Megatron's own schedule; add"),
        (["--with", "zb-h1", "--", "pretrain_gtp.py"], "pretrain_gtp.py"),
        (["--"], "nothing to compare; name a script after --"),
        (["--steps", "3", "--", *RECIPE.split()], "--steps"),
        (
            ["--with", "zb-w", "--", *RECIPE.split()],
            "zb-w: ",
        ),
        (
            ["--self", "--with=--use-dpp", "--", *RECIPE.split()],
            "remove --with, --reference and --calibrate",
        ),
        (["--trace-dir", "x", "--", *RECIPE.split()], "add --best 3"),
        (
            ["--locate", "--speed-only", "--with", "zb-h1", "--", *RECIPE.split()],
            "remove --speed-only",
        ),
        (
            ["--calibrate", "--speed-only", "--with", "zb-h1", "--", *RECIPE.split()],
            "remove one of them",
        ),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_one_line_before_anything_runs(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    try:
        code = compare(monkeypatch, *words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ext: error: ")
    assert message in line
    assert launches.words == []
    assert not Path("compare").exists()


def test_dropout_draws_the_same_masks_in_all_runs(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = RECIPE.replace("--hidden-dropout 0 --attention-dropout 0 ", "").split()
    words = ["-o", "out", "--", *recipe, "--pipeline-schedule", "zb-h1"]
    assert compare(monkeypatch, *words) == 0
    assert all("--microbatch-rng" in launched for launched in launches.words)
    assert "added: --microbatch-rng" in capsys.readouterr().err


def test_flags_of_the_environment_are_the_recipes_too(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_FLAGS", "--pipeline-schedule zb-h1")
    assert compare(monkeypatch, "-o", "out", "--", *RECIPE.split()) == 0
    assert sum("zb-h1" in words for words in launches.words) == 2


def test_flags_of_the_environment_are_not_the_references(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tolerance is that between Megatron's own schedule and the candidate."""
    monkeypatch.setenv("MEGATRON_EXT_FLAGS", "--pipeline-schedule zb-v")
    assert compare(monkeypatch, "--dry-run", "--", *RECIPE.split()) == 0
    assert "zb-v: losses within 0.0001 and gradient norms" in capsys.readouterr().out


def test_the_best_of_the_planner_are_compared(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--best",
        "2",
        "--rounds",
        "1",
        "--speed-only",
        "-o",
        "out",
        "--",
        *RECIPE.split(),
    ]
    assert compare(monkeypatch, *words) == 0
    own, first, second = launches.words
    assert "--pipeline-schedule" not in own
    schedules = {
        words[words.index("--pipeline-schedule") + 1] for words in (first, second)
    }
    assert len(schedules) == 2
    assert "1f1b" not in schedules, "which Megatron's own schedule is"


def test_options_of_launch_pass_through() -> None:
    words = [
        "--with=--use-dpp",
        "--with",
        "zb-v",
        "--hostfile",
        "h",
        "--json",
        "--env",
        "A=1",
        "--steps",
        "9",
    ]
    assert launch_words(words) == ["--hostfile", "h", "--env", "A=1"]


STANDING = """\
import os, signal, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(100)
"""


def test_a_signal_ends_the_run_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts the run gets it, not the whole foreground: each signal comes once."""
    started = tmp_path / "started"
    popen = subprocess.Popen

    def start(_command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", STANDING, str(started)], **options)

    monkeypatch.setattr(subprocess, "Popen", start)

    def progress() -> None:
        if started.exists() and started.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    begun_s = time.monotonic()
    with run.Stop().installed() as stop:
        ended = run.launch(
            ["--", "pretrain_gpt.py"],
            log_path=tmp_path / "log",
            environment={},
            stop=stop,
            progress=progress,
        )
    assert stop.number == signal.SIGTERM
    assert ended.code == -signal.SIGTERM
    assert time.monotonic() - begun_s < 60
