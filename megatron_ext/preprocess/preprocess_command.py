"""The `preprocess` subcommand."""

# ruff: noqa: T201 - a command reports on stdout and stderr

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_ext.errors import DataError
from megatron_ext.preprocess.corpus import check_inputs, kind_of, read_batches
from megatron_ext.preprocess.output import check_outputs, datasets, output_paths
from megatron_ext.preprocess.tokenizer import add_tokenizer_arguments

if TYPE_CHECKING:
    from megatron_ext.preprocess.encode import Encoder
    from megatron_ext.preprocess.progress import ProgressReporter

__all__ = ["add_subcommand", "run"]

_BATCH_BYTES = 1 << 20
_MIN_BYTES_PER_WORKER = 4 << 20


def add_subcommand(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers `preprocess`; the parsed namespace carries `run` as its `run` attribute."""
    parser = subparsers.add_parser(
        "preprocess",
        help="turn text into Megatron's indexed datasets",
        description="Turns text into the indexed datasets (.bin and .idx) that Megatron trains on.",
    )
    parser.set_defaults(run=run)
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help=".jsonl or .json (one object in each line), .txt; each also with .gz appended",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="values to encode, each into its own dataset (default: text)",
    )
    group.add_argument(
        "--txt-documents",
        choices=("file", "paragraph"),
        default="file",
        help="one document of a .txt file: the whole file (default), or each block between "
        "blank lines",
    )
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="P",
        help="writes P_KEY_document.bin and .idx (P_KEY_sentence with --split-sentences)",
    )
    group.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    add_tokenizer_arguments(parser)
    group = parser.add_argument_group("processing")
    group.add_argument(
        "--append-eod", action="store_true", help="end every document with the tokenizer's token"
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="store every sentence separately, as BERT needs it (rules for English; JSON values "
        "may also be lists of sentences)",
    )
    group.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes (default: by the size of the input, at most one for each core)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, or 130 after Ctrl-C (128 + SIGTERM after a termination request).

    Raises:
        DataError: An input, the output or the tokenizer is unusable; no partial output remains.
    """
    start_s = time.monotonic()
    total_bytes = check_inputs(args.input)
    _check_keys(args.json_keys, args.input)
    level = "sentence" if args.split_sentences else "document"
    paths = output_paths(args.output_prefix, args.json_keys, level)
    check_outputs(paths, overwrite=args.overwrite)
    num_workers = _num_workers(args.workers, total_bytes)
    try:
        with _termination_as_exit(), _write_errors(args.output_prefix):
            _preprocess(args, paths, total_bytes, num_workers, start_s)
    except KeyboardInterrupt:
        print("megatron-ext preprocess: interrupted, nothing written", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _preprocess(
    args: argparse.Namespace,
    paths: dict[str, tuple[Path, Path]],
    total_bytes: int,
    num_workers: int,
    start_s: float,
) -> None:
    from megatron_ext.preprocess.encode import (
        Encoder,
        EncoderOptions,
        encode_batches,
        start_fork_server,
    )
    from megatron_ext.preprocess.progress import reporting

    if num_workers > 1:
        start_fork_server()  # imports in the background while this process does the same
    options = EncoderOptions(
        tokenizer=args,
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
    )
    encoder = Encoder(options)
    with (
        datasets(paths, encoder.dtype, overwrite=args.overwrite) as builders,
        reporting(total_bytes) as progress,
    ):
        batches = read_batches(
            args.input,
            txt_documents=args.txt_documents,
            batch_bytes=_BATCH_BYTES,
            on_read=progress.read,
        )
        num_empty = 0
        for documents in encode_batches(batches, encoder, num_workers):
            for document in documents:
                for key, (ids, lengths) in document.items():
                    builders[key].add_document(ids, lengths)
                num_empty += not any(lengths for _, lengths in document.values())
            progress.encoded(
                len(documents), sum(len(ids) for doc in documents for ids, _ in doc.values())
            )
        if progress.tokens == 0:
            raise DataError(
                f"{', '.join(map(str, args.input))}: no text found; give files with text"
            )
    _print_summary(paths, progress, encoder, num_empty, time.monotonic() - start_s)


def _print_summary(
    paths: dict[str, tuple[Path, Path]],
    progress: ProgressReporter,
    encoder: Encoder,
    num_empty: int,
    elapsed_s: float,
) -> None:
    print(
        f"preprocess: {progress.documents} documents ({num_empty} empty), {progress.tokens} tokens "
        f"as {encoder.dtype.__name__}, in {elapsed_s:.1f} s"
    )
    for bin_path, idx_path in paths.values():
        print(f"preprocess: wrote {bin_path} ({bin_path.stat().st_size} bytes) and {idx_path.name}")


def _check_keys(keys: list[str], inputs: list[Path]) -> None:
    named = f"--json-keys {' '.join(keys)}"
    if len(set(keys)) != len(keys):
        raise DataError(f"{named}: a key is named twice; name each once")
    if any(not key or os.sep in key for key in keys):
        raise DataError(f"{named}: a key becomes part of a file name; rename it in the input")
    texts = [path for path in inputs if kind_of(path) == "text"]
    if len(keys) > 1 and texts:
        raise DataError(f"{named}: {texts[0]} has no keys; encode .txt files in a separate run")


def _num_workers(requested: int | None, total_bytes: int) -> int:
    if requested is not None:
        if requested < 1:
            raise DataError(f"--workers {requested} must be at least 1; 1 is this process")
        return requested
    num_cores = len(os.sched_getaffinity(0))
    return max(1, min(num_cores, total_bytes // _MIN_BYTES_PER_WORKER))


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Lets a termination request (SIGTERM) unwind the stack, so that everything is cleaned up."""

    def leave(signum: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _write_errors(prefix: str) -> Iterator[None]:
    """Translates failures of the output's file system (full, read-only, over quota)."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"--output-prefix {prefix}: cannot be written ({reason}); make room, or give another"
        ) from error
