"""The drift guard: checks that upstream functions are still the ones the patches were written for.

`fingerprints/MINOR.json` describes one minor release of Megatron: the hash of every file that
contains targets, and each target's hash and signature. A target may also have `reviewed` hashes,
for later edits that were reviewed and found compatible with the patches. A release newer than all
fingerprints is compared with the newest ones. `tests/versions/compare.py` writes these files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatron_ext.errors import UpstreamMismatch, UserError
from megatron_ext.upstream import releases, tree
from megatron_ext.upstream.releases import SUPPORTED

_LOG = logging.getLogger(__name__)

_FOLDER = Path(__file__).with_name("fingerprints")
_NOTHING = "nothing"
# Syntax node fields that have no effect at run time or exist only in some versions of
# Python.
_IGNORED = frozenset(
    {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}
)


def policy() -> Literal["error", "warn", "ignore"]:
    """Return how to handle drift: the value of `MEGATRON_EXT_DRIFT`, or `error` by default.

    Raises:
        UserError: The variable has an invalid value.
    """
    value = os.environ.get("MEGATRON_EXT_DRIFT") or "error"
    if value not in {"error", "warn", "ignore"}:
        raise UserError(f"MEGATRON_EXT_DRIFT is {value!r}; use error, warn or ignore")
    return value  # type: ignore[return-value]


def is_missing(mismatch: UpstreamMismatch) -> bool:
    """Return whether the mismatch is that the target is missing."""
    return mismatch.actual.startswith(_NOTHING)


def refuses(mismatch: UpstreamMismatch | None) -> bool:
    """Return whether a mismatch disables its target's patches; a missing target always does."""
    if mismatch is None:
        return False
    return policy() == "error" or is_missing(mismatch)


def missing(target: str, detail: str) -> UpstreamMismatch:
    """Return the mismatch for a target that does not exist."""
    return _mismatch(target, "this name", f"{_NOTHING} ({detail})")


def missing_module(target: str) -> UpstreamMismatch | None:
    """Return the mismatch for a target whose package exists but whose module does not, or None."""
    name = target.partition(":")[0]
    package = name.rpartition(".")[0]
    if name in sys.modules or package not in sys.modules:
        return None
    # `find_spec` would import the package, so call it only if that is already imported.
    if find_spec(name) is not None:
        return None
    return missing(target, f"{package} has no such module")


def log(differences: Sequence[str], release: releases.Release | None) -> None:
    """Log one line, on one rank, if the run uses an untested Megatron."""
    # torch.distributed is not initialised yet, so use the launcher's variable instead.
    if os.environ.get("RANK", "0") != "0":
        return
    if differences and policy() == "warn":
        _LOG.warning(
            "MEGATRON_EXT_DRIFT=warn: the patches in use were not written for Megatron %s: %s",
            releases.core_version(),
            "; ".join(differences),
        )
    elif releases.is_newer_than_known(release):
        _LOG.warning(
            "Megatron %s is newer than the supported releases (%s); all functions that the "
            "features in use rely on are identical to those in %s",
            releases.core_version(),
            SUPPORTED,
            releases.reference().version,
        )


def compare(target: str, original: Any) -> UpstreamMismatch | None:
    """Return how the target differs from the release its patch was written for, or None.

    Targets without a fingerprint (torch names, constants) are not compared.
    """
    fingerprints = _load()
    expected = fingerprints["targets"].get(target)
    if expected is None:
        return None
    module_name = target.partition(":")[0]
    module = sys.modules.get(module_name)
    path = getattr(module, "__file__", None)
    # Most files are unchanged, so compare the file's hash first: parsing every
    # function's source would slow down every import.
    expected_file_hash = fingerprints["files"].get(module_name)
    if path is not None and _file_hash(path) == expected_file_hash:
        return None
    actual = fingerprint(original)
    if actual is None:
        kind = type(original).__name__
        return _mismatch(target, f"a function {expected['signature']}", kind)
    reviewed_hashes = expected.get("reviewed", ())
    if actual["sha256"] in (expected["sha256"], *reviewed_hashes):
        return None
    if actual["signature"] != expected["signature"]:
        return _mismatch(
            target,
            f"signature {expected['signature']}",
            actual["signature"],
        )
    return _mismatch(
        target,
        f"source {expected['sha256'][:12]}",
        f"source {actual['sha256'][:12]} (edited)",
    )


def _mismatch(target: str, expected: str, actual: str) -> UpstreamMismatch:
    # Force a reinstall: pip keeps an installed version that satisfies the range, even
    # if its files have been edited.
    remedy = f"pip install --force-reinstall --no-deps 'megatron-core{SUPPORTED}'"
    is_of_tree = target.startswith(("megatron.legacy.", "megatron.training."))
    if is_of_tree and tree.find_tree():
        remedy = tree.how_to_get()
    if not actual.startswith(_NOTHING):
        remedy += (
            "; or, if you made the change, set MEGATRON_EXT_DRIFT=warn to log whether your "
            "code still runs"
        )
    return UpstreamMismatch(
        target,
        expected=expected,
        actual=actual,
        installed=releases.core_version() or "(none)",
        supported=SUPPORTED,
        remedy=f"Get the supported version with {remedy}",
    )


def fingerprint(obj: Any) -> dict[str, str] | None:
    """Return the fingerprint of a loaded function or class, or None if it has no source."""
    try:
        function = getattr(obj, "__func__", obj)
        # `unwrap` finds the function under its decorators, which the source includes.
        undecorated = inspect.unwrap(function)
        source = inspect.getsource(undecorated)
    except (TypeError, OSError):
        return None
    return fingerprint_of_source(source)


def fingerprint_of_source(source: str) -> dict[str, str]:
    """Return the hash of a definition's meaning and, for a function, its signature.

    The source includes decorators and may have any indentation.
    """
    is_indented = source[:1].isspace()
    if is_indented:  # a method must be inside a block
        source = f"if 1:\n{source}"
    definition = ast.parse(source).body[0]
    if is_indented:
        assert isinstance(definition, ast.If)
        definition = definition.body[0]
    signature = ""
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument in ast.walk(definition.args):
            if isinstance(argument, ast.arg):
                # Annotations change between releases without affecting calls.
                argument.annotation = None
        signature = f"({ast.unparse(definition.args)})"
    text = repr(_meaning(definition))
    digest = hashlib.sha256(text.encode())
    return {"sha256": digest.hexdigest(), "signature": signature}


def _meaning(node: Any) -> Any:
    """Return syntax as nested tuples, identical in every Python, minus parts with no effect."""
    # Changes to comments, docstrings, layout or annotations therefore do not count as
    # drift. `ast.dump` and `ast.unparse` would not work here, because their output
    # differs between Python versions.
    if isinstance(node, ast.JoinedStr):  # Python 3.12 appends an empty string to some
        node.values = [
            value for value in node.values if getattr(value, "value", None) != ""
        ]
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            meaning = _meaning(value)
            if name not in _IGNORED and meaning not in (None, ()):
                fields.append((name, meaning))
        return type(node).__name__, *fields
    if isinstance(node, list):
        return tuple(
            _meaning(item) for item in node if not _is_constant_statement(item)
        )
    return node


def _is_constant_statement(node: Any) -> bool:
    """Return whether a statement is a constant that has no effect, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@lru_cache(maxsize=1)
def _load() -> dict[str, Any]:
    """Return the fingerprints for the installed release or the nearest older one."""
    path = path_of(releases.reference().version)
    fingerprints: dict[str, Any] = json.loads(path.read_text())
    return fingerprints


def path_of(version: str) -> Path:
    """Return the path of a release's fingerprint file."""
    major_and_minor = version.split(".")[:2]
    minor_release = ".".join(major_and_minor)
    return _FOLDER / f"{minor_release}.json"


# Cached because several targets share a file.
@cache
def _file_hash(path: str) -> str:
    content = Path(path).read_bytes()
    return hashlib.sha256(content).hexdigest()
