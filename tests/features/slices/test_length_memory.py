"""Slices by length keep what their tables forecast: tensors that autograd saves, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from megatron_ext.schedules.table.memory import running_peak
from tests.features.slices.length_training import Job, Trained, train
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action

LONGEST = 2048
SLICE_TOKENS = 256
LENGTHS = (250, 256, 130, 256, 900, LONGEST, 256, 200)
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    # Attention itself then keeps its operands only, which tables do not count by slice.
    "recompute_granularity": "selective",
}


def job_of(schedule: str, pp: int, lengths: tuple[int, ...], **settings: Any) -> Job:
    return Job(
        steps=[[lengths]],
        schedule=schedule,
        pp=pp,
        settings=settings,
        model=WIDE,
        max_positions=LONGEST,
        measures_memory=True,
    )


class StageBytes(NamedTuple):
    """What a stage keeps of the longest micro-batch."""

    after_forward: int
    after_input: int
    """After I: the operands of W."""

    def change(self, action: Action) -> int:
        """Return how an action on the whole micro-batch changes what the stage keeps."""
        return {
            "F": self.after_forward,
            "B": -self.after_forward,
            "I": self.after_input - self.after_forward,
            "W": -self.after_input,
        }[action.kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_stages"), [("1f1b", 2), ("zb-h1", 2), ("zb-v", 4)]
)
def test_ranks_keep_what_the_table_forecasts(schedule: str, num_stages: int) -> None:
    """Within 2 %, and no more than with W that needs all that I has read, as tables are planned."""
    alone: list[Trained] = run_ranks(
        num_stages, train, job_of("zb-h1", num_stages, (LONGEST,))
    )
    # Stages differ, because the last one also keeps the loss.
    stages = []
    for trained in alone:
        after_forward, after_input, _ = trained.kept_bytes.values()
        stages.append(StageBytes(after_forward, after_input))
    sliced: list[Trained] = run_ranks(
        2, train, job_of(schedule, 2, LENGTHS, slice_tokens=SLICE_TOKENS)
    )
    for rank, trained in enumerate(sliced):
        changes, planned_changes = [], []
        for action, size in trained.sizes.items():
            stage = stages[action.stage]
            changes.append(size * stage.change(action))
            planned = stage._replace(after_input=stage.after_forward)
            planned_changes.append(size * planned.change(action))
        kept = max(trained.kept_bytes.values())
        assert kept == pytest.approx(running_peak(changes), rel=0.02), rank
        assert kept <= 1.02 * running_peak(planned_changes), rank
