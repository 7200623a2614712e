"""Keeps state across steps for the models on a set of process groups and runs their steps.

A `Runtime` is created at a model's first step and closed together with the configuration. This
module also sums and logs training statistics.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.observer import Observer
from megatron_ext.runtime.compute import (
    Call,
    MicrobatchData,
    StageCompute,
    log_ignored_input,
    swapped,
)
from megatron_ext.runtime.connect import links_of, open_transport
from megatron_ext.runtime.executor import Executor, num_out_of_order
from megatron_ext.runtime.feature import Model, Step, features
from megatron_ext.runtime.megatron_messages import MegatronPipelines
from megatron_ext.runtime.offloading import Offloading
from megatron_ext.runtime.ordering import (
    LedOrder,
    Order,
    PolicyOrder,
    RunAhead,
    elect_leader,
)
from megatron_ext.runtime.program import (
    Peers,
    PipelineEnds,
    Program,
    Shapes,
    Table,
    check_same_draws,
    check_same_table,
    make_program,
    make_table,
    make_table_of_step,
)
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.runtime.sync import Sync, TrainingSync
from megatron_ext.schedules.table.memory import peak_of_row
from megatron_ext.schedules.table.validation import check_first_gradients
from megatron_ext.transport.observed import observed
from megatron_ext.transport.torch_dist import groups_of_ranks

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.active import Pipeline
    from megatron_ext.observer import Executed
    from megatron_ext.runtime.data_order import DataOrder, ReadAhead
    from megatron_ext.schedules.table.actions import Bypass, Schedule

_LOG = logging.getLogger(__name__)

_MAX_TABLES_OF_STEPS = 4
"""How many tables that depend on a step's data are kept."""


@dataclass
class Measured(Observer):
    """A rank's statistics over its training steps."""

    steps: int = 0
    actions: int = 0
    out_of_order: int = 0
    """Number of actions that ran before an action that precedes them in the table."""
    busy_s: float = 0.0
    """Host time spent in actions, in seconds."""
    wall_s: float = 0.0
    """Time spent in steps, in seconds."""
    peak_live: float = 0
    """Peak number of live stage activations. If the table depends on the step's lengths, the unit
    is the activation of the longest micro-batch in the step."""
    tables_s: float = 0.0
    """Time, in seconds, that steps spent waiting for their own tables and for everything computed
    from them."""
    _schedule: Schedule | None = field(default=None, init=False, repr=False)
    """The table of the step in progress."""

    def begin_step(self, compute: StageCompute) -> None:
        """Keep the table, because it may differ between steps."""
        self._schedule = compute.table.schedule

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Add a finished step."""
        self.steps += 1
        self.wall_s += wall_s
        self.actions += len(executed)
        self.busy_s += sum(duration_s for _, _, duration_s in executed)
        self.out_of_order += num_out_of_order(executed)
        row = tuple(action for _, action, _ in executed)
        schedule = self._schedule
        assert schedule is not None, "begin_step was not called"
        peak = peak_of_row(row, schedule)
        self.peak_live = max(self.peak_live, peak)
        self._schedule = None  # ranks pickle and exchange these statistics

    def add(self, other: Measured) -> None:
        """Add another rank's statistics, or statistics for more steps."""
        self.steps = max(self.steps, other.steps)
        self.actions += other.actions
        self.out_of_order += other.out_of_order
        self.busy_s += other.busy_s
        self.wall_s += other.wall_s
        self.peak_live = max(self.peak_live, other.peak_live)
        # Ranks generate tables at the same time, so do not add up their waits.
        self.tables_s = max(self.tables_s, other.tables_s)


class Runtime:
    """State for the models on a set of process groups, kept across steps.

    The constructor is collective over all ranks in the job. `iterators` has one entry for each of
    the model's `chunks` on this rank; `config` is their `TransformerConfig`.

    Raises:
        ScheduleError: The model's ranks, chunks or features are incompatible with the schedule.
        TransportError: The transport is not available.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        groups: ProcessGroupCollection,
        chunks: Sequence[torch.nn.Module],
        iterators: Sequence[Any],
        config: Any,
        shapes: Shapes,
        seq_length: int,
    ) -> None:
        for make in features():
            pipeline = make.pipeline_of(pipeline, config, seq_length)
        placement = pipeline.placement
        rank = groups.pp.rank()
        self.pipeline = pipeline
        self.groups = groups
        self.placement = placement
        self.rank = rank
        self._check_fit(chunks)
        # Chunks that have been checked.
        self.checked_chunks = WeakSet(chunks)
        self.device = devices.device_of(chunks)
        # From here on, all ranks in the job must make the same calls in the same order, because
        # most of them are collective.
        model = Model(pipeline, groups, chunks, config, shapes, seq_length)
        self.features = [make(model) for make in features()]
        bypasses: list[Bypass] = []
        for feature in self.features:
            bypasses += feature.bypasses
        self.bypasses = tuple(bypasses)
        mirrored = self._mirrored_ranks()
        self.peers = Peers(dist.get_process_group_ranks(groups.pp), mirrored)
        full = replace(pipeline.full, bypasses=self.bypasses)
        full_table = Table(full, rank, slots=0)
        links = links_of(full_table, self.peers)
        stages = placement.stages_of[rank]
        crossed = [placement.is_crossed(stage) for stage in stages]
        # Leader and followers in a dynamic order; None if every rank follows the table's order.
        self.leadership: tuple[int, list[int]] | None = None
        if pipeline.dynamic is not None:
            # Twins that read data on crossed stages swap the data inside an action, so they must
            # follow the same leader.
            swaps = any(
                is_crossed and iterator is not None
                for is_crossed, iterator in zip(crossed, iterators, strict=True)
            )
            twins = []
            if swaps:
                twins = mirrored[rank : rank + 1]
            self.leadership = elect_leader(groups.tp, groups.cp, twins=twins)
            links |= self._decision_links(*self.leadership)
        self.observers = active.required().observers
        transport = open_transport(
            pipeline,
            self.device,
            links,
            self._on_wires(shapes),
            config.pipeline_dtype,
            self.bypasses,
        )
        self.transport = observed(transport, self.observers)
        self.splits = in_force().splits
        # Swaps data with the twin on stages that run the twin's micro-batches.
        self.exchange = self._exchange_with_twin(mirrored, reads_for_twin=any(crossed))
        # Limits how far the host can run ahead of the device; None if the device is the
        # host.
        backend = devices.current()
        self.run_ahead: RunAhead | None = None
        if not backend.is_host:
            self.run_ahead = RunAhead(
                backend,
                self.device,
                timeout_s=pipeline.timeout_s,
            )
        self.measured = Measured()
        self._tables: dict[tuple[int, bool], Table] = {}
        # `ReadAhead.table_key` -> table, for the latest steps whose tables depend on
        # their data.
        self._tables_of_steps: dict[Hashable, Table] = {}
        # Table -> its latest program, with the ends that it was built for.
        self._programs: dict[Table, tuple[PipelineEnds, Program]] = {}
        # Tables that were checked for layers that overwrite their first gradients.
        self._checked: set[Table] = set()
        # Chunk -> the iteration of its latest training step, if random numbers depend on it.
        self._last_iteration_of: WeakKeyDictionary[torch.nn.Module, int] = (
            WeakKeyDictionary()
        )
        # Whether a repeated iteration has been reported.
        self._has_repeated_draws = False
        # Whether a training step on this rank has split a backward pass.
        self._has_split = False
        # Whether a stage whose input received no gradient has been logged.
        self._has_ignored_input = False

    def _mirrored_ranks(self) -> list[int]:
        """Return the twins' global ranks, by pipeline rank; empty without twins."""
        if self.pipeline.config.twins < 2:
            return []
        # The twin is the neighbour in the data-parallel group.
        replica_group = parallel_state.get_data_parallel_group()
        replicas = dist.get_process_group_ranks(replica_group)
        index = replicas.index(dist.get_rank())
        twin = replicas[index ^ 1]  # replicas 0 and 1 are twins, so are 2 and 3
        mirrored = [0] * self.groups.pp.size()
        dist.all_gather_object(mirrored, twin, group=self.groups.pp)
        return mirrored

    @staticmethod
    def _decision_links(leader: int, followers: Sequence[int]) -> set[tuple[int, int]]:
        """Return (source, target) for the decisions that this rank sends or receives."""
        me = dist.get_rank()
        links = {(me, follower) for follower in followers}
        if leader != me:
            links.add((leader, me))
        return links

    def _exchange_with_twin(
        self,
        mirrored: Sequence[int],
        *,
        reads_for_twin: bool,
    ) -> Callable[[Any], Any] | None:
        """Return a function that swaps a data item with the twin; None if no stage needs one."""
        if not self.placement.twin_hops:
            return None
        # Ranks without such stages create no group but must still make this call:
        # creating groups is collective over the job.
        twins = []
        if reads_for_twin:
            low, high = sorted((dist.get_rank(), mirrored[self.rank]))
            twins = [(low, high)]
        groups = groups_of_ranks(twins, self.pipeline.timeout_s)
        if not twins:
            return None
        [rank_and_twin] = twins
        return partial(swapped, groups[rank_and_twin])

    def _check_fit(self, chunks: Sequence[torch.nn.Module]) -> None:
        name = self.pipeline.name
        placement = self.placement
        num_ranks = self.groups.pp.size()
        if num_ranks != placement.num_ranks:
            raise ScheduleError(
                f"{name} was chosen for {placement.num_ranks} pipeline ranks, but Megatron was "
                f"initialised with {num_ranks}; use the same --pipeline-model-parallel-size"
            )
        num_chunks = len(placement.stages_of[self.rank])
        if len(chunks) != num_chunks:
            raise ScheduleError(
                f"{name} needs {num_chunks} model chunks on each rank, but the model has "
                f"{len(chunks)}; build it with that virtual pipeline size"
            )

    def admit(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Accept another model on these process groups, or new wrappers around the same model.

        Raises:
            ScheduleError: Its chunks, or its requirements for a feature, differ from the first
                model's.
        """
        try:
            self._check_fit(chunks)
            for feature in self.features:
                feature.admit(chunks)
        except ScheduleError as error:
            # Other stages may accept the model and start the step, so unblock them.
            self.transport.abort(str(error))
            raise
        self.checked_chunks.update(chunks)

    def data(self, iterators: Sequence[Any]) -> list[MicrobatchData]:
        """Return each chunk's data, which can be read by micro-batch."""
        data: list[MicrobatchData] = []
        stages = self.placement.stages_of[self.rank]
        for iterator, stage in zip(iterators, stages, strict=True):
            exchange = None
            if self.placement.is_crossed(stage):
                exchange = self.exchange
            data_of_chunk = MicrobatchData(iterator, exchange, self.observers)
            data.append(data_of_chunk)
        return data

    def data_order(self, table: Table, config: Any) -> DataOrder | None:
        """Return the order of a step's micro-batches; None means data order."""
        for feature in self.features:
            order = feature.data_order(table, config)
            if order is not None:
                return order
        return None

    def read_ahead(
        self,
        iterators: Sequence[Any],
        num_microbatches: int,
    ) -> ReadAhead | None:
        """Return a training step's data if its table depends on the data; otherwise None.

        If the table depends on the data, this call is collective over the job and `Transport.abort`
        does not unblock it. If a rank fails between two steps, the other ranks wait here until the
        launcher terminates them or the process group times out.
        """
        for feature in self.features:
            read_ahead = feature.read_ahead(iterators, num_microbatches)
            if read_ahead is not None:
                return read_ahead
        return None

    def table_of_step(self, read_ahead: ReadAhead) -> Table:
        """Return the table for a step whose table depends on its data.

        If the table is new, this call is collective over the pipeline-, data- and tensor-parallel
        groups.

        Raises:
            ScheduleError: No order was found, or the tables differ between ranks.
        """
        key = read_ahead.table_key
        table = self._tables_of_steps.pop(key, None)
        if table is None:
            with self._making_table():
                table = make_table_of_step(
                    self.pipeline,
                    read_ahead,
                    self.rank,
                    bypasses=self.bypasses,
                )
                self._agree_on(table)
        # Keep only the latest tables, with the most recent one last: few steps have the
        # same lengths, and tables use memory.
        self._tables_of_steps[key] = table
        if len(self._tables_of_steps) > _MAX_TABLES_OF_STEPS:
            oldest_key = next(iter(self._tables_of_steps))
            oldest = self._tables_of_steps.pop(oldest_key)
            self._programs.pop(oldest, None)
            self._checked.discard(oldest)
        return table

    @contextmanager
    def _making_table(self) -> Iterator[None]:
        """Measure how long it takes to build a step's table, with garbage collection disabled.

        The table's many small objects would trigger full collections, and each collection would
        spend more time traversing Megatron's objects than building the table takes.
        """
        is_collecting = gc.isenabled()
        gc.disable()
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.measured.tables_s += time.perf_counter() - begin_s
            if is_collecting:
                gc.enable()

    def table(self, num_microbatches: int, *, backward: bool) -> Table:
        """Return the cached table for a number of micro-batches.

        If the table is new, this call is collective over the pipeline-, data- and tensor-parallel
        groups, which check that all ranks generated the same table.

        Raises:
            ScheduleError: The schedule cannot run this number of micro-batches, or the tables
                differ between ranks.
        """
        key = (num_microbatches, backward)
        if key not in self._tables:
            table = make_table(
                self.pipeline,
                num_microbatches,
                self.rank,
                backward=backward,
                bypasses=self.bypasses,
            )
            self._agree_on(table)
            self._tables[key] = table
        return self._tables[key]

    def _agree_on(self, table: Table) -> None:
        check_same_table(table, self._members(), self.device)

    def _members(self) -> list[dist.ProcessGroup]:
        """Return the groups that connect this rank with all ranks of the model and its replicas."""
        return [self.groups.pp, self.groups.dp_cp, self.groups.tp]

    def _check_draws(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Check what a training step's random numbers by micro-batch are drawn from.

        Collective in a model's first training step.

        Raises:
            ScheduleError: The seed or the iteration differs between ranks, or is unknown.
        """
        in_force = active.required()
        if in_force.seed is None:
            return
        iteration = active.iteration()
        last_iteration = self._last_iteration_of.get(chunks[0])
        self._last_iteration_of[chunks[0]] = iteration
        if last_iteration is None:
            check_same_draws(
                active.seed_of("draws"),
                iteration,
                self._members(),
                self.device,
            )
        # Megatron's trainers repeat a step on purpose, to find hardware faults.
        has_own_loop = in_force.requested is not None and in_force.host is None
        is_repeated = iteration == last_iteration
        if has_own_loop and is_repeated and not self._has_repeated_draws:
            self._has_repeated_draws = True
            active.report_departure(
                f"two training steps of a model ran as iteration {iteration}, so both drew the "
                "same random numbers, such as dropout masks; call megatron_ext.begin_iteration "
                "with another number before each step"
            )

    def run(
        self,
        table: Table,
        call: Call,
        shapes: Shapes,
        *,
        force_all_reduce: bool,
    ) -> StageCompute:
        """Run one step. On failure, drop deferred weight gradients and abort the transport."""
        trains = not call.forward_only
        if trains:
            self._check_draws(call.chunks)
        splits_backward = self.pipeline.full.splits_backward
        stages = self.placement.stages_of[self.rank]
        for stage, chunk in zip(stages, call.chunks, strict=True):
            self.splits.register_modules(stage, chunk, splits=splits_backward)
        defers = trains and table.split_backwards
        if defers and call.config.sequence_parallel:
            self.splits.agree_on_whole_gradients(self.groups.tp, self.device)
        compute, ends = self._compute(table, call, shapes)
        sync = Sync()
        if trains:
            sync = TrainingSync(
                call.config,
                call.chunks,
                table,
                self.splits,
                force_all_reduce=force_all_reduce,
            )
        # Only observe and count training steps, not evaluations.
        observers = [self.measured, *self.observers] if trains else []
        for observer in observers:
            observer.begin_step(compute)
        compute.observe(observers)
        num_parts = {kind: len(forms) for kind, forms in ends.received.items()}
        executor = Executor(
            table=table,
            program=self._program(table, ends),
            order=self._order(table, call, num_parts),
            compute=compute,
            sync=sync,
            transport=self.transport,
            timeout_s=self.pipeline.timeout_s,
            name_of=self._name_of,
            run_ahead=self.run_ahead,
            observers=observers,
        )
        try:
            is_checked = table in self._checked
            if trains and self.splits.overwrites_first and not is_checked:
                check_first_gradients(table.schedule, self.rank)
                self._checked.add(table)
            with sync, compute.around_step():
                executor.run()
            compute.check_data()
        except BaseException as error:
            self.splits.clear()
            for feature in self.features:
                feature.step_failed()
            # If the transport supports it, report the error to peers, so that they stop waiting
            # before they time out. The exception for Ctrl-C has no message.
            reason = str(error) or type(error).__name__
            self.transport.abort(reason)
            raise
        if trains and not self._has_split:
            self._check_split(table, call.chunks)
        if compute.ignored_inputs and not self._has_ignored_input:
            self._has_ignored_input = True
            log_ignored_input(*compute.ignored_inputs[0])
        compute.end_step()
        return compute

    def _compute(
        self,
        table: Table,
        call: Call,
        shapes: Shapes,
    ) -> tuple[StageCompute, PipelineEnds]:
        """Return the object that computes a step's actions and the `Ends` of its messages."""
        step = Step(
            table,
            call,
            shapes,
            self.peers,
            self.splits,
        )
        for feature in self.features:
            computed = feature.compute(step)
            if computed is not None:
                return computed
        schedule = table.schedule
        if schedule.num_slices > 1 or schedule.pairs_of(self.rank):
            raise ScheduleError(
                f"{schedule.label} has actions that no installed feature can compute; "
                "reinstall megatron_ext"
            )
        shapes = self._on_wires(shapes)
        dtype = call.config.pipeline_dtype
        ends = PipelineEnds.of_shapes(self.peers, shapes, dtype)
        compute = StageCompute(
            call,
            table,
            num_inputs=len(shapes["F"]),
            handed_on=shapes["B"],
            splits=self.splits,
        )
        return compute, ends

    def _on_wires(self, shapes: Shapes) -> Shapes:
        """Return the shapes of the tensors that the transport carries between stages."""
        for feature in self.features:
            shapes = feature.shapes_on_wires(shapes)
        return shapes

    def _program(self, table: Table, ends: PipelineEnds) -> Program:
        """Return a table's program, rebuilt if its ends have changed."""
        latest = self._programs.get(table)
        if latest is not None:
            latest_ends, program = latest
            if latest_ends == ends:
                return program
        leads = self.peers.leads(self.rank)
        if table.schedule.is_for_one_step:
            with self._making_table():
                program = make_program(table, ends, leads=leads)
        else:
            program = make_program(table, ends, leads=leads)
        self._programs[table] = (ends, program)
        return program

    def _name_of(self, rank: int | None) -> str:
        """Return a global rank's name for use in errors; None means this rank."""
        if rank is None:
            return f"rank {dist.get_rank()} (pipeline rank {self.rank})"
        return f"rank {rank}"

    def _check_split(self, table: Table, chunks: Sequence[torch.nn.Module]) -> None:
        """Log if W had nothing to compute in the first step with split backward passes."""
        # In this case, the step is correct, but slower than its table predicts. Either
        # the patch `split_backward.linear` does not match this Megatron release, or the
        # model has custom layers.
        row = table.schedule.rows[self.rank]
        self._has_split = any(action.kind == "I" for action in row)
        if not self._has_split or self.splits.has_deferred:
            return
        weights: list[torch.nn.Parameter] = []
        for chunk in chunks:
            weights += chunk.parameters()
        has_trained_weights = any(weight.requires_grad for weight in weights)
        if has_trained_weights and dist.get_rank() == 0:
            active.report_departure(
                f"{table.schedule.label} splits backward passes, but no layer on rank 0 deferred a "
                "weight gradient to W (patch split_backward.linear): its linear layers are not "
                "Megatron's; --pipeline-schedule 1f1b is as fast"
            )

    def _order(self, table: Table, call: Call, num_parts: dict[str, int]) -> Order:
        """Return the step's order; evaluations use the table's order, which is the shortest."""
        if self.leadership is None or call.forward_only:
            return Order(table)
        leader, followers = self.leadership
        timeout_s = self.pipeline.timeout_s
        if leader != dist.get_rank():
            return LedOrder(
                table,
                self.transport,
                leader,
                timeout_s,
            )
        schedule = table.schedule
        if schedule.is_for_one_step:
            with self._making_table():
                policy_of = self.pipeline.policies_of(schedule, table.costs)
                policy = policy_of(self.rank)
        else:
            policy = self.pipeline.policy(call.num_microbatches, self.rank)
        return PolicyOrder(
            table,
            policy,
            self.transport,
            num_parts,
            followers,
            timeout_s,
            self.run_ahead,
        )


@dataclass
class Runtimes:
    """A configuration's runtimes, which are closed together with it."""

    by_group: dict[int, Runtime] = field(default_factory=dict)
    """Id of the pipeline group -> runtime, which references the group, so the id stays unique."""
    splits: SplitBackward = field(default_factory=SplitBackward)
    """Weight gradients between I and W; patched layers record them here."""
    kept_by_feature: dict[str, Any] = field(default_factory=dict)
    """Name -> a feature's state, for the layers that the feature patches."""
    offloading: Offloading = field(default_factory=Offloading)
    """The order in which Megatron reloads offloaded activations."""
    megatron_pipelines: MegatronPipelines = field(default_factory=MegatronPipelines)
    """Megatron's own schedules, if our transport carries their messages."""
    last_counts: tuple[float, list[float]] | None = None
    """Time and counter values at the last report to scalar writers."""

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self.by_group.values())

    def abort(self, reason: str) -> None:
        """Abort the transports. Called from a thread other than the training thread."""
        for runtime in list(self):  # the training thread may add a runtime meanwhile
            runtime.transport.abort(reason)
        self.megatron_pipelines.abort(reason)

    def close(self) -> None:
        """Close the transports."""
        # Stop `run_ahead`'s thread first, because it calls the transport when an action
        # ends.
        for runtime in self:
            if runtime.run_ahead is not None:
                runtime.run_ahead.close()
            runtime.transport.close()
        self.megatron_pipelines.close()
        self.splits.close()


def in_force() -> Runtimes:
    """Return the active configuration's runtimes; the first call creates them."""
    configuration = active.required()
    if configuration.runtimes is None:
        configuration.runtimes = Runtimes()
    assert isinstance(configuration.runtimes, Runtimes)
    return configuration.runtimes


def totals() -> tuple[Measured, int]:
    """Return this process's training statistics so far and the number of bytes sent."""
    together = Measured()
    num_bytes = 0
    runtimes = list(in_force())
    for runtime in runtimes:
        together.add(runtime.measured)
        num_bytes += runtime.transport.stats().bytes
    return together, num_bytes


def log_statistics(*, of_all: bool = True) -> None:
    """Log training statistics on rank 0, for all ranks (collective) or only for rank 0."""
    for runtime in in_force():
        by_rank = [runtime.measured]
        where = " on this rank"
        if of_all:
            # Creating a runtime is collective, so all ranks hold their runtimes in the same order.
            by_rank = [Measured() for _ in range(dist.get_world_size())]
            where = ""
            dist.all_gather_object(by_rank, runtime.measured)
        together = Measured()
        for measured in by_rank:
            together.add(measured)
        if not together.steps or dist.get_rank():
            continue
        pipeline = runtime.pipeline
        schedule = pipeline.full
        order = "table"
        if pipeline.dynamic is not None:
            order = pipeline.dynamic.policy
        jumped = 100 * together.out_of_order / together.actions
        figures = [f"{jumped:.1f} % of actions out of order"]
        # Busy times are measured on the host. On any other device, a launch returns before the
        # computation is complete.
        if runtime.device.type == "cpu":
            # Use the longest wall time: ranks that finish a step early wait for the slowest rank.
            longest_s = max(measured.wall_s for measured in by_rank)
            whole_s = len(by_rank) * longest_s
            idle = 100 * (1 - together.busy_s / whole_s)
            figures.append(f"{idle:.1f} % of the time idle")
        activations = together.peak_live * schedule.pp / schedule.num_stages
        if pipeline.config.has_table_per_step:
            figures.append(
                f"activations of at most {activations:g} longest micro-batches of a step"
            )
            table_ms = 1000 * together.tables_s / together.steps
            figures.append(f"{table_ms:.1f} ms per step to generate its table")
        else:
            figures.append(f"at most {activations:g} activations")
        # Use WARNING, because Python hides all lower levels if logging is not configured.
        _LOG.warning(
            "pipeline schedule: %s, order by %s, measured over %d steps%s: %s",
            schedule.label,
            order,
            together.steps,
            where,
            ", ".join(figures),
        )
