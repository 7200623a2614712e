"""Runs the example scripts and parses the commands that they print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
LLAMA3 = "examples/llama3/run.sh"


def bash(
    *words: str, timeout_s: float = 240, cwd: Path = REPO, **env: str | None
) -> subprocess.CompletedProcess[str]:
    """Run bash with this test's own Python environment activated, on the CPU."""
    merged = {
        **os.environ,
        "VIRTUAL_ENV": sys.prefix,
        "MEGATRON_EXT_DEVICE": "cpu",
        **env,
    }
    return subprocess.run(
        ["bash", *words],
        cwd=cwd,
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def dry_run(script: str, *flags: str, **env: str | None) -> list[str]:
    """Return the words of the command that a script would run."""
    done = bash(script, "--dry-run", *flags, **env)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.replace("\\\n", ""))


def value_of(words: list[str], flag: str) -> str:
    """Return the last value of a flag, which takes precedence."""
    positions = [position for position, word in enumerate(words) if word == flag]
    return words[positions[-1] + 1]


def megatron_flags(words: list[str]) -> list[str]:
    """Return the words after the training script."""
    [position] = (i for i, word in enumerate(words) if word.startswith("pretrain_"))
    return words[position + 1 :]


def make_data(*kinds: str) -> None:
    """Create the training data for the tiny sizes, as a script's first run does."""
    for kind in kinds:
        script = f'PYTHON={shlex.quote(sys.executable)}; {kind} "$REPO/examples/data/out/{kind}"'
        done = bash("-c", f"set -euo pipefail; source examples/common.sh; {script}")
        assert done.returncode == 0, done.stdout + done.stderr
