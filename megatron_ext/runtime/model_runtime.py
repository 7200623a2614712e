"""What one model on one set of process groups keeps across steps, and how it runs a step.

`runtimes` creates it at the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_ext.runtime.balanced_order import BalancedStep, cost_of_model
from megatron_ext.runtime.compute import Call, StageCompute
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.measured import Measured, StepMeasure
from megatron_ext.runtime.microbatches import MicrobatchData, TwinExchange
from megatron_ext.runtime.ordering import LedOrder, Order, PolicyOrder, TableOrder
from megatron_ext.runtime.program import (
    Ends,
    Peers,
    PipelineEnds,
    Program,
    Shapes,
    make_program,
)
from megatron_ext.runtime.rank_table import Table, check_agreement, make_table
from megatron_ext.runtime.split import split_backward
from megatron_ext.runtime.sync import GradientSync, ParameterSync
from megatron_ext.runtime.te_layers import overwrites_first
from megatron_ext.runtime.tree_compute import Forms, TreeEnds
from megatron_ext.schedules.table.first_gradients import check_first_gradients
from megatron_ext.tools.trace.session_observer import observers, size_notes

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.runtime.agreement import Agreement
    from megatron_ext.runtime.declared_trees import TreeSteps
    from megatron_ext.runtime.observer import Observer
    from megatron_ext.runtime.replica_exchange import ReplicaExchange
    from megatron_ext.runtime.run_ahead import RunAhead
    from megatron_ext.transport.base import Transport

__all__ = ["Runtime"]

_LOG = logging.getLogger(__name__)


@dataclass
class Runtime:
    """The state that one model on one set of process groups keeps across steps."""

    pipeline: Pipeline
    groups: ProcessGroupCollection
    device: torch.device
    transport: Transport
    peers: Peers
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
        placement, taken = self.pipeline.placement, size_notes()
        crossed = map(placement.is_crossed, placement.stages_of[self.groups.pp.rank()])
        return [
            MicrobatchData(iterator, self.exchange if is_crossed else None, taken)
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
        split = split_backward()
        for stage, chunk in zip(stages, call.chunks, strict=True):
            split.register_modules(stage, chunk)
        forms = None if self.trees is None else self.trees.forms(call, shapes)
        compute = StageCompute(call, table, num_inputs=len(shapes["F"]), handed_on=shapes["B"])
        if forms is not None and self.trees is not None:
            compute = self.trees.compute(call, table, forms)
        # Statistics cover training only.
        measured = Measured() if call.forward_only else self.measured
        gradients = GradientSync(call.config, call.chunks, table, force_all_reduce=force_all_reduce)
        listening: list[Observer] = [StepMeasure(table, measured)]
        if not call.forward_only:
            listening += observers(compute)
        executor = Executor(
            table=table,
            program=self._program(table, shapes, call.config.pipeline_dtype, forms),
            order=self._order(table, call, shapes, forms),
            compute=compute,
            gradients=gradients,
            parameters=ParameterSync(call.config, call.chunks, table),
            transport=self.transport,
            timeout_s=self.pipeline.timeout_s,
            name_of=self._name_of,
            run_ahead=self.run_ahead,
            observers=listening,
        )
        try:
            if not call.forward_only:
                self._check_first_gradients(table, call.chunks)
            with gradients:
                executor.run()
        except BaseException as error:
            split.clear()
            self.transport.abort(str(error))
            raise
        if not call.forward_only and not self._has_split:
            self._check_split(table, call.chunks)
        if forms is not None:
            forms.step_done()
        return compute

    def _check_split(self, table: Table, chunks: Sequence[torch.nn.Module]) -> None:
        """Log after this rank's first step with split backwards if W had nothing to do.

        The step is right, only slower than its table: `split_backward.linear` no longer sees the
        layers of this Megatron, or the model has layers of its own.
        """
        self._has_split = any(action.kind == "I" for action in table.schedule.rows[table.rank])
        trains = any(p.requires_grad for chunk in chunks for p in chunk.parameters())
        if self._has_split and trains and not split_backward().has_deferred and not dist.get_rank():
            _LOG.warning(
                "%s splits backwards, but no layer of rank 0 left a weight gradient for W (patch "
                "split_backward.linear): its linear layers are none of Megatron's; --pipeline-"
                "schedule 1f1b is as fast",
                table.schedule.label,
            )

    def _check_first_gradients(self, table: Table, chunks: Sequence[torch.nn.Module]) -> None:
        """Check the table for layers that overwrite their first gradients, once for each chunk."""
        for chunk in chunks:
            tables = self._checked.setdefault(chunk, set())
            if id(table) not in tables and overwrites_first(chunk):
                check_first_gradients(table.schedule, table.rank)
            tables.add(id(table))

    def _name_of(self, rank: int | None) -> str:
        """Return the name of a global rank for error messages; None stands for this rank."""
        if rank is None:
            return f"rank {dist.get_rank()} (pipeline rank {self.groups.pp.rank()})"
        return f"rank {rank}"

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
