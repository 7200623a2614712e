"""Digests of trainings: the same names and the same bits under any cut, order and wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.tools.compare.locate import locate
from tests.ranks import run_ranks
from tests.tracing.recorded import Training, train


def _train_each(*trainings: Training) -> None:
    for training in trainings:
        train(training)


@pytest.mark.short_s(8)
def test_schedules_with_the_same_bits_have_the_same_digests(tmp_path: Path) -> None:
    own = Training(str(tmp_path / "own"))
    others = {name: Training(str(tmp_path / name), name) for name in ("zb-h1", "zb-v")}
    run_ranks(2, _train_each, own, *others.values())
    for name in others:
        assert locate(tmp_path / "own", tmp_path / name) is None
