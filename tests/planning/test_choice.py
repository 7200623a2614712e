"""`--pipeline-schedule auto`: against every fixed choice by simulation, and at every entrance."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from megatron_ext import devices
from megatron_ext.config import automatic
from megatron_ext.config.cut import UserCut
from megatron_ext.config.hosting import preflight
from megatron_ext.config.pipeline_config import (
    Disaggregation,
    DynamicOrder,
    PipelineConfig,
)
from megatron_ext.errors import ConfigurationError
from megatron_ext.planning import choice
from megatron_ext.planning.choice import ByForecast, Candidate
from megatron_ext.planning.hardware import DEVICES, DeviceKind
from megatron_ext.planning.layout_forecast import costs_of, forecast
from megatron_ext.planning.measured import COSTS_FILE, MeasuredCosts
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import activation_peaks
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks, start_ranks, train_here
from tests.runtime.capture import GPT, train
from tests.runtime.test_equality import UNCLIPPED, assert_equal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = (
    "pretrain_gpt.py --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --swiglu "
    "--max-position-embeddings 2048 --padded-vocab-size {vocabulary} --micro-batch-size 1 "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --lr 1e-4 "
    "--eval-interval 1000 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --pipeline-model-parallel-size {ranks} --global-batch-size {microbatches} "
    "--num-layers {layers} {more}"
)
WORST_REGRET = 0.03
"""How much longer a step may be than under the best schedule that one could have named."""


class Setting(NamedTuple):
    """A training, and what its devices are."""

    ranks: int
    microbatches: int
    layers: int
    vocabulary: int
    more: str
    slow_links: bool
    is_tight: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(MODEL.format(**self._asdict()))

    @property
    def device(self) -> DeviceKind:
        h100 = DEVICES["h100"]
        rate = 0.02 if self.slow_links else 1.0
        return dataclasses.replace(
            h100,
            memory_gib=1e6,
            link_bytes=rate * h100.link_bytes,
            network_bytes=rate * h100.network_bytes,
        )


def all_settings() -> Iterator[Setting]:
    """Yield 60 trainings: costs even and uneven, links slow and fast, memory tight and wide."""
    uneven = (
        "",
        "--mtp-num-layers 1 --position-embedding-type rope",
        "--pipeline-layout auto",
    )
    for index, ranks in enumerate((2, 3, 4, 6, 8, 12, 16) * 9):
        if index == 60:
            return
        yield Setting(
            ranks=ranks,
            microbatches=(ranks, 2 * ranks, 4 * ranks + 2, 2 * ranks + 2)[
                index // 7 % 4
            ],
            layers=(4 * ranks, 8 * ranks, 5 * ranks + 1)[index // 2 % 3],
            vocabulary=(1024, 128_000, 256_000)[index % 3],
            more=uneven[index // 5 % 3],
            slow_links=index % 2 == 1,
            is_tight=index // 3 % 2 == 1,
        )


SETTINGS = list(all_settings())


class Measured(NamedTuple):
    """Step and memory of a schedule with its whole table simulated, however it was found."""

    step_s: float
    memory_gib: float


def simulated(setting: Setting, flags: str, judge: ByForecast) -> Measured | None:
    """What a fixed choice takes: the table that its flags run, simulated from end to end."""
    answer = preflight([*setting.words, *flags.split()], world_size=setting.ranks)
    if not answer.accepted:
        return None
    assert answer.pipeline is not None
    assert answer.config is not None
    table, twins = answer.pipeline.full, answer.config.twins
    hosted = vars(answer.checked_args) | answer.arguments
    counts = UserCut.of(hosted).layers_by_stage(table.placement)
    assert counts is not None
    costs = costs_of(judge.job, judge.sizes, counts, twins)
    chunks = table.num_stages * twins // setting.ranks
    plan = forecast(
        judge.job,
        judge.sizes,
        table.name,
        chunks,
        counts,
        costs=answer.config.costs or choice.UNIT,
    )
    assert plan is not None
    around_s = plan.step_s - plan.pipeline_s
    return Measured(simulate(table, costs).makespan + around_s, max(plan.memory_gib))


def fixed_choices(setting: Setting) -> Iterator[str]:
    """Yield the flags of every schedule that a user could have named."""
    for name, generator in registered().items():
        if not generator.free_chunks:
            yield f"--pipeline-schedule {name}"
            continue
        for chunks in range(2, 9):
            if chunks * setting.ranks <= setting.layers + 2:
                yield (
                    f"--pipeline-schedule {name} --num-virtual-stages-per-pipeline-rank {chunks}"
                )


def check(setting: Setting) -> float:
    """Compare the choice with every fixed one; return by how much the best of these is faster."""
    asked = preflight(setting.words, world_size=setting.ranks)
    roomy = setting.device
    config = PipelineConfig(schedule="auto")
    _, judge = automatic.question_of(asked.checked_args, config, roomy)
    assert isinstance(judge, ByForecast), judge
    fixed = {
        flags: simulated(setting, flags, judge) for flags in fixed_choices(setting)
    }
    possible = {
        flags: figures for flags, figures in fixed.items() if figures is not None
    }
    limit_gib = 1e6
    if setting.is_tight:  # half of the schedules do not fit
        needs_gib = sorted(figures.memory_gib for figures in possible.values())
        limit_gib = needs_gib[len(needs_gib) // 2]
    device = dataclasses.replace(roomy, memory_gib=limit_gib + roomy.reserve_gib)
    answer = preflight(
        [*setting.words, "--pipeline-schedule", "auto"],
        world_size=setting.ranks,
        device_kind=device,
    )
    assert answer.accepted, answer.refusals
    chosen = simulated(setting, answer.candidates[0].flags, judge)
    assert chosen is not None
    assert chosen.memory_gib <= limit_gib * (1 + 1e-9), answer.changes
    fastest_s = min(
        figures.step_s
        for figures in possible.values()
        if figures.memory_gib <= limit_gib
    )
    return chosen.step_s / fastest_s - 1


@pytest.mark.parametrize("setting", SETTINGS[::6], ids=str)
def test_no_named_schedule_is_much_faster(setting: Setting) -> None:
    assert check(setting) <= WORST_REGRET


@pytest.mark.slow
def test_no_named_schedule_is_much_faster_in_any_setting() -> None:
    regrets = {str(setting): check(setting) for setting in SETTINGS}
    worst = max(regrets, key=regrets.__getitem__)
    assert regrets[worst] <= WORST_REGRET, worst


# -- what it says, and where ---------------------------------------------------------------------

PLAIN = Setting(4, 16, 16, 32_000, "", slow_links=False, is_tight=False)
AUTO = ("--pipeline-schedule", "auto")


def line_of(
    words: list[str], device: DeviceKind | None = None, world_size: int = 4
) -> str:
    answer = preflight(words, world_size=world_size, device_kind=device)
    assert answer.accepted, answer.refusals
    return answer.changes[0]


def candidates_of(setting: Setting, more: str = "", number: int = 2) -> list[Candidate]:
    words = [*setting.words, *AUTO, *more.split()]
    answer = preflight(
        words,
        world_size=setting.ranks,
        device_kind=setting.device,
        num_candidates=number,
    )
    assert answer.accepted, answer.refusals
    return list(answer.candidates)


def test_the_line_has_the_choice_the_runner_up_and_the_reason() -> None:
    line = line_of([*PLAIN.words, *AUTO], DEVICES["h100"])
    best, second = candidates_of(PLAIN)
    assert line.startswith(f"--pipeline-schedule auto chooses {best.flags}: ")
    assert f"; next is {second.flags}: " in line
    assert line.endswith("; compared by forecast for 4 x h100 with 74.1 GiB")


def test_the_flags_of_a_candidate_run_the_same_table() -> None:
    for candidate in candidates_of(PLAIN, number=20):
        answer = preflight([*PLAIN.words, *candidate.flags.split()], world_size=4)
        assert answer.pipeline is not None
        assert answer.pipeline.name == candidate.schedule


def test_the_ranking_is_sorted_and_as_long_as_asked() -> None:
    ranked = candidates_of(PLAIN, number=20)
    assert len(candidates_of(PLAIN, number=5)) == 5
    assert len(ranked) > 8
    steps = [candidate.step for candidate in ranked if candidate.fits]
    for step, later in pairwise(steps):
        assert step <= later * 1.005


def test_other_processes_choose_the_same() -> None:
    program = (
        "from tests.planning.test_choice import AUTO, PLAIN, line_of; "
        "print(line_of([*PLAIN.words, *AUTO]))"
    )
    lines = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        lines.add(done.stdout)
    assert lines == {line_of([*PLAIN.words, *AUTO]) + "\n"}


def test_on_an_unknown_device_no_rank_keeps_more_than_1f1b() -> None:
    answer = preflight([*PLAIN.words, *AUTO], world_size=4)
    assert answer.pipeline is not None
    assert max(activation_peaks(answer.pipeline.full)) <= 4
    assert answer.pipeline.full.weight_copies == 1
    assert "the device is unknown" in answer.changes[0]
    assert all("twice" not in candidate.words for candidate in answer.candidates)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", None),
        ("--pipeline-slices 4", "by tables alone (with --pipeline-slices, the planner would count"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         "by tables alone (with --recompute-method block, or --recompute-num-layers above 1"),
    ],
)  # fmt: skip
def test_without_a_forecast_tables_decide(more: str, reason: str | None) -> None:
    words = [*PLAIN.words, *AUTO, *more.split()]
    answer = preflight(words, world_size=4, device_kind=DEVICES["h100"])
    if reason is None:  # no schedule of ours runs with it
        assert "--use-torch-fsdp2" in str(answer.refusals[0])
        return
    assert answer.accepted, answer.refusals
    assert reason in answer.changes[0]
    assert answer.pipeline is not None
    peak = max(
        activation_peaks(answer.pipeline.full, answer.pipeline.config.stash_ratio)
    )
    assert peak <= 4


def test_a_missing_vocabulary_is_said() -> None:
    words = " ".join(PLAIN.words).replace("--padded-vocab-size 32000", "")
    words = words.replace("--vocab-size 1000", "")
    line = line_of([*words.split(), *AUTO], DEVICES["h100"])
    assert line.endswith(
        "by tables alone (--padded-vocab-size is missing), with at most 1f1b's activations"
    )


def test_the_users_stages_stay() -> None:
    flags = "--num-virtual-stages-per-pipeline-rank 2"
    chunks = {candidate.chunks for candidate in candidates_of(PLAIN, flags, 20)}
    assert chunks == {None, 2}


def test_an_odd_batch_has_no_mirrored_pipelines() -> None:
    odd = Setting(4, 15, 16, 32_000, "", slow_links=False, is_tight=False)
    assert all(
        candidate.weight_copies == 1 for candidate in candidates_of(odd, number=20)
    )


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("--use-dpp", "compares the orders of tables, which --use-dpp changes"),
        (
            "--bitpipe-order paper",
            "--bitpipe-order is an option of bitpipe, but auto was chosen",
        ),
        ("--enable-bitpipe-schedule", "choose different schedules"),
        ("--forward-backward-disaggregating", "cannot run with --pipeline-schedule"),
        ("--pipeline-model-parallel-size 1", "needs a pipeline"),
    ],
)
def test_what_contradicts_it_is_refused(more: str, error: str) -> None:
    answer = preflight([*PLAIN.words, *AUTO, *more.split()], world_size=4)
    assert error in str(answer.refusals[0])
    assert answer.refusals[0].remedy


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"chunks": 2}, "chooses chunks and options"),
        ({"options": {"order": "zb"}}, "chooses chunks and options"),
        ({"dynamic": DynamicOrder()}, "compares the orders of tables"),
        ({"disaggregation": Disaggregation()}, "it has its own schedule"),
        ({"schedule": "auto:"}, "names no folder"),
    ],
)
def test_a_configuration_refuses_what_flags_do(
    settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        PipelineConfig(**{"schedule": "auto", **settings})


def test_the_driver_names_the_device_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_EXT_DEVICE", raising=False)
    gpu = tmp_path / "0000:0f:00.0"
    gpu.mkdir()
    (gpu / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n"
    )
    assert devices.name_by_driver(tmp_path) == "NVIDIA H100 80GB HBM3"
    assert devices.name_by_driver(tmp_path / "none") is None
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "cpu")
    assert devices.name_by_driver(tmp_path) is None


# -- in Megatron's own parser, and in a training -------------------------------------------------

TRAINED = f"{GPT}{UNCLIPPED}--num-layers 6 --pipeline-model-parallel-size 2 "


def test_a_rank_chooses_as_preflight_does() -> None:
    require_training()
    flags = f"{TRAINED}--pipeline-schedule auto"
    [[result]] = run_ranks(1, outcomes, [("gpt", flags, 2)])
    assert isinstance(result, dict), result
    answer = preflight(flags, world_size=2, device="cpu")
    assert answer.pipeline is not None
    assert result["log"][0] == answer.changes[0]
    assert result["rows"] == answer.pipeline.full.rows


def test_it_trains_as_the_schedule_by_name() -> None:
    [best, *_] = preflight(
        f"{TRAINED}--pipeline-schedule auto", world_size=2, device="cpu"
    ).candidates
    by_name = train(2, f"{TRAINED}{best.flags} ")
    automatic_run = train(2, f"{TRAINED}--pipeline-schedule auto ")
    assert automatic_run.tables == by_name.tables
    assert_equal(automatic_run, by_name)


def _on_another_device(argv: list[str]) -> None:
    """Train as a rank whose device has nearly no memory, except for rank 0's."""
    h100 = DEVICES["h100"]
    memory_gib = 80.0 if os.environ["RANK"] == "0" else h100.reserve_gib
    automatic.device_here = lambda: dataclasses.replace(h100, memory_gib=memory_gib)
    train_here("gpt", argv)  # this process is a rank and ends


@pytest.mark.short_s(10)
def test_ranks_that_choose_differently_say_what_and_why() -> None:
    """Before they build groups, which would differ too."""
    require_training()
    run = start_ranks(
        2, _on_another_device, f"{TRAINED}--pipeline-schedule auto".split()
    )
    assert all(run.exit_codes), run.describe()
    for log in run.logs:
        [line] = [line for line in log.splitlines() if "auto has chosen" in line]
        assert "auto has chosen different flags: --pipeline-schedule " in line
        assert " on rank 0, by forecast for 2 x h100 with " in line
        assert (
            " on rank 1, by forecast for 2 x h100 with 0.0 GiB; instead of auto, set one of"
            in line
        )


# -- by the costs of a traced run ----------------------------------------------------------------


def measured(**sizes: int) -> MeasuredCosts:
    # The last of four stages takes twice as long as the others.
    even, last = (0.010, 0.012, 0.008), (0.020, 0.024, 0.016)
    return MeasuredCosts(stages=(even, even, even, last), latency_s=0.002, sizes=sizes)


def test_a_traced_run_gives_the_costs(tmp_path: Path) -> None:
    (tmp_path / COSTS_FILE).write_text(measured(num_layers=16).as_json())
    line = line_of(
        [*PLAIN.words, "--pipeline-schedule", f"auto:{tmp_path}"], DEVICES["h100"]
    )
    assert " s per step, " in line
    assert line.endswith(
        f"by the times of the run in {tmp_path}, with at most 1f1b's activations"
    )


def test_a_run_of_other_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / COSTS_FILE).write_text(measured(micro_batch_size=2).as_json())
    answer = preflight(
        [*PLAIN.words, "--pipeline-schedule", f"auto:{tmp_path}"], world_size=4
    )
    assert "--micro-batch-size 2, not 1; trace a run with --micro-batch-size 1" in str(
        answer.refusals[0]
    )


@pytest.mark.parametrize(
    "content", [None, "{}", "[", '{"stages": [[1, -1, 1]]}', "[1]"]
)
def test_a_folder_without_costs_says_what_writes_them(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / COSTS_FILE).write_text(content)
    answer = preflight(
        [*PLAIN.words, "--pipeline-schedule", f"auto:{tmp_path}"], world_size=4
    )
    [refusal] = answer.refusals
    assert refusal.reason.startswith(f"{tmp_path / COSTS_FILE} ")
    assert refusal.remedy == f"megatron-ext aggregate --trace-dir {tmp_path} writes it"
