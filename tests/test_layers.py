"""The import rules of the package, read off its source files."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# Every commit can break these guards, and CI runs the short tier.
pytestmark = pytest.mark.short_s(10)

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "megatron_ext"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path for path in (REPO / "csrc").rglob("*") if path.suffix in {".cc", ".h"}
)

# Python gives these two names their meaning; every other module is found by its own.
SHARED_NAMES = {"__init__", "__main__"}

DEVICE_NAME = re.compile(r"(cuda|nccl|musa|mccl)(:\d+)?")


def name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def parsed(paths: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_there_are_sources_to_check() -> None:
    assert len(SOURCES) > 20
    assert NATIVE


def repeated(paths: list[Path]) -> dict[str, list[str]]:
    """Return the names that several modules have, with those modules."""
    homes: dict[str, list[str]] = {}
    for path in paths:
        homes.setdefault(path.stem, []).append(name(path))
    return {
        stem: found
        for stem, found in homes.items()
        if len(found) > 1 and stem not in SHARED_NAMES
    }


def test_no_two_modules_share_a_name() -> None:
    assert repeated(SOURCES) == {}
    assert repeated([*SOURCES, PACKAGE / "launch" / "executor.py"]).keys() == {
        "executor"
    }


def test_only_device_files_call_devices_by_name() -> None:
    elsewhere = [
        path
        for path in SOURCES
        if not path.is_relative_to(PACKAGE / "devices")
        and path != PACKAGE / "patches" / "device.py"
    ]
    found = [
        f"{name(path)}:{node.lineno}: {node.value!r}"
        for path, tree in parsed(elsewhere)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and DEVICE_NAME.fullmatch(node.value)
    ]
    assert not found, "this belongs into megatron_ext/devices/:\n" + "\n".join(found)


def foreign_names(tree: ast.Module) -> set[str]:
    """Names that a file binds by importing other packages (the standard library is none)."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [
                (f"{node.module}.{a.name}", a.asname or a.name) for a in node.names
            ]
        else:
            continue
        for module, bound in modules:
            package = module.split(".")[0]
            if package != "megatron_ext" and package not in sys.stdlib_module_names:
                names.add(bound or package)
    return names


def assigned_attributes(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Each attribute that a file sets or deletes: (line, the object that has the attribute)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            yield node.lineno, node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"setattr", "delattr"}
        ):
            yield node.lineno, node.args[0]


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def foreign_assignments(path: Path, tree: ast.Module) -> list[str]:
    foreign = foreign_names(tree)
    return [
        f"{name(path)}:{line}: {ast.unparse(target)}"
        for line, target in assigned_attributes(tree)
        if root(target) in foreign
    ]


def test_only_patches_assign_into_other_packages() -> None:
    elsewhere = [
        path for path in SOURCES if not path.is_relative_to(PACKAGE / "patches")
    ]
    found = [
        line
        for path, tree in parsed(elsewhere)
        for line in foreign_assignments(path, tree)
    ]
    assert not found, "this has to be a patch of the registry:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.cuda.is_available = print",
        "import torch.cuda as c\ndef f():\n    c.x += 1",
        "from megatron.core import parallel_state\nsetattr(parallel_state, 'x', 1)",
        "def f():\n    from torch import Tensor\n    del Tensor.cuda",
    ],
)
def test_the_scan_finds_assignments(code: str) -> None:
    assert foreign_assignments(PACKAGE / "sample.py", ast.parse(code))


def test_the_native_core_includes_no_torch() -> None:
    include = re.compile(r'#\s*include\s*[<"](torch|ATen|c10)')
    found = [
        name(path)
        for path in NATIVE
        if include.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"pointers and sizes cross into C++, no tensors: {found}"


def test_cheap_commands_import_nothing_heavy() -> None:
    code = (
        "import sys, megatron_ext, megatron_ext.cli; megatron_ext.cli.build_parser(); "
        "print(*{'torch', 'numpy', 'megatron.core', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


# The finder of an editable installation would find the package where it was installed from.
LINT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
from importlinter.cli import lint_imports
sys.exit(lint_imports(no_cache=True))
"""


def imported(path: Path, tree: ast.Module, modules: frozenset[str]) -> set[str]:
    """Modules of the package that a file imports, in functions and for types, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & modules) or {str(node.module)}
    return found & modules


def module(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def room(module: str) -> str:
    """A folder of the package, or a file beside them."""
    return ".".join(module.split(".")[:2])


def check_circles(extra: str = "", into: str = "") -> None:
    """Raise `CycleError` for files, or for rooms, that import each other; with a line more."""
    modules = frozenset(map(module, SOURCES))
    graph = {}
    for path in SOURCES:
        code = path.read_text(encoding="utf-8") + (extra if name(path) == into else "")
        graph[module(path)] = imported(path, ast.parse(code), modules)
    TopologicalSorter(graph).prepare()
    rooms: dict[str, set[str]] = {}
    for one, others in graph.items():
        rooms.setdefault(room(one), set()).update(map(room, others))
    TopologicalSorter({one: others - {one} for one, others in rooms.items()}).prepare()


def test_no_files_and_no_rooms_import_each_other() -> None:
    check_circles()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "config/active.py",
            "if TYPE_CHECKING:\n    from megatron_ext.runtime import runtime",
        ),
        ("config/entrances.py", "def f(): from megatron_ext import hosts"),
        ("planning/bounds.py", "from megatron_ext.config.incompatible import RULES"),
        ("runtime/compute.py", "from megatron_ext.runtime.executor import Executor"),
        ("upstream/tree.py", "from megatron_ext.training import wheel"),
    ],
)
def test_a_circle_is_found(file: str, line: str) -> None:
    with pytest.raises(CycleError):
        check_circles(f"\n{line}\n", f"megatron_ext/{file}")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_import_contracts_hold() -> None:
    done = lint_imports(REPO)
    assert done.returncode == 0, done.stdout + done.stderr


BREACHES = {
    "transport/base.py": "megatron_ext.schedules.table.actions",
    "schedules/table/actions.py": "megatron_ext.schedules.search.simulate",
    "schedules/search/simulate.py": "megatron_ext.runtime.program",
    "planning/bounds.py": "torch",
    "runtime/executor.py": "argparse",
    "runtime/compute.py": "megatron_ext.features.trees.trees",
    "features/pairs/plans.py": "megatron_ext.features.slices.slicing",
    "errors.py": "megatron_ext.cli",
    "config/stages.py": "megatron_ext.hosts",
    "runtime/program.py": "megatron_ext.tools.trace.survey",
}
"""One forbidden import for each contract: file, and what it must not import."""


def test_a_broken_contract_is_found(tmp_path: Path) -> None:
    """Each contract is broken once, in a copy; the tool names every one of them."""
    shutil.copytree(
        PACKAGE, tmp_path / "megatron_ext", ignore=shutil.ignore_patterns("*.so")
    )
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    for file, module in BREACHES.items():
        with (tmp_path / "megatron_ext" / file).open("a", encoding="utf-8") as source:
            source.write(f"\nimport {module}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"Contracts: 0 kept, {len(BREACHES)} broken" in done.stdout
