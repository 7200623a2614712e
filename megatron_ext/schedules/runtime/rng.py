"""Sets every random generator of Megatron for one forward (see `config/randomness.py`).

Megatron has several: the host's, the device's default one, and those of its tracker. Which ranks
draw the same numbers stays as upstream has it (`model_parallel_cuda_manual_seed` of
`megatron/core/tensor_parallel/random.py`): the tracker's model-parallel generator differs between
tensor-parallel ranks, the experts' between ranks that hold other experts or other shards of them,
all others are equal on the ranks of a stage. Replicas draw the same numbers, as upstream's do.

Activation recomputation needs nothing of this: upstream notes the generators in the forward and
sets them for the recomputation.
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
    """Draw the random numbers of one forward, whoever runs it, and however often.

    Afterwards all generators stand where they stood before.

    Args:
        iteration: Training step, counted over the whole training.
        stage: Of the whole pipeline.
        microbatch: Of this replica, in the step.

    Raises:
        ScheduleError: No seed of the run was given.
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
    """Draw the random numbers of one forward of the training step that runs.

    No effect where random numbers are not drawn by micro-batch, and where nothing is trained
    (without gradients, as in evaluation).
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
    """The device of the generators, without a number: a state of one fits all of its type."""
    return torch.device(devices.current().torch_device().type)


def _shard(name: str) -> tuple[int, ...]:
    """Return what sets the ranks of one stage apart in a generator of the tracker."""
    if name == random.get_expert_parallel_rng_tracker_name():
        return (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    if name == random.get_data_parallel_rng_tracker_name():
        return ()
    return (parallel_state.get_tensor_model_parallel_rank(),)
