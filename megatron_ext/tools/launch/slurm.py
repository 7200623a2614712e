"""Slurm instead of ssh and a hostfile: hosts come from the allocation, and srun starts agents.

Inside an allocation, srun replaces ssh, but agents, preflight and supervision stay the same.
Outside an allocation, `launch --slurm` submits the same command as a batch job. The Slurm job id is
also the run id, so `status`, `logs` and `stop` accept it on any machine that shares the run
folders.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megatron_ext.config.flags import split_words
from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.hostfile import Host

_TIMEOUT_S = 60


def argv(job: str, host: Host, remote: Sequence[str]) -> list[str]:
    """Return the command that runs `remote` once on a host, with all of the job's resources."""
    return [
        # --overlap and --mem=0 let the command share resources with other steps in the
        # job; otherwise, it would wait for those steps. Without --cpu-bind=none, Slurm
        # could bind the agent and all its ranks to one task's CPU.
        "srun", "--jobid", job, "--overlap", "--nodes=1", "--ntasks=1",
        f"--nodelist={host.name}", "--cpu-bind=none", "--mem=0", "--export=ALL",
        "--unbuffered", "--quiet", *remote,
    ]  # fmt: skip


def hosts() -> tuple[Host, ...]:
    """Return the hosts in the allocation, in Slurm's order, with their addresses.

    A host with one task, which is Slurm's default, gets no `slots`, so it starts one process per
    device.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    names = run("scontrol", "show", "hostnames", listed).split()
    nodes = run("scontrol", "--oneliner", "show", "node", ",".join(names))
    # With --oneliner, each node is described on one line, so the pattern cannot match across nodes.
    addresses = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", nodes))
    tasks_per_node = os.environ.get("SLURM_TASKS_PER_NODE", "")
    tasks = _tasks(tasks_per_node, len(names))
    allocated = []
    for name, count in zip(names, tasks, strict=True):
        slots = count if count > 1 else None
        allocated.append(Host(name, slots=slots, addr=addresses.get(name)))
    return tuple(allocated)


def _tasks(text: str, num_hosts: int) -> list[int]:
    """Return the number of tasks on each host, from Slurm's notation, such as `2(x3),1`.

    An empty string means one task on each host.
    """
    if not text:
        return [1] * num_hosts
    counts: list[int] = []
    is_valid = True
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            is_valid = False
        else:
            num_tasks = int(match[1])
            num_repeats = int(match[2] or 1)
            counts += [num_tasks] * num_repeats
    fits_hosts = len(counts) in (num_hosts, 0)
    if not is_valid or not fits_hosts:
        raise LaunchError(
            f"SLURM_TASKS_PER_NODE={text} does not match the {num_hosts} hosts in "
            "SLURM_JOB_NODELIST; unset it to start one task on each"
        )
    return counts or [1] * num_hosts


def state(job: str) -> str | None:
    """Return the state of a job, such as PENDING, or None if Slurm has no record of the job."""
    try:
        # Slurm forgets a job a few minutes after it ends (MinJobAge) and then reports
        # its id as invalid.
        output = run("squeue", "--noheader", "--format=%T", "--jobs", job)
        return output.strip() or None
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise


def submission(
    options: str,
    arguments: Sequence[str],
    workdir: str,
) -> list[str]:
    """Return the sbatch command that runs this launch inside an allocation.

    `options` are the user's sbatch options, and `arguments` are the arguments for `megatron-ext`.
    """
    words = split_words(options, "--slurm")
    command = [sys.executable, "-m", "megatron_ext", *arguments]
    start = shlex.join(command)
    defaults = [
        "--job-name=megatron-ext",
        f"--chdir={workdir}",
        # Disable requeueing, because the launcher restarts the job itself and can tell which hosts
        # are bad.
        "--no-requeue",
    ]
    # The user's options come last, so that they take precedence.
    return ["sbatch", *defaults, *words, f"--wrap=exec {start}"]


def without_values(words: Sequence[str]) -> list[str]:
    """Return the arguments for `launch` without the values of `--env`.

    All users on a cluster can read a batch job's command. The values reach the job through its
    environment, which sbatch passes on.
    """
    names = list(words)
    for index, word in enumerate(names):
        if index > 0 and names[index - 1] == "--env":
            names[index] = word.partition("=")[0]
        elif word.startswith("--env="):
            flag_and_name = word.split("=")[:2]
            names[index] = "=".join(flag_and_name)
    return names


def run(
    *command: str,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a Slurm command and return its output; `environment` adds variables.

    Raises:
        LaunchError: The command is missing, failed or timed out.
    """
    variables = {**os.environ, **(environment or {})}
    variables["LC_ALL"] = "C"  # we parse English output
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=variables,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not installed here; load Slurm's commands, or use --hostfile"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} did not answer within {_TIMEOUT_S} s"
        ) from None
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines()
        last = errors[-1] if errors else "no output"
        raise LaunchError(f"{command[0]} failed (exit code {done.returncode}): {last}")
    return done.stdout
