"""Hyper-connections of megatron-core 0.20 train under any pipeline, bit for bit as in one stage.

Upstream refuses them with several stages. `docs/boundaries.md` has the table of what is compared.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from tests.ranks import run_ranks
from tests.scalars import written_scalars
from tests.training.helpers import report
from tests.upstream_script.runs import GPT, run, save_start
from tests.versions.matrix import STREAMS

pytestmark = [
    pytest.mark.skipif(
        (releases.installed_release() or (0, 0)) < (0, 20),
        reason="0.20 has hyper-connections",
    ),
    pytest.mark.slow,
]

PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
RECOMPUTED = "--recompute-granularity selective --recompute-modules mhc "
UNTIED = "--untie-embeddings-and-output-weights "
SAME = (
    "--num-layers 8 --global-batch-size 16 --clip-grad 0 --train-iters 3 --lr-warmup-iters 0 "
    "--eval-iters 1 --eval-interval 2 "
)
UNIFORM = {"recompute_method": "uniform", "recompute_num_layers": 1}
TABLES = {
    **{
        name: PP2 + f"--pipeline-schedule {name} "
        for name in (
            "1f1b",
            "gpipe",
            "interleaved",
            "zb-h1",
            "zb-v",
            "v-half",
            "dualpipe-v",
        )
    },
    "dualpipe": PP4 + "--pipeline-schedule dualpipe ",
    "bitpipe": PP4 + "--enable-bitpipe-schedule ",
    "--use-dpp": PP2 + "--pipeline-schedule interleaved --use-dpp ",
    "Megatron's 1F1B over shm": PP2 + "--pipeline-transport shm ",
    "Megatron's interleaved over shm": PP2
    + "--num-layers-per-virtual-pipeline-stage 2 --pipeline-transport shm ",
    "disaggregation": PP2 + "--forward-backward-disaggregating ",
}


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> OneStage:
    return OneStage(tmp_path_factory.mktemp("streams"))


Losses = tuple[list[tuple[int, float]], list[tuple[int, float]], list[str]]


class OneStage:
    """Log of one stage on each of two replicas, from the checkpoint that others start from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start = cache(self._save)
        self.losses = cache(self._train)

    def losses_of(self, num_ranks: int, flags: str) -> Losses:
        """Train; return the loss of each step and evaluation with all its bits, and as printed."""
        board = Path(tempfile.mkdtemp(dir=self._folder))
        ended = run(num_ranks, f"{flags}--tensorboard-dir {board} ")
        printed = report(ended)
        found = written_scalars(board)
        # Megatron flushes the board before the last evaluation: what that writes may be lost.
        return found["lm loss"], found["lm loss validation"][:2], printed

    def _save(self, model: str) -> str:
        path = Path(tempfile.mkdtemp(dir=self._folder))
        return save_start(path, f"{GPT}{SAME}{STREAMS}{model}")

    def _train(self, model: str, beside: str) -> Losses:
        return self.losses_of(4 if beside else 2, self.start(model) + beside)


@pytest.mark.parametrize("table", TABLES)
def test_every_table(one_stage: OneStage, table: str) -> None:
    ranks = 8 if table == "disaggregation" else 4
    found = one_stage.losses_of(ranks, one_stage.start("") + TABLES[table])
    assert found == one_stage.losses("", "")


@pytest.mark.parametrize(
    "model", [UNTIED, RECOMPUTED, UNTIED + "--bf16 --mhc-num-residual-streams 2 "]
)
@pytest.mark.parametrize("table", ["zb-v", "--use-dpp", "zb-h1"])
def test_other_models(one_stage: OneStage, table: str, model: str) -> None:
    if (
        model == RECOMPUTED
    ):  # the same weights, so also the same as without recomputation
        found = one_stage.losses_of(4, one_stage.start("") + TABLES[table] + RECOMPUTED)
        assert found == one_stage.losses("", "")
        return
    found = one_stage.losses_of(4, one_stage.start(model) + TABLES[table])
    assert found == one_stage.losses(model, "")


@pytest.mark.parametrize("table", [name for name in TABLES if name != "disaggregation"])
def test_tensor_and_sequence_parallelism(one_stage: OneStage, table: str) -> None:
    """With recomputation too; one stage does without it."""
    flags = one_stage.start("") + TP2 + TABLES[table] + RECOMPUTED
    assert one_stage.losses_of(8, flags) == one_stage.losses("", TP2)


def test_megatrons_own_messages_still_refuse_them() -> None:
    ended = run(2, GPT + STREAMS + PP2)
    assert any(ended.exit_codes)
    assert "does not support pipeline_model_parallel_size > 1" in "".join(ended.logs)


def _refusal(wrong: dict[str, object]) -> str:
    """Return why a configuration of two stages is refused."""
    from megatron.core.transformer import TransformerConfig

    import megatron_ext

    sizes = {"pipeline_ranks": 2, "num_microbatches": 4, "num_layers": 4}
    megatron_ext.configure(megatron_ext.PipelineConfig(schedule="1f1b"), **sizes)
    settings = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "pipeline_model_parallel_size": 2,
        "pipeline_dtype": "fp32",
        "enable_mhc_connections": True,
        **wrong,
    }
    try:
        built = TransformerConfig(**settings)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    assert built.enable_mhc_connections
    return ""


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, ""),
        ({"mtp_num_layers": 1}, "Multi-Token Prediction"),
        ({"recompute_granularity": "full", **UNIFORM}, "full activation recompute"),
        ({"mhc_sinkhorn_iterations": 0}, "must be >= 1"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mhc", "mlp"]},
            "cannot be used together",
        ),
    ],
)
def test_upstreams_other_rules_stay(wrong: dict[str, object], reason: str) -> None:
    [told] = run_ranks(1, _refusal, wrong)
    assert reason in told
    assert bool(told) == bool(reason)
