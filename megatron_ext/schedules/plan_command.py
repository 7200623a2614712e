"""The subcommands `plan` and `plot`; they start fast, importing neither torch nor Megatron."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.files import cannot_write, write_text
from megatron_ext.schedules import comparison, length_plan
from megatron_ext.schedules.drawing import render, svg
from megatron_ext.schedules.generators.catalog import MAX_PASSES, MAX_RANKS, registered
from megatron_ext.schedules.search.gains import gains
from megatron_ext.schedules.search.length_balance import LengthCost
from megatron_ext.schedules.table import csv_io, json_io
from megatron_ext.schedules.table.costs import Costs

if TYPE_CHECKING:
    from megatron_ext.schedules.search.simulate import Timeline
    from megatron_ext.schedules.table.actions import Option

__all__ = ["add_plan", "add_plot", "add_subcommand"]

_Subparsers = argparse._SubParsersAction


def add_subcommand(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `plan` and `plot`; the parsed namespace's `run` attribute executes the command."""
    add_plan(subparsers)
    add_plot(subparsers)


def add_plan(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="compare pipeline schedules by simulation",
        description="Simulates pipeline schedules and ranks them by the time of one step.",
    )
    parser.add_argument(
        "--schedule",
        nargs=1,
        default=["all"],
        metavar="NAME|all",
        help=f"{_names()} (default: all of them)",
    )
    _add_sizes(parser)
    parser.add_argument("--json", action="store_true", help="as a JSON list of objects")
    parser.add_argument(
        "--use-dpp",
        action="store_true",
        help="also show the gain or loss of a dynamic order over each table",
    )
    _add_lengths(parser)
    parser.set_defaults(run=_run_plan)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="lengths of the samples in tokens, one a line, or JSON lines: predict what balancing "
        "by cost gains",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="T", help="of a micro-batch, with --lengths"
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


def add_plot(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `plot`."""
    parser = subparsers.add_parser(
        "plot",
        help="draw pipeline schedules",
        description="Draws one pipeline schedule, or several below each other, in the terminal or "
        "into a file.",
    )
    parser.add_argument("schedule", metavar="NAME", nargs="+", help=_names())
    _add_sizes(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=".svg (picture), .csv (the table, as torch.distributed.pipelining writes it) or .json",
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
                help=f"of {generator.name} (default: {values[0]})",
            )
    parser.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="durations of forward, input gradient and weight gradient on 1/pp of the model, in "
        "any consistent unit (default: 1,1,1)",
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
    return Costs(forward, input_gradient, weight, latency=args.comm)


def _options(args: argparse.Namespace) -> dict[str, dict[str, Option]]:
    """Return the given options of each schedule, by its name."""
    said: dict[str, dict[str, Option]] = {}
    for destination, value in vars(args).items():
        name, _, key = destination.partition(" ")
        if key and value is not None:
            if not {name, "all"}.intersection(args.schedule):
                named = ", ".join(args.schedule)
                raise ScheduleError(f"--{name}-{key} is for {name}, not for {named}; leave it out")
            said.setdefault(name, {})[key] = value
    return said


def _check_sizes(args: argparse.Namespace) -> None:
    if all(name.startswith("csv:") for name in args.schedule):
        return
    for flag, value in (("--pp", args.pp), ("--microbatches", args.microbatches)):
        if value is None:
            raise ScheduleError(f"{flag} is missing; give it (only csv:FILE has its own size)")
        most = MAX_RANKS if flag == "--pp" else MAX_PASSES // min(max(args.pp, 1), MAX_RANKS)
        beside = "" if flag == "--pp" else f" for {args.pp} ranks"
        if value > most:
            raise ScheduleError(
                f"{flag} {value} is more than can be planned{beside}; use at most {most}"
            )
    if args.pp == 1:
        raise ScheduleError("--pp 1 is not a pipeline, there is nothing to schedule; use 2 or more")


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the cycle collector off: it would visit millions of tuples, which form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run_lengths(args: argparse.Namespace) -> int:
    """Predict what balancing by cost gains."""
    for flag, value in (("--use-dpp", args.use_dpp), ("--chunks", args.chunks)):
        if value:
            raise ScheduleError(f"{flag} cannot be combined with --lengths; leave it out")
    if args.max_tokens is None:
        raise ScheduleError("--max-tokens is missing; give what a micro-batch holds at most")
    sizes = length_plan.Sizes(args.pp, args.microbatches, _or_one(args.replicas), args.max_tokens)
    predicted = length_plan.predict(
        length_plan.read_lengths(args.lengths),
        args.schedule[0],
        sizes,
        _length_cost(args),
        _costs(args),
    )
    if args.json:
        print(json.dumps([asdict(gains) for gains in predicted.found], indent=1))
    else:
        print(length_plan.table(predicted.found))
        print(
            f"\nsteps, mean of {predicted.num_batches} global batches; 1 = forward of the mean "
            "micro-batch on 1/pp of the model\norder, pack: train with --pipeline-balance order or "
            "pack. repack: what a sampler would gain that packs samples anew by cost"
        )
    _print_left_out(predicted.left_out)
    return 0


def _or_one(value: int | None) -> int:
    return 1 if value is None else value


def _length_cost(args: argparse.Namespace) -> LengthCost:
    if (args.length_costs is None) == (args.hidden_size is None):
        raise ScheduleError(
            "--lengths needs --length-costs A,B or --hidden-size H, one of them, to tell what a "
            "length costs; for example --hidden-size 4096"
        )
    if args.length_costs is not None:
        return LengthCost.parse(args.length_costs)
    return LengthCost.of_model(args.hidden_size)


def _check_lengths(args: argparse.Namespace) -> None:
    if args.lengths is not None:
        return
    for name in ("max_tokens", "replicas", "length_costs", "hidden_size"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ScheduleError(f"{flag} is for --lengths FILE; add it, or leave {flag} out")


@_without_garbage_collection()
def _run_plan(args: argparse.Namespace) -> int:
    _check_lengths(args)
    _check_sizes(args)
    if args.lengths is not None:
        return _run_lengths(args)
    timelines, left_out = comparison.compare(
        args.schedule[0], args.pp, args.microbatches, _costs(args), args.chunks, _options(args)
    )
    if args.json:
        print(json.dumps([comparison.figures(timeline) for timeline in timelines], indent=1))
    else:
        print(comparison.table(timelines))
        _print_notes(args, timelines)
        if args.use_dpp:
            _print_dynamic(args, timelines)
    _print_left_out(left_out)
    return 0


def _print_left_out(reasons: list[str]) -> None:
    for reason in reasons:
        print(f"left out: {reason}", file=sys.stderr)


def _print_notes(args: argparse.Namespace, timelines: list[Timeline]) -> None:
    unit = "1 = forward of 1/pp of the model" if args.costs == "1,1,1" else "in the unit of --costs"
    print(f"\ntimes: {unit}; activations: 1 = one micro-batch on 1/pp of the model")
    print("\nflags:")
    width = max(len(timeline.schedule.label) for timeline in timelines)
    for timeline in timelines:
        label = timeline.schedule.label.ljust(width)
        print(f"  {label}  {comparison.training_flags(timeline.schedule, timeline.costs)}")


def _print_dynamic(args: argparse.Namespace, timelines: list[Timeline]) -> None:
    """Print for each table the gain of `--use-dpp`, and a recommendation."""
    print("\nwith --use-dpp, time of the table's own order over time of the dynamic one:")
    costs = _costs(args)
    width = max(len(timeline.schedule.label) for timeline in timelines)
    for timeline in timelines:
        if timeline.schedule.disaggregated:
            continue
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
    timelines = [comparison.compare(name, *sizes)[0][0] for name in args.schedule]
    if args.output is None:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        print("\n\n".join(render.picture(timeline, width) for timeline in timelines))
        return 0
    text = _file_text(timelines, args.output)
    try:
        write_text(args.output, text)
    except OSError as error:
        remedy = "make room, or give another file with -o"
        raise ScheduleError(cannot_write(args.output, error, remedy)) from error
    print("\n".join([*map(render.caption, timelines), f"wrote {args.output}"]))
    schedule = timelines[0].schedule
    if args.output.suffix == ".csv" and schedule.placement.twins == 2:
        print(
            f"the CSV holds one of the two mirrored pipelines ({schedule.pp // 2} ranks)",
            file=sys.stderr,
        )
    return 0


def _file_text(timelines: list[Timeline], path: Path) -> str:
    if path.suffix == ".svg":
        return svg.draw(*timelines)
    if path.suffix not in (".csv", ".json"):
        raise ScheduleError(f"{path}: unknown file type; use .svg, .csv or .json")
    if len(timelines) > 1:
        raise ScheduleError(f"{path} holds one schedule; name one, or draw several as .svg")
    [timeline] = timelines
    if path.suffix == ".csv":
        return csv_io.dumps(timeline.schedule)
    return json_io.dumps(timeline.schedule, starts=timeline.starts, ends=timeline.ends)
