"""A rank's records, and the nominal times of its ops and messages.

Scenarios disturb the times. A draw depends only on the seed, the step and the op or message, so all
systems get the same draws. Factors have mean 1. The ranks' parent also imports this module, so it
must not import torch or Megatron.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_ext.schedules import Kind

from .loads import Loads

SEQUENCE_LENGTH = 1024
"""Sequence length of the emulated model, in tokens, which is enough for slices of any cost."""
LAYERS = 4
"""Number of layers on 1/pp of a model with experts."""
Part = Literal["attention", "dispatch", "experts", "combine"]
"""A part of such a layer."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    pp: int
    num_microbatches: int
    forward_s: float
    """Forward of one device share. Each gradient takes the same time."""
    warmup: int
    steps: int
    timeout_s: float = 60.0
    """Time-out for every wait."""

    @property
    def work_s(self) -> float:
        """A rank's undisturbed work."""
        return 3 * self.num_microbatches * self.forward_s


class Op(NamedTuple):
    """An action that a rank executed. Times are on the machine's monotonic clock, in seconds."""

    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Time from start to end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class OpTimes:
    """Durations of ops."""

    forward_s: float
    """Forward of one device share (1/pp of the model). Each gradient takes the same time."""
    share: float
    """Size of a stage, as a fraction of a device share."""
    # Mappings cannot be hashed, so exclude this one from the hash, which is
    # used to cache simulations.
    slices: Mapping[Kind, Sequence[float]] = field(
        default_factory=dict, kw_only=True, hash=False
    )
    """By kind: each slice's share of a micro-batch's time, or empty if micro-batches are whole."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return an op's time. In sliced tables, micro-batches are slices."""
        seconds = self.forward_s * self.share
        shares = self.slices.get(kind, (1.0,))
        return seconds * (2 if kind == "B" else 1) * shares[microbatch % len(shares)]

    def of(self, op: Op) -> float:
        """Return an op's nominal time."""
        return self.seconds(op.kind, op.stage, op.microbatch)

    def latency_s(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return how long the tensor that a stage needs (activation F, gradient B) is in flight."""
        return 0.0


@dataclass(frozen=True)
class ExpertTimes(OpTimes):
    """Times of each op's computation and of its layers' all-to-all."""

    all_to_all: float = field(default=0.0, kw_only=True)
    """All-to-all in a forward or an input gradient, relative to the computation."""
    exchange_share: float = field(default=1.0, kw_only=True)
    """Share of a device that an exchange uses. If it is below 1, kernels run at the same time."""
    weight_waves: int = field(default=1, kw_only=True)
    """Number of kernels per weight gradient of a layer's part. Between two of them, the device
    chooses what to run, just as a GPU chooses between streams whenever thread blocks finish."""
    experts: Loads = field(default=(), kw_only=True, hash=False)
    """Loads of the experts, or empty if they are all 1."""
    attention: Loads = field(default=(), kw_only=True, hash=False)
    """Loads of attention, or empty if they are all 1."""

    @property
    def num_layers(self) -> int:
        """Number of layers on a stage."""
        return round(LAYERS * self.share)

    def part_s(
        self,
        part: Part,
        kind: Kind,
        stage: int,
        microbatch: int,
        layer: int = 0,
        expert_rank: int = 0,
    ) -> float:
        """Return the time of a layer's part. `layer` is the index within the stage."""
        layer_s = self.seconds(kind, stage, microbatch) / (LAYERS * self.share)
        if part in ("dispatch", "combine"):
            return layer_s / 2 * self.all_to_all
        loads = self.experts if part == "experts" else self.attention
        load = 1.0
        if loads:
            load = loads[stage * self.num_layers + layer][microbatch][expert_rank]
        return layer_s / 2 * load

    def stage_work_s(self, stage: int, microbatch: int, expert_rank: int) -> float:
        """Return a stage's computation for a micro-batch: forward and both gradients."""
        work_s = 0.0
        kinds: tuple[Kind, ...] = ("F", "I", "W")
        parts: tuple[Part, ...] = ("attention", "experts")
        for layer in range(self.num_layers):
            for kind in kinds:
                for part in parts:
                    work_s += self.part_s(
                        part, kind, stage, microbatch, layer, expert_rank
                    )
        return work_s

    def exchange_s(self, op: Op) -> float:
        """Return the time of an op's all-to-all."""
        if op.kind == "W":
            return 0.0
        return self.all_to_all * self.seconds("F", op.stage, op.microbatch)


@dataclass(frozen=True)
class Scenario:
    """One kind of disturbance. Times are in forwards of 1/pp of the model."""

    jitter: float = 0.0
    """Sigma of the log-normal factor for each op."""
    microbatch: float = 0.0
    """Sigma of the log-normal factor for all ops of a micro-batch."""
    slow_rank: float = 1.0
    """Factor for the middle rank's ops."""
    spikes: float = 0.0
    """Fraction of the middle rank's ops that take two forwards longer."""
    latency: float = 0.0
    """Mean of the log-normal time (sigma 1) from the end of an op until its message arrives."""
    slow_hop: float = 0.0
    """Additional constant latency between the two middle ranks."""
    last_stage: float = 1.0
    """Factor for the last stage's ops."""

    @property
    def delays_messages(self) -> bool:
        """Whether messages take time."""
        return self.latency > 0 or self.slow_hop > 0


SCENARIOS = {
    "quiet": Scenario(),
    "jitter-0.1": Scenario(jitter=0.1),
    "jitter-0.3": Scenario(jitter=0.3),
    "jitter-0.6": Scenario(jitter=0.6),
    "microbatch-0.5": Scenario(microbatch=0.5),
    "slow-rank": Scenario(slow_rank=1.3),
    "spikes": Scenario(spikes=0.03),
    "link-0.5": Scenario(latency=0.5),
    "slow-hop": Scenario(slow_hop=1.0),
    "uneven": Scenario(last_stage=1.5),
}


@dataclass(frozen=True)
class NoisyTimes(OpTimes):
    """Durations of all ops and messages in one step."""

    scenario: Scenario
    rank_of: Sequence[int]
    """By stage."""
    seed: int
    step: int

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        if kind == "B":  # the times of I and W
            return sum(self.seconds(half, stage, microbatch) for half in ("I", "W"))
        scenario = self.scenario
        middle = (max(self.rank_of) + 1) // 2
        factor = self._factor(scenario.jitter, kind, stage, microbatch)
        factor *= self._factor(scenario.microbatch, microbatch)
        if self.rank_of[stage] == middle:
            factor *= scenario.slow_rank
        if stage == len(self.rank_of) - 1:
            factor *= scenario.last_stage
        seconds = self.forward_s * self.share * factor
        if self.rank_of[stage] == middle and scenario.spikes:
            hit = (
                self._draw("spike", kind, stage, microbatch).random() < scenario.spikes
            )
            seconds += 2 * self.forward_s * hit
        return seconds

    def latency_s(self, kind: Kind, stage: int, microbatch: int) -> float:
        source = stage - 1 if kind == "F" else stage + 1
        ends = self.rank_of[source], self.rank_of[stage]
        if ends[0] == ends[1]:
            return 0.0
        scenario = self.scenario
        middle = (max(self.rank_of) + 1) // 2
        seconds = 0.0
        if scenario.latency:
            seconds = scenario.latency * self._factor(
                1.0, "link", kind, stage, microbatch
            )
        if set(ends) == {middle - 1, middle}:
            seconds += scenario.slow_hop
        return seconds * self.forward_s

    def _factor(self, sigma: float, *key: object) -> float:
        if not sigma:
            return 1.0
        return math.exp(self._draw(*key).gauss(-sigma * sigma / 2, sigma))

    def _draw(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, self.step, *key)))


class Step(NamedTuple):
    """One rank's records of one step."""

    begin_s: float
    end_s: float
    ops: list[Op]
    peak_live: float
    """Peak of stage activations, in whole micro-batches."""
    cpu_s: float = 0.0
    """The rank's processor time."""
    runtime_s: float = 0.0
    """Processor time outside ops, in the thread that runs them, without waits."""
    host_waits: int = 0
    """How often the host waited for its device."""
