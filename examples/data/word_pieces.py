"""Writes a small WordPiece vocabulary for a text, as a tokenizer for Hugging Face's library.

    python examples/data/word_pieces.py INPUT.jsonl DIRECTORY

It contains every character, so that every word can be spelled, and the most frequent words.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

from megatron_ext.files import cannot_write, write_text

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZE = 4096


def vocabulary(text: str, size: int) -> list[str]:
    """Returns special tokens, characters (alone and inside a word), and frequent words.

    Args:
        text: The text to cover.
        size: The number of entries. It is exceeded if the text has too many different characters.
    """
    words = Counter(re.findall(r"\w+|[^\w\s]", text.lower()))
    letters = sorted({letter for word in words for letter in word})
    found = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    for word, _ in sorted(words.items(), key=lambda entry: (-entry[1], entry[0])):
        if len(found) >= size:
            break
        found[word] = None
    return list(found)


def main() -> None:
    """Writes the files of the tokenizer into the directory named on the command line."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} INPUT.jsonl DIRECTORY")
    with Path(sys.argv[1]).open(encoding="utf-8") as stream:
        text = "\n".join(json.loads(line)["text"] for line in stream)
    directory = Path(sys.argv[2])
    files = {
        "config.json": json.dumps({"model_type": "bert"}),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
        ),
        "vocab.txt": "\n".join(vocabulary(text, SIZE)),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_text(directory / name, content + "\n")
    except OSError as error:
        sys.exit(cannot_write(directory, error, "make room there"))


if __name__ == "__main__":
    main()
