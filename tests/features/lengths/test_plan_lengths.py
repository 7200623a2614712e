"""`megatron-ext plan --lengths`: what balancing by cost gains with a user's lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_gains import Sizes, predict_lengths
from megatron_ext.features.lengths.plan_lengths import read_lengths
from megatron_ext.schedules import Costs, generate, registered, simulate
from megatron_ext.schedules.table.length_cost import LengthCost

SIZES = "plan --pp 2 --microbatches 4 --max-tokens 100"


def _lengths(count: int = 400) -> list[int]:
    drawn = random.Random(5)
    return [min(100, 1 + int(drawn.paretovariate(1.1) * 5)) for _ in range(count)]


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "lines",
    [
        ["3", "1", "", "2"],
        ['{"length": 3}', '{"length": 1}', '{"length": 2}'],
        ['{"tokens": [5, 6, 7]}', "[9]", '{"num_tokens": 2, "text": "a b"}'],
    ],
)
def test_lengths_are_read(tmp_path: Path, lines: list[str]) -> None:
    assert read_lengths(_written(tmp_path / "lengths", lines)) == [3, 1, 2]


@pytest.mark.parametrize(
    "line", ["x", "1.5", "0", "-3", "true", "null", '{"text": "a"}', "[]"]
)
def test_a_line_without_a_length_is_named(tmp_path: Path, line: str) -> None:
    path = _written(tmp_path / "lengths", ["7", line])
    with pytest.raises(
        ScheduleError, match=r"line 2: .* is not a length; write a whole number"
    ):
        read_lengths(path)


def test_every_schedule_of_one_pipeline_is_predicted() -> None:
    found, _ = predict_lengths(
        _lengths(), "all", Sizes(4, 8, 2, 100), LengthCost(1, 0.02), Costs()
    )
    names = {gains.schedule.split()[0] for gains in found}
    assert names == {
        name for name, generator in registered().items() if generator.twins == 1
    }
    for gains in found:
        assert gains.bound <= gains.pack
        assert gains.order <= gains.in_file_order + 1e-9
    steps = [gains.pack for gains in found]
    assert steps == sorted(steps)


def test_schedules_that_are_left_out_are_named() -> None:
    _, left_out = predict_lengths(
        [50] * 64, "all", Sizes(4, 8, 2, 100), LengthCost(1, 0.02), Costs()
    )
    mirrored = sorted(
        name for name, generator in registered().items() if generator.twins == 2
    )
    assert sorted(reason.split()[0] for reason in left_out) == mirrored != []


def test_replicas_that_share_out_long_microbatches_gain() -> None:
    # Replicas take turns, so one has all the long micro-batches.
    lengths = [100, 10] * 16
    costs = LengthCost(1, 0.02)
    [gains], _ = predict_lengths(lengths, "1f1b", Sizes(2, 8, 2, 100), costs, Costs())
    assert gains.pack < 0.8 * gains.order


def test_equal_samples_have_nothing_to_gain() -> None:
    sizes = Sizes(4, 8, 2, 100)
    [gains], _ = predict_lengths(
        [100] * 64, "1f1b", sizes, LengthCost(1, 0.02), Costs()
    )
    usual = simulate(generate("1f1b", 4, 8)).makespan
    steps = gains.in_file_order, gains.order, gains.pack
    assert steps == pytest.approx((usual,) * 3)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = _written(tmp_path / "lengths", list(map(str, _lengths())))
    words = [*SIZES.split(), "--lengths", str(path), "--replicas", "2"]
    assert cli.main([*words, "--hidden-size", "64"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["schedule", "file", "order"]
    assert "train with --pipeline-balance order or pack" in printed.out
    assert "left out: bitpipe mirrors two pipelines" in printed.err
    assert "left out: dualpipe mirrors two pipelines" in printed.err
    assert (
        cli.main([*words, "--length-costs", "1,0.1", "--schedule", "1f1b", "--json"])
        == 0
    )
    [entry] = json.loads(capsys.readouterr().out)
    steps = ["in_file_order", "order", "pack", "bound"]
    assert list(entry) == ["schedule", *steps]
    assert entry["bound"] < entry["pack"] < entry["in_file_order"]


def test_automatic_slices_divide_the_longest_micro_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Packs of 100 tokens, of samples so short that their slices would be too many for a pack.
    path = _written(tmp_path / "lengths", ["1"] * 800)
    words = [*SIZES.split(), "--lengths", str(path), "--length-costs", "1,0.1"]
    assert cli.main([*words, "--schedule", "1f1b", "--slice-tokens", "auto"]) == 0
    assert "train with --pipeline-slice-tokens 25 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths {}", "needs either --length-costs A,B or --hidden-size H"),
        ("--lengths {} --hidden-size 8 --length-costs 1,1", "needs either"),
        ("--lengths {} --length-costs 1", "two numbers A,B"),
        (
            "--lengths {} --hidden-size 0",
            "a model of width 0 has no cost; use 1 or more",
        ),
        ("--lengths {} --hidden-size 8 --replicas 0", "--replicas 0 must be 1 or more"),
        (
            "--lengths {} --hidden-size 8 --replicas 99",
            "provide more lengths, or lower",
        ),
        (
            "--lengths {} --hidden-size 8 --chunks 2",
            "--chunks cannot be combined with --lengths",
        ),
        (
            "--lengths {} --hidden-size 8 --pairs",
            "--pairs cannot be combined with --lengths",
        ),
        (
            "--lengths {} --hidden-size 8 --slices 2",
            "--slices cannot be combined with --lengths",
        ),
        (
            "--lengths {} --hidden-size 8 --schedule bitpipe",
            "bitpipe mirrors two pipelines",
        ),
        (
            "--lengths {} --hidden-size 8 --schedule csv:x",
            "registered schedules, not csv:x",
        ),
        (
            "--lengths {} --hidden-size 8 --microbatches 0",
            "--microbatches 0 must be 1 or more",
        ),
        (
            "--lengths {} --hidden-size 8 --schedule 1f1b --slice-tokens 1",
            "can have only 64; use --slice-tokens 2 or more",
        ),
        ("--lengths {}.no --hidden-size 8", "cannot be read: No such file"),
        (
            "--hidden-size 8",
            "--max-tokens needs --lengths FILE; remove --max-tokens, or add",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, said: str
) -> None:
    path = _written(tmp_path / "lengths", list(map(str, _lengths())))
    assert cli.main([*SIZES.split(), *words.format(path).split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_sample_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match="a sample has 101 tokens, but a micro-batch has at most"
    ):
        predict_lengths(
            [101] * 8, "1f1b", Sizes(2, 4, 1, 100), LengthCost(1, 0), Costs()
        )
