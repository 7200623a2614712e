"""The flags of the embedded trainer: upstream's names, defaults and choices.

Flags that mirror a field of one of megatron.core's dataclasses are generated from it (type,
choices, default, and the spelling in the field's `argparse_meta`), so they follow the installed
core. Flags that upstream defines outside core are listed by shape. All meanings are upstream's, and
so is the idea of generating flags (`megatron/training/argument_utils.py`).
"""

from __future__ import annotations

import enum
import re
import types
import typing
from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from dataclasses import MISSING, Field, fields
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

__all__ = ["add_flags"]

_FROM_CORE: dict[type, str] = {
    TransformerConfig: """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel
        expert_model_parallel_size expert_tensor_parallel_size microbatch_group_size_per_vp_stage
        perform_initialization use_cpu_initialization fp16 bf16 cross_entropy_loss_fusion
        cross_entropy_fusion_impl defer_embedding_wgrad_compute num_layers hidden_size
        num_attention_heads num_query_groups ffn_hidden_size kv_channels attention_backend
        hidden_dropout attention_dropout layernorm_epsilon layernorm_zero_centered_gamma
        add_bias_linear add_qkv_bias rotary_interleaved normalization qk_layernorm
        calculate_per_token_loss multi_latent_attention mtp_num_layers mtp_loss_scaling_factor
        init_method_std recompute_granularity recompute_method recompute_num_layers
        recompute_modules distribute_saved_activations clone_scatter_output_in_embedding
        moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_ffn_hidden_size
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing
        moe_router_fusion moe_grouped_gemm moe_z_loss_coeff moe_token_dispatcher_type
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_permute_fusion transformer_impl
    """,
    OptimizerConfig: """
        lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis use_distributed_optimizer
        overlap_param_gather
    """,
    DistributedDataParallelConfig: "overlap_grad_reduce",
}


def pattern(text: str) -> int | list[int]:
    """Read a per-layer frequency: an integer, or a list expression such as `([0]*3+[1])*2`."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if not re.fullmatch(r"[\[\]()+*,\d\s]+", text):
        raise ArgumentTypeError(f"{text!r} is neither an integer nor a list such as ([0]+[1]*3)*2")
    try:
        value = eval(text, {"__builtins__": {}})  # noqa: S307  digits, brackets, + and * only
    except (SyntaxError, TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{text!r} is not a list expression: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ArgumentTypeError(f"{text!r} is not a list of integers")
    return value


# One value each: {type: {flag: default}}.
_VALUES: dict[Any, dict[str, Any]] = {
    int: {
        "--max-position-embeddings": None, "--rotary-base": 10000, "--seq-length": None,
        "--make-vocab-size-divisible-by": 128, "--vocab-size": None, "--padded-vocab-size": None,
        "--micro-batch-size": None, "--global-batch-size": None, "--train-iters": None,
        "--train-samples": None, "--exit-interval": None, "--eval-iters": 100,
        "--eval-interval": None, "--seed": 1234, "--lr-decay-iters": None,
        "--lr-decay-samples": None, "--lr-wsd-decay-iters": None, "--lr-wsd-decay-samples": None,
        "--lr-warmup-iters": 0, "--lr-warmup-samples": 0, "--num-experts": None,
        "--decoder-first-pipeline-num-layers": None, "--decoder-last-pipeline-num-layers": None,
        "--num-layers-per-virtual-pipeline-stage": None,
        "--num-virtual-stages-per-pipeline-rank": None, "--distributed-timeout-minutes": 10,
        "--ddp-num-buckets": None, "--num-workers": 2, "--q-lora-rank": None,
        "--kv-lora-rank": 32, "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64,
        "--v-head-dim": 128, "--log-interval": 100,
    },
    float: {
        "--rotary-percent": 1.0, "--min-lr": 0.0, "--lr-warmup-fraction": None,
        "--rotary-scaling-factor": 1.0, "--mscale": 1.0, "--mscale-all-dim": 0.0,
    },
    str: {
        "--pipeline-model-parallel-layout": None, "--save": None, "--load": None, "--split": None,
        "--data-cache-path": None, "--vocab-file": None, "--merge-file": None,
        "--tokenizer-model": None, "--tokenizer-metadata": None, "--tensorboard-dir": None,
    },
    pattern: {"--moe-layer-freq": 1},
}  # fmt: skip

# Several values each: {flag: (type, nargs, default)}.
_LISTS: dict[str, tuple[Any, str, Any]] = {
    "--data-path": (str, "*", None),
    "--tokenizer-special-tokens": (str, "+", None),
    "--moe-aux-loss-coeff": (float, "+", 0.0),
    "--spec": (str, "*", None),
}

# One of a few: {flag: (choices, default)}.
_CHOICES: dict[str, tuple[tuple[str, ...], Any]] = {
    "--position-embedding-type": (("learned_absolute", "rope", "none"), "learned_absolute"),
    "--optimizer": (("adam", "sgd"), "adam"),
    "--lr-decay-style": (
        ("constant", "linear", "cosine", "inverse-square-root", "WSD"), "linear"),
    "--lr-wsd-decay-style": (("exponential", "linear", "cosine", "minus_sqrt"), "exponential"),
    "--ckpt-format": (("torch_dist",), "torch_dist"),
    "--distributed-backend": (("nccl", "gloo"), "nccl"),
    "--tokenizer-type": (
        ("BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer",
         "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "HuggingFaceTokenizer",
         "Llama2Tokenizer", "NullTokenizer", "ByteLevelTokenizer"), None),
    "--moe-router-load-balancing-type": (
        ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"), "aux_loss"),
}  # fmt: skip

_SWITCHES = """
    --group-query-attention --use-rotary-position-embeddings --use-rope-scaling --swiglu
    --untie-embeddings-and-output-weights --recompute-activations --no-persist-layer-norm
    --finetune --exit-on-missing-checkpoint --dist-ckpt-optim-fully-reshardable
    --grad-reduce-in-bf16 --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
    --mock-data --reset-position-ids --reset-attention-mask --eod-mask-loss
    --tokenizer-sentencepiece-legacy --tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens
    --trust-remote-code --legacy-tokenizer
"""

# Switches that store under another name: {flag or flags: (where, what)}.
_STORING: dict[str, tuple[str, bool]] = {
    "--no-position-embedding": ("add_position_embedding", False),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_loss_and_grad", False),
    "--disable-gloo-process-groups": ("enable_gloo_process_groups", False),
    "--no-masked-softmax-fusion": ("masked_softmax_fusion", False),
    "--no-bias-gelu-fusion": ("bias_gelu_fusion", False),
    "--no-bias-swiglu-fusion": ("bias_swiglu_fusion", False),
    "--no-bias-dropout-fusion": ("bias_dropout_fusion", False),
    "--no-rope-fusion": ("apply_rope_fusion", False),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "--no-overlap-p2p-communication": ("overlap_p2p_comm", False),
    "--no-create-attention-mask-in-dataloader": ("create_attention_mask_in_dataloader", False),
    "--use-mcore-models": ("deprecated_use_mcore_models", True),
    "--override-opt_param-scheduler --override-opt-param-scheduler": (
        "override_opt_param_scheduler", True),
    "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler": (
        "use_checkpoint_opt_param_scheduler", True),
}  # fmt: skip


def add_flags(parser: ArgumentParser, local_rank: int) -> None:
    """Add all flags of the embedded trainer to `parser`."""
    for config, names in _FROM_CORE.items():
        _add_fields(parser.add_argument_group(config.__name__), config, names.split())
    group = parser.add_argument_group("training", "Names, defaults and meanings are upstream's.")
    for kind, flags in _VALUES.items():
        for flag, default in flags.items():
            group.add_argument(flag, type=kind, default=default)
    for flag, (kind, nargs, default) in _LISTS.items():
        group.add_argument(flag, type=kind, nargs=nargs, default=default)
    for flag, (choices, default) in _CHOICES.items():
        several = "+" if flag == "--moe-router-load-balancing-type" else None
        group.add_argument(flag, choices=choices, default=default, nargs=several)
    for flag in _SWITCHES.split():
        group.add_argument(flag, action="store_true")
    for flag in ("--no-load-optim", "--no-load-rng"):
        group.add_argument(flag, action="store_true", default=None)
    for spellings, (dest, value) in _STORING.items():
        action = "store_true" if value else "store_false"
        group.add_argument(*spellings.split(), dest=dest, action=action)
    group.add_argument("--save-interval", "--persistent-save-interval", type=int)
    group.add_argument("--local-rank", type=int, default=local_rank)


def _add_fields(group: _ArgumentGroup, config: type, names: list[str]) -> None:
    by_name = {field.name: field for field in fields(config)}
    for name in names:
        option_strings, options = _from_field(by_name[name])
        group.add_argument(*option_strings, **options)


def _from_field(field: Field[Any]) -> tuple[list[str], dict[str, Any]]:
    """Turn a dataclass field into the arguments of `add_argument`: option strings and keywords."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    options: dict[str, Any] = {"dest": field.name, "default": default, **_kind(field.type)}
    spelled = field.name.replace("_", "-")
    option_strings = [f"--{spelled}"]
    if options.get("type") is bool:
        del options["type"]
        options["action"] = "store_false" if default else "store_true"
        if default:
            option_strings = [f"--no-{spelled}", f"--disable-{spelled}"]
    meta = dict(field.metadata.get("argparse_meta", {}))
    return meta.pop("arg_names", option_strings), {**options, **meta}


def _kind(annotation: Any) -> dict[str, Any]:
    """Return `type`, `choices` and `nargs` of an annotated field; `Optional` is unwrapped."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _kind(next(kind for kind in inner if kind is not types.NoneType))
    if origin is list:
        return {**_kind(inner[0]), "nargs": "+"}
    if origin is typing.Literal:
        return {"type": type(inner[0]), "choices": inner}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"type": annotation.__getitem__, "choices": list(annotation)}
    return {"type": annotation}
