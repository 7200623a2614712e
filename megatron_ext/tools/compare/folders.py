"""`compare --folders`: compares the digests recorded by two training runs, without training."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.errors import ArgumentsError
from megatron_ext.tools.compare import outcome
from megatron_ext.tools.compare.locate import Comparison, compare
from megatron_ext.tools.compare.operators import first_operator, place_of
from megatron_ext.tracing.digest_files import OPERATORS
from megatron_ext.tracing.operator_files import read_folder

_TRAINING_FLAGS = {
    "additions": "--with",
    "best": "--best",
    "trace_dir": "--trace-dir",
    "reference": "--reference",
    "against_itself": "--self",
    "locate": "--locate",
    "calibrate": "--calibrate",
    "steps": "--steps",
    "rounds": "--rounds",
    "dry_run": "--dry-run",
    "speed_only": "--speed-only",
    "output": "--output",
    "command_words": "the command after --",
}
"""Parsed argument -> its flag, for settings that only matter when training."""


def compare_folders(args: argparse.Namespace, launch_options: Sequence[str]) -> int:
    """Run `compare --folders` and return its exit code.

    Args:
        args: The flags of `compare`.
        launch_options: The words for `launch`. Must be empty.

    Raises:
        ArgumentsError: There are fewer than two or more than three folders, two folders are the
            same, or a flag applies only to training.
        DataError: A folder has no digests, damaged digests, or digests from a different kind of
            run.
    """
    for name, flag in _TRAINING_FLAGS.items():
        if getattr(args, name):
            raise ArgumentsError(
                f"--folders compares recorded digests without training; remove {flag}"
            )
    if launch_options:
        raise ArgumentsError(
            f"--folders launches nothing; remove {shlex.join(launch_options)}"
        )
    # argparse accepts any number of folders.
    folders: Sequence[Path] = args.folders
    if len(folders) not in (2, 3):
        raise ArgumentsError(
            f"--folders got {len(folders)}; pass the folders of the reference and the candidate, "
            "and optionally that of a run to learn tolerances from"
        )
    distinct_folders = {folder.resolve() for folder in folders}
    if len(distinct_folders) < len(folders):
        raise ArgumentsError(
            "--folders got the same folder twice; record each run in its own folder"
        )
    # `read_folder` returns nothing for a folder that has digests but no operators.
    if any(read_folder(folder) for folder in folders[:2]):
        if len(folders) > 2:
            raise ArgumentsError(
                "--folders got folders of operators, for which no tolerance can be learned; remove "
                f"{folders[2]}"
            )
        return _compare_operators(folders[0], folders[1], as_json=args.json)
    comparison = compare(*folders)
    code = outcome.EQUAL
    if comparison.difference is not None:
        code = outcome.DIFFERENT
    elif comparison.gap:
        code = outcome.FAILED
    if args.json:
        content = _as_json(comparison, code)
        print(json.dumps(content, indent=1, allow_nan=False))
    else:
        print(_text(comparison))
    return code


def _compare_operators(reference: Path, candidate: Path, *, as_json: bool) -> int:
    comparison = first_operator(reference, candidate)
    code = outcome.EQUAL if comparison.are_equal else outcome.DIFFERENT
    if as_json:
        content = {"operator": comparison.sentence, "exit_code": code}
        print(json.dumps(content, indent=1))
    else:
        print(comparison.sentence)
    return code


def _text(comparison: Comparison) -> str:
    difference = comparison.difference
    verdict = (
        f"no difference in {comparison.num_tensors:,} tensors over {comparison.num_steps} steps, "
        "counting the initial weights as one"
    )
    if comparison.gap:
        verdict += f"; equality is unproven, because {comparison.gap}"
    if difference is not None:
        verdict = difference.sentence()
    schedules = " and ".join(comparison.schedules)
    lines = [
        verdict,
        f"schedules: {schedules}",
        f"tolerance: {comparison.tolerance}",
        *comparison.notes,
    ]
    place = None if difference is None else place_of(difference)
    if place is not None:
        lines.append(
            "to find the operator, record both runs again in new folders, adding "
            f"{OPERATORS}={shlex.quote(str(place))}"
        )
    return "\n".join(lines)


def _as_json(comparison: Comparison, code: int) -> dict[str, Any]:
    difference = comparison.difference
    content: dict[str, Any] = asdict(comparison)
    if difference is not None:
        content["difference"] |= {
            "sentence": difference.sentence(),
            "tensor": difference.tensor,
        }
    finite: dict[str, Any] = outcome.with_finite_numbers({**content, "exit_code": code})
    return finite
