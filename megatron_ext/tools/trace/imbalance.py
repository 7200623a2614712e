"""Measures how long experts wait for each other in a traced run, and for which rank.

A token exchange ends at the same time on all ranks of an expert group. If it takes longer on one
rank than on the rank where it is shortest, the difference is how long the former waited for the
latter, which arrived last. This comparison does not require a common clock.

Between two exchanges, every rank in a group either works or waits, and the total time is the same
for all ranks. Filling the waiting time with other work can save at most the time per step that the
step's busiest rank waits. Dividing the experts evenly can shorten a step to the mean work per rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.tools.trace.survey import RankSurvey, figures

if TYPE_CHECKING:
    from megatron_ext.tools.trace.aggregate import Run

_WORTH = 0.01
"""Waiting is reported if it takes up at least this share of a step."""
_MAX_LINES = 8


class Place(NamedTuple):
    """A layer, as the trace identifies it."""

    stage: int
    layer: int
    """Index within the stage."""


class _GroupKey(NamedTuple):
    """Identifies an expert group and one of its expert-tensor ranks."""

    stage: int
    group: int
    expert_tensor_rank: int


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that exchange tokens with each other. All times are per step, in nanoseconds."""

    ranks: tuple[int, ...]
    """Global ranks."""
    step_ns: float
    waited_ns: Mapping[int, float]
    """Global rank -> how long it waited for other ranks in the group."""
    waited_by_layer_ns: Mapping[Place, Mapping[int, float]]
    """Layer -> global rank -> how long it waited in this layer."""
    fillable_ns: float
    """Waiting time on each step's busiest rank, which a different action order could fill."""
    share_busiest: Mapping[int, float]
    """Global rank -> the share of steps in which it waited least."""
    share_last: Mapping[int, float]
    """Global rank -> the share of exchanges in which it was the slowest."""
    weights_ns: float
    """Time spent on separate weight gradients, on the rank where it is shortest."""

    @property
    def slow_rank(self) -> int:
        """The rank that waits least, because the other ranks wait for it."""
        return min(self.ranks, key=self.waited_ns.__getitem__)

    @property
    def mean_ns(self) -> float:
        """Mean waiting time per rank, which dividing the work evenly would avoid."""
        return fmean(self.waited_ns.values())

    @property
    def persistent_ns(self) -> float:
        """How much longer the busiest rank works in a step than the average rank."""
        return self.mean_ns - self.fillable_ns

    @property
    def is_persistent(self) -> bool:
        """Whether ranks mostly wait for a rank that has more work throughout the step."""
        return self.persistent_ns > self.fillable_ns

    @property
    def worst_place(self) -> Place:
        """The layer with the longest mean wait."""
        mean_waits_ns: dict[Place, float] = {}
        for place, waited_ns in self.waited_by_layer_ns.items():
            mean_waits_ns[place] = fmean(waited_ns.values())
        return max(mean_waits_ns, key=mean_waits_ns.__getitem__)

    @property
    def is_worth_it(self) -> bool:
        """Whether the ranks wait for each other long enough to be worth reporting."""
        return self.mean_ns >= _WORTH * self.step_ns


def expert_groups(run: Run) -> list[ExpertGroup]:
    """Return the expert groups with recorded exchanges, longest waiting time first."""
    groups = []
    for surveys in _surveys_by_group(run).values():
        group = _group_of(surveys)
        if group is not None:
            groups.append(group)
    return sorted(groups, key=lambda group: -group.mean_ns)


def sentences(run: Run) -> Iterator[str]:
    """Yield a sentence for each group with long waits, including what would help."""
    groups = expert_groups(run)
    worth_it = [group for group in groups if group.is_worth_it]
    if groups and not worth_it:
        yield f"Experts wait less than {100 * _WORTH:g} % of a step for each other."
    for group in worth_it[:_MAX_LINES]:
        yield _sentence(group, run)
    if len(worth_it) > _MAX_LINES:
        yield f"{len(worth_it) - _MAX_LINES} more expert groups wait less."


def _surveys_by_group(run: Run) -> dict[_GroupKey, list[RankSurvey]]:
    """Return (stage, group, expert-tensor rank) -> the surveys of complete expert groups."""
    expert_size = int(run.settings.get("expert_model_parallel_size") or 1)
    surveys: dict[_GroupKey, list[RankSurvey]] = defaultdict(list)
    for survey in run.surveys:
        header = survey.header
        tensor_size = header.sizes[2]
        # By default, Megatron shards a layer's experts in the same
        # way as its other weights.
        expert_tensor_size = int(
            run.settings.get("expert_tensor_parallel_size") or tensor_size
        )
        # Within a stage, Megatron numbers tensor-parallel ranks
        # first, then expert groups.
        index = header.data * tensor_size + header.tensor
        group, index_within = divmod(index, expert_size * expert_tensor_size)
        expert_tensor_rank = index_within % expert_tensor_size
        key = _GroupKey(header.pipeline, group, expert_tensor_rank)
        surveys[key].append(survey)
    complete: dict[_GroupKey, list[RankSurvey]] = {}
    for key, members in surveys.items():
        # A group of one rank exchanges nothing.
        if expert_size > 1 and len(members) == expert_size:
            complete[key] = members
    return complete


def _group_of(surveys: Sequence[RankSurvey]) -> ExpertGroup | None:
    """Return a group's waiting times, or None if no exchange was recorded on all of its ranks."""
    # A list, because the order of a set would differ between processes, and with it
    # which of several layers with equal waits is reported.
    shared_keys = []
    for key in surveys[0].exchange_ns:
        if all(key in survey.exchange_ns for survey in surveys):
            shared_keys.append(key)
    step_ns = figures(surveys).duration_ns
    if not shared_keys or not step_ns:
        return None
    ranks = tuple(survey.header.rank for survey in surveys)
    waited_by_step_ns: dict[int, Counter[int]] = defaultdict(Counter)
    waited_by_layer_ns: dict[Place, Counter[int]] = defaultdict(Counter)
    num_last: Counter[int] = Counter()
    for key in shared_keys:
        took_ns = {survey.header.rank: survey.exchange_ns[key] for survey in surveys}
        # The last rank to arrive does not wait for any other rank, so its
        # exchange is the shortest.
        last_rank = min(ranks, key=took_ns.__getitem__)
        num_last[last_rank] += 1
        place = Place(key.stage, key.layer)
        for rank in ranks:
            rank_waited_ns = took_ns[rank] - took_ns[last_rank]
            waited_by_step_ns[key.iteration][rank] += rank_waited_ns
            waited_by_layer_ns[place][rank] += rank_waited_ns
    num_steps = len(waited_by_step_ns)
    waited_ns: Counter[int] = Counter()
    num_busiest: Counter[int] = Counter()
    fillable_ns = 0.0
    # Judge each step separately. If the busiest rank changes from step to step, every
    # rank waits at some point, but a different order could fill only the waits of
    # each step's busiest rank.
    for of_step in waited_by_step_ns.values():
        waited_ns.update(of_step)
        busiest_rank = min(ranks, key=of_step.__getitem__)
        num_busiest[busiest_rank] += 1
        fillable_ns += of_step[busiest_rank] / num_steps
    waited_by_layer_per_step_ns: dict[Place, Mapping[int, float]] = {}
    for place, of_layer in waited_by_layer_ns.items():
        waited_by_layer_per_step_ns[place] = _for_one(of_layer, ranks, num_steps)
    return ExpertGroup(
        ranks,
        step_ns=step_ns,
        waited_ns=_for_one(waited_ns, ranks, num_steps),
        waited_by_layer_ns=waited_by_layer_per_step_ns,
        fillable_ns=fillable_ns,
        share_busiest=_for_one(num_busiest, ranks, num_steps),
        share_last=_for_one(num_last, ranks, len(shared_keys)),
        weights_ns=min(_weights_ns(survey) for survey in surveys),
    )


def _for_one(
    totals: Mapping[int, float], ranks: Sequence[int], number: int
) -> dict[int, float]:
    return {rank: totals[rank] / number for rank in ranks}


def _weights_ns(survey: RankSurvey) -> float:
    """Return how much time a rank spends on weight gradients per step."""
    total_ns = 0
    for action, sample_ns in survey.actions.items():
        if action.name == "weight_gradient":
            total_ns += sum(sample_ns)
    # The survey only contains durations from the sampled iterations.
    return total_ns / max(1, survey.num_sampled)


def _sentence(group: ExpertGroup, run: Run) -> str:
    place = group.worst_place
    slow_rank = group.slow_rank
    ranks = ", ".join(str(rank) for rank in group.ranks)
    return (
        f"Experts on ranks {ranks} wait {_percent(group, group.mean_ns)} of a step for each other, "
        f"longest in layer {place.layer} of stage {place.stage}; rank {slow_rank} is the last in "
        f"{100 * group.share_last[slow_rank]:.0f} % of the exchanges. {_help_for(group, run)}"
    )


def _help_for(group: ExpertGroup, run: Run) -> str:
    """Return a sentence about the gain from postponing weight gradients or moving experts."""
    slow_rank = group.slow_rank
    persistent = _percent(group, group.persistent_ns)
    num_waiting = run.settings.get("waiting_weights")
    filled_ns = min(group.fillable_ns, group.weights_ns)
    if num_waiting:
        queue = (
            f"With {num_waiting} waiting weight gradients, a wait of "
            f"{_percent(group, group.fillable_ns)} remains, which a better order could fill"
        )
    elif filled_ns >= _WORTH * group.step_ns:
        queue = (
            "Postponed weight gradients (--pipeline-waiting-weights) would gain at most "
            f"{_percent(group, filled_ns)}"
        )
    elif group.weights_ns:
        queue = "Postponed weight gradients would gain less than 1 %"
    else:
        queue = (
            f"{_percent(group, group.fillable_ns)} could be filled with weight gradients, but only "
            "schedules that split backward passes, such as zb-h1, run them separately"
        )
    if group.is_persistent:
        busiest = f"rank {slow_rank} has"
        if group.share_busiest[slow_rank] < 0.5:
            busiest = "a rank, not always the same one, has"
        return (
            f"{queue}. No schedule can remove the remaining {persistent}: {busiest} that much more "
            "work over the whole step, which only a different division of experts or tokens can "
            "change."
        )
    return (
        f"{queue}; dividing experts evenly would gain another {persistent} of a step."
    )


def _percent(group: ExpertGroup, time_ns: float) -> str:
    return f"{100 * time_ns / group.step_ns:.1f} %"


def table(run: Run) -> list[list[str]]:
    """Return a report row per group and layer, with each rank's waiting time in ms."""
    rows = []
    for group in expert_groups(run):
        for place, waited_ns in sorted(group.waited_by_layer_ns.items()):
            waits = [f"{rank}: {waited_ns[rank] / 1e6:.2f}" for rank in group.ranks]
            last_rank = min(group.ranks, key=waited_ns.__getitem__)
            row = [
                str(place.stage),
                str(place.layer),
                str(last_rank),
                ", ".join(waits),
            ]
            rows.append(row)
    return rows
