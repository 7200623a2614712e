"""A launched job that loses ranks and continues in the same processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from megatron_ext.tools.launch.hostfile import parse
from megatron_ext.tools.launch.plan import JobPlan
from tests.ranks import require_training
from tests.saved_tensors import saved_tensors
from tests.tools.launch.cluster import rank_of, wait_until
from tests.tools.launch.test_cluster import LLAMA
from tests.tools.launch.test_keeper import free_port

pytest.importorskip(
    "nvidia_resiliency_ext.inprocess", reason="needs megatron-ext[resilience]"
)

_STEP = re.compile(r"iteration +(\d+)/")


@dataclass
class Job:
    """A launched job, and what it has printed."""

    launcher: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, pattern: str) -> None:
        """Read the output up to a line with this pattern."""
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"the job ended before {pattern!r}:\n{self.text[-6000:]}")

    def until_steps(self, number: int = 3) -> None:
        """Read the output up to the line of the step with this number, counted from here."""
        for _ in range(number):
            self.until(_STEP.pattern)

    def until_recovered(self) -> None:
        """Read the output up to a few steps after the next restart."""
        self.until("restart [0-9]+ in the same processes")
        self.until_steps()

    def rank(self, number: int) -> psutil.Process:
        """Return the process that started as this rank."""
        return rank_of(self.launcher.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the launcher has started."""
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def end(self) -> int:
        """Read the remaining output; return the exit code."""
        assert self.launcher.stdout is not None
        self.lines += self.launcher.stdout
        return self.launcher.wait(60)


@contextmanager
def launched(
    folder: Path, *options: str, flags: str, script: str = "pretrain_gpt.py"
) -> Iterator[Job]:
    """Launch a job on this machine whose output shows all ranks."""
    folder.mkdir()
    saved = f"--save {folder}/saved --load {folder}/saved --save-interval 100000"
    words = [
        sys.executable,
        "-m",
        "megatron_ext",
        "launch",
        "--raw",
        "--show",
        "all",
        *options,
    ]
    words += [
        "--num-microbatches",
        "4",
        "--",
        script,
        *flags.split(),
        *saved.split(),
    ]
    environment = {
        **os.environ,
        "MEGATRON_EXT_RUNS": str(folder / "runs"),
        "MEGATRON_EXT_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    launcher = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Job(launcher)
    finally:
        launcher.terminate()
        launcher.communicate(timeout=60)


FLAGS = f"{LLAMA} --hidden-dropout 0 --attention-dropout 0 --pipeline-schedule zb-h1 "


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_outlives_rank_0_a_reserve_and_two_ranks_at_once(tmp_path: Path) -> None:
    """It ends with the weights of an undisturbed job, and survivors keep nothing of an attempt."""
    require_training()
    flags = f"{FLAGS} --train-iters 30 --pipeline-transport shm"
    patient = "--hang-timeout 200"  # on a busy machine, ranks wait long for each other
    options = ("--keep-going", "--reserve", "4")
    with launched(tmp_path / "disturbed", *options, flags=f"{flags} {patient}") as job:
        job.until_steps()
        survivor = job.rank(1)
        # Reserve ranks stand in for lost ones, the last first: 5 for 0, 4 for 5, 3 for 4.
        job.rank(0).kill()
        job.until_recovered()
        num_threads, num_descriptors = survivor.num_threads(), survivor.num_fds()
        job.rank(2).kill()  # in reserve
        job.until_recovered()
        job.rank(5).kill()
        job.until("rank 5 was lost")
        job.rank(4).kill()
        job.until_recovered()
        print("threads", num_threads, survivor.num_threads())
        print("descriptors", num_descriptors, survivor.num_fds())
        assert survivor.num_threads() <= num_threads + 5
        assert survivor.num_fds() <= num_descriptors + 5
        assert job.end() == 0, job.text[-6000:]
    lost = re.findall(r"rank (\d) was lost", job.text)
    assert lost == ["0", "2", "5", "4"]
    num_repeated = len(_STEP.findall(job.text)) - 30
    assert num_repeated <= len(lost)
    with launched(tmp_path / "undisturbed", flags=flags) as undisturbed:
        assert undisturbed.end() == 0, undisturbed.text[-6000:]
    weights = saved_tensors(tmp_path / "disturbed/saved")
    expected = saved_tensors(tmp_path / "undisturbed/saved")
    assert weights.keys() == expected.keys()
    differing = [name for name in weights if not weights[name].equal(expected[name])]
    assert not differing


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_frozen_rank_is_lost_after_the_hang_time_out(tmp_path: Path) -> None:
    require_training()
    flags = f"{FLAGS} --train-iters 40 --pipeline-transport tcp --hang-timeout 40"
    with launched(tmp_path / "job", "--keep-going", flags=flags) as job:
        job.until_steps()
        job.rank(0).suspend()
        job.until_recovered()
        assert job.end() == 0, job.text[-6000:]
    assert re.findall(r"rank (\d) was lost", job.text) == ["0"]


_FAILS_IN_EVERY_ATTEMPT = """
import os
import runpy

import torch
from megatron.training import training

from megatron_ext.config import active

train_step = training.train_step
attempt_of_last_step = None


def failing_train_step(*args, **kwargs):
    global attempt_of_last_step
    attempt = active.attempt()
    is_second = attempt == attempt_of_last_step
    attempt_of_last_step = attempt
    if is_second and attempt < {num_restarts} and torch.distributed.get_rank() == attempt % 2:
        raise RuntimeError(f"failure of attempt {{attempt}}")
    return train_step(*args, **kwargs)


training.train_step = failing_train_step
runpy.run_path(os.environ["MEGATRON_LM_PATH"] + "/pretrain_gpt.py", run_name="__main__")
"""


_NUM_RESTARTS = 8
"""One run had 50: threads and descriptors stayed the same, and memory grew by 30 MiB at most."""


@dataclass(frozen=True)
class Usage:
    """What the process of a rank holds, and how many processes the job has."""

    num_threads: int
    num_descriptors: int
    memory_mib: float
    num_processes: int


def _usage_of(job: Job, rank: int) -> Usage:
    process = job.rank(rank)
    return Usage(
        num_threads=process.num_threads(),
        num_descriptors=process.num_fds(),
        memory_mib=process.memory_full_info().uss / 2**20,
        num_processes=len(job.processes()),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    """The ranks fail in turn, so that two processes last for any number of restarts."""
    if "MEGATRON_LM_PATH" not in os.environ:
        pytest.skip("the script that fails runs Megatron's own")
    script = tmp_path / "failing.py"
    script.write_text(_FAILS_IN_EVERY_ATTEMPT.format(num_restarts=_NUM_RESTARTS))
    flags = f"{FLAGS} --train-iters {2 * _NUM_RESTARTS + 4} --pipeline-transport shm "
    flags += "--hang-timeout 200"  # on a busy machine, ranks wait long for each other
    usages = []
    with launched(
        tmp_path / "job", "--keep-going", flags=flags, script=str(script)
    ) as job:
        for number in range(1, _NUM_RESTARTS + 1):
            job.until(f"restart {number} in the same processes")
            job.until_steps(1)
            usages.append([_usage_of(job, rank) for rank in range(2)])
            print(number, *usages[-1])
        processes = job.processes()
        assert job.end() == 0, job.text[-6000:]
    assert not re.search(r"rank \d was lost \(", job.text)
    for early, late in zip(usages[3], usages[-1], strict=True):
        assert late.num_threads <= early.num_threads + 5
        assert late.num_descriptors <= early.num_descriptors + 5
        assert late.num_processes <= early.num_processes + 2
        assert late.memory_mib <= early.memory_mib + 40
    assert not [process for process in processes if process.is_running()]


def _processes_of_host(name: str) -> list[psutil.Process]:
    """Return all processes that have this value of HOST_OF_TEST."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended in the meantime
            if process.environ().get("HOST_OF_TEST") == name:
                processes.append(process)
    return processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_outlives_one_of_its_hosts(tmp_path: Path) -> None:
    """The keepers of three hosts run here: two hosts train, and the ranks of the third wait."""
    require_training()
    flags = f"{FLAGS} --train-iters 30 --global-batch-size 8 --hang-timeout 200 "
    flags += f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 100000"
    hosts = parse("10.0.0.1:1\n10.0.0.2:1\n10.0.0.3:1")
    plan = JobPlan(
        "kept",
        hosts,
        ("pretrain_gpt.py", *flags.split()),
        str(Path.cwd()),
        sys.executable,
        env={"MEGATRON_EXT_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        reserve=0,
        num_reserve_hosts=1,
        master_port=free_port(),
        log_root=str(tmp_path / "logs"),
    ).completed()
    by_hand = re.sub(
        r"(--master-addr|--local-addr) 10[.0-9]+", r"\1 127.0.0.1", plan.dry_run()
    )
    keepers = []
    for host, command in enumerate(re.findall(r"^cd .*", by_hand, re.MULTILINE)):
        with (tmp_path / f"host{host}.log").open("wb") as log:
            keepers.append(
                subprocess.Popen(
                    ["bash", "-c", command],
                    env={**os.environ, "HOST_OF_TEST": f"{tmp_path}-{host}"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    ranks = tmp_path / "logs/kept"

    def printed() -> str:
        logs = sorted(ranks.glob("*/ranks/kept/attempt_0/*/stdout.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    try:
        wait_until(lambda: len(_STEP.findall(printed())) >= 3, 300)
        for process in _processes_of_host(f"{tmp_path}-1"):
            with suppress(psutil.Error):
                process.kill()
        shutil.rmtree(ranks / "local/1")  # its disk: rank 0 has saved the tensors too
        assert keepers[0].wait(400) == 0, printed()[-6000:]
        assert keepers[2].wait(60) == 0
    finally:
        for host in range(3):
            for process in _processes_of_host(f"{tmp_path}-{host}"):
                with suppress(psutil.Error):
                    process.kill()
        for keeper in keepers:
            keeper.wait(60)
    text = printed()
    assert "restart 1 in the same processes: 2 of 3 ranks are left" in text
    steps = [int(step) for step in _STEP.findall(text)]
    assert steps.count(30) == 1
    assert len(steps) <= 31, "more than one step was repeated"
    [loss] = json.loads((ranks / "000-10.0.0.1/losses.json").read_text())
    assert loss["rank"] == 1
    assert loss["back_after_s"] is not None
