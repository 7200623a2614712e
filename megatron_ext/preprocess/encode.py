"""Encodes batches of documents as token ids, in this process or in worker processes.

A fork server that has imported megatron.core once starts the workers, so each costs milliseconds
and none is forked from a process with threads. At most two batches per worker are in flight, and
results keep the order of the input: memory is bounded, and the output does not depend on the number
of workers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import DataError, LaunchError
from megatron_ext.preprocess.sentences import split_sentences
from megatron_ext.preprocess.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from megatron_ext.preprocess.corpus import Batch, Kind

__all__ = ["EncodedDocument", "Encoder", "EncoderOptions", "encode_batches", "start_fork_server"]

EncodedDocument = dict[str, tuple[npt.NDArray[Any], list[int]]]
"""For each JSON key: the token ids of the document and the number of ids of each sentence."""

_BATCHES_IN_FLIGHT_PER_WORKER = 2


@dataclass(frozen=True)
class EncoderOptions:
    """Options of an encoder.

    Args:
        tokenizer: The tokenizer's flags, see `tokenizer.add_tokenizer_arguments`.
        json_keys: Values of a JSON document to encode. Plain text counts as the first.
        append_eod: Whether the end-of-document token ends each document that is not empty.
        split_sentences: Whether text is split into sentences.
    """

    tokenizer: argparse.Namespace
    json_keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool


class Encoder:
    """Encodes documents with one tokenizer.

    Args:
        options: How to encode each document.

    Raises:
        DataError: The tokenizer cannot be built, or lacks the requested end-of-document token.
    """

    def __init__(self, options: EncoderOptions) -> None:
        self.options = options
        self.tokenizer = build_tokenizer(options.tokenizer)
        self.dtype = _token_dtype(self.tokenizer.vocab_size)
        self._eod = _end_of_document(self.tokenizer, options) if options.append_eod else None

    def encode(self, batch: Batch) -> list[EncodedDocument]:
        """Encodes every document of `batch`.

        Raises:
            DataError: A document is not valid UTF-8 or JSON, lacks a key, or cannot be tokenized;
                the message names file and line.
        """
        return [self._encode_document(batch, line, raw) for line, raw in batch.documents]

    def _encode_document(self, batch: Batch, line: int, raw: bytes) -> EncodedDocument:
        try:
            values = self._values(batch.kind, raw.decode("utf-8"))
            return {key: self._encode_value(value) for key, value in values.items()}
        except json.JSONDecodeError as error:
            problem = (
                f"not valid JSON ({error.msg} at column {error.colno}); each line must be one "
                f"complete JSON object"
            )
            raise DataError(f"{batch.source}:{line}: {problem}") from error
        except UnicodeDecodeError as error:
            problem = f"not valid UTF-8 ({error.reason} at byte {error.start} of the document)"
            raise DataError(f"{batch.source}:{line}: {problem}; convert the file") from error
        except (DataError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{batch.source}:{line}: {error}") from error

    def _values(self, kind: Kind, text: str) -> dict[str, str | list[str]]:
        if kind == "text":
            return {self.options.json_keys[0]: text}
        document = json.loads(text)
        if not isinstance(document, dict):
            found = _excerpt(document)
            raise DataError(f'found {found}, expected an object such as {{"text": "..."}}')
        return {key: _value(document, key) for key in self.options.json_keys}

    def _encode_value(self, value: str | list[str]) -> tuple[npt.NDArray[Any], list[int]]:
        if isinstance(value, str):
            value = split_sentences(value) if self.options.split_sentences else [value]
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in value:
            sentence_ids = self.tokenizer.tokenize(sentence)
            if len(sentence_ids) > 0:
                ids.extend(sentence_ids)
                lengths.append(len(sentence_ids))
        if ids and self._eod is not None:
            ids.append(self._eod)
            lengths[-1] += 1
        _check_range(ids, self.dtype)
        return np.array(ids, dtype=self.dtype), lengths


def encode_batches(
    batches: Iterable[Batch], encoder: Encoder, num_workers: int
) -> Iterator[list[EncodedDocument]]:
    """Encodes batches in order, with `num_workers` processes (1: in this one).

    Raises:
        DataError: As `Encoder.encode`; encoding stops.
        LaunchError: A worker process died.
    """
    if num_workers == 1:
        yield from map(encoder.encode, batches)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("forkserver"),
        initializer=_start_worker,
        initargs=(encoder.options,),
    )
    pending: deque[Future[list[EncodedDocument]]] = deque()
    try:
        for batch in batches:
            with _signals_deferred():
                pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= _BATCHES_IN_FLIGHT_PER_WORKER * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        _end_writing(pool)
        raise LaunchError(
            f"one of the {num_workers} preprocessing workers exited early (out of memory?); "
            f"retry with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_writing(pool: ProcessPoolExecutor) -> None:
    """Lets a pool without workers shut down.

    In Pythons without the fix of cpython#94777 (3.11.2 has none) its thread writes the next batch
    to workers that are gone, and `shutdown` waits for it. A pipe without a reader ends the write.
    """
    queue = getattr(pool, "_call_queue", None)
    if queue is not None:
        queue._reader.close()


def start_fork_server() -> None:
    """Starts the server that workers are forked from; it imports megatron.core in the background.

    It and its workers ignore SIGINT: Ctrl-C is for the parent, which then ends them.
    """
    multiprocessing.set_forkserver_preload(["megatron_ext.preprocess.preload"])
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Holds Ctrl-C and termination back: a pool interrupted at its start never ends its workers."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_worker_encoder: Encoder | None = None


def _start_worker(options: EncoderOptions) -> None:
    global _worker_encoder
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # The workers are the parallelism; a thread pool in each would only compete with the others.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = Encoder(options)


def _exit_with_parent() -> None:
    """Ends this worker when its parent is gone, even when the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(batch: Batch) -> list[EncodedDocument]:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)


def _token_dtype(vocab_size: int) -> type[np.number[Any]]:
    from megatron.core.datasets.indexed_dataset import DType

    dtype: type[np.number[Any]] = DType.optimal_dtype(vocab_size)
    return dtype


def _end_of_document(tokenizer: Any, options: EncoderOptions) -> int:
    eod = tokenizer.eod
    if not isinstance(eod, int):
        raise DataError(
            f"--append-eod: {options.tokenizer.tokenizer_type} has no end-of-document token; leave "
            f"--append-eod out or use another tokenizer"
        )
    return eod


def _value(document: dict[str, Any], key: str) -> str | list[str]:
    if key not in document:
        raise DataError(
            f'no key "{key}" (found: {_excerpt(sorted(document))}); --json-keys names the keys to '
            f"encode"
        )
    value = document[key]
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(sentence, str) for sentence in value)
    ):
        return value
    raise DataError(f'"{key}" is {_excerpt(value)}, expected a string or a list of strings')


def _check_range(ids: Sequence[int], dtype: type[np.number[Any]]) -> None:
    limit = np.iinfo(dtype).max  # type: ignore[type-var]
    if ids and (min(ids) < 0 or max(ids) > limit):
        raise DataError(
            f"token ids range from {min(ids)} to {max(ids)}, the vocabulary allows 0 to {limit}; "
            f"check --vocab-size"
        )


def _excerpt(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
