"""When gradients are reduced over the data-parallel ranks and parameters are gathered.

Megatron's DDP does both, the schedule only says when. Data-parallel peers have to start the same
collectives in the same order, although each may run its actions in another one:

- Reductions start in the order in which the table completes its chunks: one that is complete before
  its turn waits. Gathers start in the order of the stages, in which any order first needs them.
- A rank without split backwards reduces bucket by bucket during the last B of a chunk: DDP's hooks
  start it, as in upstream's schedules. The order is the same on all peers by itself then: a last B
  needs that of the stage after it.
- A rank with split backwards starts the reduction of a chunk after its last W, all at once: hooks
  run at I, too early, so they stay silent the whole step.
- With `--align-grad-reduce` upstream hands over a function; it is called after the last action.

Without `--overlap-grad-reduce` nothing is started here, `finalize_model_grads` reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_ext.schedules.actions import Action
    from megatron_ext.schedules.runtime.tables import Table

__all__ = ["GradientSync", "ParameterSync"]

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
        self._force_all_reduce = force_all_reduce
        self._aligned = _by_chunk(config.grad_sync_func, len(chunks))
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
        """Let DDP reduce during the last full backward of a chunk."""
        by_hooks = self._by_hooks and self._overlaps and self._aligned is None
        if not (is_last and by_hooks) or action.kind != "B":
            return _UNCHANGED
        return self._reducing(action)

    @contextmanager
    def _reducing(self, action: Action) -> Iterator[None]:
        # One function for several chunks silences them all at once.
        index = self._placement.chunk_of(action.stage) if len(self._silent) > 1 else 0
        self._entered[index].close()
        yield
        self._entered[index] = _entered(self._silent[index])

    def after(self, stage: int) -> None:
        """Note that a stage is complete; start its reduction and others that waited for it."""
        self._complete.add(stage)
        while self._started < len(self._order) and self._order[self._started] in self._complete:
            number = self._placement.chunk_of(self._order[self._started])
            self._started += 1
            if self._aligned is not None:
                self._aligned[number](self._chunks[number].parameters())
            elif self._overlaps and not self._by_hooks:
                self._start(self._chunks[number])

    def _start(self, chunk: torch.nn.Module) -> None:
        """As `chunk.start_grad_sync`, which cannot be told to reduce everything."""
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):  # type: ignore[misc]
            group.start_grad_sync(force_all_reduce=self._force_all_reduce)


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
