"""Slices by length compared with whole bins, for long-tailed lengths.

    python benchmarks/slices_by_length.py [--draws N] [--parts PART ...] [--quick]

Whole: samples are packed into bins the size of the longest one (first fit, longest first), as in
packed training. By length: samples with more than T tokens are cut into slices, and the others are
packed into bins of T tokens. Parts:

`simulated`: tables for 8 ranks, with exact durations. Each draw has 128 samples. The longest has
131,072 tokens, at which attention costs half as much as everything else. Steps are relative to a
rank's work without any bubble, and peak activations are in units of the longest sample on 1/8 of
the model. The last column is the processor time that a rank needs for a step's table and messages.

`sleeping`: the same draws on 8 real processes with sleeping stages, as in `schedules.py`, with T as
chosen by `--pipeline-slice-tokens auto`; about 12 minutes. Steps are given both without and with
the time for their tables, which 8 ranks make on only a few cores here.

`model`: a 4-layer GPT on 2 CPU ranks, with samples of up to 2048 tokens; about five minutes. One
run alternates between Megatron's own 1F1B with bins, zb-h1 with bins in balanced order, and sliced
zb-h1, and prints the ratios of their times for the same draws.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness.command import machine
from benchmarks.harness.length_steps import LengthStep, measure
from benchmarks.harness.ops import SEQUENCE_LENGTH
from benchmarks.harness.ranks import clean_up_when_terminated
from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.features.lengths.length_slices import (
    automatic_slice_tokens,
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.runtime.program import (
    Peers,
    PipelineEnds,
    make_program,
)
from megatron_ext.schedules import Costs, simulate
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.schedules.table.memory import activation_peaks
from megatron_ext.text_table import aligned
from tests.features.slices.length_training import Job, Trained, train
from tests.features.slices.step_tables import table_of_step
from tests.ranks import run_ranks

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


_PARTS = ("simulated", "sleeping", "model")
_FORWARD_S = 0.8
"""How long a rank in `sleeping` sleeps for the longest sample."""
_LIMIT_S = 900.0
"""Time limit for one system on real processes."""
_MODEL_LONGEST = 2048
_MODEL_SAMPLES = 24
_MODEL_DRAWS = 4
_MODEL_ROUNDS = 2


class Figures(NamedTuple):
    """One draw's step."""

    step: float
    """Relative to a rank's work."""
    peak: float
    """In units of the longest sample on 1/8 of the model."""
    table_s: float
    """A rank's processor time for the table and its messages."""


def draw(
    seed: int, samples: int = SAMPLES, longest: int = LONGEST, mean: int = MEAN
) -> list[int]:
    """Return one step's lengths, drawn from a truncated log-normal distribution."""
    lognormal = random.Random(seed).lognormvariate
    lengths: list[int] = []
    while len(lengths) < samples:
        length = int(mean * lognormal(-0.98, 1.4))
        if longest // 4096 <= length <= longest and length > 0:
            lengths.append(length)
    lengths[0] = longest
    return lengths


def bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the samples in each bin, packed first fit, longest first."""
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
    """Return the figures for micro-batches with these samples, in slices of that many tokens."""
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
    table = table_of_step(pipeline, tokens_of_slices, LENGTH_COST, rank=RANKS // 2)
    make_program(table, ENDS)
    table_s = time.process_time() - begin_s
    costs = Costs(
        attention=LENGTH_COST.attention_share(LONGEST), slice_scale=tuple(scale)
    )
    step_time = simulate(table.schedule, costs).makespan
    work = costs.work * sum(costs_of_packs) / UNIT
    return Figures(step_time / work, max(activation_peaks(table.schedule)), table_s)


def packs_by_length(lengths: Sequence[int], slice_tokens: int) -> list[list[int]]:
    """Return the samples of each micro-batch: long ones alone, short ones in bins."""
    packs = [[length] for length in lengths if length > slice_tokens]
    short_lengths = [length for length in lengths if length <= slice_tokens]
    return packs + bins(short_lengths, slice_tokens)


def simulated(draws: Sequence[Sequence[int]]) -> None:
    """Print the tables' figures."""
    systems: dict[str, list[Figures]] = {}
    for name in ("1f1b", "zb-h1"):
        figures = [measured(name, bins(lengths, LONGEST), LONGEST) for lengths in draws]
        systems[f"{name}, bins of the longest"] = figures
    for parts in (8, 16):
        for name in ("1f1b", "zb-h1", "zb-v"):
            slice_tokens = LONGEST // parts
            figures = []
            for lengths in draws:
                packs = packs_by_length(lengths, slice_tokens)
                figures.append(measured(name, packs, slice_tokens))
            systems[f"{name}, T = {slice_tokens}"] = figures
    print(f"pp {RANKS}, {SAMPLES} samples, mean and worst of {len(draws)} draws\n")
    rows = [["system", "step", "worst", "peak", "worst", "table ms"]]
    for label, figures in systems.items():
        steps, peaks, tables_s = zip(*figures, strict=True)
        cells = [f"{fmean(steps):.3f}", f"{max(steps):.3f}"]
        cells += [f"{fmean(peaks):.2f}", f"{max(peaks):.2f}"]
        rows.append([label, *cells, f"{1000 * fmean(tables_s):.1f}"])
    print(f"{aligned(rows)}\n")
    packed = {
        name: systems[f"{name}, bins of the longest"] for name in ("1f1b", "zb-h1")
    }
    for slice_tokens in (LONGEST // 8, LONGEST // 16):
        sliced = systems[f"zb-h1, T = {slice_tokens}"]
        for name, figures in packed.items():
            gain = fmean(
                packed_draw.step / sliced_draw.step
                for packed_draw, sliced_draw in zip(figures, sliced, strict=True)
            )
            print(
                f"zb-h1 with T = {slice_tokens} is {gain:.2f}x as fast as packed {name}"
            )


def sleeping(draws: Sequence[Sequence[int]], forward_s: float) -> None:
    """Print the figures of real processes with sleeping stages."""
    scale = LONGEST // SEQUENCE_LENGTH
    scaled_draws = []
    for lengths in draws:
        scaled_draws.append([max(1, round(length / scale)) for length in lengths])
    cost = LengthCost(1.0, 0.5 / SEQUENCE_LENGTH)
    # `--pipeline-slice-tokens auto` chooses the same number for all draws.
    slice_tokens = max(
        automatic_slice_tokens(max(lengths), sum(lengths), RANKS)
        for lengths in scaled_draws
    )
    whole_bins = [bins(lengths, SEQUENCE_LENGTH) for lengths in scaled_draws]
    cut_packs = [packs_by_length(lengths, slice_tokens) for lengths in scaled_draws]
    by_length: dict[str, Any] = {
        "slice_tokens": slice_tokens,
        "balance": "order",
        "length_costs": cost,
    }
    label = f"T = {slice_tokens * scale}"
    systems: dict[str, tuple[dict[str, Any], list[list[list[int]]]]] = {
        "1f1b, bins of the longest": ({"schedule": "1f1b"}, whole_bins),
        "zb-h1, bins, balanced": (
            {"schedule": "zb-h1", "balance": "pack", "length_costs": cost},
            whole_bins,
        ),
        f"zb-h1, {label}": ({"schedule": "zb-h1", **by_length}, cut_packs),
        f"zb-v, {label}": ({"schedule": "zb-v", **by_length}, cut_packs),
    }
    unit = cost.of_length(SEQUENCE_LENGTH)
    work_s = []
    for packs in whole_bins:
        work = sum(cost.of_pack(samples) for samples in packs) / unit
        work_s.append(3 * forward_s * work)
    rows = [["system", "step", "worst", "with table", "peak", "table ms"]]
    steps_by_system: dict[str, list[float]] = {}
    for name, (settings, packs_by_step) in systems.items():
        config = PipelineConfig(transport="shm", device_path="staged", **settings)
        by_rank: list[list[LengthStep]] = run_ranks(
            RANKS, measure, config, RANKS, packs_by_step, cost, forward_s,
            timeout_s=_LIMIT_S,
        )  # fmt: skip
        steps, steps_with_table, tables_s, peaks = [], [], [], []
        for ranks_of_step, ideal_s in zip(
            zip(*by_rank, strict=True), work_s, strict=True
        ):
            begin_s = min(step.begin_s for step in ranks_of_step)
            step_s = max(step.end_s for step in ranks_of_step) - begin_s
            table_s = max(step.tables_s for step in ranks_of_step)
            steps.append((step_s - table_s) / ideal_s)
            steps_with_table.append(step_s / ideal_s)
            tables_s.append(table_s)
            peaks.append(max(step.peak_live for step in ranks_of_step))
        steps_by_system[name] = steps
        cells = [f"{fmean(steps):.3f}", f"{max(steps):.3f}"]
        cells += [f"{fmean(steps_with_table):.3f}", f"{max(peaks):.2f}"]
        rows.append([name, *cells, f"{1000 * fmean(tables_s):.0f}"])
    print(f"\npp {RANKS}, stages sleep {1000 * forward_s:g} ms for the longest sample")
    print(f"{aligned(rows)}\n")
    _print_gains(steps_by_system, f"zb-h1, {label}")


def model(num_draws: int, rounds: int, longest: int) -> None:
    """Print the ratios of a real model's times."""
    slice_tokens = longest // 8
    draws = []
    for seed in range(num_draws):
        draws.append(draw(seed, _MODEL_SAMPLES, longest, longest // 20))
    whole_bins = [bins(lengths, longest) for lengths in draws]
    cut_packs = [packs_by_length(lengths, slice_tokens) for lengths in draws]
    systems: dict[str, tuple[str | None, dict[str, Any], list[list[list[int]]]]] = {
        "Megatron's 1F1B, bins": (None, {}, whole_bins),
        "zb-h1, bins, balanced": (
            "zb-h1",
            {"balance": "pack", "transport": "shm"},
            whole_bins,
        ),
        f"zb-h1, T = {slice_tokens}": (
            "zb-h1",
            {"slice_tokens": slice_tokens, "balance": "order", "transport": "shm"},
            cut_packs,
        ),
    }
    times_s: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, (schedule, settings, packs_by_step) in systems.items():
            job = Job(
                # The first step connects the ranks.
                steps=[[packs] for packs in packs_by_step[:1] + packs_by_step],
                schedule=schedule,
                pp=2,
                settings=settings,
                model={"hidden_size": 256, "ffn_hidden_size": 1024},
                max_positions=longest,
                is_packed=True,
            )
            by_rank: list[Trained] = run_ranks(2, train, job, timeout_s=_LIMIT_S)
            steps_s = zip(*(rank.steps_s for rank in by_rank), strict=True)
            times_s[name] += [max(of_ranks) for of_ranks in steps_s][1:]
            table_ms = 1000 * max(rank.tables_s for rank in by_rank) / len(job.steps)
            print(
                f"{name}: {sum(times_s[name]):.1f} s, tables {table_ms:.1f} ms per step"
            )
    print(f"\npp 2, {num_draws} draws, {rounds} rounds\n")
    _print_gains(times_s, f"zb-h1, T = {slice_tokens}")


def _print_gains(times_by_system: dict[str, list[float]], ours: str) -> None:
    """Print how much longer other systems take, comparing steps of the same draw."""
    for name, times in times_by_system.items():
        if name != ours:
            both = zip(times, times_by_system[ours], strict=True)
            ratios = [longer / shorter for longer, shorter in both]
            print(
                f"{ours}: {median(ratios):.2f}x as fast as {name} ({min(ratios):.2f} to "
                f"{max(ratios):.2f})",
                flush=True,
            )


def main() -> None:
    """Print the tables of all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--draws", type=int, default=8, help="number of draws (default: 8)")
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    add("--quick", action="store_true", help="short sleeps, a small model")
    args = parser.parse_args()
    clean_up_when_terminated()
    draws = [draw(seed) for seed in range(args.draws)]
    if "simulated" in args.parts:
        simulated(draws)
    if "sleeping" in args.parts:
        sleeping(draws, _FORWARD_S / 10 if args.quick else _FORWARD_S)
    if "model" in args.parts:
        sizes = (min(args.draws, _MODEL_DRAWS), _MODEL_ROUNDS, _MODEL_LONGEST)
        model(*((1, 1, 256) if args.quick else sizes))
    print(machine())


if __name__ == "__main__":
    main()
