"""GPT and BERT from megatron.core, wrapped for mixed precision and data parallelism.

Follows `gpt_builders.py`, `pretrain_bert.py` and `get_model` of `megatron/training/training.py`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import import_module

from megatron_ext import devices
from megatron_ext.disaggregation import job as disaggregation
from megatron_ext.errors import ArgumentsError
from megatron_ext.runtime.folded import tie_embeddings

if TYPE_CHECKING:
    from megatron_ext.training.trainer_arguments import Model

__all__ = ["build_model", "fill", "transformer_config"]

_Config = TypeVar("_Config")


def fill(config: type[_Config], args: Namespace, **renamed: Any) -> _Config:
    """Make a dataclass of megatron.core from the arguments named like its fields."""
    names = (field.name for field in fields(config))  # type: ignore[arg-type]
    return config(**{name: getattr(args, name) for name in names if hasattr(args, name)} | renamed)


def transformer_config(args: Namespace) -> TransformerConfig:
    """Translate arguments to the model's configuration.

    Raises:
        ArgumentsError: megatron.core refuses the combination.
    """
    renamed: dict[str, Any] = {
        "persist_layer_norm": not args.no_persist_layer_norm,
        "deallocate_pipeline_outputs": True,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "num_moe_experts": args.num_experts,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "bias_activation_fusion": args.bias_gelu_fusion,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "inference_sampling_seed": args.seed,
    }
    if args.swiglu:
        renamed |= {
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_swiglu_fusion,
        }
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    try:
        config = fill(kind, args, **renamed)
    except (AssertionError, ValueError) as error:
        raise ArgumentsError(f"megatron.core refuses these flags: {error}") from error
    return config


def build_model(args: Namespace, model: Model, config: TransformerConfig) -> list[MegatronModule]:
    """Build this rank's model chunks, wrapped for mixed precision and data parallelism."""
    build = _build_gpt if model == "gpt" else _build_bert
    stages: Sequence[int | None] = range(args.virtual_pipeline_model_parallel_size or 0) or [None]
    device = devices.current().torch_device(args.local_rank)
    chunks = []
    for vp_stage in stages:
        where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunk = build(
            args,
            config=config,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.vp_stage = vp_stage
        if disaggregation.has_role("forward"):
            chunk.requires_grad_(False)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    chunks = [chunk.to(device) for chunk in chunks]
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    chunks = _wrap_data_parallel(args, config, chunks)
    tie_embeddings(chunks)
    return chunks


def _build_gpt(args: Namespace, config: TransformerConfig, **shape: Any) -> GPTModel:
    use_te = args.transformer_impl == "transformer_engine"
    where = {"use_transformer_engine": use_te, "vp_stage": shape["vp_stage"]}
    specs = {**where, "normalization": args.normalization}
    if args.spec is not None:
        layer_spec = import_module(tuple(args.spec))
    elif args.num_experts:
        layer_spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, **specs)
    else:
        kinds = {"qk_layernorm": args.qk_layernorm}
        kinds["multi_latent_attention"] = args.multi_latent_attention
        if use_te:
            layer_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**kinds)
        else:
            layer_spec = gpt_layer_specs.get_gpt_layer_local_spec(
                **kinds, normalization=args.normalization
            )
    mtp_block_spec = None
    if args.mtp_num_layers is not None:
        last_layer = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **specs)[-1]
        mtp_block_spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, last_layer, **where)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp_block_spec,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **shape,
    )


def _build_bert(args: Namespace, **shape: Any) -> BertModel:
    if args.spec == ["local"] or (args.spec is None and args.transformer_impl == "local"):
        layer_spec = bert_layer_specs.bert_layer_local_spec
    elif args.spec is None:
        layer_spec = bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
    else:
        layer_spec = import_module(tuple(args.spec))
    return BertModel(transformer_layer_spec=layer_spec, num_tokentypes=2, **shape)


def _wrap_data_parallel(
    args: Namespace, config: TransformerConfig, chunks: list[MegatronModule]
) -> list[MegatronModule]:
    bucket_size = None  # one bucket: nothing to overlap with
    if args.overlap_grad_reduce and args.ddp_num_buckets is not None:
        parameters = sum(p.nelement() for chunk in chunks for p in chunk.parameters())
        bucket_size = parameters // args.ddp_num_buckets
    elif args.overlap_grad_reduce:
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        bucket_size = max(40_000_000, 1_000_000 * replicas)
    ddp_config = fill(
        DistributedDataParallelConfig,
        args,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=position > 0)
        for position, chunk in enumerate(chunks)
    ]
