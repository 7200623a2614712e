"""Schedules are data: they import the standard library, errors and messages only."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_ext" / "schedules"
ALLOWED = re.compile(r"megatron_ext\.((errors|feature_list|files|message)$|schedules)")


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_only_the_standard_library_is_imported() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in files
        for name in _imported(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not ALLOWED.match(name)
    ]
    assert not found
