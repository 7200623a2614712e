"""Which of several failures is the first one, and how what ssh says is told."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import process, protocol, push
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import Node, Plan
from megatron_ext.tools.launch.ssh import Ssh, explain
from megatron_ext.tools.launch.supervise import Failure, first_failure

PUSHING_SSH = Path(__file__).with_name("fake_ssh.sh")


def test_a_process_that_was_killed_explains_those_that_missed_it() -> None:
    missed = Failure("a", "rank 0", 1, at=10.0)
    killed = Failure("b", "rank 5", -9, at=10.4)
    also = Failure("c", "rank 7", -6, at=10.5)
    assert first_failure([missed, also, killed]) is killed
    assert first_failure([missed, Failure("a", "rank 1", 1, at=9.0)]).what == "rank 1"
    assert str(killed) == "b: rank 5 was ended by SIGKILL"
    assert killed.exit_code == 137


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("me@a: Permission denied (publickey).", "ssh-copy-id a"),
        ("Host key verification failed.", "log in once by hand"),
        ("ssh: Could not resolve hostname a: Name or service not known", "correct the hostfile"),
        ("ssh: connect to host a port 22: Connection refused", "port=N in the hostfile"),
        ("ssh: connect to host a port 22: No route to host", "--exclude a"),
        ("/usr/bin/python: No module named megatron_ext", "--push"),
        ("env: '/x/python': No such file or directory", "--python PATH"),
        ("something else", "exit code 255): something else"),
    ],
)
def test_what_ssh_says_is_told_with_the_remedy(said: str, message: str) -> None:
    told = explain("a", 255, ["** welcome **", said, ""])
    assert message in told
    assert said in told
    assert "\n" not in told


def test_ssh_gets_a_list_of_arguments_and_the_remote_shell_gets_quoted_words() -> None:
    host = Host("a", port=22, user="me")
    argv = Ssh(("ssh", "-F", "x"), 3).argv(host, ["echo", "$HOME; rm"])
    assert argv[:3] == ["ssh", "-F", "x"]
    assert argv[-2:] == ["a", "echo '$HOME; rm'"]
    assert {"BatchMode=yes", "ConnectTimeout=3", "-p", "22", "-l", "me"} <= set(argv)


def test_messages_come_through_noise_in_any_pieces() -> None:
    reading, writing = os.pipe()
    reader = protocol.Reader(reading)
    data = b"motd\n" + protocol.MARK + b"broken\n" + protocol.encode({"op": "a"}) + b"\n"
    for position in range(len(data)):
        os.write(writing, data[position : position + 1])
    os.close(writing)
    assert reader.wait() == {"op": "a"}
    assert reader.wait() is None
    os.close(reading)


def plan_in(directory: Path) -> Plan:
    nodes = (Node(Host("push"), 1, local=False), Node(Host("localhost"), 1, local=True))
    return Plan("run", nodes, ("job.py",), str(directory), sys.executable)


def test_the_work_directory_is_copied_without_what_git_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    (work / "sub").mkdir(parents=True)
    other.mkdir()
    for name in ("job.py", "sub/data.txt", "big.bin"):
        (work / name).write_text(name)
    (work / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    monkeypatch.setattr(push, "directories", lambda plan: [Path(plan.workdir)])
    monkeypatch.setenv("OTHER_ROOT", str(other))
    asyncio.run(push.push(plan_in(work), Ssh(("sh", str(PUSHING_SSH))), 30))
    copied = other / str(work).lstrip("/")
    found = {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()}
    assert found == {"job.py", "sub/data.txt", ".gitignore"}
    assert (copied / "job.py").read_text() == "job.py"


def test_more_than_code_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(b"x" * 100)
    monkeypatch.setattr(push, "MAX_BYTES", 10)
    with pytest.raises(LaunchError, match="holds the code only"):
        push.pack([tmp_path])


def test_a_checkout_of_this_package_is_part_of_what_is_copied(tmp_path: Path) -> None:
    checkout = Path(__file__).parents[3]
    assert push.directories(plan_in(tmp_path)) == [tmp_path, checkout]
    assert push.directories(plan_in(checkout)) == [checkout]
    packed = push.pack([checkout / "hostfiles"])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert str(checkout / "hostfiles" / "localhost").lstrip("/") in archive.getnames()


def test_a_rank_whose_torchrun_is_gone_ends_itself() -> None:
    code = (
        "from megatron_ext.tools.launch import process; process.die_with_parent(); print('lives')"
    )
    environment = {**os.environ, process.AGENT_PID: "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    adopted = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    environment[process.AGENT_PID] = "999999999"
    orphan = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    assert (adopted.returncode, adopted.stdout) == (0, b"lives\n")
    assert (orphan.returncode, orphan.stdout) == (-9, b"")


def test_a_record_is_of_one_process_and_not_of_its_id(tmp_path: Path) -> None:
    record, file = process.record(psutil.Process()), tmp_path / "agent.json"
    file.write_text(json.dumps(record))
    assert process.recorded(file) == psutil.Process()
    file.write_text(json.dumps({**record, "start": record["start"] - 60}))
    assert process.recorded(file) is None, "the id was used again"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        file.write_text(json.dumps(process.record(psutil.Process(child.pid))))
    assert process.recorded(file) is None, "it has ended"
    file.write_text("{}")
    assert process.recorded(file) is None
