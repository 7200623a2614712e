"""Steps of this package's executor, called as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state

from megatron_ext.config.active import Active, activate_configuration, required
from megatron_ext.runtime import runtime
from megatron_ext.runtime.entry import forward_backward

from .late import LateTransport
from .megatron_core import Chunk, initialize, make_config, record_steps, step_keywords
from .noise import NoisyTimes

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.message import Message
    from megatron_ext.runtime.split import SplitBackward

    from .stage import Probe

__all__ = ["prepare"]


def prepare(
    pipeline: Pipeline, probe: Probe, kind: type[Chunk] = Chunk, experts: int = 1
) -> Callable[[], None]:
    """Return a function that runs one step of a chosen schedule.

    A schedule with twins is hosted as in training: as half as many pipeline ranks, each twice.

    Args:
        pipeline: The settings that training would get.
        probe: Records the ops.
        kind: What a rank's stages are.
        experts: Ranks that exchange tokens.
    """
    activate_configuration(Active(pipeline.config, pipeline))
    split = required().state(runtime.Runtimes).splits
    _emulate_split(probe, split)
    placement = pipeline.placement
    num_chunks = placement.num_stages // placement.num_ranks
    virtual = num_chunks if num_chunks > 1 else None
    initialize(placement.num_ranks, virtual, experts)
    config = make_config(
        placement.num_ranks,
        virtual_pipeline_model_parallel_size=virtual,
        overlap_moe_expert_parallel_comm=pipeline.config.pairs,
        num_moe_experts=2 * experts if experts > 1 else None,
        expert_model_parallel_size=experts,
        moe_token_dispatcher_type="alltoall",  # pairs ask for it
    )
    stages = placement.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    chunks = [kind(probe, config, virtual and c, stage) for c, stage in enumerate(stages)]
    if probe.waits:
        probe.waits = False  # the transport does
        _delay_messages(probe)
    record_steps(probe, stages, lambda: "B" if split.record is None else "I")
    keywords = step_keywords(chunks, pipeline.num_microbatches)
    # As with GPT, only the first stage reads data here.
    iterators = zip(stages, keywords["data_iterator"], strict=True)
    keywords["data_iterator"] = [data if stage == 0 else None for stage, data in iterators]
    return lambda: forward_backward(**keywords)


def _delay_messages(probe: Probe) -> None:
    """Let every transport that is opened take the time that the scenario says."""
    open_transport = runtime.open_transport

    def latency_s(key: Message) -> float:
        assert isinstance(probe.times, NoisyTimes)
        assert key.kind in ("F", "B")
        return probe.times.latency_s(key.kind, key.stage, key.microbatch)

    def opened(*args: Any, **options: Any) -> LateTransport:
        return LateTransport(open_transport(*args, **options), latency_s)

    runtime.open_transport = opened  # type: ignore[assignment]


def _emulate_split(probe: Probe, split: SplitBackward) -> None:
    """Sleep the time of a deferred weight gradient where the split computes it, and record it.

    The gradient itself is computed by the split, from what it kept of the stage's linear.
    """
    run = split.run

    def running(stage: int, microbatch: int) -> None:
        with probe.op("W", stage, microbatch):
            assert (stage, microbatch) in split.pending(), "the split left the stage's linear alone"
            run(stage, microbatch)
            probe.spend("W", stage, microbatch)

    split.run = running  # type: ignore[method-assign]
