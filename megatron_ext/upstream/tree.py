"""Finds, fetches and checks the Megatron-LM tree, which contains upstream's scripts.

The wheel from the package index contains `megatron.core`, and since 0.17 also `megatron.training`,
but no scripts. Scripts come from a source tree of the same release. This module does not import
Megatron.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from megatron_ext.errors import UpstreamMismatch, UserError
from megatron_ext.upstream import releases
from megatron_ext.upstream.releases import SUPPORTED, parse_release

URL = "https://github.com/NVIDIA/Megatron-LM"

_FETCH_TIMEOUT_S = 900


def how_to_get() -> str:
    """Return instructions for getting the tree for the installed release."""
    return (
        "`megatron-ext upstream fetch`, or set MEGATRON_LM_PATH to a checkout of Megatron-LM at "
        f"{releases.reference().tag}"
    )


def cache_dir() -> Path:
    """Return the folder that `fetch` clones into: in `XDG_CACHE_HOME`, by default `~/.cache`."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises for an unknown user
    base = os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return Path(base) / "megatron_ext" / f"Megatron-LM-{releases.reference().tag}"


def is_tree(path: Path) -> bool:
    """Return whether a directory is a Megatron-LM source tree; site-packages has no scripts."""
    training = path / "megatron" / "training" / "__init__.py"
    script = path / "pretrain_gpt.py"
    # Do not use Path.is_file(), which raises inside a folder without access permission.
    return os.access(training, os.R_OK) and os.access(script, os.R_OK)


def find_tree() -> Path | None:
    """Return the Megatron-LM tree to use, or None.

    The search order is: `MEGATRON_LM_PATH` (which a script inside a tree sets), the entries of
    `sys.path` (which include `PYTHONPATH`), and the destination of `fetch`.

    Raises:
        UserError: `MEGATRON_LM_PATH` is set, but is not a Megatron-LM tree.
    """
    named = os.environ.get("MEGATRON_LM_PATH")
    if named:
        path = Path(named).expanduser().resolve()
        if not is_tree(path):
            raise UserError(
                f"MEGATRON_LM_PATH={named} is not a Megatron-LM tree (it has no "
                f"pretrain_gpt.py next to megatron/training); point it at a checkout of "
                f"{releases.reference().tag}, or unset it"
            )
        return path
    candidates = [Path(entry or ".").resolve() for entry in sys.path]
    candidates.append(cache_dir())
    for candidate in candidates:
        if is_tree(candidate):
            return candidate
    return None


def setting_names() -> frozenset[str]:
    """Return the names of Megatron's settings, read from the sources in the tree and the wheel.

    These are the fields of its configuration objects, and the flags of `megatron.training`.
    """
    tree = find_tree()
    core = releases.installed_core()
    names = frozenset[str]()
    if tree is not None:
        names |= _names_below(tree / "megatron")
    if core is not None:
        names |= _names_below(core.parent)
    return names


@lru_cache(maxsize=2)
def _names_below(root: Path) -> frozenset[str]:
    # Search the sources instead of importing them, because this also runs without torch.
    names: set[str] = set()
    for pattern in (
        "core/**/*config.py",
        "training/arguments.py",
        "training/config/*.py",
    ):
        for path in root.glob(pattern):
            text = path.read_text(encoding="utf-8")
            names.update(re.findall(r"^    (\w+)\s*:", text, re.M))
            flags = re.findall(r"[\"']--([\w-]+)", text)
            names.update(flag.replace("-", "_") for flag in flags)
    return frozenset(names)


def require_tree() -> Path:
    """Return the tree to use, after checking its version.

    Raises:
        UserError: No tree was found.
        UpstreamMismatch: The tree's version is not supported.
    """
    tree = find_tree()
    if tree is None:
        raise UserError(
            "no Megatron-LM tree was found (MEGATRON_LM_PATH is not set, PYTHONPATH contains none, "
            f"and none was fetched). Get one with {how_to_get()}"
        )
    check_tree(tree)
    return tree


def ignored_sources(core: Path) -> str | None:
    """Return a sentence about edits in the tree's `megatron/core`, which no process imports.

    Args:
        core: The `megatron/core` folder of the installed megatron-core.

    Returns:
        The sentence, or None if there is no tree or its sources are identical to the installed
        ones.
    """
    tree = find_tree()
    if tree is None or not core.is_dir():
        return None
    in_tree = tree / "megatron" / "core"
    if in_tree.resolve() == core.resolve():
        return None
    # `fetch` gets the release's first tag, but the installed patch release may be
    # later.
    version_in_tree = releases.written_version(in_tree)
    is_other_version = version_in_tree != releases.written_version(core)
    if tree == cache_dir() and is_other_version:
        return None
    differing = []
    for path in sorted(in_tree.rglob("*.py")):
        name = path.relative_to(in_tree)
        installed = core / name
        if not installed.is_file() or path.read_bytes() != installed.read_bytes():
            differing.append(name.as_posix())
    if not differing:
        return None
    return (
        f"megatron.core comes from {core}; {in_tree} is ignored, although {len(differing)} of its "
        f"files differ, such as {differing[0]}. To use it: pip install --no-deps -e {tree}"
    )


def check_tree(tree: Path) -> None:
    """Reject a tree whose scripts do not match the installed megatron-core.

    Raises:
        UpstreamMismatch: The tree's release differs from megatron-core's, or is not supported.
    """
    version = tree_version(tree)
    release = parse_release(version)
    installed = releases.installed_release()
    fits = release is not None and release >= min(releases.REFERENCES)
    if fits and installed in (None, release):
        return
    remedy = f"Get it with {how_to_get()}"
    # A supported tree can also be used with the wheel for its release.
    if release is not None and fits:
        minor_release = f"{release[0]}.{release[1]}"
        remedy += f"; or install its megatron-core: pip install 'megatron-core=={minor_release}.*'"
    major, minor = installed or max(releases.REFERENCES)
    raise UpstreamMismatch(
        f"Megatron-LM tree {tree}",
        expected=f"version {major}.{minor}, like the installed megatron-core",
        actual=f"version {version}",
        installed=releases.core_version() or "(none)",
        supported=SUPPORTED,
        remedy=remedy,
    )


def tree_version(tree: Path) -> str:
    """Return the version in a tree's sources, without importing them."""
    return releases.written_version(tree / "megatron" / "core") or "unknown"


def tree_status(tree: Path) -> tuple[str, str | None, list[str]]:
    """Compare a tree's version, commit and Python files with the reference.

    Returns:
        The version of the tree; its commit, or None if it is not a git checkout; and one sentence
        for each difference.
    """
    _, tag, expected = releases.reference()
    version = tree_version(tree)
    commit = _git(tree, "rev-parse", "HEAD")
    problems = []
    # The sources of core_v0.19.0 state version 0.19.1, so compare only the minor release.
    minor = releases.parse_release(tag.removeprefix("core_v"))
    if commit is None and releases.parse_release(version) != minor:
        problems.append(f"version is {version}, expected {tag}")
    if commit is not None:
        if commit != expected:
            problems.append(
                f"commit is {commit[:12]}, expected {expected[:12]} ({tag})"
            )
        changes = _git(
            tree,
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            "*.py",
        )
        if changes is not None:
            # Two characters that say how the file changed precede its path; `_git` may have
            # stripped the first of them, a space, from the first line.
            for line in changes.splitlines():
                problems.append(f"{line[2:].strip()} is modified")
    return version, commit, problems


def _git(tree: Path, *arguments: str) -> str | None:
    """Return a git command's output, or None if git fails or the tree is not a checkout."""
    if not (tree / ".git").exists():
        return None
    try:
        done = subprocess.run(
            # By default, git rejects a tree that another user owns, which is common on shared file
            # systems and in container images.
            ["git", "-c", f"safe.directory={tree}", "-C", str(tree), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def fetch(destination: Path | None = None, url: str = URL) -> Path:
    """Clone Megatron-LM at the installed release's tag without its history, and verify the commit.

    A failed transfer leaves nothing behind. An existing tree at the right tag is kept.

    Args:
        destination: The folder to create. Default: `cache_dir()`.
        url: The repository, which may be a mirror.

    Returns:
        The path of the tree.

    Raises:
        UserError: git is missing or failed, or the destination contains something else.
        UpstreamMismatch: The tag points to a different commit in that repository.
    """
    target = destination or cache_dir()
    _, tag, expected = releases.reference()
    if target.exists():
        problems = ["it is not a Megatron-LM tree"]
        if is_tree(target):
            _, _, problems = tree_status(target)
        if problems:
            raise UserError(
                f"{target} exists but is not Megatron-LM {tag}: "
                f"{'; '.join(problems)}. Move it away, or choose another folder with --path"
            )
        return target
    if shutil.which("git") is None:
        raise UserError(
            "`megatron-ext upstream fetch` needs git, which is not on PATH; install it"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Clone on the destination's file system, so that the rename below is atomic.
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"cannot write to {target.parent}: {error}; choose another --path"
        ) from None
    try:
        clone = scratch / "tree"
        subprocess.run(
            [
                "git",
                "clone",
                "--quiet",
                "--depth",
                "1",
                "--branch",
                tag,
                url,
                str(clone),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            # Fail instead of waiting for a password if a mirror requires one.
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
        commit = _git(clone, "rev-parse", "HEAD")
        # A tag can be moved, and a mirror can have a different tag with the same name.
        if commit != expected:
            raise UpstreamMismatch(
                f"{url} {tag}",
                expected=f"commit {expected}",
                actual=f"commit {commit or 'unknown'}",
                installed="(none)",
                supported=tag,
                remedy="Fetch from the official repository or an exact mirror of it",
            )
        # Rename only a verified clone, so that an interrupted fetch leaves no partial tree.
        clone.rename(target)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"fetching {url} took more than {_FETCH_TIMEOUT_S} s; try again, or choose a closer "
            f"mirror with --url"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        reason = lines[-1] if lines else "no output"
        raise UserError(
            f"git could not fetch {tag} from {url}: {reason}. Check the network, or choose a "
            f"mirror with --url, or set MEGATRON_LM_PATH to an existing checkout"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
