"""Finding, checking and fetching the tree; git runs for real, on repositories made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import UpstreamMismatch, UserError
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream


def _make_tree(path: Path, version: tuple[int, ...] | None = None) -> Path:
    (path / "megatron" / "training").mkdir(parents=True)
    (path / "megatron" / "training" / "__init__.py").write_text("")
    (path / "pretrain_gpt.py").write_text("")
    (path / "megatron" / "core").mkdir()
    if version is None:
        version = tuple(
            map(int, releases.reference().tag.partition("_v")[2].split("."))
        )
    major, minor, patch = version
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n"
    (path / "megatron" / "core" / "package_info.py").write_text(info)
    return path


def _git(path: Path, *arguments: str) -> str:
    command = [
        "git",
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-C",
        str(path),
        *arguments,
    ]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


def _commit_and_tag(tree: Path) -> str:
    _git(tree, "init", "-q")
    _git(tree, "add", ".")
    _git(tree, "commit", "-q", "-m", "all")
    _git(tree, "tag", releases.reference().tag)
    return _git(tree, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", "")  # so that what a test sets ends with it
    monkeypatch.delenv("MEGATRON_LM_PATH")


def test_without_any_tree_the_error_says_how_to_get_one() -> None:
    assert upstream.find_tree() is None
    with pytest.raises(UserError, match="megatron-ext upstream fetch"):
        upstream.require_tree()


def test_the_order_is_environment_then_path_then_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = _make_tree(upstream.cache_dir())
    assert upstream.find_tree() == cached
    on_path = _make_tree(tmp_path / "on_path")
    monkeypatch.syspath_prepend(str(on_path))
    assert upstream.find_tree() == on_path
    named = _make_tree(tmp_path / "named")
    monkeypatch.setenv("MEGATRON_LM_PATH", str(named))
    assert upstream.find_tree() == named


def test_a_wrong_megatron_lm_path_is_an_error_not_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_tree(upstream.cache_dir())
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"nowhere is not a Megatron-LM tree"):
        upstream.find_tree()


@pytest.mark.parametrize("version", [(0, 15, 0), (0, 17, 0), (1, 16, 1)])
def test_a_tree_that_does_not_match_the_wheel_is_refused(
    version: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "core_version", lambda: "0.16.1")
    tree, found = _make_tree(tmp_path / "tree", version), ".".join(map(str, version))
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tree))
    with pytest.raises(UpstreamMismatch) as caught:
        upstream.require_tree()
    text = str(caught.value)
    assert "expected version 0.16, like the installed megatron-core" in text
    assert f"found version {found}" in text
    assert "megatron-ext upstream fetch" in text
    # Its own megatron-core is a remedy where there is one that we run on.
    assert ("pip install 'megatron-core==0.17.*'" in text) == (version == (0, 17, 0))


def test_a_folder_without_scripts_is_no_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.17 on site-packages holds megatron/training."""
    site = _make_tree(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(site))
    assert upstream.find_tree() == site
    (site / "pretrain_gpt.py").unlink()
    assert upstream.find_tree() is None


def test_the_status_names_edited_files_and_a_foreign_commit(tmp_path: Path) -> None:
    tree = _make_tree(tmp_path / "tree")
    commit = _commit_and_tag(tree)
    (tree / "megatron" / "training" / "__init__.py").write_text("edited = True\n")
    problems = upstream.tree_status(tree)[2]
    assert any(commit[:12] in line for line in problems)
    assert "megatron/training/__init__.py is modified" in problems


def test_fetch_verifies_the_commit_and_leaves_nothing_when_it_differs(
    tmp_path: Path,
) -> None:
    origin = _make_tree(tmp_path / "origin")
    commit = _commit_and_tag(origin)
    target = tmp_path / "fetched" / "tree"
    with pytest.raises(UpstreamMismatch, match=commit):
        upstream.fetch(target, origin.as_uri())
    assert list(target.parent.iterdir()) == []


def test_fetch_puts_the_pinned_commit_in_place_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = _make_tree(tmp_path / "origin")
    reference = releases.reference()._replace(commit=_commit_and_tag(origin))
    monkeypatch.setattr(releases, "reference", lambda: reference)
    target = tmp_path / "fetched" / "tree"
    assert upstream.fetch(target, origin.as_uri()) == target
    assert upstream.tree_status(target)[2] == []
    assert [path.name for path in target.parent.iterdir()] == ["tree"]
    assert upstream.fetch(target, "file:///nowhere") == target


def test_fetch_keeps_away_from_a_directory_that_is_something_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="it is not a Megatron-LM tree"):
        upstream.fetch(tmp_path / "mine")


def test_fetch_explains_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"git could not fetch core_v0\.1\d\.\d from file:///nowhere"
    ):
        upstream.fetch(tmp_path / "tree", "file:///nowhere")
    assert list(tmp_path.glob(".fetch-*")) == []


def test_fetch_without_git_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs git"):
        upstream.fetch(tmp_path / "tree")


def test_files_of_a_tag_may_have_another_patch_level(tmp_path: Path) -> None:
    major, minor = map(int, releases.reference().tag.partition("_v")[2].split(".")[:2])
    assert (
        upstream.tree_status(_make_tree(tmp_path / "right", (major, minor, 77)))[2]
        == []
    )
    other = _make_tree(tmp_path / "wrong", (major, minor + 1, 0))
    [problem] = upstream.tree_status(other)[2]
    assert problem.startswith(f"version is {major}.{minor + 1}.0, expected core_v")


def test_the_pinned_tree_is_the_pin(megatron_lm_path: Path) -> None:
    assert upstream.tree_status(megatron_lm_path)[2] == []


def test_the_installed_core_is_found() -> None:
    core = releases.installed_core()
    assert core is not None
    assert (core / "package_info.py").is_file()


@pytest.mark.parametrize("editable", [True, False])
def test_a_core_that_is_installed_from_its_tree_is_found_there(
    editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an installation has no files in site-packages, but a finder."""
    tree = _make_tree(tmp_path / "a tree", (0, 19, 7))
    (tree / "megatron" / "core" / "__init__.py").touch()
    about = json.dumps({"url": tree.as_uri(), "dir_info": {"editable": editable}})
    distribution = SimpleNamespace(
        locate_file=lambda name: tmp_path / "site-packages" / name,
        read_text=lambda _: about,
    )
    monkeypatch.setattr(releases.metadata, "distribution", lambda _: distribution)
    monkeypatch.delitem(sys.modules, "megatron.core.package_info", raising=False)
    releases.installed_core.cache_clear()
    try:
        assert releases.installed_core() == (
            tree / "megatron" / "core" if editable else None
        )
        if editable:
            assert releases.core_version() == "0.19.7"
    finally:
        releases.installed_core.cache_clear()


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("is_edited", [True, False])
def test_edits_in_the_core_of_a_tree_are_not_ignored_in_silence(
    is_edited: bool, rank: str, tmp_path: Path
) -> None:
    core = releases.installed_core()
    assert core is not None
    tree = _make_tree(tmp_path / "Megatron-LM")
    in_tree = tree / "megatron" / "core"
    for name in ("package_info.py", "transformer/mlp.py"):
        (in_tree / name).parent.mkdir(exist_ok=True)
        (in_tree / name).write_bytes((core / name).read_bytes())
    if is_edited:
        with (in_tree / "transformer/mlp.py").open("a") as sources:
            sources.write("EDITED = True\n")
    done = subprocess.run(
        [sys.executable, "-c", "import megatron_ext, megatron.core"],
        env={
            **os.environ,
            "MEGATRON_LM_PATH": str(tree),
            "MEGATRON_EXT_DEVICE": "cpu",
            "RANK": rank,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    line = f"{in_tree} is ignored, although 1 of its files differ, such as transformer/mlp.py"
    assert (line in done.stderr) == (is_edited and rank == "0")
    assert ("is ignored" in done.stderr) == (is_edited and rank == "0")


def test_a_fetched_tree_may_be_of_an_earlier_patch_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = releases.installed_core()
    assert core is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = _make_tree(upstream.cache_dir(), (0, 1, 2))
    monkeypatch.setattr(sys, "path", [])
    assert upstream.ignored_sources(core) is None
    # In a tree that the user has chosen, edits are possible.
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tree.rename(tmp_path / "chosen")))
    assert "is ignored" in str(upstream.ignored_sources(core))
