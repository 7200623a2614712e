"""Jobs that start again: on the hosts that answer, from the last whole checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext import cli
from megatron_ext.tools.launch import attempts, runs
from megatron_ext.tools.launch.failures import Failure, Outcome
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import JobPlan, flag_value
from tests.commands import run_package
from tests.ranks import require_training
from tests.tools.launch.cluster import (
    ADDRESSES,
    Cluster,
    cluster,
    remove_processes,
    why_not,
)
from tests.tools.launch.test_cluster import LLAMA

FLAKY = """\
import os, pathlib, sys
count = pathlib.Path(sys.argv[1])
tries = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (tries + 1))
sys.exit(0 if tries == int(sys.argv[2]) else 7)
"""


def launched(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Launch on this machine a script that ends well after it failed so often."""
    (tmp_path / "flaky.py").write_text(FLAKY)
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    return run_package(
        "launch", "--hostfile", str(tmp_path / "hosts"), "--run-id", "flaky", *words,
        MEGATRON_EXT_RUNS=str(tmp_path / "runs"),
    )  # fmt: skip


def test_a_job_starts_again_until_it_ends_well(tmp_path: Path) -> None:
    script = [str(tmp_path / "flaky.py"), str(tmp_path / "count"), "1"]
    done = launched(tmp_path, "--max-restarts", "2", "--", *script)
    assert done.returncode == 0, done.stderr
    assert (
        "restart 1 of 2 in 1 s, because of localhost: rank 0 ended with exit code 7"
        in (done.stderr)
    )
    assert "run flaky-r1 succeeded" in done.stderr
    assert (tmp_path / "count").read_text() == "xx"
    assert (tmp_path / "runs/flaky-r1/result.json").exists()
    first, second = (
        run_package("status", name, MEGATRON_EXT_RUNS=str(tmp_path / "runs"))
        for name in ("flaky", "flaky-r1")
    )
    assert "the job was restarted as flaky-r1" in first.stderr
    assert first.stdout.startswith("failed (exit code 7)")
    assert second.stdout.startswith("succeeded")
    assert not second.stderr


@pytest.mark.slow
def test_a_cause_that_stays_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    script = [str(tmp_path / "flaky.py"), str(tmp_path / "count"), "9"]
    done = launched(tmp_path, "--max-restarts", "1", "--", *script)
    assert done.returncode == 7
    assert done.stderr.count("in 1 s, because of") == 1
    assert "failed first: localhost: rank 0 ended with exit code 7" in done.stderr
    assert (tmp_path / "count").read_text() == "xx"


def restarted(hosts: str, *words: str) -> list[JobPlan]:
    """Launch on these hosts, which are all this machine, a job that fails once; return its plans.

    The attempts themselves are left out.
    """
    Path("hosts").write_text(hosts)
    plans: list[JobPlan] = []

    def attempt(plan: JobPlan, _args: object) -> tuple[Outcome, JobPlan]:
        plans.append(plan)
        failure = Failure("localhost", "rank 0", 7, 0.0) if len(plans) == 1 else None
        return Outcome(7 if failure else 0, failure), plan.completed(
            [1] * len(plan.hosts)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "_attempt", attempt)
        launch = [
            "launch",
            "--hostfile",
            "hosts",
            "--run-id",
            "again",
            "--max-restarts",
            "1",
        ]
        assert cli.main([*launch, *words]) == (0 if len(plans) == 2 else 2)
    return plans


def test_the_pause_grows_to_its_longest_after_any_number_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    Path("hosts").write_text("localhost\n")
    pauses: list[float] = []

    def attempt(plan: JobPlan, _args: object) -> tuple[Outcome, JobPlan]:
        return Outcome(7, Failure("localhost", "rank 0", 7, 0.0)), plan.completed([1])

    monkeypatch.setattr(attempts, "_attempt", attempt)
    monkeypatch.setattr(attempts, "_able_hosts", lambda hosts, *_: hosts)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
    monkeypatch.setattr(attempts, "time", clock)
    # 2.0**1024, the pause after 1025 failures if nothing limits it, is no float.
    words = ["--run-id", "again", "--max-restarts", "1025", "--per-node", "--", "true"]
    assert cli.main(["launch", "--hostfile", "hosts", *words]) == 7
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(pauses) == 1025
    assert set(pauses[6:]) == {60}


def test_what_a_host_still_runs_ends_before_it_takes_part_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    marks = {**os.environ, runs.RUN_ID: "again", runs.NODE: "0"}
    with subprocess.Popen(
        ["sleep", "100"], env=marks
    ) as left:  # its host was out of reach
        first, second = restarted("localhost", "--per-node", "--", "true")
        assert left.wait(10) == -signal.SIGKILL
    assert (first.run_id, second.run_id) == ("again", "again-r1")


def test_a_job_does_not_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    Path("job.py").touch()
    hosts = "127.0.0.2 slots=2\n127.0.0.3 slots=1"
    Path("runs/again-r1/000-127.0.0.2").mkdir(
        parents=True
    )  # the first host cannot take part again
    assert len(restarted(hosts, "--spares", "1", "--allow-uneven", "--", "job.py")) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "127.0.0.2: logs cannot be written" in lines[-2]
    assert (
        "the job needs 1 hosts with 2 ranks, but only 1 of 2 hosts can run it"
        in lines[-1]
    )


def test_a_spare_takes_the_place_of_a_host_that_answers_and_cannot_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    Path("job.py").touch()
    Path("runs/again-r1/000-127.0.0.2").mkdir(parents=True)
    first, second = restarted("127.0.0.2\n127.0.0.3\n", "--spares", "1", "--", "job.py")
    assert [host.name for host in first.hosts] == ["127.0.0.2"]
    # As many ranks as the other one had, whatever devices it has.
    assert [(host.name, host.number, host.slots) for host in second.hosts] == [
        ("127.0.0.3", 1, 1)
    ]


def kept_attempts(
    monkeypatch: pytest.MonkeyPatch, *iterations: int, flags: str = "", hosts: str = "a"
) -> list[JobPlan]:
    """Return the plans of a job with --keep-going whose attempts fail in these iterations."""
    attempted: list[JobPlan] = []

    def attempt(plan: JobPlan, _args: object) -> tuple[Outcome, JobPlan]:
        completed = plan.completed()
        iteration = iterations[len(attempted)]
        attempted.append(completed)
        failure = Failure("a", "rank 0", 7, 0.0)
        return Outcome(7, failure, iteration=iteration), completed

    all_hosts = tuple(Host(name, 1, number=index) for index, name in enumerate(hosts))
    plan = JobPlan(
        "kept",
        all_hosts,
        ("pretrain_gpt.py", "--load", "x", *flags.split()),
        "/",
        "python",
        reserve=1,
        num_reserve_hosts=len(hosts) // 3,
        log_root="/logs",
    )
    args = Namespace(
        max_restarts=len(iterations) - 1, restart_window=3600.0, preflight_timeout=1.0
    )
    monkeypatch.setattr(attempts, "_attempt", attempt)
    monkeypatch.setattr(attempts.time, "sleep", lambda _: None)
    if len(hosts) == 1:
        monkeypatch.setattr(attempts, "_able_hosts", lambda hosts, *_: hosts)
    else:
        # The first host is lost.
        monkeypatch.setattr(attempts, "_able_hosts", lambda hosts, *_: hosts[1:])
    assert attempts.with_restarts(plan, all_hosts, args) == 7
    return attempted


def folders_of(plans: list[JobPlan]) -> list[str | None]:
    """Return the attempts' folders of local checkpoints."""
    return [
        flag_value(plan.command, "--non-persistent-local-ckpt-dir") for plan in plans
    ]


def test_a_restart_continues_from_the_local_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one gets no further, the next begins at the global ones: they may be damaged."""
    plans = kept_attempts(monkeypatch, 5, 9, 9, 3, 4)
    assert [plan.run_id for plan in plans] == [
        "kept", "kept-r1", "kept-r2", "kept-r3", "kept-r4",
    ]  # fmt: skip
    assert folders_of(plans) == [
        "/logs/kept/local", "/logs/kept/local", "/logs/kept/local", "/logs/kept-r3/local",
        "/logs/kept-r3/local",
    ]  # fmt: skip


@pytest.mark.parametrize("flags", ["--finetune", "--pretrained-checkpoint y"])
def test_local_checkpoints_do_not_stand_in_for_pretrained_weights(
    monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """Megatron would begin at iteration 0 with the weights of a later one."""
    plans = kept_attempts(monkeypatch, 5, 9, flags=flags)
    assert folders_of(plans) == ["/logs/kept/local", "/logs/kept-r1/local"]


def test_a_host_that_stays_keeps_its_ranks_and_so_its_local_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = kept_attempts(monkeypatch, 5, 9, hosts="abc")
    assert [host.name for host in first.hosts] == ["a", "b", "c"]
    assert [host.name for host in second.hosts] == ["c", "b"]
    assert folders_of([second]) == ["/logs/kept/local"]


def test_spares_are_fewer_than_hosts(tmp_path: Path) -> None:
    done = launched(tmp_path, "--spares", "1", "--max-restarts", "1", "--", "flaky.py")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "--spares is 1 of 1 hosts; " in line


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_training()
    reason = why_not()
    if reason is not None:
        pytest.skip(f"needs two hosts with ssh servers: {reason}")
    with cluster(tmp_path_factory.mktemp("restarts")) as made:
        yield made


def training(checkpoints: Path) -> list[str]:
    """Words for `launch`: the tiny Llama, from the last checkpoint, if there is one."""
    flags = f"{LLAMA} --train-iters 30 --save-interval 10 --save {checkpoints} --load {checkpoints}"
    tree = os.environ.get("MEGATRON_LM_PATH")  # the hosts' logins do not have it
    words = ["--env", f"MEGATRON_LM_PATH={tree}"] if tree else []
    words += [
        "--raw",
        "--num-microbatches",
        "2",
        "--",
        "pretrain_gpt.py",
        *flags.split(),
    ]
    return [*words, "--use-dpp", "--microbatch-rng"]


def losses_of(text: str) -> dict[int, str]:
    """Iteration -> loss, of the last attempt that a launcher shows."""
    last = re.split(r"restart \d+ of", text)[-1]
    return {
        int(n): loss
        for n, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", last)
    }


def checkpoint_of(checkpoints: Path, iteration: int, alone: Path) -> Path:
    """Copy one checkpoint to a folder of its own."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(checkpoints / name, alone / name)
    (alone / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return alone


@pytest.mark.slow
@pytest.mark.timeout(580)  # three starts of a training job, which may share their cores
def test_a_lost_host_is_replaced_and_losses_stay_the_same(hosts: Cluster) -> None:
    checkpoints = hosts.directory / "checkpoints"
    launcher = hosts.start(
        hosts.hostfile(slots=2), "--max-restarts", "1", "--spares", "1",
        *training(checkpoints),
    )  # fmt: skip
    lines = []
    assert launcher.stdout is not None
    for line in launcher.stdout:
        lines.append(line)
        if re.search(r"iteration +12/", line) and len(losses_of("".join(lines))) == 12:
            remove_processes(hosts.namespaces[0])  # its ssh server too
    assert launcher.wait(60) == 0, "".join(lines)
    text = "".join(lines)
    assert f"because of {ADDRESSES[0]}: the connection to the agent" in text
    assert f"[{ADDRESSES[1]}:1]" in text
    resumed = losses_of(text)
    begin = min(resumed)
    assert begin in (11, 21)
    assert max(resumed) == 30

    again = checkpoint_of(checkpoints, begin - 1, hosts.directory / "again")
    undisturbed = hosts.run(
        *hosts.launch_arguments(hosts.hostfile(slots=2), "--include", ADDRESSES[1]),
        *training(again),
        timeout_s=250,
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert losses_of(undisturbed.stdout) == resumed
