"""Tokenizers of GPT-2 and BERT from local vocabulary files, without network access.

For these types megatron.core's builder always contacts huggingface.co, and downloads the merges
even if it gets files. This module arranges the files as a folder that Hugging Face's library loads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.errors import DataError

__all__ = ["LOCAL_TYPES", "build_local", "check_local"]


class _Kind(NamedTuple):
    model_type: str
    files: dict[str, str]
    """Attribute of the flag with a file -> the name of that file in a model's folder."""
    settings: dict[str, Any]
    extra_tokens: tuple[str, ...] = ()


_BERT_FILES = {"vocab_file": "vocab.txt"}
LOCAL_TYPES = {
    "GPT2BPETokenizer": _Kind("gpt2", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}, {}),
    "BertWordPieceLowerCase": _Kind("bert", _BERT_FILES, {"do_lower_case": True}),
    "BertWordPieceCase": _Kind(
        "bert",
        _BERT_FILES,
        {"do_lower_case": False},
        tuple(f"<extra_id_{index}>" for index in range(100)),
    ),
}
"""Tokenizer types that accept vocabulary files."""


def check_local(args: argparse.Namespace) -> None:
    """Check that the flags name all files of a vocabulary or none, and all for legacy tokenizers.

    Raises:
        DataError: They do not.
    """
    kind = LOCAL_TYPES.get(args.tokenizer_type)
    if kind is None:
        if args.legacy_tokenizer:
            raise DataError(
                f"--legacy-tokenizer is for {', '.join(LOCAL_TYPES)}, but the type is "
                f"{args.tokenizer_type}; leave it out"
            )
        return
    given = [getattr(args, name) is not None for name in kind.files]
    if not all(given) and (any(given) or args.legacy_tokenizer):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in kind.files)
        both = "both " if len(given) > 1 else ""
        raise DataError(f"--tokenizer-type {args.tokenizer_type} needs {both}{flags}; give them")


def build_local(args: argparse.Namespace) -> Any | None:
    """Build the tokenizer from given vocabulary files; None if there are none.

    Args:
        args: Namespace with upstream's tokenizer flags; `--legacy-tokenizer` adds the special
            tokens of upstream's legacy implementation, and is the same otherwise.
    """
    kind = LOCAL_TYPES.get(args.tokenizer_type)
    if kind is None or args.vocab_file is None or args.tokenizer_metadata is not None:
        return None
    from megatron.core.tokenizers import MegatronTokenizer

    extra = kind.extra_tokens or tuple(args.tokenizer_special_tokens or ())
    if args.legacy_tokenizer:
        extra = ("[BOS]", "[EOS]") if kind.model_type == "bert" else ()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_tokenizer_") as folder:
        _lay_out(args, kind, Path(folder))
        tokenizer = MegatronTokenizer.from_pretrained(
            tokenizer_path=folder,
            metadata_path={"library": "huggingface"},
            additional_special_tokens=list(extra),
            use_fast=args.tokenizer_hf_use_fast,
            include_special_tokens=args.tokenizer_hf_include_special_tokens,
        )
    tokenizer.path = args.tokenizer_type  # as upstream; the folder is gone
    return tokenizer


def _lay_out(args: argparse.Namespace, kind: _Kind, folder: Path) -> None:
    """Arrange the files like those of a model."""
    for name, target in kind.files.items():
        (folder / target).symlink_to(Path(getattr(args, name)).resolve())
    length = 1024 if kind.model_type == "gpt2" else 512
    settings = {**kind.settings, "model_max_length": length}
    (folder / "config.json").write_text(json.dumps({"model_type": kind.model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
