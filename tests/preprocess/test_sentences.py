"""The rule-based sentence splitter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.preprocess.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("See Fig. 3 by Dr. A. Turing. Next.", ["See Fig. 3 by Dr. A. Turing.", "Next."]),
        ("Version 3.12 is out. So is 3.13.", ["Version 3.12 is out.", "So is 3.13."]),
        ("e.g. this one, etc. and more", ["e.g. this one, etc. and more"]),
        ("A heading\n\nThen prose\nover lines.", ["A heading", "Then prose\nover lines."]),
        ("Really?! Yes.", ["Really?!", "Yes."]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_examples(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(alphabet="aA.!? \n\"'()1", max_size=60))
def test_nothing_is_lost_and_nothing_is_empty(text: str) -> None:
    sentences = split_sentences(text)
    assert all(sentence == sentence.strip() != "" for sentence in sentences)
    assert "".join("".join(sentences).split()) == "".join(text.split())
