"""When gradients are reduced over the data-parallel ranks and parameters are gathered.

Megatron's DDP does both, the schedule only says when. Data-parallel peers have to start the same
collectives in the same order, although each may run its actions in another one:

- Reductions start in the order in which the table completes its chunks: one that is complete before
  its turn waits. Gathers start in the order of the stages, in which any order first needs them.
- A chunk with split backwards is reduced during its last W, which no other rank waits for: each
  reduction starts as soon as the weights of its buckets are done. Hooks of DDP run at I, too early,
  so they stay silent all the step.
- A chunk without is reduced after its last B, at once: with `--align-grad-reduce`, Megatron's
  default, nothing shall slow a B down that another rank waits for. Nobody waits for that of stage
  0, during which DDP's hooks reduce bucket by bucket, as in upstream's 1F1B.
- With `--no-align-grad-reduce` hooks do so for every stage. The order is the same on all peers by
  itself: a last B needs that of the stage after it.

Without `--overlap-grad-reduce` nothing is started here, `finalize_model_grads` reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.representation.actions import Action
    from megatron_ext.schedules.runtime.rank_table import Table
    from megatron_ext.schedules.runtime.split import Progress

__all__ = ["GradientSync", "NoSync", "ParameterSync"]

_UNCHANGED = nullcontext()
_Enter = Callable[[], AbstractContextManager[Any]]


class GradientSync:
    """Reductions of one step; a context that keeps DDP's hooks silent outside of their windows."""

    def __init__(
        self,
        config: Any,
        chunks: Sequence[torch.nn.Module],
        table: Table,
        *,
        force_all_reduce: bool,
    ) -> None:
        self._chunks = chunks
        self._placement = table.schedule.placement
        self._by_hooks = not table.split_stages
        self._order = table.reduction_order
        """The stages of this rank; those at the front have been started."""
        self._started = 0
        self._complete: set[int] = set()
        self._buckets: dict[int, list[_BucketGroup]] = {}
        """By chunk: those to be reduced, the next one last."""
        self._force_all_reduce = force_all_reduce
        self._functions = _by_chunk(config.grad_sync_func, len(chunks))
        self._overlaps = config.no_sync_func is not None
        silent = config.no_sync_func
        self._silent: list[_Enter] = []
        if silent is not None:
            self._silent = list(silent) if isinstance(silent, (list, tuple)) else [silent]
        self._entered: list[ExitStack] = []

    def __enter__(self) -> GradientSync:
        self._entered = [_entered(context) for context in self._silent]
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self._entered:
            stack.close()

    def around(self, action: Action, *, is_last: bool) -> AbstractContextManager[None]:
        """Let DDP's hooks reduce during the last full backward of a chunk, where they may."""
        if is_last and action.kind == "B" and self._hooks_reduce(action.stage):
            return self._reducing(action)
        return _UNCHANGED

    def _hooks_reduce(self, stage: int) -> bool:
        if not self._by_hooks or not self._overlaps:
            return False
        ends_all = stage == 0 and self._placement.twins == 1
        return self._functions is None or (ends_all and self._uses_ddp_reduction(stage))

    def _uses_ddp_reduction(self, stage: int) -> bool:
        """Whether the reductions of a stage are DDP's own, and not a function of somebody else."""
        number = self._placement.chunk_of(stage)
        given = None if self._functions is None else self._functions[number]
        return given is None or getattr(given, "__self__", None) is self._chunks[number]

    @contextmanager
    def _reducing(self, action: Action) -> Iterator[None]:
        # One function for several chunks silences them all at once.
        index = self._placement.chunk_of(action.stage) if len(self._silent) > 1 else 0
        self._entered[index].close()
        yield
        self._entered[index] = _entered(self._silent[index])

    def progress(self, stage: int) -> Progress | None:
        """Return the progress callback of the stage's last W, or None before the stage's turn."""
        if not self._overlaps or not self._uses_ddp_reduction(stage):
            return None
        if self._order[self._started] != stage:
            return None
        return partial(self._reduce, self._placement.chunk_of(stage))

    def after(self, stage: int) -> None:
        """Note that a stage is complete; start its reduction and others that waited for it."""
        self._complete.add(stage)
        while self._started < len(self._order) and self._order[self._started] in self._complete:
            complete = self._order[self._started]
            self._started += 1
            if not self._hooks_reduce(complete):
                self._start(complete)

    def _start(self, stage: int) -> None:
        number = self._placement.chunk_of(stage)
        if self._functions is not None and not self._uses_ddp_reduction(stage):
            self._functions[number](self._chunks[number].parameters())
        elif self._overlaps:
            self._reduce(number, remaining=frozenset())

    def _reduce(self, number: int, remaining: AbstractSet[int]) -> None:
        """Start the next reductions of a chunk that no weight is remaining to be computed for.

        `chunk.start_grad_sync` cannot be told to reduce everything, nor a part.
        """
        if number not in self._buckets:
            self._buckets[number] = _bucket_groups(self._chunks[number])
        waiting = self._buckets[number]
        while waiting and waiting[-1].weights.isdisjoint(remaining):
            waiting.pop().group.start_grad_sync(force_all_reduce=self._force_all_reduce)


class NoSync:
    """Neither reductions nor gathers, for ranks without gradients."""

    def __enter__(self) -> NoSync:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def around(self, action: Action, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _UNCHANGED

    def progress(self, stage: int) -> None:
        """Return nothing to be called."""

    def after(self, stage: int) -> None:
        """Start nothing."""

    def before(self, stage: int) -> None:
        """Start nothing."""


class _BucketGroup(NamedTuple):
    """What DDP reduces at once."""

    group: Any
    weights: frozenset[int]
    """Their ids."""


def _bucket_groups(chunk: Any) -> list[_BucketGroup]:
    """Return what DDP reduces of a chunk, ordered as its parameters are.

    Backwards complete it from the end. The order is the same on all data-parallel peers, also where
    experts, which are reduced over another group, got no tokens on some.
    """
    place = {id(parameter): index for index, parameter in enumerate(chunk.parameters())}
    groups = [
        _BucketGroup(group, frozenset(map(id, group.params)))
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    return sorted(groups, key=lambda found: min(place[weight] for weight in found.weights))


class ParameterSync:
    """Gathers of updated parameters, one chunk ahead of the first forward that needs them."""

    def __init__(self, config: Any, chunks: Sequence[torch.nn.Module], table: Table) -> None:
        self._functions = _by_chunk(config.param_sync_func, len(chunks))
        self._chunks = chunks
        placement = table.schedule.placement
        self._order = [placement.chunk_of(stage) for stage in sorted(table.actions_by_stage)]
        self._started = 0

    def before(self, stage: int) -> None:
        """At the first use of a stage, start the gather of the next one."""
        if self._functions is None:
            return
        ahead = 2 if self._started == 0 else 1
        for number in self._order[self._started : self._started + ahead]:
            self._functions[number](self._chunks[number].parameters())
        self._started += ahead


def _by_chunk(function: Any, num_chunks: int) -> list[Callable[..., Any]] | None:
    if function is None:
        return None
    return list(function) if isinstance(function, (list, tuple)) else [function] * num_chunks


def _entered(context: _Enter) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(context())
    return stack
