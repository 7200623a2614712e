"""Runs every rank's actions as soon as their inputs exist, and records the times.

Each rank is a generator: it runs its list until it needs an input that does not exist yet, and
resumes when it does. Tables of millions of actions go through this loop, so everything it needs for
an action is in local variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ext.schedules.table.topological import execution_order

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Clock
    from megatron_ext.schedules.table.actions import Kind, Schedule

__all__ = ["Replay"]


class Replay:
    """One step of a table.

    The key of a tensor's arrival time is `area + stage * num_microbatches + microbatch`. The areas
    are: inputs of stages, gradients of their outputs, and inputs of R in disaggregated tables.

    Args:
        clock: Receives the times of all actions.
    """

    def __init__(self, clock: Clock) -> None:
        schedule = clock.schedule
        m, count = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
        self._clock = clock
        self._there: list[float | None] = [None] * ((3 if schedule.disaggregated else 2) * count)
        data = [0.0] * m
        self._there[:m] = data
        self._there[2 * count - m : 2 * count] = data  # the loss produces its own gradient
        if schedule.disaggregated and not schedule.ships_activations:
            self._there[2 * count : 2 * count + m] = data  # R of the first stage reads the data
        self._awaited: dict[int, int] = {}
        """By missing tensor: the rank that waits for it."""
        self._ready = list(range(len(schedule.rows)))[::-1]
        self._steps = {
            kind: [(*_areas(kind, stage, schedule), time) for stage, time in enumerate(times)]
            for kind, times in clock.durations.items()
        }

    def run(self) -> None:
        """Run all ranks to completion.

        Raises:
            ScheduleError: They deadlock; the message shows the cycle.
        """
        ranks = [self._rank(rank) for rank in range(len(self._clock.schedule.rows))]
        while self._ready:
            next(ranks[self._ready.pop()], None)
        if self._awaited:
            execution_order(self._clock.schedule)
            raise AssertionError(f"{self._clock.schedule.label} stopped, but has an order")

    def _rank(self, rank: int) -> Iterator[None]:
        """Run the list of a rank; yield when it must wait."""
        clock, there, awaited, ready = self._clock, self._there, self._awaited, self._ready
        steps, factors, links = self._steps, clock.factors, clock.links
        m, sends = clock.schedule.num_microbatches, clock.schedule.disaggregated
        begin, end = clock.starts[rank].append, clock.ends[rank].append
        launch, now, last, launched = clock.launch, 0.0, 0.0, 0.0
        for stage, kind, microbatch in clock.schedule.rows[rank]:
            needs, makes, time = steps[kind][stage]
            ended = now
            if needs >= 0:
                at = there[needs + microbatch]
                if at is None:
                    awaited[needs + microbatch] = rank
                    yield
                    at = there[needs + microbatch]
                    assert at is not None, "resumed too early"
                if at > now:
                    now = at
            if launch:  # `last` ended before the action that ended now: AHEAD is 2
                launched = max(launched, last) + launch
                last, now = ended, max(now, launched)
            begin(now)
            now += time if factors is None else time * factors[kind][stage * m + microbatch]
            end(now)
            if sends and kind == "F":
                self._to_backward_rank(stage, stage * m + microbatch, now)
            if makes >= 0:
                made = makes + microbatch
                there[made] = now
                if not links.free_of_charge:
                    there[made] = links.arrival(kind, stage, stage * m + microbatch, now)
                if made in awaited:
                    ready.append(awaited.pop(made))

    def _to_backward_rank(self, stage: int, key: int, end: float) -> None:
        """Record when the input of R arrives: the next stage's input or shipped activations."""
        schedule = self._clock.schedule
        target, made = stage, key
        if not schedule.ships_activations:
            if stage == schedule.num_stages - 1:
                return
            target, made = stage + 1, key + schedule.num_microbatches
        made += 2 * schedule.num_stages * schedule.num_microbatches
        self._there[made] = self._clock.links.to_backward_rank(stage, target, key, end)
        if made in self._awaited:
            self._ready.append(self._awaited.pop(made))


def _areas(kind: Kind, stage: int, schedule: Schedule) -> tuple[int, int]:
    """Return the keys of the input and the output of an action for micro-batch 0.

    -1: it needs no input from another action, or produces none for another.
    """
    m, last = schedule.num_microbatches, schedule.num_stages - 1
    gradients = (last + 1) * m
    if kind == "F":
        return stage * m, -1 if stage == last else (stage + 1) * m
    if kind == "R":
        return 2 * gradients + stage * m, -1
    if kind == "W":
        return -1, -1
    return gradients + stage * m, gradients + (stage - 1) * m if stage else -1
