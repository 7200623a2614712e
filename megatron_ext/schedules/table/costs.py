"""Durations of actions and messages, from which the simulator computes times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from operator import mul

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import KINDS, Kind, Schedule

AHEAD = 2
"""Maximum number of launched but unfinished actions on a device: one runs, and the next one waits
in the device's queue. With only one, the device would idle between actions. More than two would use
more memory for no benefit."""

# Durations in this range add up without visible rounding errors, even in the largest tables.
SHORTEST = 1e-9
_LONGEST = 1e9
MAX_ATTENTION = 1 - 2**-20
"""The largest supported attention share."""


@dataclass(frozen=True)
class Costs:
    """Durations in any consistent unit. By default, a forward pass on one device share takes 1.

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
    """By stage: forward, input-gradient and weight-gradient times, for uneven stages. If empty, all
    stages are equal shares of the model."""
    microbatch_scale: tuple[float, ...] = ()
    """By micro-batch: factor on its durations, for uneven lengths. If empty, all factors are 1."""
    slice_scale: tuple[tuple[float, ...], ...] = ()
    """For tables with slices by length: the forward time of every slice in every micro-batch,
    relative to a single sample as long as the longest micro-batch. If empty, every micro-batch is
    one sample, and `Schedule.slice_sizes` and `attention` determine its cost."""
    jitter: float = 0.0
    """Sigma of the log-normal factor (mean 1) on action durations."""
    link_jitter: float = 0.0
    """Sigma of the log-normal factor (mean 1) on message latencies."""
    launch: float = 0.0
    """Host time to launch an action on a device, or 0 if the host itself computes the action. A
    launch starts once at most `AHEAD - 1` earlier actions on the rank are still running."""
    attention: float = 0.0
    """Share of core attention in forward passes and in full backward passes: at least 0, below 1.
    Attention's cost grows with the square of the length, so slices of equal length differ in cost
    (`slices.py`)."""
    all_to_all: float = 0.0
    """Share of all-to-all communication between experts in F and I: at least 0, below 1."""
    exchanges: tuple[float, ...] = ()
    """By stage: all-to-all share. If empty, all stages have the same share."""
    hides: float = 1.0
    """Fraction of the hideable all-to-all that a pair hides. At 1, communication and computation
    together take as long as the longer of the two. At 0, they take as long as their sum."""
    seed: int = 0
    """Jitter seed. An action's factor depends only on the seed and the action."""

    def __post_init__(self) -> None:
        times = [self.forward, self.input, self.weight]
        # Some of a stage's passes may take no time, but not all of them.
        times += [sum(stage_times) for stage_times in self.stages]
        # NaN fails this comparison, too.
        if not all(SHORTEST <= time <= _LONGEST for time in times):
            raise ScheduleError(
                f"action times must be positive, between {SHORTEST:g} and {_LONGEST:g} in any "
                f"consistent unit, got {', '.join(f'{time:g}' for time in times)}"
            )
        _check_time("link latency", self.latency)
        _check_time("launch time", self.launch)
        slice_scales = chain.from_iterable(self.slice_scale)
        for scale in (*self.microbatch_scale, *slice_scales):
            _check_time("micro-batch factors", scale)
        _check_share("attention", self.attention)
        _check_share("all-to-all", self.all_to_all)
        if not 0 <= self.hides <= 1:
            raise ScheduleError(
                "the share of all-to-all that a pair hides must be between 0 and 1, got "
                f"{self.hides:g}"
            )
        if self.jitter < 0 or self.link_jitter < 0:
            raise ScheduleError(
                f"jitter must be at least 0, got {min(self.jitter, self.link_jitter):g}; it is the "
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
                # Any count other than three fails to unpack below, which raises
                # ValueError as well.
                numbers += [0.0, 0.0]
            forward, input_gradient, weight, latency, launch = numbers
        except ValueError:
            raise ScheduleError(
                f"costs must be three numbers F,I,W and optionally a latency and a launch time, "
                f"for example 1,1.2,0.8 or 1,1,1,0.1 or 1,1,1,0.1,0.02; got {text!r}"
            ) from None
        return cls(forward, input_gradient, weight, latency=latency, launch=launch)

    def __str__(self) -> str:
        """Return the text that `parse` accepts."""
        numbers = [self.forward, self.input, self.weight]
        if self.latency or self.launch:
            numbers.append(self.latency)
        if self.launch:
            numbers.append(self.launch)
        # A double preserves any 15-digit decimal number, so a user's number is printed
        # unchanged.
        return ",".join(f"{number:.15g}" for number in numbers)

    def in_forwards(self) -> Costs:
        """Return the costs for `--pipeline-costs`: rounded, and relative to a forward pass."""
        times = (self.input, self.weight, self.latency)
        numbers = ["1"]
        for time in times:
            numbers.append(f"{time / self.forward:.3g}")
        return Costs.parse(",".join(numbers))

    @property
    def backward(self) -> float:
        """Full backward pass on one device share, Tb + Tw."""
        return self.input + self.weight

    @property
    def work(self) -> float:
        """Total work per micro-batch on one device share, Tf + Tb + Tw."""
        return self.forward + self.backward

    def durations(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return the duration of every kind of action on every stage, without jitter.

        Raises:
            ScheduleError: `stages` does not contain times for every stage.
        """
        share = schedule.pp / schedule.num_stages
        even = (
            share * self.forward,
            share * self.input,
            share * self.weight,
        )
        stages = self.stages or (even,) * schedule.num_stages
        if len(stages) != schedule.num_stages:
            raise ScheduleError(
                f"the costs describe {len(stages)} stages, but {schedule.label} has "
                f"{schedule.num_stages} stages; give times for every stage"
            )
        durations: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for forward, input_gradient, weight in stages:
            durations["F"].append(forward)
            durations["I"].append(input_gradient)
            durations["W"].append(weight)
            if schedule.ships_activations:
                # Every layer is recomputed just before its backward pass, so B includes
                # R's time.
                durations["B"].append(input_gradient + weight + forward)
                durations["R"].append(0.0)
            else:
                durations["B"].append(input_gradient + weight)
                durations["R"].append(forward)
        return durations

    def slice_factors(self, slices: Sequence[float]) -> dict[Kind, list[float]]:
        """Return every slice's share of the time, by kind of action.

        In a backward pass, attention counts toward I, up to I's duration, because W has no
        attention.
        """
        ends = list(accumulate(slices, initial=0.0))
        squares = []
        for start, end in pairwise(ends):
            # Attention over the tokens up to x costs x^2.
            squares.append(end * end - start * start)
        return self._factors(slices, squares)

    def _factors(
        self, slices: Sequence[float], squares: Sequence[float]
    ) -> dict[Kind, list[float]]:
        """Return the factors for slices with these numbers of tokens and this cost of attention."""
        of_backward = self.attention * self.backward
        # W contains only the attention that does not fit in I.
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
            linear_share = 1 - share
            for tokens, square in zip(slices, squares, strict=True):
                factors[kind].append(share * square + linear_share * tokens)
        return factors

    def action_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return all actions' factors by kind, flattened over stage, micro-batch and slice.

        The index is `stage * places_per_stage + microbatch * num_slices + slice`. A factor is the
        product of the jitter, the micro-batch's scale and the slice's share.

        Raises:
            ScheduleError: `microbatch_scale` does not contain one factor per micro-batch.
        """
        count = schedule.num_stages * schedule.places_per_stage
        # Every kind has its own seed, so splitting backward passes does not change the
        # factors of forward passes.
        factors: dict[Kind, list[float]] = {}
        for kind in KINDS:
            factors[kind] = self._jitter_factors(self.jitter, kind, count)
        scales = self.microbatch_scale or (1.0,) * schedule.num_microbatches
        if len(scales) != schedule.num_microbatches:
            raise ScheduleError(
                f"microbatch_scale has {len(scales)} factors, but {schedule.label} has "
                f"{schedule.num_microbatches} micro-batches; give one factor per micro-batch"
            )
        if schedule.slice_sizes:
            for kind, of_stage in self._factors_by_length(schedule).items():
                factors[kind] = list(
                    map(mul, factors[kind], of_stage * schedule.num_stages)
                )
            return factors
        for kind, shares in self.slice_factors(schedule.slices).items():
            # Ordered by micro-batch and slice. All stages have the same factors.
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
        """Return the factors of one micro-batch's slices, by kind.

        `sizes` are as in `Schedule.sizes_of`.
        """
        if not (self.slice_scale and self.attention):
            return self.slice_factors(sizes)
        # Whatever a slice costs beyond its tokens is attention, no matter which samples
        # it belongs to.
        linear_share = 1 - self.attention
        scales = self.slice_scale[microbatch]
        squares = []
        for scale, size in zip(scales, sizes, strict=True):
            attention_time = scale - linear_share * size
            squares.append(attention_time / self.attention)
        return self._factors(sizes, squares)

    def _factors_by_length(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return the factors by kind for slices by length, flattened over micro-batch and slice."""
        of_stage: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
        for microbatch in range(schedule.num_microbatches):
            sizes = schedule.sizes_of(microbatch)
            factors = self.factors_of(microbatch, sizes)
            num_empty_places = schedule.num_slices - len(sizes)
            empty_places = [0.0] * num_empty_places
            for kind in KINDS:
                # `simulate` indexes by place, so micro-batches with fewer slices need empty places.
                of_stage[kind] += factors[kind] + empty_places
        return of_stage

    def link_factors(self, schedule: Schedule) -> dict[Kind, list[float]]:
        """Return messages' jitter factors by the sending action's kind. B covers I as well."""
        count = schedule.num_stages * schedule.places_per_stage
        sigma = self.link_jitter
        return {
            "F": self._jitter_factors(sigma, "link F", count),
            "B": self._jitter_factors(sigma, "link B", count),
        }

    def _jitter_factors(self, sigma: float, purpose: str, count: int) -> list[float]:
        """Draw log-normal factors with mean 1. `purpose` is part of the seed."""
        if not sigma:
            return [1.0] * count
        # The seed depends on the purpose, so tables with the same stages draw the same
        # factors in any order. A comparison therefore shows only the effect of the
        # order.
        generator = random.Random(f"{self.seed} {purpose}")  # noqa: S311 - no secret
        draw = generator.lognormvariate
        # The mean of a log-normal variable is exp(mu + sigma^2 / 2), which this mu makes 1.
        mu = -sigma * sigma / 2
        return [draw(mu, sigma) for _ in range(count)]


def _check_time(name: str, value: float) -> None:
    if not 0 <= value <= _LONGEST:
        raise ScheduleError(f"{name} must be between 0 and {_LONGEST:g}, got {value:g}")


def _check_share(name: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ScheduleError(
            f"the share of {name} must be at least 0 and below 1, got {share:g}"
        )


UNIT = Costs()
"""Tf = Tb = Tw = 1 and no latency: the units of published bubble formulas."""


# Ratio of all-to-all to computation, for costs that contain no all-to-all: the middle
# of the three ratios in `benchmarks/expert_overlap.py`.
_DEFAULT_EXCHANGE = 0.6


def exchanging(costs: Costs) -> Costs:
    """Return costs that include all-to-all, adding a typical share if they have none.

    Equal times, the default, cover only computation, so adding all-to-all lengthens forward passes
    and input gradients. Other times are measurements that already include all-to-all, so they stay
    the same.
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
