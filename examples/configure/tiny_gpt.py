"""Trains a tiny GPT with megatron.core's classes on four CPU ranks, without any flags.

    torchrun --nproc-per-node 4 examples/configure/tiny_gpt.py zb-v

The argument is any schedule of `megatron-ext plan`. Without it, Megatron's own 1F1B runs.
"""

import sys

import torch

import megatron_ext

build = megatron_ext.configure(
    megatron_ext.PipelineConfig(schedule=next(iter(sys.argv[1:]), None), device="cpu"),
    pipeline_ranks=4, num_microbatches=8, num_layers=8,
)  # fmt: skip

from megatron.core import (  # noqa: E402
    distributed,
    parallel_state,
    pipeline_parallel,
    tensor_parallel,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


def init(weight):
    """Initialize a weight by its size, so that the split of the model does not matter."""
    torch.nn.init.normal_(
        weight, std=0.1, generator=torch.Generator().manual_seed(weight.numel())
    )


def tokens(sample):
    """Return the tokens of a sample: [1, 17]."""
    return torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(sample))


def forward_step(samples, chunk):
    """Run a stage on the next sample."""
    text, mask = next(samples), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    output = chunk(text[:, :-1], torch.arange(16)[None], mask, labels=text[:, 1:])
    return output, lambda losses: (losses.mean(), losses.mean().item())


torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(**build.groups)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=8, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
    init_method=init, output_layer_init_method=init, pipeline_dtype=torch.float32,
    finalize_model_grads_func=distributed.finalize_model_grads, **build.transformer,
)  # fmt: skip
chunks = [
    distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(),
        GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 64, 16, **keywords),
    )
    for keywords in build.chunks(parallel_state.get_pipeline_model_parallel_rank())
]  # fmt: skip
for step in range(3):
    mine = range(
        8 * step + parallel_state.get_data_parallel_rank(),
        8 * (step + 1),
        build.replicas,
    )
    for chunk in chunks:
        chunk.zero_grad_buffer()
    losses = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[map(tokens, mine) for _ in chunks],
        model=chunks, num_microbatches=build.num_microbatches, seq_length=16, micro_batch_size=1,
    )  # fmt: skip
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.data -= 0.1 * weight.main_grad
    for sample, loss in zip(mine, losses, strict=False):  # on ranks with the last stage
        print(f"sample {sample}: loss {loss!r}", flush=True)
