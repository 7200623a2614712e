"""Computes the number of micro-batches from Megatron's flags, before Megatron does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ArgumentsError

__all__ = ["Sizes", "sizes"]


@dataclass(frozen=True)
class Sizes:
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

    def total(self, count: int) -> int:
        """Return the micro-batches of the whole pipeline world if one replica has `count`."""
        return count * self.twins

    def global_batch(self, count: int) -> int:
        """Return the global batch size that gives one replica `count` micro-batches."""
        return count * self.micro_batch * self.replicas

    def explained(self, global_batch: int) -> str:
        """Return the number of micro-batches in a global batch, with its derivation in words."""
        worlds = self.replicas // self.twins
        return (
            f"{self.total(self.counts[global_batch])} micro-batches (--global-batch-size "
            f"{global_batch} / (--micro-batch-size {self.micro_batch} x {worlds} data-parallel))"
        )


def sizes(args: Namespace, pp: int, twins: int) -> Sizes:
    """Return the batch sizes that the flags request.

    Args:
        args: Parsed arguments, not yet validated by Megatron.
        pp: Ranks of the whole pipeline world.
        twins: 2 if two mirrored pipelines share it, else 1.

    Raises:
        ArgumentsError: A size is missing, or the sizes do not divide.
    """
    replicas = _worlds(args, pp) * twins
    micro_batch = args.micro_batch_size
    if not micro_batch or micro_batch < 1:
        raise ArgumentsError("--micro-batch-size is missing: give it a value of at least 1")
    step = micro_batch * replicas
    full = step if args.global_batch_size is None else args.global_batch_size
    rounds = getattr(args, "decrease_batch_size_if_needed", False)
    counts = {}
    for batch in _global_batches(args, full):
        if batch < step or (batch % step and not rounds):
            lower, upper = batch // step * step, (batch // step + 1) * step
            near = f"{lower} or {upper}" if lower else f"{upper}"
            mirrored = " (two for each mirrored pipeline)" if twins == 2 else ""
            raise ArgumentsError(
                f"a global batch of {batch} is not a multiple of --micro-batch-size {micro_batch} "
                f"x {replicas} replicas{mirrored}; use --global-batch-size {near}"
            )
        counts[batch] = batch // step
    return Sizes(micro_batch, replicas, twins, counts)


def _worlds(args: Namespace, pp: int) -> int:
    """Return the number of copies of the whole pipeline that the processes form."""
    tp = args.tensor_model_parallel_size
    cp = getattr(args, "context_parallel_size", 1)
    ranks = tp * pp * cp
    if args.world_size % ranks:
        raise ArgumentsError(
            f"world size {args.world_size} is not a multiple of tensor {tp} x pipeline {pp} x "
            f"context {cp} = {ranks}; start {ranks} processes or a multiple, or lower a parallel "
            "size"
        )
    worlds: int = args.world_size // ranks
    return worlds


def _global_batches(args: Namespace, full: int) -> list[int]:
    """Return every global batch size of the run, the full one last."""
    ramp = getattr(args, "rampup_batch_size", None)
    if ramp is None:
        return [full]
    said = " ".join(map(str, ramp))
    try:
        start, increment, _samples = map(int, ramp)
    except ValueError:
        raise ArgumentsError(
            f"--rampup-batch-size {said}: must be start, increment and samples; give three integers"
        ) from None
    if start < 1 or increment < 1 or start > full or (full - start) % increment:
        raise ArgumentsError(
            f"--rampup-batch-size {said} does not lead from {start} to the --global-batch-size "
            f"{full} in steps of {increment}; change one of them"
        )
    return [*range(start, full, increment), full]
