"""The sizes of a model, from an example, Megatron's flags or a Hugging Face config."""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ext.errors import ArgumentsError
from megatron_ext.files import read_json

LayerKind = Literal["dense", "moe", "mamba", "attention", "mlp", "experts"]
_HYBRID: dict[str, LayerKind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes from which the weights, operations and activations of a model follow."""

    name: str
    hidden: int
    heads: int
    query_groups: int
    head_size: int
    """Of queries and keys, rotary part included."""
    value_size: int
    ffn: int
    """Width of the dense feed-forward network."""
    gated: bool
    """SwiGLU: two projections up, one down."""
    vocabulary: int
    """Padded."""
    is_tied: bool
    """Whether the output layer shares the embedding's weights."""
    learned_positions: int
    biases: bool
    qkv_biases: bool
    norm_weights: int
    """Vectors of a norm: 1 (RMSNorm) or 2 (LayerNorm)."""
    qk_norm: bool
    window: int
    """Keys that a query of a layer with sliding attention sees; 0: all before it."""
    window_share: float
    """Share of the attentions that slide."""
    kinds: tuple[LayerKind, ...]
    """Of each layer: `dense` and `moe` are attention and a feed-forward network, the latter's a
    mixture of experts; a layer of a hybrid model is `mamba`, `attention`, `mlp` or `experts`."""
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    """Of the shared experts together; 0: none."""
    expert_hidden: int
    """Width of what routed experts get: `hidden`, or that of a latent mixture."""
    scan_heads: int
    """Of a Mamba-2 layer."""
    scan_head_size: int
    scan_state: int
    scan_groups: int
    is_latent: bool
    """Multi-latent attention."""
    query_rank: int
    """0: queries are not compressed."""
    key_value_rank: int
    rotary_size: int
    mtp_layers: int
    sequence: int | None
    """Length in tokens, if the source gives one."""
    flags: tuple[str, ...]
    """Megatron's flags of this model."""

    @property
    def num_layers(self) -> int:
        """Layers, without those of multi-token prediction."""
        return len(self.kinds)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Of each layer: whether it has a mixture of experts."""
        return tuple(kind in ("moe", "experts") for kind in self.kinds)

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the layer in a head of multi-token prediction."""
        return "moe" if self.moe_layers[-1] else "dense"


_UNKNOWN = {
    "peft_type": "an adapter (LoRA)",
    "lora_rank": "an adapter (LoRA)",
    "compress_ratios": "compressed attention (DeepSeek-V4)",
    "hc_mult": "hyper-connections (DeepSeek-V4)",
    "index_topk": "sparse attention",
    "linear_num_value_heads": "linear attention",
    "experimental_attention_variant": "sparse or linear attention",
    "linear_attention_freq": "linear attention",
    "linear_attn_config": "linear attention",
    "moe_num_experts": "experts of Ernie's kind",
    "enable_hyper_connections": "hyper-connections",
}
"""What costs neither time nor memory as the formulas have it, by its key or flag."""


def read_model(source: Path | None, size: str | None, flags: Sequence[str]) -> ModelSizes:
    """Return the sizes of a model.

    Args:
        source: A folder with `model.env` (an example) or `config.json` (Hugging Face), or such a
            `config.json`; None: the flags say everything.
        size: Which size of an example; None: its default.
        flags: Megatron's flags, which win over those of the source.

    Raises:
        ArgumentsError: The source cannot be read, a size is missing, or the planner does not know
            such models.
    """
    for flag in flags:
        what = _UNKNOWN.get(flag.partition("=")[0].removeprefix("--").replace("-", "_"))
        if flag.startswith("--") and what is not None:
            raise ArgumentsError(
                f"{flag}: the planner does not know {what}; leave it out for a forecast without"
            )
    if source is None:
        if not flags:
            raise ArgumentsError(
                "there is no model; use --model examples/llama3, --model config.json, or flags of "
                "Megatron's behind --, such as -- --num-layers 32 --hidden-size 4096 ..."
            )
        return sizes_of_flags(flags, "flags")
    if (source / "model.env").is_file():
        own, name = _flags_of_example(source, size)
    else:
        path = source / "config.json" if source.is_dir() else source
        if size is not None:
            raise ArgumentsError(f"--size {size} is for a folder with model.env; leave it out")
        try:
            config = read_json(path, _MOST_BYTES)
            config |= config.get("text_config") or {}  # the language model of a multimodal one
            if unknown := next((key for key in _UNKNOWN if config.get(key)), None):
                raise ArgumentsError(
                    f"--model {source} has {unknown}: the planner does not know "
                    f"{_UNKNOWN[unknown]}; give flags of a model without it behind --, and no "
                    "--model"
                )
            own = flags_of_config(config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, KeyError):
                reason = f"it has no {error}"
            raise ArgumentsError(
                f"--model {source} gives no sizes ({reason}); use a folder with model.env, such as "
                "examples/llama3, a Hugging Face config.json, or Megatron's flags behind --"
            ) from error
        name = str(config.get("_name_or_path") or path.parent.name or path.stem)
    return sizes_of_flags([*own, *flags], name)


def _flags_of_example(folder: Path, size: str | None) -> tuple[list[str], str]:
    # The flags are arrays of a shell script, so the shell reads them.
    script = (
        'source "$1"; SIZE=${2:-$DEFAULT_SIZE}; LLM_TRAINING=() SHARDED=() TINY_TRAINING=(); '
        'declare -F "size_$SIZE" >/dev/null || { compgen -A function size_ | cut -c6- | '
        'paste -sd" "; exit 3; }; VOCAB_SIZE=; size_"$SIZE"; printf "%s\\n" "$TITLE $SIZE" '
        '--vocab-size "$VOCAB_SIZE" "${ARCHITECTURE[@]}" "${MODEL[@]}"'
    )
    command = ["bash", "-c", script, "plan", str(folder / "model.env"), size or ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as error:
        raise ArgumentsError(
            f"{folder / 'model.env'} did not end within 30 s; run it with bash"
        ) from error
    if done.returncode == 3:
        raise ArgumentsError(f"--size {size}: {folder} has {done.stdout.strip()}; use one of these")
    if done.returncode:
        raise ArgumentsError(
            f"{folder / 'model.env'} cannot be read: {done.stderr.strip()}; run it with bash"
        )
    name, *flags = done.stdout.splitlines()
    return flags, name


_INTEGERS = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels "
    "vocab-size padded-vocab-size make-vocab-size-divisible-by max-position-embeddings "
    "seq-length num-experts moe-router-topk moe-ffn-hidden-size "
    "moe-shared-expert-intermediate-size q-lora-rank kv-lora-rank qk-head-dim "
    "qk-pos-emb-head-dim v-head-dim mtp-num-layers moe-latent-size mamba-num-heads mamba-head-dim "
    "mamba-state-dim mamba-num-groups"
)
_SWITCHES = (
    "swiglu disable-bias-linear group-query-attention add-qkv-bias multi-latent-attention "
    "qk-layernorm untie-embeddings-and-output-weights"
)


_MOST_LAYERS, _MOST, _MOST_BYTES = 1024, 10**8, 1 << 20


def sizes_of_flags(flags: Sequence[str], name: str) -> ModelSizes:
    """Return the sizes that flags of Megatron's describe, with its defaults; others are ignored.

    Raises:
        ArgumentsError: A size is missing or no number.
    """
    # An error of argparse's would end the process, of which the planner is only a part.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in _INTEGERS.split():
        parser.add_argument(f"--{flag}", type=int)
    for flag in _SWITCHES.split():
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--hybrid-layer-pattern", "--hybrid-override-pattern")
    parser.add_argument("--window-size")
    parser.add_argument("--window-attn-skip-freq")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    try:
        given, _ = parser.parse_known_args(_joined(flags))
    except argparse.ArgumentError as error:
        raise ArgumentsError(f"{error}; give a whole number") from error
    # Behind a slash stand the layers of each depth of multi-token prediction.
    pattern, *depths = (given.hybrid_layer_pattern or "").replace("|", "").split("/")
    layers = len(pattern) or given.num_layers
    needed = {"--num-layers": layers, "--hidden-size": given.hidden_size}
    needed["--num-attention-heads"] = given.num_attention_heads
    needed["--padded-vocab-size"] = given.padded_vocab_size or given.vocab_size
    for flag, value in needed.items():
        if value is None or value < 1:
            raise ArgumentsError(f"{flag} is {value or 'missing'}; give the size of the model")
    for flag in _INTEGERS.split():
        value = getattr(given, flag.replace("-", "_"))
        most = _MOST_LAYERS if flag == "num-layers" else _MOST
        if value is not None and not 0 <= value <= most:
            raise ArgumentsError(f"--{flag} {value} cannot be planned; use 0 to {most}")
    hidden, heads = given.hidden_size, given.num_attention_heads
    experts = given.num_experts or 0
    groups = given.num_query_groups if given.group_query_attention else heads
    for flag, value, most, divides in (
        ("--num-query-groups", groups or 1, heads, True),
        ("--num-attention-heads", heads, hidden, not given.kv_channels),
        ("--moe-router-topk", given.moe_router_topk or 1, experts or _MOST, False),
    ):
        if value > most or (divides and most % value):
            rule = f"{value} does not divide {most}" if divides else f"{value} is more than {most}"
            raise ArgumentsError(f"{flag} {rule}, which Megatron refuses; give the model's own")
    if given.padded_vocab_size is None:
        unit = given.make_vocab_size_divisible_by or 128
        given.padded_vocab_size = -(-given.vocab_size // unit) * unit
    ffn = given.ffn_hidden_size
    if ffn is None:  # Megatron's rule
        ffn = int(8 * hidden / 3 / 64) * 64 if given.swiglu else 4 * hidden
    channels = given.kv_channels or hidden // heads
    rotary = (given.qk_pos_emb_head_dim or 64) if given.multi_latent_attention else 0
    latent = given.multi_latent_attention
    positions = given.max_position_embeddings or given.seq_length or 0
    try:  # -1 is a whole window, as none is
        window = max(0, int((given.window_size or "0").strip("( )").partition(",")[0]))
    except ValueError:
        raise ArgumentsError(
            f"--window-size {given.window_size} is no window; give the tokens before and after, "
            "such as 128,0"
        ) from None
    slides: Sequence[int] = [1] * layers
    if given.window_attn_skip_freq is not None:
        skip = _by_layer("--window-attn-skip-freq", given.window_attn_skip_freq, layers)
        slides = [n % skip for n in range(1, layers + 1)] if isinstance(skip, int) else skip
    scan_heads = given.mamba_num_heads or 2 * hidden // (given.mamba_head_dim or 64)
    return ModelSizes(
        name=name,
        hidden=hidden,
        heads=heads,
        query_groups=groups or 1,
        # Here and below: the defaults of Megatron's arguments, which its configuration does not all
        # share.
        head_size=(given.qk_head_dim or 128) + rotary if latent else channels,
        value_size=(given.v_head_dim or 128) if latent else channels,
        ffn=ffn,
        gated=given.swiglu,
        vocabulary=given.padded_vocab_size,
        is_tied=not given.untie_embeddings_and_output_weights,
        learned_positions=positions if given.position_embedding_type == "learned_absolute" else 0,
        biases=not given.disable_bias_linear,
        qkv_biases=given.add_qkv_bias or not given.disable_bias_linear,
        norm_weights=1 if given.normalization == "RMSNorm" else 2,
        qk_norm=given.qk_layernorm,
        window=window,
        window_share=sum(map(bool, slides)) / layers if window else 0.0,
        kinds=_kinds(given, pattern, layers),
        num_experts=experts,
        top_k=given.moe_router_topk or 2,
        expert_ffn=given.moe_ffn_hidden_size or ffn,
        shared_ffn=given.moe_shared_expert_intermediate_size or 0,
        expert_hidden=given.moe_latent_size or hidden,
        scan_heads=scan_heads,
        scan_head_size=given.mamba_head_dim or 64,
        scan_state=given.mamba_state_dim or 128,
        scan_groups=given.mamba_num_groups or 8,
        is_latent=latent,
        query_rank=given.q_lora_rank or 0,
        key_value_rank=given.kv_lora_rank or 32,
        rotary_size=rotary,
        mtp_layers=len(depths) or given.mtp_num_layers or 0,
        sequence=given.seq_length,
        flags=tuple(flags),
    )


def _kinds(given: argparse.Namespace, pattern: str, num_layers: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer, of the pattern of a hybrid model or of the other flags."""
    if pattern:
        if unknown := set(pattern) - set(_HYBRID):
            raise ArgumentsError(
                f"--hybrid-layer-pattern has {min(unknown)!r}; the planner knows "
                f"{' '.join(_HYBRID)}"
            )
        if "E" in pattern and not given.num_experts:
            raise ArgumentsError(
                "--hybrid-layer-pattern has E, layers of experts; add --num-experts"
            )
        return tuple(_HYBRID[letter] for letter in pattern)
    every: int | list[int] = [0] * num_layers
    if given.num_experts:
        every = _by_layer("--moe-layer-freq", given.moe_layer_freq, num_layers)
    if isinstance(every, int):
        every = [int(n % every == 0) for n in range(num_layers)]
    return tuple("moe" if mixes else "dense" for mixes in every)


def sizes_of_arguments(args: argparse.Namespace) -> ModelSizes:
    """Return the sizes of Megatron's parsed arguments.

    Raises:
        ArgumentsError: A size is missing.
    """
    flags = []
    values = (
        "moe-layer-freq normalization position-embedding-type "
        "hybrid-layer-pattern window-size window-attn-skip-freq"
    )
    for flag in [*_INTEGERS.split(), *values.split()]:
        value = getattr(args, flag.replace("-", "_"), None)
        if value is not None:
            flags += [f"--{flag}", str(value)]
    for flag in _SWITCHES.split():
        if getattr(args, flag.replace("-", "_"), False):
            flags.append(f"--{flag}")
    if not getattr(args, "add_bias_linear", True):
        flags.append("--disable-bias-linear")
    return sizes_of_flags(flags, "the model")


def _joined(flags: Sequence[str]) -> list[str]:
    """Return the flags with empty values, such as that of an example's vocabulary, left out."""
    words = list(flags)
    for index in range(len(words) - 1, 0, -1):
        if words[index : index + 1] == [""]:  # the end may be gone already
            del words[index - 1 : index + 1]
    return words


def _by_layer(flag: str, text: str, num_layers: int) -> int | list[int]:
    """Return a number, or the marks of all layers, of an expression as `([0]*3+[1]*58)`."""

    def value(node: ast.expr) -> Any:
        # Megatron evaluates the text as Python; here it may come out of anybody's file.
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(each) for each in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            for marks, times in ((left, right), (right, left)):
                # Before the product: ([0]*10**12) would not fit into memory.
                if isinstance(marks, list) and times * len(marks) > _MOST_LAYERS:
                    raise ValueError(text)
            return left * right
        raise ValueError(text)

    try:
        found: int | list[int] = value(ast.parse(text.strip("'\""), mode="eval").body)
        if found < 1 if isinstance(found, int) else len(found) != num_layers:
            raise ValueError(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        # MemoryError is what Python's parser raises for too many brackets.
        raise ArgumentsError(
            f"{flag} {text[:200]} does not describe {num_layers} layers; use a number or "
            f"a list, such as ([0]*1+[1]*{num_layers - 1})"
        ) from error
    return found


def _whole(config: Mapping[str, Any], name: str, most: int = _MOST) -> int:
    """Return a size of a configuration that is computed with.

    Raises:
        KeyError: It is missing.
        ValueError: It is not a whole number from 1 to `most`.
    """
    size = config[name]
    if not isinstance(size, int) or not 1 <= size <= most:
        raise ValueError(f"{name} is {str(size)[:40]!r}, not a whole number from 1 to {most}")
    return size


# Windows of models whose configuration has no `layer_types`: one layer of so many attends to all.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}


def flags_of_config(config: Mapping[str, Any]) -> list[str]:
    """Return Megatron's flags for the model of a Hugging Face `config.json`.

    Raises:
        KeyError: The configuration is not of a decoder that these flags describe.
        ValueError: A size is not a number that a model can have.
    """
    kind = str(config.get("model_type", ""))
    letters = {kind: letter for letter, kind in _HYBRID.items()} | {"moe": "E"}
    blocks = config.get("layers_block_type") or ()
    pattern = config.get("hybrid_override_pattern") or "".join(letters[block] for block in blocks)
    layers = len(pattern) or _whole(config, "num_hidden_layers", _MOST_LAYERS)
    heads = config["num_attention_heads"]
    flags = {
        "num-layers": layers,
        "hidden-size": config["hidden_size"],
        # Llama 4 has a size for layers without experts.
        "ffn-hidden-size": config.get("intermediate_size_mlp") or config["intermediate_size"],
        "num-attention-heads": heads,
        "padded-vocab-size": config["vocab_size"],
        "max-position-embeddings": config.get("max_position_embeddings", 4096),
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "mtp-num-layers": config.get("num_nextn_predict_layers"),
    }
    switches = []
    # Files do not say which networks have a gate: those with SiLU, and of those with GELU Gemma's.
    act = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if not pattern and (act == "silu" or kind.startswith("gemma")):
        switches.append("swiglu")
    if pattern:
        flags |= {
            "hybrid-layer-pattern": pattern,
            "mamba-num-heads": config["mamba_num_heads"],
            "mamba-head-dim": config["mamba_head_dim"],
            "mamba-state-dim": config["ssm_state_size"],
            "mamba-num-groups": config["n_groups"],
            "moe-latent-size": config.get("moe_latent_size"),
        }
    # Neither do those of GPT-OSS and Qwen2 say which biases their code has.
    if kind != "gpt_oss" and not config.get("use_bias"):
        switches.append("disable-bias-linear")
    if config.get("attention_bias") or kind.startswith("qwen2"):
        switches.append("add-qkv-bias")
    # A file leaves out what its class has by default.
    if not config.get("tie_word_embeddings", kind.startswith(("gemma", "cohere"))):
        switches.append("untie-embeddings-and-output-weights")
    if config.get("kv_lora_rank"):
        switches += ["multi-latent-attention", "qk-layernorm"]
        flags |= {
            "q-lora-rank": config.get("q_lora_rank"),
            "kv-lora-rank": config["kv_lora_rank"],
            "qk-head-dim": config["qk_nope_head_dim"],
            "qk-pos-emb-head-dim": config["qk_rope_head_dim"],
            "v-head-dim": config["v_head_dim"],
        }
    else:
        flags["kv-channels"] = config.get("head_dim")
        if config.get("num_key_value_heads", heads) != heads:
            switches.append("group-query-attention")
            flags["num-query-groups"] = config["num_key_value_heads"]
        if config.get("use_qk_norm") or kind.startswith(("qwen3", "gemma3")):
            switches.append("qk-layernorm")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        flags["window-size"] = f"{config['sliding_window']},0"
        flags["window-attn-skip-freq"] = config.get("sliding_window_pattern", _FULL_EVERY.get(kind))
        if types := config.get("layer_types"):
            flags["window-attn-skip-freq"] = str([int(one == "sliding_attention") for one in types])
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((config[name] for name in names if config.get(name)), None)
    if experts:
        widths = "moe_intermediate_size", "intermediate_size"
        width = _whole(config, next((name for name in widths if config.get(name)), widths[-1]))
        shared = config.get("shared_expert_intermediate_size") or config.get(
            "moe_shared_expert_intermediate_size"
        )
        several = int(kind.startswith("llama4"))
        if config.get("n_shared_experts"):
            several = _whole(config, "n_shared_experts")
        every = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
        first = config.get("first_k_dense_replace") or 0
        dense = config.get("mlp_only_layers") or ()
        marks = [int((n + 1) % every == 0 and n >= first and n not in dense) for n in range(layers)]
        flags |= {
            "num-experts": experts,
            "moe-router-topk": config["num_experts_per_tok"],
            "moe-ffn-hidden-size": width,
            "moe-shared-expert-intermediate-size": shared or several * width or None,
            "moe-layer-freq": str(marks),
        }
    words = [word for key, value in flags.items() if value for word in (f"--{key}", str(value))]
    return words + [f"--{switch}" for switch in switches]
