"""Features are apart: without the folder of one, all else imports, and the tests of tables pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import generate
from megatron_ext.schedules.table import table_change

REPO = Path(__file__).parents[2]
FEATURES = sorted(
    path.parent.name
    for path in (REPO / "megatron_ext" / "features").glob("*/__init__.py")
)
TESTS = (
    "tests/schedules/table/test_communication.py",
    "tests/runtime/test_executor.py",
)
"""Tests of the core: its tables, and what carries them out."""

# The finder of an editable installation would find the package where it was installed from.
CODE = """
import importlib, pkgutil, sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import megatron_ext
from megatron_ext.schedules import generate, registered
without, *tests = sys.argv[1:]
for module in pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext."):
    if not module.name.endswith("__main__") and module.name not in without.split(","):
        importlib.import_module(module.name)
for name in registered():
    generate(name, 4, 8)
from megatron_ext.config.hosting import preflight
flags = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--max-position-embeddings 32 --global-batch-size 8 --train-iters 5 --vocab-size 127 --lr 1e-3 "
    "--pipeline-model-parallel-size 4 --mock-data --tokenizer-type NullTokenizer --num-experts 4 "
    "--eval-interval 1000 --pipeline-schedule auto"
)
answer = preflight(["pretrain_gpt.py", *flags.split()], device="cpu")
assert answer.accepted, answer.refusals
import pytest
sys.exit(pytest.main(["-n", "0", "-q", *tests]))
"""
NEEDS_EXTRA = {"nvidia_resiliency_ext": "megatron_ext.training.survival"}
"""Modules that need an optional package, by that package."""


def without(feature: str, folder: Path) -> None:
    """Copy the package and its tests, without a feature and its entries in the list."""
    shutil.copytree(REPO / "megatron_ext", folder / "megatron_ext")
    shutil.copytree(REPO / "tests", folder / "tests")
    shutil.copy(REPO / "pyproject.toml", folder)
    shutil.rmtree(folder / "megatron_ext" / "features" / feature)
    listed = folder / "megatron_ext" / "feature_list.py"
    lines = listed.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if f"megatron_ext.features.{feature}." not in line]
    assert len(kept) < len(lines)
    listed.write_text("".join(kept), encoding="utf-8")


@pytest.mark.short_s(20)
@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_needs_no_feature(feature: str, tmp_path: Path) -> None:
    without(feature, tmp_path)
    not_imported = [""]
    for package, module in NEEDS_EXTRA.items():
        if find_spec(package) is None:
            not_imported.append(module)
    done = subprocess.run(
        [sys.executable, "-c", CODE, ",".join(not_imported), *TESTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MEGATRON_EXT_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_option_whose_feature_is_gone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_change, "_classes", dict)
    for option in ({"slices": 2}, {"pairs": True}):
        with pytest.raises(
            ScheduleError, match=f"1f1b has no option '{next(iter(option))}'"
        ):
            generate("1f1b", 4, 8, **table_change.in_use(**option))
    whole = generate("1f1b", 4, 8, **table_change.in_use(slices=1, pairs=False))
    assert (whole.num_slices, whole.pairs) == (1, ())
