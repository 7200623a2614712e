"""The subcommands `plan` and `plot`, which simulate schedules to compare or draw them.

Both start fast, because they import neither torch nor Megatron.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.feature_list import COMMANDS
from megatron_ext.files import cannot_write, write_text
from megatron_ext.schedules.comparison import compare, figures, training_flags
from megatron_ext.schedules.drawing import render, svg
from megatron_ext.schedules.generators.catalog import (
    CSV_PREFIX,
    MAX_PASSES,
    MAX_RANKS,
    registered,
)
from megatron_ext.schedules.search.patience import gains, while_late
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.text_table import aligned

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Option

_Subparsers = argparse._SubParsersAction
# Parsed arguments that are not flags; modules in `tools` set them for `plan`.
_INTERNAL = (
    "run",
    "run_compared",
    "run_simulated",
    "parser",
    "command",
    "model_flags",  # without a model, these are unknown arguments
)


def add_subcommands(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `plan` and `plot`. Their functions become the arguments' `run` attribute."""
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s --pp P --microbatches M [options]\n"
        "       %(prog)s --trace-dir DIR [options]\n"
        "       %(prog)s --model PATH --devices NxKIND --global-batch-size B [options] [-- FLAGS]",
        help="compare pipeline schedules by simulation",
        description="Simulate pipeline schedules and rank them by step time.",
    )
    parser.add_argument(
        "--schedule",
        # `plot` takes several names, so use a list here too. Both commands then share
        # the checks.
        nargs=1,
        default=["all"],
        metavar="NAME|all",
        help=f"{_names()} (default: all registered schedules)",
    )
    _add_sizes(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--use-dpp",
        action="store_true",
        help="also show how much a dynamic order gains or loses compared with each table",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="predict the gain from balancing by cost for the sample lengths in this file, in "
        "tokens: one number or JSON value per line",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="T",
        help="maximum number of tokens in a micro-batch, with --lengths",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="D",
        help="number of data-parallel replicas, with --lengths",
    )
    parser.add_argument(
        "--length-costs",
        metavar="A,B",
        help="with --lengths: a sample of L tokens costs A*L + B*L^2, in any unit",
    )
    parser.add_argument(
        "--hidden-size",
        type=int,
        metavar="H",
        help="instead of --length-costs: the hidden size of a model with feed-forward networks of "
        "width 4H",
    )
    parser.add_argument(
        "--slice-tokens",
        metavar="T",
        help="with --lengths: also cut micro-batches of more than T tokens into slices of equal "
        "cost; auto: cut the longest micro-batch into two slices per rank",
    )
    parser.set_defaults(run=_run_plan)

    parser = subparsers.add_parser(
        "plot",
        usage="%(prog)s NAME [NAME ...] --pp P --microbatches M [-o FILE] [options]",
        help="draw pipeline schedules",
        description="Draw one or more pipeline schedules, one below the other, in the terminal or "
        "to a file.",
    )
    names = parser.add_argument("schedule", metavar="NAME", nargs="+", help=_names())
    names.completer = lambda **_: list(registered())  # type: ignore[attr-defined] # argcomplete's
    _add_sizes(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=".svg (picture), .csv (table in torch.distributed.pipelining's format) or .json",
    )
    parser.add_argument(
        "--use-dpp",
        action="store_true",
        help="draw each schedule twice with randomly delayed messages: in table order and in a "
        "dynamic order",
    )
    parser.set_defaults(run=_run_plot)


def _names() -> str:
    """Return the schedule names for the help text."""
    return f"{', '.join(registered(unlisted=True))} or csv:FILE"


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `plan` and `plot` share: sizes, schedule options, costs."""
    parser.add_argument("--pp", type=int, metavar="P", help="number of pipeline ranks")
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="number of micro-batches that the pipeline runs per step",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="number of stages per rank (interleaved)",
    )
    for generator in registered(unlisted=True).values():
        for key, values in generator.options.items():
            parser.add_argument(
                generator.flag(key),
                # The space distinguishes these destinations from all others (`_options`).
                dest=f"{generator.name} {key}",
                choices=values,
                help=f"{key} of {generator.name} (default: {values[0]})",
            )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="durations of forward, input gradient and weight gradient on 1/pp of the model, in "
        "any consistent unit (default: 1,1,1)",
    )
    parser.add_argument(
        "--slices",
        type=int,
        default=1,
        metavar="K",
        help="cut each micro-batch along its sequence into K slices of equal cost (default: 1)",
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="run forward and backward passes of different micro-batches as pairs, so that each "
        "pass's computation hides the other's expert communication",
    )
    of_forward = (
        "a forward pass spent in core attention, which grows with the length squared"
    )
    of_both = "a forward pass and of an input gradient spent on expert communication"
    for flag, default, share in (
        ("--attention", 0.0, f"{of_forward}, for --slices"),
        ("--all-to-all", 0.0, f"{of_both}, for --pairs"),
        ("--hides", 1.0, "the expert communication that a pair hides, with --pairs"),
    ):
        parser.add_argument(
            flag,
            type=float,
            default=default,
            metavar="SHARE",
            help=f"share of {share} (default: {default:g})",
        )
    parser.add_argument(
        "--comm",
        type=float,
        default=0.0,
        metavar="C",
        help="message latency, in the unit of --costs (default: 0)",
    )


def _costs(args: argparse.Namespace) -> Costs:
    """Return the costs that the flags describe.

    Raises:
        ScheduleError: A flag is set without another flag that it requires, or a number is invalid.
    """
    try:
        forward, input_gradient, weight = map(float, args.costs.split(","))
    except ValueError:
        raise ScheduleError(
            f"--costs needs three numbers F,I,W, got {args.costs!r}; for example --costs 1,1,1"
        ) from None
    # A table loaded from a file may contain slices and pairs even if these flags are
    # not set.
    is_file = any(name.startswith(CSV_PREFIX) for name in args.schedule)
    if args.attention > 0 and args.slices == 1 and not is_file:
        raise ScheduleError(
            "--attention needs --slices; add --slices, or remove --attention"
        )
    if args.hides != 1 and not args.pairs and not is_file:
        raise ScheduleError("--hides needs --pairs; add --pairs, or remove --hides")
    return Costs(
        forward,
        input_gradient,
        weight,
        latency=args.comm,
        attention=args.attention,
        all_to_all=args.all_to_all,
        hides=args.hides,
    )


def _options(args: argparse.Namespace) -> dict[str, dict[str, Option]]:
    """Return the user's options: schedule name -> key -> value.

    Raises:
        ScheduleError: An option is for a schedule that the user has not requested.
    """
    options: dict[str, dict[str, Option]] = {}
    for destination, value in vars(args).items():
        # Only the destinations of schedule options contain a space (`_add_sizes`).
        name, _, key = destination.partition(" ")
        if not key or value is None:
            continue
        if name not in args.schedule and "all" not in args.schedule:
            named = ", ".join(args.schedule)
            raise ScheduleError(
                f"--{name}-{key} is for {name}, not for {named}; remove it"
            )
        options.setdefault(name, {})[key] = value
    return options


def _check_sizes(args: argparse.Namespace) -> None:
    """Check that the sizes are given and small enough to simulate.

    Raises:
        ScheduleError: A size is missing or too large, or there is only one rank.
    """
    # A table file contains its own sizes.
    if all(name.startswith(CSV_PREFIX) for name in args.schedule):
        return
    missing = []
    if args.pp is None:
        missing.append("--pp")
    if args.microbatches is None:
        missing.append("--microbatches")
    if missing:
        advice = "are missing; give them" if len(missing) > 1 else "is missing; give it"
        raise ScheduleError(
            f"{' and '.join(missing)} {advice} (only csv:FILE contains its own sizes)"
        )
    if args.pp > MAX_RANKS:
        raise ScheduleError(
            f"--pp {args.pp} is too large to simulate; use at most {MAX_RANKS}"
        )
    max_microbatches = MAX_PASSES // max(args.pp, 1)
    if args.microbatches > max_microbatches:
        raise ScheduleError(
            f"--microbatches {args.microbatches} is too large to simulate with {args.pp} ranks; "
            f"use at most {max_microbatches}"
        )
    if args.pp == 1:
        raise ScheduleError("--pp 1 leaves no pipeline to schedule; use 2 or more")


def refuse_others(
    args: argparse.Namespace, accepted: Collection[str], reason: str
) -> None:
    """Reject flags that this use of `plan` does not accept.

    Args:
        args: The parsed arguments.
        accepted: Destinations of the accepted flags.
        reason: The error message for any other flag, whose name replaces `{}`.

    Raises:
        ArgumentsError: Any other flag is set.
    """
    for destination, value in vars(args).items():
        if destination in accepted or destination in _INTERNAL:
            continue
        if value != args.parser.get_default(destination):
            raise ArgumentsError(reason.format("--" + re.sub("[_ ]", "-", destination)))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn off the cycle collector, which would visit millions of tuples that form no cycles."""
    # The calling program may already have turned it off, so restore the previous setting.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def _run_plan(args: argparse.Namespace) -> int:
    """Compare schedules, or predict the gain from balancing by cost."""
    for destination in (
        "max_tokens",
        "replicas",
        "length_costs",
        "hidden_size",
        "slice_tokens",
    ):
        if args.lengths is None and getattr(args, destination) is not None:
            flag = "--" + destination.replace("_", "-")
            raise ScheduleError(
                f"{flag} needs --lengths FILE; remove {flag}, or add --lengths FILE"
            )
    _check_sizes(args)
    if args.lengths is not None:
        if "lengths" not in COMMANDS:
            raise ScheduleError(
                f"--lengths {args.lengths} needs the feature lengths, which this installation "
                "lacks; reinstall megatron_ext"
            )
        module, _, name = COMMANDS["lengths"].partition(":")
        run_lengths = getattr(import_module(module), name)
        exit_code: int = run_lengths(args, _costs(args))
        return exit_code
    costs = _costs(args)
    timelines, left_out = _compared(args, args.schedule[0], costs)
    if args.json:
        print(_as_json(timelines, costs, use_dpp=args.use_dpp))
    else:
        print(comparison_table(timelines))
        _print_notes(timelines, costs_text=args.costs)
        if not args.pairs and args.slices == 1:
            _print_recommendation(timelines)
            if args.schedule == ["all"] and args.pp > 1:
                _print_automatic(args, costs)
        if args.use_dpp:
            _print_gains(timelines, costs)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


def _compared(
    args: argparse.Namespace, name: str, costs: Costs
) -> tuple[list[Timeline], list[str]]:
    return compare(
        name,
        args.pp,
        args.microbatches,
        costs,
        args.chunks,
        _options(args),
        pairs=args.pairs,
        slices=args.slices,
    )


def _as_json(timelines: Sequence[Timeline], costs: Costs, *, use_dpp: bool) -> str:
    entries = []
    for timeline in timelines:
        entry = figures(timeline)
        if use_dpp:
            entry["use_dpp"] = gains(timeline.schedule, costs)._asdict()
        entries.append(entry)
    return json.dumps(entries, indent=1)


def _print_notes(timelines: Sequence[Timeline], costs_text: str) -> None:
    """Print the units of the comparison table."""
    unit = "in the unit of --costs"
    if costs_text == "1,1,1":
        unit = "1 = forward of 1/pp of the model"
    print(f"\ntimes: {unit}; activations: in micro-batches on 1/pp of the model")
    if any(timeline.schedule.num_slices > 1 for timeline in timelines):
        print(
            "keys, values: memory for the keys and values of sliced micro-batches and their "
            "gradients, in the same unit as activations"
        )


# Number of schedules for which `plan` prints flags; `--schedule NAME` prints the flags for any
# other.
_WITH_FLAGS = 3


def _print_recommendation(timelines: Sequence[Timeline]) -> None:
    """Print the flags for the best schedules and, if there are several, which one to choose."""
    best, *slower = timelines
    if slower:
        advice = f"\nrecommended: {best.schedule.label}"
        copies = best.schedule.weight_copies
        stored_once = [
            timeline for timeline in slower if timeline.schedule.weight_copies == 1
        ]
        # The fastest schedule may hold two copies of the weights, which may not fit in memory.
        if copies > 1 and stored_once:
            fallback = stored_once[0].schedule.label
            advice += f" if {copies} copies of the weights fit, otherwise {fallback}"
        print(advice)
    shown = timelines[:_WITH_FLAGS]
    if len(shown) < len(timelines):
        print("\nflags of the first three:")
    else:
        print("\nflags:")
    width = _label_width(timelines)
    for timeline in shown:
        label = timeline.schedule.label.ljust(width)
        # The flags include the costs, because some tables are optimized for specific
        # costs. With a latency of 0.1, bitpipe takes 51.7 forwards with the table for
        # this latency, but 57 with the table for equal times and no latency.
        print(f"  {label}  {training_flags(timeline.schedule, timeline.costs)}")


def _print_automatic(args: argparse.Namespace, costs: Costs) -> None:
    """Print which schedule `--pipeline-schedule auto` chooses if only these sizes are known."""
    from megatron_ext.planning.choice import ByTable, Training, rank

    training = Training(
        ranks=args.pp,
        num_microbatches=args.microbatches,
        cut=lambda _schedule, _placement: None,
        chunks=args.chunks,
        # Equal costs are the default for `--costs`, so assume that the user did not
        # choose them.
        costs=None if costs == UNIT else costs,
    )
    ranking = rank(
        training, ByTable(training=training, measured=None, reason="tables alone")
    )
    print(f"\n{ranking.sentence(ranking.candidates[:2], [])}")


def _print_gains(timelines: Sequence[Timeline], costs: Costs) -> None:
    """Print how much `--use-dpp` gains or loses with each table."""
    print("\nwith --use-dpp: time in table order / time in dynamic order")
    width = _label_width(timelines)
    for timeline in timelines:
        gain = gains(timeline.schedule, costs)
        label = timeline.schedule.label.ljust(width)
        print(
            f"  {label}  {gain.quiet:.3f} if no message is late, {gain.late:.3f} if messages are "
            f"randomly late: {gain.advice}"
        )


def _label_width(timelines: Sequence[Timeline]) -> int:
    return max(len(timeline.schedule.label) for timeline in timelines)


_HEADS = (
    "schedule",
    "makespan",
    "ideal",
    "bubble",
    "bubble %",
    "peak act.",
    "weights",
    "messages",
)


def comparison_table(timelines: Sequence[Timeline]) -> str:
    """Return a comparison as text, one line per simulation, in the given order."""
    has_all_to_all = any(timeline.costs.all_to_all for timeline in timelines)
    has_slices = any(timeline.schedule.num_slices > 1 for timeline in timelines)
    heads = list(_HEADS)
    if has_all_to_all:
        heads.append("hidden %")
    if has_slices:
        heads.append("keys, values")
    rows = [heads]
    for timeline in timelines:
        cells = [
            timeline.schedule.label,
            f"{timeline.makespan:g}",
            f"{timeline.ideal:g}",
            f"{timeline.bubble:g}",
            f"{100 * timeline.bubble_ratio:.1f}",
            f"{timeline.peak_activations:g}",
            f"{timeline.schedule.weight_copies}x",
            str(timeline.messages),
        ]
        if has_all_to_all:
            cells.append(f"{100 * timeline.hidden:.0f}")
        if has_slices:
            cells.append(f"{timeline.keys_and_values:g}")
        rows.append(cells)
    return aligned(rows)


@_without_garbage_collection()
def _run_plot(args: argparse.Namespace) -> int:
    """Draw schedules in the terminal or to a file."""
    _check_sizes(args)
    if "all" in args.schedule:
        raise ScheduleError(
            "plot needs the names of schedules; add them, or compare all schedules with plan"
        )
    costs = _costs(args)
    timelines: list[Timeline] = []
    for name in args.schedule:
        [timeline], _ = _compared(args, name, costs)
        if args.use_dpp:
            timelines += while_late(timeline)
        else:
            timelines.append(timeline)
    if args.output is None:
        _draw_in_terminal(timelines)
    else:
        _write_drawing(args.output, timelines)
    return 0


def _draw_in_terminal(timelines: Sequence[Timeline]) -> None:
    width = 100
    coloured = False
    if sys.stdout.isatty():
        # NO_COLOR is a convention from no-color.org.
        width = shutil.get_terminal_size((100, 24)).columns
        coloured = not os.environ.get("NO_COLOR")
    pictures = [
        render.picture(timeline, width, coloured=coloured) for timeline in timelines
    ]
    print("\n\n".join(pictures))


def _write_drawing(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write a picture or a single table, depending on the file suffix.

    Raises:
        ScheduleError: The suffix is unknown, the format holds only one table, or the file cannot be
            written.
    """
    # Only a single schedule can be written as a table, so use the first one.
    timeline = timelines[0]
    schedule = timeline.schedule
    if path.suffix not in (".svg", ".csv", ".json"):
        raise ScheduleError(f"{path}: unknown file type; use .svg, .csv or .json")
    if path.suffix != ".svg" and len(timelines) > 1:
        raise ScheduleError(
            f"{path} can contain only one schedule; name one, or draw several as .svg"
        )
    if path.suffix == ".svg":
        text = svg.draw(*timelines)
    elif path.suffix == ".csv":
        text = table_files.csv_text(schedule)
    else:
        text = table_files.json_text(
            schedule, starts=timeline.starts, ends=timeline.ends
        )
    try:
        write_text(path, text)
    except OSError as error:
        remedy = "free some space, or choose another file with -o"
        raise ScheduleError(cannot_write(path, error, remedy)) from error
    for timeline in timelines:
        print(render.caption(timeline))
    print(f"wrote {path}")
    if path.suffix == ".csv" and schedule.placement.twins == 2:
        print(
            f"the CSV contains one of the two mirrored pipelines ({schedule.pp // 2} ranks)",
            file=sys.stderr,
        )
