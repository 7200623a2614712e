"""Gain from waiting weight gradients if experts get unequal numbers of tokens, by simulation.

    python benchmarks/expert_imbalance.py [--imbalance X ...] [--waiting N ...]
        [--exchange-share S] [--quick]

Each pipeline rank is a group of expert ranks, which run the same row of a table and meet in every
token exchange. A layer computes attention, which takes 1, exchanges tokens, computes experts, which
take 1 on average, and exchanges tokens again. A pair runs the parts of its two halves in the order
of Megatron's plans. A device has one stream for actions, one for exchanges and a low-priority one
for W. Kernels do not share the device: of those that are ready, an action's kernel goes first, and
a kernel that has started runs to the end. Exchanges use no multiprocessors, or a share of them
(`--exchange-share`). Not simulated: W and actions sharing a device's memory bandwidth, and the
host's launches.

The imbalance is a layer's largest load over its mean, averaged over layers and micro-batches. Loads
are log-normal, and half of the deviation belongs to the layer for the whole step. Columns:

    T/work       step time over a rank's mean work
    T/busiest    step time over the busiest rank's work, which no order can beat
    activations  on the worst rank, including those that wait, in units of one micro-batch on 1/pp
                 of the model
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.command import markdown, options
from benchmarks.harness.loads import Size, drawn
from megatron_ext.schedules import Action, Costs, Schedule, generate
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.schedules.table.transforms import weights_waiting

LAYERS = 4
"""Layers per pipeline rank."""
_SEEDS = 3

Loads = Sequence[Sequence[Sequence[Sequence[float]]]]
"""Time of the experts, by stage, layer within the stage, micro-batch and expert rank."""


@dataclass(eq=False)
class _Task:
    """A kernel, an exchange, or a point that other tasks wait for."""

    duration: float = 0.0
    stream: deque[_Task] | None = None
    """The stream that runs it, or None for a point, which takes no time."""
    device: _Device | None = None
    meeting: list[_Task] | None = None
    """The exchange's tasks on all ranks, or None if this is not an exchange."""
    num_missing: int = 0
    """Number of tasks that must end first."""
    followers: list[_Task] = field(default_factory=list)
    has_arrived: bool = False

    def after(self, *tasks: _Task) -> _Task:
        """Make this task wait for others and return it."""
        for task in tasks:
            task.followers.append(self)
        self.num_missing += len(tasks)
        return self


@dataclass(eq=False)
class _Device:
    """A device with three streams that runs kernels one at a time."""

    actions: deque[_Task] = field(default_factory=deque)
    weights: deque[_Task] = field(default_factory=deque)
    exchanges: deque[_Task] = field(default_factory=deque)
    is_busy: bool = False
    used_by_exchanges: float = 0.0
    """Device time that exchanges have used and that has not delayed a kernel yet."""

    def kernel(self, stream: deque[_Task], duration: float, *after: _Task) -> _Task:
        """Add a kernel to a stream."""
        task = _Task(duration, stream, self).after(*after)
        stream.append(task)
        return task

    def exchange(self, duration: float, meeting: list[_Task], *after: _Task) -> _Task:
        """Add this rank's part of an exchange."""
        task = _Task(duration, self.exchanges, self, meeting).after(*after)
        self.exchanges.append(task)
        meeting.append(task)
        return task


class Simulation:
    """One step of a table on groups of expert ranks.

    Args:
        table: The table.
        loads: Times of the experts.
        exchange: Time of an exchange.
        exchange_share: Share of the device that an exchange uses.
        fills: Whether W runs in a low-priority stream, behind its I.
    """

    def __init__(
        self,
        table: Schedule,
        loads: Loads,
        *,
        exchange: float,
        exchange_share: float = 0.0,
        fills: bool = False,
    ) -> None:
        self._table, self._loads = table, loads
        self._exchange, self._exchange_share = exchange, exchange_share
        self._fills = fills
        self._num_experts = len(loads[0][0][0])
        # (action, expert rank) -> the point at which its result is available.
        self._ends: dict[tuple[Action, int], _Task] = {}
        # (action, layer, part) -> the tasks of an exchange.
        self._meetings: dict[tuple[Action, int, str], list[_Task]] = {}
        self._devices: list[_Device] = []
        self._events: list[tuple[float, int, _Task]] = []
        self._num_started = 0
        self._sources: dict[Action, list[Action]] = {}
        for row in table.rows:
            for source in row:
                for target in table.feeds(source):
                    self._sources.setdefault(target, []).append(source)
        for row in table.rows:
            for action in row:
                for expert_rank in range(self._num_experts):
                    self._ends[action, expert_rank] = _Task()
        for rank in range(len(table.rows)):
            for expert_rank in range(self._num_experts):
                self._build(rank, expert_rank)

    def time(self) -> float:
        """Run the step and return how long it takes."""
        now = 0.0
        for end in self._ends.values():
            assert end.num_missing, "an action without tasks"
        for device in self._devices:
            self._start(device, now)
        while self._events:
            now, _, task = heapq.heappop(self._events)
            changed = self._end(task)
            # End everything that is due now before starting a kernel,
            # so that priorities decide.
            while self._events and self._events[0][0] <= now + 1e-9:
                changed |= self._end(heapq.heappop(self._events)[2])
            for device in sorted(changed, key=self._devices.index):
                self._start(device, now)
        for device in self._devices:
            left = len(device.actions) + len(device.weights) + len(device.exchanges)
            assert not left, f"{left} tasks never ran"
        return now

    # -- the tasks ---------------------------------------------------------------------------------

    def _build(self, rank: int, expert_rank: int) -> None:
        device = _Device()
        self._devices.append(device)
        row, pair_begins = self._table.rows[rank], self._table.pairs_of(rank)
        previous: list[_Task] = []
        for index in self._table.begins(rank):
            actions = row[index : index + (2 if index in pair_begins else 1)]
            begin = _Task().after(*previous)
            for action in actions:
                for source in self._sources.get(action, ()):
                    begin.after(self._ends[source, expert_rank])
            if not begin.num_missing:
                begin = device.kernel(device.actions, 0.0)
            lasts = self._tasks(device, actions, expert_rank, begin)
            for action, last in zip(actions, lasts, strict=True):
                self._ends[action, expert_rank].after(last)
            # The next action's kernels wait for the results of both.
            previous = lasts

    def _tasks(
        self, device: _Device, actions: Sequence[Action], expert_rank: int, begin: _Task
    ) -> list[_Task]:
        """Add the tasks of an action or a pair, and return each action's last task."""
        if actions[0].kind == "W":
            return [self._weight_tasks(device, actions[0], expert_rank, begin)]
        halves = [_Half(self, device, action, expert_rank, begin) for action in actions]
        num_layers = max(half.num_layers for half in halves)
        for _ in range(num_layers):
            # A backward exchanges before it computes, so a plan that
            # alternates runs the attention of F, the experts of B, the experts
            # of F and the attention of B.
            for part in range(4):
                for half in halves:
                    half.add(part)
            for half in halves:
                half.next_layer()
        return [half.last for half in halves]

    def _weight_tasks(
        self, device: _Device, action: Action, expert_rank: int, begin: _Task
    ) -> _Task:
        """Add a W's kernels and return the task that the next action waits for."""
        layers = self._loads[action.stage]
        if not self._fills:
            last = begin
            for layer in layers:
                for duration in (layer[action.microbatch][expert_rank], 1.0):
                    last = device.kernel(device.actions, duration, last)
            return last
        last = self._ends[action._replace(kind="I"), expert_rank]
        for layer in layers:
            for duration in (layer[action.microbatch][expert_rank], 1.0):
                last = device.kernel(device.weights, duration, last)
        return _Task().after(begin, last)

    def meeting(self, action: Action, layer: int, part: str) -> list[_Task]:
        """Return the tasks of an exchange, to which every rank adds one."""
        return self._meetings.setdefault((action, layer, part), [])

    def load(self, action: Action, layer: int, expert_rank: int) -> float:
        """Return the time that a layer's experts take."""
        return self._loads[action.stage][layer][action.microbatch][expert_rank]

    def num_layers(self, stage: int) -> int:
        """Return the number of layers on a stage."""
        return len(self._loads[stage])

    @property
    def exchange(self) -> float:
        """Time of an exchange."""
        return self._exchange

    # -- events ------------------------------------------------------------------------------------

    def _start(self, device: _Device, now: float) -> None:
        """Start whatever is ready to run on a device."""
        if device.exchanges:
            task = device.exchanges[0]
            if not task.num_missing and not task.has_arrived:
                task.has_arrived = True
                meeting = task.meeting
                assert meeting is not None
                if all(other.has_arrived for other in meeting):
                    for other in meeting:
                        assert other.device is not None
                        used = self._exchange_share * other.duration
                        other.device.used_by_exchanges += used
                        self._schedule(other, now + other.duration)
        if device.is_busy:
            return
        for stream in (device.actions, device.weights):
            if stream and not stream[0].num_missing:
                device.is_busy = True
                duration = stream[0].duration + device.used_by_exchanges
                device.used_by_exchanges = 0.0
                self._schedule(stream[0], now + duration)
                return

    def _schedule(self, task: _Task, end: float) -> None:
        self._num_started += 1
        heapq.heappush(self._events, (end, self._num_started, task))

    def _end(self, task: _Task) -> set[_Device]:
        """End a task and the points that waited only for it. Return the devices that changed."""
        changed: set[_Device] = set()
        ended = [task]
        while ended:
            task = ended.pop()
            if task.stream is not None:
                assert task.device is not None
                task.stream.popleft()
                if task.meeting is None:
                    task.device.is_busy = False
                changed.add(task.device)
            for follower in task.followers:
                follower.num_missing -= 1
                if follower.num_missing:
                    continue
                if follower.stream is None:
                    ended.append(follower)
                else:
                    assert follower.device is not None
                    changed.add(follower.device)
        return changed


class _Half:
    """An action, alone or in a pair, whose layers are added one by one."""

    def __init__(
        self,
        simulation: Simulation,
        device: _Device,
        action: Action,
        expert_rank: int,
        begin: _Task,
    ) -> None:
        self._simulation, self._device = simulation, device
        self._action, self._expert_rank = action, expert_rank
        self.num_layers = simulation.num_layers(action.stage)
        self.last = begin
        self._layer = 0

    def add(self, part: int) -> None:
        """Add one of the current layer's four parts, in a plan's order, if a layer is left."""
        if self._layer == self.num_layers:
            return
        is_forward = self._action.kind == "F"
        # An unsplit backward computes both gradients.
        gradients = 2.0 if self._action.kind == "B" else 1.0
        layer = self._layer if is_forward else self.num_layers - 1 - self._layer
        exchanges = part % 2 == (1 if is_forward else 0)
        if exchanges:
            meeting = self._simulation.meeting(self._action, layer, str(part))
            self.last = self._device.exchange(
                self._simulation.exchange, meeting, self.last
            )
            return
        computes_experts = part == (2 if is_forward else 1)
        duration = gradients
        if computes_experts:
            duration *= self._simulation.load(self._action, layer, self._expert_rank)
        self.last = self._device.kernel(self._device.actions, duration, self.last)

    def next_layer(self) -> None:
        """Move on to the next layer."""
        self._layer = min(self._layer + 1, self.num_layers)


# -- loads -----------------------------------------------------------------------------------------


def loads_of(
    table: Schedule, num_experts: int, sigma: float, seed: int, persistence: float = 0.5
) -> Loads:
    """Draw the times of experts, with a mean of 1 for every layer and micro-batch.

    Args:
        table: The table, which determines the stages and micro-batches.
        num_experts: Number of ranks in an expert group.
        sigma: Standard deviation of the logarithm.
        seed: Seed of the draws.
        persistence: Exponent of the part that a layer keeps for the whole step.
    """
    layers_per_stage = LAYERS * len(table.rows) // table.num_stages
    size = Size(
        layers_per_stage * table.num_stages, table.num_microbatches, num_experts
    )
    loads = drawn(size, sigma, seed, persistence)
    by_stage = []
    for stage in range(table.num_stages):
        first = stage * layers_per_stage
        by_stage.append(loads[first : first + layers_per_stage])
    return by_stage


def imbalance_of(loads: Loads) -> float:
    """Return the ratio of the largest load to the mean, averaged over layers and micro-batches."""
    return statistics.fmean(
        max(times) for stage in loads for layer in stage for times in layer
    )  # every mean is 1


def sigma_for(table: Schedule, num_experts: int, imbalance: float) -> float:
    """Return the standard deviation that gives draws this imbalance."""
    low, high = 0.0, 8.0
    for _ in range(24):
        middle = (low + high) / 2
        if imbalance_of(loads_of(table, num_experts, middle, seed=0)) < imbalance:
            low = middle
        else:
            high = middle
    return high


def busiest(table: Schedule, loads: Loads) -> float:
    """Return the busiest rank's work over the mean of its expert group."""
    highest_ratio = 1.0
    for stages in table.placement.stages_of:
        num_experts = len(loads[0][0][0])
        work = [0.0] * num_experts
        for stage in stages:
            for layer in loads[stage]:
                for times in layer:
                    work = [
                        total + 1 + time
                        for total, time in zip(work, times, strict=True)
                    ]
        ratio = max(work) / statistics.fmean(work)
        highest_ratio = max(highest_ratio, ratio)
    return highest_ratio


# -- the command -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _System:
    name: str
    schedule: str
    pairs: bool = True
    waiting: int | None = None
    """Number of W that may wait, or None to run W where the table has it."""
    fills: bool = True

    def table(self, pp: int, num_microbatches: int, exchange: float) -> Schedule:
        """Return the table, generated for exchanges of this length."""
        share = exchange / (1 + exchange)
        costs = Costs(1 + exchange, 1 + exchange, 1, all_to_all=share)
        options = {"pairs": True} if self.pairs else {}
        table = generate(self.schedule, pp, num_microbatches, None, costs, **options)
        return table if self.waiting is None else weights_waiting(table, self.waiting)


_HEADER = ("order", "T/work", "T/busiest", "activations")


def systems(numbers_waiting: Sequence[int]) -> list[_System]:
    """Return the rows of the printed table."""
    rows = [
        _System("zb-h1, whole actions", "zb-h1", pairs=False),
        _System("interleaved, pairs", "interleaved"),
    ]
    for schedule in ("zb-h1", "zb-v"):
        rows.append(_System(f"{schedule}, pairs", schedule))
        for number in numbers_waiting:
            name = f"{schedule}, pairs, {number} waiting"
            rows.append(_System(name, schedule, waiting=number))
        max_waiting = max(numbers_waiting)
        name = f"{schedule}, pairs, {max_waiting} waiting, never overlapped"
        rows.append(_System(name, schedule, waiting=max_waiting, fills=False))
    return rows


def _figures(
    table: Schedule, imbalance: float, num_experts: int, num_seeds: int, **settings: Any
) -> tuple[str, ...]:
    """Return a table's figures as printed."""
    sigma = sigma_for(table, num_experts, imbalance) if imbalance > 1 else 0.0
    work = 3 * table.num_microbatches * LAYERS * 2.0
    over_mean: list[float] = []
    over_busiest: list[float] = []
    for seed in range(num_seeds if sigma else 1):
        loads = loads_of(table, num_experts, sigma, seed)
        over_mean.append(Simulation(table, loads, **settings).time() / work)
        over_busiest.append(over_mean[-1] / busiest(table, loads))
    return (
        f"{statistics.fmean(over_mean):.3f}",
        f"{statistics.fmean(over_busiest):.3f}",
        f"{max(activation_peaks(table)):g}",
    )


def main() -> None:
    """Simulate and print the results."""
    parser = options(__doc__, "few ranks and micro-batches, only one imbalance")
    add = parser.add_argument
    add("--imbalance", type=float, nargs="+", default=[1.2, 1.66, 2.2], metavar="X",
        help="ratio of a layer's largest load to its mean")  # fmt: skip
    add("--waiting", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="W that may wait")  # fmt: skip
    add("--exchange", type=float, default=0.3, metavar="T",
        help="time of an exchange, relative to a layer's attention")  # fmt: skip
    add("--exchange-share", type=float, default=0.0, metavar="S",
        help="share of the device that an exchange uses")  # fmt: skip
    args = parser.parse_args()
    pp, num_microbatches, num_experts, num_seeds = 4, 16, 8, _SEEDS
    if args.quick:
        pp, num_microbatches, num_experts, num_seeds = 2, 6, 4, 1
        args.imbalance, args.waiting = args.imbalance[-1:], args.waiting[-1:]
    compared = systems(args.waiting)
    for imbalance in (1.0, *args.imbalance):
        rows = []
        for system in compared:
            table = system.table(pp, num_microbatches, args.exchange)
            figures = _figures(
                table,
                imbalance,
                num_experts,
                num_seeds,
                exchange=args.exchange,
                exchange_share=args.exchange_share,
                fills=system.fills and system.waiting is not None,
            )
            rows.append((system.name, *figures))
        print(f"Imbalance {imbalance:g}:\n")
        print(f"{markdown(_HEADER, rows)}\n", flush=True)
    print(
        f"pp {pp}, {num_experts} expert ranks, {num_microbatches} micro-batches, {LAYERS} layers "
        f"per pipeline rank, an exchange takes {args.exchange:g} and uses {args.exchange_share:g} "
        f"of the device, mean of {num_seeds} draws; simulated."
    )


if __name__ == "__main__":
    main()
