"""Compares what this package relies on of Megatron with the newest known release, without torch.

    python tests/versions/compare.py TREE_OR_WHEEL                     # 1: something differs
    python tests/versions/compare.py TREE_OR_WHEEL --accept TARGET...  # reviewed
    python tests/versions/compare.py TREE_OR_WHEEL --record COMMIT     # take a release in

It only reads source: every patched function, every name that is called or imported (found in this
package's source) and every setting of Megatron's parser. The known state is in
`patches/fingerprints/` (for patched functions, which the guard also compares at run time) and in
`relied_on.json`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext import patches
from megatron_ext.patches import drift
from megatron_ext.upstream import releases

PACKAGE = Path(patches.__file__).parents[1]
RELIED_ON = Path(__file__).with_name("relied_on.json")


class Definition(NamedTuple):
    """Definition of a name in a tree."""

    file: Path
    node: ast.stmt
    source: str

    @property
    def is_function(self) -> bool:
        """Whether a patch may wrap it, so that the guard compares it at run time."""
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)


class Difference(NamedTuple):
    """A row of the table."""

    what: str
    change: str
    place: str = ""
    patched_by: str = ""


class Tree:
    """The source of one Megatron.

    Args:
        root: Folder with `megatron/core`: a checkout, or the place where a wheel is installed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.version = releases.written_version(root / "megatron" / "core")
        if self.version is None:
            sys.exit(
                f"{root} has no megatron/core: give a tree of Megatron-LM or a wheel"
            )
        self._text = cache(Path.read_text)
        self._parsed = cache(lambda file: ast.parse(self._text(file)))

    def file_of(self, module: str) -> Path | None:
        """Return the file of a module."""
        path = self.root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
        return None

    def find(self, name: str) -> Definition | None:
        """Return the definition behind `module:path`, through re-exports and base classes."""
        module, _, path = name.partition(":")
        file = self.file_of(module)
        return (
            None
            if file is None
            else self._find(file, module, path.split("."), seen=set())
        )

    def _find(
        self, file: Path, module: str, path: list[str], seen: set[str]
    ) -> Definition | None:
        key = f"{module}:{'.'.join(path)}"
        if key in seen:
            return None
        seen.add(key)
        definition: Definition | None = None
        for node in _statements(self._parsed(file).body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if path[0] == (alias.asname or alias.name):
                        source = _absolute(
                            node, module, is_package=file.name == "__init__.py"
                        )
                        source_file = self.file_of(source)
                        if source_file is not None:
                            names = [alias.name, *path[1:]]
                            definition = (
                                self._find(source_file, source, names, seen)
                                or definition
                            )
            elif path[0] in _defined(node):
                if len(path) == 1 or not isinstance(node, ast.ClassDef):
                    definition = self._source(file, node)
                else:
                    definition = self._member(file, module, node, path[1:], seen)
        return definition

    def _member(
        self,
        file: Path,
        module: str,
        owner: ast.ClassDef,
        path: list[str],
        seen: set[str],
    ) -> Definition | None:
        for node in _statements(owner.body):
            if path[0] in _defined(node):
                return self._source(file, node)
        bases = (ast.unparse(base).split(".")[-1] for base in owner.bases)
        inherited = (self._find(file, module, [base, *path], seen) for base in bases)
        return next(
            (definition for definition in inherited if definition is not None), None
        )

    def _source(self, file: Path, node: ast.stmt) -> Definition:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = self._text(file).splitlines(keepends=True)
        return Definition(file, node, "".join(lines[first - 1 : node.end_lineno]))

    def fingerprint(self, definition: Definition) -> dict[str, Any]:
        """Return the fingerprint of a definition; for a class, that of its constructor."""
        if not isinstance(definition.node, ast.ClassDef):
            return drift.fingerprint_of_source(definition.source)
        module = self._module_of(definition.file)
        constructor = self._find(
            definition.file, module, [definition.node.name, "__init__"], seen=set()
        )
        if constructor is not None:
            return drift.fingerprint_of_source(constructor.source)
        fields = ", ".join(sorted(self._fields(f"{module}:{definition.node.name}")))
        return {
            "sha256": hashlib.sha256(fields.encode()).hexdigest(),
            "signature": f"({fields})",
        }

    def _module_of(self, file: Path) -> str:
        parts = file.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def moved_to(self, name: str) -> str:
        """Return where else in the tree a name is defined, if anywhere."""
        defined_name = name.partition(":")[2].partition(".")[0]
        pattern = re.compile(
            rf"^(?:async )?(?:def|class) {re.escape(defined_name)}\b", re.M
        )
        for file in sorted(self.root.glob("megatron/**/*.py")):
            match = pattern.search(self._text(file))
            if match is not None:
                return self.place(
                    file, self._text(file).count("\n", 0, match.start()) + 1
                )
        return ""

    def place(self, file: Path, line: int) -> str:
        """Return `path:line` within the tree."""
        return f"{file.relative_to(self.root).as_posix()}:{line}"

    @cached_property
    def settings(self) -> set[str]:
        """Return the flags of Megatron's parser, and configuration fields that become flags."""
        arguments = self.file_of("megatron.training.arguments")
        if arguments is None:
            return set()
        nodes = list(ast.walk(self._parsed(arguments)))
        places = {  # includes imports inside functions
            alias.name: f"{node.module}:{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        flags = set()
        for call in nodes:
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func).split(".")[-1]
            if name == "add_argument":
                words = (
                    word.value for word in call.args if isinstance(word, ast.Constant)
                )
                flags |= {word for word in words if word.startswith("--")}
            elif name == "ArgumentGroupFactory":
                fields = self._fields(places[ast.unparse(call.args[0])])
                assert fields, f"{ast.unparse(call)}: a configuration without fields"
                flags |= {f"--{field.replace('_', '-')}" for field in fields}
        return flags

    def _fields(self, name: str) -> set[str]:
        """Return the annotated fields of a class and of its bases."""
        definition = self.find(name)
        if definition is None or not isinstance(definition.node, ast.ClassDef):
            return set()
        module = self._module_of(definition.file)
        fields = {
            node.target.id
            for node in definition.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        return fields.union(
            *(self._fields(f"{module}:{ast.unparse(b)}") for b in definition.node.bases)
        )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and those inside of `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = (handler.body for handler in getattr(node, "handlers", ()))
            for inner in (
                node.body,
                getattr(node, "orelse", []),
                getattr(node, "finalbody", []),
                *handlers,
            ):
                yield from _statements(inner)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [getattr(node, "target", None)]
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the module that `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    num_parts = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:num_parts], *filter(None, [node.module])])


def patched(release: releases.Release) -> dict[str, str]:
    """Return the targets of all patches for a release, each with the ids of its patches."""
    ids_by_target: dict[str, list[str]] = {}
    for row in patches.rows():
        if row.is_for(release) and row.module.startswith("megatron."):
            ids_by_target.setdefault(row.target, []).append(row.id)
    return {target: ", ".join(ids) for target, ids in sorted(ids_by_target.items())}


def called() -> set[str]:
    """Return every `module:name` of Megatron that this package's source imports, calls or names."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        constants = {
            node.targets[0].id: node.value.value
            for node in nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        aliases = dict(constants)  # modules by their names in this file
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "megatron."
            ):
                for alias in node.names:
                    names.add(f"{node.module}:{alias.name}")
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr):
                text = _text(node, constants)
                if re.fullmatch(r"megatron\.[\w.]+:[\w.]+", text):
                    names.add(text)
            elif isinstance(node, ast.Attribute):
                module = _module(node.value, aliases)
                if module.startswith("megatron."):
                    names.add(f"{module}:{node.attr}")
    return names


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the value of a string expression, with the file's constants filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return constants.get(ast.unparse(node.value), "?")
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(_text(part, constants) for part in parts)


def _module(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return the module that `x`, `import_module(x)` or `sys.modules[x]` stands for."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        node = node.args[0]
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
        node = node.slice
    elif not isinstance(node, ast.Name):
        return ""
    return (
        str(node.value)
        if isinstance(node, ast.Constant)
        else aliases.get(ast.unparse(node), "")
    )


def read(tree: Tree) -> dict[str, Any]:
    """Return what this package relies on in a tree: fingerprints and settings."""
    release = releases.parse_release(tree.version or "")
    assert release is not None
    by_patches = patched(release)
    targets, called_names = {}, {}
    for name in sorted({*by_patches, *called()}):
        definition = tree.find(name)
        if definition is not None:
            is_target = name in by_patches and definition.is_function
            (targets if is_target else called_names)[name] = tree.fingerprint(
                definition
            )
    return {
        "targets": targets,
        "called": called_names,
        "settings": sorted(tree.settings),
    }


def known() -> dict[str, Any]:
    """Return the same for the newest known release."""
    newest = releases.REFERENCES[max(releases.REFERENCES)].version
    return {
        **json.loads(RELIED_ON.read_text()),
        "targets": json.loads(drift.path_of(newest).read_text())["targets"],
    }


def differences(tree: Tree, reference: dict[str, Any]) -> list[Difference]:
    """Compare a tree with a reference of `known` or `read`."""
    release = releases.parse_release(tree.version or "")
    assert release is not None
    names = patched(release)
    rows = []
    for name, pin in sorted({**reference["called"], **reference["targets"]}.items()):
        definition = tree.find(name)
        if definition is None and name in reference["targets"] and name not in names:
            continue  # its patches end before this release
        if definition is None:
            place = tree.moved_to(name)
            change = f"moved to {place}" if place else "gone"
        else:
            place, change = (
                tree.place(definition.file, definition.node.lineno),
                _change(pin, tree.fingerprint(definition)),
            )
        if change:
            rows.append(Difference(name, change, place, names.get(name, "")))
    unrecorded = {*names, *called()} - {*reference["called"], *reference["targets"]}
    for name, definition in ((name, tree.find(name)) for name in sorted(unrecorded)):
        if definition is not None:
            place = tree.place(definition.file, definition.node.lineno)
            change = "not in the record: --accept it"
            rows.append(Difference(name, change, place, names.get(name, "")))
    settings = set(reference["settings"])
    rows += [
        Difference(flag, "new setting") for flag in sorted(tree.settings - settings)
    ]
    rows += [
        Difference(flag, "setting gone") for flag in sorted(settings - tree.settings)
    ]
    return rows


def _change(pin: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe how a definition differs from the known or reviewed one."""
    if now["sha256"] in (pin["sha256"], *pin.get("reviewed", ())):
        return ""
    if now["signature"] == pin["signature"]:
        return f"edited ({now['sha256'][:12]})"
    before, after = (_parameters(record["signature"]) for record in (pin, now))
    lost = [f"-{record}" for record in before if record not in after]
    added = [f"+{record}" for record in after if record not in before]
    return f"signature: {' '.join(lost + added) or 'another order'}"


def _parameters(signature: str) -> list[str]:
    """Return the parameters of a signature, with their defaults."""
    parsed = ast.parse(f"lambda {signature[1:-1]}: 0", mode="eval").body
    assert isinstance(parsed, ast.Lambda)
    arguments = parsed.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    named = [*zip(plain, defaults, strict=True)]
    named += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    stars = [(arguments.vararg, "*"), (arguments.kwarg, "**")]
    return [
        *(
            parameter.arg + (f"={ast.unparse(default)}" if default else "")
            for parameter, default in named
        ),
        *(
            f"{star}{parameter.arg}"
            for parameter, star in stars
            if parameter is not None
        ),
    ]


def table(differences: list[Difference]) -> str:
    """Return the differences as a Markdown table."""
    lines = ["| what | change | place | patched by |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {' | '.join(difference)} |" for difference in differences)]
    )


def accept(tree: Tree, names: list[str]) -> None:
    """Add hashes of definitions in this tree to the reviewed ones, or entries missing so far."""
    release = releases.parse_release(tree.version or "")
    assert release is not None
    by_patches = patched(release)
    newest = drift.path_of(releases.REFERENCES[max(releases.REFERENCES)].version)
    contents = [json.loads(file.read_text()) for file in (newest, RELIED_ON)]
    targets, called_names = contents[0]["targets"], contents[1]["called"]
    unknown = {*names} - {*targets, *called_names, *by_patches, *called()}
    if unknown:
        sys.exit(
            f"unknown: {', '.join(sorted(unknown))}; give names of the table's first column"
        )
    for name in names:
        definition = tree.find(name)
        if definition is None:
            sys.exit(
                f"{name} is not in {tree.root}: a row of its own has to say where it is"
            )
        is_target = name in targets or (name in by_patches and definition.is_function)
        new = tree.fingerprint(definition)
        pin = (targets if is_target else called_names).setdefault(name, new)
        reviewed = {*pin.get("reviewed", ()), new["sha256"]} - {pin["sha256"]}
        if reviewed:
            pin["reviewed"] = sorted(reviewed)
    for file, content in zip((newest, RELIED_ON), contents, strict=True):
        _write(file, content)


def record(tree: Tree, commit: str) -> None:
    """Write a release's fingerprints; for the newest known one, also called names and settings."""
    content = read(tree)
    about = {"version": tree.version, "commit": commit}
    modules = sorted({name.partition(":")[0] for name in content["targets"]})
    files = {}
    for module in modules:
        file = tree.file_of(module)
        assert file is not None
        files[module] = hashlib.sha256(file.read_bytes()).hexdigest()
    path = drift.path_of(str(tree.version))
    _write(path, {**about, "files": files, "targets": content.pop("targets")})
    release = releases.parse_release(str(tree.version))
    assert release is not None
    if release >= max(releases.REFERENCES):
        _write(RELIED_ON, {**about, **content})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Compare, accept or record; return 1 if an unreviewed difference exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="TREE_OR_WHEEL")
    parser.add_argument(
        "--accept", nargs="+", metavar="TARGET", help="reviewed: patches and calls fit"
    )
    parser.add_argument("--record", metavar="COMMIT", help="take this release in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = args.source
        if root.suffix == ".whl":
            zipfile.ZipFile(root).extractall(folder)
            root = Path(folder)
        tree = Tree(root)
        if args.record:
            record(tree, args.record)
            return 0
        if args.accept:
            accept(tree, args.accept)
        reference = known()
        rows = differences(tree, reference)
    if rows:
        print(table(rows))
    count = len(reference["targets"]) + len(reference["called"])
    about = f"{reference['version']} ({reference['commit'][:10]})"
    print(f"{tree.version} against {about}: {count} names, {len(rows)} differences")
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
