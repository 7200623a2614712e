"""The command line of the launcher: what it refuses, in one line for each host, and what it runs.

Hosts are reached through a stand-in for ssh here; `test_cluster` has real servers.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_ext import cli
from megatron_ext.tools.launch import fitness, jobs
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import JobPlan
from tests.commands import run_package
from tests.ports import free_port
from tests.tools.launch.cluster import wait_until

ROOT = Path(__file__).parents[3]
FAKE_SSH = f"sh {Path(__file__).parent / 'fake_ssh.sh'}"
TWO = "a:1 addr=127.0.0.2\nb:1 addr=127.0.0.3"
SIZES = "--tensor-model-parallel-size 2"


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work directory with a script and a place for runs; nothing may be left that knows it."""
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    site = tmp_path / "site" / "torch-1.0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n"
    )
    monkeypatch.setenv("OLD_SITE", str(site.parent))
    (tmp_path / "job.py").write_text("print('trains')\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    wait_until(lambda: not left_running(tmp_path), 10)


def left_running(place: Path) -> list[str]:
    """Command lines of processes whose environment names a directory."""
    mark = f"MEGATRON_EXT_RUNS={place / 'runs'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


def launch(hosts: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    Path("hosts").write_text(hosts)
    return run_package(
        "launch", "--hostfile", "hosts", "--ssh-cmd", FAKE_SSH, *words, **env
    )


def in_other_words(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.replace("megatron-ext: error: ", "").splitlines()


SAVED = ("--save", "saved", "--load", "saved")
ROLES = ("--forward-backward-disaggregating", *SAVED)


@pytest.mark.parametrize(
    ("hosts", "words", "message"),
    [
        ("a\na", ("--", "job.py"), "hosts:2: host a is already in line 1"),
        ("a slots=x", ("--", "job.py"), "hosts:1: slots is 'x'"),
        ("", ("--", "job.py"), "hosts contains no host"),
        ("a:1", (), "nothing to run; name a script after --"),
        ("a:1", ("--", "hostname"), "hostname is not a Python script"),
        ("a:1\nb:2", ("--", "job.py"), "different numbers of processes (a 1, b 2)"),
        ("a:1", ("--", "job.py", *SIZES.split()), "1 ranks cannot be divided into replicas of 2"),
        ("a:1", ("--show", "5", "--", "job.py"), "--show names '5'"),
        ("a:4", ("--per-node", "--show", "1", "--", "true"), "--show names '1'"),
        ("a:1", ("--per-node", "--num-microbatches", "4", "--", "true"), "sets a training flag"),
        ("a:1\nb:1", ("--spares", "1", "--", "job.py"), "--spares 1 without restarts"),
        ("a:1", ("--reserve", "2", "--", "job.py"), "--reserve 2 has no effect"),
        ("a:1", ("--keep-going", "--", "job.py"), "--keep-going needs --save DIR --load DIR"),
        ("a:1", ("--keep-going", "--per-node", "--", "true"), "remove one of the two"),
        ("a:1\nb:1", ("--keep-going", "--", "job.py", *SAVED, "--node-ips", "a", "b"),
         "remove --node-ips"),
        ("a:1\nb:2", ("--keep-going", "--allow-uneven", "--dry-run", "--", "job.py", *SAVED),
         "requires the same number of processes on every training host"),
        ("a:2", ("--keep-going", "--", "job.py", *ROLES), "cannot take over a role"),
        ("a", ("--dry-run", "--", "job.py"), "cannot count the devices of a"),
        ("a:1", ("--run-id", "../x", "--", "job.py"), "'../x' is not a run id"),
        ("a:1", ("--run-id", "x" * 65, "--", "job.py"), "xx' is not a run id; use up to 64"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_any_host_is_asked(
    hosts: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text(hosts)
    assert cli.main(["launch", "--hostfile", "hosts", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ext: error: ")
    assert message in line
    assert not Path("runs").exists()


def test_a_work_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["launch", "--hostfile", str(hosts), "--", "job.py"]) == 2
    assert "error: the work directory was removed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--grace", "nan", "'nan' must be a number of seconds, 0 or more"),
        ("--grace", "-1", "'-1' must be a number"),
        ("--preflight-timeout", "inf", "'inf' must be a number"),
        ("--preflight-timeout", "soon", "'soon' must be a number"),
        ("--num-microbatches", "0", "'0' must be a number between 1 and"),
        ("--nproc", "0", "'0' must be a number between 1 and 1024"),
        ("--master-port", "65536", "'65536' must be a number between 1 and 65535"),
        ("--env", "=1", "'=1' must be NAME=VALUE"),
        ("--log-dir", "logs", "logs is relative; hosts need an absolute path"),
    ],
)
def test_values_of_flags(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["launch", flag, value, "--", "job.py"])
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{flag}: {message}" in line


def test_every_host_that_cannot_take_part_gets_a_line_with_the_remedy(
    tmp_path: Path,
) -> None:
    lines = in_other_words(
        launch(
            "good:1\npassword:1\ngone:1\nhang:1\ndies:1",
            "--preflight-timeout",
            "6",
            "--",
            "job.py",
        )
    )
    assert lines[0].startswith("password: ssh needs a password or a key")
    assert "ssh-copy-id password" in lines[0]
    assert lines[1].startswith("gone: it cannot be reached; check that it is up")
    assert lines[2].startswith("hang: no answer within 6 s")
    assert lines[3].startswith("dies: the agent did not start there (exit code 124)")
    assert len(lines) == 4
    assert not list(tmp_path.glob("runs/*"))


def test_what_the_hosts_find_is_compared() -> None:
    lines = in_other_words(launch(f"{TWO}\nold:1 addr=127.0.0.4", "--", "job.py"))
    assert len(lines) == 1
    assert lines[0].startswith("old: torch 1.0.0, but a has ")
    assert lines[0].endswith("install the same version on all hosts")


def test_a_script_that_is_not_there() -> None:
    lines = in_other_words(launch(TWO, "--", "gone/pretrain_gpt.py"))
    assert [line.partition(":")[0] for line in lines] == ["a", "b"]
    assert all(
        "there is no gone/pretrain_gpt.py" in line and "with rsync" in line
        for line in lines
    )
    [line] = in_other_words(
        launch("a:1", "--", "x" * 300 + ".py")
    )  # longer than a name may be
    assert line.startswith("a: ")
    assert line.endswith("with rsync")
    [line] = in_other_words(launch("a:1", "--per-node", "--", "no-such-command"))
    assert "a: there is no command no-such-command" in line


def test_a_python_that_is_not_there() -> None:
    [line] = in_other_words(
        launch("a:1", "--python", "/nowhere/python", "--", "job.py")
    )
    assert line.startswith("a: the path of this machine's Python does not exist")
    assert "--python PATH" in line


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        [line] = in_other_words(launch(TWO, "--master-port", port, "--", "job.py"))
    assert line.startswith(
        f"a: port {port} cannot be used for the rendezvous: it is in use"
    )


def test_a_port_that_a_store_of_the_keeper_needs_is_taken() -> None:
    first = free_port(num_ports=3)
    with socket.create_server(("", first + 2)):
        lines = in_other_words(
            launch(
                TWO, "--keep-going", "--master-port", str(first), "--", "job.py", *SAVED
            )
        )
    taken = f"a: port {first + 2} cannot be used for the rendezvous: it is in use"
    assert any(line.startswith(taken) for line in lines), lines


def test_a_chosen_port_is_followed_by_free_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = free_port(num_ports=6)
    monkeypatch.setattr(
        fitness.random, "sample", lambda _ports, _count: [first, first + 3]
    )
    problems: list[str] = []
    with socket.create_server(("", first + 2)):
        assert fitness._free_port(None, 1, problems) == first
        assert fitness._free_port(None, 3, problems) == first + 3
    assert not problems


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a small file system is mounted, which needs root"
)
def test_a_full_disk(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(logs)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        (logs / "fill").write_bytes(b"x" * (40 << 10))
        [line] = in_other_words(launch("a:1", "--log-dir", str(logs), "--", "job.py"))
        assert "a: only 0 MiB are free for logs in" in line
        assert "another --log-dir" in line
        assert [path.name for path in logs.iterdir()] == ["fill"]
    finally:
        subprocess.run(["umount", str(logs)], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a small file system is mounted, which needs root"
)
def test_a_launcher_whose_disk_is_full_keeps_the_exit_code(tmp_path: Path) -> None:
    own = tmp_path / "runs"
    own.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(own)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        done = launch(
            "localhost", "--per-node", "--log-dir", str(tmp_path / "logs"), "--",
            "bash", "-c", "seq 30000; exit 3",
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        assert done.stdout.splitlines()[-1] == "[localhost] 30000"
        assert (
            "failed first: localhost: the command ended with exit code 3" in done.stderr
        )
    finally:
        subprocess.run(["umount", str(own)], check=True)


def test_variables_that_change_what_is_computed_reach_every_host() -> None:
    done = launch("gone:1 addr=10.0.0.1", "--dry-run", "--", "job.py", NVTE_FLASH_ATTN="0",
                  PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", OTHER="1")  # fmt: skip
    assert "NVTE_FLASH_ATTN=0" in done.stdout
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in done.stdout
    assert "OTHER" not in done.stdout


def test_hosts_that_are_this_machine() -> None:
    own = {each.address for one in psutil.net_if_addrs().values() for each in one
           if each.family == socket.AF_INET}  # fmt: skip
    names = ["localhost", socket.gethostname(), "127.0.0.2", "::1", *own]
    assert all(map(jobs._is_this_machine, names))
    # Not by an attempt to bind it, which may be allowed for any address (ip_nonlocal_bind).
    assert not any(map(jobs._is_this_machine, ["192.0.2.1", "2001:db8::1", "node1"]))


def test_a_dry_run_asks_nobody_and_can_be_run_by_hand(tmp_path: Path) -> None:
    done = launch(
        "gone:1 addr=127.0.0.1", "--dry-run", "--master-port", "29765", "--", "job.py"
    )
    assert done.returncode == 0, done.stderr
    head, command = done.stdout.splitlines()
    assert head == "# gone"
    by_hand = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False, timeout=120
    )
    assert by_hand.stdout.splitlines()[-1] == "trains", by_hand.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_checks_the_flags_of_the_training() -> None:
    flags = (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --use-megatron-fsdp"
    )
    done = launch("gone:2 addr=127.0.0.1", "--dry-run", "--", "job.py", *flags.split())
    assert done.returncode == 2
    assert done.stdout.startswith("# gone")
    assert (
        "error: --pipeline-schedule zb-v cannot run with --use-megatron-fsdp"
        in done.stderr
    )


@pytest.mark.short_s(4)
def test_a_command_on_each_host_and_the_commands_about_a_run(tmp_path: Path) -> None:
    code = "import os; where = os.environ['WHERE']; print('on', where); exit(3 * (where == 'b'))"
    done = launch(
        "a env.WHERE=a\nb env.WHERE=b", "--per-node", "--run-id", "r1", "--",
        sys.executable, "-c", code,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == ["[a] on a", "[b] on b"]
    assert done.returncode == 3
    assert "failed first: b: the command ended with exit code 3" in done.stderr

    status = run_package("status", "r1", "--ssh-cmd", FAKE_SSH).stdout
    logs = f"logs: megatron-ext logs r1 --ssh-cmd '{FAKE_SSH}'"
    assert status.splitlines() == [
        f"failed (exit code 3): b: the command ended with exit code 3; {logs}",
        f"a: ended with 0, no processes, logs in {tmp_path}/runs/r1/000-a",
        f"b: ended with 3, no processes, logs in {tmp_path}/runs/r1/001-b",
    ]
    assert run_package("logs", "r1", "--ssh-cmd", FAKE_SSH).stdout.splitlines()[-2:] == [
        f"b: {tmp_path}/runs/r1/001-b/output.log", "on b",
    ]  # fmt: skip
    assert run_package("stop", "r1", "--ssh-cmd", FAKE_SSH).stdout.splitlines() == [
        "a: nothing was running", "b: nothing was running",
    ]  # fmt: skip


def test_a_run_that_nobody_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "r0"]) == 2
    assert "error: there is no run r0 in " in capsys.readouterr().err
    plan = Path("runs/r0/plan.json")
    plan.parent.mkdir(parents=True)
    for text in ("[]", "{}", '{"hosts": [3]}', "\0", ""):
        plan.write_text(text)
        assert cli.main(["logs", "r0"]) == 2
        assert f"error: {plan.absolute()} " in capsys.readouterr().err


def test_a_launcher_on_another_machine_has_not_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("runs/r0").mkdir(parents=True)
    plan = JobPlan(
        "r0", (Host("localhost", 1, local=True),), ("a.py",), "/", sys.executable
    )
    launcher = {
        "pid": 1,
        "start": 1,
        "machine": "node7",
    }  # as in Slurm, with a shared file system
    for name, record in {"plan": plan.record(), "launcher": launcher}.items():
        Path(f"runs/r0/{name}.json").write_text(json.dumps(record))
    assert cli.main(["status", "r0"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "no result yet; the launcher runs on node7"


@pytest.mark.parametrize("name", ["plan", "result", "launcher"])
def test_damaged_records_of_a_run_are_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"name": "localhost", "slots": 1, "local": True}
    records = {
        "plan": {
            "run_id": "r0", "workdir": "/", "python": sys.executable, "log_root": None,
            "grace_s": 1, "command": ["a.py"], "hosts": [host],
        },
        "result": {"exit_code": 0, "failure": None, "stopped_by": None},
        "launcher": {"pid": 1, "start": 1},
    }  # fmt: skip
    folder = Path("runs/r0")
    folder.mkdir(parents=True)
    for one, record in records.items():
        (folder / f"{one}.json").write_text(json.dumps(record))
    whole = json.dumps(records[name])
    damaged = [whole[:20], "", "\0", "[]", "null", "[" * 100_000]
    damaged += [json.dumps({**records[name], key: [{}]}) for key in records[name]]
    damaged += [json.dumps({**records[name], key: "x/y\0"}) for key in records[name]]
    for text in damaged:
        (folder / f"{name}.json").write_text(text)
        cli.main(["status", "r0"])
        told = capsys.readouterr().err
        assert len(told.splitlines()) <= 1, told
        assert len(told) < 1000


@pytest.mark.skipif(
    os.geteuid() != 0, reason="a small file system is mounted, which needs root"
)
def test_a_container_with_little_shared_memory_is_told_what_to_ask_for() -> None:
    Path("hosts").write_text("localhost slots=1\n")
    launch = (
        f"{sys.executable} -m megatron_ext launch --hostfile hosts --per-node -- true"
    )
    script = f"mount -t tmpfs -o size=64m none /dev/shm || exit 99; exec {launch}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "localhost: 64 MiB are free in /dev/shm" in done.stderr
    assert "docker run --shm-size=16g" in done.stderr


def test_localhost_needs_no_ssh_and_failures_name_rank_code_and_lines() -> None:
    Path("job.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('this is what went wrong', file=sys.stderr)\n"
        "    sys.exit(7)\n"
        "time.sleep(100)\n"
    )
    done = launch("localhost:2", "--ssh-cmd", "false", "--run-id", "r2", "--", "job.py")
    assert done.returncode == 7, done.stderr
    assert "failed first: localhost: rank 1 ended with exit code 7" in done.stderr
    assert "megatron-ext: | this is what went wrong" in done.stderr
    assert json.loads(Path("runs/r2/result.json").read_text())["exit_code"] == 7
    log = run_package("logs", "r2", "--ssh-cmd", FAKE_SSH, "--rank", "1")
    assert "this is what went wrong" in log.stdout


def test_a_rank_that_was_not_shown_has_its_traceback_shown() -> None:
    Path("pretrain_two.py").write_text(
        "import os, time\n"
        "def deep():\n"
        "    raise ValueError('the reason')\n"
        "if os.environ['RANK'] == '1':\n"
        "    deep()\n"
        "time.sleep(100)\n"
    )
    done = launch(TWO, "--show", "0", "--run-id", "r5", "--", "pretrain_two.py")
    assert done.returncode == 1, done.stderr
    assert "everything ranks 0 print: " in done.stderr
    assert "in deep" in done.stderr
    last_line = done.stderr.splitlines()[-1]
    assert re.search(
        r"rank 1 ended with exit code 1: ValueError: the reason; logs: megatron-ext logs r5 .*"
        r"--rank 1 \(\w+:/.*/r5/001-\w+/ranks/.*/0\)$",
        last_line,
    ), last_line
    assert (
        "in deep"
        in run_package("logs", "r5", "--ssh-cmd", FAKE_SSH, "--rank", "1").stdout
    )


@pytest.mark.parametrize("how", ["ctrl-c", "stop"])
def test_a_job_can_be_stopped_and_says_goodbye(how: str) -> None:
    script = (
        "trap 'echo goodbye; exit 0' TERM; echo started; (sleep 300 & wait) & "
        "while :; do sleep 0.1; done"
    )
    Path("hosts").write_text("a\nb\n")
    words = [
        "launch",
        "--hostfile",
        "hosts",
        "--ssh-cmd",
        FAKE_SSH,
        "--run-id",
        "r3",
        "--per-node",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *words, "--", "bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as launcher:
        assert launcher.stdout is not None
        seen = list(itertools.islice(launcher.stdout, 3))
        assert sum("started" in line for line in seen) == 2, seen
        if how == "stop":
            stopped = run_package("stop", "r3", "--ssh-cmd", FAKE_SSH)
            assert stopped.returncode == 0, stopped.stderr
        else:
            launcher.send_signal(signal.SIGINT)
        rest = launcher.stdout.read()
        name = "SIGINT" if how == "ctrl-c" else "SIGTERM"
        assert launcher.wait(20) == 128 + signal.Signals[name]
        assert rest.count("goodbye") == 2
        assert f"stopped by {name}" in rest


def test_a_failed_job_that_is_stopped_with_ctrl_c_does_not_start_again() -> None:
    Path("hosts").write_text("a\nb\n")
    words = ["launch", "--hostfile", "hosts", "--ssh-cmd", FAKE_SSH, "--grace", "60"]
    # One host fails; the other one says when it is to stop, and takes its time.
    script = 'case $MEGATRON_EXT_NODE in 0) exit 7;; esac; trap "echo asked" TERM; '
    script += "while :; do sleep 0.1; done"
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *words, "--max-restarts", "1", "--per-node", "--",
         "bash", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "asked" in line:
                break
        launcher.send_signal(signal.SIGINT)
        rest = launcher.stdout.read()
        assert launcher.wait(30) == 7, rest
    assert "failed first: a: the command ended with exit code 7" in rest
    assert "restart 1" not in rest


def test_stop_on_another_machine_ends_a_job_that_would_start_again() -> None:
    Path("hosts").write_text("a\nb\n")
    words = ["launch", "--hostfile", "hosts", "--ssh-cmd", FAKE_SSH, "--run-id", "r6"]
    script = "trap '' TERM; echo started; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *words, "--max-restarts", "1", "--grace", "1",
         "--per-node", "--", "bash", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        seen = list(itertools.islice(launcher.stdout, 4))
        assert sum("started" in line for line in seen) == 2, seen
        Path("runs/r6/launcher.json").unlink()  # no process of that machine
        stopped = run_package("stop", "r6", "--ssh-cmd", FAKE_SSH)
        assert stopped.returncode == 0, stopped.stderr
        rest = launcher.stdout.read()
        assert launcher.wait(30) == 128 + signal.SIGTERM, rest
    assert "megatron-ext stop: stopping the job" in rest
    assert "restart 1" not in rest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_start_leaves_no_connection(
    tmp_path: Path, number: int
) -> None:
    Path("hosts").write_text("a\nhang\n")
    words = [
        "launch",
        "--hostfile",
        "hosts",
        "--ssh-cmd",
        FAKE_SSH,
        "--preflight-timeout",
        "100",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *words, "--per-node", "--", "true"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:  # fmt: skip
        wait_until(lambda: any("sleep" in line for line in left_running(tmp_path)), 60)
        launcher.send_signal(number)
        assert launcher.wait(30) == 128 + number
        assert not left_running(tmp_path)


def test_a_second_ctrl_c_does_not_wait() -> None:
    Path("hosts").write_text("a\n")
    words = [
        "launch",
        "--hostfile",
        "hosts",
        "--ssh-cmd",
        FAKE_SSH,
        "--grace",
        "60",
        "--per-node",
    ]
    deaf = "trap '' TERM; echo started; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *words, "--", "bash", "-c", deaf],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "started" in line:
                break
        begin = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        for line in launcher.stdout:
            if "repeat to kill it" in line:
                break
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(30) == 128 + signal.SIGINT
        assert time.monotonic() - begin < 30  # half of the grace


def test_a_run_id_belongs_to_one_run() -> None:
    assert launch("a", "--per-node", "--run-id", "r4", "--", "true").returncode == 0
    [line] = in_other_words(launch("a", "--per-node", "--run-id", "r4", "--", "true"))
    assert "a: " in line
    assert "belongs to another run" in line
    assert Path("runs/r4/000-a/agent.json").exists()
    Path("broken").write_text("no program")
    Path("broken").chmod(0o755)
    done = launch("a", "--per-node", "--", "./broken")
    assert done.returncode == 127
    assert "| ./broken: Exec format error" in done.stderr
    done = launch("a", "--per-node", "--log-dir", "/" + "x" * 300, "--", "true")
    assert done.returncode == 127
    assert ": File name too long" in done.stderr


@pytest.mark.parametrize(
    ("flags", "connections"),
    [
        (["--tensor-model-parallel-size", "2"], "1"),  # Megatron requires it
        (["--overlap-moe-expert-parallel-comm"], "32"),
        # Megatron rejects 1.
        (["--use-torch-fsdp2"], None),
        (["--use-megatron-fsdp", "--overlap-moe-expert-parallel-comm"], None),
    ],
)
def test_hardware_queues_suit_the_flags(
    flags: list[str], connections: str | None
) -> None:
    variables = jobs.default_variables(["pretrain_gpt.py", *flags])
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
