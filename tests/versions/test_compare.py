"""The comparison of releases names each change of a copy of the installed release."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.patches import drift
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.versions import compare

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
P2P = "megatron/core/pipeline_parallel/p2p_communication.py"


def _root() -> Path:
    """Return the installed Megatron: the tree in use, which has all of it, or the wheel."""
    tree, core = upstream.find_tree(), releases.installed_core()
    if tree is None and core is None:
        pytest.skip("megatron-core is installed from a tree")
    return tree if tree is not None else core.parents[1]  # type: ignore[union-attr]


@cache
def _read() -> dict[str, Any]:
    return compare.read(compare.Tree(_root()))


@pytest.fixture
def reference() -> dict[str, Any]:
    """Names that this package relies on in the installed Megatron."""
    return deepcopy(_read())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the installed Megatron's source."""
    python = shutil.ignore_patterns("*.so", "__pycache__", "*.pyc")
    shutil.copytree(_root() / "megatron", tmp_path / "megatron", ignore=python)
    return tmp_path


def _edit(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text()
    assert text.count(old) >= 1, f"{file} has no {old!r}"
    path.write_text(text.replace(old, new))


def _rename_argument(root: Path) -> None:
    _edit(root, P2P, "tensor_send_prev", "tensor_to_prev")


def _move_function(root: Path) -> None:
    path = root / SCHEDULES
    lines = path.read_text().splitlines(keepends=True)
    [function] = [
        node
        for node in ast.parse("".join(lines)).body
        if isinstance(node, ast.FunctionDef)
        and node.name == "get_forward_backward_func"
    ]
    span = slice(function.lineno - 1, function.end_lineno)
    (path.parent / "chosen.py").write_text("".join(lines[span]))
    del lines[span]
    path.write_text("".join(lines))


def _change_body(root: Path) -> None:
    """Put a statement behind the docstring of `Timers.log`."""
    path = root / "megatron" / "core" / "timers.py"
    text = path.read_text()
    opened = text.index('"""', text.index("    def log("))
    body = text.index('"""', opened + 3) + 3
    path.write_text(text[:body] + "\n        assert names is not names" + text[body:])


def _change_comment(root: Path) -> None:
    path = root / SCHEDULES
    path.write_text(path.read_text().replace("    if", "    # why\n    if", 1))


def _new_flag(root: Path) -> None:
    path = root / "megatron/training/arguments.py"
    if not path.is_file():
        pytest.skip("this wheel has no megatron.training: set MEGATRON_LM_PATH")
    path.write_text(
        path.read_text() + "\n\ndef _more(g):\n    g.add_argument('--turbo')\n"
    )


@pytest.mark.parametrize(
    ("mutate", "name", "change"),
    [
        (
            _rename_argument,
            "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            r"signature: -tensor_send_prev \+tensor_to_prev",
        ),
        (
            _move_function,
            "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            r"moved to megatron/core/pipeline_parallel/chosen\.py:1",
        ),
        (_change_body, "megatron.core.timers:Timers.log", r"edited \([0-9a-f]{12}\)"),
        (_new_flag, "--turbo", "new setting"),
    ],
)
def test_each_mutation_is_named(
    copied: Path,
    reference: dict[str, Any],
    mutate: Callable[[Path], None],
    name: str,
    change: str,
) -> None:
    mutate(copied)
    found = compare.differences(compare.Tree(copied), reference)
    named = {one.what: one.change for one in found}
    assert re.fullmatch(change, named[name]), found
    assert len(found) <= 4, f"more than what was changed: {found}"


@pytest.mark.parametrize("section", ["called", "targets"])
def test_a_name_that_the_record_lacks_is_named(
    reference: dict[str, Any], section: str
) -> None:
    name = next(iter(reference[section]))
    del reference[section][name]
    [found] = compare.differences(compare.Tree(_root()), reference)
    assert (found.what, found.change) == (name, "not in the record: --accept it")
    assert bool(found.patched_by) == (section == "targets")


def test_what_the_package_relies_on_is_in_the_record() -> None:
    tree, record = compare.Tree(_root()), compare.known()
    release = releases.parse_release(tree.version or "")
    assert release is not None
    if release < (0, 19):
        pytest.skip(
            "names of this release are gone from the newest, whose record this is"
        )
    relied_on = {*compare.patched(release), *compare.called()}
    lacking = sorted(relied_on - {*record["called"], *record["targets"]})
    assert [name for name in lacking if tree.find(name) is not None] == []


def test_comments_do_not_count(copied: Path, reference: dict[str, Any]) -> None:
    _change_comment(copied)
    assert compare.differences(compare.Tree(copied), reference) == []


def test_a_reviewed_change_is_accepted_by_its_hash_until_the_next_one(
    copied: Path, reference: dict[str, Any]
) -> None:
    _change_body(copied)
    tree = compare.Tree(copied)
    [found] = compare.differences(tree, reference)
    definition = tree.find(found.what)
    assert definition is not None
    pin = reference["targets"][found.what]
    pin["reviewed"] = [tree.fingerprint(definition)["sha256"]]
    assert compare.differences(compare.Tree(copied), reference) == []
    _change_body(copied)
    assert compare.differences(compare.Tree(copied), reference) != []


def test_the_installed_release_is_what_is_known_of_it(
    reference: dict[str, Any],
) -> None:
    """Reading source finds the very functions that the guard finds at run time."""
    tree = compare.Tree(_root())
    pins = drift._load()
    if pins["version"] != tree.version:
        pytest.skip(f"fingerprints are those of {pins['version']}")
    found = reference["targets"]
    absent = {
        name for name in pins["targets"] if tree.file_of(name.partition(":")[0]) is None
    }
    assert {name: one["sha256"] for name, one in found.items()} == {
        name: pin["sha256"]
        for name, pin in pins["targets"].items()
        if name not in absent
    }


def test_the_command_needs_no_torch_and_says_what_it_compared(copied: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'compare'\n"
        "from tests.versions.compare import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(copied)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode in (0, 1), done.stderr
    assert re.search(r"\d+ names, \d+ differences\n$", done.stdout), done.stdout
