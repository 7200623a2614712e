"""Models of a disaggregated job whose stages hand on trees of tensors or have routes.

A forward rank sends each tree to the next forward rank, and to the backward rank of the next stage,
which repeats that stage's forward. Gradients travel between backward ranks, as between the ranks of
any pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from megatron_ext.disaggregation.role_compute import drawn
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.program import Table
from megatron_ext.runtime.tree_compute import (
    Forms,
    TreeCompute,
    TreeMessages,
    TreeSteps,
    agree_trees,
)
from megatron_ext.schedules.table.communication import route_receivers
from megatron_ext.schedules.table.placement import linear
from megatron_ext.schedules.table.route_plan import plan_routes
from megatron_ext.schedules.table.transforms import forward_only

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_ext.disaggregation.job import Job
    from megatron_ext.runtime.compute import Call, Tensors
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.schedules.table.communication import Transfer
    from megatron_ext.schedules.table.route_plan import Route

__all__ = ["MESSAGES", "RoleTrees", "TreeForwardCompute", "role_trees"]

MESSAGES = 4
"""Tensors of a micro-batch that travel from one rank to another: a tree and what is on routes, each
with a header."""


@dataclass(frozen=True)
class _RoleTreeEnds(TreeMessages):
    """The peers of a role's transfers (`program.Ends`)."""

    job: Job
    leads: bool = True

    def ranks(self, transfer: Transfer) -> Sequence[int]:
        """Return global ranks; a merged forward rank has all tensor-parallel ranks as peers."""
        return self.job.peers(transfer.peer)


@dataclass
class RoleTrees:
    """The trees of a job's model, and what is known of their forms from earlier steps."""

    job: Job
    steps: TreeSteps
    _training: Forms = field(init=False)
    _evaluation: Forms = field(init=False)

    def __post_init__(self) -> None:
        """Begin without any form."""
        varies = self.steps.declared.varies
        self._training, self._evaluation = Forms(varies), Forms(varies)

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of the model."""
        return self.steps.declared.routes

    @property
    def linked_stages(self) -> set[int]:
        """The stages that exchange tensors of routes with this one, and this one."""
        mine = self.job.place.pp
        users = [{route.source, *route.takers} for route in self.routes]
        return {stage for stages in users if mine in stages for stage in stages} | {mine}

    def training_done(self) -> None:
        """Record that this rank has completed a training step."""
        self._training.step_done()

    def evaluation_done(self) -> None:
        """Record that this rank has completed an evaluation."""
        self._evaluation.step_done()

    def training(self, call: Call, table: Table) -> tuple[TreeCompute, _RoleTreeEnds]:
        """Return the compute and the ends of a training step."""
        compute = self.steps.compute(call, table, self._training, of_roles=True)
        return compute, _RoleTreeEnds(self._training.agreed, self.job)

    def evaluation(self, call: Call) -> tuple[TreeCompute, _RoleTreeEnds]:
        """Return the compute and the ends of an evaluation, which forward ranks run alone."""
        schedule = forward_only(linear(self.job.ranks.pp), call.num_microbatches)
        table = Table(replace(schedule, routes=self.routes), self.job.place.pp, slots=2)
        compute = self.steps.compute(call, table, self._evaluation)
        return compute, _RoleTreeEnds(self._evaluation.agreed, self.job)


def role_trees(
    job: Job, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup, *, shapes_travel: bool
) -> RoleTrees | None:
    """Gather the declarations of all stages; None without any. Collective over a pipeline.

    Args:
        job: The disaggregated job.
        chunks: The model of this rank, in its wrappers.
        group: The pipeline-parallel group of this role.
        shapes_travel: Whether sequence lengths vary (`--variable-seq-lengths`).

    Raises:
        ScheduleError: The routes contradict each other, or roles cannot exchange trees as asked.
            Every rank raises it.
    """
    steps = agree_trees(chunks, linear(job.ranks.pp), group, shapes_travel=shapes_travel)
    if steps is None:
        return None
    if job.activations == "ship":
        raise ScheduleError(
            "the model declares routes or boundaries, but --fbd-activations ship sends one tensor "
            "[s, b, h] for each layer; use --fbd-activations recompute"
        )
    if job.ranks.merged and job.sequence_parallel:
        raise ScheduleError(
            "the model declares routes or boundaries, and a forward process in place of several "
            "tensor-parallel ranks cannot divide trees along the sequence; leave "
            "--ignore-forward-tensor-parallel or --sequence-parallel out"
        )
    return RoleTrees(job, steps)


class TreeForwardCompute:
    """Computes F of a forward rank whose model has trees or routes (`executor.Compute`).

    Args:
        job: The disaggregated job.
        compute: The compute of its stage.
    """

    def __init__(self, job: Job, compute: TreeCompute) -> None:
        self._job, self._compute = job, compute
        schedule = compute.table.schedule
        self._plan = plan_routes(schedule.routes, schedule.placement)
        self.release, self.unfinished = compute.release, compute.unfinished

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run F; return a tensor for each rank that receives one."""
        with torch.no_grad(), drawn(action):
            made = self._compute.run(action, inputs)
        return [part for copy in self._copies(action, made) for part in copy]

    def saved_tensors(self, action: Action) -> None:
        """Return None: forwards keep no graph."""

    def _copies(self, action: Action, made: Tensors) -> Iterator[Tensors]:
        """Yield the tensors of one message for one peer, in the order of the table's transfers."""
        table = self._compute.table
        transfers = iter(table.exchanges[table.positions[action]].outputs)
        # A route leads to both ranks of each stage that takes it, a tree to the next stage's.
        hops = self._plan.hops_out(action)
        of_routes = [len(route_receivers(table.schedule, hop)) for hop in hops]
        of_tree = len(table.exchanges[table.positions[action]].outputs) - sum(of_routes)
        number, parts = self._compute.forms.num_parts["F"], iter(made)
        for num_transfers in (of_tree, *of_routes):
            message = list(islice(parts, number))
            for transfer in islice(transfers, num_transfers):
                yield [part for part in message for _ in self._job.peers(transfer.peer)]
