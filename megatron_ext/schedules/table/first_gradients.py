"""Whether a stage's first forward and its first weight gradients are of one micro-batch.

Layers of Transformer Engine with fused gradient accumulation do not add the gradient of the first
micro-batch: they overwrite with it what is there. They take for the first one that whose forward
was the first of the step. If another micro-batch has added to the gradient by then, that is lost,
without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.marking import marked_row

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule

__all__ = ["check_first_gradients"]

_ADDS = {"B": "IW", "I": "I", "W": "W"}
"""By kind: whether it computes what is never postponed (I), and what may be (W)."""


def check_first_gradients(schedule: Schedule, rank: int) -> None:
    """Check the order of a rank for layers that overwrite their first weight gradient.

    Raises:
        ScheduleError: On one of its stages, the first weight gradients and the first forward are of
            different micro-batches.
    """
    opened: dict[int, int] = {}
    begun: set[tuple[int, str]] = set()
    for index, (stage, kind, microbatch) in enumerate(schedule.rows[rank]):
        first = opened.setdefault(stage, microbatch)
        for part in _ADDS.get(kind, ""):
            if (stage, part) not in begun and microbatch != first:
                raise ScheduleError(
                    f"the first weight gradients of stage {stage} are those of micro-batch "
                    f"{microbatch}, its first forward is that of {first}; layers of Transformer "
                    f"Engine with fused gradient accumulation would lose gradients; begin with one "
                    f"micro-batch, or use --no-gradient-accumulation-fusion\n"
                    f"  {marked_row(schedule, rank, index)}"
                )
            begun.add((stage, part))
