"""Encoding documents, and what is refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.preprocess.corpus import Batch, Kind
from megatron_ext.preprocess.encode import Encoder, EncoderOptions
from megatron_ext.preprocess.tokenizer import add_tokenizer_arguments, build_tokenizer


def tokenizer(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    return parser.parse_args(["--tokenizer-type", *flags])


def encoder(*flags: str, **options: Any) -> Encoder:
    values: dict[str, Any] = {"json_keys": ("text",), "append_eod": False, "split_sentences": False}
    return Encoder(
        EncoderOptions(tokenizer(*(flags or ("ByteLevelTokenizer",))), **values | options)
    )


def batch(raw: bytes, kind: Kind = "json", line: int = 7) -> Batch:
    return Batch("corpus.jsonl", kind, [(line, raw)])


def test_bytes_are_tokens() -> None:
    [document] = encoder().encode(batch("Zürich".encode(), kind="text"))
    ids, lengths = document["text"]
    assert bytes(ids.tolist()) == "Zürich".encode()
    assert lengths == [7]


def test_the_end_of_document_belongs_to_the_last_sentence() -> None:
    made = encoder(append_eod=True)
    [document] = made.encode(batch(b'{"text": ["ab", "", "c"]}'))
    ids, lengths = document["text"]
    assert ids.tolist() == [97, 98, 99, made.tokenizer.eod]
    assert lengths == [2, 2]


def test_an_empty_document_stays_empty() -> None:
    [document] = encoder(append_eod=True).encode(batch(b'{"text": ""}'))
    ids, lengths = document["text"]
    assert len(ids) == 0
    assert lengths == []


def test_sentences_are_split_if_asked() -> None:
    [document] = encoder(split_sentences=True).encode(batch(b'{"text": "One. Two."}'))
    assert document["text"][1] == [4, 4]


def test_each_key_is_encoded() -> None:
    [document] = encoder(json_keys=("a", "b")).encode(batch(b'{"b": "22", "a": "1"}'))
    assert {key: lengths for key, (_, lengths) in document.items()} == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"text": "x"', "not valid JSON"),
        (b'["x"]', r'found \["x"\], expected an object'),
        (b'{"title": "x"}', r'no key "text" \(found: \["title"\]\); --json-keys'),
        (b'{"text": 5}', '"text" is 5, expected a string or a list of strings'),
        (b'{"text": ["x", 5]}', "expected a string or a list of strings"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (rb'{"text": "\ud800"}', "surrogates not allowed"),
    ],
)
def test_bad_documents_are_named_with_file_and_line(raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"^corpus\.jsonl:7: .*{message}"):
        encoder().encode(batch(raw))


def test_text_that_the_tokenizer_cannot_take_is_named() -> None:
    made = encoder("NullTokenizer", "--vocab-size", "1000")
    with pytest.raises(DataError, match=r"^corpus\.jsonl:7: .*invalid literal"):
        made.encode(batch(b"1 2 x", kind="text"))
    with pytest.raises(DataError, match=r"ids range from 1 to 70000, the vocabulary allows"):
        made.encode(batch(b"1 70000", kind="text"))
    with pytest.raises(DataError, match=r"ids range from -1 to 5"):
        made.encode(batch(b"-1 5", kind="text"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("HuggingFaceTokenizer",), "needs --tokenizer-model"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("SentencePieceTokenizer",), "needs --tokenizer-model"),
        (
            ("TikTokenizer", "--tokenizer-model", "/absent"),
            "--tokenizer-model /absent: no such file",
        ),
        (("GPT2BPETokenizer", "--vocab-file", "/absent"), "--vocab-file /absent: no such file"),
        (("ByteLevelTokenizer", "--vocab-size", "100"), "needs at least 256"),
        (("SentencePieceTokenizer", "--tokenizer-model", __file__), "cannot be built"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_explained(
    flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(tokenizer(*flags))
