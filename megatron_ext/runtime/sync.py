"""Decides when to start data-parallel gradient reductions and parameter gathers.

Megatron's DDP performs both. Reductions start in the order in which the table completes the chunks;
gathers start in stage order.

If `--overlap-grad-reduce` is not set, `finalize_model_grads` starts all reductions instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from megatron_ext.runtime.program import Table
    from megatron_ext.runtime.split import SplitBackward
    from megatron_ext.schedules.table.actions import Action

_UNCHANGED = nullcontext()


class Sync:
    """Starts no reductions or gathers; used for evaluations and on ranks without gradients."""

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def before(self, stage: int) -> None:
        """Called right before a stage's first action runs."""

    def around_last(self, action: Action) -> AbstractContextManager[None]:
        """Return the context for a stage's last action, which completes its gradients."""
        return _UNCHANGED

    def after(self, stage: int) -> None:
        """Called once all of a stage's actions have run."""


class TrainingSync(Sync):
    """Starts a step's reductions, and gathers parameters one chunk before they are used.

    Also a context manager that keeps DDP's hooks disabled, except where `around_last` enables them.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[torch.nn.Module],
        table: Table,
        splits: SplitBackward,
        *,
        force_all_reduce: bool,
    ) -> None:
        self._chunks = chunks
        self._splits = splits
        self._placement = table.schedule.placement
        self._by_hooks = not table.split_backwards
        # This rank's stages in reduction order; the first `_started` of these
        # reductions have been started. Use the table's order even if this rank runs its
        # actions in a dynamic order, because peers must start the same collectives in
        # the same order.
        self._order = table.reduction_order
        self._started = 0
        self._complete: set[int] = set()
        # The chunks in order of first use, which is the same in every schedule and
        # therefore on all peers.
        stages = sorted(table.actions_by_stage)
        self._uses = [self._placement.chunk_of(stage) for stage in stages]
        self._gathered = 0
        self._gathers = _by_chunk(config.param_sync_func, len(chunks))
        # Chunk -> bucket groups whose reduction has not started, with the next one to
        # start at the end.
        self._buckets: dict[int, list[_BucketGroup]] = {}
        self._force_all_reduce = force_all_reduce
        self._functions = _by_chunk(config.grad_sync_func, len(chunks))
        silences = _by_chunk(config.no_sync_func, 1)
        reducing: list[Any] = [chunk for chunk in chunks if _overlaps(chunk)]
        if silences is None:
            # In Megatron's own schedules, enabled hooks count backward passes over the
            # whole step. Here, they would also count an I, after which the weight
            # gradients do not exist yet.
            silences = []
            for chunk in reducing:
                if hasattr(chunk, "ddp_config"):
                    silences.append(chunk.no_sync)
        # A program may set these functions even if its DDP does not overlap reductions.
        # In that case, do not start reductions here: `finalize_model_grads` starts them
        # too, so they would run twice.
        self._overlaps = bool(silences and reducing)
        # Contexts that disable DDP's hooks, one per chunk or one for all chunks, each
        # with the stack that holds it once it has been entered.
        self._silences = [(ExitStack(), silence) for silence in silences]

    def __enter__(self) -> TrainingSync:
        """Disable DDP's hooks."""
        for stack, silence in self._silences:
            stack.enter_context(silence())
        return self

    def __exit__(self, *_: object) -> None:
        """Enable DDP's hooks."""
        for stack, _silence in self._silences:
            stack.close()

    def before(self, stage: int) -> None:
        """Start gathering the next chunk at a stage's first use; the first call gathers two."""
        if self._gathers is None:
            return
        # Gather one chunk ahead, so that the gather overlaps the previous chunk's forward pass.
        num_chunks = 2 if self._gathered == 0 else 1
        end = self._gathered + num_chunks
        for number in self._uses[self._gathered : end]:
            gather = self._gathers[number]
            gather(self._chunks[number].parameters())
        self._gathered = end

    def around_last(self, action: Action) -> AbstractContextManager[None]:
        """Enable DDP's hooks during a chunk's last B, or reduce bucket by bucket in its last W."""
        stage = action.stage
        if action.kind == "B" and self._hooks_reduce(stage):
            return self._reducing(action)
        # No other rank waits for a W, so reductions may slow it down: start each one as
        # soon as its bucket's weights are done. DDP's hooks would fire in I, before the
        # weight gradients exist.
        if action.kind != "W" or self._order[self._started] != stage:
            return _UNCHANGED
        if self._overlaps and self._uses_ddp_reduction(stage):
            number = self._placement.chunk_of(stage)
            reduce = partial(self._reduce, number)
            return self._splits.reporting(reduce)
        return _UNCHANGED

    def _hooks_reduce(self, stage: int) -> bool:
        if not self._by_hooks or not self._overlaps:
            return False
        # With hooks, reductions start in the order in which chunks complete. Twins may complete
        # their chunks in different orders, because each twin waits for the other's micro-batches.
        if self._placement.twins == 2:
            return False
        # `--align-grad-reduce`, Megatron's default, sets functions that keep reductions
        # from slowing down a B that another rank waits for: a chunk is reduced as a
        # whole after its last B. No rank waits for stage 0's last B, so there the hooks
        # reduce bucket by bucket, as in upstream's 1F1B. If these functions are not
        # set, the hooks may reduce bucket by bucket on every stage: all peers use the
        # same order anyway, because a stage's last B needs the next stage's last B.
        if self._functions is None:
            return True
        return stage == 0 and self._uses_ddp_reduction(stage)

    def _uses_ddp_reduction(self, stage: int) -> bool:
        """Return whether DDP itself, rather than a custom `grad_sync_func`, reduces a stage."""
        number = self._placement.chunk_of(stage)
        if self._functions is None:
            return True
        function: Any = self._functions[number]
        if function is None:
            return True
        # DDP's own function is a method of the chunk.
        owner = getattr(function, "__self__", None)
        return owner is self._chunks[number]

    @contextmanager
    def _reducing(self, action: Action) -> Iterator[None]:
        # A single no_sync function covers all chunks at once.
        index = 0
        if len(self._silences) > 1:
            index = self._placement.chunk_of(action.stage)
        stack, silence = self._silences[index]
        stack.close()
        yield
        stack.enter_context(silence())

    def after(self, stage: int) -> None:
        """Mark a stage complete; start all reductions that are due, in table order."""
        self._complete.add(stage)
        # A chunk that completes early waits for its turn, because peers may complete a
        # different chunk first.
        while self._started < len(self._order):
            next_stage = self._order[self._started]
            if next_stage not in self._complete:
                return
            self._started += 1
            if self._hooks_reduce(next_stage):
                continue
            number = self._placement.chunk_of(next_stage)
            has_ddp_reduction = self._uses_ddp_reduction(next_stage)
            if self._functions is not None and not has_ddp_reduction:
                reduce = self._functions[number]
                reduce(self._chunks[number].parameters())
            elif self._overlaps:
                self._reduce(number, remaining=frozenset())

    def _reduce(self, number: int, remaining: AbstractSet[int]) -> None:
        """Start a chunk's next reductions, up to the first bucket group with a pending weight."""
        # `chunk.start_grad_sync` does not work here: it cannot force an all-reduce or
        # reduce only some of the buckets.
        if number not in self._buckets:
            # Go through the parameters in reverse, because backward passes complete
            # their gradients in that order. The actual completion order may differ
            # between peers: experts, which have a separate reduction group, may receive
            # no tokens on some ranks.
            chunk: Any = self._chunks[number]
            position_of: dict[int, int] = {}
            for position, parameter in enumerate(chunk.parameters()):
                position_of[id(parameter)] = position
            all_groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            groups: list[_BucketGroup] = []
            for group in all_groups:
                weights = frozenset(map(id, group.params))
                first_position = min(position_of[weight] for weight in weights)
                groups.append(_BucketGroup(group, weights, first_position))
            groups.sort(key=attrgetter("first_position"))
            self._buckets[number] = groups
        waiting = self._buckets[number]
        while waiting and waiting[-1].weights.isdisjoint(remaining):
            group = waiting.pop().group
            group.start_grad_sync(force_all_reduce=self._force_all_reduce)
            # At the end of a step, Megatron reduces buckets that no hook has counted so
            # far, unless a reduction handle is set for them. With several optimizer
            # instances, the handle is None, so mark the bucket as counted.
            if group.grad_reduce_handle is None:
                group.is_first_batch = False


class _BucketGroup(NamedTuple):
    """A DDP bucket group, reduced in a single call."""

    group: Any
    weights: frozenset[int]
    """Ids of the group's parameters."""
    first_position: int
    """Index of the group's first parameter among the chunk's parameters."""


def _overlaps(chunk: torch.nn.Module) -> bool:
    """Return whether DDP's hooks reduce a chunk's gradients; true for non-Megatron DDP."""
    ddp_config = getattr(chunk, "ddp_config", None)
    return bool(getattr(ddp_config, "overlap_grad_reduce", True))


def _by_chunk(function: Any, num_chunks: int) -> list[Callable[..., Any]] | None:
    if function is None:
        return None
    if isinstance(function, (list, tuple)):
        return list(function)
    return [function] * num_chunks
