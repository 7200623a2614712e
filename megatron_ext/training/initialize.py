"""Initialises processes, groups and random numbers as upstream's script does.

Follows `megatron/training/initialize.py`. Bit-equality needs more than equal seeds: between seeding
and the construction of the model, all draws from the default generator must be the same.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

from megatron_ext import devices
from megatron_ext.disaggregation import job as disaggregation
from megatron_ext.disaggregation import worlds
from megatron_ext.errors import UserError, leave_telling_to_another

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.training.trainer_arguments import Model

__all__ = ["agreed", "initialize"]


def initialize(args: Namespace, model: Model, config: TransformerConfig) -> None:
    """Join the process group, build the parallel groups, seed, and warm up fused functions.

    Args:
        args: Complete arguments.
        model: GPT gives the stages with multi-token prediction an embedding of their own.
        config: The model's configuration, for where those stages are.
    """
    device = devices.current()
    device.bind(args.local_rank)
    if disaggregation.current() is not None:
        worlds.join(args.distributed_backend)
    if not dist.is_initialized():
        # A single process needs no launcher: it is its own store.
        lone = dist.HashStore() if args.world_size == 1 else None  # type: ignore[attr-defined]
        dist.init_process_group(
            device.distributed_backend,
            store=lone,
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)  # checks of gradients ask for one
    _initialize_groups(args, model, config)
    # Pipeline stages draw different numbers, replicas the same.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if devices.on_cuda():  # elsewhere nothing is compiled
        _warm_up_fused_functions(args)


@contextmanager
def agreed() -> Iterator[None]:
    """Turn a `UserError` of any rank inside the block into the same error on every rank.

    Otherwise a rank that misses, say, a file on its host would leave the others waiting in their
    next collective until its time-out. This is a collective itself.

    Raises:
        UserError: The error of the lowest rank that had one; only rank 0 reports it.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    found: list[UserError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    first = next((one for one in found if one is not None), None)
    if first is None:
        return
    if dist.get_rank() == 0:
        raise first
    leave_telling_to_another()
    raise SystemExit(2)


def _initialize_groups(args: Namespace, model: Model, config: TransformerConfig) -> None:
    def embedding_ranks(pp_ranks: list[int]) -> list[int]:
        ranks = {pp_ranks[0]}
        if len(pp_ranks) > 1:
            ranks.update(get_mtp_ranks(pp_ranks, config))
            if not args.untie_embeddings_and_output_weights:
                ranks.add(pp_ranks[-1])
        return sorted(ranks)

    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        get_embedding_ranks=embedding_ranks if model == "gpt" else None,
        create_gloo_process_groups=args.enable_gloo_process_groups,
    )


def _warm_up_fused_functions(args: Namespace) -> None:
    """Warm up the fused functions of the just-in-time compiler, with and without gradients.

    The warm-up draws from the default generator, which later initialises position embeddings and
    routers. So shapes, counts and order are upstream's.
    """
    device = devices.current().torch_device(args.local_rank)
    seq_length = args.seq_length
    ffn_width = args.ffn_hidden_size // args.tensor_model_parallel_size

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=args.params_dtype, device=device)

    bias, hidden = draw(ffn_width), draw(seq_length, args.micro_batch_size, ffn_width)
    for hidden_grad in (False, True):
        bias.requires_grad, hidden.requires_grad = True, hidden_grad
        for _ in range(5):
            bias_swiglu(hidden, bias) if args.swiglu else bias_gelu(bias, hidden)
    if args.sequence_parallel:
        seq_length //= args.tensor_model_parallel_size
    shape = (seq_length, args.micro_batch_size, args.hidden_size)
    hidden, residual = draw(*shape), draw(*shape)
    bias = draw(args.hidden_size).expand_as(residual)
    bias.requires_grad = residual.requires_grad = True
    for hidden_grad in (False, True):
        hidden.requires_grad = hidden_grad
        for _ in range(5):
            bias_dropout_add_fused_train([hidden, bias], residual, 0.1)
