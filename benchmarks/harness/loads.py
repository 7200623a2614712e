"""Unequal expert loads: random ones with a given imbalance, and the workloads W0 to W7.

A load is the time of a layer's experts on one expert rank, divided by the mean over all ranks. The
ranks' parent also imports this module, so it must not import torch or Megatron.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

Loads = Sequence[Sequence[Sequence[float]]]
"""By layer of the model, micro-batch and expert rank."""
_HOT = 2.0
"""A hot rank's load."""


class Size(NamedTuple):
    """The size of a model and its step."""

    num_layers: int
    num_microbatches: int
    num_ranks: int
    """Number of ranks in an expert group."""


class Workload(NamedTuple):
    """The loads in one step."""

    experts: Loads
    attention: Loads = ()
    """The ranks' loads before tokens are sent to experts, or empty if they are all 1."""


def drawn(size: Size, sigma: float, seed: int, persistence: float = 0.5) -> Loads:
    """Draw log-normal loads.

    Args:
        size: The size.
        sigma: Standard deviation of the logarithm.
        seed: Seed of the draws.
        persistence: Exponent of the part that a layer keeps for the whole step.
    """
    draws = random.Random(seed)
    loads = []
    for _ in range(size.num_layers):
        logarithms_of_step = [draws.gauss(0, sigma) for _ in range(size.num_ranks)]
        layer = []
        for _ in range(size.num_microbatches):
            logarithms = []
            for logarithm in logarithms_of_step:
                varying = draws.gauss(0, sigma)
                logarithms.append(persistence * logarithm + (1 - persistence) * varying)
            layer.append(_normal([math.exp(logarithm) for logarithm in logarithms]))
        loads.append(layer)
    return loads


def imbalance_of(loads: Loads) -> float:
    """Return the largest load, averaged over layers and micro-batches."""
    return fmean(max(of_ranks) for layer in loads for of_ranks in layer)


def with_imbalance(size: Size, imbalance: float, seed: int = 0) -> Loads:
    """Draw loads with the given imbalance."""
    low_sigma, high_sigma = 0.0, 8.0
    for _ in range(24):
        sigma = (low_sigma + high_sigma) / 2
        if imbalance_of(drawn(size, sigma, seed)) < imbalance:
            low_sigma = sigma
        else:
            high_sigma = sigma
    return drawn(size, high_sigma, seed)


def _normal(times: Sequence[float]) -> list[float]:
    mean = fmean(times)
    return [time / mean for time in times]


def _hot(num_ranks: int, hot_rank: int, load: float = _HOT) -> list[float]:
    """Return loads with one hot rank, where the others share what is left."""
    other_load = (num_ranks - load) / (num_ranks - 1)
    return [load if rank == hot_rank else other_load for rank in range(num_ranks)]


def _by_place(
    size: Size, loads_at: Callable[[int, int], Sequence[float]]
) -> list[list[Sequence[float]]]:
    """Return the loads that a function returns for each layer and micro-batch."""
    loads = []
    for layer in range(size.num_layers):
        row = [loads_at(layer, number) for number in range(size.num_microbatches)]
        loads.append(row)
    return loads


def workloads(size: Size) -> dict[str, Workload]:
    """Return workloads with one cause of imbalance each, named as in Megatron-LM#7488."""
    draws = random.Random(0)
    num_ranks = size.num_ranks
    even = [1.0] * num_ranks
    hot_of_layer = [draws.randrange(num_ranks) for _ in range(size.num_layers)]
    burst_rank = draws.randrange(num_ranks)
    ragged = _normal([1 + rank for rank in range(num_ranks)])

    def burst(_layer: int, microbatch: int) -> Sequence[float]:
        return _hot(num_ranks, burst_rank, 3.0) if microbatch % 4 == 3 else even

    def ragged_sources(_layer: int, microbatch: int) -> Sequence[float]:
        shift = microbatch % num_ranks
        return ragged[shift:] + ragged[:shift]

    balanced = _by_place(size, lambda _layer, _microbatch: even)
    return {
        "W0 balanced": Workload(balanced),
        "W1 hot experts": Workload(
            _by_place(size, lambda layer, _: _hot(num_ranks, hot_of_layer[layer]))
        ),
        "W2 hot rank": Workload(_by_place(size, lambda _layer, _: _hot(num_ranks, 0))),
        # W1's hot experts, one on each rank.
        "W3 spread hot experts": Workload(balanced),
        "W4 ragged sources": Workload(balanced, _by_place(size, ragged_sources)),
        "W5 rank without tokens": Workload(
            _by_place(size, lambda _layer, _: _hot(num_ranks, num_ranks - 1, 0.0))
        ),
        "W6 rotating hot rank": Workload(
            _by_place(size, lambda _, number: _hot(num_ranks, number % num_ranks))
        ),
        "W7 burst": Workload(_by_place(size, burst)),
    }
