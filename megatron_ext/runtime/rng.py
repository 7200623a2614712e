"""Seeds all of Megatron's random generators for one forward (see `config/randomness.py`).

Megatron has the host's generator, the device's default one, and those of its tracker. Ranks share
random numbers exactly as upstream has it (`model_parallel_cuda_manual_seed` in
`megatron/core/tensor_parallel/random.py`): the tracker's model-parallel generator differs between
tensor-parallel ranks, the expert generator between expert-parallel and expert-tensor-parallel
ranks. All others are equal on the ranks of a stage. Data-parallel replicas draw the same numbers.

Activation recomputation needs no support here: upstream saves the generator states in the forward
and restores them for the recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from megatron_ext import devices
from megatron_ext.config import randomness

__all__ = ["microbatch_rng", "rng_of_this_step"]


@contextmanager
def microbatch_rng(iteration: int, stage: int, microbatch: int) -> Iterator[None]:
    """Seed all generators for one forward, and restore their states afterwards.

    The numbers depend on the arguments and on the tensor- and expert-parallel rank only. They do
    not depend on the pipeline rank, on execution order or on repetition.

    Args:
        iteration: Training step, counted from the start of training.
        stage: Global stage index.
        microbatch: Index in this replica's step, from 0.

    Raises:
        ScheduleError: The run has no seed.
    """
    place = iteration, stage, microbatch
    host, device, tracked = random._get_all_rng_states()
    try:
        _set(
            _fresh(host, torch.device("cpu"), "host", *place),
            _fresh(device, _device(), "default", *place),
            {
                name: _fresh(state, _device(), name, *_shard(name), *place)
                for name, state in tracked.items()
            },
        )
        yield
    finally:
        _set(host, device, tracked)


_UNCHANGED = nullcontext()


def rng_of_this_step(stage: int, microbatch: int) -> AbstractContextManager[None]:
    """Seed all generators for one forward of the current training step.

    Does nothing if seeding by micro-batch is off or gradients are disabled, as in evaluation.
    """
    if not (randomness.enabled() and torch.is_grad_enabled()):
        return _UNCHANGED
    return microbatch_rng(randomness.iteration(), stage, microbatch)


def _set(host: torch.Tensor, device: Any, tracked: Mapping[str, Any]) -> None:
    if tracked:
        random._set_all_rng_states(host, device, dict(tracked))
        return
    # Upstream's function would make a tracker without generators look initialised.
    torch.set_rng_state(host)
    tracker = random.get_cuda_rng_tracker()
    random._set_cuda_rng_state(device, graph_safe=random.is_graph_safe_cuda_rng_tracker(tracker))


def _fresh(state: Any, device: torch.device, *key: int | str) -> Any:
    """Return a state of the same type as `state`, seeded for a key."""
    seed = randomness.seed_of(*key)
    if isinstance(state, torch.Generator):  # a tracker whose states CUDA graphs can capture
        fresh = state.clone_state()
        fresh.manual_seed(seed)
        return fresh
    return torch.Generator(device).manual_seed(seed).get_state()


def _device() -> torch.device:
    """Return the generators' device without an index; a state fits every device of its type."""
    return torch.device(devices.current().torch_device().type)


def _shard(name: str) -> tuple[int, ...]:
    """Return the ranks that distinguish a tracker generator within one stage."""
    if name == random.get_expert_parallel_rng_tracker_name():
        return (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    if name == random.get_data_parallel_rng_tracker_name():
        return ()
    return (parallel_state.get_tensor_model_parallel_rank(),)
