"""Replaces `pretrain_gpt.py` if no Megatron-LM tree is present; uses the wheel's training loop.

Since 0.17, the wheel has contained upstream's training loop (`megatron.training`), but not the
script that defines the model, the step and the data. This module replaces that script for
pretraining on text; `refuse` rejects settings that need the script itself.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import import_module as import_spec
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import pretrain, stimer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_ext import devices
from megatron_ext.errors import ArgumentsError
from megatron_ext.upstream.signatures import mtp_on_this_rank, parameters

# A loss this many times larger than the largest so far is a spike; this is upstream's value.
_SPIKE = 10

# Setting that only upstream's script handles -> the value that turns it off.
_SCRIPT_ONLY = {
    "dataloader_inter_document_masking": False,
    "dynamic_context_parallel": False,
    "fim_data": False,
    "hybrid_context_parallel": False,
    "logits_load_dir": None,
    "sft": False,
    "use_legacy_models": False,
}

# Other settings that only upstream's script handles, for wheels without model builders
# (0.17, 0.18).
_BUILDERS_ONLY = {
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "record_memory_history": False,
    "yaml_cfg": None,
}


_RESTART = "--inprocess-restart"


def main() -> None:
    """Train GPT with upstream's loop; flags are read from `sys.argv`, as in upstream's script.

    With `--inprocess-restart`, training restarts after a rank is lost.
    """
    if _RESTART not in sys.argv:
        _train()
        return
    restarts = import_module("megatron.training.inprocess_restart")
    # Each attempt parses the flags again, because ranks may have new numbers. Pass a lambda,
    # because NVRx looks for its own classes in annotations, which are strings in this file.
    train, store = restarts.maybe_wrap_for_inprocess_restart(
        lambda store: _train(store)  # noqa: PLW0108
    )
    train(store)


def _train(restart_store: Any = None) -> None:
    """Train; `restart_store` outlives restarts and connects the ranks in each attempt."""
    if restart_store is not None:
        _config.cache_clear()  # it holds the previous attempt's arguments
        # Megatron reduces the start time over all ranks that have set it. A former
        # reserve rank has not set its start time, so the other ranks would wait for it.
        # Therefore, set it on every rank.
        import_module("megatron.training.training").set_startup_timestamps(time.time())

    # This attribute makes upstream call the function on every rank: core's dataset
    # builder is collective, and `is_built_here` decides which ranks read.
    _datasets.is_distributed = True  # type: ignore[attr-defined]
    providers: dict[str, Any] = {
        "train_valid_test_dataset_provider": _datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": _step,
        "get_embedding_ranks": _embedding_ranks,
        "store": restart_store,
    }
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    arguments = import_module("megatron.training.arguments")
    if not hasattr(arguments, "parse_and_validate_args"):  # 0.17
        pretrain(model_provider=_model, args_defaults=defaults, **providers)
        return
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    refuse(args)
    argument_utils = import_module("megatron.training.argument_utils")
    make_container = argument_utils.pretrain_cfg_container_from_args
    if hasattr(argument_utils, "gpt_config_from_args"):  # it accepts a builder
        container = make_container(args, argument_utils.gpt_config_from_args(args))
        pretrain(container, **providers)
    else:
        pretrain(make_container(args), model_provider=_model, **providers)


def refuse(args: Namespace) -> None:
    """Reject settings that only upstream's own script supports.

    Raises:
        ArgumentsError: One line for each setting.
    """
    settings = dict(_SCRIPT_ONLY)
    argument_utils = import_module("megatron.training.argument_utils")
    if not hasattr(argument_utils, "gpt_config_from_args"):
        settings.update(_BUILDERS_ONLY)
    lines = []
    for name, off_value in settings.items():
        value = getattr(args, name, off_value)
        if value in (off_value, None):
            continue
        flag = f"--{name.replace('_', '-')}"
        lines.append(
            f"{flag} needs upstream's own pretrain_gpt.py, which the wheel lacks: run "
            "`megatron-ext upstream fetch`, or set MEGATRON_LM_PATH"
        )
    if lines:
        raise ArgumentsError("\n".join(lines))


# -- model -----------------------------------------------------------------------------------------


def _model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build one chunk, for releases whose wheel has no model builder."""
    args = get_args()
    refuse(args)
    print_rank_0("building GPT model ...")
    config = config or core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    return GPTModel(
        config=config,
        transformer_layer_spec=_layers(args, config, use_te, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=_mtp(args, config, use_te, vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _layers(
    args: Namespace,
    config: Any,
    use_te: bool,
    vp_stage: int | None,
) -> Any:
    if args.spec is not None:
        return import_spec(args.spec)
    if args.num_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    kind = "with_transformer_engine" if use_te else "local"
    names = parameters(f"{gpt_layer_specs.__name__}:get_gpt_layer_{kind}_submodules")
    # The parameters have the same names as the configuration's fields. `fp8` is
    # deprecated, and passing it triggers a warning.
    settings = {}
    for name in names:
        if hasattr(config, name):
            settings[name] = getattr(config, name)
    settings.pop("fp8", None)
    make_spec = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")
    return make_spec(**settings)


def _mtp(
    args: Namespace,
    config: Any,
    use_te: bool,
    vp_stage: int | None,
) -> Any:
    if args.mtp_num_layers is None:
        return None
    layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=use_te,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config,
        layers[-1],
        use_transformer_engine=use_te,
        vp_stage=vp_stage,
    )


def _embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks with a copy of the word embedding: both ends, and the ranks with MTP."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        config = core_transformer_config_from_args(args)
        ranks.update(get_mtp_ranks(pp_ranks, config))
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
    return sorted(ranks)


# -- a step ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _config() -> Any:
    return core_transformer_config_from_args(get_args())


def _step(
    data_iterator: Iterator[Any] | None,
    chunk: torch.nn.Module,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[..., Any]]:
    """Fetch a micro-batch and run a chunk on it, or return the chunk's schedule plan."""
    args = get_args()
    timer = get_timers()("batch-generator", log_level=2)
    num_samples = args.micro_batch_size
    # Since 0.18, evaluations may use a different micro-batch size.
    if not chunk.training:
        num_samples = getattr(args, "eval_micro_batch_size", num_samples)
    timer.start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(chunk, "vp_stage")
        batch = _batch(data_iterator, vp_stage, num_samples)
        if batch and args.context_parallel_size > 1:
            batch = _part_of_cp_rank(batch)
    timer.stop()
    compute: Any = chunk.build_schedule_plan if return_schedule_plan else chunk
    with stimer:
        output = compute(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            loss_mask=batch.get("loss_mask"),
        )
    loss = partial(_loss, args, batch.get("loss_mask"))
    return output, loss


def _part_of_cp_rank(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this context-parallel rank's part of every sequence."""
    # Some releases do not accept the group, and some have no hybrid context parallelism.
    options = {
        "cp_group": parallel_state.get_context_parallel_group(),
        "is_hybrid_cp": False,
    }
    names = parameters("megatron.core.utils:get_batch_on_this_cp_rank")
    accepted = {}
    for name, value in options.items():
        if name in names:
            accepted[name] = value
    part: dict[str, torch.Tensor] = get_batch_on_this_cp_rank(batch, **accepted)
    return part


def _fields_read(vp_stage: int | None) -> list[str]:
    """Return the batch fields that a stage reads.

    Only the first stage, the last stage and stages with MTP read fields.
    """
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    has_mtp = mtp_on_this_rank(_config(), vp_stage=vp_stage)
    names = []
    if parallel_state.is_pipeline_first_stage(**stage) or has_mtp:
        names += ["tokens", "position_ids"]
    if parallel_state.is_pipeline_last_stage(**stage) or has_mtp:
        names += ["labels", "loss_mask"]
    if names and get_args().create_attention_mask_in_dataloader:
        names.append("attention_mask")
    return names


def _batch(
    data_iterator: Iterator[Any] | None,
    vp_stage: int | None,
    num_samples: int,
) -> dict[str, torch.Tensor]:
    """Fetch a stage's fields, `[b, s]` each.

    The first tensor-parallel rank reads them and broadcasts them to its group.
    """
    args = get_args()
    names = _fields_read(vp_stage)
    if not names:
        return {}
    # The other tensor-parallel ranks have no iterator; they receive the samples.
    samples = next(data_iterator) if data_iterator is not None else None
    device = devices.current().torch_device(args.local_rank)
    length = args.seq_length
    dtypes = {"loss_mask": torch.float32, "attention_mask": torch.bool}
    shapes = {"attention_mask": (num_samples, 1, length, length)}
    batch = {}
    for name in names:
        if samples is not None:
            batch[name] = samples[name].to(device, non_blocking=True)
        else:
            shape = shapes.get(name, (num_samples, length))
            dtype = dtypes.get(name, torch.int64)
            batch[name] = torch.empty(shape, dtype=dtype, device=device)
        if args.tensor_model_parallel_size > 1:
            dist.broadcast(
                batch[name],
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
    return batch


def _loss(
    args: Namespace,
    loss_mask: torch.Tensor | None,
    output: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses `[b, s]`, the number of tokens, and a report with both."""
    # Return the sum rather than the mean, because the schedule divides by the number of tokens.
    assert loss_mask is not None, "only the last stage has a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    rerun_machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        rejected = {"NaN": torch.isnan, "Inf": torch.isinf}
        for value, is_rejected in rejected.items():
            rerun_machine.validate_result(
                result=loss,
                rejection_func=is_rejected,
                message=f"found {value} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        is_spiky = partial(
            rerun_machine.is_unexpectedly_large,
            threshold=_SPIKE,
            context="loss",
        )
        rerun_machine.validate_result(
            result=loss,
            rejection_func=is_spiky,
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    reported_loss = loss.clone().detach()
    report = torch.cat([reported_loss.view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


# -- data ------------------------------------------------------------------------------------------


def _datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test datasets that this rank reads."""
    args = get_args()

    def is_built_here() -> bool:
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return False
        return bool(_fields_read(vp_stage))

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        dataset_class,
        num_samples,
        is_built_here,
        _dataset_config(args),
    )
    datasets = builder.build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path:
        path = Path(args.per_dataset_sequences_path)
        sequences_per_dataset = json.loads(path.read_text())
    settings = {}
    for field in fields(GPTDatasetConfig):
        if hasattr(args, field.name):
            settings[field.name] = getattr(args, field.name)
    # This is 0 without sequence parallelism.
    sequence_parallel_size = args.tensor_model_parallel_size * args.sequence_parallel
    # Add the fields whose arguments have different names, or that combine several arguments.
    settings |= {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": sequences_per_dataset,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": sequence_parallel_size,
    }
    return GPTDatasetConfig(**settings)
