"""Translates a Hugging Face `config.json` into Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.planning.model_sizes import HYBRID_KINDS, MAX_LAYERS, MAX_SIZE

_FULL_ATTENTION_EVERY = {
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
}
"""Model type -> period of the layers that attend to all tokens, for configurations that have no
`layer_types`. All other layers use sliding attention."""
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def flags_of_config(config: Mapping[str, Any]) -> list[str]:
    """Return Megatron's flags for the model that a Hugging Face `config.json` describes.

    Raises:
        KeyError: The model is not a decoder that these flags can describe.
        ValueError: A size is not a valid number.
    """
    pattern = _pattern(config)
    num_layers = len(pattern) or _size(config, "num_hidden_layers", MAX_LAYERS)
    values = {
        "num-layers": num_layers,
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": _ffn_size(config),
        "num-attention-heads": config["num_attention_heads"],
        # The embedding has exactly this many rows, so do not pad the vocabulary.
        "padded-vocab-size": config["vocab_size"],
        "max-position-embeddings": config.get("max_position_embeddings", 4096),
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "mtp-num-layers": config.get("num_nextn_predict_layers"),
    }
    if pattern:
        values |= _hybrid_values(config, pattern)
    values |= _attention_values(config) | _window_values(config)
    values |= _expert_values(config, num_layers)
    flags = []
    # None or 0 means that the model does not have this feature.
    for name, value in values.items():
        if value:
            flags += [f"--{name}", str(value)]
    flags += [f"--{switch}" for switch in _switches(config, pattern)]
    return flags


def _ffn_size(config: Mapping[str, Any]) -> Any:
    # Llama 4 has a separate size for layers without experts.
    if config.get("intermediate_size_mlp"):
        return config["intermediate_size_mlp"]
    return config["intermediate_size"]


def _size(
    config: Mapping[str, Any],
    name: str,
    limit: int = MAX_SIZE,
) -> int:
    """Return a size from a configuration after checking it.

    Raises:
        KeyError: The size is missing.
        ValueError: The size is not a whole number from 1 to `limit`.
    """
    size = config[name]
    if not isinstance(size, int) or not 1 <= size <= limit:
        text = str(size)[:40]
        raise ValueError(f"{name} is {text!r}, not a whole number from 1 to {limit}")
    return size


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


def _pattern(config: Mapping[str, Any]) -> str:
    """Return a hybrid model's pattern in Megatron's notation, or "" for other models."""
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        return str(pattern)
    # Other hybrid models list their layer kinds by name.
    letters: dict[str, str] = {}
    for letter, kind in HYBRID_KINDS.items():
        letters[kind] = letter
    letters["moe"] = "E"
    blocks = config.get("layers_block_type") or ()
    return "".join(letters[block] for block in blocks)


def _hybrid_values(config: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    return {
        "hybrid-layer-pattern": pattern,
        "mamba-num-heads": config["mamba_num_heads"],
        "mamba-head-dim": config["mamba_head_dim"],
        "mamba-state-dim": config["ssm_state_size"],
        "mamba-num-groups": config["n_groups"],
        "moe-latent-size": config.get("moe_latent_size"),
    }


def _has_groups(config: Mapping[str, Any]) -> bool:
    heads = config["num_attention_heads"]
    return bool(config.get("num_key_value_heads", heads) != heads)


def _attention_values(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("kv_lora_rank"):
        return {
            "q-lora-rank": config.get("q_lora_rank"),
            "kv-lora-rank": config["kv_lora_rank"],
            "qk-head-dim": config["qk_nope_head_dim"],
            "qk-pos-emb-head-dim": config["qk_rope_head_dim"],
            "v-head-dim": config["v_head_dim"],
        }
    # A head's width need not be the hidden size divided by the number of heads.
    values = {"kv-channels": config.get("head_dim")}
    if _has_groups(config):
        values["num-query-groups"] = config["num_key_value_heads"]
    return values


def _window_values(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("sliding_window"):
        return {}
    if not config.get("use_sliding_window", True):
        return {}
    # The layers with sliding attention are either all but every n-th layer, or those
    # marked with 1 in a list.
    period = _FULL_ATTENTION_EVERY.get(_model_type(config))
    skips = config.get("sliding_window_pattern", period)
    layer_types = config.get("layer_types")
    if layer_types:
        marks = []
        for layer_type in layer_types:
            is_sliding = layer_type == "sliding_attention"
            marks.append(int(is_sliding))
        skips = str(marks)
    return {
        "window-size": f"{config['sliding_window']},0",
        "window-attn-skip-freq": skips,
    }


def _expert_values(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    num_experts = _first_of(config, _NUM_EXPERTS)
    if not num_experts:
        return {}
    width_name = "moe_intermediate_size"
    if not config.get(width_name):
        width_name = "intermediate_size"
    width = _size(config, width_name)
    # Llama 4 has one shared expert, but its configuration has no key for it.
    num_shared = int(_model_type(config).startswith("llama4"))
    if config.get("n_shared_experts"):
        num_shared = _size(config, "n_shared_experts")
    # Some configurations give the shared experts' total width, others their number.
    shared_width = _first_of(
        config,
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    )
    if not shared_width:
        shared_width = num_shared * width
    return {
        "num-experts": num_experts,
        "moe-router-topk": config["num_experts_per_tok"],
        "moe-ffn-hidden-size": width,
        "moe-shared-expert-intermediate-size": shared_width,
        "moe-layer-freq": str(_expert_marks(config, num_layers)),
    }


def _expert_marks(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return 1 for every layer that has experts and 0 for every other layer."""
    period_names = ("decoder_sparse_step", "interleave_moe_layer_step")
    period = _first_of(config, period_names) or 1
    first = config.get("first_k_dense_replace") or 0
    dense_layers = config.get("mlp_only_layers") or ()
    marks = []
    for layer in range(num_layers):
        # In Qwen's and Llama 4's code, the last layer in each period has experts. With
        # Megatron's --moe-layer-freq N, the first layer does.
        is_last_in_period = (layer + 1) % period == 0
        has_experts = is_last_in_period and layer >= first and layer not in dense_layers
        marks.append(int(has_experts))
    return marks


def _switches(config: Mapping[str, Any], pattern: str) -> list[str]:
    kind = _model_type(config)
    switches = []
    # Configuration files do not say whether an MLP is gated. All SiLU models are. Among
    # the GELU models, only Gemma is.
    activation = _first_of(config, ("hidden_act", "hidden_activation")) or "silu"
    is_gated = activation == "silu" or kind.startswith("gemma")
    if is_gated and not pattern:
        switches.append("swiglu")
    # Nor do they say which biases the code for GPT-OSS and Qwen2 adds.
    if kind != "gpt_oss" and not config.get("use_bias"):
        switches.append("disable-bias-linear")
    if config.get("attention_bias") or kind.startswith("qwen2"):
        switches.append("add-qkv-bias")
    # Files omit values that match the model class's default.
    is_tied_by_default = kind.startswith(("gemma", "cohere"))
    if not config.get("tie_word_embeddings", is_tied_by_default):
        switches.append("untie-embeddings-and-output-weights")
    if config.get("kv_lora_rank"):
        switches += ["multi-latent-attention", "qk-layernorm"]
        return switches
    if _has_groups(config):
        switches.append("group-query-attention")
    norms_by_default = kind.startswith(("qwen3", "gemma3"))
    if norms_by_default or config.get("use_qk_norm"):
        switches.append("qk-layernorm")
    return switches


def _first_of(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of these values that is neither missing nor empty, or None if all are."""
    for name in names:
        if config.get(name):
            return config[name]
    return None
