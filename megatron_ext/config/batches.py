"""The batch sizes of a run, and the micro-batches that follow from them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.config.sizes import JobSizes
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX
from megatron_ext.schedules.table.table_files import load_csv


@dataclass(frozen=True)
class Batches:
    """The batch sizes of a run, and the micro-batches of one model replica."""

    micro_batch: int
    """Samples of one micro-batch."""
    replicas: int
    """Megatron's data-parallel size, which counts two mirrored pipelines as two replicas."""
    twins: int
    counts: Mapping[int, int]
    """Micro-batches of one replica by global batch size; the last one is the full batch."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one replica in a full batch."""
        return list(self.counts.values())[-1]

    def global_batch(self, count: int) -> int:
        """Return the global batch size that gives one replica `count` micro-batches."""
        return count * self.micro_batch * self.replicas

    def explained(self, global_batch: int) -> str:
        """Return the number of micro-batches in a global batch, with its derivation in words."""
        count, worlds = self.twins * self.counts[global_batch], self.replicas // self.twins
        batch = f"--global-batch-size {global_batch}"
        if count != global_batch:
            batch += f" / (--micro-batch-size {self.micro_batch} x {worlds} data-parallel)"
        return f"{count} micro-batches ({batch})"


def batches_of(args: Namespace, pp: int, twins: int) -> Batches:
    """Return the batch sizes that the flags request of a whole pipeline world of `pp` ranks.

    Raises:
        ArgumentsError: A size is missing, or the sizes do not divide.
    """
    given = vars(args).get
    tp, cp = args.tensor_model_parallel_size, given("context_parallel_size", 1)
    processes = JobSizes.of(vars(args)).ranks
    if processes % (ranks := tp * pp * cp):
        raise ArgumentsError(
            f"world size {processes} is not a multiple of tensor {tp} x pipeline {pp} x "
            f"context {cp} = {ranks}; start {ranks} processes or a multiple, or lower a parallel "
            "size"
        )
    replicas, micro_batch = processes // ranks * twins, args.micro_batch_size
    if not micro_batch or micro_batch < 1:
        raise ArgumentsError("--micro-batch-size is missing: give it a value of at least 1")
    step = micro_batch * replicas
    batches, nearest = _global_batches(args, step)
    for batch in batches:
        # With --decrease-batch-size-if-needed Megatron itself rounds down.
        if batch < step or (batch % step and not given("decrease_batch_size_if_needed")):
            mirrored = " (two for each mirrored pipeline)" if twins == 2 else ""
            raise ArgumentsError(
                f"a global batch of {batch} is not a multiple of --micro-batch-size {micro_batch} "
                f"x {replicas} replicas{mirrored}; use {nearest}"
            )
    evaluated = given("eval_global_batch_size") or batches[-1]
    eval_step = (given("eval_micro_batch_size") or micro_batch) * replicas
    # Without mirrored pipelines Megatron's own check names the user's replicas.
    if twins == 2 and (evaluated, eval_step) != (batches[-1], step) and evaluated % eval_step:
        raise ArgumentsError(
            f"an evaluation of {evaluated} samples is not a multiple of {eval_step}, a micro-batch "
            f"of each of {replicas} replicas (two for each mirrored pipeline); use "
            f"--eval-global-batch-size {-(-evaluated // eval_step) * eval_step}"
        )
    return Batches(micro_batch, replicas, twins, {batch: batch // step for batch in batches})


# Powers of ten, as Megatron reads them.
_SUFFIXES = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _global_batches(args: Namespace, step: int) -> tuple[list[int], str]:
    """Return every global batch size of the run, the full one last, and flags of sizes that divide.

    A `step` has the samples of one micro-batch of every replica.
    """
    given = vars(args).get
    # Megatron's default is one micro-batch for each replica.
    full = given("global_batch_size") or step
    steps, ramp = given("step_batch_size_schedule"), given("rampup_batch_size")
    if steps is not None:
        parts = re.findall(r"([\d.]+)([KMBT]?):(\d+)", steps.upper())
        if not parts:
            raise ArgumentsError(
                f"--step-batch-size-schedule {steps} has no THRESHOLD:SIZE, such as 0:768 or "
                "250B:1536; leave it out"
            )
        by_threshold = sorted(
            (float(number) * _SUFFIXES[suffix], int(size)) for number, suffix, size in parts
        )
        # Smaller ones are of a run on fewer processes that goes on here; Megatron checks it.
        batches = [size for _, size in by_threshold if size >= step]
        near = " ".join(f"{at:.0f}:{-(-size // step) * step}" for at, size in by_threshold)
        return batches or [by_threshold[-1][1]], f"--step-batch-size-schedule '{near}'"
    if ramp is None:
        lower, upper = full // step * step, (full // step + 1) * step
        return [full], f"--global-batch-size {f'{lower} or {upper}' if lower else upper}"
    written = " ".join(map(str, ramp))
    try:
        start, increment, samples = map(int, ramp)
    except ValueError:
        raise ArgumentsError(
            f"--rampup-batch-size {written}: must be start, increment, samples; give three integers"
        ) from None
    if start < 1 or increment < 1 or start > full or (full - start) % increment:
        lower = start + max(0, full - start) // max(1, increment) * increment
        raise ArgumentsError(
            f"--rampup-batch-size {written} does not lead from {start} to the --global-batch-size "
            f"{full} in steps of {increment}; use --global-batch-size {lower} or "
            f"{lower + increment}, or leave --rampup-batch-size out"
        )
    first, more = (-(-size // step) * step for size in (start, increment))
    last = first + -(-max(0, full - first) // more) * more
    return (
        [*range(start, full, increment), full],
        f"--rampup-batch-size {first} {more} {samples} --global-batch-size {last}",
    )


def check_file(name: str, pp: int, batches: Batches) -> None:
    """Refuse a run of another size than the table of a file (`csv:FILE`), with flags to change."""
    table = load_csv(name.removeprefix(CSV_PREFIX))
    if table.pp != pp:
        raise ScheduleError(
            f"--pipeline-schedule {name} has {table.pp} rows, one for each rank, not "
            f"{pp}; use --pipeline-model-parallel-size {table.pp}"
        )
    for global_batch, count in batches.counts.items():
        if count != table.num_microbatches:
            raise ScheduleError(
                f"--pipeline-schedule {name} runs {table.num_microbatches} micro-batches, "
                f"not {batches.explained(global_batch)}; use --global-batch-size "
                f"{batches.global_batch(table.num_microbatches)}"
            )
