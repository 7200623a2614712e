"""Durations of actions and messages, which the simulator uses to compute times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import mul

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import KINDS, Kind, Schedule

AHEAD = 2
"""Maximum number of launched, unfinished actions on a device: one runs, and the next one waits in
the device's queue. With only one, the device would idle between actions. More than two would use
more memory without any benefit."""

# Durations in this range add up without visible rounding errors, even in the largest tables.
SHORTEST, _LONGEST = 1e-9, 1e9
MAX_ATTENTION = 1 - 2**-20
"""The largest supported share of attention."""


@dataclass(frozen=True)
class Costs:
    """Durations, in any consistent unit. By default, a forward pass on one device share takes 1.

    A device share is 1/pp of the model. If a schedule cuts the model into more than pp stages, a
    forward pass on one stage takes `forward * pp / num_stages`, and so on.
    """

    forward: float = 1.0
    """Forward pass on one device share, Tf."""
    input: float = 1.0
    """Input gradient on one device share, Tb."""
    weight: float = 1.0
    """Weight gradient on one device share, Tw."""
    latency: float = 0.0
    """Time from the end of an action until its output arrives on another rank."""
    stages: tuple[tuple[float, float, float], ...] = ()
    """Forward, input-gradient and weight-gradient times on each stage, for uneven stages. If empty,
    each stage is an equal share of the model."""
    microbatch_scale: tuple[float, ...] = ()
    """Factor on each micro-batch's durations, for uneven lengths. If empty, all factors are 1."""
    slice_scale: tuple[tuple[float, ...], ...] = ()
    """For tables with slices by length: the forward time of each slice in each micro-batch,
    relative to a sample as long as the longest micro-batch. If empty, each micro-batch is one
    sample, whose cost follows from `Schedule.slice_sizes` and `attention`."""
    jitter: float = 0.0
    """Sigma of the log-normal factor (mean 1) on each action's duration."""
    link_jitter: float = 0.0
    """Sigma of the log-normal factor (mean 1) on each message's latency."""
    launch: float = 0.0
    """Host time to launch an action on a device; 0 if the host itself computes the action. A launch
    starts once at most `AHEAD - 1` earlier actions on the rank are still running."""
    attention: float = 0.0
    """Share of core attention in a forward pass and in a full backward pass: at least 0, below 1.
    The cost of attention grows with the square of the length, so slices of equal length differ in
    cost (`slices.py`)."""
    all_to_all: float = 0.0
    """Share of all-to-all communication between experts in F and I: at least 0, below 1."""
    exchanges: tuple[float, ...] = ()
    """All-to-all share on each stage. If empty, all stages have the same share."""
    hides: float = 1.0
    """Fraction of the hideable all-to-all that a pair hides. At 1, communication and computation
    together take as long as the longer of the two; at 0, they take as long as their sum."""
    seed: int = 0
    """Jitter seed. An action's factor depends only on the seed and the action."""

    def __post_init__(self) -> None:
        times = [self.forward, self.input, self.weight]
        # A stage may take no time in some of its passes, but not in all of them.
        times += [sum(stage_times) for stage_times in self.stages]
        # NaN fails this comparison too.
        if not all(SHORTEST <= time <= _LONGEST for time in times):
            raise ScheduleError(
                f"times of actions must be positive, from {SHORTEST:g} to {_LONGEST:g} in any "
                f"consistent unit, got {', '.join(f'{time:g}' for time in times)}"
            )
        _check_time("the latency of a link", self.latency)
        _check_time("the time of a launch", self.launch)
        for scale in (*self.microbatch_scale, *chain.from_iterable(self.slice_scale)):
            _check_time("factors of micro-batches", scale)
        _check_share("attention", self.attention)
        _check_share("all-to-all", self.all_to_all)
        if not 0 <= self.hides <= 1:
            raise ScheduleError(
                "the share of its all-to-all that a pair hides must be from 0 to 1, got "
                f"{self.hides:g}"
            )
        if self.jitter < 0 or self.link_jitter < 0:
            raise ScheduleError(
                f"jitter must be 0 or more, got {min(self.jitter, self.link_jitter):g}; it is the "
                "sigma of a distribution"
            )

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Parse `F,I,W`, `F,I,W,latency` or `F,I,W,latency,launch`, for example `1,1.2,0.8`.

        Raises:
            ScheduleError: The text is not such a list, or a number is out of range.
        """
        try:
            numbers = [float(number) for number in text.split(",")]
            if len(numbers) > 3:
                # Latency and launch are optional.
                numbers += [0.0] * (5 - len(numbers))
            else:
                # Any count other than three fails to unpack below, which raises a ValueError too.
                numbers += [0.0, 0.0]
            forward, input_gradient, weight, latency, launch = numbers
        except ValueError:
            raise ScheduleError(
                f"costs must be three numbers F,I,W and optionally a latency and the time of a "
                f"launch, for example 1,1.2,0.8 or 1,1,1,0.1 or 1,1,1,0.1,0.02; got {text!r}"
            ) from None
        return cls(forward, input_gradient, weight, latency=latency, launch=launch)

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        numbers = [self.forward, self.input, self.weight]
        if self.latency or self.launch:
            numbers.append(self.latency)
        if self.launch:
            numbers.append(self.launch)
        # A double preserves any decimal number of 15 digits, so a user's number is printed
        # unchanged.
        return ",".join(f"{number:.15g}" for number in numbers)

    def in_forwards(self) -> Costs:
        """Return the costs for `--pipeline-costs`: relative to a forward pass, and rounded."""
        times = (self.input, self.weight, self.latency)
        shares = [f"{time / self.forward:.3g}" for time in times]
        return Costs.parse(",".join(["1", *shares]))

    @property
    def backward(self) -> float:
        """Full backward pass on one device share, Tb + Tw."""
        return self.input + self.weight

    @property
    def work(self) -> float:
        """Total work per micro-batch on one device share, Tf + Tb + Tw."""
        return self.forward + self.backward

    def durations(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return the duration of each kind of action on each stage, without jitter.

        Raises:
            ScheduleError: `stages` does not contain times for every stage.
        """
        share = schedule.pp / schedule.num_stages
        even = (share * self.forward, share * self.input, share * self.weight)
        stages = self.stages or (even,) * schedule.num_stages
        if len(stages) != schedule.num_stages:
            raise ScheduleError(
                f"the costs describe {len(stages)} stages, but {schedule.label} has "
                f"{schedule.num_stages} stages; give the times of each stage"
            )
        durations: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for forward, input_gradient, weight in stages:
            durations["F"].append(forward)
            durations["I"].append(input_gradient)
            durations["W"].append(weight)
            if schedule.ships_activations:
                # Each layer is recomputed just before its backward pass, so B includes the time for
                # R.
                durations["B"].append(input_gradient + weight + forward)
                durations["R"].append(0.0)
            else:
                durations["B"].append(input_gradient + weight)
                durations["R"].append(forward)
        return durations

    def slice_factors(self, slices: Sequence[float]) -> dict[Kind, list[float]]:
        """Return slice factors by kind of action: each slice's share of the time.

        In a backward pass, attention counts toward I, up to the duration of I, because W has no
        attention.
        """
        ends = list(accumulate(slices, initial=0.0))
        # Attention over the tokens up to x costs x^2.
        return self._factors(
            slices, [end * end - start * start for start, end in pairwise(ends)]
        )

    def _factors(
        self, slices: Sequence[float], squares: Sequence[float]
    ) -> dict[Kind, list[float]]:
        """Return factors for slices with these numbers of tokens and token pairs."""
        of_backward = self.attention * self.backward
        # W contains only the attention that does not fit into I.
        of_input = min(of_backward, self.input)
        attention: dict[Kind, float] = {
            "F": self.attention,
            "B": self.attention,
            "I": of_input / self.input,
            "W": (of_backward - of_input) / self.weight,
            "R": self.attention,
        }
        factors: dict[Kind, list[float]] = {}
        for kind, share in attention.items():
            factors[kind] = []
            for tokens, square in zip(slices, squares, strict=True):
                factors[kind].append(share * square + (1 - share) * tokens)
        return factors

    def action_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return factors for all actions by kind, flattened over stage, micro-batch and slice.

        The index is `stage * slices_in_step + microbatch * num_slices + slice`. A factor is the
        product of the jitter, the micro-batch's scale and the slice's share.

        Raises:
            ScheduleError: `microbatch_scale` does not contain one factor per micro-batch.
        """
        count = schedule.num_stages * schedule.slices_in_step
        # Each kind has a separate seed, so splitting backward passes does not change the factors
        # for forward passes.
        factors = {
            kind: self._jitter_factors(self.jitter, kind, count) for kind in KINDS
        }
        scales = self.microbatch_scale or (1.0,) * schedule.num_microbatches
        if len(scales) != schedule.num_microbatches:
            raise ScheduleError(
                f"microbatch_scale has {len(scales)} factors, but {schedule.label} has "
                f"{schedule.num_microbatches} micro-batches; give one factor for each"
            )
        if schedule.slice_sizes:
            for kind, of_stage in self._factors_by_length(schedule).items():
                factors[kind] = list(
                    map(mul, factors[kind], of_stage * schedule.num_stages)
                )
            return factors
        for kind, shares in self.slice_factors(schedule.slices).items():
            # By micro-batch and slice. All stages have the same factors.
            of_stage = []
            for scale in scales:
                of_stage += [scale * share for share in shares]
            factors[kind] = list(
                map(mul, factors[kind], of_stage * schedule.num_stages)
            )
        return factors

    def factors_of(
        self, microbatch: int, sizes: Sequence[float]
    ) -> dict[Kind, list[float]]:
        """Return the factors for one micro-batch's slices, by kind; `sizes` are in tokens."""
        if not (self.slice_scale and self.attention):
            return self.slice_factors(sizes)
        # Any cost of a slice beyond its tokens is attention, whichever samples the slice belongs
        # to.
        squares = []
        for scale, size in zip(self.slice_scale[microbatch], sizes, strict=True):
            squares.append((scale - (1 - self.attention) * size) / self.attention)
        return self._factors(sizes, squares)

    def _factors_by_length(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return factors for slices by length, by kind, flattened over micro-batch and slice."""
        of_stage: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for microbatch in range(schedule.num_microbatches):
            sizes = schedule.sizes_of(microbatch)
            factors = self.factors_of(microbatch, sizes)
            empty_places = [0.0] * (schedule.num_slices - len(sizes))
            for kind in KINDS:
                # `simulate` indexes by place, so micro-batches with fewer slices need empty places.
                of_stage[kind] += factors[kind] + empty_places
        return of_stage

    def link_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return jitter factors for messages by the sending action's kind; B also covers I."""
        count = schedule.num_stages * schedule.slices_in_step
        return {
            "F": self._jitter_factors(self.link_jitter, "link F", count),
            "B": self._jitter_factors(self.link_jitter, "link B", count),
        }

    def _jitter_factors(self, sigma: float, purpose: str, count: int) -> list[float]:
        """Draw log-normal factors with mean 1. `purpose` is part of the seed."""
        if not sigma:
            return [1.0] * count
        # The seed depends on the purpose, so tables with the same stages draw the same factors
        # regardless of their order. A comparison then shows only the effect of the order.
        draw = random.Random(f"{self.seed} {purpose}").lognormvariate  # noqa: S311 - no secret
        # The mean of a log-normal variable is exp(mu + sigma^2 / 2), which this mu makes 1.
        mu = -sigma * sigma / 2
        return [draw(mu, sigma) for _ in range(count)]


def _check_time(name: str, value: float) -> None:
    if not 0 <= value <= _LONGEST:
        raise ScheduleError(
            f"{name} must be 0 or more, up to {_LONGEST:g}, got {value:g}"
        )


def _check_share(name: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ScheduleError(
            f"the share of {name} must be from 0 to less than 1, got {share:g}"
        )


UNIT = Costs()
"""Tf = Tb = Tw = 1 and no latency: the units in published bubble formulas."""


# Ratio of all-to-all to computation, for costs without all-to-all: the middle of the three ratios
# in `benchmarks/expert_overlap.py`.
_DEFAULT_EXCHANGE = 0.6


def exchanging(costs: Costs) -> Costs:
    """Return costs that include all-to-all; if they have none, add a typical share.

    Equal times, the default, cover only computation, so adding all-to-all makes forward passes and
    input gradients longer. Other times are measurements that already include all-to-all, so they
    stay the same.
    """
    if costs.all_to_all:
        return costs
    scale = 1.0
    if costs.forward == costs.input == costs.weight:
        scale += _DEFAULT_EXCHANGE
    return replace(
        costs,
        forward=scale * costs.forward,
        input=scale * costs.input,
        all_to_all=_DEFAULT_EXCHANGE / (1 + _DEFAULT_EXCHANGE),
    )
