"""Tokenizers whose vocabulary lies on this machine are built without any network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_ext.upstream.tree import find_tree
from tests.commands import run_package, run_python
from tests.ranks import losses, skip_where_training_is_in_the_wheel, start_script
from tests.tiers import first_quick
from tests.training.helpers import LENGTH, SHAPE

NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9"}
"""Nobody listens there."""
TEXT = "The low lower lowest of the new newest things. "
LEGACY = pytest.mark.parametrize(
    "legacy", first_quick([[], ["--legacy-tokenizer"]]), ids=["default", "legacy"]
)


def gpt2_files(directory: Path) -> list[str]:
    """Write a small GPT-2 vocabulary whose merges count; return the flags that name it."""
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    merges = [("l", "o"), ("lo", "w"), ("t", "h"), ("th", "e"), ("Ġ", "low"), ("e", "w")]
    words = [*bytes_to_unicode().values(), *map("".join, merges), "<|endoftext|>"]
    vocabulary, merge_file = directory / "words.json", directory / "pairs.txt"
    vocabulary.write_text(json.dumps({word: index for index, word in enumerate(words)}))
    merge_file.write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")
    return ["--vocab-file", str(vocabulary), "--merge-file", str(merge_file)]


def bert_files(directory: Path) -> list[str]:
    """Write a small vocabulary of word pieces; return the flag that names it."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the low ##er ##est new things of . The".split()
    (directory / "pieces.txt").write_text("\n".join(words) + "\n")
    return ["--vocab-file", str(directory / "pieces.txt")]


def preprocess(directory: Path, kind: str, flags: list[str], **env: str) -> list[int]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus = directory / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": TEXT}) + "\n")
    done = run_package(
        "preprocess", "--input", str(corpus), "--output-prefix", str(directory / "out"),
        "--tokenizer-type", kind, "--overwrite", *flags, **env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = IndexedDataset(str(directory / "out_text_document"))
    assert len(dataset) == 1
    return dataset[0].tolist()  # views of the file do not outlive the dataset


@LEGACY
def test_gpt2(tmp_path: Path, legacy: list[str]) -> None:
    from transformers import GPT2Tokenizer

    files = gpt2_files(tmp_path)
    expected = GPT2Tokenizer(files[1], files[3])
    ids = [*expected(TEXT)["input_ids"], expected.eos_token_id]
    flags = [*files, "--append-eod", *legacy]
    assert preprocess(tmp_path, "GPT2BPETokenizer", flags, **NO_NETWORK) == ids
    assert len(ids) < len(TEXT), "the merges were used"


@LEGACY
@pytest.mark.parametrize(("kind", "first"), first_quick([("LowerCase", "the"), ("Case", "The")]))
def test_word_pieces(tmp_path: Path, kind: str, first: str, legacy: list[str]) -> None:
    flags = [*bert_files(tmp_path), *legacy]
    ids = preprocess(tmp_path, f"BertWordPiece{kind}", flags, **NO_NETWORK)
    words = (tmp_path / "pieces.txt").read_text().split()
    pieces = [first, *"low low ##er low ##est of the new new ##est things .".split()]
    assert ids == [words.index(piece) for piece in pieces]


def test_one_of_two_files_is_not_enough(tmp_path: Path) -> None:
    for names in (slice(0, 2), slice(2, 4)):
        flags = gpt2_files(tmp_path)
        done = run_package(
            "preprocess", "--input", flags[1], "--output-prefix", str(tmp_path / "out"),
            "--tokenizer-type", "GPT2BPETokenizer", *flags[names],
        )  # fmt: skip
        assert done.returncode == 2
        assert "needs both --vocab-file and --merge-file" in done.stderr


def test_legacy_is_for_vocabularies_in_files(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    done = run_package(
        "preprocess", "--input", str(tmp_path / "x.txt"), "--output-prefix", str(tmp_path / "out"),
        "--tokenizer-type", "ByteLevelTokenizer", "--legacy-tokenizer",
    )  # fmt: skip
    assert done.returncode == 2
    assert re.search("--legacy-tokenizer is for GPT2BPETokenizer.*leave it out", done.stderr)


_LEGACY_IDS = """
import json, sys
from argparse import Namespace
import megatron_ext
from megatron.training.tokenizer.tokenizer import build_tokenizer
args = Namespace(tokenizer_type=sys.argv[1], vocab_file=sys.argv[2], merge_file=sys.argv[3],
    rank=0, vocab_extra_ids=0, make_vocab_size_divisible_by=1, tensor_model_parallel_size=1,
    padded_vocab_size=None)
tokenizer = build_tokenizer(args)
print(json.dumps([tokenizer.tokenize(sys.argv[4]), tokenizer.vocab_size]))
"""


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
@LEGACY
@pytest.mark.parametrize("kind", first_quick(["GPT2BPETokenizer", "BertWordPieceLowerCase"]))
def test_ids_are_those_of_upstreams_own_tokenizers(
    tmp_path: Path, kind: str, legacy: list[str]
) -> None:
    flags = gpt2_files(tmp_path) if kind.startswith("GPT") else bert_files(tmp_path)
    done = run_python(
        "-c", _LEGACY_IDS, kind, flags[1], flags[-1], TEXT.strip(), PYTHONPATH=str(find_tree())
    )
    assert done.returncode == 0, done.stderr
    ids, _ = json.loads(done.stdout.splitlines()[-1])
    assert preprocess(tmp_path, kind, [*flags, *legacy], **NO_NETWORK)[: len(ids)] == ids


@pytest.mark.parametrize("embedded", [True, pytest.param(False, marks=pytest.mark.tree)])
def test_training_reads_them(tmp_path: Path, embedded: bool, request) -> None:
    if not embedded:
        request.getfixturevalue("megatron_lm_path")
    else:
        skip_where_training_is_in_the_wheel()
    files = gpt2_files(tmp_path)
    preprocess(tmp_path, "GPT2BPETokenizer", [*files, "--append-eod"], **NO_NETWORK)
    flags = (
        f"{SHAPE}{LENGTH}--seq-length 16 --mock-data --tokenizer-type GPT2BPETokenizer "
        f"--legacy-tokenizer --eval-iters 0 {' '.join(files)}"
    )
    run = start_script(
        1, "pretrain_gpt.py", flags.split(), embedded=embedded, env=NO_NETWORK, timeout_s=200
    )
    assert run.exit_codes == [0], run.describe()
    assert len(losses(run.logs)) == 3
