"""The drift guard: is an upstream function still the one that a patch was written for?

`fingerprints/MINOR.json` holds, for one minor release of Megatron, the hash of every file with
targets, and the hash and signature of each target. A target may have further hashes, `reviewed`:
edits that somebody has read, and that its patches fit. A release newer than all fingerprints is
compared with the newest. `tests/versions/compare.py` writes them.
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
# Parts of syntax that mean nothing at run time, or that only some Pythons have.
_IGNORED = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_params"})


def policy() -> Literal["error", "warn", "ignore"]:
    """Return what to do about drift: `MEGATRON_EXT_DRIFT`, by default `error`.

    Raises:
        UserError: The variable has another value.
    """
    value = os.environ.get("MEGATRON_EXT_DRIFT") or "error"
    if value not in {"error", "warn", "ignore"}:
        raise UserError(f"MEGATRON_EXT_DRIFT is {value!r}; use error, warn or ignore")
    return value  # type: ignore[return-value]


def is_missing(mismatch: UpstreamMismatch) -> bool:
    """Return whether the mismatch is a missing target."""
    return mismatch.found.startswith(_NOTHING)


def refuses(mismatch: UpstreamMismatch | None) -> bool:
    """Return whether a mismatch disables its target's patches; a missing target always does."""
    if mismatch is None:
        return False
    return policy() == "error" or is_missing(mismatch)


def missing(target: str, detail: str) -> UpstreamMismatch:
    """Return the mismatch of a target that does not exist."""
    return _mismatch(target, "this name", f"{_NOTHING} ({detail})")


def missing_module(target: str) -> UpstreamMismatch | None:
    """Return the mismatch of a target whose module is missing although its package exists."""
    name = target.partition(":")[0]
    package = name.rpartition(".")[0]
    if name in sys.modules or package not in sys.modules or find_spec(name) is not None:
        return None
    return missing(target, f"{package} has no such module")


def log(mismatches: Sequence[UpstreamMismatch], release: releases.Release | None) -> None:
    """Log one line, on one rank, about a run on an untested Megatron."""
    # Before torch.distributed knows ranks, so the launcher's variable has to do.
    if os.environ.get("RANK", "0") != "0":
        return
    if mismatches and policy() == "warn":
        _LOG.warning(
            "MEGATRON_EXT_DRIFT=warn: Megatron %s is not what patches in use were written for: %s",
            releases.core_version(),
            "; ".join(f"{mismatch.target} has {mismatch.found}" for mismatch in mismatches),
        )
    elif releases.is_newer_than_known(release):
        _LOG.warning(
            "Megatron %s is newer than this package knows (%s); all functions that the features "
            "in use rely on are those of %s",
            releases.core_version(),
            SUPPORTED,
            releases.reference().version,
        )


def compare(target: str, original: Any) -> UpstreamMismatch | None:
    """Return how the object at a target differs from that of the release it was written for.

    None: it does not. Targets without a fingerprint (torch's, constants) have no drift.
    """
    pinned, module = _load(), target.partition(":")[0]
    pin = pinned["targets"].get(target)
    path = getattr(sys.modules.get(module), "__file__", None)
    # Most files are as they were: one hash of each instead of one of each function, whose source
    # would have to be parsed, keeps imports fast.
    if pin is None or (path is not None and _file_hash(path) == pinned["files"].get(module)):
        return None
    found = fingerprint(original)
    if found is None:
        return _mismatch(target, f"a function {pin['signature']}", f"{type(original).__name__}")
    if found["sha256"] in (pin["sha256"], *pin.get("reviewed", ())):
        return None
    if found["signature"] != pin["signature"]:
        return _mismatch(target, f"signature {pin['signature']}", f"{found['signature']}")
    return _mismatch(
        target, f"source {pin['sha256'][:12]}", f"source {found['sha256'][:12]} (edited)"
    )


def _mismatch(target: str, expected: str, found: str) -> UpstreamMismatch:
    # Forced: pip leaves a version of the range as it is, whoever edited it.
    remedy = f"pip install --force-reinstall --no-deps 'megatron-core{SUPPORTED}'"
    if target.startswith(("megatron.legacy.", "megatron.training.")) and tree.find_tree():
        remedy = tree.how_to_get()
    if not found.startswith(_NOTHING):
        remedy += "; or, at your own risk, set MEGATRON_EXT_DRIFT=warn"
    return UpstreamMismatch(
        target,
        expected=expected,
        found=found,
        installed=releases.core_version() or "(none)",
        supported=SUPPORTED,
        remedy=f"Get the supported one with {remedy}",
    )


def fingerprint(obj: Any) -> dict[str, str] | None:
    """Return the fingerprint of a function or class in memory; None without source."""
    try:
        source = inspect.getsource(inspect.unwrap(getattr(obj, "__func__", obj)))
    except (TypeError, OSError):
        return None
    return fingerprint_of_source(source)


def fingerprint_of_source(source: str) -> dict[str, str]:
    """Return the hash of what a definition means, and a function's signature.

    The source has its decorators, at any indentation.
    """
    parsed = ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source).body[0]
    defined = parsed.body[0] if isinstance(parsed, ast.If) else parsed
    signature = ""
    if isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument in ast.walk(defined.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        signature = f"({ast.unparse(defined.args)})"
    text = repr(_meaning(defined))
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "signature": signature}


def _meaning(node: Any) -> Any:
    """Return syntax as nested tuples, equal on every Python, without what means nothing."""
    # So comments, docstrings, layout and annotations do not matter. The text of `ast.dump` and of
    # `ast.unparse` differs between Pythons.
    if isinstance(node, ast.JoinedStr):  # 3.12 ends some of them with an empty text
        node.values = [part for part in node.values if getattr(part, "value", None) != ""]
    if isinstance(node, ast.AST):
        parts = ((name, _meaning(value)) for name, value in ast.iter_fields(node))
        return type(node).__name__, *(
            part for part in parts if part[0] not in _IGNORED and part[1] not in (None, ())
        )
    if isinstance(node, list):
        return tuple(  # without constants as statements, which docstrings are
            _meaning(part)
            for part in node
            if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        )
    return node


@lru_cache(maxsize=1)
def _load() -> dict[str, Any]:
    """Return the fingerprints of the installed release, or of the nearest older one."""
    return json.loads(path_of(releases.reference().version).read_text())  # type: ignore[no-any-return]


def path_of(version: str) -> Path:
    """Return the file of a release's fingerprints."""
    return _FOLDER / f"{'.'.join(version.split('.')[:2])}.json"


@cache
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
