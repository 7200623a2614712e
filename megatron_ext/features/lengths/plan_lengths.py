"""`megatron-ext plan --lengths`: predicts the gain from balancing micro-batches by cost."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_balance import packs_in_file_order
from megatron_ext.features.lengths.length_gains import (
    MAX_BATCHES,
    LengthGains,
    Sizes,
    predict_lengths,
)
from megatron_ext.features.lengths.length_slices import automatic_slice_tokens
from megatron_ext.files import parse_json, read_text
from megatron_ext.schedules.generators.catalog import CSV_PREFIX
from megatron_ext.schedules.table.length_cost import LengthCost
from megatron_ext.text_table import aligned

if TYPE_CHECKING:
    from megatron_ext.schedules.table.costs import Costs

_MAX_LENGTHS_BYTES = 1 << 30
_LENGTH_FIELDS = ("length", "num_tokens", "tokens")


def run(args: argparse.Namespace, costs: Costs) -> int:
    """Predict the gain from balancing by cost and print the result.

    Raises:
        ScheduleError: A flag is missing or invalid, or no prediction is possible for these lengths.
    """
    name = args.schedule[0]
    for flag, is_set in (
        ("--use-dpp", args.use_dpp),
        ("--chunks", args.chunks),
        ("--pairs", args.pairs),
        ("--slices", args.slices != 1),
    ):
        if is_set:
            raise ScheduleError(f"{flag} cannot be combined with --lengths; remove it")
    if name.startswith(CSV_PREFIX):
        raise ScheduleError(
            f"--lengths can only simulate registered schedules, not {name}; use --schedule NAME"
        )
    if args.max_tokens is None:
        raise ScheduleError(
            "--max-tokens is missing; set it to the maximum number of tokens in a micro-batch"
        )
    length_cost = _length_cost(args)
    replicas = 1 if args.replicas is None else args.replicas
    for flag, value in (
        ("--replicas", replicas),
        ("--max-tokens", args.max_tokens),
        ("--microbatches", args.microbatches),
    ):
        if value < 1:
            raise ScheduleError(f"{flag} {value} must be 1 or more")
    sizes = Sizes(args.pp, args.microbatches, replicas, args.max_tokens)
    lengths = read_lengths(args.lengths)
    slice_tokens = _slice_tokens(args.slice_tokens, lengths, sizes)
    predictions, left_out = predict_lengths(
        lengths, name, sizes, length_cost, costs, slice_tokens
    )
    if args.json:
        entries = []
        for prediction in predictions:
            # The slice fields are None if there are no slices.
            fields = prediction._asdict().items()
            entries.append({name: value for name, value in fields if value is not None})
        print(json.dumps(entries, indent=1))
    else:
        print(_table(predictions))
        print(
            f"\nmean step times over at most {MAX_BATCHES} global batches; 1 = forward pass of an "
            "average micro-batch on 1/pp of the model\norder, pack: train with --pipeline-balance "
            "order or pack"
        )
        if slice_tokens is not None:
            print(
                f"slices: train with --pipeline-slice-tokens {slice_tokens} --pipeline-balance "
                "pack; peak: maximum activations, in units of the longest micro-batch on "
                "1/pp of the model"
            )
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


def _length_cost(args: argparse.Namespace) -> LengthCost:
    """Return a function that maps a sample's length to its cost.

    Raises:
        ScheduleError: Both or neither of the flags that set the cost are given.
    """
    # Exactly one of the two flags must be given.
    if (args.length_costs is None) == (args.hidden_size is None):
        raise ScheduleError(
            "--lengths needs either --length-costs A,B or --hidden-size H to compute the cost "
            "of a length; add, for example, --hidden-size 4096"
        )
    if args.length_costs is not None:
        return LengthCost.parse(args.length_costs)
    return LengthCost.of_model(args.hidden_size)


def _slice_tokens(text: str | None, lengths: Sequence[int], sizes: Sizes) -> int | None:
    """Return the number of tokens per slice from `--slice-tokens`, or None if the flag is not set.

    Raises:
        ScheduleError: The value is neither `auto` nor a positive integer, or it is `auto` and a
            sample does not fit into a micro-batch.
    """
    if text is None:
        return None
    # Size the slices for the longest micro-batch produced by packing samples in file
    # order. If they were sized for the longest sample, a micro-batch of short samples
    # could need more than 64 slices, the maximum.
    if text == "auto":
        packs = packs_in_file_order(lengths, sizes.max_tokens)
        tokens = [sum(pack) for pack in packs]
        in_step = ceil(fmean(tokens) * sizes.num_microbatches)
        return automatic_slice_tokens(max(tokens), in_step, sizes.pp)
    if not text.isdecimal() or int(text) < 1:
        raise ScheduleError(
            f"--slice-tokens {text} must be auto or a positive whole number"
        )
    return int(text)


def _table(predictions: Sequence[LengthGains]) -> str:
    has_slices = any(prediction.sliced is not None for prediction in predictions)
    rows = [["schedule", "file order", "order", "pack", "bound", "gain of pack"]]
    if has_slices:
        rows[0] += ["slices", "peak"]
    for prediction in predictions:
        row = [
            prediction.schedule,
            f"{prediction.in_file_order:.4g}",
            f"{prediction.order:.4g}",
            f"{prediction.pack:.4g}",
            f"{prediction.bound:.4g}",
            f"{prediction.in_file_order / prediction.pack:.3f}",
        ]
        if prediction.sliced is not None:
            row += [f"{prediction.sliced:.4g}", f"{prediction.sliced_peak:.3g}"]
        elif has_slices:
            row += ["", ""]
        rows.append(row)
    return aligned(rows)


def read_lengths(path: Path) -> list[int]:
    """Read sample lengths, in tokens, from a file with one number or JSON value per line.

    A JSON value is a number, a list (whose length is used), or an object with a number or a list
    under `length`, `num_tokens` or `tokens`. Empty lines are ignored.

    Raises:
        ScheduleError: The file cannot be read, or a line contains no length.
    """
    try:
        lines = read_text(path, _MAX_LENGTHS_BYTES).splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ScheduleError(
            f"--lengths {path} cannot be read: {reason}; use a file with one length per line"
        ) from error
    lengths = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        length = _length_in(line)
        if length is None:
            raise ScheduleError(
                f"--lengths {path}, line {number}: {line.strip()[:40]!r} is not a length; write a "
                f"whole number greater than 0, or JSON with {', '.join(_LENGTH_FIELDS)}"
            )
        lengths.append(length)
    if not lengths:
        raise ScheduleError(f"--lengths {path} contains no lengths; write one per line")
    return lengths


def _length_in(line: str) -> int | None:
    """Return the sample length in a line, or None if the line contains none."""
    try:
        value: Any = parse_json(line)
    except ValueError:
        return None
    if isinstance(value, dict):
        fields = [name for name in _LENGTH_FIELDS if name in value]
        if not fields:
            return None
        value = value[fields[0]]
    if isinstance(value, list):
        value = len(value)
    # In Python, True is an int.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return value
