"""Reads text corpora: the documents of a file, in batches small enough to send to workers.

A corpus file is one of

* `.jsonl`, `.json`: one JSON object in each line, one line is one document. A value is the text, or
  a list of strings when the text is already split into sentences (the form that upstream's own
  preprocessing writes between its two passes);
* `.txt`: the whole file is one document, or, with `txt_documents="paragraph"`, each run of lines
  between blank lines is one;

each of them optionally compressed, with `.gz` appended. All text is UTF-8.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_ext.errors import DataError

__all__ = ["Batch", "Kind", "TxtDocuments", "check_inputs", "kind_of", "read_batches"]

Kind = Literal["json", "text"]
TxtDocuments = Literal["file", "paragraph"]

_KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".txt": "text"}
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass
class Batch:
    """Some consecutive documents of one file, not yet decoded or parsed (workers do that).

    Args:
        source: The file, for messages.
        kind: Whether `documents` holds JSON lines or plain text.
        documents: Pairs of (number of the document's first line, its bytes).
        num_bytes: Sum of the sizes of the documents.
    """

    source: str
    kind: Kind
    documents: list[tuple[int, bytes]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, line: int, raw: bytes) -> None:
        """Appends the document that starts at `line`."""
        self.documents.append((line, raw))
        self.num_bytes += len(raw)


def kind_of(path: Path) -> Kind:
    """Return the kind of a file by its name.

    Raises:
        DataError: The name has no supported suffix.
    """
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    kind = _KINDS.get(inner.suffix)
    if kind is None:
        raise DataError(
            f"{path}: unknown kind of input; its name must end in "
            f"{', '.join(_KINDS)}, or one of these followed by .gz"
        )
    return kind


def check_inputs(paths: Sequence[Path]) -> int:
    """Refuses missing or unknown files before any work is done.

    Returns:
        The size of all files together, in bytes, as stored.

    Raises:
        DataError: A file is missing, is not a regular file or is of unknown kind.
    """
    total_bytes = 0
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file; give the files of the corpus with --input")
        if not path.is_file():
            raise DataError(f"{path}: not a regular file; name the files themselves ({path}/*)")
        kind_of(path)
        total_bytes += path.stat().st_size
    return total_bytes


def read_batches(
    paths: Sequence[Path],
    *,
    txt_documents: TxtDocuments,
    batch_bytes: int,
    on_read: Callable[[int], None],
) -> Iterator[Batch]:
    """Yields the documents of all files, in order, in batches of about `batch_bytes`.

    It holds one batch, so memory is bounded by `batch_bytes` plus the longest document.

    Args:
        paths: Files that passed `check_inputs`.
        txt_documents: What one document is in a `.txt` file.
        batch_bytes: A batch is closed as soon as it holds this many bytes.
        on_read: Called before each batch with the bytes (as stored) read since the last call.

    Raises:
        DataError: A file cannot be read or decompressed.
    """
    for path in paths:
        kind = kind_of(path)
        try:
            with path.open("rb") as stored:
                stream = gzip.GzipFile(fileobj=stored) if path.suffix == ".gz" else stored
                documents = _documents(stream, kind, txt_documents)
                position = 0
                for batch in _grouped(documents, str(path), kind, batch_bytes):
                    on_read(stored.tell() - position)
                    position = stored.tell()
                    yield batch
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: damaged gzip file ({error}); compress it again") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _grouped(
    documents: Iterator[tuple[int, bytes]], source: str, kind: Kind, batch_bytes: int
) -> Iterator[Batch]:
    batch = Batch(source, kind)
    for line, raw in documents:
        batch.add(line, raw)
        if batch.num_bytes >= batch_bytes:
            yield batch
            batch = Batch(source, kind)
    if batch.documents:
        yield batch


def _documents(
    stream: BinaryIO | gzip.GzipFile, kind: Kind, txt_documents: TxtDocuments
) -> Iterator[tuple[int, bytes]]:
    if kind == "text" and txt_documents == "file":
        text = stream.read().removeprefix(_UTF8_BOM)
        if text:
            yield 1, text
        return
    lines = (
        (number, line.removeprefix(_UTF8_BOM) if number == 1 else line)
        for number, line in enumerate(stream, start=1)
    )
    yield from _paragraphs(lines) if kind == "text" else _json_lines(lines)


def _json_lines(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    for number, line in lines:
        if line.strip():
            yield number, line


def _paragraphs(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    first, collected = 0, bytearray()
    for number, line in lines:
        if line.strip():
            first = first or number
            collected += line
        elif collected:
            yield first, bytes(collected)
            first, collected = 0, bytearray()
    if collected:
        yield first, bytes(collected)
