"""Silent faults of published reports that concern a pipeline, planted and located."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.compare.locate import locate
from tests.ranks import run_ranks
from tests.tracing.recorded import Training, train


def loaded_by_local_names(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Fill each stage's layers with the weights of the model's first ones (Megatron-LM#7452, 12).

    A sharded checkpoint that numbers layers within their stage, loaded with more stages, does that.
    """
    import torch

    from tests.runtime.capture import named_weights

    with torch.no_grad():
        for name, weight in named_weights(chunks):
            local = re.sub(
                r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) % 2}", name
            )
            if local != name and weight.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(local.encode()))
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return nullcontext()


def gradients_cleared_between_micro_batches(
    chunks: list[Any],
) -> AbstractContextManager[Any]:
    """Drop the gradients so far when the last micro-batch begins (Automodel#3530).

    There, stages were initialized again within the step, which resets gradients.
    """
    for chunk in chunks:
        forwards = 0

        def clear(module: Any, _args: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards % 4 == 0:
                module.zero_grad_buffer()

        chunk.register_forward_pre_hook(clear)
    return nullcontext()


def _train_each(
    own: Training,
    faulty: dict[str, Training],
    faults: dict[str, Callable[[list[Any]], Any]],
) -> None:
    train(own)
    for name, training in faulty.items():
        train(training, faults[name])


@pytest.mark.short_s(8)
def test_published_faults_are_located(tmp_path: Path) -> None:
    faults = {
        "names": loaded_by_local_names,
        "cleared": gradients_cleared_between_micro_batches,
    }
    own = Training(str(tmp_path / "own"), num_steps=1)
    faulty = {
        name: Training(str(tmp_path / name), "1f1b", num_steps=1) for name in faults
    }
    run_ranks(2, _train_each, own, faulty, faults, timeout_s=280)
    names = locate(tmp_path / "own", tmp_path / "names")
    assert names is not None
    assert (names.iteration, names.kind, names.layer) == (0, "weights", 2)
    cleared = locate(tmp_path / "own", tmp_path / "cleared")
    assert cleared is not None
    assert (cleared.iteration, cleared.kind) == (1, "weight gradient")
    assert cleared.candidate is not None
    # The first stage begins its last micro-batch before the backward of the one before.
    assert (cleared.candidate.action, cleared.layer) == ("0B2", 1)
