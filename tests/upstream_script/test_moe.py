"""Mixture of experts and the DeepSeek-V3 shape under expert and pipeline parallelism."""

from __future__ import annotations

import pytest

from tests.upstream_script.runs import DEEPSEEK, GPT, MIXTRAL, save_start, train

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("mixtral") / "start", GPT + MIXTRAL)


@pytest.fixture(scope="module")
def one_mixtral(mixtral: str) -> list[float]:
    return train(1, mixtral)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_ep2_equals_one(
    mixtral: str, one_mixtral: list[float], dispatcher: str
) -> None:
    flags = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
    assert train(2, mixtral + flags) == pytest.approx(one_mixtral, rel=1e-5)


def test_tp2_sp_equals_one(mixtral: str, one_mixtral: list[float]) -> None:
    flags = (
        "--tensor-model-parallel-size 2 --sequence-parallel "
        "--moe-token-dispatcher-type alltoall"
    )
    assert train(2, mixtral + flags) == pytest.approx(one_mixtral, rel=1e-5)


def test_deepseek_pp2_ep2_equals_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    start = save_start(tmp_path_factory.mktemp("deepseek") / "start", GPT + DEEPSEEK)
    flags = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
    assert train(4, start + flags) == pytest.approx(train(1, start), rel=1e-5)
