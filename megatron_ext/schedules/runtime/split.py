"""Splits the backward of a stage: the gradients of its inputs in I, those of its weights in W.

The executor puts F and I of a micro-batch into `SplitBackward.defer(stage, microbatch)` and calls
`SplitBackward.run(stage, microbatch)` as W. In between, it holds the two operands of each weight
gradient: the input of the layer and the gradient of its output.

What is split: the weights of Column- and RowParallelLinear (hence of attention, MLP, experts one by
one and the output layer), the grouped experts, and the layers of Transformer Engine that were built
for it (`prepare_config`, `SplitBackward.register_modules`). Everything else stays in I: embeddings
and what is tied to one on the same stage, norms, biases, the router.

Contract with the executor:

* A micro-batch whose F ran in `defer` gets its backward in `defer` too, and then `run`. The F of an
  action B (backward unsplit) runs without `defer`.
* Each W adds to `main_grad`, so the order of a stage's W's decides the last bits. With sequence
  parallelism all ranks of a tensor-parallel group run their W's in the same order, for W gathers
  the split sequence again.
* The gradient that a stage receives may be an operand itself, and so may the activation (if the
  first layer takes it as it is). Memory of messages is used again after W, not after I.
* DDP's hooks run in I, before the gradients are whole. So chunks that are split stay in `no_sync`
  for the whole step, and reductions are started during the last W, which tells its progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import required
from megatron_ext.schedules.runtime import te_layers
from megatron_ext.schedules.runtime.te_layers import DelayedModules, prepare_config
from megatron_ext.schedules.runtime.weight_gradients import Record, WeightGradient, accumulate

if TYPE_CHECKING:
    import torch

__all__ = ["Progress", "SplitBackward", "prepare_config", "split_backward", "why_not"]

_Key = tuple[int, int]
Progress = Callable[[AbstractSet[int]], None]
"""Called after each weight with the ids of those that remain to be computed."""


class SplitBackward:
    """The weight gradients of this process that wait for their W, by stage and micro-batch.

    The key is a plain attribute: backwards of CUDA tensors run in a thread of autograd's, which
    sees neither thread-locals nor context variables of the thread that called it.
    """

    def __init__(self) -> None:
        self._key: _Key | None = None
        self._waiting: dict[_Key, list[WeightGradient]] = {}
        self._marked: list[torch.nn.Parameter] = []
        self._modules: dict[int, DelayedModules] = {}

    @property
    def record(self) -> Record | None:
        """Where a layer that runs now leaves its weight gradient; None: it computes it itself."""
        return None if self._key is None else partial(self._record, self._key)

    def register_modules(self, stage: int, module: torch.nn.Module) -> None:
        """Name the model chunk of a stage, for the layers that split their backward themselves.

        To be called before each step; it costs nothing for a chunk that is known. Without it,
        layers of Transformer Engine that `prepare_config` has reached would postpone their
        gradients for ever.
        """
        known = self._modules.get(stage)
        if known is None or known.module is not module:
            self._modules[stage] = DelayedModules(module)

    def defer(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Leave the weight gradients of the layers that run inside for `run`.

        Around the forward, where layers note the key, and around the backward, which may run
        forwards again (recomputation).
        """
        modules = self._modules.get(stage)
        if modules is None or modules.is_empty:
            return _Deferral(self, (stage, microbatch))
        return self._delaying(modules, (stage, microbatch))

    @contextmanager
    def _delaying(self, modules: DelayedModules, key: _Key) -> Iterator[None]:
        with _Deferral(self, key):
            with modules.delaying():
                yield
            modules.note(key[1])

    def begin(self, key: _Key) -> None:
        """Begin what `defer` surrounds."""
        assert self._key is None, f"{key} inside {self._key}"
        self._key = key

    def end(self) -> None:
        """End it, also after an error."""
        self._key = None
        if self._marked:
            self._unmark()

    def run(self, stage: int, microbatch: int, progress: Progress | None = None) -> None:
        """Compute the weight gradients of a micro-batch and add them to the parameters'.

        Into `main_grad`, or into `grad` where there is no DDP. Operands are freed one weight after
        the other. A stage without split weights has nothing to do.

        Args:
            stage: Which.
            microbatch: Which.
            progress: Called before the first weight and after each.

        Raises:
            ScheduleError: Transformer Engine's layers cannot compute this micro-batch yet.
        """
        by_weight = _by_weight(self._waiting.pop((stage, microbatch), []))
        modules = self._modules.get(stage)
        remaining = set(by_weight)
        if modules is not None:
            remaining |= modules.weights

        def finished(*weights: int) -> None:
            remaining.difference_update(weights)
            if progress is not None:
                progress(remaining)

        finished()
        for weight, gradients in by_weight.items():
            accumulate(gradients)
            finished(weight)
        if modules is not None:
            modules.run(microbatch, finished)

    def pending(self) -> list[_Key]:
        """Return the keys (stage, micro-batch) whose gradients wait for `run`, sorted."""
        of_modules = {(s, m) for s, modules in self._modules.items() for m in modules.waiting()}
        return sorted(of_modules.union(self._waiting))

    def clear(self) -> None:
        """Drop everything that waits: the step has failed."""
        self._key = None
        self._waiting.clear()
        self._unmark()
        for modules in self._modules.values():
            modules.clear()

    def _record(self, key: _Key, gradient: WeightGradient) -> None:
        self._waiting.setdefault(key, []).append(gradient)
        self._marked.append(gradient.weight)

    def _unmark(self) -> None:
        """Take back the marks that kept DDP's hooks from adding placeholders.

        A mark that stayed would make the hooks drop the gradients of backwards that are not split.
        """
        for weight in self._marked:
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
        self._marked.clear()


class _Deferral:
    """What `defer` returns: no generator, since two run with every action."""

    __slots__ = ("_key", "_split")

    def __init__(self, split: SplitBackward, key: _Key) -> None:
        self._split, self._key = split, key

    def __enter__(self) -> None:
        self._split.begin(self._key)

    def __exit__(self, *_: object) -> None:
        self._split.end()


def _by_weight(gradients: list[WeightGradient]) -> dict[int, list[WeightGradient]]:
    """Group by the id of the weight; weights and gradients of a weight keep their order."""
    groups: dict[int, list[WeightGradient]] = {}
    for gradient in gradients:
        groups.setdefault(id(gradient.weight), []).append(gradient)
    return groups


def split_backward() -> SplitBackward:
    """Return the split backward of the configuration in force."""
    return required().state(SplitBackward)


def why_not(config: Any) -> str | None:
    """Return why a model with this `TransformerConfig` cannot be split, with the remedy, or None.

    Upstream's features that take backwards apart or record them in ways of their own are refused.
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
    if config.overlap_moe_expert_parallel_comm:
        return (
            "--overlap-moe-expert-parallel-comm runs layers in an order of its own; leave it out "
            "where the backward is split"
        )
    if config.enable_autocast:
        return "the backward cannot be split under torch's autocast; use --bf16 or --fp16 instead"
    return te_layers.why_not(config)
