"""The subcommands `plan` and `plot`, and the comparison of schedules by simulation under them.

They start fast, importing neither torch nor Megatron.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.files import cannot_write, parse_json, read_text, write_text
from megatron_ext.schedules.drawing import render, svg
from megatron_ext.schedules.generators.catalog import (
    CSV_PREFIX,
    MAX_PASSES,
    MAX_RANKS,
    generate,
    get,
    registered,
)
from megatron_ext.schedules.search.length_balance import (
    LengthCost,
    best_order,
    deal_out,
    fills_of,
    makespan_of,
    packs_in_file_order,
    shortest,
)
from megatron_ext.schedules.search.patience import gains, while_late
from megatron_ext.schedules.search.simulate import Timeline, simulate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.validation import check_actions

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option, Schedule

_Subparsers = argparse._SubParsersAction
# Among the parsed arguments, but no flags: what this module and those in `tools` set for `plan`.
_ALWAYS = (
    *("run", "run_compared", "run_simulated", "parser", "command"),
    "model_flags",  # without a model they are unknown arguments
)


def add_subcommand(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `plan` and `plot`; the parsed namespace's `run` attribute executes the command."""
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s --pp P --microbatches M [options]\n"
        "       %(prog)s --trace-dir DIR [options]\n"
        "       %(prog)s --model PATH --devices NxKIND --global-batch-size B [options] [-- FLAGS]",
        help="compare pipeline schedules by simulation",
        description="Simulate pipeline schedules and rank them by the time of one step.",
    )
    parser.add_argument(
        "--schedule",
        nargs=1,
        default=["all"],
        metavar="NAME|all",
        help=f"{_names()} (default: all of them)",
    )
    _add_sizes(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--use-dpp",
        action="store_true",
        help="also show the gain or loss of a dynamic order over each table",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="lengths of the samples in tokens, one a line, or JSON lines: predict what balancing "
        "by cost gains",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="T", help="most tokens of a micro-batch, with --lengths"
    )
    parser.add_argument(
        "--replicas", type=int, metavar="D", help="data-parallel replicas, with --lengths"
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
        help="instead of --length-costs: width of a model with a feed-forward network of 4H",
    )
    parser.set_defaults(run=_run_plan)

    parser = subparsers.add_parser(
        "plot",
        usage="%(prog)s NAME [NAME ...] --pp P --microbatches M [-o FILE] [options]",
        help="draw pipeline schedules",
        description="Draw one pipeline schedule, or several below each other, in the terminal or "
        "into a file.",
    )
    names = parser.add_argument("schedule", metavar="NAME", nargs="+", help=_names())
    names.completer = lambda **_: list(registered())  # type: ignore[attr-defined] # argcomplete's
    _add_sizes(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=".svg (picture), .csv (the table, as torch.distributed.pipelining writes it) or .json",
    )
    parser.add_argument(
        "--use-dpp",
        action="store_true",
        help="draw each schedule twice while messages are late at random: in its own order, and in "
        "the dynamic one",
    )
    parser.set_defaults(run=_run_plot)


def _names() -> str:
    return f"{', '.join(registered(unlisted=True))} or csv:FILE"


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, metavar="P", help="ranks of the pipeline")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="micro-batches of the pipeline in one step"
    )
    parser.add_argument("--chunks", type=int, metavar="V", help="stages on each rank (interleaved)")
    for generator in registered(unlisted=True).values():
        for key, values in generator.options.items():
            parser.add_argument(
                generator.flag(key),
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
        help="run forwards and backwards of different micro-batches as pairs, each with its expert "
        "communication behind the computation of the other",
    )
    of_forward = "a forward that is core attention, which grows with the square of the length"
    of_both = "a forward and of an input gradient that is expert communication"
    for flag, default, share in (
        ("--attention", 0.0, f"{of_forward}, for --slices"),
        ("--all-to-all", 0.0, f"{of_both}, for --pairs"),
        ("--hides", 1.0, "what could run behind computation in a pair that does"),
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
        help="latency of a message, in the unit of --costs (default: 0)",
    )


def _costs(args: argparse.Namespace) -> Costs:
    try:
        forward, input_gradient, weight = map(float, args.costs.split(","))
    except ValueError:
        raise ScheduleError(
            f"--costs needs three numbers F,I,W, got {args.costs!r}; for example --costs 1,1,1"
        ) from None
    # A table of a file has slices and pairs of its own.
    is_file = any(name.startswith(CSV_PREFIX) for name in args.schedule)
    for flag, value, needed, is_there in (
        ("--attention", args.attention > 0, "--slices", args.slices != 1),
        ("--hides", args.hides != 1, "--pairs", args.pairs),
    ):
        if value and not (is_there or is_file):
            raise ScheduleError(f"{flag} is for {needed}; add it, or leave {flag} out")
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
    """Return the given options of each schedule, by its name."""
    given: dict[str, dict[str, Option]] = {}
    for destination, value in vars(args).items():
        name, _, key = destination.partition(" ")
        if key and value is not None:
            if not {name, "all"}.intersection(args.schedule):
                named = ", ".join(args.schedule)
                raise ScheduleError(f"--{name}-{key} is for {name}, not for {named}; leave it out")
            given.setdefault(name, {})[key] = value
    return given


def _check_sizes(args: argparse.Namespace) -> None:
    if all(name.startswith(CSV_PREFIX) for name in args.schedule):
        return
    sizes = (("--pp", args.pp), ("--microbatches", args.microbatches))
    missing = [flag for flag, value in sizes if value is None]
    if missing:
        verb, them = ("are", "them") if len(missing) > 1 else ("is", "it")
        raise ScheduleError(
            f"{' and '.join(missing)} {verb} missing; give {them} (only csv:FILE has its own size)"
        )
    for flag, value in sizes:
        most = MAX_RANKS if flag == "--pp" else MAX_PASSES // max(args.pp, 1)
        beside = "" if flag == "--pp" else f" for {args.pp} ranks"
        if value > most:
            raise ScheduleError(
                f"{flag} {value} is more than can be planned{beside}; use at most {most}"
            )
    if args.pp == 1:
        raise ScheduleError("--pp 1 is not a pipeline, there is nothing to schedule; use 2 or more")


def refuse_others(args: argparse.Namespace, taken: Collection[str], reason: str) -> None:
    """Refuse what one use of `plan` does not take, for a reason with the flag in place of `{}`.

    Raises:
        ArgumentsError: The reason.
    """
    for name, value in vars(args).items():
        if name not in (*taken, *_ALWAYS) and value != args.parser.get_default(name):
            raise ArgumentsError(reason.format("--" + re.sub("[_ ]", "-", name)))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the cycle collector off: it would visit millions of tuples, which form no cycles."""
    # A program that calls this may have turned it off for reasons of its own.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run_lengths(args: argparse.Namespace) -> int:
    """Predict what balancing by cost gains."""
    for flag, value in (
        ("--use-dpp", args.use_dpp),
        ("--chunks", args.chunks),
        ("--pairs", args.pairs),
        ("--slices", args.slices != 1),
    ):
        if value:
            raise ScheduleError(f"{flag} cannot be combined with --lengths; leave it out")
    if args.schedule[0].startswith(CSV_PREFIX):
        name = args.schedule[0]
        raise ScheduleError(f"--lengths simulates registered schedules, not {name}; name one")
    if args.max_tokens is None:
        raise ScheduleError("--max-tokens is missing; give what a micro-batch holds at most")
    if (args.length_costs is None) == (args.hidden_size is None):
        raise ScheduleError(
            "--lengths needs --length-costs A,B or --hidden-size H, one of them, to know what a "
            "length costs; for example --hidden-size 4096"
        )
    if args.length_costs is not None:
        cost = LengthCost.parse(args.length_costs)
    else:
        cost = LengthCost.of_model(args.hidden_size)
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
    found, left_out = predict_lengths(lengths, args.schedule[0], sizes, cost, _costs(args))
    if args.json:
        print(json.dumps([gains._asdict() for gains in found], indent=1))
    else:
        heads = ("schedule", "file order", "order", "pack", "bound", "gain of pack")
        rows: list[tuple[str, ...]] = [heads]
        for name, *steps in found:
            gained = steps[0] / steps[2]
            rows.append((name, *(f"{step:.4g}" for step in steps), f"{gained:.3f}"))
        print(aligned(rows))
        print(
            f"\nsteps, mean of at most {_MAX_BATCHES} global batches; 1 = forward of the mean "
            "micro-batch on 1/pp of the model\norder, pack: train with --pipeline-balance order or "
            "pack"
        )
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


@_without_garbage_collection()
def _run_plan(args: argparse.Namespace) -> int:
    for name in ("max_tokens", "replicas", "length_costs", "hidden_size"):
        if args.lengths is None and getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ScheduleError(f"{flag} is for --lengths FILE; add it, or leave {flag} out")
    _check_sizes(args)
    if args.lengths is not None:
        return _run_lengths(args)
    sizes = (args.pp, args.microbatches, _costs(args), args.chunks, _options(args))
    timelines, left_out = compare(args.schedule[0], *sizes, pairs=args.pairs, slices=args.slices)
    if args.json:
        shown = [figures(timeline) for timeline in timelines]
        if args.use_dpp:
            for row, timeline in zip(shown, timelines, strict=True):
                row["use_dpp"] = gains(timeline.schedule, _costs(args))._asdict()
        print(json.dumps(shown, indent=1))
    else:
        _print_plan(args, timelines)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


# Schedules whose flags `plan` prints; `--schedule NAME` prints those of any.
_WITH_FLAGS = 3


def _print_plan(args: argparse.Namespace, timelines: list[Timeline]) -> None:
    """Print the comparison, a recommendation with its flags, and the gain of `--use-dpp`."""
    print(table(timelines))
    unit = "1 = forward of 1/pp of the model" if args.costs == "1,1,1" else "in the unit of --costs"
    print(f"\ntimes: {unit}; activations: in micro-batches on 1/pp of the model")
    width = max(len(timeline.schedule.label) for timeline in timelines)
    if any(timeline.schedule.num_slices > 1 for timeline in timelines):
        print("keys, values: of micro-batches in slices, with their gradients, 1 = as activations")
    if not args.pairs and args.slices == 1:
        best, *others = timelines
        if others:
            advice = f"\nrecommended: {best.schedule.label}"
            # The fastest may hold every weight twice, for which a large model has no room.
            copies = best.schedule.weight_copies
            one = next((t for t in others if t.schedule.weight_copies == 1), None)
            if copies > 1 and one is not None:
                advice += f" where {copies} copies of the weights fit, else {one.schedule.label}"
            print(advice)
        first = timelines[:_WITH_FLAGS]
        print(f"\nflags{' of the first three' if len(first) < len(timelines) else ''}:")
        for timeline in first:
            label = timeline.schedule.label.ljust(width)
            print(f"  {label}  {training_flags(timeline.schedule, timeline.costs)}")
    if not args.use_dpp:
        return
    print("\nwith --use-dpp, time of the table's own order over time of the dynamic one:")
    costs = _costs(args)
    for timeline in timelines:
        found = gains(timeline.schedule, costs)
        label = timeline.schedule.label.ljust(width)
        print(
            f"  {label}  {found.quiet:.3f} on quiet links, {found.late:.3f} where messages are "
            f"late at random: {found.advice}"
        )


@_without_garbage_collection()
def _run_plot(args: argparse.Namespace) -> int:
    _check_sizes(args)
    if "all" in args.schedule:
        raise ScheduleError("plot draws schedules by name; name them, or compare all with plan")
    sizes = (args.pp, args.microbatches, _costs(args), args.chunks, _options(args))
    timelines = [
        compare(name, *sizes, pairs=args.pairs, slices=args.slices)[0][0] for name in args.schedule
    ]
    if args.use_dpp:
        timelines = [drawn for timeline in timelines for drawn in while_late(timeline)]
    if args.output is None:
        watched = sys.stdout.isatty()
        width = shutil.get_terminal_size((100, 24)).columns if watched else 100
        coloured = watched and not os.environ.get("NO_COLOR")
        print("\n\n".join(render.picture(t, width, coloured=coloured) for t in timelines))
        return 0
    kind, schedule = args.output.suffix, timelines[0].schedule
    if kind not in (".svg", ".csv", ".json"):
        raise ScheduleError(f"{args.output}: unknown file type; use .svg, .csv or .json")
    if kind != ".svg" and len(timelines) > 1:
        raise ScheduleError(f"{args.output} holds one schedule; name one, or draw several as .svg")
    if kind == ".svg":
        text = svg.draw(*timelines)
    elif kind == ".csv":
        text = table_files.csv_text(schedule)
    else:
        text = table_files.json_text(schedule, starts=timelines[0].starts, ends=timelines[0].ends)
    try:
        write_text(args.output, text)
    except OSError as error:
        remedy = "make room, or give another file with -o"
        raise ScheduleError(cannot_write(args.output, error, remedy)) from error
    print("\n".join([*map(render.caption, timelines), f"wrote {args.output}"]))
    if kind == ".csv" and schedule.placement.twins == 2:
        print(
            f"the CSV holds one of the two mirrored pipelines ({schedule.pp // 2} ranks)",
            file=sys.stderr,
        )
    return 0


def evaluate(schedule: Schedule, costs: Costs) -> Timeline:
    """Check and simulate a schedule.

    Raises:
        ScheduleError: The table is wrong.
    """
    check_actions(schedule)
    return simulate(schedule, costs)


def compare(
    name: str,
    pp: int | None,
    num_microbatches: int | None,
    costs: Costs,
    chunks: int | None = None,
    options: Mapping[str, Mapping[str, Option]] | None = None,
    *,
    pairs: bool = False,
    slices: int = 1,
) -> tuple[list[Timeline], list[str]]:
    """Simulate one schedule, or with `all` every schedule that the sizes allow.

    Args:
        name: A registered schedule, `csv:FILE`, or `all`.
        pp: Ranks of the pipeline world.
        num_microbatches: Micro-batches of that world in one step.
        costs: Durations of actions and latencies of links.
        chunks: Stages on each rank; with `all`, for schedules that leave their number open.
        options: Further options by the name of the schedule.
        pairs: Whether forwards and backwards run as pairs (`search/pairing.py`).
        slices: Slices of each micro-batch (`search/slicing.py`).

    Returns:
        The simulations, shortest first, and with `all` the reasons why others are left out.

    Raises:
        ScheduleError: The schedule, or with `all` every schedule, is impossible for these sizes.
    """
    options = options or {}
    kind: dict[str, Any] = {"costs": costs, "pairs": pairs, "slices": slices}
    if name != "all":
        kind |= options.get(name, {})
        schedule = generate(name, pp, num_microbatches, chunks, **kind)
        return [evaluate(schedule, costs)], []
    wanted: list[tuple[str, Mapping[str, Option]]] = []
    for generator in registered().values():
        fixed = dict(options.get(generator.name, {}))
        if generator.free_chunks and chunks is not None:
            fixed["chunks"] = chunks
        for variant in generator.variants:
            # With the user's choices fixed, variants may be alike.
            each = generator.name, {**variant, **fixed}
            wanted += [] if each in wanted else [each]
    schedules, left_out = _possible(wanted, pp, num_microbatches, **kind)
    if not schedules:
        raise ScheduleError("no schedule can run with these sizes:\n" + "\n".join(left_out))
    found = [evaluate(schedule, costs) for schedule in schedules]
    found.sort(key=lambda timeline: (timeline.makespan, timeline.peak_activations))
    return found, left_out


def _possible(
    wanted: Sequence[tuple[str, Mapping[str, Any]]],
    pp: int | None,
    num_microbatches: int | None,
    **kind: Any,
) -> tuple[list[Schedule], list[str]]:
    """Return the tables of the names and options that the sizes allow, and why not the others."""
    schedules, reasons = [], []
    for name, options in wanted:
        try:
            schedules.append(generate(name, pp, num_microbatches, **kind, **options))
        except ScheduleError as error:  # noqa: PERF203 - sizes are refused by an exception
            reasons.append(str(error))
    return schedules, list(dict.fromkeys(reasons))  # variants share reasons


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a simulation under the keys of `plan --json`."""
    schedule = timeline.schedule
    of_slices = {
        "slices": list(schedule.slices),
        "peak_keys_and_values": _number(timeline.keys_and_values),
    }
    return {
        "schedule": schedule.name,
        "options": dict(schedule.options),
        "pp": schedule.pp,
        "num_microbatches": schedule.total_microbatches,
        "makespan": _number(timeline.makespan),
        "ideal": _number(timeline.ideal),
        "bubble": _number(timeline.bubble),
        "bubble_ratio": round(timeline.bubble_ratio, 6),
        "peak_activations": _number(timeline.peak_activations),
        "peak_activations_per_rank": [_number(p) for p in timeline.peak_activations_per_rank],
        **(of_slices if schedule.num_slices > 1 else {}),
        "weight_copies": schedule.weight_copies,
        "p2p_messages": timeline.messages,
        **({"all_to_all_hidden": _number(timeline.hidden)} if timeline.costs.all_to_all else {}),
    }


def _number(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded


def training_flags(schedule: Schedule, costs: Costs = UNIT) -> str:
    """Return the training flags of a schedule for given costs."""
    size = schedule.num_stages if schedule.disaggregated else schedule.pp
    flags = f"--pipeline-model-parallel-size {size} "
    by_name = f"--pipeline-schedule {schedule.name}"
    if schedule.name.startswith(CSV_PREFIX):
        flags += by_name
    else:
        generator, chunks = get(schedule.name), schedule.num_stages // schedule.placement.num_ranks
        flags += (generator.flags or by_name).format(chunks=chunks)
        for key, (default, *_) in generator.options.items():
            if (value := schedule.options.get(key, default)) != default:
                flags += f" {generator.flag(key)} {value}"
    if schedule.num_slices > 1:
        flags += f" --pipeline-slices {schedule.num_slices}"
    # Shares of attention and of all-to-all are for the simulation alone.
    flags += "" if str(costs) == str(UNIT) else f" --pipeline-costs {costs}"
    return flags + " --overlap-moe-expert-parallel-comm" * bool(schedule.pairs)


_HEADS = ("schedule", "makespan", "ideal", "bubble", "bubble %", "peak act.", "weights", "messages")


def table(timelines: Sequence[Timeline]) -> str:
    """Return the comparison as text, in the order given."""
    hides = any(timeline.costs.all_to_all for timeline in timelines)
    slices = any(timeline.schedule.num_slices > 1 for timeline in timelines)
    heads = [*_HEADS, *(["hidden %"] if hides else []), *(["keys, values"] if slices else [])]
    rows: list[list[str]] = [heads]
    rows += (
        [
            timeline.schedule.label,
            f"{timeline.makespan:g}",
            f"{timeline.ideal:g}",
            f"{timeline.bubble:g}",
            f"{100 * timeline.bubble_ratio:.1f}",
            f"{timeline.peak_activations:g}",
            f"{timeline.schedule.weight_copies}x",
            str(timeline.messages),
            *([f"{100 * timeline.hidden:.0f}"] if hides else []),
            *([f"{timeline.keys_and_values:g}"] if slices else []),
        ]
        for timeline in timelines
    )
    return aligned(rows)


_MAX_LENGTHS_BYTES = 1 << 30
_LENGTH_FIELDS = ("length", "num_tokens", "tokens")
# Global batches that are simulated: the first ones of the file.
_MAX_BATCHES = 4


def read_lengths(path: Path) -> list[int]:
    """Read the lengths of samples in tokens: one number a line, or JSON lines.

    A JSON line is a number, a list (its length counts), or an object with `length`, `num_tokens` or
    `tokens`, which hold either. Empty lines do not count.

    Raises:
        ScheduleError: The file cannot be read, or a line holds no length.
    """
    try:
        lines = read_text(path, _MAX_LENGTHS_BYTES).splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ScheduleError(
            f"--lengths {path} cannot be read: {reason}; give a file with one length a line"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            value = next((value[name] for name in _LENGTH_FIELDS if name in value), None)
        if isinstance(value, list):
            value = len(value)
        # To Python, True is a whole number.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(
                f"--lengths {path}, line {number}: {line.strip()[:40]!r} is not a length; write a "
                f"whole number of 1 or more, or JSON with {', '.join(_LENGTH_FIELDS)}"
            )
        found.append(value)
    if not found:
        raise ScheduleError(f"--lengths {path} holds no length; write one number a line")
    return found


class Sizes(NamedTuple):
    """How much one step takes."""

    pp: int
    num_microbatches: int
    """Of one replica."""
    num_replicas: int
    max_tokens: int
    """Of a micro-batch."""


class LengthGains(NamedTuple):
    """Steps of one schedule, in forwards of the mean micro-batch on 1/pp of the model.

    All are means over the global batches.
    """

    schedule: str
    """With its options."""
    in_file_order: float
    order: float
    """With `--pipeline-balance order`."""
    pack: float
    """With `--pipeline-balance pack`: replicas share out the micro-batches, and order them."""
    bound: float
    """No packing and no order can beat it."""


def predict_lengths(
    lengths: Sequence[int], name: str, sizes: Sizes, cost: LengthCost, costs: Costs
) -> tuple[list[LengthGains], list[str]]:
    """Simulate schedules with the lengths of a data set.

    The lengths are in the order in which a sampler reads them, the costs those of the mean
    micro-batch. `all` leaves mirrored pipelines out.

    Returns:
        The predictions, shortest step with `pack` first, and why other schedules are left out.

    Raises:
        ScheduleError: The lengths do not fill one global batch, a sample is longer than a
            micro-batch, or no schedule can run these sizes.
    """
    wanted = sizes.num_microbatches * sizes.num_replicas
    packs = list(islice(packs_in_file_order(lengths, sizes.max_tokens), wanted * _MAX_BATCHES))
    if len(packs) < wanted:
        raise ScheduleError(
            f"the lengths fill {len(packs)} micro-batches of {sizes.max_tokens} tokens, one step "
            f"takes {sizes.num_microbatches} on each of {sizes.num_replicas} replicas; give more "
            "lengths, or lower --microbatches, --replicas or --max-tokens"
        )
    # Of each global batch the costs of its micro-batches as replicas take turns to read them, and
    # of its samples, over that of its mean micro-batch.
    batches = []
    for first in range(0, len(packs) - wanted + 1, wanted):
        read = [cost.of_pack(pack) for pack in packs[first : first + wanted]]
        samples = [length for pack in packs[first : first + wanted] for length in pack]
        unit = cost.of_pack(samples) / wanted
        of_samples = [cost.of_length(length) / unit for length in samples]
        batches.append(([each / unit for each in read], of_samples))
    single: list[tuple[str, Mapping[str, Option]]] = []
    refused = []
    for generator in registered().values():
        if name in ("all", generator.name) and generator.twins > 1:
            refused.append(
                f"{generator.name} mirrors two pipelines, whose lengths are not simulated; take "
                "another schedule"
            )
        elif name in ("all", generator.name):
            single += ((generator.name, options) for options in generator.variants)
    schedules, others = _possible(single, sizes.pp, sizes.num_microbatches, costs=costs)
    refused += others
    if not schedules:
        refused = refused or [f"--lengths simulates registered schedules, not {name}; name one"]
        raise ScheduleError("; ".join(refused))

    def step(schedule: Schedule, rows: Sequence[Sequence[float]], *, ordered: bool) -> float:
        orders = [best_order(schedule, r, costs) if ordered else range(len(r)) for r in rows]
        each = zip(rows, orders, strict=True)
        return max(makespan_of(schedule, row, order, costs) for row, order in each)

    replicas, found = sizes.num_replicas, []
    for schedule in schedules:
        steps = []
        for read, of_samples in batches:
            rows = [read[first::replicas] for first in range(replicas)]
            shares = deal_out(read, replicas, fills_of(schedule.placement))
            dealt = [[read[number] for number in share] for share in shares]
            in_file_order = step(schedule, rows, ordered=False)
            order, pack = (step(schedule, each, ordered=True) for each in (rows, dealt))
            bound = shortest(of_samples, replicas, schedule.placement, costs)
            steps.append((in_file_order, order, pack, bound))
        found.append(LengthGains(schedule.label, *map(fmean, zip(*steps, strict=True))))
    return sorted(found, key=lambda gains: gains.pack), refused


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)
