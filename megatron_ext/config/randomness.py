"""Random numbers that depend on the micro-batch, not on the order in which a rank computes.

Megatron's generators run on from one forward to the next, so another order draws other dropout
masks. With `--microbatch-rng` every generator is reseeded for each forward, from the run's seed,
the iteration, the stage and the micro-batch. Then all schedules with the same stages draw the same
masks, static or dynamic, Megatron's own among them, and so does a resumed run.

This module holds the part that needs no torch, the iteration and the seeds. `runtime/compute.py`
sets the generators.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megatron_ext.config.active import active
from megatron_ext.errors import ScheduleError

__all__ = ["begin_iteration", "enabled", "iteration", "seed_of"]


@dataclass
class _Progress:
    """The progress of training."""

    iteration: int | None = None


def enabled() -> bool:
    """Return whether random numbers are drawn by micro-batch."""
    found = active()
    return found is not None and found.seed is not None


def begin_iteration(number: int) -> None:
    """Set the number of the training step that begins, counted over all resumed runs."""
    found = active()
    if found is not None:
        found.state(_Progress).iteration = number


def iteration() -> int:
    """Return the number of the current training step.

    Raises:
        ScheduleError: `begin_iteration` was never called, so all steps would draw the same masks.
    """
    found = active()
    number = None if found is None else found.state(_Progress).iteration
    if number is None:
        raise ScheduleError(
            "random numbers are drawn by micro-batch, but the iteration is not known; call "
            "megatron_ext.begin_iteration before each step, as the trainers do"
        )
    return number


def seed_of(*key: int | str) -> int:
    """Return a 63-bit seed derived from the run's seed and a key.

    Raises:
        ScheduleError: The run has no seed.
    """
    found = active()
    seed = None if found is None else found.seed
    if seed is None:
        raise ScheduleError("random numbers by micro-batch need a seed; give --microbatch-rng")
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
