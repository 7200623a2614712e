"""Python 3.11 gets the newest megatron-core by ignoring what it requires, and nothing else so."""

from __future__ import annotations

import subprocess
from pathlib import Path

_REPO = Path(__file__).parents[2]
_PYTHON = """#!/bin/sh
case "$*" in
*version_info*) echo True ;;
*purelib*) dirname "$0" ;;
*) echo "$@" >> "$0.calls" ;;
esac
"""


def test_dependencies_are_those_of_this_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    script = f"source examples/common.sh; PYTHON={python}; install_core {tmp_path}/log"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=_REPO, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [call] = (tmp_path / "python.calls").read_text().splitlines()
    assert "--ignore-requires-python" in call
    # NumPy 2.5 has no wheel for 3.11; with this flag pip takes its source all the same.
    assert "--no-deps" in call
