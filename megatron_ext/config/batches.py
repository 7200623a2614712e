"""A run's batch sizes, and the resulting numbers of micro-batches."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ext.config.sizes import JobSizes
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX
from megatron_ext.schedules.table.table_files import load_csv


@dataclass(frozen=True)
class Batches:
    """A run's batch sizes, and the numbers of micro-batches per model replica."""

    micro_batch: int
    """Samples per micro-batch."""
    replicas: int
    """Megatron's data-parallel size, which counts two mirrored pipelines as two replicas."""
    twins: int
    """Number of mirrored pipelines: 1 or 2."""
    counts: Mapping[int, int]
    """Global batch size -> micro-batches per replica. The last entry is the full batch."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per replica in a full batch."""
        return list(self.counts.values())[-1]

    def global_batch(self, count: int) -> int:
        """Return the global batch size that gives each replica `count` micro-batches."""
        return count * self.micro_batch * self.replicas

    def explained(self, global_batch: int) -> str:
        """Return text with the number of micro-batches in a global batch and how it is derived."""
        # From the user's point of view, two mirrored pipelines are one replica.
        count = self.twins * self.counts[global_batch]
        batch = f"--global-batch-size={global_batch}"
        if count != global_batch:
            num_worlds = self.replicas // self.twins
            batch += f" / (--micro-batch-size={self.micro_batch} x {num_worlds} data-parallel)"
        return f"{count} micro-batches ({batch})"


def batches_of(args: Namespace, pp: int, twins: int) -> Batches:
    """Return the batch sizes that the flags request, for pipelines of `pp` ranks.

    Raises:
        ArgumentsError: A size is missing, or one size does not evenly divide another.
    """
    sizes = JobSizes.of(vars(args))
    tp = sizes.tensor_model_parallel_size
    cp = sizes.context_parallel_size
    ranks_of_replica = tp * pp * cp
    if sizes.ranks % ranks_of_replica:
        raise ArgumentsError(
            f"world size {sizes.ranks} is not a multiple of tensor {tp} x pipeline {pp} x "
            f"context {cp} = {ranks_of_replica}; start {ranks_of_replica} processes or a multiple "
            "of that, or lower a parallel size"
        )
    replicas = sizes.ranks // ranks_of_replica * twins
    micro_batch = sizes.micro_batch_size
    if not micro_batch:
        raise ArgumentsError(
            "--micro-batch-size is missing; give it a value of at least 1"
        )
    # Number of samples in one micro-batch per replica, summed over all replicas.
    step = micro_batch * replicas
    requested = _global_batches(args, sizes, step)
    # With --decrease-batch-size-if-needed, Megatron rounds down.
    rounds_down = getattr(args, "decrease_batch_size_if_needed", None)
    for batch in requested.sizes:
        is_divisible = batch % step == 0 or rounds_down
        if batch < step or not is_divisible:
            mirrored = " (two for each mirrored pipeline)" if twins == 2 else ""
            raise ArgumentsError(
                f"a global batch of {batch} is not a multiple of --micro-batch-size={micro_batch} "
                f"x {replicas} replicas{mirrored}; use {requested.remedy}"
            )
    # Megatron checks this too, but its message would count each mirrored pipeline as a replica.
    if twins == 2:
        _check_evaluation(sizes, requested.sizes[-1], micro_batch, replicas)
    # If Megatron decreases a batch, it rounds down, as this division does.
    counts = {batch: batch // step for batch in requested.sizes}
    return Batches(micro_batch, replicas, twins, counts)


def _check_evaluation(
    sizes: JobSizes,
    global_batch: int,
    micro_batch: int,
    replicas: int,
) -> None:
    """Reject an evaluation batch that does not divide evenly among mirrored pipelines' replicas."""
    eval_batch = sizes.eval_global_batch_size or global_batch
    eval_step = (sizes.eval_micro_batch_size or micro_batch) * replicas
    # The training batch has already been checked, or Megatron rounds it down.
    step = micro_batch * replicas
    is_training_batch = eval_batch == global_batch and eval_step == step
    if not is_training_batch and eval_batch % eval_step:
        raise ArgumentsError(
            f"an evaluation of {eval_batch} samples is not a multiple of {eval_step}, one "
            f"micro-batch on each of {replicas} replicas (two for each mirrored pipeline); use "
            f"--eval-global-batch-size={_rounded_up(eval_batch, eval_step)}"
        )


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


# Suffixes are powers of ten, as in Megatron.
_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class _GlobalBatches(NamedTuple):
    """The global batch sizes that the flags request."""

    sizes: list[int]
    """All global batch sizes in the run; the last one is the full batch."""
    remedy: str
    """Flags with sizes that are multiples of a step, for an error message."""


def _global_batches(args: Namespace, sizes: JobSizes, step: int) -> _GlobalBatches:
    """Return all global batch sizes in the run.

    `step` is the number of samples in one micro-batch per replica, summed over all replicas.
    """
    # Megatron's default is one micro-batch per replica.
    full = sizes.global_batch_size or step
    by_threshold = getattr(args, "step_batch_size_schedule", None)
    if by_threshold is not None:
        return _stepped_batches(by_threshold, step)
    ramp = getattr(args, "rampup_batch_size", None)
    if ramp is not None:
        return _ramped_batches(ramp, full, step)
    lower = full // step * step
    remedy = f"--global-batch-size={lower + step}"
    if lower:
        remedy = f"--global-batch-size={lower} or {lower + step}"
    return _GlobalBatches([full], remedy)


def _stepped_batches(schedule: str, step: int) -> _GlobalBatches:
    """Return the batch sizes in `--step-batch-size-schedule`, one per threshold."""
    # Like Megatron, accept spaces or commas between entries, entries in any order, and suffixes.
    number = r"([\d.]+)([KMBT]?)"
    entries = re.findall(f"{number}:{number}", schedule.upper())
    if not entries:
        raise ArgumentsError(
            f"--step-batch-size-schedule {schedule} has no entry THRESHOLD:SIZE, such as 0:768 or "
            "250B:1536; remove it"
        )
    by_threshold = []
    for threshold, suffix, size, size_suffix in entries:
        batch = int(float(size) * _SUFFIXES[size_suffix])
        samples = float(threshold) * _SUFFIXES[suffix]
        by_threshold.append((samples, batch))
    by_threshold.sort()
    # Sizes below one step belong to an earlier part of the run, with fewer processes.
    # Megatron checks this itself.
    batches = [size for _, size in by_threshold if size >= step]
    if not batches:
        # Keep one size, although it is too small, so that the caller rejects it with a remedy.
        _, last = by_threshold[-1]
        batches = [last]
    # Suggest the same thresholds, with sizes that are multiples of a step.
    fitting_entries = []
    for samples, size in by_threshold:
        fitting_entries.append(f"{samples:.0f}:{_rounded_up(size, step)}")
    fitting = " ".join(fitting_entries)
    return _GlobalBatches(batches, f"--step-batch-size-schedule '{fitting}'")


def _ramped_batches(ramp: Sequence[Any], full: int, step: int) -> _GlobalBatches:
    """Return the batch sizes of `--rampup-batch-size`: start, increment and samples."""
    words = " ".join(str(word) for word in ramp)
    try:
        start, increment, samples = map(int, ramp)
    except ValueError:
        raise ArgumentsError(
            f"--rampup-batch-size {words}: must be start, increment, samples; give three integers"
        ) from None
    are_positive = start >= 1 and increment >= 1
    reaches_full = are_positive and start <= full and (full - start) % increment == 0
    if not reaches_full:
        num_increments = max(0, full - start) // max(1, increment)
        lower = start + num_increments * increment
        raise ArgumentsError(
            f"--rampup-batch-size {words} does not lead from {start} to "
            f"--global-batch-size={full} in steps of {increment}; use "
            f"--global-batch-size={lower} or {lower + increment}, or remove --rampup-batch-size"
        )
    # Suggest the nearest ramp whose sizes are all multiples of a step.
    first = _rounded_up(start, step)
    fitting_increment = _rounded_up(increment, step)
    last = first + _rounded_up(max(0, full - first), fitting_increment)
    sizes = [*range(start, full, increment), full]
    return _GlobalBatches(
        sizes,
        f"--rampup-batch-size {first} {fitting_increment} {samples} --global-batch-size={last}",
    )


def check_file(name: str, pp: int, batches: Batches) -> None:
    """Reject a run whose sizes differ from those of the table in a file (`csv:FILE`).

    Raises:
        ScheduleError: The sizes differ; the message names the flags to change.
    """
    table = load_csv(name.removeprefix(CSV_PREFIX))
    if table.pp != pp:
        raise ScheduleError(
            f"--pipeline-schedule={name} has {table.pp} rows, one for each rank, not "
            f"{pp}; use --pipeline-model-parallel-size={table.pp}"
        )
    for global_batch, count in batches.counts.items():
        if count != table.num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule={name} runs {table.num_microbatches} micro-batches, "
                f"not {batches.explained(global_batch)}; use "
                f"--global-batch-size={batches.global_batch(table.num_microbatches)}"
            )
