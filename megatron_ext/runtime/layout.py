"""Maps placements to Megatron's pipeline layouts: which layers each rank builds.

Megatron asks `PipelineParallelLayerLayout` for the layers of each (pipeline rank, chunk) and for
the number of layers before them. Upstream's class assigns stages to ranks round-robin; this one
follows a `Placement`. Arguments and checkpoints keep the plain layout string in stage order, so
checkpoints do not depend on the placement.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

__all__ = ["PlacedLayout", "layout_string", "placed_layout"]

_KNOWN = ("linear", "loop", "v", "w")
_FLAG = "--pipeline-model-parallel-layout"


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout that assigns stages to ranks by a placement.

    Args:
        layout: Upstream's notation, one part per stage, in stage order.
        placement: Maps stages to ranks and chunks.

    Raises:
        ScheduleError: The layout and the placement have different numbers of stages.
    """

    def __init__(self, layout: str, placement: Placement) -> None:
        stages: list[list[LayerType]] = self.parse_str_to_list(layout)
        if len(stages) != placement.num_stages:
            raise ScheduleError(_wrong_number(layout, len(stages), placement))
        super().__init__(layout, placement.num_ranks)
        self.placement = placement
        self.stages = stages
        self.layout = [[stages[stage] for stage in held] for held in placement.stages_of]

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Run upstream's checks; return whether an MTP layer is outside the last stage.

        Upstream decides that by rank, which is wrong for these placements.
        """
        super().validate_layer_layout(num_layers, mtp_num_layers)
        return any(LayerType.mtp in stage for stage in self.stages[:-1])

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Count the layers of one type in all stages before a rank's chunk.

        Args:
            layer_type: The type to count.
            vp_stage: The chunk; required if ranks hold several.
            pp_rank: Pipeline rank; defaults to that of this process.
        """
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = self.placement.stages_of[pp_rank]
        assert vp_stage is not None or len(chunks) == 1, "ranks hold several chunks: give vp_stage"
        stage = chunks[vp_stage or 0]
        return sum(earlier.count(layer_type) for earlier in self.stages[:stage])


@lru_cache(maxsize=16)
def placed_layout(layout: str, placement: Placement) -> PlacedLayout:
    """Return the cached layout of a placement.

    Upstream builds a new configuration for every micro-batch, so this is called often.
    """
    return PlacedLayout(layout, placement)


def layout_string(
    num_layers: int,
    placement: Placement,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
) -> str:
    """Return the layout string for a model on a placement, in upstream's notation.

    Args:
        num_layers: Transformer layers, not counting MTP layers.
        placement: Maps stages to ranks.
        mtp_num_layers: Multi-token prediction layers; placed before the loss in the last stage.
        layout: The user's `--pipeline-model-parallel-layout`. Checked and returned unchanged.

    Raises:
        ScheduleError: The layers do not divide evenly, the user's layout does not fit, or no model
            can be built on the placement.
    """
    if placement.name not in _KNOWN:
        raise ScheduleError(
            f"no model can have its stages on ranks {placement.rank_of}; place the stages of the "
            f"table as {', '.join(_KNOWN)} (see megatron-ext plan)"
        )
    mtp = mtp_num_layers or 0
    if layout is not None:
        _check_layout(layout, num_layers, placement, mtp)
        return layout
    each, rest = divmod(num_layers, placement.num_stages)
    if rest:
        raise ScheduleError(_uneven(num_layers, placement, mtp))
    return _spelled([each] * placement.num_stages, mtp)


def _spelled(layers: list[int], mtp: int) -> str:
    return "E" + "|".join("t" * count for count in layers) + "m" * mtp + "L"


def _check_layout(layout: str, num_layers: int, placement: Placement, mtp: int) -> None:
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    except AssertionError as error:
        raise ScheduleError(f"{_FLAG} {layout}: {error}") from error
    if len(stages) != placement.num_stages:
        raise ScheduleError(_wrong_number(layout, len(stages), placement))
    in_order = [layer for stage in stages for layer in stage]
    expected = [LayerType.embedding, *[LayerType.decoder] * num_layers]
    expected += [LayerType.mtp] * mtp + [LayerType.loss]
    if in_order != expected:
        raise ScheduleError(
            f"{_FLAG} {layout}: give E once, t {num_layers} times (--num-layers), m {mtp} times "
            "(--mtp-num-layers) and L once, in this order"
        )
    if LayerType.mtp in (layer for stage in stages[:-1] for layer in stage):
        raise ScheduleError(
            f"{_FLAG} {layout} has m before the last stage, but all stages of this schedule "
            "exchange tensors of one shape; put m and L into the last stage"
        )


def _wrong_number(layout: str, found: int, placement: Placement) -> str:
    ranks = placement.num_ranks
    return (
        f"{_FLAG} {layout} has {found} stages, but the schedule has {placement.num_stages} "
        f"({ranks} ranks with {placement.num_stages // ranks} each); separate that many with |"
    )


def _uneven(num_layers: int, placement: Placement, mtp: int) -> str:
    stages = placement.num_stages
    fewer, rest = divmod(num_layers, stages)
    fitting = [str(count * stages) for count in (fewer, fewer + 1) if count]
    # Give the remainder to the middle stages: the ends also compute embedding and loss.
    start = (stages - rest) // 2
    spread = [fewer + (start <= stage < start + rest) for stage in range(stages)]
    return (
        f"--num-layers {num_layers} does not divide into the schedule's {stages} stages "
        f"({placement.num_ranks} ranks with {stages // placement.num_ranks} each); "
        f"take {' or '.join(fitting)}, or assign layers to stages yourself, for example "
        f"{_FLAG} '{_spelled(spread, mtp)}'"
    )
