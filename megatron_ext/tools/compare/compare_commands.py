"""The flags of `compare`. Imports only what is needed to parse them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.tools.launch.launch_commands import add_hosts, add_job, whole_number

_MIN_STEPS = 4
"""Three warm-up steps plus one measured step."""


def add_subcommand(subparsers: Any) -> None:
    """Register `compare`."""
    parser = subparsers.add_parser(
        "compare",
        help="measure a recipe under several pipelines and check that the numbers match",
        usage="megatron-ext compare [--with SCHEDULE|'FLAGS']... [options of launch] -- SCRIPT.py "
        "FLAGS...\n       megatron-ext compare --folders REFERENCE CANDIDATE [ROUNDED]",
        description="Train a recipe for a few steps under Megatron's own schedule and under each "
        "candidate, with the same weights, data and ranks, and compare speed, memory and numbers. "
        "Exit code 0: the numbers match as closely as docs/schedules.md promises; 3: they differ; "
        "2: a run was rejected; 1: a run failed.",
    )
    add_comparison(parser)
    add_hosts(parser)
    add_job(parser)
    parser.add_argument(
        "command_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    # `launch` settings that `compare` does not expose as flags.
    parser.set_defaults(
        run=_run,
        per_node=False,
        run_id=None,
        raw=False,
        spares=0,
    )
    parser.set_defaults(keep_going=False, reserve=None)


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are specific to `compare`."""
    add = parser.add_argument_group("comparison").add_argument
    add(
        "--with",
        dest="additions",
        action="append",
        default=[],
        metavar="SCHEDULE|'FLAGS'",
        help="another candidate: a schedule name, or flags that replace the recipe's flags from "
        "this package (write a single flag as --with=FLAG); may be repeated",
    )
    add(
        "--best",
        type=whole_number(1, 100),
        default=0,
        metavar="N",
        help="add the N schedules that the planner expects to be fastest, as ranked by "
        "--pipeline-schedule auto",
    )
    add(
        "--trace-dir",
        metavar="DIR",
        help="with --best: rank the schedules by the times of this traced run",
    )
    add(
        "--reference",
        default="",
        metavar="SCHEDULE|'FLAGS'",
        help="flags of the run to compare against (default: none, so Megatron's own schedule)",
    )
    add(
        "--self",
        dest="against_itself",
        action="store_true",
        help="train the unchanged recipe twice and check that both runs are bit-identical",
    )
    add(
        "--locate",
        action="store_true",
        help="if a candidate's numbers differ, train it and the reference again, record digests of "
        "their tensors, and name the first tensor that differs",
    )
    add(
        "--calibrate",
        action="store_true",
        help="if a candidate sums in a different order, learn the tolerances from an extra run of "
        "the reference that perturbs the last digits of all activations",
    )
    add(
        # The defaults live in `rounds.py` so that `--folders` can tell
        # which flags the user has set.
        "--steps",
        type=whole_number(_MIN_STEPS, 10**6),
        metavar="N",
        help="steps per run; the first three are not measured (default: 20)",
    )
    add(
        "--rounds",
        type=whole_number(1, 100),
        metavar="N",
        help="runs per candidate; every other round goes in reverse order, which cancels steady "
        "drift in the machine's speed (default: 2)",
    )
    add(
        "--speed-only",
        action="store_true",
        help="compare speed and memory only: each run initializes its own weights, and the "
        "numbers are not compared",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the candidates and print the runs and how closely their numbers must match, "
        "without training",
    )
    add(
        "--folders",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="without training, compare the digests that two runs recorded with "
        "MEGATRON_EXT_DIGESTS=DIR; if there is a third folder, also recorded with "
        "MEGATRON_EXT_DIGESTS_ROUNDING=1, learn the tolerances from it",
    )
    add(
        "--json",
        action="store_true",
        help="print JSON, including the numbers for every step",
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder for the page, logs and traces; all hosts must share it (default: "
        "compare/TIME)",
    )


def launch_words(words: Sequence[str]) -> list[str]:
    """Return the options for `launch` among the words between `compare` and `--`."""
    parser = argparse.ArgumentParser(add_help=False)
    add_comparison(parser)
    # This parser knows only the flags of `compare`, so it returns everything else.
    _, options = parser.parse_known_args(list(words))
    return options


def _run(args: argparse.Namespace) -> int:
    words = sys.argv[1:]
    # Take the words between the subcommand and the training command. `compare` uses
    # some of them; the rest are options for `launch`, passed unchanged to every run.
    end = len(words) - len(args.command_words)
    options = launch_words(words[1:end])
    if args.folders:
        from megatron_ext.tools.compare.folders import compare_folders

        return compare_folders(args, options)
    from megatron_ext.tools.compare.rounds import compare

    return compare(args, options, words)
