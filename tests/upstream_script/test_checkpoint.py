"""Training that is saved and goes on under another parallelism, as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream_script.runs import GPT, train

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

_PP2 = "--pipeline-model-parallel-size 2 "
_TP2 = "--tensor-model-parallel-size 2 "
_DO = "--use-distributed-optimizer "


def _save(directory: Path, flags: str) -> None:
    found = train(
        2, f"{GPT}{flags} --save {directory} --save-interval 3 --exit-interval 3"
    )
    assert len(found) == 3


@pytest.mark.parametrize("precision", ["", "--bf16 "])
def test_resume_at_another_placement(tmp_path: Path, precision: str) -> None:
    saved = precision + _PP2
    _save(tmp_path / "ck", saved)
    uninterrupted = train(2, GPT + saved)
    # Tied weights in bf16 at another placement: see test_dense.
    tolerance = 1e-4 if precision else 1e-5
    for num_ranks, flags in ((1, ""), (2, _TP2 + "--sequence-parallel")):
        resumed = train(num_ranks, f"{GPT}{precision}{flags} --load {tmp_path / 'ck'}")
        assert resumed == pytest.approx(uninterrupted[3:], rel=tolerance)


def test_distributed_optimizer_resumes_at_another_placement(tmp_path: Path) -> None:
    reshardable = _DO + "--dist-ckpt-optim-fully-reshardable "
    _save(tmp_path / "ck", reshardable)
    uninterrupted = train(2, GPT + reshardable)
    for flags in (_PP2, _TP2):
        resumed = train(2, f"{GPT}{reshardable}{flags} --load {tmp_path / 'ck'}")
        assert resumed == pytest.approx(uninterrupted[3:], rel=1e-5)


def test_distributed_optimizer_resumes_from_the_default_format(tmp_path: Path) -> None:
    _save(tmp_path / "ck", _DO)
    resumed = train(2, f"{GPT}{_DO} --load {tmp_path / 'ck'}")
    assert resumed == pytest.approx(train(2, GPT + _DO)[3:], rel=1e-5)
