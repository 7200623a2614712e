"""A small GPT stage under DDP, run by hand with whole or split backwards, inside a rank."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from tests.pipelines import splits

VOCABULARY = 64
SEQUENCE = 8
NUM_MICROBATCHES = 3


def build(
    *,
    mla: bool = False,
    tied: bool = False,
    ddp: dict[str, Any] | None = None,
    use_ddp: bool = True,
    core_attention: Any = None,
    rotary: bool = True,
    **settings: Any,
) -> Any:
    """Return a model; equal arguments give equal models."""
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11)
    if mla:
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8}
        sizes |= {"qk_pos_emb_head_dim": 8, "v_head_dim": 8}
        settings = {**sizes, "rope_type": "rope", **settings}
    config = (MLATransformerConfig if mla else TransformerConfig)(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "use_cpu_initialization": True,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            **settings,
        }
    )
    grouped = config.moe_grouped_gemm
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        config.num_moe_experts, grouped, multi_latent_attention=mla
    )
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False
        )
    module = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope" if rotary else "learned_absolute",
        mtp_block_spec=mtp,
    )
    if config.bf16:
        module = module.bfloat16()
    if not use_ddp:
        return module
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(**(ddp or {})), module
    )


def forward(model: Any, microbatch: int) -> torch.Tensor:
    """Return the loss of a micro-batch, which differs between data-parallel ranks."""
    from megatron.core import parallel_state

    seed = 1000 * parallel_state.get_data_parallel_rank() + microbatch
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return loss.float().mean()


def fused_step(model: DistributedDataParallel) -> None:
    """Run a step as upstream does."""
    model.zero_grad_buffer()
    model_parallel_cuda_manual_seed(7)
    with model.no_sync():
        for microbatch in range(NUM_MICROBATCHES - 1):
            forward(model, microbatch).backward()
    forward(model, NUM_MICROBATCHES - 1).backward()
    model.finish_grad_sync()


def split_step(model: DistributedDataParallel, stage: int = 2) -> None:
    """Run a step with separate I and W: each W runs after the I of the next micro-batch."""
    model.zero_grad_buffer()
    model_parallel_cuda_manual_seed(7)
    splits().register_modules(stage, model)
    with model.no_sync():
        for microbatch in range(NUM_MICROBATCHES):
            loss = forward(model, microbatch)
            with splits().defer(stage, microbatch):
                loss.backward()
            if microbatch:
                assert splits().pending() == [
                    (stage, microbatch - 1),
                    (stage, microbatch),
                ]
                splits().run(stage, microbatch - 1)
        splits().run(stage, NUM_MICROBATCHES - 1)
    assert splits().pending() == []
    if model.ddp_config.overlap_grad_reduce:  # otherwise finish_grad_sync starts it
        model.start_grad_sync()
    model.finish_grad_sync()


def gradients(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return a copy of each parameter's accumulated gradient."""
    return {
        name: parameter.main_grad.clone()
        for name, parameter in model.module.named_parameters()
    }


def deferred(model: DistributedDataParallel) -> set[str]:
    """Return the names of the weights that one I leaves for W."""
    model.zero_grad_buffer()
    splits().register_modules(0, model)
    loss = forward(model, 0)
    with splits().defer(0, 0):
        loss.backward()
    names = {id(weight): name for name, weight in model.module.named_parameters()}
    waiting = {names[weight] for weight in splits()._waiting[0, 0]}
    untouched = {name for name, g in gradients(model).items() if not g.any()}
    assert waiting <= untouched
    splits().clear()
    assert splits().pending() == []
    return waiting


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Compare bit by bit."""
    assert actual.keys() == expected.keys()
    different = [
        name for name in actual if not torch.equal(actual[name], expected[name])
    ]
    assert not different, different
    assert all(torch.isfinite(g).all() for g in actual.values())
