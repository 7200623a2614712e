"""Folders of runs, among people who could plant one."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext import cli
from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.agent import last_lines
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import JobPlan
from megatron_ext.tools.launch.run_folder import RunFolder

_PLAN = JobPlan(
    "r0",
    (Host("localhost", 1, local=True),),
    ("a.py",),
    "/",
    sys.executable,
    per_node=True,
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of runs, which everybody can write to."""
    path = tmp_path / "runs"
    path.mkdir()
    path.chmod(0o777)
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(path))
    return path


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def record(root: Path, plan: JobPlan = _PLAN) -> Path:
    """Record a run as `launch` does, and return its folder."""
    with RunFolder.open(root, plan.run_id, create=True) as folder:
        folder.write_json("plan.json", plan.record())
    return root / plan.run_id


@pytest.mark.usefixtures("no_umask")
def test_only_the_owner_can_read_what_a_run_writes(root: Path) -> None:
    with RunFolder.open(root, "r0", "000-a", create=True) as folder:
        folder.write_json("agent.json", {"pid": 1})
        with folder.create("output.log") as log:
            log.write(b"secret\n")
        assert folder.read_json("agent.json") == {"pid": 1}
        assert folder.read_json("failure.json") is None
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in sorted((root / "r0").rglob("*"))
    }
    assert modes == {"000-a": 0o700, "agent.json": 0o600, "output.log": 0o600}
    assert stat.S_IMODE((root / "r0").stat().st_mode) == 0o700


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
@pytest.mark.parametrize("place", ["folder", "plan.json"])
def test_what_others_can_write_to_is_refused(
    root: Path, command: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(root) if place == "folder" else record(root) / place
    path.chmod(0o777)
    assert cli.main([command, "r0"]) == 2
    error = capsys.readouterr().err
    assert f"other users can write to {path} (mode 777)" in error
    remedy = error.rpartition(", run ")[2].split()
    assert remedy[:3] == ["chmod", "-R", "go-w"]
    Path(remedy[3]).chmod(0o755)
    assert runs.load("r0", "plan") is not None


def test_the_run_of_another_user_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(root)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cli.main(["status", "r0"]) == 2
    assert (
        f"{path} belongs to user {os.getuid()}, but you are user"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_no_program_is_taken_from_a_file(
    root: Path, tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
    program.chmod(0o755)
    hosts = (*_PLAN.hosts, Host("host.invalid", 1))
    record(root, replace(_PLAN, hosts=hosts, ssh=(str(program),), python=str(program)))
    assert cli.main([command, "r0", "--ssh-cmd", "false", "--timeout", "20"]) == 1
    assert not (tmp_path / "was-run").exists()
    printed = capfd.readouterr()
    assert (
        f"the job was launched with --ssh-cmd {program} --python {program}; "
        in printed.err
    )
    assert "localhost: " in printed.out


def test_a_host_that_ssh_would_take_for_an_option_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(root, replace(_PLAN, hosts=(Host("-oProxyCommand=touch x", 1),)))
    assert cli.main(["status", "r0"]) == 2
    assert "was written by another version" in capsys.readouterr().err


def test_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    path = record(root)
    (root / "r1").symlink_to(path)
    with pytest.raises(LaunchError, match="r1 is a link"):
        runs.load("r1", "plan")
    with pytest.raises(LaunchError, match="r1 is a link"):
        RunFolder.open(root, "r1", create=True)
    target = tmp_path / "target"
    target.write_text('{"pid": 1}')
    for name in ("result.json", "output.log"):
        (path / name).symlink_to(target)
    with pytest.raises(LaunchError, match=r"result\.json is a link"):
        runs.load("r0", "result")
    with RunFolder.open(root, "r0") as folder:
        with pytest.raises(OSError, match=r"output\.log"):
            folder.create("output.log")
        folder.write_json("result.json", {})  # replaces the link
    assert target.read_text() == '{"pid": 1}'
    assert last_lines(path / "output.log", 5) == []


def test_a_launch_does_not_write_where_somebody_planted_a_link(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (root / "x").symlink_to(planted)
    assert cli.main(["launch", "--per-node", "--run-id", "x", "--", "true"]) == 2
    assert f"{root / 'x'} is a link" in capsys.readouterr().err
    assert list(planted.iterdir()) == []


def test_what_was_checked_is_what_is_used(root: Path) -> None:
    path = record(root)
    with RunFolder.open(root, "r0") as folder:
        path.rename(root / "away")
        path.mkdir()
        (path / "plan.json").write_text('{"run_id": "planted"}')
        assert folder.read_json("plan.json")["run_id"] == "r0"
        assert json.loads((folder.anchor / "plan.json").read_text())["run_id"] == "r0"


def test_a_pipe_in_a_run_folder_is_not_waited_for(root: Path) -> None:
    os.mkfifo(record(root) / "result.json", 0o600)
    with pytest.raises(LaunchError, match="is a pipe or a device; delete it"):
        runs.load("r0", "result")
    assert last_lines(root / "r0" / "result.json", 3) == []


def test_the_terminal_does_not_obey_a_result(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(root)
    with RunFolder.open(root, "r0") as folder:
        folder.write_json(
            "result.json", {"exit_code": 1, "failure": "\x1b]0;title\x07\x1b[2J"}
        )
    cli.main(["status", "r0"])
    printed = capsys.readouterr().out
    assert r"failed (exit code 1): \x1b]0;title\x07\x1b[2J" in printed
    assert "\x1b" not in printed
