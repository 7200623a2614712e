"""Compares log-probabilities of a tiny GPT under two pipelines, bit for bit, on two CPU ranks.

    torchrun --nproc-per-node 2 examples/rl/log_probabilities.py zb-v

The reference runs only forward passes, under Megatron's own schedule. The policy starts with the
same weights and trains under the given schedule of `megatron-ext plan`. The ratios of its
probabilities to those of the reference, and the KL divergence, show the effect of the pipeline.
"""

import sys

import torch

import megatron_ext

RANKS, MICROBATCHES, LAYERS, LENGTH, VOCABULARY = 2, 4, 4, 16, 64


def init(weight):
    """Initialize a weight by its size, so that the split of the model does not matter."""
    torch.nn.init.normal_(
        weight, std=0.1, generator=torch.Generator().manual_seed(weight.numel())
    )


def tokens(sample):
    """Return a response: `[1, LENGTH + 1]`."""
    generator = torch.Generator().manual_seed(sample)
    return torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)


def log_probabilities(schedule, *, trains):
    """Run a batch through the pipeline; return the log-probabilities, `[MICROBATCHES, LENGTH]`."""
    build = megatron_ext.configure(
        megatron_ext.PipelineConfig(schedule=schedule, device="cpu"),
        pipeline_ranks=RANKS, num_microbatches=MICROBATCHES, num_layers=LAYERS,
    )  # fmt: skip
    from megatron.core import (
        distributed,
        parallel_state,
        pipeline_parallel,
        tensor_parallel,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**build.groups)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, init_method=init, output_layer_init_method=init,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=distributed.finalize_model_grads, **build.transformer,
    )  # fmt: skip
    chunks = []
    for keywords in build.chunks(parallel_state.get_pipeline_model_parallel_rank()):
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        model = GPTModel(config, spec, VOCABULARY, LENGTH, **keywords)
        settings = distributed.DistributedDataParallelConfig()
        chunks.append(distributed.DistributedDataParallel(config, settings, model))

    def forward_step(samples, chunk):
        text = next(samples)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        logits = chunk(text[:, :-1], torch.arange(LENGTH)[None], mask)

        def loss(logits):
            chosen = logits.log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1)
            return -chosen.mean(), chosen.detach()  # an advantage of 1 for each token

        return logits, loss

    mine = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[map(tokens, range(MICROBATCHES)) for _ in chunks], model=chunks,
        num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=1,
        forward_only=not trains,
    )  # fmt: skip
    everyones = [None] * RANKS
    torch.distributed.all_gather_object(everyones, mine)  # one rank has the last stage
    megatron_ext.deconfigure()
    parallel_state.destroy_model_parallel()
    return torch.cat(next(parts for parts in everyones if parts))


reference = log_probabilities(None, trains=False)
policy = log_probabilities(next(iter(sys.argv[1:]), "zb-h1"), trains=True)
ratios = (policy - reference).exp()
divergence = (ratios - 1 - (policy - reference)).mean()  # unbiased, and never negative
if torch.distributed.get_rank() == 0:
    print(f"{reference.numel()} log-probabilities, mean {reference.mean():.4f}")
    print(f"different bits: {(policy != reference).sum()}")
    print(f"ratios: {ratios.min()} to {ratios.max()}, KL divergence: {divergence}")
torch.distributed.destroy_process_group()
