"""The subcommands `aggregate` and `report`, and `plan --trace-dir`. All imports are cheap."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import files
from megatron_ext.errors import ArgumentsError, DataError
from megatron_ext.tools.schedule_commands import refuse_others

if TYPE_CHECKING:
    from megatron_ext.tools.trace.aggregate import Run

_Subparsers = argparse._SubParsersAction


def add_subcommands(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Register `aggregate` and `report`."""
    aggregate = subparsers.add_parser(
        "aggregate",
        usage="%(prog)s --trace-dir DIR [-o FILE] [--detect]",
        help="merge all ranks' traces into one Chrome trace",
        description="Merge a run's traces for ui.perfetto.dev or chrome://tracing, with one row "
        "per rank and arrows from sends to receives.",
    )
    aggregate.set_defaults(run=_run_aggregate)
    report = subparsers.add_parser(
        "report",
        usage="%(prog)s --trace-dir DIR [-o FILE]",
        help="create a page that explains a traced run",
        description="Write a self-contained HTML file that shows measured and planned timelines, "
        "what each rank waited for, memory, links and settings.",
    )
    report.set_defaults(run=_run_report)
    for parser, name in ((aggregate, "NAME-aggregated.json"), (report, "report.html")):
        folder = "the run's folder, such as benchmark/data-1-pipeline-4-tensor-1-pp"
        parser.add_argument(
            "--trace-dir",
            # MegatronApp's name for the flag.
            "--benchmark_dir",
            type=Path,
            metavar="DIR",
            required=True,
            help=folder,
        )
        output = f"output file (default: {name} in the run's folder)"
        parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    aggregate.add_argument(
        "--detect",
        action="store_true",
        help="also list slow ranks and links; exit with code 1 if there are any",
    )


def add_to_plan(subparsers: _Subparsers[argparse.ArgumentParser]) -> None:
    """Add the flags for measured costs to the existing `plan` subcommand."""
    parser = subparsers.choices["plan"]
    parser.add_argument(
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="predict the step time of every schedule and policy from the sizes and costs of the "
        "traced run in this folder; with --lengths, take the cost per sample length from that run",
    )
    parser.add_argument(
        "--memory-gb", dest="memory_gib", type=_gibibytes, help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--memory-gib",
        type=_gibibytes,
        metavar="G",
        help="with --trace-dir: skip schedules that need more memory than this on a rank; with "
        "--devices: memory per device (default: the device's actual memory)",
    )
    # Keep `plan`'s original function, which runs without a trace.
    parser.set_defaults(run=_run_plan, run_simulated=parser.get_default("run"))


def _run_plan(args: argparse.Namespace) -> int:
    simulated: Callable[[argparse.Namespace], int] = args.run_simulated
    # With --lengths, the trace only supplies --length-costs and missing sizes.
    if args.trace_dir is not None and args.lengths is not None:
        _take_length_costs(args)
        return simulated(args)
    if args.trace_dir is not None:
        return _run_forecast(args)
    if args.memory_gib is not None:
        raise ArgumentsError(
            "--memory-gib limits the memory for a traced run or a layout; add --trace-dir DIR, or "
            "--devices 64xh100"
        )
    return simulated(args)


def _take_length_costs(args: argparse.Namespace) -> None:
    """Set `--length-costs`, and any sizes that the user did not set, from the traced run."""
    from megatron_ext.tools.trace import aggregate
    from megatron_ext.tools.trace.length_costs import measured_length_cost

    for name in ("length_costs", "hidden_size", "memory_gib"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ArgumentsError(
                f"--lengths takes the cost per sample length from --trace-dir; remove {flag}"
            )
    run = aggregate.read_run(args.trace_dir)
    cost, errors = measured_length_cost(run)
    # Sizes on the command line take precedence over sizes from the run.
    table = run.schedule
    if table is not None:
        num_replicas = 1 + max(rank.header.data for rank in run.surveys)
        sizes = {
            "pp": table.pp,
            "microbatches": table.num_microbatches,
            "replicas": num_replicas,
        }
        for name, size in sizes.items():
            if getattr(args, name) is None:
                setattr(args, name, size)
    args.length_costs = f"{cost.linear:.6g},{cost.quadratic:.6g}"
    print(
        f"--length-costs {args.length_costs}: seconds over all stages, per token and per squared "
        f"length of a sample; {len(errors)} measurements, median error "
        f"{100 * statistics.median(errors):.1f} %",
        file=sys.stderr,
    )


def _run_forecast(args: argparse.Namespace) -> int:
    """Predict every schedule's step time from a trace."""
    refuse_others(
        args,
        ("trace_dir", "memory_gib", "json"),
        "--trace-dir takes sizes and costs from the run and predicts every schedule, so {} has no "
        "effect; remove it",
    )
    # Import here: the forecast imports every schedule, which would slow down `--help`.
    from megatron_ext.tools.trace import aggregate, forecast

    prediction = forecast.predict(aggregate.read_run(args.trace_dir), args.memory_gib)
    if args.json:
        print(json.dumps([asdict(row) for row in prediction.predictions], indent=1))
    else:
        print(forecast.table(prediction))
    for note in prediction.notes:
        print(note, file=sys.stderr)
    return 0


def _gibibytes(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number above 0")


def _run_aggregate(args: argparse.Namespace) -> int:
    from megatron_ext.tools.trace import aggregate, imbalance, survey

    run = aggregate.read_run(args.trace_dir)
    output = args.output or aggregate.aggregated_name(args.trace_dir)
    with _writing(output):
        num_bytes = aggregate.write_chrome_trace(run, output)
    _write_costs(run)
    _print_notes(run.notes)
    print(survey.text(run.surveys))
    for sentence in imbalance.sentences(run):
        print(sentence)
    print(
        f"wrote {output} ({num_bytes / 2**20:.1f} MiB); open it at https://ui.perfetto.dev"
    )
    if not args.detect:
        return 0
    # With --detect, a finding counts as a failure, so scripts can check the exit code.
    slow_items = aggregate.slow(run)
    for item in slow_items:
        print(f"slow {item.name}: {item.factor:.2f} x the median")
    if not slow_items:
        rank = aggregate.SLOW_RANK
        link = aggregate.SLOW_LINK
        print(f"no rank takes {rank:g} x and no link {link:g} x the median time")
    for host, shared in run.shared_cpus.items():
        print(
            f"{shared} of {host}: their links are not judged, and a rank may be slow because it "
            "waited for a CPU; to find out, trace with a CPU for each rank"
        )
    return 1 if slow_items else 0


def _write_costs(run: Run) -> None:
    """Write the costs for `--pipeline-schedule auto:DIR`, if the traces contain them all."""
    from megatron_ext.planning.measured import COSTS_FILE, SIZES, MeasuredCosts
    from megatron_ext.tools.trace.measured_costs import measured_costs

    if run.schedule is None:
        return
    try:
        costs = measured_costs(run, run.schedule)
    except DataError:
        # Some ranks' traces are missing. The Chrome trace does not need them.
        return
    # Also store the sizes, so that a later run can check if the
    # costs are for its model.
    sizes = {name: run.settings[name] for name in SIZES if name in run.settings}
    measured = MeasuredCosts(
        stages=costs.stages,
        latency_s=costs.latency,
        all_to_all=costs.all_to_all,
        sizes=sizes,
    )
    path = run.directory / COSTS_FILE
    try:
        files.write_text(path, measured.as_json())
    except OSError as error:
        line = files.cannot_write(
            path, error, "--pipeline-schedule auto cannot use this run"
        )
        print(line, file=sys.stderr)
        return
    print(f"wrote {path}, for --pipeline-schedule auto:{run.directory}")


def _run_report(args: argparse.Namespace) -> int:
    from megatron_ext.tools.trace import aggregate
    from megatron_ext.tools.trace.report import page

    run = aggregate.read_run(args.trace_dir)
    _print_notes(run.notes)
    output = args.output or args.trace_dir / "report.html"
    with _writing(output):
        files.write_text(output, page(run))
    print(f"wrote {output}")
    return 0


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turn errors from writing the file into a DataError with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free some space, or give another file with -o"
        raise DataError(files.cannot_write(output, error, remedy)) from error


def _print_notes(notes: Sequence[str]) -> None:
    # A run with thousands of ranks may have thousands of notes.
    for note in notes[:20]:
        print(f"note: {note}", file=sys.stderr)
    if len(notes) > 20:
        print(f"note: and {len(notes) - 20} more", file=sys.stderr)
