"""Steps of this package's executor, called as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron_ext.config.active import Active, Pipeline, activate_configuration
from megatron_ext.message import Message
from megatron_ext.runtime import runtime
from megatron_ext.runtime.connect import open_transport
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.transport.base import Expected, Transport

from .megatron_core import set_up
from .stage import Probe, sent_s, stamp

if TYPE_CHECKING:
    import torch


def prepare(pipeline: Pipeline, probe: Probe) -> Callable[[], object]:
    """Return a function that runs one step of a schedule.

    Twins are hosted as in training: with half as many pipeline ranks, each of them twice.

    Args:
        pipeline: The pipeline as training would use it.
        probe: Records the ops.
    """
    activate_configuration(Active(pipeline.config, pipeline))
    split = runtime.in_force().splits
    emulate_split(probe, split)
    stages, keywords = set_up(
        pipeline.placement,
        pipeline.num_microbatches,
        probe,
        lambda: "I" if split.is_deferring else "B",
        overlap_moe_expert_parallel_comm=pipeline.config.pairs,
    )
    if probe.waits:
        probe.waits = False  # the transport waits instead

        def opened(*args: Any, **options: Any) -> _LateTransport:
            return _LateTransport(open_transport(*args, **options), probe)

        mock.patch.object(runtime, "open_transport", opened).start()
    probe.record_plans(split, pipeline.full)
    # As in GPT, only the first stage reads data.
    iterators = zip(stages, keywords["data_iterator"], strict=True)
    keywords["data_iterator"] = [
        data if stage == 0 else None for stage, data in iterators
    ]
    return lambda: forward_backward(**keywords)


def emulate_split(probe: Probe, split: SplitBackward) -> None:
    """Sleep for a deferred weight gradient's time where the split computes it, and record it.

    The split itself computes the gradient from the operands that it kept.
    """
    run = split.run
    # W that ran before their place in the table, where `run` only completes them.
    early_weights: set[tuple[int, int]] = set()

    def running(
        stage: int, microbatch: int, *, in_current_stream: bool = False
    ) -> None:
        if (stage, microbatch) in early_weights:
            early_weights.remove((stage, microbatch))
            run(stage, microbatch)
            return
        if in_current_stream:
            early_weights.add((stage, microbatch))
        with probe.op("W", stage, microbatch):
            assert (stage, microbatch) in split.pending(), (
                "the split did not defer the stage's linear"
            )
            run(stage, microbatch, in_current_stream=in_current_stream)
            probe.spend("W", stage, microbatch)

    split.run = running  # type: ignore[method-assign]


class _LateTransport:
    """Wraps a transport to make its messages take the time that the scenario specifies."""

    def __init__(self, inner: Transport, probe: Probe) -> None:
        self._inner = inner
        self._probe = probe
        self._source: dict[Message, int] = {}
        self._held: dict[Message, tuple[float, torch.Tensor]] = {}
        """Messages that have arrived, with the time at which they become visible."""
        self._told: set[Message] = set()

    def __getattr__(self, name: str) -> Any:
        """Return attributes that need no delay: wake, flush, abort, close and statistics."""
        return getattr(self._inner, name)

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        self._source = {item.message: item.source for item in expected}
        self._told.clear()
        self._inner.begin(expected, slots)

    def isend(self, tensor: torch.Tensor, target: int, key: Message) -> None:
        if key.kind == "D":  # decisions are never late
            self._inner.isend(tensor, target, key)
            return
        tensor = tensor.detach().clone()
        stamp(tensor)
        self._inner.isend(tensor, target, key)

    def recv(self, source: int, key: Message, timeout_s: float) -> torch.Tensor:
        if key.kind == "D":
            return self._inner.recv(source, key, timeout_s)
        if key not in self._held:
            self._hold(key, timeout_s)
        seen_s, tensor = self._held.pop(key)
        time.sleep(max(0.0, seen_s - time.perf_counter()))
        return tensor

    def poll(self, timeout_s: float) -> Sequence[Message]:
        deadline_s = time.perf_counter() + timeout_s
        wait_s = 0.0
        while True:
            for key in self._inner.poll(wait_s):
                self._hold(key, timeout_s)
            now_s = time.perf_counter()
            waiting = {k: s for k, (s, _) in self._held.items() if k not in self._told}
            keys = [key for key, seen_s in waiting.items() if seen_s <= now_s]
            self._told.update(keys)
            if keys or now_s >= deadline_s:
                return keys
            wait_s = max(0.0, min([deadline_s, *waiting.values()]) - now_s)

    def _hold(self, key: Message, timeout_s: float) -> None:
        tensor = self._inner.recv(self._source[key], key, timeout_s)
        assert key.kind in ("F", "B")
        latency_s = self._probe.times.latency_s(key.kind, key.stage, key.microbatch)
        self._held[key] = sent_s(tensor) + latency_s, tensor
