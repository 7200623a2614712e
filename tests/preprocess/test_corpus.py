"""Reading documents out of the supported kinds of files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.preprocess.corpus import TxtDocuments, check_inputs, read_batches


def documents(
    *paths: Path, txt_documents: TxtDocuments = "file", batch_bytes: int = 1 << 20
) -> list[tuple[int, bytes]]:
    batches = read_batches(
        paths, txt_documents=txt_documents, batch_bytes=batch_bytes, on_read=lambda _: None
    )
    return [document for batch in batches for document in batch.documents]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_json_lines_keep_their_numbers_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n\n  \n{"text": "y"}')
    assert documents(path) == [(1, b'{"text": "x"}\n'), (4, b'{"text": "y"}')]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\n\ntwo\n")
    assert documents(path) == [(1, b"one\n\ntwo\n")]


def test_paragraphs_are_documents_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\n\none\nline\n \n\ntwo")
    assert documents(path, txt_documents="paragraph") == [(3, b"one\nline\n"), (7, b"two")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, name: str) -> None:
    plain = write(tmp_path / name, b'{"text": "x"}\n')
    packed = write(tmp_path / f"{name}.gz", gzip.compress(b'{"text": "x"}\n'))
    assert documents(packed) == documents(plain)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b'\xef\xbb\xbf{"text": "x"}')
    assert documents(path) == [(1, b'{"text": "x"}')]


def test_batches_are_bounded_and_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", b"".join(b"%04d\n" % i for i in range(100)))
    second = write(tmp_path / "b.jsonl", b"last\n")
    seen: list[int] = []
    batches = list(
        read_batches([first, second], txt_documents="file", batch_bytes=50, on_read=seen.append)
    )
    assert [len(batch.documents) for batch in batches] == [10] * 10 + [1]
    assert batches[-1].source == str(second)
    assert sum(seen) == check_inputs([first, second])
    assert [raw for batch in batches for _, raw in batch.documents][:100] == [
        b"%04d\n" % i for i in range(100)
    ]


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(bytes(range(256)) * 100)
    path = write(tmp_path / "a.jsonl.gz", whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged gzip file"):
        documents(path)


def test_a_file_that_is_not_gzip_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", b"plain")
    with pytest.raises(DataError, match=r"a\.txt\.gz: damaged gzip file"):
        documents(path)


def test_missing_and_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        check_inputs([tmp_path / "absent.txt"])
    with pytest.raises(DataError, match="not a regular file"):
        check_inputs([tmp_path])
    with pytest.raises(DataError, match=r"unknown kind of input.*\.jsonl"):
        check_inputs([write(tmp_path / "a.csv", b"")])
