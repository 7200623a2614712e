"""Slices by length beside whole bins, for long-tailed lengths, simulated by their tables.

    python benchmarks/slices_by_length.py [--draws N]

Each draw has 128 samples, the longest of 131,072 tokens, for a pipeline of 8 ranks. At the longest,
attention costs half as much as everything else. Whole: samples are packed into bins of the longest
(first fit, longest first), as packed training does. By length: samples of more than T tokens are
cut into slices, and the others are packed into bins of T. A step is given relative to the work of a
rank without any bubble, the peak of activations in longest samples on 1/8 of the model. The last
column is the processor time that a rank needs for the table of a step and its messages.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.features.lengths.length_slices import (
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.runtime.program import (
    Peers,
    PipelineEnds,
    make_program,
    make_table_by_length,
)
from megatron_ext.schedules import Costs, simulate
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.schedules.table.memory import activation_peaks

RANKS = 8
SAMPLES = 128
LONGEST = 131_072
MEAN = 8_192
LENGTH_COST = LengthCost(1.0, 0.5 / LONGEST)
UNIT = LENGTH_COST.of_length(LONGEST)
# Only the number of tensors matters.
SHAPE = (1, 1, 1)
ENDS = PipelineEnds.of_shapes(
    Peers(range(RANKS)), {"F": [SHAPE], "B": [SHAPE]}, torch.bfloat16
)


class Figures(NamedTuple):
    """A step of one draw."""

    step: float
    """Relative to the work of a rank."""
    peak: float
    """In longest samples on 1/8 of the model."""
    table_s: float
    """Processor time of a rank for the table and its messages."""


def draw(seed: int) -> list[int]:
    """Return the lengths of one step, log-normal and cut at the longest."""
    lognormal = random.Random(seed).lognormvariate
    lengths: list[int] = []
    while len(lengths) < SAMPLES:
        length = int(MEAN * lognormal(-0.98, 1.4))
        if 32 <= length <= LONGEST:
            lengths.append(length)
    lengths[0] = LONGEST
    return lengths


def bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the samples of each bin, packed by first fit, longest first."""
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        for pack in packs:
            if sum(pack) + length <= capacity:
                pack.append(length)
                break
        else:
            packs.append([length])
    return packs


def measured(name: str, packs: Sequence[Sequence[int]], slice_tokens: int) -> Figures:
    """Return the figures of micro-batches with these samples, in slices of so many tokens."""
    costs_of_packs = [LENGTH_COST.of_pack(pack) for pack in packs]
    tokens_of_slices, scale = [], []
    for place in rising(costs_of_packs):
        count = slices_needed(sum(packs[place]), slice_tokens)
        bounds = equal_cost_bounds(packs[place], count, LENGTH_COST)
        tokens_of_slices.append(tuple(end - begin for begin, end in pairwise(bounds)))
        scale.append((costs_of_packs[place] / UNIT / count,) * count)
    config = PipelineConfig(schedule=name, slice_tokens=slice_tokens, transport="shm")
    pipeline = Pipeline(config, RANKS, len(packs))
    begin_s = time.process_time()
    table = make_table_by_length(
        pipeline, tokens_of_slices, LENGTH_COST, rank=RANKS // 2
    )
    make_program(table, ENDS)
    table_s = time.process_time() - begin_s
    costs = Costs(
        attention=LENGTH_COST.attention_share(LONGEST), slice_scale=tuple(scale)
    )
    step_time = simulate(table.schedule, costs).makespan
    work = costs.work * sum(costs_of_packs) / UNIT
    return Figures(step_time / work, max(activation_peaks(table.schedule)), table_s)


def by_length(name: str, lengths: Sequence[int], slice_tokens: int) -> Figures:
    """Return the figures of long samples in slices, and short ones packed into bins."""
    packs = [[length] for length in lengths if length > slice_tokens]
    packs += bins(
        [length for length in lengths if length <= slice_tokens], slice_tokens
    )
    return measured(name, packs, slice_tokens)


def main() -> None:
    """Print the table of all systems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--draws", type=int, default=8, help="number of draws (default: 8)"
    )
    draws = [draw(seed) for seed in range(parser.parse_args().draws)]
    systems: dict[str, list[Figures]] = {}
    for name in ("1f1b", "zb-h1"):
        figures = [measured(name, bins(lengths, LONGEST), LONGEST) for lengths in draws]
        systems[f"{name}, bins of the longest"] = figures
    for parts in (8, 16):
        for name in ("1f1b", "zb-h1", "zb-v"):
            slice_tokens = LONGEST // parts
            figures = [by_length(name, lengths, slice_tokens) for lengths in draws]
            systems[f"{name}, T = {slice_tokens}"] = figures
    print(f"pp {RANKS}, {SAMPLES} samples, mean and worst of {len(draws)} draws\n")
    print(
        f"{'system':<28}{'step':>7}{'worst':>7}{'peak':>7}{'worst':>7}{'table ms':>10}"
    )
    for label, figures in systems.items():
        steps, peaks, tables_s = zip(*figures, strict=True)
        print(
            f"{label:<28}{fmean(steps):>7.3f}{max(steps):>7.3f}{fmean(peaks):>7.2f}"
            f"{max(peaks):>7.2f}{1000 * fmean(tables_s):>10.1f}"
        )
    print()
    packed = {
        name: systems[f"{name}, bins of the longest"] for name in ("1f1b", "zb-h1")
    }
    for slice_tokens in (LONGEST // 8, LONGEST // 16):
        ours = systems[f"zb-h1, T = {slice_tokens}"]
        for name, figures in packed.items():
            gain = fmean(
                whole.step / cut.step for whole, cut in zip(figures, ours, strict=True)
            )
            print(
                f"zb-h1 with T = {slice_tokens} takes 1/{gain:.2f} of the time of packed {name}"
            )


if __name__ == "__main__":
    main()
