"""Steps of Megatron's own schedules, run by its own functions.

On the CPU, they use this package's device redirects, which do not change schedules. Options are the
same as in training: outputs are deallocated, and interleaved uses either kind of P2P.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig

from megatron_ext.schedules import Kind, Placement

from .stage import MESSAGE_SHAPE, Chunk, Probe, first


def _initialize(pp: int, virtual_pp: int | None, experts: int) -> None:
    """Initialise Megatron's groups, sharing one communicator among groups of the same ranks.

    Every gloo communicator has a thread that wakes up every few milliseconds. Megatron's two dozen
    communicators would keep two cores from sleeping.
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
    """Return the configuration for emulated stages."""
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


def batches(probe: Probe) -> Iterator[dict[str, torch.Tensor]]:
    """Return the data for a step."""
    seq_length, micro_batch_size, _ = MESSAGE_SHAPE
    return itertools.repeat(
        {"tokens": torch.zeros(micro_batch_size, seq_length, device=probe.device)}
    )


def forward_step(
    data: Iterator[Any], chunk: Chunk, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Return a chunk's output or plan, and the loss function."""

    def loss(
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        count = torch.full(
            (), output.numel(), device=output.device
        )  # avoids a copy to the device
        return (
            output.sum(),
            count,
            {"loss": torch.stack([output.detach().sum(), count])},
        )

    return chunk.build_schedule_plan(data) if return_schedule_plan else chunk(
        data
    ), loss


def set_up(
    placement: Placement,
    num_microbatches: int,
    probe: Probe,
    backward_kind: Callable[[], Kind],
    **settings: Any,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Initialise Megatron, build this rank's stages and record their steps.

    Args:
        placement: Where the stages are. Any further ranks exchange tokens with experts.
        num_microbatches: Micro-batches per step.
        probe: Records the ops and creates the chunks.
        backward_kind: Returns the kind of the backward step that is about to start.
        settings: Additional configuration settings.

    Returns:
        The stages, and the arguments for a forward-backward function.
    """
    pp = placement.num_ranks
    num_chunks = placement.num_stages // placement.num_ranks
    virtual = num_chunks if num_chunks > 1 else None
    experts = torch.distributed.get_world_size() // (pp * placement.twins)
    _initialize(pp, virtual, experts)
    config = make_config(
        pp,
        virtual_pipeline_model_parallel_size=virtual,
        num_moe_experts=2 * experts if experts > 1 else None,
        expert_model_parallel_size=experts,
        moe_token_dispatcher_type="alltoall",  # required for pairs
        **settings,
    )
    stages = placement.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    _record_steps(probe, stages, backward_kind)
    return stages, {
        "forward_step_func": forward_step,
        "data_iterator": [batches(probe) for _ in stages],
        "model": [
            probe.chunk(config, virtual and c, stage) for c, stage in enumerate(stages)
        ],
        "num_microbatches": num_microbatches,
        "seq_length": MESSAGE_SHAPE[0],
        "micro_batch_size": MESSAGE_SHAPE[1],
    }


def _record_steps(
    probe: Probe, stages: tuple[int, ...], backward_kind: Callable[[], Kind]
) -> None:
    """Record every forward and backward step that this process runs from now on."""
    run_forward = schedules.forward_step
    run_backward = schedules.backward_step

    @functools.wraps(run_forward)
    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        key = stages[kwargs.get("vp_stage") or 0], kwargs["current_microbatch"]
        with probe.op("F", *key):
            output, num_tokens = run_forward(*args, **kwargs)
            first(output).benchmark_key = key
        return output, num_tokens

    @functools.wraps(run_backward)  # keeps the parameters, which tell releases apart
    def recorded_backward(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        kind = backward_kind()
        probe.splitting = kind == "I"
        with probe.op(kind, *first(output_tensor).benchmark_key):
            return run_backward(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = (
        recorded_forward,
        recorded_backward,
    )


def prepare(
    schedule: str, placement: Placement, num_microbatches: int, probe: Probe
) -> Callable[[], object]:
    """Return a function that runs one step of `1f1b`, `interleaved-batched` or `-overlap`.

    With `-overlap, experts`, stages have experts, and Megatron overlaps their exchanges.
    """
    overlap = schedule.startswith("interleaved-overlap")
    _, keywords = set_up(
        placement, num_microbatches, probe, lambda: "B",
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )  # fmt: skip
    # Set this after construction, because Megatron's check requires half precision,
    # which only kernels need.
    keywords["model"][0].config.overlap_moe_expert_parallel_comm = schedule.endswith(
        "experts"
    )
    probe.record_plans()
    function = schedules.get_forward_backward_func()
    return lambda: function(**keywords)
