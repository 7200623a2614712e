"""Writes Python's language reference as a small training corpus.

Every CPython contains about 450 kB of English prose with code in `pydoc_data.topics`, the source of
`help("if")`, so nothing needs to be downloaded. Each topic is one document:

    python examples/data/python_reference.py OUTPUT.jsonl

The text is part of Python's documentation, under the PSF License. It differs slightly between
versions of Python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_ext.files import cannot_write, write_text


def topics() -> dict[str, str]:
    """Returns the topics by name.

    Raises:
        SystemExit: If this Python was packaged without its help texts.
    """
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        sys.exit(
            f"{sys.executable} has no help texts (the module pydoc_data.topics); use another "
            f"Python (Debian: apt-get install libpython3-stdlib)"
        )
    return dict(sorted(found.items()))


def main() -> None:
    """Writes one JSON object for each topic to the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUTPUT.jsonl")
    lines = (json.dumps({"text": text}) + "\n" for text in topics().values())
    path = Path(sys.argv[1])
    try:
        write_text(path, "".join(lines))
    except OSError as error:
        sys.exit(cannot_write(path, error, "make room there"))


if __name__ == "__main__":
    main()
