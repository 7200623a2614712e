"""Turns text into the indexed datasets (`.bin`, `.idx`) that Megatron trains on.

The command is `megatron-ext preprocess`; `python -m megatron_ext preprocess` is the same. For the
same documents and tokenizer the files are, byte for byte, those of upstream's
`tools/preprocess_data.py`, which no wheel of Megatron brings. So this command needs no tree, and it
does what that one does not: plain and compressed text, one byte a token, sentences without a
download, files that appear whole or not at all.
"""

from megatron_ext.preprocess.preprocess_command import add_subcommand, run

__all__ = ["add_subcommand", "run"]
