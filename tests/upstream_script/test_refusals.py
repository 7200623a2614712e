"""Flags that the CPU cannot run are refused before anything starts, each with the reason."""

from __future__ import annotations

import pytest

from tests.training.helpers import errors
from tests.upstream_script.runs import GPT, MIXTRAL, run

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--transformer-impl transformer_engine",
            "Transformer Engine has no CPU kernels",
        ),
        ("--cuda-graph-impl local", "CUDA graphs record GPU work"),
        ("--profile", "add --use-pytorch-profiler"),
        ("--use-torch-fsdp2", "use --use-distributed-optimizer"),
        (MIXTRAL + "--moe-grouped-gemm", "experts then run one by one"),
    ],
)
def test_refused_with_the_reason(flags: str, reason: str) -> None:
    ended = run(1, GPT + flags)
    assert ended.exit_codes == [2]
    assert "megatron_ext: error: " in ended.logs[0]
    assert reason in ended.logs[0]
    assert "Traceback" not in ended.logs[0]


def test_context_parallelism_is_refused() -> None:
    found = errors(run(2, GPT + "--context-parallel-size 2"))
    assert "--sequence-parallel to split long sequences" in found[0]
