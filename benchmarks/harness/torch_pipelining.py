"""Steps of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from megatron_ext.schedules import Placement

from .stage import MESSAGE_SHAPE, EmulatedStage, Probe


class _Stage(pipelining.PipelineStage):
    """A stage that records its ops."""

    def __init__(self, probe: Probe, index: int, num_stages: int) -> None:
        message = torch.zeros(MESSAGE_SHAPE, requires_grad=True)
        super().__init__(
            EmulatedStage(probe),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=(message,),
            output_args=(message,),
        )
        self._probe = probe

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._probe.op("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self._probe.op(
            "B" if full_backward else "I", self.stage_index, bwd_chunk_id
        ):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        with self._probe.op("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def prepare(
    schedule: str, placement: Placement, num_microbatches: int, probe: Probe
) -> Callable[[], object]:
    """Return a function that runs one step of a schedule class."""
    schedule_class = getattr(schedules, schedule)
    stage_indices = placement.stages_of[torch.distributed.get_rank()]
    stages = [_Stage(probe, index, placement.num_stages) for index in stage_indices]
    single = issubclass(schedule_class, schedules.PipelineScheduleSingle)
    runner = schedule_class(
        stages[0] if single else stages,
        num_microbatches,
        loss_fn=_loss,
        scale_grads=False,
    )
    sequence, *trailing_shape = MESSAGE_SHAPE
    data = torch.zeros(num_microbatches * sequence, *trailing_shape)
    inputs = (data,) if stage_indices[0] == 0 else ()
    last = {"target": data} if stage_indices[-1] == placement.num_stages - 1 else {}
    return lambda: runner.step(*inputs, **last)
