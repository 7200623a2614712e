"""Splits a stage's backward: I computes input gradients, W computes weight gradients.

F and I of a micro-batch run inside `SplitBackward.defer(stage, microbatch)`; W is
`SplitBackward.run(stage, microbatch)`. In between, the two operands of each weight gradient are
kept: the layer's input and the gradient of its output.

Deferred to W: the weights of Column- and RowParallelLinear (attention, MLP, sequential experts, the
output layer), grouped experts, and Transformer Engine layers built for it (`prepare_config`,
`SplitBackward.register_modules`). Everything else stays in I: embeddings and weights tied to one on
the same stage, norms, biases, the router.

Contract with the executor:

* If F ran in `defer`, the backward must run in `defer` too, followed by `run`. The F of an unsplit
  B runs without `defer`.
* The order of a stage's Ws decides the last bits, and all ranks of a tensor-parallel group run
  their Ws in the same order.
* Message memory may be reused after W, not after I.
* Split chunks stay in DDP's `no_sync` for the whole step (`runtime/sync.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from megatron_ext.runtime import te_layers
from megatron_ext.runtime.te_layers import DelayedModules, prepare_config
from megatron_ext.runtime.weight_gradients import (
    Fetching,
    Record,
    WeightGradient,
    accumulate,
    in_stream,
    stream_of_backward,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Progress", "SplitBackward", "prepare_config", "why_not"]

_Key = tuple[int, int]
Progress = Callable[[AbstractSet[int]], None]
"""Callback with the ids of the weights whose gradients remain to be computed."""


class SplitBackward:
    """Holds a configuration's deferred weight gradients, by stage and micro-batch."""

    def __init__(self) -> None:
        # A plain attribute: autograd runs CUDA backwards in its own thread, which sees neither
        # thread-locals nor context variables of the caller.
        self._key: _Key | None = None
        self._waiting: dict[_Key, list[WeightGradient]] = {}
        self._marked: list[torch.nn.Parameter] = []
        self._streams: dict[int, Any] = {}
        """By id of a weight: the stream in which its layer runs backward."""
        self._modules: dict[int, DelayedModules] = {}
        self._progress: Progress | None = None
        self.has_deferred = False
        """Whether any layer of this process has left a weight gradient to W."""

    @property
    def record(self) -> Record | None:
        """The sink for weight gradients of layers that run now; None: layers compute their own."""
        return None if self._key is None else partial(self._record, self._key)

    def register_modules(self, stage: int, module: torch.nn.Module) -> None:
        """Register the model chunk of a stage, so that W reaches its Transformer Engine layers.

        Call it before each step; known chunks cost nothing. Without it, layers built with
        `prepare_config` would postpone their weight gradients forever.
        """
        known = self._modules.get(stage)
        if known is None or known.module is not module:
            self._modules[stage] = DelayedModules(module)

    def defer(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return a context in which layers defer their weight gradients to `run`.

        Enter it for the forward, where layers record the key, and again for the backward, which
        may rerun forwards (recomputation).
        """
        modules = self._modules.get(stage)
        if modules is None or modules.is_empty:
            return _Deferral(self, (stage, microbatch))
        return self._delaying(modules, (stage, microbatch))

    @contextmanager
    def _delaying(self, modules: DelayedModules, key: _Key) -> Iterator[None]:
        self.has_deferred = True
        with _Deferral(self, key):
            with modules.delaying():
                yield
            modules.note(key[1])

    def begin(self, key: _Key) -> None:
        """Enter the context of `defer`."""
        assert self._key is None, f"{key} inside {self._key}"
        self._key = key

    def end(self) -> None:
        """Leave the context of `defer`, also on error."""
        self._key = None
        if self._marked:
            self._unmark()

    @contextmanager
    def reporting(self, progress: Progress) -> Iterator[None]:
        """Call `progress` before the first weight and after each weight of a W in the block."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None

    def run(self, stage: int, microbatch: int) -> None:
        """Run W: compute a micro-batch's weight gradients and accumulate them.

        They go into `main_grad`, or into `grad` without DDP. Operands are freed weight by weight. A
        stage without deferred weights does nothing.

        Args:
            stage: Global stage index.
            microbatch: 0 to m-1.

        Raises:
            ScheduleError: Transformer Engine's store is FIFO, and an older micro-batch comes first.
        """
        # By the id of the weight. Weights and gradients keep their order, which decides the bits.
        by_weight: dict[int, list[WeightGradient]] = {}
        for gradient in self._waiting.pop((stage, microbatch), []):
            by_weight.setdefault(id(gradient.weight), []).append(gradient)
        modules = self._modules.get(stage)
        remaining = set(by_weight)
        if modules is not None:
            remaining |= modules.weights

        def finished(*weights: int) -> None:
            remaining.difference_update(weights)
            if self._progress is not None:
                self._progress(remaining)

        finished()
        # With sequence parallelism this all-gathers the inputs again, one layer ahead of the GEMMs:
        # a collective, so tensor-parallel ranks run their Ws in one order.
        fetching = Fetching(chain.from_iterable(by_weight.values()))
        for weight, gradients in by_weight.items():
            with in_stream(self._streams[weight]):
                accumulate(gradients, fetching)
            finished(weight)
        if modules is not None:
            modules.run(microbatch, finished)

    def pending(self) -> list[_Key]:
        """Return the (stage, micro-batch) keys whose W has not run, sorted."""
        of_modules = {(s, m) for s, modules in self._modules.items() for m in modules.waiting()}
        return sorted(of_modules.union(self._waiting))

    def clear(self) -> None:
        """Drop all deferred gradients after a failed step."""
        self._key = None
        self._waiting.clear()
        self._unmark()
        for modules in self._modules.values():
            modules.clear()

    def _record(self, key: _Key, gradient: WeightGradient) -> None:
        # Its operands may be messages: a received gradient, or an activation that the first layer
        # uses directly. They stay until W.
        self.has_deferred = True
        self._waiting.setdefault(key, []).append(gradient)
        self._streams[id(gradient.weight)] = stream_of_backward(gradient.weight)
        self._marked.append(gradient.weight)

    def _unmark(self) -> None:
        """Reset the flags that kept DDP's hooks from adding placeholder gradients."""
        # A flag left set would make the hooks drop the gradients of unsplit backwards.
        for weight in self._marked:
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
        self._marked.clear()


# A class, not a generator, which costs more: every micro-batch enters it twice.
class _Deferral:
    """The context of `defer`."""

    __slots__ = ("_key", "_split")

    def __init__(self, split: SplitBackward, key: _Key) -> None:
        self._split, self._key = split, key

    def __enter__(self) -> None:
        self._split.begin(self._key)

    def __exit__(self, *_: object) -> None:
        self._split.end()


def why_not(config: Any) -> str | None:
    """Return why this `TransformerConfig` rules out split backwards, with the remedy, or None.

    Refused are upstream features that split, reorder or capture backwards themselves.
    """
    if config.cuda_graph_impl != "none":
        return (
            f"the backward cannot be split with --cuda-graph-impl {config.cuda_graph_impl}, which "
            f"replays it whole; use none"
        )
    if config.defer_embedding_wgrad_compute:
        return (
            "--defer-embedding-wgrad-compute moves the weight gradient of the output layer "
            "itself; leave it out where the backward is split"
        )
    if config.enable_autocast:
        return "the backward cannot be split under torch's autocast; use --bf16 or --fp16 instead"
    return te_layers.why_not(config)
