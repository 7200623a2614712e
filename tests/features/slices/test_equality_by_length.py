"""Slices by length: every table gives the bits of one stage with the same slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest

from megatron_ext.config.pipeline_config import DynamicOrder
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks

SLICE_TOKENS = 8
LENGTHS = (8, 1, 31, 9, 64, 2, 17, 8)
"""Of one slice, of several, and twice the tokens of all others."""
NUM_LAYERS = 4
DOCUMENTS = {31: (0, 5, 31), 64: (0, 1, 40, 40, 64)}
"""By length: the bounds of packed sequences; others have one."""
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_query_groups": 2},
    "latent": {"mla": True},
    "packed": {"num_query_groups": 2},
    "experts": {
        "num_moe_experts": 4,
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.2,
        "moe_router_load_balancing_type": "aux_loss",
        "add_bias_linear": False,
        "expert_model_parallel_size": 2,
    },
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
slow = partial(pytest.param, marks=pytest.mark.slow)


SHORT_LENGTHS = (1, 1, 2, 1, 3, 1, 1, 8)
"""Of a second replica, most of whose slices are empty."""


def items(name: str, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of a step."""
    import torch

    from tests.runtime import small_gpt

    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(
            small_gpt.VOCABULARY, (1, length + 1), generator=generator
        )
        item = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(length)[None],
            "loss_mask": (tokens[:, 1:] % 5 > 0).float(),
        }
        if name == "packed":
            bounds = DOCUMENTS.get(length, (0, length))
            item["cu_seqlens"] = torch.tensor([bounds], dtype=torch.int32)
        yield item


def forward_step(
    data: Iterator[dict[str, Any]], model: Any
) -> tuple[Any, Callable[[Any], tuple[Any, Any, dict[str, Any]]]]:
    """Run a stage on a micro-batch, or on a slice of it."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    item = next(data)
    packed = None
    if "cu_seqlens" in item:
        bounds = item["cu_seqlens"][0]
        longest = int(bounds.diff().max())
        packed = PackedSeqParams("thd", bounds, bounds, None, None, longest, longest)
    output = model(
        item["tokens"],
        item["position_ids"],
        None,
        labels=item["labels"] if model.post_process else None,
        packed_seq_params=packed,
    )

    def loss(losses: Any) -> tuple[Any, Any, dict[str, Any]]:
        total = (losses * item["loss_mask"]).sum()
        count = item["loss_mask"].sum().int()
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def chunk_of(config: Any, stage: int, num_stages: int, vp_stage: int | None) -> Any:
    """Return a stage of the model, whose weights do not depend on the number of stages."""
    import torch
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    from tests.runtime import small_gpt

    is_latent = hasattr(config, "kv_lora_rank")
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        config.num_moe_experts, multi_latent_attention=is_latent
    )
    chunk = GPTModel(
        config,
        spec,
        small_gpt.VOCABULARY,
        max(LENGTHS),
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    for name, parameter in chunk.named_parameters():
        generator = torch.Generator().manual_seed(
            sum(whole_name(name, stage, config).encode())
        )
        if parameter.dim() > 1:
            parameter.data.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2
            )
    return chunk


def whole_name(name: str, stage: int, config: Any) -> str:
    """Return the name that a parameter of a stage has in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + stage * config.num_layers)
    return ".".join(parts)


def train(
    name: str,
    schedule: str,
    pp: int,
    options: dict[str, Any],
    lengths: tuple[int, ...] = LENGTHS,
) -> Any:
    """Return the gradients of this rank's stages by name, and the reports of one step."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    pipeline = make_pipeline(schedule, pp, len(lengths), **options)
    placement = pipeline.placement
    stages = placement.stages_of[0]
    num_chunks = None
    if len(stages) > 1:
        num_chunks = len(stages)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks,
        expert_model_parallel_size=SETTINGS[name].get("expert_model_parallel_size", 1),
    )
    model_parallel_cuda_manual_seed(1)
    use(pipeline)
    settings = dict(SETTINGS[name])
    kind: Any = TransformerConfig
    if settings.pop("mla", False):
        kind = MLATransformerConfig
        settings |= {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "rope_type": "rope",
        }
        settings |= {"qk_pos_emb_head_dim": 8, "v_head_dim": 8}
    config = kind(
        num_layers=NUM_LAYERS // placement.num_stages,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **settings,
    )
    config.timers = None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = placement.stages_of[rank]
    chunks = []
    for vp_stage, stage in enumerate(stages):
        virtual = None if num_chunks is None else vp_stage
        chunks.append(chunk_of(config, stage, placement.num_stages, virtual))
    if parallel_state.get_data_parallel_rank() == 1:
        lengths = SHORT_LENGTHS
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[items(name, lengths) for _ in stages],
        model=chunks,
        num_microbatches=len(lengths),
        seq_length=max(LENGTHS),
        micro_batch_size=1,
    )
    gradients = {}
    for stage, chunk in zip(stages, chunks, strict=True):
        for parameter_name, parameter in chunk.named_parameters():
            gradients[whole_name(parameter_name, stage, config)] = parameter.grad
    return gradients, [report["loss"].tolist() for report in reports]


def joined(ranks: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the gradients of all ranks, and the reports of the last stage."""
    gradients = {}
    [reports] = [reports for _, reports in ranks if reports]
    for of_rank, _ in ranks:
        gradients |= of_rank
    return gradients, reports


@cache
def one_stage(name: str, slice_tokens: int | None) -> tuple[dict[str, Any], list[Any]]:
    options = {"slice_tokens": slice_tokens}
    return joined(run_ranks(1, train, name, "1f1b", 1, options))


@pytest.mark.short_s(6)
@pytest.mark.parametrize(
    ("name", "schedule", "pp", "options"),
    [
        ("grouped queries", "zb-h1", 2, {"transport": "shm"}),
        slow("grouped queries", "1f1b", 2, {}),
        slow("grouped queries", "zb-v", 2, {"transport": "torch"}),
        slow("grouped queries", "zb-h1", 2, {"dynamic": DynamicOrder()}),
        slow("latent", "zb-v", 2, {"transport": "shm"}),
        ("packed", "zb-v", 2, {}),
        slow("packed", "zb-h1", 4, {"dynamic": DynamicOrder(), "transport": "shm"}),
        slow("recomputed", "zb-h1", 2, {}),
    ],
)
def test_every_table_computes_what_one_stage_does(
    name: str, schedule: str, pp: int, options: dict[str, Any]
) -> None:
    options = {"slice_tokens": SLICE_TOKENS, **options}
    gradients, reports = joined(run_ranks(pp, train, name, schedule, pp, options))
    expected, expected_reports = one_stage(name, SLICE_TOKENS)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient.equal(expected[parameter]), parameter
    assert reports == expected_reports


@pytest.mark.short_s(6)
@pytest.mark.parametrize("slice_tokens", [1, slow(7), 8, slow(63), slow(64)])
@pytest.mark.parametrize(
    "name", ["grouped queries", slow("latent"), "packed", slow("recomputed")]
)
def test_samples_train_as_whole_ones(name: str, slice_tokens: int) -> None:
    """Within what docs/lengths.md states; those of one slice in bits."""
    gradients, reports = one_stage(name, slice_tokens)
    whole, whole_reports = one_stage(name, None)
    for parameter, expected in whole.items():
        worst = (gradients[parameter] - expected).abs().max() / expected.abs().max()
        assert worst < 2e-6, parameter
    for length, report, expected_report in zip(
        LENGTHS, reports, whole_reports, strict=True
    ):
        assert report == pytest.approx(expected_report, rel=1e-6, abs=0)
        if length <= slice_tokens:
            assert report == expected_report


def test_replicas_share_experts_although_one_has_few_tokens() -> None:
    """Its empty slices exchange tokens with those of the other, and change nothing."""
    sliced = run_ranks(2, train, "experts", "1f1b", 1, {"slice_tokens": SLICE_TOKENS})
    whole = run_ranks(2, train, "experts", "1f1b", 1, {})
    for (gradients, reports), (expected, expected_reports) in zip(
        sliced, whole, strict=True
    ):
        for parameter, gradient in expected.items():
            worst = (gradients[parameter] - gradient).abs().max() / gradient.abs().max()
            assert worst < 2e-6, parameter
        for report, expected_report in zip(reports, expected_reports, strict=True):
            assert report == pytest.approx(expected_report, rel=1e-6, abs=0)


def test_a_step_of_short_micro_batches_may_have_an_empty_one() -> None:
    """It adds nothing, as in a step in which another micro-batch has several slices."""
    options = {"slice_tokens": SLICE_TOKENS}
    [(gradients, reports)] = run_ranks(
        1, train, "packed", "1f1b", 1, options, (8, 3, 0)
    )
    [(expected, expected_reports)] = run_ranks(
        1, train, "packed", "1f1b", 1, options, (8, 3)
    )
    for parameter, gradient in expected.items():
        # Megatron divides by the number of micro-batches.
        difference = gradients[parameter] * 3 - gradient * 2
        assert difference.abs().max() < 2e-6 * gradient.abs().max(), parameter
    assert reports == [*expected_reports, [0.0, 0.0]]
