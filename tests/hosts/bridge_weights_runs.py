"""Moves the weights of a tiny model between Hugging Face and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tests.hosts import bridge_runs, stand_ins

NUM_LAYERS = 8

_VOCABULARY = {"vocab_size": 1280, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
_SIZES = {
    **_VOCABULARY,
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
_QWEN3 = {
    **_SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
_DEEPSEEK_V3 = {
    **_SIZES,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

# Turns off NVIDIA kernels that Bridge chooses for its models.
_NO_KERNELS = {
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "cross_entropy_fusion_impl": "native",
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "moe_router_fusion": False,
}


@dataclass
class Moved:
    """Weights exported by one rank, as digests by their Hugging Face names."""

    losses: list[str] = field(default_factory=list)
    """Of each step, as hexadecimal numbers; where Bridge has none, `none`."""
    loaded: dict[str, str] = field(default_factory=dict)
    """Before the first step."""
    trained: dict[str, str] = field(default_factory=dict)
    """After the last step."""
    reloaded: dict[str, str] = field(default_factory=dict)
    """After the trained model has reloaded the file."""
    copies: list[str | None] = field(default_factory=list)
    """How the copies of the embedding differed at each of these points."""
    streamed: list[str] = field(default_factory=list)
    """Parameters, with their chunks, whose values differ from a stream of the file."""


def _hf_config(kind: str) -> Any:
    from transformers import DeepseekV3Config, Qwen3Config

    if kind == "qwen3":
        return Qwen3Config(**_QWEN3)
    return DeepseekV3Config(
        **_DEEPSEEK_V3, tie_word_embeddings=kind == "tied deepseek-v3"
    )


def _suit(provider: Any, kind: str, changes: Mapping[str, Any]) -> Any:
    """Make Bridge's model trainable on a CPU in float32."""
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    def local_mtp_spec(config: Any, vp_stage: int | None = None) -> Any:
        if not config.mtp_num_layers:
            return None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage
        )
        return get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=vp_stage
        )

    # Bridge always builds these layers with Transformer Engine.
    gpt_provider.mtp_block_spec = local_mtp_spec
    for name, value in {**_NO_KERNELS, **changes}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.transformer_layer_spec = partial(
        get_gpt_decoder_block_spec, use_transformer_engine=False
    )
    provider.share_embeddings_and_output_weights = kind != "deepseek-v3"
    provider.seq_length = 32
    for name in ("bf16", "fp16"):
        setattr(provider, name, False)
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = (
        torch.float32
    )
    return provider


def _value_of(name: str, shape: torch.Size) -> torch.Tensor:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return value + 1 if name.endswith("norm.weight") else value


def save_model(folder: Path, kind: str) -> dict[str, str]:
    """Write a model's files with weights derived from their names; return the digests."""
    stand_ins.install()
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file

    config = _hf_config(kind)
    bridge = AutoBridge.from_hf_config(config)
    provider = _suit(bridge.to_megatron_provider(load_weights=False), kind, {})
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    weights = {
        name: _value_of(name, weight.shape)
        for name, weight in bridge.export_hf_weights(model, show_progress=False)
        if not (
            provider.share_embeddings_and_output_weights and name == "lm_head.weight"
        )
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return dict(_digests(weights.items()))


def _digests(weights: Any) -> Iterator[tuple[str, str]]:
    for name, weight in weights:
        yield (
            name,
            blake2b(
                weight.detach().float().numpy().tobytes(), digest_size=8
            ).hexdigest(),
        )


def train(
    folder: Path,
    kind: str,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    checkpoints: Path | None = None,
) -> Moved:
    """Train a model from Hugging Face files, exporting it before and after.

    Args:
        folder: Folder with the files.
        kind: Of the model.
        changes: Changes to the model's configuration, by name.
        settings: Of a `PipelineConfig` for `configure`; None: it is not called.
        checkpoints: Folder for Megatron's checkpoint of the trained model; None: no checkpoint is
            saved.
    """
    stand_ins.install()
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.callbacks import Callback

    from megatron_ext.runtime.folded import differing_copies

    bridge = AutoBridge.from_hf_pretrained(folder)
    moved = Moved()

    def exported(model: list[Any]) -> dict[str, str]:
        moved.copies.append(differing_copies(model))
        return dict(_digests(bridge.export_hf_weights(model, show_progress=False)))

    class Watch(Callback):
        def on_train_start(self, context: Any) -> None:
            moved.loaded = exported(context.model)

        def on_train_end(self, context: Any) -> None:
            moved.trained = exported(context.model)
            _stream(bridge, context.model, moved)
            if checkpoints is not None:  # the checkpoint is saved after this
                return
            with torch.no_grad():
                for weight in (
                    w for chunk in context.model for w in chunk.parameters()
                ):
                    weight.fill_(torch.nan)
            bridge.load_hf_weights(context.model)
            moved.reloaded = exported(context.model)

    config = bridge_runs.example().recipe(train_iters=3)
    config.model = _suit(
        bridge.to_megatron_provider(load_weights=True),
        kind,
        {"pipeline_model_parallel_size": 4, **changes},
    )
    if checkpoints is not None:
        config.checkpoint.save = str(checkpoints)
        config.checkpoint.save_interval = 3
    bridge_runs.short_data()
    bridge_runs.configure(settings)
    moved.losses = bridge_runs.pretrain(config, Watch()).losses
    return moved


def _stream(bridge: Any, model: list[Any], moved: Moved) -> None:
    """Record which copies of the embedding a stream of weights leaves out."""
    streamed = {
        (item.vp_stage, item.param_name)
        for item in bridge._model_bridge.stream_weights_hf_to_megatron(
            bridge.hf_pretrained, model
        )
    }
    for chunk_index, chunk in enumerate(model):
        for name, _ in chunk.named_parameters():
            bare_name = name.split("module.")[-1]
            if "embedding" in bare_name and (chunk_index, bare_name) not in streamed:
                moved.streamed.append(f"{chunk_index} {bare_name}")


def export_checkpoint(folder: Path, kind: str, checkpoints: Path) -> dict[str, str]:
    """Load the newest checkpoint into one process and export it; return the digests.

    Args:
        folder: Folder with the files that the training started from.
        kind: Of the model.
        checkpoints: Folder with the training's checkpoints.
    """
    stand_ins.install()
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    bridge = AutoBridge.from_hf_pretrained(folder)
    _suit(bridge.to_megatron_provider(load_weights=False), kind, {})
    with temporary_distributed_context(backend="gloo"):
        model = bridge.load_megatron_model(checkpoints, wrap_with_ddp=False)
        return dict(_digests(bridge.export_hf_weights(model, show_progress=False)))
