"""Turns text into the indexed datasets (`.bin`, `.idx`) that Megatron trains on.

The command is `megatron-ext preprocess`; `python -m megatron_ext preprocess` is the same. For the
same documents and tokenizer the files are, byte for byte, those of upstream's
`tools/preprocess_data.py`.
"""

from megatron_ext.preprocess.preprocess_command import add_subcommand, run

__all__ = ["add_subcommand", "run"]
