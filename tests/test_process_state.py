"""A process holds four things, and what a user asked for is read in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Every commit can break these guards, and CI runs the short tier.
pytestmark = pytest.mark.short_s(10)

PACKAGE = Path(__file__).parents[1] / "megatron_ext"
FIVE = {
    "patches/registry.py: REGISTRY",
    "config/active.py: _PROCESS",
    "devices/__init__.py: _PROCESS",
    "features/trees/routes.py: _CURRENT",
    "training/survival.py: store_connection",
}
"""The registry of patches, the active configuration, the device, the store of routes, which also
work without a configuration, and the attempt's connection to its store, which outlives the
configuration of an attempt."""
CODE = {"schedules/generators/catalog.py: _GENERATORS"}
"""Filled by decorators while modules are imported, also those of users; no state of a run."""
OTHER_PROCESSES = ("tools/launch/",)
"""Commands with processes of their own, of which none trains."""
MAKERS = frozenset(
    {"list", "dict", "set", "deque", "defaultdict", "count", "bytearray", "local"}
)
CHANGES = frozenset(
    "add append clear extend insert pop popleft remove setdefault update".split()
)


@cache
def sources() -> list[tuple[str, ast.Module]]:
    trees = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(OTHER_PROCESSES):
            trees.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return trees


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a module assigns at its top level: (name, value)."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changed(tree: ast.Module) -> set[str]:
    """Return the names whose objects a module changes: by a method, an item or an attribute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                found.add(root(node.func.value))
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(
            node.ctx, ast.Load
        ):
            found.add(root(node.value))
    return {name for name in found if name is not None}


def local_names(tree: ast.Module) -> set[str]:
    """Return names that functions bind, which hide those of the module."""
    stores = (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    )
    top = {name for name, _ in assigned(tree)}
    return {node.id for node in stores} - top


def mutable_classes(tree: ast.Module) -> set[str]:
    """Return classes of a module whose instances may be changed."""
    kinds = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and "NamedTuple" not in map(ast.unparse, node.bases)
    ]
    return {
        kind.name
        for kind in kinds
        if not any("frozen=True" in ast.unparse(d) for d in kind.decorator_list)
        and any(
            isinstance(part, ast.AnnAssign)
            or (isinstance(part, ast.FunctionDef) and part.name == "__init__")
            for part in kind.body
        )
    }


def state(name: str, tree: ast.Module) -> list[str]:
    """Name what a module keeps for the process."""
    found = [
        f"{name}: global {', '.join(node.names)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    touched, own = changed(tree) - local_names(tree), mutable_classes(tree)
    for variable, value in assigned(tree):
        called = root(value.func) if isinstance(value, ast.Call) else None
        last = (
            value.func.attr
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            else called
        )
        is_made = isinstance(value, ast.List | ast.Dict | ast.Set) or last in MAKERS
        if (
            (is_made and variable in touched)
            or last in {"count", "local"}
            or called in own
        ):
            found.append(f"{name}: {variable}")
    return found


@pytest.mark.short_s(4)
def test_a_process_holds_five_things() -> None:
    found = {line for name, tree in sources() for line in state(name, tree)}
    assert found == FIVE | CODE


@pytest.mark.parametrize(
    "code",
    [
        "_x = None\ndef f():\n    global _x\n    _x = 1",
        "_x = []\ndef f():\n    _x.append(1)",
        "_x: dict[str, int] = {}\ndef f():\n    _x['a'] = 1",
        "import itertools\n_x = itertools.count()",
        "class A:\n    x: int = 0\n_x = A()",
    ],
)
def test_the_scan_finds_state(code: str) -> None:
    assert len(state("sample.py", ast.parse(code))) == 1


READERS = ("config/", "training/", "hosts/", "tools/")
"""Rooms that read flags: the configuration, the training loop, other hosts, commands."""
COMMANDS = {
    "__init__.py",  # whether a command imports it
    "__main__.py",
    "cli.py",
    "errors.py",  # words of what parsers refuse
    "devices/__init__.py",  # the device, before Megatron's parser
    "upstream/parent.py",
    "upstream/flag_list.py",  # makes a parser of the flags in the sources of Megatron
    "upstream/person_view.py",
    "upstream/tree.py",
    "upstream/releases.py",
    "planning/layout_search.py",  # asks the rules of flags about what it proposes
    "tools/plan_command.py",
    "planning/model_flags.py",
    "planning/techniques.py",  # Megatron's flags describe a model
    "planning/training_cut.py",
    "upstream/signatures.py",  # calls Megatron's functions that take parsed arguments
    "features/lengths/plan_lengths.py",  # a command
    "features/lengths/length_rules.py",  # features' part of the configuration
    "features/pairs/pair_rules.py",
    "features/pairs/waiting_choice.py",
    "features/slices/slice_rules.py",
}
PATCHES_ON_TRAINING = {
    "patches/arguments.py",
    "patches/disaggregation.py",
    "patches/trace.py",
}
FLAGS = ("argparse", "get_args", "sys.argv")


def reads_flags(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "argparse"]
        elif isinstance(node, ast.ImportFrom) and node.module == "argparse":
            found.append("argparse")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.argv"}:
            found.append("sys.argv")
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            is_typings = ast.unparse(node).startswith("typing.")
            found += ["get_args"] if name == "get_args" and not is_typings else []
    return found


def test_nothing_behind_the_configuration_reads_flags() -> None:
    found = {
        f"{name}: {what}"
        for name, tree in sources()
        if not name.startswith(READERS) and name not in COMMANDS | PATCHES_ON_TRAINING
        for what in reads_flags(tree)
    }
    assert found == set()


BOUNDARIES = (
    "__init__.py",
    "config/active.py",
    "config/flags.py",
    "devices/__init__.py",
    "devices/cpu.py",
    "devices/host.py",
    "hosts/own_program.py",  # MEGATRON_EXT_DISABLE
    "patches/device.py",
    "patches/drift.py",
    "patches/hooks.py",  # RANK: only one rank logs
    "tools/schedule_commands.py",  # NO_COLOR
    "tracing/digest_files.py",  # MEGATRON_EXT_DIGESTS, around any training
    "tracing/operator_files.py",  # the same
    "tracing/scalars.py",  # the view of a training log shows them
    "tracing/step_records.py",  # `compare` sets it around a job
    "tools/compare/run.py",  # it starts jobs, which get its environment
    "upstream/cause.py",  # torchrun names its file there
    "upstream/failure.py",
    "upstream/parent.py",
    "training/runner.py",
    "upstream/tree.py",
)
"""Where the environment is read; docs/architecture.md says why each of them."""


def test_the_environment_is_read_at_boundaries_only() -> None:
    found = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in {"os.environ", "os.getenv"}
    }
    assert found == set(BOUNDARIES)


def test_get_args_is_for_the_patches_on_megatrons_trainer() -> None:
    found = {name for name, tree in sources() if "get_args" in reads_flags(tree)}
    assert found <= PATCHES_ON_TRAINING | {"training/wheel.py"}
