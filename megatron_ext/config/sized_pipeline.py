"""A configuration applied to the sizes of a job: its tables and policies, each made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, generate, get
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.transforms import split_backwards, weights_at_once

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig, TransportName
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement

__all__ = ["Pipeline", "base_table", "twins_of"]


def base_table(chunks: int | None) -> str:
    """Return the name of Megatron's own schedule for a number of stages on each rank."""
    return "interleaved" if chunks is not None and chunks > 1 else "1f1b"


def twins_of(name: str) -> int:
    """Return the number of mirrored pipelines of a schedule, each a data-parallel replica."""
    return 1 if name.startswith(CSV_PREFIX) else get(name).twins


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of one job under a configuration, for any number of micro-batches."""

    config: PipelineConfig
    pp: int
    """Ranks of the whole pipeline world, as on the command line (BitPipe: both twins together)."""
    num_microbatches: int
    """Micro-batches in a full batch for one of Megatron's replicas (BitPipe: for one twin)."""
    splits: bool = True
    """Whether a dynamic order may split full backwards; False if the layers cannot."""
    over_torch: bool = False
    """Whether `auto` selects torch.distributed here."""
    _fills: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By number of micro-batches: whether all W of the table come from our splitting."""
    _policies: dict[int, Callable[[int], Policy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By number of micro-batches: the factory of a rank's policy."""
    _tables: dict[int, Schedule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """The registered name of the schedule, or `csv:FILE`."""
        return self.config.schedule or base_table(self.config.chunks)

    @property
    def costs(self) -> Costs:
        """Durations that the table is generated for."""
        return self.config.costs or UNIT

    @property
    def dynamic(self) -> DynamicOrder | None:
        """Settings of the dynamic order; None: every rank runs the order of the table."""
        return self.config.dynamic

    @property
    def transport(self) -> TransportName:
        """The transport of tensors between ranks."""
        return "torch" if self.over_torch else self.config.wire

    @property
    def timeout_s(self) -> float:
        """Longest time a rank waits for one message."""
        return self.config.message_timeout_s

    @cached_property
    def placement(self) -> Placement:
        """Which rank holds which stage; the same for every number of micro-batches."""
        return self.schedule(self.num_microbatches).placement

    @property
    def twins(self) -> int:
        """Mirrored pipelines; to Megatron, each is a data-parallel replica."""
        return twins_of(self.name)

    @property
    def full(self) -> Schedule:
        """The table of a full batch."""
        return self.schedule(self.num_microbatches)

    @property
    def is_folded(self) -> bool:
        """Whether the pipeline ends on the rank where it begins (V and W)."""
        return self.placement.name in ("v", "w")

    def static(self) -> Pipeline:
        """Return the same pipeline in the static order of the table."""
        # Other settings depend on what `dynamic` implies, so make that explicit.
        config = replace(self.config, schedule=self.name, dynamic=None, transport=self.config.wire)
        return replace(self, config=config)

    def with_attention(self, share: float) -> Pipeline:
        """Return the same pipeline, with slices cut for a share of attention in a forward."""
        costs = replace(self.costs, attention=share)
        return replace(self, config=replace(self.config, costs=costs))

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table for a number of micro-batches of one replica, generated once.

        It is the generator's table, with one exception: twins whose activations cross over once
        (dualpipe). There the last stage would be on the twin of the first. To Megatron that is
        another replica, which reads other samples, so activations would meet the wrong labels;
        the exception keeps activations on their own twin.

        Raises:
            ScheduleError: The schedule has no table for that number.
        """
        if num_microbatches not in self._tables:
            table = generate(
                self.name,
                self.pp,
                num_microbatches * self.twins,
                self.config.chunks,
                self.costs,
                pairs=self.config.pairs,
                slices=self.config.slices,
                **self.config.options,
            )
            if table.num_slices != self.config.slices:
                raise ScheduleError(
                    f"{self.name} cuts micro-batches into {table.num_slices} slices; add "
                    f"--pipeline-slices {table.num_slices}"
                )
            if table.pairs and not self.config.pairs:  # a file's, whose two run one by one
                options = {**table.options, "pairs": "apart"}
                table = replace(table, pairs=(), options=options)
            if len(table.placement.twin_hops) % 2:
                table = replace(table, placement=replace(table.placement, twin_hops=frozenset()))
            splits = self.dynamic is not None and self.splits
            fills = splits and not table.splits_backward and not self.config.weights_at_once
            self._fills[num_microbatches] = fills
            if splits:
                table = split_backwards(table)
            if self.config.weights_at_once:
                table = weights_at_once(table)
            self._tables[num_microbatches] = table
        return self._tables[num_microbatches]

    def policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return the policy that chooses the next action of a rank, for one step."""
        assert self.dynamic is not None, "a static schedule has no policy"
        if num_microbatches not in self._policies:
            table = self.schedule(num_microbatches)
            self._policies[num_microbatches] = policies(
                self.dynamic.policy,
                table,
                extra_activations=self.dynamic.margin,
                weights_fill=self._fills[num_microbatches],
                costs=self.costs,
                stash_ratio=self.config.stash_ratio,
            )
        return self._policies[num_microbatches](rank)
