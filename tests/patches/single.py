"""Tools of the tests of single patches: everything here runs inside a rank (see `tests.ranks`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*ids: str) -> Iterator[None]:
    """Run a block as upstream is without these patches."""
    from megatron_ext.patches import REGISTRY, rows

    taken = [patch for patch in rows() if patch.id in ids]
    assert {patch.id for patch in taken} == set(ids), ids
    REGISTRY.remove(ids)
    try:
        yield
    finally:
        REGISTRY.register(taken)


def start_parallel(**sizes: int) -> None:
    """Open the process groups of model parallelism and seed its generators."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
