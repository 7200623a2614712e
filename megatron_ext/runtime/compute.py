"""Computes one action at a time, using Megatron's forward and backward steps.

Upstream's schedules call `forward_step` and `backward_step` in a loop, and the loop iteration
determines the data. Here, data, random numbers, losses and saved activations are keyed by stage and
micro-batch, so actions can run in any order.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as upstream
from megatron.core.tensor_parallel import random
from megatron.core.utils import make_viewless_tensor

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.host_generators import host_generators
from megatron_ext.runtime.lengths import refusing_long_sequences
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.upstream.signatures import backward_step_of

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.observer import Observer
    from megatron_ext.runtime.data_order import ReadAhead
    from megatron_ext.runtime.program import Table
    from megatron_ext.schedules.table.actions import Action

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class MicrobatchData:
    """One step's items from a chunk's data iterator. Micro-batch i always gets item i.

    The iterator is None on ranks that read no data. On stages that run the twin's micro-batches,
    `exchange` swaps items with the twin.
    """

    iterator: Iterator[Any] | None
    exchange: Callable[[Any], Any] | None = None
    observers: Sequence[Observer] = ()
    _fetched: int = field(default=0, init=False)
    _items: dict[int, Any] = field(default_factory=dict, init=False)

    def view(self, microbatch: int) -> Iterator[Any] | None:
        """Return an iterator that yields a micro-batch's only item; None if there is no data.

        Raises:
            ScheduleError: The data would have to be read out of order or swapped, but has no
                `__next__`.
        """
        if self.iterator is None:
            return None
        # Megatron's forward steps call `next` on the iterator. Without this view, the order of
        # these calls, which differs between stages, would determine which tokens a micro-batch
        # gets.
        if hasattr(self.iterator, "__next__"):
            return map(self.take, repeat(microbatch))
        if microbatch != self._fetched or self.exchange is not None:
            raise ScheduleError(
                f"micro-batch {microbatch} runs out of order, but its data comes from a "
                f"{type(self.iterator).__name__}, which is not an iterator and cannot be read "
                "ahead; use a schedule that keeps the order, such as zb-h1 without --use-dpp"
            )
        self._fetched += 1
        return self.iterator

    def take(self, microbatch: int) -> Any:
        """Return a micro-batch's item, but only once; keep items read before it for later calls.

        Raises:
            ScheduleError: The item was already taken.
        """
        assert self.iterator is not None
        # Read only on demand, because a GPT model's middle stages read no data.
        while self._fetched <= microbatch:
            self._items[self._fetched] = next(self.iterator)
            self._fetched += 1
        try:
            item = self._items.pop(microbatch)
        except KeyError:
            raise ScheduleError(
                f"the forward step called next() a second time for micro-batch {microbatch}; with "
                f"--pipeline-schedule, call it only once per micro-batch"
            ) from None
        # On a crossed stage, the data (such as BERT's padding mask) must come from the twin, just
        # like the activations.
        if self.exchange is not None:
            item = self.exchange(item)
        for observer in self.observers:
            observer.read(microbatch, item)
        return item

    def check_all_taken(self) -> None:
        """Check at the end of a step that no item was read for a micro-batch and then left out.

        Raises:
            ScheduleError: The forward step has not called `next` for every micro-batch.
        """
        if not self._items:
            return
        numbers = ", ".join(map(str, self._items))
        raise ScheduleError(
            f"the forward step did not call next() for micro-batches {numbers}, whose data would "
            "be lost; with --pipeline-schedule, call it once per micro-batch, or never on a stage "
            "that needs no data"
        )


def swapped(group: dist.ProcessGroup, item: Any) -> Any:
    """Exchange items with the twin and return its item. Collective over the two twins."""
    # Both twins run the same actions in the same order, so their collective calls match.
    items: list[Any] = [None, None]
    dist.all_gather_object(items, item, group=group)
    return items[1 - group.rank()]


@contextmanager
def microbatch_rng(iteration: int, stage: int, microbatch: int) -> Iterator[None]:
    """Seed all random number generators for one forward pass and restore their states afterwards.

    This covers the generators of torch, Megatron, `random` and `numpy.random`. The numbers depend
    only on the arguments and on the tensor- and expert-parallel rank, not on the pipeline rank or
    the execution order, and a repeated forward pass draws the same numbers. With
    `--data-parallel-random-init`, they also depend on the data-parallel rank. `iteration` counts
    from the start of training.

    Raises:
        ScheduleError: No seed is set.
    """
    replica = _replica()

    def fresh(state: Any, place: torch.device, *key: int | str) -> Any:
        """Return a state of the same type as `state`, seeded with a key."""
        seed = active.seed_of(*key, iteration, stage, microbatch, *replica)
        # A tracker for CUDA graphs has generators instead of states.
        if isinstance(state, torch.Generator):
            seeded = state.clone_state()
            seeded.manual_seed(seed)
            return seeded
        return torch.Generator(place).manual_seed(seed).get_state()

    # Omit the device index, because a state works on every device of the same type.
    current_device = devices.current().torch_device()
    device_type = torch.device(current_device.type)
    # Recomputation needs no handling here: upstream restores torch's states itself, but
    # never those of `random` and `numpy`, even in its own schedules. Use Megatron's
    # functions, which cover all of a release's generators.
    host, device, tracked = random._get_all_rng_states()
    try:
        fresh_host = fresh(host, torch.device("cpu"), "host")
        fresh_device = fresh(device, device_type, "default")
        fresh_tracked = {}
        for name, state in tracked.items():
            shard = _shard(name)
            fresh_tracked[name] = fresh(state, device_type, name, *shard)
        set_rng_states(fresh_host, fresh_device, fresh_tracked)
        seed = active.seed_of("python", iteration, stage, microbatch, *replica)
        with host_generators(seed):
            yield
    finally:
        set_rng_states(host, device, tracked)


_UNCHANGED = nullcontext()


def rng_of_this_step(stage: int, microbatch: int) -> AbstractContextManager[None]:
    """Seed all generators for one forward pass, if its training step seeds by micro-batch."""
    if active.draws_by_microbatch() and torch.is_grad_enabled():
        return microbatch_rng(active.iteration(), stage, microbatch)
    return _UNCHANGED


def set_rng_states(host: torch.Tensor, device: Any, tracked: Mapping[str, Any]) -> None:
    """Set all generators to the states returned by Megatron's `_get_all_rng_states`."""
    if tracked:
        random._set_all_rng_states(host, device, dict(tracked))
        return
    # Do not use upstream's function here: it would mark a tracker without generators as
    # initialised.
    torch.set_rng_state(host)
    tracker = random.get_cuda_rng_tracker()
    is_graph_safe = random.is_graph_safe_cuda_rng_tracker(tracker)
    random._set_cuda_rng_state(device, graph_safe=is_graph_safe)


def _replica() -> tuple[int, ...]:
    """Return the rank that distinguishes a replica's generators; empty if replicas draw the same.

    As in upstream's `_set_random_seed`, which tells replicas apart only on request.
    """
    in_force = active.active()
    if in_force is not None and in_force.replicas_differ:
        return (parallel_state.get_data_parallel_rank(),)
    return ()


def _shard(name: str) -> tuple[int, ...]:
    """Return the ranks that distinguish a tracker's generator from its copies on the same stage."""
    # As in upstream's `model_parallel_cuda_manual_seed`. All other generators are
    # identical on every rank of a stage and, unless `_replica` tells them apart, on every replica.
    if name == random.get_expert_parallel_rng_tracker_name():
        return (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    if name == random.get_data_parallel_rng_tracker_name():
        return ()
    # Since 0.20. The generator must be identical on all tensor-parallel ranks, because
    # they mix the same states.
    if name == "mtp-hsm-rng":
        return (parallel_state.get_data_parallel_rank(),)
    return (parallel_state.get_tensor_model_parallel_rank(),)


Tensors = list[torch.Tensor | None]
"""A stage's output for the next stage: one tensor, or as many as Megatron's shapes specify."""


@dataclass
class Call:
    """One step's arguments, named as in Megatron's own schedules."""

    forward_step_func: Callable[..., Any]
    data: list[MicrobatchData]
    """Chunk -> its data."""
    chunks: list[torch.nn.Module]
    config: Any
    num_microbatches: int
    cp_group_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    seq_length: int = 0
    """Number of tokens in a sequence; used only by tables that cut sequences into shares of equal
    cost."""
    read_ahead: ReadAhead | None = None
    """The step's data, if a feature has read it before the table was generated."""


class _Stage(NamedTuple):
    """The parts of a call and its table that concern one stage."""

    model: torch.nn.Module
    data: MicrobatchData
    vp_stage: int | None
    """Megatron's virtual stage: the chunk's number, or None if the rank has only one chunk."""
    is_last: bool
    checks_lengths: bool
    """Whether to check sequence lengths, because they may vary."""
    backward_step: Callable[[Tensors, Tensors, Tensors], Tensors]
    """Megatron's backward step for this kind of model."""


@dataclass
class StageCompute:
    """Runs one step's actions on this rank's chunks."""

    call: Call
    table: Table
    num_inputs: int = 1
    """Number of activations that a stage receives; the first stage gets None for each of them."""
    handed_on: Sequence[tuple[int, ...] | None] = ()
    """Shapes of the activations that a stage sends, `[s, b, h]` each; None if a shape may vary."""
    splits: SplitBackward = field(default_factory=SplitBackward)
    """Keeps weight gradients between I and W."""
    reports: dict[int, Any] = field(default_factory=dict)
    """Micro-batch -> the loss function's report; only on the rank with the last stage."""
    ignored_inputs: list[tuple[int, int]] = field(default_factory=list, init=False)
    """(stage, micro-batch) of each backward pass that produced no gradient for an input."""
    _num_tokens: list[torch.Tensor] = field(default_factory=list, init=False)
    """Number of tokens in each forward pass. Summed after the step, off the critical path."""
    _stages: dict[int, _Stage] = field(default_factory=dict, init=False)
    _live: dict[tuple[int, int], tuple[Tensors, Tensors]] = field(
        default_factory=dict, init=False
    )
    """(stage, micro-batch) -> inputs and outputs of a forward pass whose backward pass has yet to
    run."""
    _forwards: Counter[int] = field(default_factory=Counter, init=False)
    """Stage -> number of its forward passes in this step so far."""

    @cached_property
    def _draws_by_microbatch(self) -> bool:
        return active.draws_by_microbatch()

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action on its inputs and return its outputs.

        Activations from the previous stage become leaves of the autograd graph.
        """
        stage, kind, microbatch, _ = action
        if kind in ("F", "R"):
            for tensor in inputs:
                if tensor is not None:
                    tensor.requires_grad_()
            inputs = inputs or [None] * self.num_inputs
            outputs = self.forward(stage, microbatch, inputs)
            if kind == "F":
                return outputs
            # No stage receives an R's outputs, so free them, as after a send.
            if not self._stage(stage).is_last:
                self.release(outputs)
            return []
        if kind == "W":
            self.splits.run(stage, microbatch)
            return []
        return self.backward(
            stage,
            microbatch,
            inputs or [None],
            split=kind == "I",
        )

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        """Run F and return the activations for the next stage, `[s, b, h]` each, or the loss.

        `inputs` are the previous stage's activations, as leaves that require grad; None for the
        first stage.

        Raises:
            ScheduleError: The activations do not have the shapes that the next stage expects.
        """
        call = self.call
        is_first_microbatch = upstream.check_first_val_step(
            call.first_val_step,
            call.forward_only,
            not self._forwards[stage],
        )
        place = self._stage(stage)
        store: list[Any] = []
        # With partial checkpointing, upstream does not checkpoint the first few live micro-batches.
        limit = call.config.num_microbatches_with_partial_activation_checkpoints
        checkpoints_all = None
        if limit is not None:
            place_in_window = self._forwards.total() % max(self.table.max_live, 1)
            checkpoints_all = place_in_window >= limit
        with self._around_forward(stage, microbatch):
            outputs: Tensors
            outputs, num_tokens = upstream.forward_step(
                call.forward_step_func,
                place.data.view(microbatch),
                place.model,
                call.num_microbatches,
                inputs,
                store,
                call.config,
                cp_group_size=call.cp_group_size,
                collect_non_loss_data=call.collect_non_loss_data,
                checkpoint_activations_microbatch=checkpoints_all,
                is_first_microbatch=is_first_microbatch,
                current_microbatch=microbatch,
                vp_stage=place.vp_stage,
                is_last_stage=place.is_last,
            )
        return self._keep(
            stage,
            microbatch,
            inputs,
            outputs,
            num_tokens,
            store,
        )

    def _keep(
        self,
        stage: int,
        microbatch: int,
        inputs: Tensors,
        outputs: Tensors,
        num_tokens: torch.Tensor,
        store: list[Any],
    ) -> Tensors:
        """Keep a forward pass's results; return its outputs in a form that `release` can free."""
        if not self._stage(stage).is_last:
            for tensor, shape in zip(outputs, self.handed_on, strict=False):
                if tensor is None or shape is None:
                    continue
                if tuple(tensor.shape) != shape:
                    raise ScheduleError(
                        f"stage {stage}, micro-batch {microbatch}: output {list(tensor.shape)}, "
                        f"but the step expects {list(shape)}; if lengths differ between "
                        "micro-batches, add --variable-seq-lengths (variable_seq_lengths in the "
                        "model's configuration)"
                    )
                # The other rank would read the bytes as numbers of another type.
                dtype = self.call.config.pipeline_dtype
                if dtype is not None and tensor.dtype != dtype:
                    raise ScheduleError(
                        f"stage {stage}, micro-batch {microbatch}: output of {tensor.dtype}, but "
                        f"the model's configuration has pipeline_dtype={dtype}; set it to "
                        f"{tensor.dtype}, or convert the output (--fp32-residual-connection makes "
                        "it float32)"
                    )
            # `release` cannot free a view. A model may return a view, and a full backward hook on a
            # stage's last module creates one.
            outputs = [_viewless(output) for output in outputs]
        self._forwards[stage] += 1
        self._num_tokens.append(num_tokens)
        if store:
            self.reports[microbatch] = store[0]
        if not self.call.forward_only:
            self._live[stage, microbatch] = (inputs, outputs)
        return outputs

    def finalize(
        self,
        groups: ProcessGroupCollection,
        *,
        force_all_reduce: bool | None,
    ) -> None:
        """Let Megatron finalize a training step's gradients. Collective over `groups`."""
        call = self.call
        config = call.config
        if call.forward_only or config.finalize_model_grads_func is None:
            return
        num_tokens = None
        if config.calculate_per_token_loss:
            # Ranks that do not hold the last stage count no tokens.
            device = devices.device_of(call.chunks)
            num_tokens = torch.zeros((), dtype=torch.int, device=device)
            # Add in place, as Megatron does: another dtype on the last stage's ranks would be read
            # as this one by the others.
            for tokens_of_microbatch in self._num_tokens:
                num_tokens += tokens_of_microbatch
        config.finalize_model_grads_func(
            call.chunks,
            num_tokens,
            pg_collection=groups,
            force_all_reduce=force_all_reduce,
        )

    def saved_tensors(self, action: Action) -> tuple[Tensors, Tensors] | None:
        """Return the inputs and outputs kept for a backward pass; None once it has taken them."""
        return self._live.get((action.stage, action.microbatch))

    def release(self, outputs: Tensors) -> None:
        """Free the data of outputs that were sent: the backward pass needs only their graph."""
        # This differs from upstream's `deallocate_output_tensor`: all outputs share one scalar,
        # because allocating a new one takes as long as sending the tensor.
        if self.call.config.deallocate_pipeline_outputs:
            for tensor in outputs:
                if tensor is not None:
                    assert tensor._base is None, (
                        f"{tensor.shape} is a view: nothing to free"
                    )
                    tensor.data = _scalar(tensor.dtype, tensor.device)

    def backward(
        self,
        stage: int,
        microbatch: int,
        gradients: Tensors,
        *,
        split: bool,
    ) -> Tensors:
        """Run B, or I if `split` is set; return the input gradients (None on the first stage).

        `gradients` are the output gradients, `[s, b, h]` each; None on the last stage.
        """
        # Remove the entry before the backward pass runs, so that autograd can free memory as it
        # goes.
        inputs, outputs = self._live.pop((stage, microbatch))
        with self.splits.defer(stage, microbatch) if split else _UNCHANGED:
            sent_back = self._stage(stage).backward_step(inputs, outputs, gradients)
        return self._sent_back(stage, microbatch, inputs, sent_back)

    def _sent_back(
        self,
        stage: int,
        microbatch: int,
        inputs: Tensors,
        gradients: Tensors,
    ) -> Tensors:
        """Return the gradients for the previous stage, with zeros for an ignored input."""
        # Sending zeros matches training on a single device, where no gradient would reach the
        # earlier layers. Megatron's own schedules send nothing: the previous stage takes the next
        # micro-batch's gradient instead, and waits for the last gradient until the process group
        # times out.
        sent = list(gradients)
        for index, tensor in enumerate(inputs):
            if tensor is not None and sent[index] is None:
                sent[index] = torch.zeros_like(tensor)
                self.ignored_inputs.append((stage, microbatch))
        return sent

    def run_pair(
        self,
        forward: Action,
        backward: Action,
        inputs: Tensors,
        gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Run F for one micro-batch and B or I for another, and return the outputs of both.

        Raises:
            ScheduleError: This class cannot run pairs; only the compute class for pairs can.
        """
        raise ScheduleError(
            f"{forward} and {backward} form a pair in the table, but this model's steps run single "
            "actions; add --overlap-moe-expert-parallel-comm, or use a table without pairs"
        )

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context in which the step's actions run."""
        return _UNCHANGED

    def ended(self, action: Action) -> None:
        """Called after an action, or the pair with this B or I, has run and sent its results."""

    def observe(self, observers: Sequence[Observer]) -> None:
        """Report computation that is not part of an action to these observers."""

    def end_step(self) -> None:
        """Record that this rank has completed the step."""

    def check_data(self) -> None:
        """Check after the last action that no data was read and left out.

        Raises:
            ScheduleError: The forward step has not called `next` for every micro-batch.
        """
        for data in self.call.data:
            data.check_all_taken()

    def unfinished(self) -> list[str]:
        """Return the backward actions that have not run and whose saved tensors are still held."""
        unfinished = []
        for stage, microbatch in self._live:
            unfinished.append(f"{stage}B{microbatch}")
        for stage, microbatch in self.splits.pending():
            unfinished.append(f"{stage}W{microbatch}")
        return unfinished

    def _stage(self, stage: int) -> _Stage:
        known_stage = self._stages.get(stage)
        if known_stage is None:
            call = self.call
            schedule = self.table.schedule
            chunk = schedule.placement.chunk_of(stage)
            model = call.chunks[chunk]
            checks_lengths = stage == 0 and bool(call.config.variable_seq_lengths)
            known_stage = _Stage(
                model=model,
                data=call.data[chunk],
                vp_stage=chunk if len(call.chunks) > 1 else None,
                is_last=stage == schedule.num_stages - 1,
                checks_lengths=checks_lengths,
                backward_step=backward_step_of(model, call.config),
            )
            self._stages[stage] = known_stage
        return known_stage

    def _around_forward(
        self,
        stage: int,
        microbatch: int,
    ) -> AbstractContextManager[Any]:
        """Return the context for an F: deferral, seeded generators and length checks."""
        # Most forward passes need none of these, and entering an empty context costs as much as
        # entering a real one.
        contexts: list[AbstractContextManager[Any]] = []
        if (stage, microbatch) in self.table.split_backwards:
            postponing = self.splits.postponing(stage)
            if postponing is not None:
                contexts.append(postponing)
        if self._draws_by_microbatch:
            contexts.append(rng_of_this_step(stage, microbatch))
        place = self._stage(stage)
        if place.checks_lengths:
            checking = self._checking_lengths(place.model, stage, microbatch)
            contexts.append(checking)
        if len(contexts) < 2:
            return contexts[0] if contexts else _UNCHANGED
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context)
            return entered.pop_all()

    def _checking_lengths(
        self,
        model: torch.nn.Module,
        stage: int,
        microbatch: int,
    ) -> AbstractContextManager[None]:
        return refusing_long_sequences(
            model,
            stage,
            microbatch,
            self.call.cp_group_size,
        )


def _viewless(output: Any) -> Any:
    """Return a tensor that is not a view; return other outputs unchanged.

    Other outputs are None, or trees whose tensors are released elsewhere.
    """
    if not isinstance(output, torch.Tensor):
        return output
    return make_viewless_tensor(output, output.requires_grad, keep_graph=True)


def log_ignored_input(stage: int, microbatch: int) -> None:
    """Log a stage whose backward pass produced no gradient for its input."""
    _LOG.warning(
        "stage %d, micro-batch %d: no gradient reaches the input of the stage, so earlier "
        "stages get zeros, as on a single device (Megatron's own schedules send nothing and "
        "hang); is an output detached?",
        stage,
        microbatch,
    )


@cache
def _scalar(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the placeholder for freed data, which works both in inference mode and in training."""
    # The first caller may be an evaluation in inference mode, and a tensor created there could not
    # become part of a graph later.
    with torch.inference_mode(mode=False):
        return torch.empty(1, dtype=dtype, device=device)
