"""Balances micro-batches of unequal length in a model's training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.devices import device_of
from megatron_ext.features.lengths.balanced_step import BalancedStep
from megatron_ext.features.lengths.replica_exchange import ReplicaExchange
from megatron_ext.features.lengths.sliced_step import LengthSlicer
from megatron_ext.runtime.feature import Feature, Model
from megatron_ext.runtime.lengths import cost_of_model
from megatron_ext.transport.torch_dist import groups_of_ranks

if TYPE_CHECKING:
    from megatron_ext.runtime.data_order import ReadAhead
    from megatron_ext.runtime.program import Table


class LengthSteps(Feature):
    """Orders the micro-batches in a model's training steps, or cuts them into slices by length."""

    def __init__(self, model: Model) -> None:
        config = model.pipeline.config
        self._pipeline = model.pipeline
        self._replicas = _sharing_replicas(model)
        self._slicer: LengthSlicer | None = None
        if config.slice_tokens is not None:
            length_cost = config.length_costs or cost_of_model(model.config)
            self._slicer = LengthSlicer(model, length_cost, self._replicas)

    def read_ahead(
        self,
        iterators: Sequence[Any],
        num_microbatches: int,
    ) -> ReadAhead | None:
        """Read a training step's data and cut it into slices; see `Feature.read_ahead`."""
        if self._slicer is None:
            return None
        return self._slicer.step(iterators, num_microbatches)

    def data_order(
        self,
        table: Table,
        config: Any,
    ) -> BalancedStep | None:
        """Return the data order for one training step; see `Feature.data_order`."""
        if self._pipeline.config.balance == "off":
            return None
        length_cost = self._pipeline.config.length_costs or cost_of_model(config)
        return BalancedStep(
            table.schedule,
            self._pipeline.costs,
            length_cost,
            self._replicas,
        )


def _sharing_replicas(model: Model) -> ReplicaExchange | None:
    """Return the exchange between data-parallel replicas that redistribute micro-batches.

    Returns None if each replica runs the micro-batches that it reads.
    """
    if model.pipeline.config.balance != "pack":
        return None
    group = getattr(model.groups, "dp", None)
    if not group:
        group = parallel_state.get_data_parallel_group()
    members = tuple(dist.get_process_group_ranks(group))
    # Either all ranks return here or none do, because all data-parallel groups have the same size.
    if len(members) == 1:
        return None
    # Items are exchanged as bytes on the host, so use gloo instead of Megatron's own group.
    gloo_groups = groups_of_ranks(
        [members],
        model.pipeline.timeout_s,
        backend="gloo",
    )
    return ReplicaExchange(gloo_groups[members], device_of(model.chunks))
