"""W that wait keep what the table says: tensors of autograd and of W, counted in a training."""

from __future__ import annotations

import pytest

from tests.planning.model_memory import with_waiting_weights
from tests.ranks import require_training


@pytest.mark.slow
@pytest.mark.parametrize("num_waiting", [0, 3])
def test_ranks_keep_what_the_table_allows(num_waiting: int) -> None:
    """Within 1 %, if peers are never late, so that each W waits until its place."""
    require_training()
    for rank in with_waiting_weights(num_waiting, runs_early=False):
        assert rank.num_waiting >= num_waiting
        assert rank.peak == pytest.approx(rank.bound, rel=0.01)


@pytest.mark.slow
def test_w_that_run_early_keep_no_more() -> None:
    require_training()
    for rank in with_waiting_weights(3, runs_early=True):
        assert rank.peak <= 1.01 * rank.bound
