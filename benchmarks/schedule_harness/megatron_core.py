"""Steps of Megatron's own schedules, through its own functions.

They run on the CPU through this package's device redirects, which do not change schedules. The
options are those of training: deallocated outputs, and either kind of P2P for interleaved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig

from .stage import MESSAGE_SHAPE, EmulatedStage, Probe

if TYPE_CHECKING:
    from megatron_ext.schedules import Kind, Placement

__all__ = [
    "Chunk",
    "first",
    "initialize",
    "make_config",
    "prepare",
    "record_steps",
    "step_keywords",
]


class Chunk(torch.nn.Module):
    """A stage as Megatron's schedules expect a model chunk to be."""

    runs_in_slices = True
    build_schedule_plan: Callable[[Iterator[Any]], Any]
    """Of chunks with experts only."""

    def __init__(
        self, probe: Probe, config: TransformerConfig, vp_stage: int | None, number: int
    ) -> None:
        super().__init__()
        self.number = number
        """Global index of the stage."""
        self.stage = EmulatedStage(probe)
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Take the input of the next forward."""
        [self._input] = tensors

    def forward(self, data: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Run on the given input, or without one on the next of the data."""
        if self._input is not None:
            return self.stage(self._input)
        tokens = next(data)["tokens"]
        return self.stage(tokens.T[..., None].expand(-1, -1, MESSAGE_SHAPE[-1]))


def initialize(pp: int, virtual_pp: int | None, experts: int = 1) -> None:
    """Initialise Megatron's groups, with one communicator for all groups of the same ranks.

    Each gloo communicator has a thread that wakes up every few milliseconds. Megatron's two dozen
    would keep two cores from sleeping.
    """
    new_group = torch.distributed.new_group
    world = tuple(range(torch.distributed.get_world_size()))
    groups: dict[tuple[int, ...], Any] = {world: torch.distributed.group.WORLD}

    def shared_group(ranks: list[int] | None = None, **options: Any) -> Any:
        key = world if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new_group(ranks, **options)
        return groups[key]

    with mock.patch.object(torch.distributed, "new_group", shared_group):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual_pp,
            expert_model_parallel_size=experts,
        )


def make_config(pp: int, **options: Any) -> TransformerConfig:
    """Return the configuration of emulated stages."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=MESSAGE_SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        **options,
    )


def _forward_step(
    data: Iterator[Any], chunk: Chunk, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        count = torch.full((), output.numel(), device=output.device)  # no copy to it
        return output.sum(), count, {"loss": torch.stack([output.detach().sum(), count])}

    return chunk.build_schedule_plan(data) if return_schedule_plan else chunk(data), loss


def step_keywords(chunks: list[Chunk], num_microbatches: int) -> dict[str, Any]:
    """Return the arguments of a forward-backward function."""
    seq_length, micro_batch_size, _ = MESSAGE_SHAPE
    device = chunks[0].stage.probe.device
    data = {"tokens": torch.zeros(micro_batch_size, seq_length, device=device)}
    return {
        "forward_step_func": _forward_step,
        "data_iterator": [itertools.repeat(data) for _ in chunks],
        "model": chunks,
        "num_microbatches": num_microbatches,
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
    }


def record_steps(
    probe: Probe,
    stages: tuple[int, ...],
    backward_kind: Callable[[], Kind],
) -> None:
    """Record every forward and backward step that this process runs, for the rest of its life.

    Args:
        probe: Takes the records.
        stages: The stage of each chunk.
        backward_kind: Says what a backward step that begins now is.
    """
    forward_step, backward_step = schedules.forward_step, schedules.backward_step

    @functools.wraps(forward_step)
    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        key = stages[kwargs.get("vp_stage") or 0], kwargs["current_microbatch"]
        with probe.op("F", *key):
            output, num_tokens = forward_step(*args, **kwargs)
            first(output).benchmark_key = key
        return output, num_tokens

    @functools.wraps(backward_step)  # releases are told apart by its parameters
    def recorded_backward(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        kind = backward_kind()
        probe.splitting = kind == "I"
        with probe.op(kind, *first(output_tensor).benchmark_key):
            return backward_step(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = recorded_forward, recorded_backward


def first(tensors: Any) -> Any:
    """Return a tensor, or the only one of a list."""
    return tensors[0] if isinstance(tensors, list) else tensors


def prepare(
    schedule: str,
    placement: Placement,
    num_microbatches: int,
    probe: Probe,
    kind: type[Chunk] = Chunk,
    experts: int = 1,
    overlaps_experts: bool = False,
) -> Callable[[], None]:
    """Return a function that runs one step of `1f1b`, `interleaved-batched` or `-overlap`.

    Args:
        schedule: One of these.
        placement: Where the stages are.
        num_microbatches: In one step.
        probe: Records the ops.
        kind: What a rank's stages are.
        experts: Ranks that exchange tokens.
        overlaps_experts: Whether with Megatron's own overlap of that.
    """
    pp, interleaved = placement.num_ranks, schedule != "1f1b"
    virtual = placement.num_stages // pp if interleaved else None
    initialize(pp, virtual, experts)
    overlap = schedule == "interleaved-overlap"
    config = make_config(
        pp,
        virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )
    config.overlap_moe_expert_parallel_comm = overlaps_experts
    stages = placement.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    chunks = [kind(probe, config, virtual and c, stage) for c, stage in enumerate(stages)]
    record_steps(probe, stages, lambda: "B")
    keywords = step_keywords(chunks, num_microbatches)
    function = schedules.get_forward_backward_func()
    return lambda: function(**keywords)
