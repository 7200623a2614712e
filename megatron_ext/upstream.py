"""The pinned Megatron-LM: which version, and where its two parts come from.

The wheel from the package index holds `megatron.core` only. Upstream's scripts and
`megatron.training` come from a source tree at the same tag. This module is the only one that knows
how to find, fetch and check that tree; it imports nothing of Megatron.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from megatron_ext.errors import UpstreamMismatch, UserError

__all__ = [
    "PIN_COMMIT",
    "PIN_TAG",
    "PIN_VERSION",
    "SUPPORTED",
    "TreeStatus",
    "cache_dir",
    "check_tree",
    "fetch",
    "find_tree",
    "installed_core",
    "require_tree",
    "tree_status",
    "use_tree",
]

PIN_VERSION = "0.16.1"
PIN_TAG = f"core_v{PIN_VERSION}"
PIN_COMMIT = "55ac7082517c3878ae653c07c09c534b8aed49f6"
SUPPORTED = ">=0.16.0,<0.17"
URL = "https://github.com/NVIDIA/Megatron-LM"

_FETCH_TIMEOUT_S = 900
_HOW_TO_GET = (
    f"Get it with `megatron-ext upstream fetch`, or set MEGATRON_LM_PATH to a checkout of "
    f"Megatron-LM at {PIN_TAG}"
)
_chosen: Path | None = None


@dataclass(frozen=True)
class TreeStatus:
    """What a Megatron-LM tree is: its version, and its commit where it is a git checkout."""

    path: Path
    version: str
    commit: str | None
    modified: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """One sentence for each difference from the pin; empty where the tree is the pin."""
        found = []
        if self.version != PIN_VERSION:
            found.append(f"version is {self.version}, expected {PIN_VERSION}")
        if self.commit is not None and self.commit != PIN_COMMIT:
            found.append(f"commit is {self.commit[:12]}, expected {PIN_COMMIT[:12]} ({PIN_TAG})")
        found.extend(f"{name} is modified" for name in self.modified)
        return found


def cache_dir() -> Path:
    """Return where `fetch` puts the tree: below `XDG_CACHE_HOME`, by default `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "megatron_ext" / f"Megatron-LM-{PIN_TAG}"


def is_tree(path: Path) -> bool:
    """Whether a directory is a Megatron-LM source tree."""
    return (path / "megatron" / "training" / "__init__.py").is_file()


def use_tree(path: Path) -> None:
    """Make a tree the one of this process: the tree that a script to run lies in."""
    global _chosen
    _chosen = path.resolve()


def find_tree() -> Path | None:
    """Return the Megatron-LM tree to use, or None.

    In this order: the tree of the script that runs (`use_tree`), `MEGATRON_LM_PATH`, the entries of
    `sys.path` (which holds `PYTHONPATH`), and the place where `fetch` puts one.

    Raises:
        UserError: `MEGATRON_LM_PATH` is set and is no Megatron-LM tree.
    """
    if _chosen is not None:
        return _chosen
    named = os.environ.get("MEGATRON_LM_PATH")
    if named:
        path = Path(named).expanduser().resolve()
        if not is_tree(path):
            raise UserError(
                f"MEGATRON_LM_PATH={named} is not a Megatron-LM tree (it has no "
                f"megatron/training); point it at a checkout of {PIN_TAG}, or unset it"
            )
        return path
    candidates = [Path(entry or ".").resolve() for entry in sys.path]
    return next((path for path in [*candidates, cache_dir()] if is_tree(path)), None)


def require_tree() -> Path:
    """Return the tree to use, of a supported version.

    Raises:
        UserError: There is none.
        UpstreamMismatch: It is of another version.
    """
    tree = find_tree()
    if tree is None:
        raise UserError(
            "no Megatron-LM tree was found (MEGATRON_LM_PATH is not set, PYTHONPATH holds none, "
            f"and none was fetched). {_HOW_TO_GET}"
        )
    check_tree(tree)
    return tree


def check_tree(tree: Path) -> None:
    """Refuse a tree of another release line than the pin's.

    Raises:
        UpstreamMismatch: It is of another version.
    """
    version = tree_version(tree)
    if version.split(".")[:2] != PIN_VERSION.split(".")[:2]:
        raise UpstreamMismatch(
            f"Megatron-LM tree {tree}",
            expected=f"version {PIN_VERSION} (tag {PIN_TAG})",
            found=f"version {version}",
            installed=version,
            supported=SUPPORTED,
            remedy=_HOW_TO_GET,
        )


def tree_version(tree: Path) -> str:
    """Return the version that a tree says it has, read without importing it."""
    try:
        text = (tree / "megatron" / "core" / "package_info.py").read_text()
    except OSError:
        return "unknown"
    parts = [re.search(rf"^{key}\s*=\s*(\d+)", text, re.M) for key in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        return "unknown"
    return ".".join(part.group(1) for part in parts if part)


def tree_status(tree: Path) -> TreeStatus:
    """Return version, commit and locally modified Python files of a tree."""
    commit = _git(tree, "rev-parse", "HEAD") if (tree / ".git").exists() else None
    modified: tuple[str, ...] = ()
    if commit is not None:
        changes = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", "*.py") or ""
        modified = tuple(line[3:] for line in changes.splitlines())
    return TreeStatus(tree, tree_version(tree), commit and commit.strip(), modified)


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-c", f"safe.directory={tree}", "-C", str(tree), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@lru_cache(maxsize=1)
def installed_core() -> Path | None:
    """Return the `megatron/core` directory of the installed distribution, or None.

    None also where `megatron-core` was installed from a tree in editable form: then Python's own
    search finds it.
    """
    try:
        distribution = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    core = Path(str(distribution.locate_file("megatron/core")))
    return core if (core / "__init__.py").is_file() else None


def fetch(destination: Path | None = None, url: str = URL) -> Path:
    """Put a shallow clone of Megatron-LM at the pinned tag in place, its commit verified.

    The clone is made beside the destination and renamed at the end, so that a broken transfer
    leaves nothing behind. A tree that is there already and is the pin is kept.

    Args:
        destination: Where to; by default `cache_dir()`.
        url: The repository, or a mirror of it.

    Returns:
        The path of the tree.

    Raises:
        UserError: git is missing or failed, or the destination holds something else.
        UpstreamMismatch: The tag of that repository is another commit.
    """
    target = destination or cache_dir()
    if target.exists():
        return _keep(target)
    if shutil.which("git") is None:
        raise UserError("`megatron-ext upstream fetch` needs git, which is not on PATH; install it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"cannot write to {target.parent}: {error}; choose another --path"
        ) from None
    try:
        clone = scratch / "tree"
        _clone(url, clone)
        commit = (_git(clone, "rev-parse", "HEAD") or "").strip()
        if commit != PIN_COMMIT:
            raise UpstreamMismatch(
                f"{url} {PIN_TAG}",
                expected=f"commit {PIN_COMMIT}",
                found=f"commit {commit or 'unknown'}",
                installed="(none)",
                supported=PIN_TAG,
                remedy="Fetch from the official repository or a faithful mirror of it",
            )
        clone.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _keep(target: Path) -> Path:
    problems = tree_status(target).problems if is_tree(target) else ["it is no Megatron-LM tree"]
    if problems:
        raise UserError(
            f"{target} exists but is not Megatron-LM {PIN_TAG}: {'; '.join(problems)}. Move it "
            f"away, or give another place with --path"
        )
    return target


def _clone(url: str, clone: Path) -> None:
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", PIN_TAG, url, str(clone)]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"fetching {url} took more than {_FETCH_TIMEOUT_S} s; try again, or give a nearer "
            f"mirror with --url"
        ) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no output"]
        raise UserError(
            f"git could not fetch {PIN_TAG} from {url}: {last[0]}. Check the network, or give a "
            f"mirror with --url, or set MEGATRON_LM_PATH to a checkout that you have"
        ) from None
