"""Commands that need neither torch nor Megatron run on the oldest Python that the package takes.

The tests themselves run on a newer one, where its standard library is another.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from megatron_ext.schedules.generators.catalog import registered

REPO = Path(__file__).parents[1]
OLDEST = re.findall(
    r'requires-python = ">=([\d.]+)"', (REPO / "pyproject.toml").read_text()
)[0]
SIZES = "--pipeline-model-parallel-size 4 --num-layers 16 --hidden-size 64 --num-attention-heads 4"
BATCH = "--seq-length 64 --micro-batch-size 1 --global-batch-size 16"


@cache
def python() -> Path:
    """The oldest Python, on PATH or of pyenv."""
    found = [shutil.which(f"python{OLDEST}")]
    found += sorted(
        map(str, Path.home().glob(f".pyenv/versions/{OLDEST}.*/bin/python"))
    )
    for each in filter(None, found):
        # A shim of pyenv is there for versions that are not chosen.
        if (
            subprocess.run([each, "-c", ""], capture_output=True, timeout=60).returncode
            == 0
        ):
            return Path(each)
    pytest.skip(f"there is no python{OLDEST} here")


def run(*words: str) -> str:
    done = subprocess.run(
        [python(), *words],
        # Disabled: patches need wrapt, which this Python need not have.
        env={
            "PYTHONPATH": str(REPO),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MEGATRON_EXT_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_compiles() -> None:
    files = sorted(map(str, (REPO / "megatron_ext").rglob("*.py")))
    assert len(files) > 100
    code = "import sys\nfor each in sys.argv[1:]: compile(open(each, 'rb').read(), each, 'exec')"
    run("-c", code, *files)


def test_every_schedule_is_accepted() -> None:
    names = [name for name in registered() if name != "interleaved"]
    flags = [f"{SIZES} {BATCH} --pipeline-schedule {name}" for name in names]
    flags += [
        f"{flags[0]} --use-dpp",
        f"{flags[0]} --pipeline-slices 2",
        f"{SIZES} {BATCH}",
    ]
    out = run(
        "-c",
        "import sys, megatron_ext\n"
        "for flags in sys.argv[1:]: print(megatron_ext.preflight(flags, world_size=4).refusals)",
        *flags,
    )
    assert out.splitlines() == ["[]"] * len(flags)


def test_plans_and_pictures(tmp_path: Path) -> None:
    file = tmp_path / "zb-v.csv"
    sizes = ["--pp", "4", "--microbatches", "8"]
    assert "bitpipe" in run("-m", "megatron_ext.cli", "plan", *sizes, "--use-dpp")
    run("-m", "megatron_ext.cli", "plot", "zb-v", *sizes, "-o", str(file))
    assert "csv" in run("-m", "megatron_ext.cli", "plan", "--schedule", f"csv:{file}")


def test_a_layout_is_found() -> None:
    model = [
        "--model",
        str(REPO / "examples/llama3"),
        "--size",
        "8b",
        "--devices",
        "8xh100",
    ]
    assert "MFU" in run(
        "-m", "megatron_ext.cli", "plan", *model, "--global-batch-size", "16"
    )
