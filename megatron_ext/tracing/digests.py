"""Records digests of a run's tensors, to find the first tensor that differs from another run.

To enable this, set `MEGATRON_EXT_DIGESTS=FOLDER` in the environment of any run: each rank then
writes `FOLDER/digests-rank-00000.jsonl` (`digest_files.py`), in a new file after each restart, and
`megatron_ext.tools.compare.locate` reads two such folders. A tensor's name does not depend on how
the model is split, the schedule, the wire or the number of replicas: micro-batches are numbered
within the global batch, and layers within the whole model.

The recorder observes modules through forward hooks and gradients through hooks on activations, so
it also works with Megatron's own schedules. Weights get no hooks: the runtime does not defer the
gradient of a weight that has a hook (`runtime/split.py`), so hooks would change the recorded run.
Instead, the recorder reads weight gradients after each action.

A program may train several models, such as an actor and a critic. Each training step belongs to one
model, and its new weights are read when that model's next step begins, unless Megatron's optimizer
reports its end before. Evaluations are not recorded, whichever model they run.
"""

from __future__ import annotations

import atexit
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state as groups
from megatron.core.utils import get_model_config, unwrap_model

from megatron_ext.config import active
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.observer import Observer
from megatron_ext.tracing.digest_files import (
    FIRST_READING,
    MEGATRONS,
    NO_MICROBATCH,
    ROUNDING,
    VARIABLE,
    Header,
    Kind,
    Record,
    Writer,
    folder_asked_for,
    rounds_differently,
)
from megatron_ext.tracing.fingerprint import Fingerprint, Fingerprints, bits_text
from megatron_ext.tracing.operator_files import place_asked_for
from megatron_ext.tracing.operator_recorder import OperatorRecorder
from megatron_ext.tracing.rounding import rounded_differently, with_first
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from megatron_ext.config.active import Active
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.tracing.operator_files import Direction

_log = logging.getLogger(__name__)
_LAYER_INDEX = re.compile(r"(.*\blayers)\.\d+")
_HIDDEN_STATES = "hidden_states"


def subscribe(
    configuration: Active, chunks: Sequence[torch.nn.Module]
) -> DigestRecorder:
    """Return a configuration's recorder; the first call creates it for a rank's chunks.

    Call it before the first step, when Megatron's process groups exist.

    Raises:
        DataError: The folder cannot be written, or contains digests from another run.
    """
    for observer in configuration.observers:
        if isinstance(observer, DigestRecorder):
            return observer
    folder = folder_asked_for()
    assert folder is not None, f"{VARIABLE} was unset"
    header = _header(configuration, chunks)
    if header.rounded and header.rank == 0:
        _log.warning(
            "%s=1 changes the last digits of activations in this run",
            ROUNDING,
        )
    place = place_asked_for()
    operators = None
    if place is not None:
        operators = OperatorRecorder(place, folder, header)
    recorder = DigestRecorder(configuration, Writer(folder, header), operators)
    configuration.observers.append(recorder)
    # A run that finishes without calling `deconfigure` must complete its file too.
    atexit.register(recorder.close)
    return recorder


def _header(configuration: Active, chunks: Sequence[torch.nn.Module]) -> Header:
    """Return this rank's identity. Megatron's process groups must exist."""
    pipeline = configuration.pipeline
    job = configuration.job
    fields: dict[str, Any] = {}
    if pipeline is not None:
        config = pipeline.config
        fields["schedule"] = pipeline.name
        fields["balance"] = config.balance
        summation: dict[str, int | str] = {}
        for rules in feature_rules():
            summation |= rules.summation(config, pipeline.pp)
        fields["summation"] = summation
        if pipeline.placement.twin_hops:
            fields["routing"] = "twin"
    rank = torch.distributed.get_rank()
    tensor_size = groups.get_tensor_model_parallel_world_size()
    data_size = groups.get_data_parallel_world_size()
    context_size = groups.get_context_parallel_world_size()
    # The program's other processes, such as those that only generate text, record
    # nothing.
    num_ranks = tensor_size * data_size * context_size
    num_ranks *= groups.get_pipeline_model_parallel_world_size()
    if job is not None:
        fields["schedule"] = "forward and backward apart"
        rank = job.rank
        # A merged forward rank does the work of a whole tensor-parallel group, so its own group has
        # size 1.
        tensor_size = job.ranks.tp
        num_ranks = job.ranks.num_ranks
    model_config = get_model_config(chunks[0])
    return Header(
        rank=rank,
        host=socket.gethostname(),
        num_ranks=num_ranks,
        tensor=groups.get_tensor_model_parallel_rank(),
        tensor_size=tensor_size,
        # Context-parallel ranks hold parts of the same samples, so they share a replica's number.
        data=groups.get_data_parallel_rank(),
        data_size=data_size,
        context=groups.get_context_parallel_rank(),
        context_size=context_size,
        expert_size=groups.get_expert_model_parallel_world_size(),
        loss_is_per_token=bool(model_config.calculate_per_token_loss),
        precision=_precision(model_config),
        rounded=rounds_differently(),
        restart=active.attempt() or 0,
        **fields,
    )


def _precision(model_config: Any) -> str:
    """Return the format of a model's matrix products."""
    for name in ("fp4", "fp8"):
        if getattr(model_config, name, None):
            return name
    return str(model_config.params_dtype).removeprefix("torch.")


class _Pending(NamedTuple):
    """A record whose fingerprint is still on the device."""

    kind: Kind
    microbatch: int
    module: str
    part: str
    stage: int
    position: int
    action: str
    num_elements: int
    fingerprint: Fingerprint


class _Weight(NamedTuple):
    """A parameter in a chunk."""

    name: str
    """Includes its global layer number."""
    parameter: torch.nn.Parameter
    shard: slice | None
    """With the distributed optimizer, the elements that this rank updates; None means all."""


@dataclass(eq=False)
class _Chunk:
    """A model chunk on this rank."""

    model: torch.nn.Module
    stage: int
    weights: list[_Weight]
    model_prefix: str = ""
    """Distinguishes the names of a second model; empty for the model that trained first."""
    handles: list[Any] = field(default_factory=list)

    @property
    def root(self) -> Any:
        """The chunk's module without Megatron's wrappers."""
        return unwrap_model(self.model)

    def recorded_name(self, stage: int, name: str) -> str:
        """Return a module's or parameter's name within the whole model."""
        # Only the layers of Megatron's models have a global number.
        if not hasattr(self.root, "pre_process"):
            name = f"stage {stage}.{name}"
        return self.model_prefix + name

    @property
    def recomputes_layers(self) -> bool:
        """Whether a backward pass starts by recomputing its layers' forward passes."""
        config = getattr(self.root, "config", None)
        return getattr(config, "recompute_granularity", None) == "full"

    @property
    def reduces_during_backward(self) -> bool:
        """Whether the chunk's gradients are reduced while its last backward pass runs."""
        settings = getattr(self.model, "ddp_config", None)
        return bool(getattr(settings, "overlap_grad_reduce", False))


@dataclass(eq=False)
class _Step:
    """A training step of one model."""

    number: int
    """Counted across resumed runs; 0 before the first step."""
    chunks: Sequence[_Chunk]
    schedule: str | None = None
    """The schedule that ran the step; None if only weights are recorded."""
    records: list[_Pending] = field(default_factory=list)
    occurrences: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    """How many times each tensor was recorded."""
    has_first_reading: bool = False
    """Whether the weights were read when another schedule began."""

    def trains(self, chunks: Sequence[_Chunk]) -> bool:
        """Return whether this is a step of the model that has these chunks."""
        return self.chunks[0].model_prefix == chunks[0].model_prefix


class DigestRecorder(Observer):
    """Records the tensors in one rank's training steps."""

    def __init__(
        self,
        configuration: Active,
        writer: Writer,
        operators: OperatorRecorder | None = None,
    ) -> None:
        self._configuration = configuration
        self._writer = writer
        self._operators = operators
        """Records the operators at one place instead of digests; None if digests are recorded."""
        self._fingerprints = Fingerprints()
        self._rounds_differently = rounds_differently()
        self._chunks: list[_Chunk] = []
        """The chunks of the model that trained last, which have the hooks."""
        self._model_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """A model's first chunk -> its place in the order in which models first trained, from 1."""
        self._num_models = 0
        self._compute: StageCompute | None = None
        self._num_microbatches = 0
        self._step = _Step(0, ())
        """The last step that was recorded, which may be in progress."""
        self._awaited: list[_Step] = []
        """Steps whose schedule has finished but whose new weights have not been recorded yet; at
        most one for each model. They hold their models, whose optimizers may not have run."""
        self._prefixes_of_steps: dict[int, str] = {}
        """A step's number -> the prefix of the model to which it belongs."""
        self._has_gap = False
        """Whether a step that cannot be recorded was reported."""
        self._running: list[Action] = []
        """Actions in progress; for a pair, the forward action followed by the backward action."""
        self._position = 0
        self._deferred: frozenset[int] = frozenset()
        """Ids of the weights whose gradients the running W computes."""
        self._is_training = False
        """Whether a schedule is running for training rather than for an evaluation."""
        self._num_optimizers = 0
        """Nesting depth of the optimizers in progress."""
        self._replica, self._num_replicas = _data_place()
        # In a disaggregated job, forward ranks hold copies of the weights, but no gradients.
        job = configuration.job
        self._has_weights = job is None or job.role != "forward"
        self._activation_parts = [
            _part_of("t", _tensor_place()),
            _part_of("c", _context_place()),
        ]
        self._weight_parts = [*self._activation_parts, _part_of("d", _data_place())]

    # Steps.

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Add hooks to the modules in the chunks of the model that is about to train, once."""
        # Every step calls this, usually with the same models as the previous step.
        if [chunk.model for chunk in self._chunks] == list(models):
            return
        self._remove_hooks()
        model_prefix = self._model_prefix(models[0])
        # Shared by all chunks, so that a weight used by several chunks is recorded only once.
        weight_ids: set[int] = set()
        for index, model in enumerate(models):
            # Determine the stage here: a program may destroy its process groups before the last
            # weights are recorded.
            stage = self._stage_of(index)
            weights = list(_weights_of(model, weight_ids))
            chunk = _Chunk(model, stage, weights, model_prefix)
            root = chunk.root
            for name, module in _watched_modules(root):
                before = partial(self._before_forward, name)
                after = partial(self._after_forward, name)
                chunk.handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after),
                ]
            if getattr(root, "post_process", True):
                handle = root.register_forward_hook(self._after_model)
                chunk.handles.append(handle)
            self._chunks.append(chunk)

    def _model_prefix(self, first_chunk: torch.nn.Module) -> str:
        """Return what distinguishes a model's names from those of the model that trained first."""
        root = unwrap_model(first_chunk)
        if root not in self._model_numbers:
            self._num_models += 1
            self._model_numbers[root] = self._num_models
            if self._num_models > 1:
                self._warn(
                    f"{VARIABLE}: the program trains several models; the names of tensors in model "
                    f"{self._num_models} begin with 'model {self._num_models}.'"
                )
        number = self._model_numbers[root]
        if number == 1:
            return ""
        return f"model {number}."

    def begin_iteration(self, num_microbatches: int) -> None:
        """Complete the model's previous step and start recording."""
        num_recorded = self._step.number
        is_first = num_recorded == 0
        num_done = self._configuration.iteration
        if num_done is None:
            arguments = megatron_arguments()
            num_done = getattr(arguments, "curr_iteration", num_recorded)
        self._end_previous_step(num_done)
        self._read_awaited_weights()
        self._running.clear()
        self._compute = None
        number = 1 + num_done
        # A folder has one step of each number, so another model's step would replace this one.
        model_prefix = self._chunks[0].model_prefix
        if self._prefixes_of_steps.setdefault(number, model_prefix) != model_prefix:
            self._report_gap(number)
            return
        self._num_microbatches = num_microbatches
        # The weights before the first step are recorded as step 0.
        if is_first:
            self._prefixes_of_steps[num_done] = model_prefix
            before = _Step(num_done, self._chunks)
            self._record_weights(before)
            self._write(before)
        # This drops any records left from a step that failed or that Megatron repeats. `begin_step`
        # names the table, if one runs this step.
        self._step = _Step(number, self._chunks, MEGATRONS)
        self._is_training = True

    def _end_previous_step(self, num_done: int) -> None:
        """Record the new weights of the previous step of the model that is about to train.

        Optimizers other than Megatron's do not report when they finish, but the model's optimizer
        has run when its next step begins.
        """
        for step in list(self._awaited):
            if not step.trains(self._chunks):
                continue
            # If Megatron repeats the step, it does not count as done.
            if num_done >= step.number:
                self._end_step(step)
            else:
                self._awaited.remove(step)

    def _read_awaited_weights(self) -> None:
        """Read the weights that awaited steps have now, in case the program replaces them later.

        Their optimizers may or may not have run, so the weights are read again at the end of the
        step. For example, a program may load its best checkpoint after the last evaluation.
        """
        for step in self._awaited:
            if not step.has_first_reading:
                step.has_first_reading = True
                self._record_weights(step, FIRST_READING)

    def _report_gap(self, number: int) -> None:
        """Say once that another model's step has the same number, so this one is not recorded."""
        if self._has_gap:
            return
        self._has_gap = True
        reason = (
            f"step {number} trained several models, of which only the first was recorded; call "
            "megatron_ext.begin_iteration with a new number before each model's step"
        )
        self._writer.gap(reason)
        self._warn(f"{VARIABLE}: {reason}")

    def _warn(self, text: str) -> None:
        if self._writer.header.rank == 0:
            _log.warning("%s", text)

    def end_schedule(self) -> None:
        """Record the reduced gradients."""
        # The step is not recorded.
        if not self._is_training:
            return
        self._is_training = False
        for chunk in self._chunks:
            for position, weight in enumerate(chunk.weights):
                gradient = _gradient_of(weight.parameter)
                if gradient is not None:
                    self._add_of_weight(
                        self._step,
                        "reduced gradient",
                        chunk,
                        position,
                        weight,
                        gradient,
                    )
        self._awaited.append(self._step)

    def end_iteration(self) -> None:
        """Stop recording because the step has failed or an evaluation begins.

        An evaluation does not show that the optimizer has run, so it does not end a step.
        """
        self._is_training = False
        if self._operators is not None:
            self._operators.stop()
        if not self._has_weights:
            self._end_all_steps()
        self._read_awaited_weights()

    def begin_collective(self, name: str) -> None:
        """Count nested optimizers, because a chained optimizer calls other optimizers."""
        if name == "optimizer":
            self._num_optimizers += 1

    def end_collective(self, name: str) -> None:
        """Record the weights when the outermost optimizer has finished."""
        if name != "optimizer":
            return
        self._num_optimizers -= 1
        # If several models await their optimizers, it is unknown which one has finished.
        if not self._num_optimizers and len(self._awaited) == 1:
            self._end_all_steps()

    def close(self) -> None:
        """Complete the file and remove all hooks from the model."""
        atexit.unregister(self.close)  # atexit would keep the configuration alive
        self._end_all_steps()
        self._remove_hooks()
        self._writer.close()

    def _end_all_steps(self) -> None:
        for step in list(self._awaited):
            self._end_step(step)

    def _end_step(self, step: _Step) -> None:
        self._awaited.remove(step)
        self._record_weights(step)
        self._write(step)

    def _record_weights(self, step: _Step, suffix: str = "") -> None:
        for chunk in step.chunks:
            for position, weight in enumerate(chunk.weights):
                self._add_of_weight(
                    step,
                    "weights",
                    chunk,
                    position,
                    weight,
                    weight.parameter,
                    suffix,
                )

    def _write(self, step: _Step) -> None:
        """Read the results from the device between two steps and write them.

        Steps without records are written too, for example on a forward rank whose stage is computed
        by the backward rank, because the reader skips a step unless all ranks have completed it.
        """
        # Copy all fingerprints to the host in two transfers instead of two per record.
        fingerprints = [record.fingerprint for record in step.records]
        bits: list[int] = []
        sizes: list[list[float]] = []
        if fingerprints:
            all_bits = torch.stack([fingerprint.bits for fingerprint in fingerprints])
            bits = all_bits.tolist()
            all_sizes = torch.stack([fingerprint.sizes for fingerprint in fingerprints])
            sizes = all_sizes.tolist()
        records = []
        for pending, hash_value, (norm, *projections) in zip(
            step.records, bits, sizes, strict=True
        ):
            record = Record(
                pending.kind,
                pending.microbatch,
                pending.module,
                pending.part,
                pending.stage,
                pending.position,
                pending.action,
                pending.num_elements,
                bits_text(hash_value),
                norm,
                projections,
            )
            records.append(record)
        records = _without_repeated_reading(records)
        self._writer.step(step.number, records, step.schedule)
        # The recorder keeps the step until the next one begins.
        step.records.clear()

    def _remove_hooks(self) -> None:
        for chunk in self._chunks:
            for handle in chunk.handles:
                handle.remove()
        # Awaited steps hold the previous list.
        self._chunks = []

    # Actions.

    def begin_step(self, compute: StageCompute) -> None:
        """Keep the object that holds the table's placement and the deferred weight gradients."""
        if not self._is_training:
            return
        self._compute = compute
        self._step.schedule = self._writer.header.schedule

    def begin_action(self, action: Action) -> None:
        """Record which action begins."""
        if not self._is_training:
            return
        self._running.append(action)
        if len(self._running) == 1:
            self._position = 0
        self._deferred = frozenset()
        # Record a W's weights now, because `waiting` no longer contains them after the W.
        if action.kind == "W" and self._compute is not None:
            splits = self._compute.splits
            self._deferred = splits.waiting(action.stage, action.microbatch)
        if self._operators is not None:
            microbatch = self._number_in_batch(action.stage, action.microbatch)
            self._operators.begin_action(self._step.number, microbatch, action)

    def end_action(self, position: int, action: Action) -> None:
        """Record the weight gradients that an action has added to."""
        if not self._is_training:
            return
        if self._operators is not None:
            self._operators.end_action(action)
        if action.kind in ("B", "I", "W"):
            self._record_weight_gradients(action)
        self._running.remove(action)

    def _record_weight_gradients(self, action: Action) -> None:
        chunk = self._chunks[self._chunk_of(action.stage)]
        is_last = action.microbatch == self._num_microbatches - 1
        # The reduction may be adding other replicas' gradients at this moment.
        if is_last and chunk.reduces_during_backward:
            return
        # An I has not yet computed the gradients that wait for W, and a W has computed only those
        # gradients.
        waiting: frozenset[int] = frozenset()
        if action.kind == "I" and self._compute is not None:
            splits = self._compute.splits
            waiting = splits.waiting(action.stage, action.microbatch)
        # A backward pass computes the last layers' gradients first.
        for position, weight in enumerate(reversed(chunk.weights)):
            weight_id = id(weight.parameter)
            if action.kind == "W":
                is_computed = weight_id in self._deferred
            else:
                is_computed = weight_id not in waiting
            gradient = _gradient_of(weight.parameter)
            if is_computed and gradient is not None:
                self._add(
                    "weight gradient",
                    weight.name,
                    gradient,
                    action,
                    position,
                )

    def _chunk_of(self, stage: int) -> int:
        """Return the index of a stage's chunk on this rank."""
        if self._compute is not None:
            return self._compute.table.schedule.placement.chunk_of(stage)
        # Megatron's own schedules distribute stages round-robin.
        return int(stage // groups.get_pipeline_model_parallel_world_size())

    def _stage_of(self, index: int) -> int:
        """Return the stage of this rank's chunk `index`."""
        rank = groups.get_pipeline_model_parallel_rank()
        pipeline = self._configuration.pipeline
        if pipeline is not None:
            stage: int = pipeline.placement.stages_of[rank][index]
            return stage
        return int(index * groups.get_pipeline_model_parallel_world_size() + rank)

    # Modules.

    def _before_forward(
        self,
        name: str,
        _module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Observe the gradient of a module's input."""
        action = self._watched_action()
        if action is None:
            return
        operators = self._operators_of(action.stage, name, "forward")
        if operators is not None:
            operators.begin_module()
        # With recomputation, the graph is built later, by a second forward pass.
        if not torch.is_grad_enabled():
            return
        inputs = [*args, kwargs.get(_HIDDEN_STATES)]
        tensor = _first_tensor(inputs)
        if tensor is not None and tensor.requires_grad:
            record_gradient = partial(self._record_gradient, name, action)
            tensor.register_hook(record_gradient)

    def _after_forward(
        self,
        name: str,
        _module: torch.nn.Module,
        _args: Any,
        output: Any,
    ) -> Any:
        """Record a module's output; return the output that replaces it, or None."""
        action = self._watched_action()
        tensor = _first_of_output(output)
        if action is None or tensor is None:
            return None
        operators = self._operators_of(action.stage, name, "forward")
        if operators is not None:
            operators.end_module()
        operators = self._operators_of(action.stage, name, "backward")
        if operators is not None and tensor.requires_grad:
            tensor.register_hook(partial(_begin_module, operators))
        replacement = None
        if self._rounds_differently:
            microbatch = self._number_in_batch(action.stage, action.microbatch)
            rounded = rounded_differently(tensor, name, self._step.number, microbatch)
            replacement = with_first(output, tensor, rounded)
            tensor = rounded
        if action.kind == "F":
            self._add("forward", name, tensor, action)
        return replacement

    def _after_model(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        """Record the last stage's output, which is the loss function's input, and its gradient."""
        action = self._watched_action()
        tensor = _first_of_output(output)
        if action is None or tensor is None:
            return
        if action.kind == "F":
            self._add("forward", "model", tensor, action)
        if tensor.requires_grad and torch.is_grad_enabled():
            record_gradient = partial(self._record_gradient, "model", action)
            tensor.register_hook(record_gradient)

    def _watched_action(self) -> Action | None:
        """Return the action whose modules are running; None outside of training steps.

        During recomputation, the action is a backward action, so outputs are not recorded a second
        time.
        """
        if not (self._is_training and self._running):
            return None
        is_pair = len(self._running) > 1
        # With recomputation, both actions in a pair run modules' forward passes, which cannot be
        # told apart here.
        may_recompute = is_pair and torch.is_grad_enabled()
        if may_recompute and self._chunks[0].recomputes_layers:
            return None
        # A pair runs a forward and a backward action. Inside autograd's engine, the running action
        # is the backward action.
        is_recomputed = torch._C._current_graph_task_id() != -1
        return self._running[-1] if is_recomputed else self._running[0]

    def _record_gradient(self, name: str, of: Action, gradient: torch.Tensor) -> None:
        """Record the gradient of a tensor that a module used in an action."""
        # Skip gradients that are not part of an action.
        if not (self._is_training and self._running):
            return
        action = self._running[-1]
        operators = self._operators_of(action.stage, name, "backward")
        if operators is not None:
            operators.end_module()
        if action.kind in ("B", "I"):
            self._add(
                "backward",
                name,
                gradient,
                action,
                microbatch=of.microbatch,
            )

    def _operators_of(
        self, stage: int, name: str, direction: Direction
    ) -> OperatorRecorder | None:
        """Return the recorder for a module's operators; None if they are not recorded."""
        recorder = self._operators
        if recorder is None:
            return None
        place = recorder.place
        is_module = self._chunks[0].recorded_name(stage, name) == place.module
        is_place = is_module and direction == place.direction
        return recorder if is_place else None

    # Records.

    def _add(
        self,
        kind: Kind,
        name: str,
        tensor: torch.Tensor,
        action: Action,
        position: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        if position is None:
            position = self._position
            self._position += 1
        if microbatch is None:
            microbatch = action.microbatch
        parts = list(self._activation_parts)
        if action.slice:
            parts.append(f"s{action.slice}")
        number = self._number_in_batch(action.stage, microbatch)
        self._append(
            self._step,
            kind,
            number,
            self._chunks[0].recorded_name(action.stage, name),
            parts,
            action.stage,
            position,
            str(action),
            tensor,
        )

    def _add_of_weight(
        self,
        step: _Step,
        kind: Kind,
        chunk: _Chunk,
        position: int,
        weight: _Weight,
        tensor: torch.Tensor,
        suffix: str = "",
    ) -> None:
        if weight.shard is not None:
            tensor = tensor.reshape(-1)[weight.shard]
        if tensor.numel() and self._has_weights:
            self._append(
                step,
                kind,
                NO_MICROBATCH,
                chunk.recorded_name(chunk.stage, weight.name) + suffix,
                self._weight_parts,
                chunk.stage,
                position,
                "",
                tensor,
            )

    def _append(
        self,
        step: _Step,
        kind: Kind,
        microbatch: int,
        name: str,
        parts: Sequence[str],
        stage: int,
        position: int,
        action: str,
        tensor: torch.Tensor,
    ) -> None:
        # Computing a fingerprint runs operators, which would be recorded as if they were the
        # module's.
        if self._operators is not None:
            return
        part = ".".join(filter(None, parts))
        # Some modules run several times in one action, such as the output layer with multi-token
        # prediction. Distinguish stages too: in a folded pipeline, a rank may hold copies of the
        # same module on two stages.
        place = kind, microbatch, name, part, stage
        occurrence = step.occurrences[place]
        step.occurrences[place] += 1
        if occurrence:
            part = f"{part}.n{occurrence}".lstrip(".")
        fingerprint = self._fingerprints.of(tensor)
        pending = _Pending(
            kind,
            microbatch,
            name,
            part,
            stage,
            position,
            action,
            tensor.numel(),
            fingerprint,
        )
        step.records.append(pending)

    def _number_in_batch(self, stage: int, microbatch: int) -> int:
        """Return a micro-batch's number within the global batch."""
        replica = self._replica
        pipeline = self._configuration.pipeline
        if pipeline is not None and pipeline.placement.is_crossed(stage):
            # The micro-batch started on the twin, the neighbour in the data-parallel group.
            replica ^= 1
        return microbatch * self._num_replicas + replica


def _without_repeated_reading(records: list[Record]) -> list[Record]:
    """Return a step's records without the first reading of its weights if nothing changed since."""
    bits_of_weights: dict[tuple[str, str, int], str] = {}
    first_reading = []
    final_records = []
    for record in records:
        if record.module.endswith(FIRST_READING):
            first_reading.append(record)
            continue
        final_records.append(record)
        if record.kind == "weights":
            bits_of_weights[record.module, record.part, record.stage] = record.bits
    for record in first_reading:
        final_name = record.module.removesuffix(FIRST_READING)
        if record.bits != bits_of_weights.get((final_name, record.part, record.stage)):
            return records
    return final_records


def _begin_module(operators: OperatorRecorder, _gradient: torch.Tensor) -> None:
    operators.begin_module()


def _tensor_place() -> tuple[int, int]:
    rank = groups.get_tensor_model_parallel_rank()
    size = groups.get_tensor_model_parallel_world_size()
    return rank, size


def _data_place() -> tuple[int, int]:
    rank = groups.get_data_parallel_rank()
    size = groups.get_data_parallel_world_size()
    return rank, size


def _context_place() -> tuple[int, int]:
    rank = groups.get_context_parallel_rank()
    size = groups.get_context_parallel_world_size()
    return rank, size


def _part_of(letter: str, place: tuple[int, int]) -> str:
    """Return the name of a rank's part of a tensor; empty if the rank holds the whole tensor."""
    rank, size = place
    if size > 1:
        return f"{letter}{rank}"
    return ""


def _first_of_output(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor in a module's output, or None."""
    if isinstance(output, tuple | list):
        return _first_tensor(output)
    return _first_tensor([output])


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    """Return the first floating-point tensor, or None."""
    for value in values:
        # Skip integers, such as the token ids that the embedding receives, because they have no
        # gradient.
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    return None


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient accumulated by a step's backward passes; None if there is none."""
    # Megatron's DDP accumulates in `main_grad` and clears `grad` in a hook.
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if gradient is None:
        return parameter.grad
    return gradient


# -- the names of modules and weights --------------------------------------------------------------


def _layers_of(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the outermost modules with a layer number, by path."""
    layers: dict[str, torch.nn.Module] = {}
    for path, module in root.named_modules():
        # A multi-token prediction layer contains a transformer layer, which has a
        # number too.
        is_inside = any(path.startswith(f"{outer}.") for outer in layers)
        is_root = path == ""
        has_number = isinstance(getattr(module, "layer_number", None), int)
        if has_number and not is_inside and not is_root:
            layers[path] = module
    return layers


def _global_path(path: str, layer: Any) -> str:
    """Return a layer's path, with its number in the whole model rather than in the chunk."""
    match = _LAYER_INDEX.fullmatch(path)
    if match is None:
        return path
    # Megatron counts layers from 1, but its module names count from 0.
    return f"{match[1]}.{layer.layer_number - 1}"


def _watched_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a chunk's layers, their parts, and the modules next to them, by global name."""
    layers = _layers_of(root)
    for path, layer in layers.items():
        name = _global_path(path, layer)
        for part, module in layer.named_children():
            # Skip norms, because their input is the layer's input or a sum of outputs, all of which
            # are recorded anyway.
            if "norm" not in part and any(True for _ in module.parameters()):
                yield f"{name}.{part}", module
        yield name, layer
    # The embedding and the output layer, for example, are siblings of a layer container.
    containers = _ancestors(layers)
    for path, module in root.named_modules():
        parent = path.rpartition(".")[0]
        is_layer_or_holds_one = path in layers or path in containers
        if path and parent in containers and not is_layer_or_holds_one:
            yield path, module


def _ancestors(layers: Mapping[str, torch.nn.Module]) -> set[str]:
    """Return the paths of all modules that contain layers, including the model itself."""
    paths = {""}
    for path in layers:
        names = path.split(".")
        for length in range(len(names)):
            ancestor = ".".join(names[:length])
            paths.add(ancestor)
    return paths


def _weights_of(model: torch.nn.Module, weight_ids: set[int]) -> Iterator[_Weight]:
    """Yield a chunk's trained weights, except for weights in earlier chunks."""
    root = unwrap_model(model)
    layers = _layers_of(root)
    shards = _shards_of(model)
    for path, parameter in root.named_parameters():
        weight_id = id(parameter)
        if weight_id in weight_ids or not parameter.requires_grad:
            continue
        weight_ids.add(weight_id)
        name = path
        for layer_path, layer in layers.items():
            if path.startswith(f"{layer_path}."):
                path_in_layer = path.removeprefix(layer_path)
                name = _global_path(layer_path, layer) + path_in_layer
        # Expert-parallel ranks have different experts under the same name.
        if not getattr(parameter, "allreduce", True):
            name += f"@{groups.get_expert_model_parallel_rank()}"
        yield _Weight(name, parameter, shards.get(weight_id))


def _shards_of(model: torch.nn.Module) -> dict[int, slice]:
    """Return the elements that this rank updates, by parameter id; empty if it updates all.

    Megatron's distributed optimizer splits each bucket into equal parts, one per replica.
    """
    settings = getattr(model, "ddp_config", None)
    if not getattr(settings, "use_distributed_optimizer", False):
        return {}
    shards: dict[int, slice] = {}
    wrapped: Any = model
    for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        # With several optimizer instances, each instance shards over its own ranks.
        peers = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            length = bucket.grad_data.numel() // peers.size()
            begin = length * peers.rank()
            end = begin + length
            # All bounds are positions in the bucket; a shard is relative to its parameter.
            for parameter, bounds in bucket.param_to_index.items():
                parameter_begin, parameter_end = bounds
                shard_begin = max(begin, parameter_begin) - parameter_begin
                shard_end = min(end, parameter_end) - parameter_begin
                # A parameter outside of this rank's part has no elements here. Without
                # `max`, its end could be negative, and a negative index counts from the
                # end.
                shard_end = max(shard_begin, shard_end)
                shards[id(parameter)] = slice(shard_begin, shard_end)
    return shards
