"""A pipeline of tiny linear stages with Megatron's groups and configuration, for contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

WIDTH, LENGTH, BATCH = 4, 3, 2
M = 4
"""Number of micro-batches."""

VARYING = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
"""Settings for micro-batches of different lengths."""


class Stage(torch.nn.Module):
    """A linear layer that behaves as a chunk of a Megatron model."""

    def __init__(self, config: Any, number: int, vp_stage: int | None) -> None:
        super().__init__()
        self.config, self.number, self.vp_stage = config, number, vp_stage
        self.model_type = None
        self.weight = torch.nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))
        )
        self.input: Any = None
        self.firsts = 0
        """Number of forwards announced as the first of a step."""

    def set_is_first_microbatch(self) -> None:
        """Count the call, in which Transformer Engine's layers would convert their weights."""
        self.firsts += 1

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Set the tensors received from the previous stage."""
        self.input = tensors[0]

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer, with a residual connection, to the data or to the received tensor."""
        x = data if self.input is None else self.input
        return x + torch.tanh(x) @ self.weight


def start(num_pipeline_ranks: int, chunks_per_rank: int | None = None) -> None:
    """Join the job and create Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_ext import devices

    dist.init_process_group(devices.current().distributed_backend)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=num_pipeline_ranks,
        virtual_pipeline_model_parallel_size=chunks_per_rank,
    )


def config(**changes: Any) -> Any:
    """Return a configuration with the settings of Megatron's training."""
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 8, "hidden_size": WIDTH, "num_attention_heads": 1,
        "pipeline_dtype": torch.float32, "deallocate_pipeline_outputs": True,
    } | changes  # fmt: skip
    config = TransformerConfig(**fields)
    config.timers = None
    return config


def chunks(made: Any, stages: list[int]) -> list[Stage]:
    """Build the chunks of this rank."""
    single = len(stages) == 1
    return [Stage(made, stage, None if single else i) for i, stage in enumerate(stages)]


def samples(num_microbatches: int, longer_by: int = 0) -> Iterator[torch.Tensor]:
    """Yield the data of each micro-batch, each longer than the previous one."""
    for i in range(num_microbatches):
        shape = LENGTH + longer_by * i, BATCH, WIDTH
        yield torch.randn(shape, generator=torch.Generator().manual_seed(1000 + i))


def step(
    config: Any,
    model: list[Stage],
    num_microbatches: int = M,
    /,
    *,
    run: Any = None,
    **keywords: Any,
) -> list[Any]:
    """Run one step by whatever Megatron hands out, or by `run`; return its reports."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    longer_by = int(config.variable_seq_lengths)
    iterators = [samples(num_microbatches, longer_by) for _ in model]
    single = len(model) == 1
    usual: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": iterators[0] if single else iterators,
        "model": model[0] if single else model,
        "num_microbatches": num_microbatches,
        "seq_length": LENGTH,
        "micro_batch_size": BATCH,
    }
    reports: list[Any] = (run or get_forward_backward_func())(**(usual | keywords))
    return reports


def forward_step(
    data_iterator: Iterator[torch.Tensor] | None, model: Stage
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Read data only on the first stage, as GPT does; report the loss on the last stage."""
    data = (
        next(data_iterator) if model.number == 0 and data_iterator is not None else None
    )
    return model(data), _loss


def _loss(output: torch.Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return output.sum().item()
    tokens = torch.tensor(LENGTH * BATCH, dtype=torch.int)
    loss = output.square().sum()
    return loss, tokens, {"loss": loss.detach().clone()}
