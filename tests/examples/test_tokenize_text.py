"""Text becomes an indexed dataset that Megatron reads back; faults in it end in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import REPO

EOD = 0


def tokenize(*words: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        REPO / "examples/data/tokenize_text.py",
        *words,
    ]
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_bytes_come_back_document_by_document(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = tmp_path / "corpus.jsonl"
    source.write_text(
        '{"text": "One. Two \\u00e4!"}\n{"text": ""}\n{"text": "Three"}\n'
    )
    for flags, lengths in (
        (["--append-eod"], [13, 6]),
        (["--append-eod", "--split-sentences"], [4, 8, 6]),
    ):
        done = tokenize(source, "--output-prefix", tmp_path / "data/made", *flags)
        assert done.returncode == 0, done.stderr
        found = IndexedDataset(done.stdout.partition(":")[0])
        assert list(found.sequence_lengths) == lengths
        assert len(found.document_indices) == 3
        assert found[len(lengths) - 1][-1] == EOD


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ('{"text": "a"}\nnonsense\n', [], ":2: expected"),
        ('{"text": ""}\n', [], "no document has any text"),
        ('{"text": "\\ud800"}\n', [], ":1: the text holds half of a surrogate pair"),
        (
            '{"text": "a"}\n',
            [
                "--tokenizer-type",
                "HuggingFaceTokenizer",
                "--tokenizer-model",
                "/no/such/folder",
            ],
            "--tokenizer-model /no/such/folder: there is no such file or folder",
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, text: str, flags: list[str], message: str
) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text(text)
    done = tokenize(source, "--output-prefix", tmp_path / "made", *flags)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "made_text_document.idx").exists()
