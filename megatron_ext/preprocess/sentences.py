"""Splits English text into sentences by rule, for BERT's sentence-pair objective.

Upstream uses NLTK with a model to download. This splitter has no dependencies: a sentence
ends at `.`, `!` or `?` (and closing quotes or brackets) when white space and something that looks
like the start of a sentence follow, unless the word before the dot is a known abbreviation or a
single initial; a blank line always ends one. For other languages, or for a better splitter, give
`.jsonl` input whose values are lists of sentences.
"""

from __future__ import annotations

import re

__all__ = ["split_sentences"]

# Candidate ends: closing punctuation and the space behind it, or a blank line.
_END = re.compile(r"""(?P<stop>[.!?]+["')\]]*)\s+(?=["'(\[]*[A-Z0-9])|\n\s*\n""")
_ABBREVIATIONS = frozenset(
    {"al", "approx", "cf", "co", "corp", "dept", "dr", "e.g", "eq", "etc", "fig", "figs", "gen"}
    | {"gov", "i.e", "inc", "jr", "ltd", "mr", "mrs", "ms", "nos", "p", "pp", "prof", "rev", "sec"}
    | {"sen", "sr", "st", "vol", "vols", "vs"}
)


def split_sentences(text: str) -> list[str]:
    """Splits `text` into its sentences.

    Returns:
        The non-empty sentences in order, without surrounding white space. Joined, they hold every
        character of `text` except white space.
    """
    sentences: list[str] = []
    start = 0
    for match in _END.finditer(text):
        if match["stop"] == "." and _is_abbreviation(text[start : match.start()]):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviation(before: str) -> bool:
    words = before.split()
    if not words:
        return False
    word = words[-1].lstrip("\"'([")
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper())
