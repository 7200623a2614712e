"""Steps of this package's executor, called as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from megatron_ext.config.active import Active, Pipeline, activate_configuration
from megatron_ext.message import Message
from megatron_ext.runtime import runtime
from megatron_ext.runtime.connect import open_transport
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.runtime.split import SplitBackward

from .late import LateTransport
from .megatron_core import set_up
from .noise import NoisyTimes
from .ops import ExpertTimes
from .stage import Probe


def prepare(pipeline: Pipeline, probe: Probe) -> Callable[[], object]:
    """Return a function that runs one step of a chosen schedule.

    A schedule with twins is hosted as in training: as half as many pipeline ranks, each twice.

    Args:
        pipeline: The settings that training would get.
        probe: Records the ops.
    """
    activate_configuration(Active(pipeline.config, pipeline))
    split = runtime.in_force().splits
    _emulate_split(probe, split)
    stages, keywords = set_up(
        pipeline.placement,
        pipeline.num_microbatches,
        probe,
        lambda: "B" if split.record is None else "I",
        overlap_moe_expert_parallel_comm=pipeline.config.pairs,
    )
    if probe.waits:
        probe.waits = False  # the transport does
        _delay_messages(probe)
    if isinstance(probe.times, ExpertTimes):
        from .experts import record_plans

        record_plans(probe, split, pipeline.full)
    # As with GPT, only the first stage reads data here.
    iterators = zip(stages, keywords["data_iterator"], strict=True)
    keywords["data_iterator"] = [data if stage == 0 else None for stage, data in iterators]
    return lambda: forward_backward(**keywords)


def _delay_messages(probe: Probe) -> None:
    """Let every transport that is opened take the time that the scenario says."""

    def latency_s(key: Message) -> float:
        assert isinstance(probe.times, NoisyTimes)
        assert key.kind in ("F", "B")
        return probe.times.latency_s(key.kind, key.stage, key.microbatch)

    def opened(*args: Any, **options: Any) -> LateTransport:
        return LateTransport(open_transport(*args, **options), latency_s)

    mock.patch.object(runtime, "open_transport", opened).start()


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
