"""Launching with Slurm: a real one of two nodes, and without it what is submitted."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import slurm as ours
from tests.commands import run_package
from tests.ranks import losses, require_training
from tests.tools.launch.cluster import ADDRESSES, remove_processes, wait_until
from tests.tools.launch.slurm_cluster import Slurm, slurm, why_not
from tests.tools.launch.test_cluster import LLAMA, WAITING
from tests.tools.launch.test_restarts import checkpoint_of, losses_of, training


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"needs a Slurm: {reason}")
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "waiting.py").write_text(WAITING)
    (directory / "failing.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit('this rank gives up')\n"
        "time.sleep(300)\n"
    )
    with slurm(directory) as made:
        yield made


def allocated(cluster: Slurm, options: str, *words: str) -> tuple[int, str]:
    """Run `megatron-ext WORDS` inside an allocation, as a user would type it there."""
    return cluster.run("salloc", "--quiet", *options.split(), *cluster.ours(*words))


def submitted(cluster: Slurm, options: str, *words: str) -> str:
    """Submit `megatron-ext launch WORDS`; return the id of the job."""
    code, output = cluster.run(*cluster.ours("launch", "--slurm", options, *words))
    assert code == 0, output
    [job] = re.findall(r"^Submitted batch job (\d+)", output)
    return job


def is_gone(cluster: Slurm, job: str) -> bool:
    nodes = cluster.left_on(0) + cluster.left_on(1)
    return not nodes and ours_state(cluster, job) is None


def ours_state(cluster: Slurm, job: str) -> str | None:
    code, output = cluster.run("squeue", "--noheader", "--format=%T", "--jobs", job)
    return (output.strip() or None) if code == 0 else None


def log_of(cluster: Slurm, job: str) -> str:
    path = cluster.directory / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_llama3_trains_in_an_allocation_that_says_all_about_its_hosts(
    cluster: Slurm,
) -> None:
    require_training()
    flags = [*LLAMA.split(), "--use-dpp", "--pipeline-transport", "tcp"]
    tree = os.environ.get("MEGATRON_LM_PATH")
    words = ["--env", f"MEGATRON_LM_PATH={tree}"] if tree else []
    words += ["--raw", "--num-microbatches", "2", "--", "pretrain_gpt.py", *flags]
    launch = ["launch", *words]
    code, output = allocated(cluster, "--nodes 2 --ntasks-per-node 2", *launch)
    assert code == 0, output
    assert "2 hosts, 4 ranks: TP 1, PP 2, CP 1, DP 2; 8 samples per step" in output
    assert len(losses(output)) == 3
    assert "[n2:3]" in output  # the last rank logs the loss
    assert f"--node-ips {' '.join(ADDRESSES)}" in allocated(
        cluster, "--nodes 2 --ntasks-per-node 2", *launch[:1], "--dry-run", *launch[1:]
    )[1].replace("'", "")
    [job] = re.findall(r"run (\d+):", output)
    code, status = cluster.run(*cluster.ours("status", job))
    assert code == 0, status
    assert "n1: ended with 0, no processes" in status
    assert "n2: ended with 0, no processes" in status
    assert is_gone(cluster, job)


@pytest.mark.slow
def test_a_submitted_job_is_seen_and_stopped_by_its_id(cluster: Slurm) -> None:
    words = ["--nproc", "1", "--", "waiting.py"]
    job = submitted(cluster, "--nodes 2", *words)
    wait_until(lambda: log_of(cluster, job).count("] pid ") == 2, 60)
    assert f"already inside Slurm job {job}: --slurm has no effect" in log_of(
        cluster, job
    )
    code, status = cluster.run(*cluster.ours("status", job))
    assert (code, status.count(": running, 2 processes")) == (0, 2), status
    code, logs = cluster.run(*cluster.ours("logs", job, "--rank", "1"))
    assert code == 0
    assert re.search(r"n2: .*\npid \d+", logs), logs
    code, stopped = cluster.run(*cluster.ours("stop", job))
    assert code == 0, stopped
    wait_until(lambda: is_gone(cluster, job), 30)
    code, logs = cluster.run(*cluster.ours("logs", job, "--rank", "1"))
    assert (code, logs.count("pid ")) == (0, 1), logs


def test_scancel_leaves_nothing_behind(cluster: Slurm) -> None:
    job = submitted(
        cluster, "--nodes 2", "--nproc", "1", "--", "waiting.py", "--stubborn"
    )
    wait_until(lambda: log_of(cluster, job).count("] pid ") == 2, 60)
    cluster.ask("scancel", job)
    wait_until(lambda: is_gone(cluster, job), 60)


def test_the_first_failure_is_the_exit_code_of_the_job(cluster: Slurm) -> None:
    code, output = allocated(
        cluster,
        "--nodes 2",
        "launch",
        "--nproc",
        "1",
        "--show",
        "all",
        "--",
        "failing.py",
    )
    assert code == 1, output
    assert "this rank gives up" in output
    assert "failed first: n2: rank 1 ended with exit code 1" in output
    wait_until(lambda: not cluster.left_on(0) + cluster.left_on(1), 30)


def test_a_job_that_waits_has_started_nothing(cluster: Slurm) -> None:
    job = submitted(cluster, "--nodes 2 --hold", "--nproc", "1", "--", "waiting.py")
    code, output = cluster.run(*cluster.ours("status", job))
    assert code == 2
    assert f"Slurm job {job} is PENDING and has not started anything yet; " in output
    cluster.ask("scancel", job)
    wait_until(lambda: ours_state(cluster, job) is None, 30)


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        (
            "--nodes 2 --partition nowhere",
            (),
            "sbatch failed (exit code 1): sbatch: error: Batch job submission failed: Invalid part",
        ),
        (
            "--comment 'x",
            (),
            '--slurm is "--comment \'x": No closing quotation; close the quot',
        ),
        ("--nodes 2", ("--hostfile", "hosts"), "--slurm and --hostfile are both given"),
    ],
)
def test_what_slurm_refuses_is_one_line(
    cluster: Slurm, options: str, words: tuple[str, ...], message: str
) -> None:
    code, output = cluster.run(
        *cluster.ours("launch", "--slurm", options, *words, "--", "waiting.py")
    )
    assert code == 2
    assert output.startswith(f"megatron-ext: error: {message}"), output
    assert output.count("\n") == 1


def test_an_allocation_that_is_too_small_is_one_line(cluster: Slurm) -> None:
    flags = ["--pipeline-model-parallel-size", "4"]
    code, output = allocated(
        cluster, "--nodes 1 --ntasks-per-node 2", "launch", "--",
        "pretrain_gpt.py", *flags,
    )  # fmt: skip
    assert code == 2
    [line] = output.splitlines()
    assert "2 ranks cannot be divided into replicas of 4 (TP 1 x PP 4 x CP 1); " in line


@pytest.mark.slow
@pytest.mark.timeout(
    580
)  # three starts of a training job, and Slurm takes its time to notice
def test_a_lost_node_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"needs a Slurm: {reason}")
    tasks, over_tcp = ("--ntasks-per-node", "2"), ("--pipeline-transport", "tcp")
    with slurm(tmp_path) as cluster:
        checkpoints = tmp_path / "checkpoints"
        launcher = cluster.start(
            "salloc", "--quiet", "--nodes", "2", *tasks, "--no-kill",
            *cluster.ours("launch", "--max-restarts", "1", "--spares", "1",
                          "--preflight-timeout", "20", *training(checkpoints), *over_tcp),
        )  # fmt: skip
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if (
                re.search(r"iteration +12/", line)
                and len(losses_of("".join(lines))) == 12
            ):
                remove_processes(
                    cluster.namespaces[0]
                )  # slurmd of n1 and all that it started
        assert launcher.wait(60) == 0, "".join(lines)
        text = "".join(lines)
        assert (
            "restart 1 of 1 in 1 s, because of n1: the connection to the agent" in text
        )
        assert "-r1: 1 host, 2 ranks" in text
        resumed = losses_of(text)
        assert max(resumed) == 30

        alone = checkpoint_of(checkpoints, min(resumed) - 1, tmp_path / "again")
        options = f"--nodelist n2 --nodes 1 {' '.join(tasks)}"
        code, output = allocated(
            cluster, options, "launch", *training(alone), *over_tcp
        )
        assert code == 0, output
        assert losses_of(output) == resumed


def test_what_is_submitted_starts_the_same_launch(tmp_path: Path) -> None:
    done = run_package(
        "launch", "--slurm", "--nodes 2 --comment 'a b'", "--nproc", "8", "--dry-run", "--",
        "pretrain_gpt.py", "--data-path", "a b",
        MEGATRON_EXT_RUNS=str(tmp_path), SLURM_JOB_ID="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *sbatch, wrapped = shlex.split(done.stdout)
    assert sbatch[0] == "sbatch"
    assert sbatch[-4:] == ["--nodes", "2", "--comment", "a b"]
    assert wrapped == (
        f"--wrap=exec {sys.executable} -m megatron_ext launch --slurm '--nodes 2 --comment "
        "'\"'\"'a b'\"'\"'' --nproc 8 -- pretrain_gpt.py --data-path 'a b'"
    )


def test_a_batch_job_names_its_variables_and_sbatch_gets_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho "$A $B $C"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = run_package(
        "launch", "--slurm", "--nodes 2", "--env", "A=one=1", "--env=B=two", "--env", "C", "--",
        "pretrain_gpt.py", "--env", "D=four", SLURM_JOB_ID="", C="three",
    )  # fmt: skip
    assert done.stdout == "one=1 two three\n", done.stderr
    words = (tmp_path / "words").read_text()
    assert "--env A --env=B --env C -- pretrain_gpt.py --env D=four" in words
    assert "one" not in words


@pytest.mark.parametrize(
    ("text", "num_hosts", "counts"),
    [("2(x3),1", 4, [2, 2, 2, 1]), ("8", 1, [8]), ("", 2, [1, 1])],
)
def test_tasks_of_hosts(text: str, num_hosts: int, counts: list[int]) -> None:
    assert ours._tasks(text, num_hosts) == counts


@pytest.mark.parametrize(
    "text", ["4(x2)", "4(x2),", "2,2,x", "2,x,2,2", "-1(x3)", "1(x4)"]
)
def test_tasks_that_do_not_fit_the_hosts_are_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match="unset it"):
        ours._tasks(text, 3)


def test_without_slurms_commands_the_remedy_is_said(tmp_path: Path) -> None:
    done = run_package("launch", "--slurm", "--nodes 2", "--", "a.py",
                       PATH=str(tmp_path), SLURM_JOB_ID="", MEGATRON_EXT_RUNS=str(tmp_path),
                       )  # fmt: skip
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "sbatch is not installed here; " in line
