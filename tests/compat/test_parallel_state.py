"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

from tests.patches.single import without
from tests.ranks import run_ranks


def destroy_groups() -> None:
    from megatron.core import parallel_state
    from torch import distributed as dist

    dist.init_process_group("nccl")
    known = dist.distributed_c10d._world.pg_map

    def once() -> int:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        opened = len(known)
        assert opened > 10
        parallel_state.destroy_model_parallel()
        return len(known)

    assert once() == 1  # the default group
    assert once() == 1
    left = [
        name
        for name, value in vars(parallel_state).items()
        if name.endswith(("_GROUP", "_GROUPS", "_RANKS", "_RANKS_WITH_CP", "_WITH_CP")) and value
    ]
    assert left == []
    with without("parallel_state.destroy_groups"):
        assert once() > 10


def test_destroy_groups() -> None:
    run_ranks(2, destroy_groups)
