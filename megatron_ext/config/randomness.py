"""Random numbers that belong to a micro-batch instead of to the order in which a rank computes.

Megatron draws dropout masks from generators that go on from one forward to the next, so another
order gives other masks. With `--microbatch-rng` every generator starts anew for each forward, from
a seed that follows from the run's seed, the iteration, the stage and the micro-batch. Then all
schedules with the same stages draw the same masks, static or dynamic, Megatron's own among them,
and so does a run that was resumed.

Here is what needs no torch: the iteration and the seeds. `runtime/rng.py` sets the
generators.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megatron_ext.config.active import active
from megatron_ext.errors import ScheduleError

__all__ = ["begin_iteration", "enabled", "iteration", "seed_of"]


@dataclass
class _Progress:
    """How far the training is."""

    iteration: int | None = None


def _seed() -> int | None:
    found = active()
    return None if found is None else found.seed


def enabled() -> bool:
    """Tell whether random numbers are drawn by micro-batch."""
    return _seed() is not None


def begin_iteration(number: int) -> None:
    """Note which training step begins, counted over the whole training, resumed or not."""
    found = active()
    if found is not None:
        found.state(_Progress).iteration = number


def iteration() -> int:
    """Return the training step that runs.

    Raises:
        ScheduleError: Nobody said; the masks of all steps would be the same.
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
    """Return a seed of 63 bits for a key, different for each run's seed.

    Raises:
        ScheduleError: No seed of the run was given.
    """
    seed = _seed()
    if seed is None:
        raise ScheduleError("random numbers by micro-batch need a seed; give --microbatch-rng")
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
