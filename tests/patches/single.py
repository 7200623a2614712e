"""Helpers for the tests of single patches; everything here runs inside a rank (`tests.ranks`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.patches.registry import Registry


def remove(registry: Registry, ids: Iterable[str]) -> None:
    """Undo patches and remove their rows from a registry."""
    removed_ids = set(ids)
    sites = [
        s
        for s in registry._sites.values()
        if any(p.id in removed_ids for p in s.patches)
    ]
    registry._uninstall(sites)
    for site in sites:
        site.patches = [p for p in site.patches if p.id not in removed_ids]
        if not site.patches:
            del registry._sites[site.target]
    for patch_id in removed_ids:
        registry._ids.pop(patch_id, None)
    if registry.active:
        registry._arm({site.first.module for site in sites if site.patches})


@contextmanager
def without(*ids: str) -> Iterator[None]:
    """Run the context with upstream as it is without these patches."""
    from megatron_ext.patches import REGISTRY, rows

    removed_rows = [patch for patch in rows() if patch.id in ids]
    assert {patch.id for patch in removed_rows} == set(ids), ids
    remove(REGISTRY, ids)
    try:
        yield
    finally:
        REGISTRY.register(removed_rows)


def start_parallel(**sizes: int) -> None:
    """Open the process groups of model parallelism and seed its generators."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
