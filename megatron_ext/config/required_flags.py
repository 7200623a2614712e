"""Checks flags that Megatron requires and sizes that it asserts, before torch is imported.

Upstream's scripts check some requirements in `validate_args`, without naming the flag. Others cause
failures only later, for example when Megatron divides by a missing `--eval-interval`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.flags import attribute_of
from megatron_ext.config.refusals import Refusal
from megatron_ext.rules import read_rules

# If one of these is set, Megatron reads arguments from a checkpoint or a file.
_ELSEWHERE = ("use_checkpoint_args", "yaml_cfg")

_NEEDED = read_rules("""
    --num-layers: !num_layers & !encoder_num_layers & !hybrid_layer_pattern &
    !heterogeneous_layers_config_path & !heterogeneous_layers_config_encoded_json
        Megatron cannot build a model without it; give it a value of at least 1
    --hidden-size: !hidden_size & !heterogeneous_layers_config_path &
    !heterogeneous_layers_config_encoded_json
        Megatron cannot build a model without it; give it a value of at least 1
    --num-attention-heads: !num_attention_heads & !heterogeneous_layers_config_path &
    !heterogeneous_layers_config_encoded_json
        Megatron cannot build a model without it; give it a value of at least 1
    --max-position-embeddings: !max_position_embeddings
        Megatron needs it for every kind of position embedding; give it the value of --seq-length
    --seq-length: !seq_length & !encoder_seq_length
        Megatron has no default for it; give it a value of at least 1
    --micro-batch-size: !micro_batch_size
        Megatron has no default for it; give it a value of at least 1
    --train-iters: !train_iters & !train_samples & !skip_train
        Megatron would not know when to stop; add --train-iters N or --train-samples N
    --eval-interval: !eval_interval & !skip_train & !full_validation
        Megatron divides by it when it counts evaluation samples, even with --eval-iters 0; add
        --eval-interval 1000
    --save-interval: save & !save_interval
        Megatron needs it with --save; add --save-interval 1000
""")


_IMPOSSIBLE = read_rules("""
    --seq-length above --max-position-embeddings: max_position_embeddings &
    seq_length>max_position_embeddings
        tokens would have positions that the model does not have; give both the same value
    --expert-model-parallel-size above 1 without --num-experts: expert_model_parallel_size>1 &
    !num_experts
        there are no experts to distribute; add --num-experts N, or remove it
""")


def missing_flags(
    args: Namespace, defaults: Mapping[str, Any] | None
) -> Iterator[Refusal]:
    """Yield a refusal for each required flag that is missing and each impossible size.

    Args:
        args: The settings from the flags.
        defaults: A training script's values for arguments that are not given. If None, the
            arguments do not come from a script, so any of them may be missing.
    """
    if defaults is None:
        return
    if any(getattr(args, name, None) for name in _ELSEWHERE):
        return
    # A value of None means that the flag is absent, so the script's default applies.
    user_args = {name: value for name, value in vars(args).items() if value is not None}
    settings = Namespace(**{**defaults, **user_args})
    for rule in _NEEDED:
        if rule.refuses(settings):
            name = attribute_of(rule.flag)
            value = getattr(settings, name, None)
            problem = f"{rule.flag} is missing: {rule.reason}"
            if value is not None:
                problem = f"{rule.flag} is {value}: must be at least 1"
            yield Refusal(name, problem, rule.remedy)
    for rule in _IMPOSSIBLE:
        if rule.refuses(settings):
            # The rule's text also says what is wrong: "--seq-length above ...".
            flag, _, _condition = rule.flag.partition(" ")
            problem = f"{rule.flag}: {rule.reason}"
            yield Refusal(attribute_of(flag), problem, rule.remedy)
    # Megatron asserts this if no flag sets the head size.
    hidden = user_args.get("hidden_size")
    heads = user_args.get("num_attention_heads")
    if not hidden or not heads or getattr(settings, "kv_channels", None):
        return
    if hidden % heads:
        next_multiple = (hidden // heads + 1) * heads
        yield Refusal(
            "hidden_size",
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}",
            f"use --hidden-size {next_multiple}, or add --kv-channels N",
        )
