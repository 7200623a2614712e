"""Tokenizers by upstream's names and flags, built by megatron.core's own builder.

`ByteLevelTokenizer` is the only addition: megatron.core has the class, but its builder has no name
for it. Every UTF-8 byte is a token, so it needs no file and no download; id 0 ends a document.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.preprocess.local_vocabulary import build_local, check_local
from megatron_ext.upstream import signatures

__all__ = [
    "BYTE_LEVEL_VOCAB_SIZE",
    "TOKENIZER_TYPES",
    "add_tokenizer_arguments",
    "build_named",
    "build_tokenizer",
]

BYTE_LEVEL_VOCAB_SIZE = 512
"""Default vocabulary of the byte-level tokenizer: 256 bytes and room for special tokens."""

_BERT = ("BertWordPieceLowerCase", "BertWordPieceCase")
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (
    "ByteLevelTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    *_SENTENCEPIECE,
    *_BERT,
    "NullTokenizer",
)


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds upstream's tokenizer flags, with upstream's names and defaults."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="which tokenizer to use"
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="model file, or for Hugging Face directory or name",
    )
    group.add_argument("--tokenizer-metadata", metavar="FILE", help="tokenizer metadata (JSON)")
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary file")
    group.add_argument("--merge-file", metavar="FILE", help="BPE merges file")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"vocabulary size: needed by NullTokenizer; ByteLevelTokenizer takes "
        f"{BYTE_LEVEL_VOCAB_SIZE} if it is left out",
    )
    group.add_argument("--tokenizer-special-tokens", nargs="+", metavar="TOKEN")
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"))
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, metavar="N")
    group.add_argument("--tokenizer-sentencepiece-legacy", action="store_true")
    group.add_argument("--tokenizer-hf-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")
    group.add_argument(
        "--legacy-tokenizer",
        action="store_true",
        help="add the special tokens of upstream's legacy GPT-2 and BERT tokenizers",
    )


def build_tokenizer(args: argparse.Namespace) -> Any:
    """Builds the tokenizer of the flags.

    Args:
        args: Namespace with the flags of `add_tokenizer_arguments`.

    Returns:
        A megatron.core tokenizer: `tokenize(text)`, `detokenize(ids)`, `vocab_size`, `eod`.

    Raises:
        DataError: A file or a required flag is missing, or the tokenizer library fails.
    """
    _check(args)
    try:
        with warnings.catch_warnings():
            # megatron.core tells about absent accelerators when imported; no tokenizer needs one.
            warnings.simplefilter("ignore")
            return _build(args)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"--tokenizer-type {args.tokenizer_type}: the tokenizer cannot be built: {reason}"
        ) from error


def _check(args: argparse.Namespace) -> None:
    for flag in ("tokenizer_metadata", "vocab_file", "merge_file"):
        _check_file(flag, getattr(args, flag))
    check_local(args)
    kind = args.tokenizer_type
    if kind in _SENTENCEPIECE or kind == "TikTokenizer":
        _require(args, "tokenizer_model", "FILE")
        _check_file("tokenizer_model", args.tokenizer_model)
    elif kind == "HuggingFaceTokenizer":
        _require(args, "tokenizer_model", "DIR_OR_NAME")
    elif kind == "NullTokenizer":
        _require(args, "vocab_size", "N")
    elif kind == "ByteLevelTokenizer" and (args.vocab_size or BYTE_LEVEL_VOCAB_SIZE) < 256:
        raise DataError(
            f"--vocab-size {args.vocab_size}: ByteLevelTokenizer needs at least 256, one id for "
            f"each byte; leave it out for {BYTE_LEVEL_VOCAB_SIZE}"
        )


def _require(args: argparse.Namespace, flag: str, placeholder: str) -> None:
    if getattr(args, flag) is None:
        name = flag.replace("_", "-")
        raise DataError(f"--tokenizer-type {args.tokenizer_type} needs --{name} {placeholder}")


def _check_file(flag: str, value: str | None) -> None:
    if value is not None and not Path(value).is_file():
        name = flag.replace("_", "-")
        raise DataError(f"--{name} {value}: no such file; give the tokenizer's file")


def _build(args: argparse.Namespace) -> Any:
    if args.tokenizer_type == "ByteLevelTokenizer":
        from megatron.core.tokenizers import MegatronTokenizer

        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "byte-level"},
            vocab_size=args.vocab_size or BYTE_LEVEL_VOCAB_SIZE,
        )
    return build_named(args)


def build_named(args: argparse.Namespace) -> Any:
    """Build a tokenizer of one of upstream's types, from local files only if they are given."""
    return build_local(args) or signatures.build_tokenizer(args)
