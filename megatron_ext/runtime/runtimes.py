"""The runtimes of one configuration: made at a model's first step, closed with the configuration.

Their training statistics are summed and logged here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.agreement import Agreement, agree
from megatron_ext.runtime.connect import open_transport
from megatron_ext.runtime.declared_trees import agree_trees, channels_of_routes
from megatron_ext.runtime.groups import channels_of
from megatron_ext.runtime.local_devices import device_of
from megatron_ext.runtime.measured import Measured, in_words
from megatron_ext.runtime.microbatches import TwinExchange
from megatron_ext.runtime.model_runtime import Runtime
from megatron_ext.runtime.program import Peers, Shapes
from megatron_ext.runtime.replica_exchange import ReplicaExchange
from megatron_ext.runtime.run_ahead import run_ahead_of
from megatron_ext.tools.trace.session_observer import observed_transport
from megatron_ext.transport.pairs import groups_of_ranks

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route

__all__ = ["Runtimes", "log_own_statistics", "log_statistics", "runtime_of", "totals"]

_LOG = logging.getLogger(__name__)


@dataclass
class Runtimes:
    """The runtimes of one configuration."""

    by_group: dict[int, Runtime] = field(default_factory=dict)
    """By id of the pipeline group. The runtime holds the group, so its id stays unique."""

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self.by_group.values())

    def close(self) -> None:
        """Close the transports."""
        for runtime in self:
            if runtime.run_ahead is not None:
                runtime.run_ahead.close()
            runtime.transport.close()


def runtime_of(
    pipeline: Pipeline,
    groups: ProcessGroupCollection,
    chunks: Sequence[torch.nn.Module],
    iterators: Sequence[Any],
    config: Any,
    shapes: Shapes,
) -> Runtime:
    """Return the runtime of a pipeline group; create it at the first step.

    Creation is collective over all ranks of the job.

    Raises:
        ScheduleError: Ranks, chunks or declared routes do not fit the schedule.
        TransportError: The transport is not available.
    """
    runtimes = active.required().state(Runtimes).by_group
    found = runtimes.get(id(groups.pp))
    if found is not None:
        return found
    placement = pipeline.placement
    _check_fit(pipeline, placement, groups, chunks)
    device = device_of(chunks)
    trees = agree_trees(chunks, placement, groups.pp, shapes_travel=None in shapes["F"])
    peers = Peers(dist.get_process_group_ranks(groups.pp), _twin() if pipeline.twins == 2 else None)
    channels = channels_of(placement, groups.pp.rank(), peers)
    routes: tuple[Route, ...] = ()
    if trees is not None:
        routes = trees.declared.routes
        peers = peers.with_mirrored(groups.pp)
        channels += channels_of_routes(routes, placement, groups.pp.rank(), peers)
        shapes = {"F": [None], "B": [None]}
    agreement = None
    if pipeline.dynamic is not None:
        agreement = _agreement(placement, groups, iterators, peers)
        channels += agreement.channels
    transport = observed_transport(
        open_transport(pipeline, device, channels, shapes, config.pipeline_dtype, routes)
    )
    exchange = _exchange(pipeline, peers, groups.pp.rank())
    replicas = _replicas(pipeline, groups, device)
    run_ahead = run_ahead_of(devices.current(), device, pipeline.timeout_s)
    made = Runtime(
        pipeline, groups, device, transport, peers, agreement, exchange, replicas, trees, run_ahead
    )
    runtimes[id(groups.pp)] = made
    return made


def _exchange(pipeline: Pipeline, peers: Peers, rank: int) -> TwinExchange | None:
    """Create the process group of twins that run each other's micro-batches; None without any.

    Collective over all ranks of the job.
    """
    placement = pipeline.placement
    if not placement.twin_hops:
        return None
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
    """Create the process group of replicas that share out their micro-batches; None without any.

    Collective over all ranks of the job.
    """
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
    """Elect the leader of this rank's order. Collective over all ranks of the job.

    Twins that read data on crossed stages swap it, so they follow one leader too.
    """
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


def _twin() -> int:
    """Return the twin's global rank: the neighbour in the data-parallel group."""
    ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    return ranks[ranks.index(dist.get_rank()) ^ 1]


def totals() -> tuple[Measured, int]:
    """Return this process's training statistics so far, and the bytes that it sent."""
    together = Measured()
    runtimes = list(active.required().state(Runtimes))
    for runtime in runtimes:
        together.add(runtime.measured)
    return together, sum(runtime.transport.stats().bytes for runtime in runtimes)


def log_statistics() -> None:
    """Log the training statistics of all ranks on rank 0. Collective over all ranks of the job."""
    for runtime in active.required().state(Runtimes):
        everybody: list[Measured] = [Measured() for _ in range(dist.get_world_size())]
        dist.all_gather_object(everybody, runtime.measured)
        together = Measured()
        for measured in everybody:
            together.add(measured)
        _log(runtime, together, "")


def log_own_statistics() -> None:
    """Log rank 0's own statistics. Not collective, so ranks may exit at different times."""
    for runtime in active.required().state(Runtimes):
        _log(runtime, runtime.measured, " on this rank")


def _log(runtime: Runtime, measured: Measured, where: str) -> None:
    if measured.steps and dist.get_rank() == 0:
        # Without a logging setup, Python shows nothing below WARNING.
        _LOG.warning("%s", in_words(measured, runtime.pipeline, runtime.device.type, where))
