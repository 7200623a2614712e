"""Reads a model from an example, a Hugging Face config or Megatron's flags."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import ArgumentsError
from megatron_ext.files import read_json
from megatron_ext.planning.hugging_face import flags_of_config
from megatron_ext.planning.model_flags import sizes_of_flags

if TYPE_CHECKING:
    from megatron_ext.planning.model_sizes import ModelSizes

_MAX_FILE_BYTES = 1 << 20
_EXAMPLE_TIMEOUT_S = 30
_UNKNOWN_SIZE_CODE = 3
"""Exit code of the script below if the example does not have the requested size."""
# If the size does not exist, the script prints all sizes and exits with the code above.
# A model.env may expand three arrays that `examples/train.sh` fills with flags that do not
# describe the model, so they are empty here.
_EXAMPLE_SCRIPT = (
    'source "$1"; SIZE=${2:-$DEFAULT_SIZE}; LLM_TRAINING=() SHARDED=() TINY_TRAINING=(); '
    'declare -F "size_$SIZE" >/dev/null || { compgen -A function size_ | cut -c6- | '
    f'paste -sd" "; exit {_UNKNOWN_SIZE_CODE}; }}; VOCAB_SIZE=; size_"$SIZE"; '
    'printf "%s\\n" "$TITLE $SIZE" '
    '--vocab-size "$VOCAB_SIZE" "${ARCHITECTURE[@]}" "${MODEL[@]}"'
)
"""Prints an example's title and flags, which the example stores in shell arrays."""
_UNKNOWN_FEATURES = {
    "peft_type": "an adapter (LoRA)",
    "lora_rank": "an adapter (LoRA)",
    "compress_ratios": "compressed attention (DeepSeek-V4)",
    "hc_mult": "hyper-connections (DeepSeek-V4)",
    "index_topk": "sparse attention",
    "linear_num_value_heads": "linear attention",
    "experimental_attention_variant": "sparse or linear attention",
    "linear_attention_freq": "linear attention",
    "linear_attn_config": "linear attention",
    "moe_num_experts": "Ernie's kind of experts",
    "enable_hyper_connections": "hyper-connections",
}
"""Key or flag -> the feature that it requests. The formulas do not model these features."""


def read_model(
    source: Path | None,
    size: str | None,
    flags: Sequence[str],
) -> ModelSizes:
    """Return a model's sizes.

    Args:
        source: A folder with a `model.env` (an example) or `config.json` (Hugging Face), or the
            path to a `config.json`. None: the flags describe the model.
        size: An example's size. None: the default size.
        flags: Megatron's flags, which override the source's flags.

    Raises:
        ArgumentsError: The source cannot be read, a size is missing, or the planner does not
            support this model.
    """
    _refuse_unknown_flags(flags)
    if source is None:
        if not flags:
            raise ArgumentsError(
                "no model is given; use --model examples/llama3, --model config.json, or "
                "Megatron's flags after --, such as -- --num-layers 32 --hidden-size 4096 ..."
            )
        return sizes_of_flags(flags, "flags")
    if (source / "model.env").is_file():
        name, source_flags = _read_example(source, size)
    elif not source.exists():
        raise ArgumentsError(
            f"--model {source} does not exist; use an example in a clone of megatron_ext (--model "
            "CLONE/examples/llama3), a Hugging Face config.json, or Megatron's flags after --"
        )
    elif size is not None:
        raise ArgumentsError(
            f"--size {size} applies only to a folder with model.env; remove this flag"
        )
    else:
        name, source_flags = _read_config(source)
    # argparse uses a flag's last value, so the user's flags override the source's
    # flags.
    return sizes_of_flags([*source_flags, *flags], name)


def _refuse_unknown_flags(flags: Sequence[str]) -> None:
    # Otherwise, these flags would be ignored, and the forecast would be for a different
    # model.
    for flag in flags:
        if not flag.startswith("--"):
            continue
        name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if name in _UNKNOWN_FEATURES:
            raise ArgumentsError(
                f"{flag}: the planner does not support {_UNKNOWN_FEATURES[name]}; remove this flag "
                "for a forecast without this feature"
            )


def _read_config(source: Path) -> tuple[str, list[str]]:
    """Return a Hugging Face model's name and flags."""
    path = source / "config.json" if source.is_dir() else source
    try:
        config = read_json(path, _MAX_FILE_BYTES)
        # In a multimodal model, this part describes the language model.
        config |= config.get("text_config") or {}
        for key, feature in _UNKNOWN_FEATURES.items():
            if config.get(key):
                raise ArgumentsError(
                    f"--model {source} has {key}: the planner does not support {feature}; instead "
                    "of --model, give the flags of a model without this feature after --"
                )
        flags = flags_of_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        # A KeyError's text is only the key.
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        raise ArgumentsError(
            f"--model {source} does not describe a model ({reason}); use a folder with model.env, "
            "such as examples/llama3, a Hugging Face config.json, or Megatron's flags after --"
        ) from error
    return str(config.get("_name_or_path") or path.parent.name or path.stem), flags


def _read_example(folder: Path, size: str | None) -> tuple[str, list[str]]:
    """Return an example's name and flags."""
    path = folder / "model.env"
    # The path is $1, and the size is $2. Bash calls the script "plan" in its messages.
    command = ["bash", "-c", _EXAMPLE_SCRIPT, "plan", str(path), size or ""]
    try:
        shell = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_EXAMPLE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ArgumentsError(
            f"{path} did not finish within {_EXAMPLE_TIMEOUT_S} s; run it with bash to see why"
        ) from error
    if shell.returncode == _UNKNOWN_SIZE_CODE:
        # The script has printed the example's sizes.
        raise ArgumentsError(
            f"--size {size}: {folder} has {shell.stdout.strip()}; use one of these"
        )
    if shell.returncode:
        raise ArgumentsError(
            f"{path} cannot be read: {shell.stderr.strip()}; run it with bash to see why"
        )
    name, *flags = shell.stdout.splitlines()
    return name, flags
