"""The unmodified pretrain_gpt.py gives one process's losses under every dense parallelism."""

from __future__ import annotations

import re

import pytest

from tests.training.helpers import errors
from tests.upstream_script.runs import GPT, UNTIED, run, save_start, train

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

_PP2 = "--pipeline-model-parallel-size 2 "
_TP2 = "--tensor-model-parallel-size 2 "
_RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)
_FP16 = "--fp16 --initial-loss-scale 1024 "


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("dense") / "start", GPT)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("untied") / "start", GPT + UNTIED)


@pytest.fixture(scope="module")
def one_process(start: str) -> list[float]:
    found = train(1, start)
    assert len(found) == 5
    assert found[-1] < found[0]
    return found


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(_PP2, id="pp2"),
        pytest.param(
            _PP2 + "--num-layers-per-virtual-pipeline-stage 1", id="pp2-vpp2-overlap"
        ),
        pytest.param(_PP2 + _RECOMPUTE, id="pp2-recompute"),
        pytest.param(_TP2, id="tp2"),
        pytest.param(_TP2 + "--sequence-parallel", id="tp2-sp"),
        pytest.param("", id="dp2"),
        pytest.param(
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            id="dp2-distributed-optimizer-overlaps",
        ),
        pytest.param("--distributed-backend nccl", id="dp2-script-written-for-gpus"),
    ],
)
def test_two_ranks_equal_one(start: str, one_process: list[float], flags: str) -> None:
    assert train(2, start + flags) == pytest.approx(one_process, rel=1e-5)


def test_vpp2_without_overlap_is_refused_at_pp2(start: str) -> None:
    flags = "--num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication"
    found = errors(run(2, start + _PP2 + flags))
    assert "pipeline-model-parallel size should be greater than 2" in found[0]


def test_pp4_vpp2_equals_one_with_and_without_overlap(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    eight = save_start(
        tmp_path_factory.mktemp("eight") / "start", GPT + "--num-layers 8 "
    )
    one = train(1, eight)
    flags = (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
    )
    for overlap in ("", "--no-overlap-p2p-communication"):
        assert train(4, eight + flags + overlap) == pytest.approx(one, rel=1e-5)


def test_untied_pp2_equals_one(untied: str) -> None:
    assert train(2, untied + _PP2) == pytest.approx(train(1, untied), rel=1e-5)


def test_bf16_untied_pp2_equals_one(untied: str) -> None:
    assert train(2, untied + "--bf16 " + _PP2) == pytest.approx(
        train(1, untied + "--bf16"), rel=1e-5
    )


def test_bf16_tied_pp2_is_near_one(start: str) -> None:
    # One process sums the two gradients of the tied weight in bf16 (autograd), two stages in fp32
    # (all-reduce of the main gradients): 2e-5 was measured.
    assert train(2, start + "--bf16 " + _PP2) == pytest.approx(
        train(1, start + "--bf16"), rel=1e-4
    )


def test_fp16_pp2_equals_one(start: str) -> None:
    assert train(2, start + _FP16 + _PP2) == pytest.approx(
        train(1, start + _FP16), rel=1e-5
    )


def test_evaluation_timers_and_memory_are_logged(start: str) -> None:
    ended = run(
        2, start + _PP2 + "--eval-iters 1 --eval-interval 3 --timing-log-level 1"
    )
    assert ended.exit_codes == [0, 0], ended.describe()
    text = "\n".join(ended.logs)
    assert re.search(r"validation loss at iteration 3 \| lm loss value: 4\.", text)
    spent_ms = [
        float(x) for x in re.findall(r"forward-backward \.+: \(([\d.]+),", text)
    ]
    assert spent_ms
    assert all(0 < x < 1e5 for x in spent_ms)
    allocated, peak = map(
        float, re.findall(r"allocated: ([\d.]+) \| max allocated: ([\d.]+)", text)[0]
    )
    assert 50 < allocated <= peak  # MB: a process with torch holds at least that
