"""Trains one of five models on CPU ranks whose stages exchange more than one tensor [s, b, h].

    torchrun --nproc-per-node 4 examples/boundaries/train.py hyper-connections zb-v

The first argument is a model of `models.py`, and the second is any schedule of `megatron-ext plan`.
Without a schedule, the model runs in one stage with upstream's loop: torchrun --nproc-per-node 1.
"""

import os
import sys

import torch

import megatron_ext

MICROBATCHES, LAYERS, STEPS = 8, 16, 3


def train(
    model, schedule=None, steps=STEPS, seed=None, parallel=None, replicas=1, **settings
):
    """Train, and return this rank's losses and the gradients of its last step by parameter name.

    `parallel` contains keyword arguments of `TransformerConfig` for tensor and sequence
    parallelism. The `replicas` divide the ranks equally.
    """
    parallel = parallel or {}
    tensor_ranks = parallel.get("tensor_model_parallel_size", 1)
    ranks = int(os.environ["WORLD_SIZE"]) // tensor_ranks // replicas
    build = megatron_ext.configure(
        megatron_ext.PipelineConfig(schedule=schedule, **{"device": "cpu", **settings}),
        pipeline_ranks=ranks, num_microbatches=MICROBATCHES, num_layers=LAYERS, seed=seed,
    )  # fmt: skip
    from megatron.core import (
        distributed,
        parallel_state,
        pipeline_parallel,
        tensor_parallel,
    )
    from megatron.core.transformer import TransformerConfig
    from models import MODELS
    from stages import BATCH, LENGTH, WIDTH, sample

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks, **build.groups
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=2, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_dtype=torch.float32,
        finalize_model_grads_func=distributed.finalize_model_grads, **parallel, **build.transformer,
    )  # fmt: skip
    chunks = [
        distributed.DistributedDataParallel(
            config,
            distributed.DistributedDataParallelConfig(),
            MODELS[model](config, stage, build.num_stages),
        )
        for stage in build.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    ]

    def forward_step(samples, chunk):
        return chunk(next(samples)), lambda loss: (loss, loss.item())

    replica = parallel_state.get_data_parallel_rank()
    all_replicas = parallel_state.get_data_parallel_world_size()
    batch = all_replicas * build.num_microbatches
    losses = []
    for step in range(steps):
        mine = range(batch * step + replica, batch * (step + 1), all_replicas)
        megatron_ext.begin_iteration(step)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        losses += pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[map(sample, mine) for _ in chunks],
            model=chunks, num_microbatches=build.num_microbatches, seq_length=LENGTH,
            micro_batch_size=BATCH,
        )  # fmt: skip
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            weight.data -= 0.01 * weight.main_grad
    gradients = {
        name: weight.main_grad.clone()
        for chunk in chunks
        for name, weight in chunk.module.named_parameters()
    }
    return losses, gradients


if __name__ == "__main__":
    for number, loss in enumerate(train(*sys.argv[1:])[0]):
        print(f"micro-batch {number}: loss {loss!r}", flush=True)
