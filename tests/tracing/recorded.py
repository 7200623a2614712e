"""Runs trainings of a tiny GPT that record digests, many in one world of ranks.

It is a program with a custom loop that calls `configure`. Weights are drawn by name, so that every
cut starts with the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tests.runtime.capture import named_weights

VOCABULARY = 64
SEQUENCE = 16


@dataclass(frozen=True)
class Training:
    """A run of all ranks of a world."""

    folder: str
    schedule: str | None = None
    """None: Megatron's own."""
    pipeline_ranks: int = 2
    num_microbatches: int = 4
    """Micro-batches per pipeline; for mirrored pipelines, of both together."""
    num_layers: int = 4
    hidden_size: int = 32
    num_steps: int = 2
    world_size: int = 2
    tensor_ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of `PipelineConfig`."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of `TransformerConfig`."""
    reduction: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `DistributedDataParallelConfig`."""
    seed: int | None = None


Change = Callable[[list[Any]], AbstractContextManager[Any]]
"""Changes a rank's chunks, or the package, for the duration of the context."""


def unchanged(_chunks: list[Any]) -> AbstractContextManager[Any]:
    """Change nothing."""
    return nullcontext()


def train(training: Training, change: Change = unchanged) -> list[float]:
    """Train as one rank; return the losses of the last step on ranks that have them."""
    with built(training) as (build, chunks), change(chunks):
        losses: list[float] = []
        for number in range(training.num_steps):
            losses = step(training, build, chunks, number)
        return losses


@contextmanager
def built(training: Training) -> Iterator[tuple[Any, list[Any]]]:
    import torch
    from megatron.core import distributed, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    import megatron_ext
    from megatron_ext.tracing.digest_files import VARIABLE

    os.environ[VARIABLE] = training.folder
    build = megatron_ext.configure(
        megatron_ext.PipelineConfig(
            schedule=training.schedule,
            **{"message_timeout_s": 60.0, **training.settings},
        ),
        pipeline_ranks=training.pipeline_ranks,
        num_microbatches=training.num_microbatches,
        num_layers=training.num_layers,
        world_size=training.world_size,
        seed=training.seed,
    )
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=training.tensor_ranks, **build.groups
    )
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            **{
                "num_layers": training.num_layers,
                "hidden_size": training.hidden_size,
                "num_attention_heads": 4,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "pipeline_dtype": torch.float32,
                "tensor_model_parallel_size": training.tensor_ranks,
                "finalize_model_grads_func": distributed.finalize_model_grads,
                **build.transformer,
                **training.model,
            }
        )
        settings = distributed.DistributedDataParallelConfig(**training.reduction)
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = []
        for keywords in build.chunks(rank):
            model = GPTModel(config, spec, VOCABULARY, SEQUENCE, **keywords)
            chunks.append(distributed.DistributedDataParallel(config, settings, model))
        _fill_by_name(chunks)
        yield build, chunks
    finally:
        megatron_ext.deconfigure()
        parallel_state.destroy_model_parallel()
        os.environ.pop(VARIABLE)


def step(training: Training, build: Any, chunks: list[Any], number: int) -> list[float]:
    from megatron.core import parallel_state, pipeline_parallel

    import megatron_ext

    num_replicas = parallel_state.get_data_parallel_world_size()
    total = build.num_microbatches * num_replicas
    first = number * total + parallel_state.get_data_parallel_rank()
    samples = range(first, (number + 1) * total, num_replicas)
    megatron_ext.begin_iteration(number)  # needed for random numbers by micro-batch
    for chunk in chunks:
        chunk.zero_grad_buffer()
    losses = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[map(sample, samples) for _ in chunks],
        model=chunks,
        num_microbatches=build.num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=1,
    )
    for chunk in chunks:
        for weight in chunk.parameters():
            update(weight, number)
    return list(losses)


def update(weight: Any, _step: int) -> None:
    """Add the gradient to a weight."""
    weight.data -= 0.1 * weight.main_grad


def sample(number: int) -> Any:
    """Return the tokens of a sample, `[1, s + 1]`."""
    import torch

    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=generator)


def forward_step(samples: Iterator[Any], chunk: Any) -> tuple[Any, Callable[..., Any]]:
    """Run a stage on the next sample."""
    import torch

    text = next(samples)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQUENCE)[None]
    output = chunk(text[:, :-1], positions, mask, labels=text[:, 1:])
    return output, loss


def loss(losses: Any) -> tuple[Any, float]:
    """Return the mean over the tokens, and its report."""
    return losses.mean(), losses.mean().item()


def _fill_by_name(chunks: list[Any]) -> None:
    import zlib

    import torch

    with torch.no_grad():
        for name, parameter in named_weights(chunks):
            if name.endswith(".bias") or "layernorm" in name:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
