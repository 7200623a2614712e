"""State of one model on one set of process groups across steps, and how it runs a step.

`runtime_of` makes a `Runtime` at a model's first step; it is closed with the configuration.
Training statistics are summed and logged here too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.compute import Call, MicrobatchData, StageCompute, TwinExchange
from megatron_ext.runtime.connect import channels_of, open_transport
from megatron_ext.runtime.executor import (
    Executed,
    Executor,
    Observer,
    num_out_of_order,
    overrides,
)
from megatron_ext.runtime.lengths import BalancedStep, ReplicaExchange, cost_of_model
from megatron_ext.runtime.offloading import Offloading
from megatron_ext.runtime.ordering import (
    Agreement,
    LedOrder,
    Order,
    PolicyOrder,
    TableOrder,
    agree,
    run_ahead_of,
)
from megatron_ext.runtime.plans import PlannedCompute
from megatron_ext.runtime.program import (
    Ends,
    Peers,
    PipelineEnds,
    Program,
    Shapes,
    Table,
    check_agreement,
    make_program,
    make_table,
)
from megatron_ext.runtime.sliced_compute import KeptState, SlicedCompute
from megatron_ext.runtime.split import SplitBackward, overwrites_first
from megatron_ext.runtime.sync import GradientSync, ParameterSync
from megatron_ext.runtime.trees import Forms, TreeEnds, agree_trees, channels_of_routes
from megatron_ext.schedules.table.validation import check_first_gradients
from megatron_ext.transport.observed import observed
from megatron_ext.transport.torch_dist import groups_of_ranks

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.active import Pipeline
    from megatron_ext.runtime.megatron_messages import StockStep
    from megatron_ext.runtime.ordering import RunAhead
    from megatron_ext.runtime.trees import TreeSteps
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route
    from megatron_ext.transport.base import Transport


# Change in live activations by kind of action. An activation lives until B or W ends.
_CHANGE = {"F": 1, "R": 1, "B": -1, "I": 0, "W": -1}


@dataclass
class Measured:
    """Statistics of one rank over its training steps."""

    steps: int = 0
    actions: int = 0
    out_of_order: int = 0
    """Actions that ran before an earlier action of the table."""
    busy_s: float = 0.0
    """Time in actions, in seconds of host time."""
    wall_s: float = 0.0
    """Time in steps, in seconds."""
    peak_live: float = 0
    """Peak number of live stage activations."""

    def add(self, other: Measured) -> None:
        """Add the statistics of another rank or of further steps."""
        self.steps = max(self.steps, other.steps)
        self.actions += other.actions
        self.out_of_order += other.out_of_order
        self.busy_s += other.busy_s
        self.wall_s += other.wall_s
        self.peak_live = max(self.peak_live, other.peak_live)


@dataclass
class StepMeasure(Observer):
    """Adds one step of one rank to `into` when the step ends."""

    table: Table
    into: Measured

    def end_step(self, executed: Sequence[Executed], wall_s: float) -> None:
        """Add a finished step."""
        into = self.into
        into.steps += 1
        into.wall_s += wall_s
        into.actions += len(executed)
        into.busy_s += sum(duration_s for _, _, duration_s in executed)
        into.out_of_order += num_out_of_order(executed)
        shares = self.table.schedule.slices
        live = accumulate(_CHANGE[a.kind] * shares[a.slice] for _, a, _ in executed)
        into.peak_live = max(into.peak_live, *live)


def in_words(together: Measured, pipeline: Pipeline, device: str, where: str = "") -> str:
    """Format the statistics of a run as one line.

    Args:
        together: The sum over all ranks.
        pipeline: The pipeline that ran.
        device: Type of the compute device.
        where: Qualifier if `together` does not cover all ranks.
    """
    schedule = pipeline.full
    order = "table" if pipeline.dynamic is None else pipeline.dynamic.policy
    figures = [f"{100 * together.out_of_order / together.actions:.1f} % of actions out of order"]
    # Times are the host's, and any other device still computes when the call that launches returns.
    if device == "cpu":
        figures.append(f"{100 * (1 - together.busy_s / together.wall_s):.1f} % of the time idle")
    figures.append(
        f"at most {together.peak_live * schedule.pp / schedule.num_stages:g} activations"
    )
    return (
        f"pipeline schedule: {schedule.label}, order by {order}, measured over {together.steps} "
        f"steps{where}: {', '.join(figures)}"
    )


@dataclass
class Runtime:
    """The state that one model on one set of process groups keeps across steps."""

    pipeline: Pipeline
    groups: ProcessGroupCollection
    device: torch.device
    transport: Transport
    peers: Peers
    splits: SplitBackward
    kept: KeptState
    """What layers keep from slice to slice."""
    agreement: Agreement | None
    """Leader and followers of a dynamic order; None: every rank runs the table's order."""
    exchange: TwinExchange | None
    """Swaps data with the twin on stages that run its micro-batches."""
    replicas: ReplicaExchange | None
    """Data-parallel replicas that share out their micro-batches; None: each runs what it reads."""
    trees: TreeSteps | None
    """For stages that declare trees or routes."""
    run_ahead: RunAhead | None
    """Bounds how far the host runs ahead of the device; None if the device is the host."""
    observers: Sequence[Observer] = ()
    measured: Measured = field(default_factory=Measured)
    _tables: dict[tuple[int, bool], Table] = field(default_factory=dict)
    _programs: dict[int, tuple[Table, Ends, Program]] = field(default_factory=dict)
    """By id of the table: the table, and the latest program with the ends it was made for."""
    _checked: WeakKeyDictionary[torch.nn.Module, set[int]] = field(
        default_factory=WeakKeyDictionary
    )
    """By chunk: ids of the tables that its layers can run."""
    _has_split: bool = False
    """Whether a training step of this rank has split a backward."""

    def data(self, iterators: Sequence[Any]) -> list[MicrobatchData]:
        """Return each chunk's data, to be read by micro-batch."""
        placement = self.pipeline.placement

        def taken(microbatch: int, item: Any) -> None:
            for observer in self.observers:
                observer.read(microbatch, item)

        crossed = map(placement.is_crossed, placement.stages_of[self.groups.pp.rank()])
        return [
            MicrobatchData(
                iterator,
                self.exchange if is_crossed else None,
                taken if self.observers else None,
            )
            for iterator, is_crossed in zip(iterators, crossed, strict=True)
        ]

    def balanced(self, table: Table, config: Any) -> BalancedStep | None:
        """Return what orders the micro-batches of one step; None: they keep the file's order.

        Args:
            table: The table of the step.
            config: The model's `TransformerConfig`.
        """
        if self.pipeline.config.balance == "off":
            return None
        cost = self.pipeline.config.length_costs or cost_of_model(config)
        return BalancedStep(table.schedule, self.pipeline.costs, cost, self.replicas)

    def table(self, num_microbatches: int, *, backward: bool) -> Table:
        """Return the cached table for a number of micro-batches.

        Collective over the pipeline, data- and tensor-parallel groups if the table is new: they
        check that all ranks made the same one.

        Raises:
            ScheduleError: The schedule cannot run this number, or tables differ between ranks.
        """
        key = (num_microbatches, backward)
        if key not in self._tables:
            rank = self.groups.pp.rank()
            routes = () if self.trees is None else self.trees.declared.routes
            table = make_table(
                self.pipeline, num_microbatches, rank, backward=backward, routes=routes
            )
            members = [self.groups.pp, self.groups.dp_cp, self.groups.tp]
            check_agreement(table, members, self.device)
            self._tables[key] = table
        return self._tables[key]

    def run(
        self, table: Table, call: Call, shapes: Shapes, *, force_all_reduce: bool
    ) -> StageCompute:
        """Run one step. On failure, drop deferred weight gradients and abort the transport."""
        stages = table.schedule.placement.stages_of[table.rank]
        for stage, chunk in zip(stages, call.chunks, strict=True):
            self.splits.register_modules(stage, chunk)
        forms = None if self.trees is None else self.trees.forms(call, shapes)
        pairs = not call.forward_only and (
            bool(table.schedule.pairs_of(table.rank))
            or (self.pipeline.config.pairs and self.agreement is not None)
        )
        if forms is None or self.trees is None:
            given = call, table, len(shapes["F"]), shapes["B"], self.splits
            if table.schedule.num_slices > 1:
                compute: StageCompute = SlicedCompute(*given, kept=self.kept)
            else:
                compute = PlannedCompute(*given) if pairs else StageCompute(*given)
        else:
            compute = self.trees.compute(call, table, forms, self.splits)
        # Statistics cover training only.
        measured = Measured() if call.forward_only else self.measured
        gradients = GradientSync(
            call.config, call.chunks, table, self.splits, force_all_reduce=force_all_reduce
        )
        listening: list[Observer] = [StepMeasure(table, measured)]
        if not call.forward_only:
            listening += self.observers
            for observer in self.observers:
                observer.begin_step(compute)
            if isinstance(compute, PlannedCompute):
                compute.observers = [o for o in listening if overrides(o, "end_exchange")]
        executor = Executor(
            table=table,
            program=self._program(table, shapes, call.config.pipeline_dtype, forms),
            order=self._order(table, call, shapes, forms),
            compute=compute,
            gradients=gradients,
            parameters=ParameterSync(call.config, call.chunks, table),
            transport=self.transport,
            timeout_s=self.pipeline.timeout_s,
            name_of=lambda rank: (
                f"rank {dist.get_rank()} (pipeline rank {table.rank})"
                if rank is None
                else f"rank {rank}"
            ),
            run_pair=compute.run_pair if isinstance(compute, PlannedCompute) else None,
            run_ahead=self.run_ahead,
            observers=listening,
        )
        try:
            for chunk in () if call.forward_only else call.chunks:
                checked = self._checked.setdefault(chunk, set())  # it walks over all layers
                if id(table) not in checked and overwrites_first(chunk):
                    check_first_gradients(table.schedule, table.rank)
                checked.add(id(table))
            with gradients:
                executor.run()
        except BaseException as error:
            # Peers end their waits with this error now, if the wire can, not with their time-outs.
            self.splits.clear()
            self.kept.clear()
            self.transport.abort(str(error))
            raise
        if not call.forward_only and not self._has_split:
            self._check_split(table, call.chunks)
        if forms is not None:
            forms.step_done()
        return compute

    def _check_split(self, table: Table, chunks: Sequence[torch.nn.Module]) -> None:
        """Log after this rank's first step with split backwards if W had nothing to do."""
        # The step is right, only slower than its table: `split_backward.linear` no longer sees the
        # layers of this Megatron, or the model has layers of its own.
        self._has_split = any(action.kind == "I" for action in table.schedule.rows[table.rank])
        trains = any(p.requires_grad for chunk in chunks for p in chunk.parameters())
        if self._has_split and trains and not self.splits.has_deferred and not dist.get_rank():
            _LOG.warning(
                "%s splits backwards, but no layer of rank 0 left a weight gradient for W (patch "
                "split_backward.linear): its linear layers are none of Megatron's; --pipeline-"
                "schedule 1f1b is as fast",
                table.schedule.label,
            )

    def _program(
        self, table: Table, shapes: Shapes, dtype: torch.dtype, forms: Forms | None
    ) -> Program:
        """Return the cached program; make a new one if shapes have changed."""
        ends: Ends = PipelineEnds(self.peers, shapes, dtype, table.rank)
        if forms is not None:
            ends = TreeEnds(forms.agreed, self.peers, table.rank)
        _, known, program = self._programs.get(id(table), (table, None, None))
        if program is None or known != ends:
            program = make_program(table, ends)
            # It keeps the table, whose id could otherwise become another object's.
            self._programs[id(table)] = table, ends, program
        return program

    def _order(self, table: Table, call: Call, shapes: Shapes, forms: Forms | None) -> Order:
        """Return what decides about the order; evaluation keeps the table's, which is shortest."""
        agreement, timeout_s = self.agreement, self.pipeline.timeout_s
        if agreement is None or call.forward_only:
            return TableOrder(table)
        if agreement.leader != dist.get_rank():
            return LedOrder(table, self.transport, agreement.leader, timeout_s)
        num_parts = {kind: len(tensors) for kind, tensors in shapes.items()}
        if forms is not None:
            num_parts = forms.num_parts
        return PolicyOrder(
            self.pipeline.policy(call.num_microbatches, table.rank),
            table,
            self.transport,
            num_parts,
            agreement.followers,
            timeout_s,
            self.run_ahead,
        )


_LOG = logging.getLogger(__name__)


@dataclass
class Runtimes:
    """The runtimes of one configuration, closed with it."""

    by_group: dict[int, Runtime] = field(default_factory=dict)
    """By id of the pipeline group. The runtime holds the group, so its id stays unique."""
    splits: SplitBackward = field(default_factory=SplitBackward)
    """Weight gradients between I and W; patches of layers record them here."""
    kept: KeptState = field(default_factory=KeptState)
    """What layers keep from slice to slice; patches of layers read it here."""
    offloading: Offloading = field(default_factory=Offloading)
    """In which order Megatron brings offloaded activations back."""
    stock_step: StockStep | None = None
    """The running step of Megatron's own schedule, if its messages travel over our transport."""
    stock_transports: dict[int, tuple[Any, Transport]] = field(default_factory=dict)
    """For Megatron's own schedules: (pipeline group, transport) by the group's id."""
    last_counts: tuple[float, list[float]] | None = None
    """When the counts for writers of scalars were read last, and what they were."""

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self.by_group.values())

    def close(self) -> None:
        """Close the transports."""
        # The device's thread first: it rings the transport when an action ends.
        for runtime in self:
            if runtime.run_ahead is not None:
                runtime.run_ahead.close()
            runtime.transport.close()
        for _, transport in self.stock_transports.values():
            transport.close()


def in_force() -> Runtimes:
    """Return the runtimes of the active configuration; the first call makes them."""
    found = active.required()
    if found.runtimes is None:
        found.runtimes = Runtimes()
    return found.runtimes


def runtime_of(
    pipeline: Pipeline,
    groups: ProcessGroupCollection,
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Any],
    config: Any,
    shapes: Shapes,
    seq_length: int,
) -> Runtime:
    """Return the runtime of a pipeline group; create it at the first step.

    Creation is collective over all ranks of the job.

    Raises:
        ScheduleError: Ranks, chunks or declared routes do not fit the schedule.
        TransportError: The transport is not available.
    """
    runtimes = in_force()
    found = runtimes.by_group.get(id(groups.pp))
    if found is not None:
        return found
    if pipeline.config.slices > 1:
        cost = pipeline.config.length_costs or cost_of_model(config)
        pipeline = pipeline.with_attention(cost.attention_share(seq_length))
    placement = pipeline.placement
    _check_fit(pipeline, placement, groups, chunks)
    device = devices.device_of(chunks)
    trees = agree_trees(chunks, placement, groups.pp, shapes_travel=None in shapes["F"])
    if trees is not None and pipeline.config.pairs:
        raise ScheduleError(
            f"{pipeline.name} cannot run pairs of stages that declare trees or routes, which "
            "Megatron's schedule plans do not know; leave --overlap-moe-expert-parallel-comm out"
        )
    twin = None
    if pipeline.config.twins == 2:  # the neighbour in the data-parallel group
        replicas = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        twin = replicas[replicas.index(dist.get_rank()) ^ 1]
    # From here to the end in one order on all ranks of the job: most of it is collective.
    peers = Peers(dist.get_process_group_ranks(groups.pp), twin)
    channels = channels_of(placement, groups.pp.rank(), peers)
    routes: tuple[Route, ...] = ()
    if trees is not None:
        if pipeline.config.slices > 1:
            raise ScheduleError(
                "slices are for models that hand on one tensor, not for trees and routes; leave "
                "the slices out"
            )
        routes = trees.declared.routes
        peers = peers.with_mirrored(groups.pp)
        channels += channels_of_routes(routes, placement, groups.pp.rank(), peers)
        # Trees are bytes, and how many is known when they are made: the transport's slots fit any.
        shapes = {"F": [None], "B": [None]}
    agreement = None
    if pipeline.dynamic is not None:
        agreement = _agreement(placement, groups, iterators, peers)
        channels += agreement.channels
    observers = active.required().observers
    transport = observed(
        open_transport(pipeline, device, channels, shapes, config.pipeline_dtype, routes), observers
    )
    made = runtimes.by_group[id(groups.pp)] = Runtime(
        pipeline=pipeline,
        groups=groups,
        device=device,
        transport=transport,
        peers=peers,
        splits=runtimes.splits,
        kept=runtimes.kept,
        agreement=agreement,
        exchange=_exchange(pipeline, peers, groups.pp.rank()),
        replicas=_replicas(pipeline, groups, device),
        trees=trees,
        run_ahead=run_ahead_of(devices.current(), device, pipeline.timeout_s),
        observers=observers,
    )
    return made


def _exchange(pipeline: Pipeline, peers: Peers, rank: int) -> TwinExchange | None:
    """Create the process group of twins that run each other's micro-batches; None without any."""
    placement = pipeline.placement
    if not placement.twin_hops:
        return None
    # Ranks without such twins take part too: making groups is collective over all ranks of the job.
    pairs = []
    if any(map(placement.is_crossed, placement.stages_of[rank])):
        assert peers.twin is not None
        low, high = sorted((peers.pipeline[rank], peers.twin))
        pairs = [(low, high)]
    groups = groups_of_ranks(pairs, pipeline.timeout_s)
    return TwinExchange(groups[pairs[0]]) if pairs else None


def _replicas(
    pipeline: Pipeline, groups: ProcessGroupCollection, device: torch.device
) -> ReplicaExchange | None:
    """Create the process group of replicas that share out micro-batches. Collective, all ranks."""
    if pipeline.config.balance != "pack":
        return None
    found = getattr(groups, "dp", None) or parallel_state.get_data_parallel_group()
    members = tuple(dist.get_process_group_ranks(found))
    if len(members) == 1:  # so it is on all ranks
        return None
    made = groups_of_ranks([members], pipeline.timeout_s, backend="gloo")
    return ReplicaExchange(made[members], device)


def _agreement(
    placement: Placement,
    groups: ProcessGroupCollection,
    iterators: Sequence[Any],
    peers: Peers,
) -> Agreement:
    """Elect the leader of this rank's order. Collective over all ranks of the job."""
    # Twins that read data on crossed stages swap it, so they follow one leader too.
    own = placement.stages_of[groups.pp.rank()]
    exchanges = any(
        placement.is_crossed(stage) and iterator is not None
        for stage, iterator in zip(own, iterators, strict=True)
    )
    others = [peers.twin] if exchanges and peers.twin is not None else []
    return agree(groups.tp, groups.cp, others=others)


def _check_fit(
    pipeline: Pipeline,
    placement: Placement,
    groups: ProcessGroupCollection,
    chunks: Sequence[torch.nn.Module],
) -> None:
    if groups.pp.size() != placement.num_ranks:
        raise ScheduleError(
            f"{pipeline.name} was chosen for {placement.num_ranks} pipeline ranks, but Megatron "
            f"was initialised with {groups.pp.size()}; use the same --pipeline-model-parallel-size"
        )
    wanted = len(placement.stages_of[groups.pp.rank()])
    if len(chunks) != wanted:
        raise ScheduleError(
            f"{pipeline.name} needs {wanted} model chunks on each rank, but the model "
            f"has {len(chunks)}; build it with that virtual pipeline size"
        )


def totals() -> tuple[Measured, int]:
    """Return this process's training statistics so far, and the bytes that it sent."""
    together = Measured()
    runtimes = list(in_force())
    for runtime in runtimes:
        together.add(runtime.measured)
    return together, sum(runtime.transport.stats().bytes for runtime in runtimes)


def log_statistics() -> None:
    """Log the training statistics of all ranks on rank 0. Collective over all ranks of the job."""
    for runtime in in_force():
        # Making a runtime is collective, so all ranks have theirs in one order.
        everybody: list[Measured] = [Measured() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, runtime.measured)
        together = Measured()
        for measured in everybody:
            together.add(measured)
        _log(runtime, together, "")


def log_own_statistics() -> None:
    """Log rank 0's own statistics. Not collective, so ranks may exit at different times."""
    for runtime in in_force():
        _log(runtime, runtime.measured, " on this rank")


def _log(runtime: Runtime, measured: Measured, where: str) -> None:
    if measured.steps and dist.get_rank() == 0:
        # Without a logging setup, Python shows nothing below WARNING.
        _LOG.warning("%s", in_words(measured, runtime.pipeline, runtime.device.type, where))
