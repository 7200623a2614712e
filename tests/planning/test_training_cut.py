"""`--pipeline-layout auto`, as Megatron's own parser takes it, and as it trains."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.config.hosting import preflight
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks
from tests.runtime.capture import GPT, train
from tests.runtime.test_equality import UNCLIPPED, assert_equal

MODEL = (
    "--hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size {} --eval-interval 1000 "
    "--pipeline-model-parallel-size 4 --pipeline-layout auto --num-layers {} {}"
)
CASES = {
    # A vocabulary that weighs about three layers; none at all; layers that do not divide.
    "1f1b, large vocabulary": (128000, 17, "--pipeline-schedule 1f1b", 4),
    "zb-h1, small vocabulary": (127, 16, "--pipeline-schedule zb-h1", 4),
    "zb-v": (128000, 19, "--pipeline-schedule zb-v", 8),
    "interleaved": (
        128000, 25, "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 3", 12,
    ),
    "MTP": (
        127, 13, "--pipeline-schedule zb-h1 --mtp-num-layers 1 --position-embedding-type rope", 4,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    require_training()
    cases = [("gpt", MODEL.format(*case[:3]), 4) for case in CASES.values()]
    return dict(zip(CASES, run_ranks(1, outcomes, cases)[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_megatron_takes_the_layout(made: dict[str, Any], name: str) -> None:
    _, layers, _, stages = CASES[name]
    result = made[name]
    assert isinstance(result, dict), result
    given = result["pipeline_model_parallel_layout"]
    text = str(getattr(given, "input_data", given))
    parts = text.split("|")
    assert len(parts) == stages
    assert sum(part.count("t") for part in parts) == layers
    counts = [part.count("t") for part in parts]
    if name == "1f1b, large vocabulary":
        assert counts[-1] < min(counts[:-1])
        assert any(
            f"--pipeline-model-parallel-layout '{text}'" in line
            for line in result["log"]
        )
    if name == "zb-h1, small vocabulary":
        assert counts == [4] * 4
    if name == "MTP":
        assert parts[-1].endswith("mL")
        assert counts[-1] < max(counts)


def test_selective_recomputation_is_that_of_attention_unless_modules_are_named() -> (
    None
):
    flags = MODEL.format(
        32000, 41, "--pipeline-schedule zb-h1 --recompute-granularity selective "
    )
    flags = flags.replace("--seq-length 1024 --max-position-embeddings 1024",
                          "--seq-length 65536 --max-position-embeddings 65536")  # fmt: skip
    layouts = []
    for modules in (
        "",
        "--recompute-modules core_attn",
        "--recompute-modules layernorm",
    ):
        found = preflight(f"{flags}{modules}".split(), world_size=4)
        assert found.accepted, found.refusals
        layouts.append(found.arguments["pipeline_model_parallel_layout"])
    assert layouts[0] == layouts[1] != layouts[2]


UNEVEN = GPT + UNCLIPPED + "--num-layers {} "
TRAINED = {"1f1b": (2, 7), "interleaved": (2, 7), "zb-v": (2, 7), "bitpipe": (4, 9)}
"""By schedule: ranks and layers. Megatron's own has the stages of the first two."""


@pytest.mark.short_s(8)
@pytest.mark.parametrize("schedule", TRAINED)
def test_it_trains_as_the_same_layout_by_hand(schedule: str) -> None:
    ranks, layers = TRAINED[schedule]
    others = f"{UNEVEN.format(layers)}--pipeline-model-parallel-size {ranks} "
    chosen = f"{others}--pipeline-schedule {schedule} "
    made = preflight(f"{chosen}--pipeline-layout auto".split(), world_size=ranks)
    assert made.accepted, made.refusals
    layout = made.arguments["pipeline_model_parallel_layout"]
    assert len({stage.count("t") for stage in layout.split("|")}) > 1
    ours = train(ranks, f"{chosen}--pipeline-layout auto ")
    assert ours.tables[0].split()[0] == schedule
    by_hand = f"--pipeline-model-parallel-layout {layout} "
    assert_equal(ours, train(ranks, chosen + by_hand))
    if schedule in ("1f1b", "interleaved"):
        own = train(ranks, others + by_hand)
        assert not own.tables
        assert_equal(ours, own)
