"""Converts text to an indexed dataset with megatron.core's tokenizers and dataset builder.

    python examples/data/tokenize_text.py corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIRECTORY --append-eod

A `.jsonl` file contains one document per line, `{"text": "..."}`. Any other file is one document.
The script writes PREFIX_text_document.bin and .idx or, with --split-sentences, which BERT needs,
PREFIX_text_sentence. Upstream's tools/preprocess_data.py is similar but uses several processes.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BYTE_LEVEL_VOCAB_SIZE = 512
"""The 256 bytes plus room for special tokens. Id 0 marks the end of a document."""

_SENTENCE_END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]*[A-Z0-9])|\n\s*\n""")


def documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of each document.

    Raises:
        SystemExit: The file cannot be read, or a line is not a JSON object with a text.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            if path.suffix != ".jsonl":
                yield str(path), stream.read()
                return
            for number, line in enumerate(stream, 1):
                place = f"{path}:{number}"
                yield place, _text(place, line)
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path} cannot be read as UTF-8 text: {error}")


def _text(place: str, line: str) -> str:
    try:
        return str(json.loads(line)["text"])
    except (KeyError, TypeError, ValueError):
        sys.exit(f'{place}: expected {{"text": "..."}}, found {line[:60]!r}')


def build_tokenizer(args: argparse.Namespace) -> Any:
    """Returns a megatron.core tokenizer with `tokenize(text)`, `vocab_size` and `eod`.

    Raises:
        SystemExit: The folder or file of the tokenizer does not exist.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    if args.tokenizer_type == "ByteLevelTokenizer":
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "byte-level"}, vocab_size=BYTE_LEVEL_VOCAB_SIZE
        )
    model = args.tokenizer_model
    # For a missing folder, the library would query a hub for nearly a minute.
    if model is None or (
        "/" in model and model.count("/") != 1 and not Path(model).exists()
    ):
        sys.exit(
            f"--tokenizer-model {model}: there is no such file or folder; name one"
        )
    libraries = {
        "HuggingFaceTokenizer": "huggingface",
        "SentencePieceTokenizer": "sentencepiece",
    }
    return MegatronTokenizer.from_pretrained(
        tokenizer_path=model, metadata_path={"library": libraries[args.tokenizer_type]}
    )


def main() -> None:
    """Reads the command line and writes the dataset."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument(
        "--tokenizer-type",
        default="ByteLevelTokenizer",
        choices=(
            "ByteLevelTokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
        ),
        help="the first one needs no file: every byte is a token (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="folder, file or name of the tokenizer",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with a token"
    )
    parser.add_argument(
        "--split-sentences", action="store_true", help="one sequence per sentence"
    )
    args = parser.parse_args()

    # On machines with nvcc but without a GPU, torch warns about a missing CUDA runtime.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = build_tokenizer(args)
    prefix = f"{args.output_prefix}_text_{'sentence' if args.split_sentences else 'document'}"
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    # The index is written last, so an interrupted run does not leave a seemingly complete dataset.
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    count = tokens = 0
    for path in args.inputs:
        for place, text in documents(path):
            pieces = [text]
            if args.split_sentences:
                pieces = [piece.strip() for piece in _SENTENCE_END.split(text)]
            try:
                sequences = [
                    ids for piece in pieces if (ids := tokenizer.tokenize(piece))
                ]
            except UnicodeEncodeError:
                sys.exit(
                    f"{place}: the text holds half of a surrogate pair, which is no UTF-8"
                )
            if not sequences:
                continue
            if args.append_eod:
                sequences[-1] = [*sequences[-1], tokenizer.eod]
            ids = [token for sequence in sequences for token in sequence]
            builder.add_document(
                torch.tensor(ids), [len(sequence) for sequence in sequences]
            )
            count, tokens = count + 1, tokens + len(ids)
    if not count:
        sys.exit(f"{', '.join(map(str, args.inputs))}: no document has any text")
    builder.finalize(f"{prefix}.idx")
    print(f"{prefix}: {count:,} documents, {tokens:,} tokens")


if __name__ == "__main__":
    main()
