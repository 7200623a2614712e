"""The first of several failures, and ssh's own words in the report."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from megatron_ext.tools.launch import agent as agent_module
from megatron_ext.tools.launch import runs, supervise
from megatron_ext.tools.launch.agents import Agents, explain, reach
from megatron_ext.tools.launch.display import Display
from megatron_ext.tools.launch.failures import Failure, first_failure
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import JobPlan
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.tools.launch.supervise import Watch
from megatron_ext.upstream import parent
from megatron_ext.upstream.cause import Cause


def test_a_process_that_was_killed_explains_those_that_missed_it() -> None:
    missed = Failure("a", "rank 0", 1, at=10.0)
    killed = Failure("b", "rank 5", -9, at=10.4)
    also = Failure("c", "rank 7", -6, at=10.5)
    assert first_failure([missed, also, killed]) is killed
    assert first_failure([missed, Failure("a", "rank 1", 1, at=9.0)]).part == "rank 1"
    assert str(killed) == "b: rank 5 was killed by SIGKILL"
    assert (
        str(replace(killed, code=-40)) == "b: rank 5 was killed by signal 40"
    )  # a real-time one


def test_the_cause_of_a_failure_is_told_with_its_iteration_and_words() -> None:
    waited = Failure(
        "a", "rank 0", 1, at=9.0, cause=Cause(0, "effect", "rank 5 died", 9.0, 3)
    )
    failed = Failure(
        "b", "rank 5", 1, at=9.5, cause=Cause(5, "error", "ValueError: no", 9.5)
    )
    stopped = Failure(
        "b", "rank 5", 1, at=9.9, cause=Cause(5, "stopped", "its process", 9.9)
    )
    words = "rank 5 holds the job up: rank 0 waits for it"
    left = replace(
        failed, code=7, cause=Cause(5, "left", "sys.exit() at a.py:3", 9.5, 2, code=0)
    )
    hangs = replace(failed, cause=Cause(5, "hang", words, 9.5, 2))
    told = [
        str(first_failure([waited, failure], last_iteration=2))
        for failure in (failed, stopped, hangs, left)
    ]
    assert told == [
        "b: rank 5 ended with exit code 1 in iteration 3: ValueError: no",
        "b: rank 5 makes no progress in iteration 3: its process",
        "b: rank 5 holds the job up in iteration 2: rank 0 waits for it",
        "b: rank 5 exited early with exit code 0 in iteration 2: sys.exit() at a.py:3",
    ]
    alone = str(first_failure([failed], last_iteration=2))
    assert alone == "b: rank 5 ended with exit code 1 after iteration 2: ValueError: no"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("me@a: Permission denied (publickey).", "ssh-copy-id a"),
        ("Host key verification failed.", "log in once by hand"),
        (
            "ssh: Could not resolve hostname a: Name or service not known",
            "correct the hostfile",
        ),
        (
            "ssh: connect to host a port 22: Connection refused",
            "port=N in the hostfile",
        ),
        ("ssh: connect to host a port 22: No route to host", "--exclude a"),
        ("/usr/bin/python: No module named megatron_ext", "with rsync"),
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
    plan = JobPlan(
        "r1", (host,), ("true",), "/", sys.executable, ssh=("ssh", "-F", "x")
    )
    argv = reach(plan, host, ["echo", "$HOME; rm"], 3.5)
    assert argv[:3] == ["ssh", "-F", "x"]
    assert argv[-2:] == ["a", "echo '$HOME; rm'"]
    assert {"BatchMode=yes", "ConnectTimeout=3", "-p", "22", "-l", "me"} <= set(argv)


def test_ctrl_c_counts_while_a_lost_host_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = Failure("a", "the connection to the agent", 255, at=1.0)

    def ask(*_: object) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return ["it cannot be reached"]

    watch = Mock(stopped_by=None, failures={0: failure}, lost=[0])
    monkeypatch.setattr(supervise, "Watch", lambda *_: watch)
    monkeypatch.setattr(Agents, "ask", ask)
    plan = JobPlan("r1", (Host("a", 1),), ("true",), "/", sys.executable, per_node=True)
    display = Display(io.BytesIO(), io.BytesIO())
    outcome = supervise.supervise(Agents(plan), plan, [{"pid": 1}], display, [])
    display.close()
    assert (outcome.code, outcome.stopped_by) == (255, "SIGINT"), (
        "so it does not start again"
    )
    assert "cannot be reached to check what is left" in str(outcome.failure)


def _watch_of_three_hosts(**settings: Any) -> Watch:
    hosts = tuple(Host(name, 1) for name in "abc")
    plan = JobPlan("r1", hosts, ("x.py",), "/", sys.executable, **settings)
    agents = Agents(plan)
    for index, host in enumerate(hosts):
        agents.connections[index] = Mock(host=host.name, heard_at=time.monotonic())
        agents.connections[index].noise.return_value = []
    return Watch(agents, plan, [{"ahead_s": 0.0}] * 3, Mock())


def _ended(code: int) -> dict[str, Any]:
    return {"part": "torchrun", "code": code, "stopped": None, "time": 1.0, "tail": []}


def test_a_job_that_keeps_going_outlives_another_host_but_not_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    keeps_going = {"reserve": 0, "num_reserve_hosts": 1}
    watch = _watch_of_three_hosts(**keeps_going)
    watch._lose_host(1)
    assert not watch.failures
    assert "ranks 1 to 1 are lost" in capfd.readouterr().err
    watch._end_host(2, _ended(0))
    watch._end_host(0, _ended(0))
    assert not watch.failures
    # If the job fails later, the lost host may be the cause.
    watch = _watch_of_three_hosts(**keeps_going)
    watch._lose_host(1)
    watch._end_host(0, _ended(137))
    assert sorted(watch.failures) == [0, 1]
    # The first host runs the stores.
    watch = _watch_of_three_hosts(**keeps_going)
    watch._lose_host(0)
    assert sorted(watch.failures) == [0]
    watch = _watch_of_three_hosts()
    watch._lose_host(1)
    assert sorted(watch.failures) == [1]


def test_ranks_that_exit_early_explain_failures_on_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = Cause(1, "left", "sys.exit(0) at a.py:3", 1.0, 4, code=0)
    finished = {**_ended(0), "part": "rank 1", "cause": asdict(left)}
    missed = Cause(0, "effect", "rank 1 died", 2.0, 5, code=1)
    failed = {**_ended(1), "part": "rank 0", "cause": asdict(missed)}
    plan = JobPlan("r1", (Host("a", 1), Host("b", 1)), ("x.py",), "/", sys.executable)
    for messages in ((finished, failed), (failed, finished)):
        watch = _watch_of_three_hosts()
        for message in messages:
            watch._end_host(int(message is finished), message)
        monkeypatch.setattr(watch, "run", lambda: None)
        monkeypatch.setattr(supervise, "Watch", lambda *_, watch=watch: watch)
        display = Mock(iteration=3, is_stopping=False)
        outcome = supervise.supervise(Agents(plan), plan, [], display, [])
        assert (outcome.code, outcome.iteration) == (1, 5)
        assert str(outcome.failure) == (
            "b: rank 1 exited early with exit code 0 in iteration 4: sys.exit(0) at a.py:3"
        )


def test_a_failure_names_hosts_whose_ranks_had_exited_without_a_reason() -> None:
    missed = Cause(0, "effect", "rank 1 died", 2.0, 5, code=1)
    watch = _watch_of_three_hosts()
    watch._end_host(1, _ended(0))
    watch._end_host(0, {**_ended(1), "part": "rank 0", "cause": asdict(missed)})
    assert str(watch.failures[0]) == (
        "a: rank 0 ended with exit code 1 in iteration 5 after the ranks on b had exited with "
        "exit code 0: rank 1 died"
    )


def test_a_job_that_keeps_going_outlives_a_killed_keeper_of_another_host(
    capfd: pytest.CaptureFixture[str],
) -> None:
    killed = {**_ended(-9), "part": runs.KEEPER}
    watch = _watch_of_three_hosts(reserve=0, num_reserve_hosts=1)
    watch._end_host(1, killed)
    assert not watch.failures
    told = "b: the keeper of the ranks was killed by SIGKILL: ranks 1 to 1 are lost"
    assert told in capfd.readouterr().err
    watch._end_host(0, _ended(137))
    assert sorted(watch.failures) == [0, 1]
    # The keeper of the first host runs the stores.
    watch = _watch_of_three_hosts(reserve=0, num_reserve_hosts=1)
    watch._end_host(0, killed)
    assert sorted(watch.failures) == [0]


def test_a_rank_that_the_job_does_not_have_is_blamed_on_the_host_that_names_it() -> (
    None
):
    """A script may start programs with ranks of their own."""
    watch = _watch_of_three_hosts()
    blames = Cause(9, "error", "ValueError: no", 1.0, code=1)
    watch._end_host(1, {**_ended(1), "cause": asdict(blames)})
    assert str(watch.failures[1]).startswith(
        "b: torchrun ended with exit code 1: Value"
    )


def test_a_launcher_is_idle_while_a_failed_job_that_is_stopped_takes_its_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "_SETTLE_S", 0.1)
    plan = JobPlan("r1", (Host("a", 1), Host("b", 1)), ("true",), "/", sys.executable)
    agents = Agents(plan)
    agents.connections = dict.fromkeys(range(2), Mock(heard_at=time.monotonic()))
    ended = {"kind": "ended", "part": "the command", "code": 7, "time": 0.0, "tail": []}
    agents.events.put((0, {**ended, "stopped": None}))
    agents.events.put((signal.SIGINT, "signal"))
    last = (1, {**ended, "stopped": "the launcher requested it"})
    threading.Timer(0.5, agents.events.put, [last]).start()
    waits = Mock(wraps=agents.next_event)
    monkeypatch.setattr(agents, "next_event", waits)
    display = Mock()
    watch = Watch(agents, plan, [{"ahead_s": 0.0}] * 2, display)
    watch.run()
    assert (watch.stopped_by, watch.failures.keys()) == (signal.SIGINT, {0})
    assert waits.call_count == 3


def test_messages_stand_out_from_what_login_scripts_print() -> None:
    message = {"op": "a", "text": "two\nlines"}
    line = runs.encode(message)
    assert runs.decode(line) == message
    assert runs.decode(b"no end of line" + line) == message
    assert line.count(b"\n") == 1
    for noise in (
        b"motd\n",
        b"{}\n",
        line[:-3],
        line.replace(b"{", b"[").replace(b"}", b"]"),
    ):
        assert runs.decode(noise) is None


def test_the_commands_take_the_id_of_a_restart() -> None:
    longest = "x" * 64
    assert runs.check_run_id(longest) == longest
    assert runs.check_run_id(f"{longest}-r12") == f"{longest}-r12"


def test_a_rank_whose_torchrun_is_gone_ends_itself() -> None:
    code = "from megatron_ext.upstream import parent; parent.die_with_parent(); print('lives')"
    environment = {**os.environ, parent.AGENT_PID: "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    adopted = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    environment[parent.AGENT_PID] = "999999999"
    orphan = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env=environment
    )
    assert (adopted.returncode, adopted.stdout) == (0, b"lives\n")
    assert (orphan.returncode, orphan.stdout) == (-9, b"")


@contextmanager
def agent_of(
    words: tuple[str, ...], logs: Path, **plan: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield an agent that runs a command; its standard input stays open."""
    job = JobPlan(
        "r1", (Host("localhost", slots=1),), words, "/", sys.executable, per_node=True
    )
    job = replace(job, env={"PATH": os.environ["PATH"]}, log_root=str(logs), **plan)
    with subprocess.Popen(
        [sys.executable, "-m", "megatron_ext.tools.launch.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as agent:
        assert agent.stdin is not None
        start = {"op": "start", "argv": words}
        agent.stdin.write(runs.encode(job.request(0)) + runs.encode(start))
        agent.stdin.flush()
        yield agent


def messages_of(agent: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert agent.stdout is not None
    return filter(None, map(runs.decode, agent.stdout))


@pytest.mark.parametrize(
    "why", ["the launcher was silent for 1 s", "the launcher exited"]
)
def test_an_agent_that_hears_nothing_stops_its_job(why: str, tmp_path: Path) -> None:
    saving = "trap 'echo TERM' TERM; echo runs; while :; do sleep 0.1; done"
    with agent_of(
        ("bash", "-c", saving), tmp_path, grace_s=2.5, silence_s=1.0
    ) as agent:
        messages = messages_of(agent)
        text = next(message["text"] for message in messages if message["kind"] == "log")
        if why == "the launcher exited":
            assert agent.stdin is not None
            agent.stdin.close()
        *rest, last = messages
        assert agent.wait(30) == 0, "its end must not meet the thread that reads"
    assert (last["kind"], last["stopped"], last["code"]) == ("ended", why, -9)
    text += "".join(message["text"] for message in rest if message["kind"] == "log")
    assert text.startswith("runs\n")
    assert text.count("TERM") == 1, (
        "a second one, within the grace, would disturb what it saves"
    )


def test_only_the_owner_can_write_to_an_earlier_run_with_local_checkpoints(
    tmp_path: Path,
) -> None:
    """Ranks unpickle them, also on a host that was not in that run."""
    with agent_of(("true",), tmp_path, local_checkpoints_of="r0") as agent:
        *_, last = messages_of(agent)
    assert last["code"] == 0
    assert (tmp_path / "r0").stat().st_mode & 0o777 == 0o700


def test_ranks_that_a_stop_made_exit_explain_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for rank, exited_at in ((0, 7.0), (1, 6.0)):
        ending = Cause(rank, "left", "sys.exit(0) at a.py:3", exited_at, 4, code=0)
        error_file = tmp_path / f"ranks/x/attempt_0/{rank}/error.json"
        error_file.parent.mkdir(parents=True)
        error_file.write_text(json.dumps({"cause": asdict(ending)}))
    with RunFolder.open(tmp_path) as folder:
        logs = agent_module._Logs(folder, tmp_path, "torchrun.log", first_rank=0)
        assert agent_module._early_exit(logs, stopped_at=6.0) == {}
        report = agent_module._early_exit(logs, stopped_at=8.0)
    assert (report["part"], report["code"]) == ("rank 1", 0)


def test_a_rank_that_only_missed_one_on_another_host_is_not_blamed(
    tmp_path: Path,
) -> None:
    """The keepers know that the other one exited early, though it failed nowhere."""
    tmp_path.chmod(0o700)
    missed = Cause(0, "effect", "rank 1 died", 7.0, 4, code=1)
    error_file = tmp_path / "ranks/x/attempt_0/0/error.json"
    error_file.parent.mkdir(parents=True)
    error_file.write_text(json.dumps({"cause": asdict(missed)}))
    with RunFolder.open(tmp_path) as folder:
        keeper_report = {"rank": 0, "exit_code": 1, "early_exits": [1]}
        folder.write_json("failure.json", keeper_report)
        logs = agent_module._Logs(folder, tmp_path, "torchrun.log", first_rank=0)
        report = agent_module._failure(logs, is_stopped=False)
    assert (report["part"], report["code"]) == ("rank 1", 1)
    assert report["cause"]["kind"] == "left"
    assert report["cause"]["iteration"] == 4


def test_an_agent_leaves_no_zombies_of_orphans_while_its_job_runs(
    tmp_path: Path,
) -> None:
    code = (
        "import os, psutil, subprocess, time\n"
        "for _ in range(5): subprocess.run(['sh', '-c', 'sleep 0.1 &'])\n"
        "time.sleep(1)\n"
        "agent = psutil.Process(os.getppid())\n"
        "print([child.status() for child in agent.children() if child.pid != os.getpid()])"
    )
    with agent_of((sys.executable, "-c", code), tmp_path) as agent:
        found = list(messages_of(agent))
    assert [message["text"] for message in found if message["kind"] == "log"] == [
        "[]\n"
    ]
    assert found[-1]["code"] == 0


def test_a_record_is_of_one_process_and_not_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = runs.record()
    # As where the clock of the host was set since.
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    process = runs.recorded(record)
    assert process is not None
    assert process.pid == os.getpid()
    assert runs.recorded({**record, "start": record["start"] + "0"}) is None, (
        "the id was used again"
    )
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        entry = {"pid": child.pid, "start": runs._start(child.pid)}
    assert runs.recorded(entry) is None, "it has ended"
    for damaged in (
        {},
        [],
        None,
        3,
        {"pid": "x"},
        {"pid": 10**30},
        {**record, "pid": [1]},
    ):
        assert runs.recorded(damaged) is None
