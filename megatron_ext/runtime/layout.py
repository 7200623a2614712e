"""Maps placements to Megatron's pipeline layouts: which layers each rank builds.

Megatron asks `PipelineParallelLayerLayout` for the layers of each (pipeline rank, chunk) and for
the number of layers before them. Upstream's class assigns stages to ranks round-robin; this one
follows a `Placement`.
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

__all__ = ["PlacedLayout", "placed_layout"]


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
            raise ScheduleError(
                f"--pipeline-model-parallel-layout {layout} has {len(stages)} stages, but the "
                f"schedule has {placement.num_stages}; separate that many with |"
            )
        # Arguments and checkpoints keep the plain string in stage order, so that checkpoints do not
        # depend on the placement.
        super().__init__(layout, placement.num_ranks)
        self.placement = placement
        self.stages = stages
        self.layout = [[stages[stage] for stage in held] for held in placement.stages_of]

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Run upstream's checks; return whether an MTP layer is outside the last stage."""
        # Upstream decides that by rank, which is wrong for these placements.
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


@lru_cache(maxsize=16)  # upstream builds a new configuration for every micro-batch
def placed_layout(layout: str, placement: Placement) -> PlacedLayout:
    """Return the cached layout of a placement."""
    return PlacedLayout(layout, placement)
