"""Reads a model's sizes from Megatron's flags."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from typing import Any

from megatron_ext.errors import ArgumentsError
from megatron_ext.planning.model_sizes import (
    HYBRID_KINDS,
    MAX_LAYERS,
    MAX_SIZE,
    LayerKind,
    ModelSizes,
)

# The Megatron arguments that determine a model's sizes, by type.
_INTEGERS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
    ),
    *("kv_channels", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
    *("max_position_embeddings", "seq_length", "num_experts", "moe_router_topk"),
    *(
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
    ),
    *(
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "mtp_num_layers",
        "moe_latent_size",
    ),
    *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
_SWITCHES = (
    *("swiglu", "disable_bias_linear", "group_query_attention", "add_qkv_bias"),
    *("multi_latent_attention", "qk_layernorm", "untie_embeddings_and_output_weights"),
)
_TEXTS = (
    *(
        "moe_layer_freq",
        "normalization",
        "position_embedding_type",
        "hybrid_layer_pattern",
    ),
    *("window_size", "window_attn_skip_freq"),
)

# Default values of Megatron's arguments. Some differ from those in its configuration
# class.
_DEFAULTS = {
    "qk_pos_emb_head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 32,
    "q_lora_rank": 0,
    "num_experts": 0,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 0,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "mtp_num_layers": 0,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sizes_of_flags(flags: Sequence[str], name: str) -> ModelSizes:
    """Return the sizes given by Megatron's flags and its defaults. Ignore other flags.

    Raises:
        ArgumentsError: A size is missing or not a number.
    """
    args = _parsed(flags)
    # A slash precedes the layers of each multi-token prediction depth.
    pattern, *depths = (args.hybrid_layer_pattern or "").replace("|", "").split("/")
    # A pattern has one letter per layer, so it also determines the number of layers.
    num_layers = len(pattern) or args.num_layers
    # Check before filling in defaults, so that errors name only flags that the user
    # set.
    _check_present(args, num_layers)
    _check_range(args)
    hidden = args.hidden_size
    heads = args.num_attention_heads
    query_groups = _query_groups(args)
    _check_divisions(args, query_groups)
    # A size of 0 means the default, too.
    for argument, default in _DEFAULTS.items():
        if not getattr(args, argument):
            setattr(args, argument, default)
    is_latent = args.multi_latent_attention
    # Only multi-latent attention rotates a separate part of each head.
    rotary_size = 0
    head_size = value_size = args.kv_channels or hidden // heads
    if is_latent:
        rotary_size = args.qk_pos_emb_head_dim
        head_size = args.qk_head_dim + rotary_size
        value_size = args.v_head_dim
    ffn = _ffn_size(args)
    window = _window_size(args)
    window_share = 0.0
    if window:
        window_share = _window_share(args, num_layers)
    norm_weights = 2  # a scale and a bias
    if args.normalization == "RMSNorm":
        norm_weights = 1
    return ModelSizes(
        name=name,
        hidden=hidden,
        heads=heads,
        query_groups=query_groups,
        head_size=head_size,
        value_size=value_size,
        ffn=ffn,
        gated=args.swiglu,
        vocabulary=_padded_vocabulary(args),
        is_tied=not args.untie_embeddings_and_output_weights,
        learned_positions=_learned_positions(args),
        biases=not args.disable_bias_linear,
        qkv_biases=args.add_qkv_bias or not args.disable_bias_linear,
        norm_weights=norm_weights,
        qk_norm=args.qk_layernorm,
        window=window,
        window_share=window_share,
        kinds=_kinds(args, pattern, num_layers),
        num_experts=args.num_experts,
        top_k=args.moe_router_topk,
        expert_ffn=args.moe_ffn_hidden_size or ffn,
        shared_ffn=args.moe_shared_expert_intermediate_size,
        expert_hidden=args.moe_latent_size or hidden,
        scan_heads=args.mamba_num_heads or 2 * hidden // args.mamba_head_dim,
        scan_head_size=args.mamba_head_dim,
        scan_state=args.mamba_state_dim,
        scan_groups=args.mamba_num_groups,
        is_latent=is_latent,
        query_rank=args.q_lora_rank,
        key_value_rank=args.kv_lora_rank,
        rotary_size=rotary_size,
        mtp_layers=len(depths) or args.mtp_num_layers,
        sequence=args.seq_length,
        # The sizes are cache keys, so they need a hashable type.
        flags=tuple(flags),
    )


def _query_groups(args: argparse.Namespace) -> int:
    """Return the number of head groups that share keys and values."""
    if args.group_query_attention:
        return int(args.num_query_groups or 1)
    return int(args.num_attention_heads)


def sizes_of_arguments(args: argparse.Namespace) -> ModelSizes:
    """Return the sizes given by Megatron's parsed arguments.

    Raises:
        ArgumentsError: A size is missing.
    """
    # Convert the arguments to flags, so that both go through the same checks and
    # defaults.
    flags = []
    for name in (*_INTEGERS, *_TEXTS):
        value = getattr(args, name, None)
        if value is not None:
            flags += [_flag(name), str(value)]
    for name in _SWITCHES:
        if getattr(args, name, False):
            flags.append(_flag(name))
    # Megatron stores --disable-bias-linear as add_bias_linear=False.
    if not getattr(args, "add_bias_linear", True):
        flags.append("--disable-bias-linear")
    return sizes_of_flags(flags, "the model")


def _parsed(flags: Sequence[str]) -> argparse.Namespace:
    # By default, argparse exits on an error, but the planner is only one part of the
    # process.
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False
    )
    for name in _INTEGERS:
        parser.add_argument(_flag(name), type=int)
    for name in _SWITCHES:
        parser.add_argument(_flag(name), action="store_true")
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--hybrid-layer-pattern", "--hybrid-override-pattern")
    parser.add_argument("--window-size")
    parser.add_argument("--window-attn-skip-freq")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    try:
        args, _ = parser.parse_known_args(_without_empty_values(flags))
    except argparse.ArgumentError as error:
        raise ArgumentsError(f"{error}; give a whole number") from error
    return args


def _without_empty_values(flags: Sequence[str]) -> list[str]:
    """Return the flags except those with an empty value, such as an example's vocabulary size."""
    words = list(flags)
    # Go backwards, so that deleting words does not shift the ones still to be checked.
    for index in range(len(words) - 1, 0, -1):
        if words[index : index + 1] == [""]:  # the end may already be deleted
            del words[index - 1 : index + 1]
    return words


def _check_present(args: argparse.Namespace, num_layers: int | None) -> None:
    needed = {
        "--num-layers": num_layers,
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--padded-vocab-size": args.padded_vocab_size or args.vocab_size,
    }
    for flag, value in needed.items():
        if value is None or value < 1:
            raise ArgumentsError(
                f"{flag} is {value or 'missing'}; give the size of the model"
            )


def _check_range(args: argparse.Namespace) -> None:
    for name in _INTEGERS:
        value = getattr(args, name)
        limit = MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if value is not None and not 0 <= value <= limit:
            raise ArgumentsError(
                f"{_flag(name)} {value} cannot be planned; use 0 to {limit}"
            )


def _check_divisions(args: argparse.Namespace, query_groups: int) -> None:
    hidden = args.hidden_size
    heads = args.num_attention_heads
    _check_divides("--num-query-groups", query_groups, heads)
    # With --kv-channels, the number of heads need not divide the hidden size.
    if not args.kv_channels:
        _check_divides("--num-attention-heads", heads, hidden)
    _check_at_most("--num-attention-heads", heads, hidden)
    if args.num_experts:
        _check_at_most("--moe-router-topk", args.moe_router_topk or 1, args.num_experts)


def _check_divides(flag: str, value: int, size: int) -> None:
    if size % value:
        raise ArgumentsError(
            f"{flag} {value} does not divide {size}, which Megatron rejects; give the model's value"
        )


def _check_at_most(flag: str, value: int, limit: int) -> None:
    if value > limit:
        raise ArgumentsError(
            f"{flag} {value} is more than {limit}, which Megatron rejects; give the model's value"
        )


def _padded_vocabulary(args: argparse.Namespace) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    # Megatron also multiplies this unit by the tensor-parallel size, which is unknown
    # here.
    unit = args.make_vocab_size_divisible_by or 128
    return -(-int(args.vocab_size) // unit) * unit


def _ffn_size(args: argparse.Namespace) -> int:
    if args.ffn_hidden_size is not None:
        return int(args.ffn_hidden_size)
    if args.swiglu:  # Megatron's rule
        return int(8 * args.hidden_size / 3 / 64) * 64
    return 4 * int(args.hidden_size)


def _learned_positions(args: argparse.Namespace) -> int:
    if args.position_embedding_type != "learned_absolute":
        return 0
    return int(args.max_position_embeddings or args.seq_length or 0)


def _window_size(args: argparse.Namespace) -> int:
    """Return how many earlier tokens a query sees in sliding attention, or 0 for all of them."""
    tokens_before = (args.window_size or "0").strip("( )").partition(",")[0]
    try:
        return max(0, int(tokens_before))  # -1 means all, too
    except ValueError:
        raise ArgumentsError(
            f"--window-size {args.window_size} is not a window; give the tokens before and after, "
            "such as 128,0"
        ) from None


def _window_share(args: argparse.Namespace, num_layers: int) -> float:
    """Return the share of layers with sliding attention."""
    if args.window_attn_skip_freq is None:
        return 1.0
    # As in Megatron, a number n means that every n-th layer attends to all tokens. A
    # list has a 1 for every layer with sliding attention.
    skips = _by_layer("--window-attn-skip-freq", args.window_attn_skip_freq, num_layers)
    if isinstance(skips, int):
        num_sliding = sum(layer % skips != 0 for layer in range(1, num_layers + 1))
    else:
        num_sliding = sum(mark != 0 for mark in skips)
    return num_sliding / num_layers


def _kinds(
    args: argparse.Namespace,
    pattern: str,
    num_layers: int,
) -> tuple[LayerKind, ...]:
    """Return the layers' kinds, from a hybrid model's pattern or from other flags."""
    if pattern:
        return _hybrid_kinds(args, pattern)
    if not args.num_experts:
        without_experts: list[LayerKind] = ["dense"] * num_layers
        return tuple(without_experts)
    marks = _by_layer("--moe-layer-freq", args.moe_layer_freq, num_layers)
    if isinstance(marks, int):
        # As in Megatron, every n-th layer has experts, starting with the first layer.
        period = marks
        marks = [int(layer % period == 0) for layer in range(num_layers)]
    kinds: list[LayerKind] = []
    for has_experts in marks:
        kinds.append("moe" if has_experts else "dense")
    return tuple(kinds)


def _hybrid_kinds(args: argparse.Namespace, pattern: str) -> tuple[LayerKind, ...]:
    unknown = set(pattern) - set(HYBRID_KINDS)
    if unknown:
        raise ArgumentsError(
            f"--hybrid-layer-pattern contains {min(unknown)!r}; the planner supports "
            f"{' '.join(HYBRID_KINDS)}"
        )
    if "E" in pattern and not args.num_experts:
        raise ArgumentsError(
            "--hybrid-layer-pattern has expert layers (E); add --num-experts"
        )
    return tuple(HYBRID_KINDS[letter] for letter in pattern)


def _by_layer(flag: str, text: str, num_layers: int) -> int | list[int]:
    """Parse a number, or an expression that gives one mark per layer, such as `([0]*3+[1]*58)`."""
    try:
        marks: int | list[int] = _evaluated(
            ast.parse(text.strip("'\""), mode="eval").body
        )
        is_valid = marks >= 1 if isinstance(marks, int) else len(marks) == num_layers
        if not is_valid:
            raise ValueError(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        # Python's parser raises MemoryError if brackets are nested too deeply.
        raise ArgumentsError(
            f"{flag} {text[:200]} does not describe {num_layers} layers; use a number or "
            f"a list, such as ([0]*1+[1]*{num_layers - 1})"
        ) from error
    return marks


def _evaluated(node: ast.expr) -> Any:
    """Evaluate an expression made of numbers, lists, sums and products.

    Megatron evaluates the text as Python, but here it may come from an untrusted file.

    Raises:
        ValueError: The expression contains anything else, or one of its lists is too long.
        TypeError: An operation does not support its operands.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        marks = []
        for element in node.elts:
            mark = _evaluated(element)
            if not isinstance(mark, int):
                raise ValueError(ast.dump(element))
            marks.append(mark)
        return marks
    if isinstance(node, ast.BinOp):
        left = _evaluated(node.left)
        right = _evaluated(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            _check_length(left, right)
            return left * right
    raise ValueError(ast.dump(node))


def _check_length(left: int | list[int], right: int | list[int]) -> None:
    """Check a list's length before an expression such as [0]*10**12 exhausts the memory.

    Raises:
        ValueError: The list would be too long.
    """
    for marks, times in ((left, right), (right, left)):
        if (
            isinstance(marks, list)
            and isinstance(times, int)
            and times * len(marks) > MAX_LAYERS
        ):
            raise ValueError(f"{times} x {len(marks)} layers")
