"""The installed Megatron's flags, read from its sources.

Importing Megatron's own parser requires torch and takes seconds. This module parses the sources
instead and collects every flag's names, type and choices, so that a command line can be checked
before a job starts, by the rules that apply in the job. `tests/test_flag_list.py` compares the list
with the parser itself.
"""

from __future__ import annotations

import ast
import re
import signal
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_ext.upstream import releases
from megatron_ext.upstream.tree import find_tree

_FACTORY = "ArgumentGroupFactory"
"""Upstream's class that creates a group of flags from a dataclass's fields."""

# A list of numbers in Python's notation, with repetition: ([0]*3+[1]*1)*2.
_PATTERN = re.compile(r"[\[\]()\d,*+\s]+")

_SIMPLE_TYPES = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}


@dataclass(frozen=True)
class MegatronFlag:
    """A flag in Megatron's parser."""

    names: tuple[str, ...]
    """All spellings of the flag, such as `--seq-length`."""
    keywords: dict[str, Any]
    """Arguments of `ArgumentParser.add_argument`, without the default."""
    default: Any = None
    """The default; also None if the source computes it."""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments that the flag sets."""
        dest = self.keywords.get("dest")
        if dest:
            return str(dest)
        first_name = self.names[0].lstrip("-")
        return first_name.replace("-", "_")

    def add_to(self, parser: ArgumentParser) -> None:
        """Add the flag to a parser, without its default."""
        # With SUPPRESS, flags that the user does not give are absent from the parsed
        # arguments.
        parser.add_argument(*self.names, default=SUPPRESS, **self.keywords)


def megatron_flags() -> tuple[MegatronFlag, ...]:
    """Return the flags of the Megatron that trains here; empty if there is no training loop."""
    tree = find_tree()
    core = releases.installed_core()
    if tree is not None:
        training = tree / "megatron"
    elif core is not None:
        training = core.parent
    else:
        return ()
    arguments_file = training / "training" / "arguments.py"
    if not arguments_file.is_file():
        return ()
    if core is None:
        return _read_flags(training, training)
    # A job imports megatron.core from the installed wheel, even if there is a tree.
    return _read_flags(training, core.parent)


def script_flags(script: Path) -> tuple[MegatronFlag, ...]:
    """Return the flags that a script itself adds to the parser."""
    try:
        module = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()  # Python reports the problem when it runs the script
    converters = _Converters(_functions_of(module), None)
    return tuple(_added(module, converters))


@lru_cache(maxsize=2)
def _read_flags(training: Path, core: Path) -> tuple[MegatronFlag, ...]:
    """Return Megatron's flags.

    Args:
        training: The `megatron` folder that contains the training loop.
        core: The `megatron` folder that contains megatron.core; may be the same.
    """
    arguments_file = training / "training" / "arguments.py"
    module = ast.parse(arguments_file.read_text(encoding="utf-8"))
    functions = _functions_of(module)
    classes = _Classes(training, core)
    flags: list[MegatronFlag] = []
    converters = _Converters(functions, classes)
    for name in _called_functions(functions["add_megatron_arguments"]):
        function = functions.get(name)
        if function is None:
            continue
        # Upstream's function for kitchen adds no flags if the package nvidia_kitchen is missing.
        if "kitchen" in name and find_spec("nvidia_kitchen") is None:
            continue
        flags += _added(function, converters)
        flags += _made_of_classes(function, classes)
    modelopt = training / "post_training" / "arguments.py"
    # Upstream's scripts add these flags if modelopt is installed.
    if find_spec("modelopt") is not None and modelopt.is_file():
        module = ast.parse(modelopt.read_text(encoding="utf-8"))
        flags += _added(module, converters)
    return tuple(flags)


def _functions_of(module: ast.Module) -> dict[str, ast.FunctionDef]:
    """Return a module's functions, by name."""
    functions: dict[str, ast.FunctionDef] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
    return functions


def _called_functions(function: ast.FunctionDef) -> list[str]:
    names = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.append(node.func.id)
    return names


def _added(scope: ast.AST, converters: _Converters) -> Iterator[MegatronFlag]:
    """Yield the flags that code adds through `add_argument` with literal names."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr != "add_argument":
            continue
        names = []
        for argument in node.args:
            name = _literal(argument)
            if isinstance(name, str) and name.startswith("--"):
                names.append(name)
        if not names:
            continue
        values: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            # Skip `**settings`, which has no keyword name and never sets the type.
            if keyword.arg:
                values[keyword.arg] = keyword.value
        keywords = _keywords(values, converters)
        default = _literal(values.get("default"))
        yield MegatronFlag(tuple(names), keywords, default)


def _keywords(values: dict[str, ast.expr], converters: _Converters) -> dict[str, Any]:
    """Return the arguments of an `add_argument` call that decide how words are parsed."""
    keywords: dict[str, Any] = {}
    for name in ("dest", "nargs", "const", "choices"):
        value = _literal(values.get(name))
        if value is not None:
            keywords[name] = value
    action = values.get("action")
    if action is not None:
        keywords["action"] = _literal(action)
        if ast.unparse(action).endswith("BooleanOptionalAction"):
            keywords["action"] = BooleanOptionalAction
        keywords.pop("const", None)
    elif "type" in values:
        keywords |= converters.keywords(values["type"])
    return keywords


def _literal(value: ast.expr | None) -> Any:
    """Return the value of a literal, or None for anything that must be computed."""
    if value is None:
        return None
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


class _Converters:
    """Translates upstream's `type=` functions into argparse settings, without importing them."""

    def __init__(
        self,
        functions: dict[str, ast.FunctionDef],
        classes: _Classes | None,
    ) -> None:
        self._functions = functions
        self._classes = classes

    def keywords(self, converter: ast.expr) -> dict[str, Any]:
        """Return arguments of `add_argument` that accept the same words as a converter."""
        name = ast.unparse(converter)
        if name == "int":
            return {"type": int}
        if name == "float":
            return {"type": float}
        if name == "tuple_type":
            return {"type": _integers}
        if name.endswith("_freq_type"):
            return {"type": _frequency}
        definition = self._functions.get(name, converter)
        text = ast.unparse(definition)
        member = re.search(r"\b([A-Z]\w+)\[\w+\]", text)
        if member is not None and self._classes is not None:
            # The choices are an enumeration's member names, or the words that the
            # function compares the value to.
            words = re.findall(r"[\"'](\w+)[\"']", text)
            member_names = self._classes.members(member[1])
            return {"type": str, "choices": [*member_names, *words]}
        # Treat bool as text too: argparse calls it on the word, so every non-empty word is valid.
        return {"type": str}


def _integers(word: str) -> tuple[int, ...]:
    numbers = word.strip("()").split(",")
    return tuple(int(number) for number in numbers)


def _frequency(word: str) -> int | str:
    """Parse a number of layers, or a list with one number per layer."""
    if "[" in word and _PATTERN.fullmatch(word):
        return word
    return int(word)


class _Classes:
    """The dataclasses in Megatron's configuration, by name."""

    def __init__(self, training: Path, core: Path) -> None:
        files = list(core.glob("core/**/*config.py"))
        files += core.glob("core/*.py")
        files.append(core / "core" / "transformer" / "enums.py")
        files += training.glob("training/*config.py")
        files += training.glob("training/config/*.py")
        self._files = [file for file in files if file.is_file()]
        self._texts: dict[Path, str] = {}
        for file in self._files:
            self._texts[file] = file.read_text(encoding="utf-8")
        self._parsed: dict[Path, dict[str, ast.ClassDef]] = {}

    def named(self, name: str) -> ast.ClassDef | None:
        """Return a class, reading the file that defines it; None if no file does."""
        pattern = re.compile(rf"^class {re.escape(name)}\b", re.M)
        for file in self._files:
            text = self._texts[file]
            if pattern.search(text) is None:
                continue
            # Parse files on demand, because most of them define no class with flags.
            if file not in self._parsed:
                definitions: dict[str, ast.ClassDef] = {}
                for node in ast.parse(text).body:
                    if isinstance(node, ast.ClassDef):
                        definitions[node.name] = node
                self._parsed[file] = definitions
            return self._parsed[file].get(name)
        return None

    def fields(self, name: str) -> dict[str, ast.AnnAssign]:
        """Return a dataclass's fields in order, including those of its base classes."""
        definition = self.named(name)
        if definition is None:
            return {}
        fields: dict[str, ast.AnnAssign] = {}
        # As in `dataclasses`, the fields of base classes come first, and a redefined
        # field keeps its place.
        for base in definition.bases:
            base_name = ast.unparse(base)
            fields |= self.fields(base_name)
        for node in definition.body:
            if not isinstance(node, ast.AnnAssign):
                continue
            if isinstance(node.target, ast.Name):
                fields[node.target.id] = node
        return fields

    def members(self, name: str) -> list[str]:
        """Return the names of an enumeration's members."""
        if name == "signal.Signals":
            return [number.name for number in signal.Signals]
        definition = self.named(name)
        if definition is None:
            return []
        names = []
        for node in definition.body:
            if not isinstance(node, ast.Assign):
                continue
            member = node.targets[0]
            if isinstance(member, ast.Name):
                names.append(member.id)
        return names


def _made_of_classes(
    function: ast.FunctionDef,
    classes: _Classes,
) -> Iterator[MegatronFlag]:
    """Yield the flags that a function creates from dataclass fields."""
    # Upstream stores the names of excluded fields in a variable before it calls the factory.
    lists: dict[str, Any] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        variable = node.targets[0]
        if isinstance(variable, ast.Name):
            lists[variable.id] = _literal(node.value)
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        callee = ast.unparse(node.func)
        class_name = node.args[0]
        if not callee.startswith(_FACTORY) or not isinstance(class_name, ast.Name):
            continue
        excluded = _excluded(node, lists)
        fields = classes.fields(class_name.id)
        for name, field in fields.items():
            if name in excluded:
                continue
            flag = _of_field(name, field, classes)
            if flag is not None:
                yield flag


def _excluded(call: ast.Call, lists: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the fields that a factory does not create flags for.

    `lists` maps the variables of the calling function to their values.
    """
    excluded: Sequence[str] = ()
    for keyword in call.keywords:
        if keyword.arg != "exclude":
            continue
        if isinstance(keyword.value, ast.Name):
            excluded = lists[keyword.value.id]
        else:
            excluded = _literal(keyword.value)
    return excluded


def _of_field(
    name: str,
    field: ast.AnnAssign,
    classes: _Classes,
) -> MegatronFlag | None:
    """Return the flag that upstream creates from a field, or None if the field has `init=False`."""
    default = _literal(field.value)
    metadata = dict[str, Any]()
    if isinstance(field.value, ast.Call):
        arguments: dict[str | None, ast.expr] = {}
        for keyword in field.value.keywords:
            arguments[keyword.arg] = keyword.value
        default = _literal(arguments.get("default"))
        if _literal(arguments.get("init")) is False:
            return None
        field_metadata = _literal(arguments.get("metadata")) or {}
        metadata = field_metadata.get("argparse_meta", {})
    keywords: dict[str, Any] = {
        "dest": name,
        **_keywords_of_type(field.annotation, classes),
    }
    names = [name]
    if keywords.get("type") is bool:
        del keywords["type"]
        keywords["action"] = "store_true" if default is False else "store_false"
        # Upstream's factory gives a field that is true by default only flags that turn it off.
        if default is not False:
            names = [f"no_{name}", f"disable_{name}"]
    flags = [f"--{spelling.replace('_', '-')}" for spelling in names]
    flags = metadata.get("arg_names", flags)
    # A field's metadata overrides what its type implies, as in upstream's factory.
    for key, value in metadata.items():
        if key != "arg_names":
            keywords[key] = value
    default = keywords.pop("default", default)
    keywords.pop("help", None)
    return MegatronFlag(tuple(flags), keywords, default)


def _keywords_of_type(annotation: ast.expr, classes: _Classes) -> dict[str, Any]:
    """Return the argparse settings that an annotation implies: type, choices and `nargs`."""
    if isinstance(annotation, ast.BinOp):  # such as `int | None`
        return _keywords_of_type(annotation.left, classes)
    name = ast.unparse(annotation)
    if isinstance(annotation, ast.Subscript):
        qualified_name = ast.unparse(annotation.value)
        name = qualified_name.rpartition(".")[2]
        if name == "Literal":
            choices = _literal(annotation.slice)
            if not isinstance(choices, tuple):
                choices = (choices,)
            return {"type": type(choices[0]), "choices": choices}
        inner = _keywords_of_type(annotation.slice, classes)
        if name in ("list", "List"):
            inner["nargs"] = "+"
        return inner
    if name in _SIMPLE_TYPES:
        return {"type": _SIMPLE_TYPES[name]}
    members = classes.members(name)
    if not members:
        return {"type": str}
    return {"type": str, "choices": members}
