"""Prints the results of `matrix.py` on several releases, one column per release.

python -m tests.versions.table RESULTS.json...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_ABOUT = ("version", "python", "torch", "loop", "skipped")


def cell(result: Any) -> str:
    """Return the result of one comparison as text."""
    if result is None:
        return "not run"
    if "error" in result:
        return "FAILED"
    if "absent" in result:
        return f"no {result['absent']}"
    first = (
        result["ours"][0].split(" loss: ")[1].split()[0]
        if result["ours"]
        else "no loss"
    )
    return f"equal ({first})" if result["equal"] else "DIFFERS"


def is_sound(result: dict[str, Any]) -> bool:
    """Return whether losses were equal, or the release lacks what would be compared."""
    return bool(result.get("equal")) or "absent" in result


def about(release: dict[str, Any]) -> str:
    """Return the environment of a release as text."""
    if "python" in release:
        return f"{release['python']}, {release['torch']}, {release['loop']}"
    return "left out, as asked" if release.get("skipped") else "NOT TRIED"


def table(releases: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all results."""
    names = list(
        dict.fromkeys(
            name for release in releases for name in release if name not in _ABOUT
        )
    )
    rows = [["megatron-core", *(release["version"] for release in releases)]]
    rows.append(
        ["Python, torch, training loop", *(about(release) for release in releases)]
    )
    rows += [
        [name, *(cell(release.get(name)) for release in releases)] for name in names
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if something differs, failed, or was unexpectedly not run."""
    releases = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    print(table(releases))
    tried = all("python" in release or release.get("skipped") for release in releases)
    results = [
        result
        for release in releases
        for name, result in release.items()
        if name not in _ABOUT
    ]
    return 0 if releases and tried and all(map(is_sound, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
