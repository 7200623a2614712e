"""`pretrain_gpt.py` on the wheel's own `megatron.training`, without a Megatron-LM tree.

Since 0.17 the wheel contains upstream's training loop, but not the script that defines the model,
the step and the data. This module replaces that script for pretraining on text; its other features
need the script itself (`refuse`).
"""

from __future__ import annotations

import json
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
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
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

# Times the largest loss so far that count as a spike; upstream's own.
_SPIKE = 10

# Settings that upstream's script itself acts on, with the value that has no effect.
_SCRIPT_ONLY = {
    "dataloader_inter_document_masking": False,
    "dynamic_context_parallel": False,
    "fim_data": False,
    "hybrid_context_parallel": False,
    "logits_load_dir": None,
    "sft": False,
    "use_legacy_models": False,
}

# As above, where the wheel has no builders of models (0.17, 0.18).
_BUILDERS_ONLY = {
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "record_memory_history": False,
    "yaml_cfg": None,
}


def main() -> None:
    """Train GPT with upstream's loop; flags are read from `sys.argv`, as upstream's script does."""
    # Upstream then calls it on every rank: core's builder of datasets is collective, and decides
    # by `built_here` who reads.
    _datasets.is_distributed = True  # type: ignore[attr-defined]
    given: dict[str, Any] = {
        "train_valid_test_dataset_provider": _datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": _step,
        "get_embedding_ranks": _embedding_ranks,
    }
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    training = import_module("megatron.training.arguments")
    if not hasattr(training, "parse_and_validate_args"):
        pretrain(model_provider=_model, args_defaults=defaults, **given)
        return
    args = training.parse_and_validate_args(args_defaults=defaults)
    refuse(args)
    containers = import_module("megatron.training.argument_utils")
    make_container = containers.pretrain_cfg_container_from_args
    if hasattr(containers, "gpt_config_from_args"):  # the container knows a builder
        pretrain(make_container(args, containers.gpt_config_from_args(args)), **given)
    else:
        pretrain(make_container(args), model_provider=_model, **given)


def refuse(args: Namespace) -> None:
    """Refuse settings that only upstream's own script supports.

    Raises:
        ArgumentsError: One line for each setting.
    """
    settings = dict(_SCRIPT_ONLY)
    if not hasattr(import_module("megatron.training.argument_utils"), "gpt_config_from_args"):
        settings.update(_BUILDERS_ONLY)
    used = [name for name, off in settings.items() if getattr(args, name, off) not in (off, None)]
    if used:
        raise ArgumentsError(
            "\n".join(
                f"--{name.replace('_', '-')} needs upstream's own pretrain_gpt.py, which the wheel "
                "lacks: run `megatron-ext upstream fetch`, or set MEGATRON_LM_PATH"
                for name in used
            )
        )


# -- model -----------------------------------------------------------------------------------------


def _model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build one chunk, for releases whose wheel has no builder."""
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


def _layers(args: Namespace, config: Any, use_te: bool, vp_stage: int | None) -> Any:
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
    taken = parameters(f"{gpt_layer_specs.__name__}:get_gpt_layer_{kind}_submodules")
    # They are named as in the configuration, but for one that is deprecated.
    given = {name: getattr(config, name) for name in taken if hasattr(config, name)}
    given.pop("fp8", None)
    return getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")(**given)


def _mtp(args: Namespace, config: Any, use_te: bool, vp_stage: int | None) -> Any:
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
        config, layers[-1], use_transformer_engine=use_te, vp_stage=vp_stage
    )


def _embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks with a copy of the word embedding: the ends, and those of MTP."""
    args, ranks = get_args(), {pp_ranks[0]}
    if len(pp_ranks) > 1:
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
    return sorted(ranks)


# -- a step ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _config() -> Any:
    return core_transformer_config_from_args(get_args())


def _step(
    data_iterator: Iterator[Any] | None, chunk: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Fetch a micro-batch and run a chunk on it, or return the chunk's schedule plan."""
    args, timer = get_args(), get_timers()("batch-generator", log_level=2)
    samples = args.micro_batch_size
    if not chunk.training:  # since 0.18 an evaluation may have a size of its own
        samples = getattr(args, "eval_micro_batch_size", samples)
    timer.start()
    with stimer(bdata=True):
        batch = _batch(data_iterator, get_attr_wrapped_model(chunk, "vp_stage"), samples)
        if batch and args.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            options = {"cp_group": group, "is_hybrid_cp": False}
            taken = parameters("megatron.core.utils:get_batch_on_this_cp_rank")
            batch = get_batch_on_this_cp_rank(
                batch, **{name: value for name, value in options.items() if name in taken}
            )
    timer.stop()
    run: Any = chunk.build_schedule_plan if return_schedule_plan else chunk
    with stimer:
        output = run(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            loss_mask=batch.get("loss_mask"),
        )
    return output, partial(_loss, args, batch.get("loss_mask"))


def _fields_read(vp_stage: int | None) -> list[str]:
    """Return the fields that a stage reads; only the first, the last and MTP stages read any."""
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    predicts = mtp_on_this_rank(_config(), vp_stage=vp_stage)
    names = []
    if parallel_state.is_pipeline_first_stage(**where) or predicts:
        names += ["tokens", "position_ids"]
    if parallel_state.is_pipeline_last_stage(**where) or predicts:
        names += ["labels", "loss_mask"]
    if names and get_args().create_attention_mask_in_dataloader:
        names.append("attention_mask")
    return names


def _batch(
    data_iterator: Iterator[Any] | None, vp_stage: int | None, samples: int
) -> dict[str, torch.Tensor]:
    """Fetch the fields of a stage, `[b, s]` each; one tensor-parallel rank reads and broadcasts."""
    args = get_args()
    names = _fields_read(vp_stage)
    if not names:
        return {}
    sample = next(data_iterator) if data_iterator is not None else None
    device = devices.current().torch_device(args.local_rank)
    shape = (samples, args.seq_length)
    kinds = {
        "loss_mask": (shape, torch.float32),
        "attention_mask": ((shape[0], 1, shape[1], shape[1]), torch.bool),
    }
    batch = {}
    for name in names:
        if sample is not None:
            batch[name] = sample[name].to(device, non_blocking=True)
        else:
            size, dtype = kinds.get(name, (shape, torch.int64))
            batch[name] = torch.empty(size, dtype=dtype, device=device)
        if args.tensor_model_parallel_size > 1:
            dist.broadcast(
                batch[name],
                parallel_state.get_tensor_model_parallel_src_rank(),
                group=parallel_state.get_tensor_model_parallel_group(),
            )
    return batch


def _loss(
    args: Namespace, loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses `[b, s]`, the number of tokens, and both as a report."""
    # The sum, not the mean: the schedule divides by the number of tokens.
    assert loss_mask is not None, "only the last stage has a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


# -- data ------------------------------------------------------------------------------------------


def _datasets(samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Build the datasets for training, validation and test that this rank reads."""
    args = get_args()

    def built_here() -> bool:
        first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0
        return first_of_tp and bool(_fields_read(vp_stage))

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    made = BlendedMegatronDatasetBuilder(kind, samples, built_here, _dataset_config(args)).build()
    print_rank_0("> finished creating GPT datasets ...")
    return made


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    renamed = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": get_tokenizer(),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": sequences and json.loads(Path(sequences).read_text()),
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    same = {
        f.name: getattr(args, f.name) for f in fields(GPTDatasetConfig) if hasattr(args, f.name)
    }
    return GPTDatasetConfig(**same | renamed)
