"""The scenarios of disturbed steps, and the durations of ops and messages in each.

A draw depends only on the seed, the step and its op or message, so all systems get the same draws.
Factors have mean 1. The parent of the ranks imports this too, so it imports neither torch nor
Megatron.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.schedules import Kind

from .ops import OpTimes, Sizes
from .systems import System


@dataclass(frozen=True)
class Scenario:
    """One kind of disturbance; times in forwards of 1/pp of the model."""

    jitter: float = 0.0
    """Sigma of the log-normal factor on each op."""
    microbatch: float = 0.0
    """Sigma of the log-normal factor on all ops of a micro-batch."""
    slow_rank: float = 1.0
    """Factor on the ops of the rank in the middle."""
    spikes: float = 0.0
    """Part of the ops of the rank in the middle that take two forwards longer."""
    latency: float = 0.0
    """Mean of the log-normal time (sigma 1) from the end of an op until its message is there."""
    slow_hop: float = 0.0
    """Further latency between the two ranks in the middle, always the same."""
    last_stage: float = 1.0
    """Factor on the ops of the last stage."""

    @property
    def delays_messages(self) -> bool:
        """True if messages take time."""
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
    """Durations of each op and each message of one step."""

    scenario: Scenario
    rank_of: Sequence[int]
    """By stage."""
    seed: int
    step: int

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        if kind == "B":  # those of I and W
            return sum(self.seconds(half, stage, microbatch) for half in ("I", "W"))
        scenario, middle = self.scenario, (max(self.rank_of) + 1) // 2
        factor = self._factor(scenario.jitter, kind, stage, microbatch)
        factor *= self._factor(scenario.microbatch, microbatch)
        if self.rank_of[stage] == middle:
            factor *= scenario.slow_rank
        if stage == len(self.rank_of) - 1:
            factor *= scenario.last_stage
        seconds = self.forward_s * self.share * factor
        if self.rank_of[stage] == middle and scenario.spikes:
            hit = self._draw("spike", kind, stage, microbatch).random() < scenario.spikes
            seconds += 2 * self.forward_s * hit
        return seconds

    def latency_s(self, kind: Literal["F", "B"], stage: int, microbatch: int) -> float:
        """Return how long what a stage needs (activation F, gradient B) is under way."""
        source = stage - 1 if kind == "F" else stage + 1
        ends = self.rank_of[source], self.rank_of[stage]
        if ends[0] == ends[1]:
            return 0.0
        scenario, middle = self.scenario, (max(self.rank_of) + 1) // 2
        seconds = 0.0
        if scenario.latency:
            seconds = scenario.latency * self._factor(1.0, "link", kind, stage, microbatch)
        if set(ends) == {middle - 1, middle}:
            seconds += scenario.slow_hop
        return seconds * self.forward_s

    def _factor(self, sigma: float, *key: object) -> float:
        if not sigma:
            return 1.0
        return math.exp(self._draw(*key).gauss(-sigma * sigma / 2, sigma))

    def _draw(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, self.step, *key)))


def noisy(system: System, sizes: Sizes, name: str) -> list[NoisyTimes]:
    """Return the draws of a scenario for the stages of a system: one for each of `sizes.steps`."""
    share, rank_of = system.share(sizes.pp), system.placement(sizes.pp).rank_of
    return [
        NoisyTimes(sizes.forward_s, share, SCENARIOS[name], rank_of, 0, draw)
        for draw in range(sizes.steps)
    ]
