"""The program without flags: schedules through `configure` train as Megatron's own 1F1B does."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .scripts import REPO

PROGRAM = REPO / "examples" / "configure" / "tiny_gpt.py"
# Two ranks of bitpipe print, and one may do so between the other's text and its end of line.
_LOSS = re.compile(r"sample (\d+): loss (\d+\.\d+)")


OWN = PROGRAM.with_name("own_module.py")


def losses(*words: str, program: Path = PROGRAM) -> dict[int, float]:
    """Run a program on four ranks; return the loss of each sample."""
    done = _run(*words, program=program)
    assert done.returncode == 0, done.stderr
    return {int(sample): float(loss) for sample, loss in _LOSS.findall(done.stdout)}


def _run(*words: str, program: Path) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_EXT_DEVICE": ""}
    return subprocess.run(
        [*launcher, str(program), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def megatrons() -> dict[int, float]:
    """The losses of Megatron's own 1F1B."""
    found = losses()
    assert sorted(found) == list(range(24))
    assert found[23] != found[0]
    return found


def test_it_has_fewer_than_thirty_statements() -> None:
    statements = [
        node for node in ast.walk(ast.parse(PROGRAM.read_text())) if _is_code(node)
    ]
    assert 20 < len(statements) < 30


def _is_code(node: ast.AST) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not is_docstring


def test_zb_v_has_the_bits_of_1f1b(megatrons: dict[int, float]) -> None:
    assert losses("zb-v") == megatrons


_TIES = (
    "from megatron_ext.runtime.folded import tie_embeddings\ntie_embeddings(chunks)\n"
)
_LOOP = "for step in range(3):"


def _tied(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the program with a model whose embedding is tied to its output layer."""
    text, model = PROGRAM.read_text(), "64, 16, **keywords"
    shared = model.replace("**", "share_embeddings_and_output_weights=True, **")
    for old, new in ((model, shared), *changes):
        assert old in text
        text = text.replace(old, new)
    program = folder / "tied.py"
    program.write_text(text)
    return program


@pytest.mark.parametrize("loop", ["training", "evaluation"])
def test_tied_embeddings_that_nobody_filled_are_missed(
    tmp_path: Path, loop: str
) -> None:
    forward_only = ("model=chunks,", "model=chunks, forward_only=True,")
    program = _tied(tmp_path, *([forward_only] if loop == "evaluation" else []))
    done = _run("zb-v", program=program)
    assert done.returncode != 0
    assert (
        "(the second is zero); call megatron_ext.runtime.folded.tie_embeddings(chunks)"
        in (done.stderr)
    )


def test_tied_embeddings_have_the_bits_of_1f1b(tmp_path: Path) -> None:
    expected = losses(program=_tied(tmp_path))
    assert sorted(expected) == list(range(24))
    assert losses("zb-v", program=_tied(tmp_path, (_LOOP, _TIES + _LOOP))) == expected


def test_a_module_of_ones_own_has_the_bits_of_1f1b() -> None:
    expected = losses(program=OWN)
    assert sorted(expected) == list(range(24))
    assert expected[23] != expected[0]
    assert losses("zb-v", program=OWN) == expected
    # Two mirrored pipelines are replicas: their gradients are added up in another order.
    assert losses("bitpipe", program=OWN) == pytest.approx(expected, rel=1e-5)


def test_a_module_of_ones_own_is_short() -> None:
    [stage] = [
        n for n in ast.parse(OWN.read_text()).body if isinstance(n, ast.ClassDef)
    ]
    assert stage.end_lineno is not None
    assert stage.end_lineno - stage.lineno < 25


@pytest.mark.slow
def test_bitpipe_differs_by_the_order_of_sums(megatrons: dict[int, float]) -> None:
    assert losses("bitpipe") == pytest.approx(megatrons, rel=1e-5)
