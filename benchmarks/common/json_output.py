"""The --json output: the path is checked before the measurement, the file written after it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megatron_ext.files import cannot_write, write_text

__all__ = ["add_json", "write_json"]


def add_json(parser: argparse.ArgumentParser, content: str = "the figures") -> None:
    """Add `--json FILE`, which is refused before anything is measured if it cannot be written."""
    parser.add_argument("--json", type=_writable, help=f"also write {content} to this file")


def write_json(path: Path, content: Any) -> None:
    """Replace a file by these figures.

    Raises:
        SystemExit: It cannot be written; with the line that says so. What was there is still there.
    """
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SystemExit(cannot_write(path, error, "make room, or give another --json")) from error


def _writable(text: str) -> Path:
    path = Path(text)
    there = path if path.exists() else path.parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written; give another file")
    return path
