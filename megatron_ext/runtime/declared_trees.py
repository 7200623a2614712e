"""Gathers what the stages of a model declare: trees of tensors between stages, and routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_ext.runtime.route_declarations import Declared, declared
from megatron_ext.runtime.route_store import RouteStore
from megatron_ext.runtime.tree_compute import Forms, TreeCompute, Trees
from megatron_ext.schedules.table.route_plan import connect, plan_routes
from megatron_ext.transport.torch_dist import Channel

if TYPE_CHECKING:
    import torch

    from megatron_ext.runtime.compute import Call
    from megatron_ext.runtime.program import Peers, Shapes
    from megatron_ext.runtime.rank_table import Table
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route

__all__ = ["TreeSteps", "agree_trees", "channels_of_routes"]


@dataclass
class TreeSteps:
    """Builds the steps of a model whose stages exchange trees."""

    declared: Trees
    _forms: dict[tuple[bool, str], Forms] = field(default_factory=dict)
    """By (forward only, shapes): training and evaluation differ, and so do micro-batch sizes."""

    def forms(self, call: Call, shapes: Shapes) -> Forms:
        """Return the tree forms for steps of this kind."""
        return self._forms.setdefault((call.forward_only, str(shapes)), Forms(self.declared.varies))

    def compute(
        self, call: Call, table: Table, forms: Forms, *, of_roles: bool = False
    ) -> TreeCompute:
        """Return the `TreeCompute` of one step; `of_roles`: of a disaggregated training step."""
        store = RouteStore(dict(self.declared.declared), floating=of_roles)
        return TreeCompute(
            call, table, forms=forms, store=store, trees=self.declared, of_roles=of_roles
        )


def agree_trees(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    shapes_travel: bool,
) -> TreeSteps | None:
    """Gather the declarations of all stages; None without any. Collective over a pipeline.

    Args:
        chunks: The model chunks of this rank.
        placement: The placement of all stages.
        group: The pipeline-parallel group.
        shapes_travel: Whether sequence lengths vary (`--variable-seq-lengths`).

    Raises:
        ScheduleError: The routes contradict each other. Every rank raises it.
    """
    stages = placement.stages_of[group.rank()]
    mine = dict(zip(stages, map(declared, chunks), strict=True))
    everybody: list[dict[int, Declared]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everybody, mine, group=group)
    by_stage = {stage: said for each in everybody for stage, said in sorted(each.items())}
    if all(said == Declared() for said in by_stage.values()):
        return None
    ordered = [by_stage[stage] for stage in range(placement.num_stages)]
    routes = connect([each.publishes for each in ordered], [each.takes for each in ordered])
    varies = shapes_travel or any(said.boundary == "varies" for said in ordered)
    return TreeSteps(Trees(routes, by_stage, varies))


def channels_of_routes(
    routes: tuple[Route, ...], placement: Placement, rank: int, peers: Peers
) -> list[Channel]:
    """Return the channels on which this rank sends or receives route tensors."""
    me, channels = peers.pipeline[rank], set()
    for hops in plan_routes(routes, placement).sent.values():
        for hop in hops:
            source, target = placement.rank_of[hop.stage], placement.rank_of[hop.taker]
            there = peers.mirrored if hop.to_twin else peers.pipeline
            if source == rank:
                channels.add(Channel(me, there[target], hop.kind))
            if target == rank:
                channels.add(Channel(there[source], me, hop.kind))
    return sorted(channels)
