"""Trains a custom `nn.Module` on four CPU ranks, without any of Megatron's model classes.

    torchrun --nproc-per-node 4 examples/configure/own_module.py zb-v

The argument is any schedule of `megatron-ext plan`. Without it, Megatron's own 1F1B runs. The two
mirrored pipelines of bitpipe and dualpipe are replicas, whose gradients DDP sums.
"""

import sys

import torch

import megatron_ext

build = megatron_ext.configure(
    megatron_ext.PipelineConfig(schedule=next(iter(sys.argv[1:]), None), device="cpu"),
    pipeline_ranks=4, num_microbatches=8, num_layers=8,
)  # fmt: skip

from megatron.core import distributed, parallel_state, pipeline_parallel  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


class Stage(torch.nn.Module):
    """The layers of one stage."""

    def __init__(self, config, layers):
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.received = None
        self.layers = torch.nn.ModuleList()
        for layer in layers:
            torch.manual_seed(layer)  # the weights do not depend on the split
            self.layers.append(torch.nn.Linear(16, 16))

    def set_input_tensor(self, tensors):
        self.received = tensors[0]

    def forward(self, sample):
        x = sample if self.received is None else self.received
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x  # [s, b, h]


def forward_step(samples, stage):
    """Run a stage on the next sample. On the last stage, Megatron calls the loss function."""
    number = next(samples)
    sample = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(number))
    return stage(sample), lambda y: (
        y.square().mean(),
        (number, y.square().mean().item()),
    )


torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(**build.groups)
config = TransformerConfig(
    num_layers=8, hidden_size=16, num_attention_heads=1, pipeline_dtype=torch.float32,
    finalize_model_grads_func=distributed.finalize_model_grads, **build.transformer,
)  # fmt: skip
share = 8 // build.num_stages
held = build.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
chunks = [
    distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(),
        Stage(config, range(share * stage, share * (stage + 1))),
    ) for stage in held
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
        forward_step_func=forward_step, model=chunks, num_microbatches=build.num_microbatches,
        data_iterator=iter(mine),  # the chunks of a rank share it
        seq_length=3, micro_batch_size=1,
    )  # fmt: skip
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.data -= 0.1 * weight.main_grad
    for sample, loss in losses:  # on ranks with the last stage
        print(f"sample {sample}: loss {loss!r}", flush=True)
