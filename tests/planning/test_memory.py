"""What a rank of Megatron's holds, against the formulas."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layer_costs import Sharding, part_of
from megatron_ext.planning.model_flags import sizes_of_flags
from tests.planning.model_memory import Case, compared
from tests.ranks import require_training, run_ranks

SIZES = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--padded-vocab-size 64 --position-embedding-type rope"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8"
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("", {}),
    "tied": ("", {"tied": True}),
    "gated, grouped queries": (
        "--swiglu --group-query-attention --num-query-groups 2",
        {"gated_linear_unit": True, "num_query_groups": 2},
    ),
    "no biases, RMSNorm": (
        "--disable-bias-linear --normalization RMSNorm",
        {"add_bias_linear": False, "normalization": "RMSNorm"},
    ),
    "latent attention": (
        f"--disable-bias-linear --normalization RMSNorm {LATENT}",
        {"mla": True, "add_bias_linear": False},
    ),
    "experts": (
        "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 48",
        {"add_bias_linear": False, "num_moe_experts": 4, "moe_ffn_hidden_size": 48},
    ),
    "experts with biases": (
        "--num-experts 4 --moe-ffn-hidden-size 48",
        {"num_moe_experts": 4, "moe_ffn_hidden_size": 48},
    ),
    "multi-token prediction": (
        "--disable-bias-linear --mtp-num-layers 1",
        {"add_bias_linear": False, "mtp_num_layers": 1},
    ),
}


def held(
    tensor: int, expert: int, cases: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """Return the weights and the elements of gradient buffers of a rank, for each case."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from tests.runtime.small_gpt import build

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=expert
    )
    found = []
    for settings in cases:
        model = build(
            num_layers=3,
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            expert_model_parallel_size=expert if "num_moe_experts" in settings else 1,
            ddp={"use_distributed_optimizer": True},
            **settings,
        )
        buffers = [*model.buffers, *model.expert_parallel_buffers]
        weights = sum(each.numel() for each in model.parameters())
        found.append((weights, sum(each.grad_data.numel() for each in buffers)))
    return found


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 2)])
def test_a_rank_holds_the_weights_and_gradients_of_the_formula(
    tensor: int, expert: int
) -> None:
    mixtures = [name for name in CASES if name.startswith("experts")]
    names = [
        name for name in CASES if (name in mixtures) == (expert > 1) or tensor == expert
    ]
    if (
        tensor > 1
    ):  # only Transformer Engine keeps the down projections whole, as the formula has it
        names.remove("latent attention")
    ranks = run_ranks(
        max(tensor, expert), held, tensor, expert, [CASES[n][1] for n in names]
    )
    for by_rank in zip(*ranks, strict=True):
        assert len(set(by_rank)) == 1
    for name, (weights, gradients) in zip(names, ranks[0], strict=True):
        flags, settings = CASES[name]
        untied = "" if settings.get("tied") else "--untie-embeddings-and-output-weights"
        model = sizes_of_flags(f"{SIZES} {flags} {untied}".split(), name)
        by = Sharding(tensor=tensor, expert=expert, sequence=8)
        kinds: list[Any] = [
            "embedding",
            "loss",
            *model.kinds,
            *(["mtp"] * bool(model.mtp_layers)),
        ]
        parts = [part_of(model, kind, by, DEVICES["cpu"]) for kind in kinds]
        formula = sum(part.params + part.expert_params for part in parts)
        assert weights == formula, name
        # Buckets are padded for the shards, which these small sizes make visible.
        assert formula <= gradients <= formula * 1.05 + 1024, name


@pytest.mark.parametrize(
    "case",
    [
        Case("tied", "PP 4", "zb-v"),
        Case("grouped queries", "PP 4", "bitpipe"),
        Case("latent attention", "PP 4", "zb-h1"),
        Case("experts", "EP 2, PP 2", "zb-h1"),
        Case("multi-token prediction", "TP 2, SP, PP 2", "1f1b"),
    ],
    ids=" ".join,
)
def test_a_rank_that_trains_holds_what_the_planner_forecasts(case: Case) -> None:
    require_training()
    for forecast, held in compared(case):
        assert forecast.static == pytest.approx(held.static, rel=0.005)
        assert forecast.kept == pytest.approx(held.kept, rel=0.015)
