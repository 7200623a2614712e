"""A launched job that loses ranks and continues in the same processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from megatron_ext.tools.launch.hostfile import parse
from megatron_ext.tools.launch.plan import JobPlan
from megatron_ext.tools.launch.runs import marked
from tests.ports import free_port
from tests.ranks import require_training
from tests.saved_tensors import saved_tensors
from tests.tools.launch.cluster import rank_of, wait_until
from tests.tools.launch.test_cluster import LLAMA

if TYPE_CHECKING:
    import torch

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

    @property
    def run_id(self) -> str:
        """The id of the run, which the launcher prints before any rank starts."""
        [run_id] = re.findall(r"run ([\w-]+):", self.text)
        return str(run_id)

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
    folder: Path,
    *options: str,
    flags: str,
    script: str = "pretrain_gpt.py",
    save_interval: int = 100_000,
) -> Iterator[Job]:
    """Launch a job on this machine whose output shows all ranks."""
    folder.mkdir()
    saved = (
        f"--save {folder}/saved --load {folder}/saved --save-interval {save_interval}"
    )
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
_TRAINS = f"{FLAGS} --train-iters 30 --pipeline-transport shm "
_PATIENT = "--hang-timeout 200 "  # on a busy machine, ranks wait long for each other


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The tensors in the last checkpoint of a job that loses no rank."""
    require_training()
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    with launched(folder, flags=_TRAINS) as job:
        assert job.end() == 0, job.text[-6000:]
    return saved_tensors(folder / "saved")


def _assert_same(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert weights.keys() == expected.keys()
    differing = [name for name in weights if not weights[name].equal(expected[name])]
    assert not differing


def _files_in_shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped or opened."""
    paths = set()
    for process in processes:
        with suppress(psutil.Error, OSError):  # it ended in the meantime
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
            paths.update(re.findall(r" (/dev/shm/.*)", mapped))
            for file in process.open_files():
                if file.path.startswith("/dev/shm/"):
                    paths.add(file.path)
    return paths


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; the first process of a container may not reap orphans."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_outlives_rank_0_a_reserve_and_two_ranks_at_once(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """It ends with the weights of an undisturbed job, and survivors keep nothing of an attempt."""
    options = ("--keep-going", "--reserve", "4")
    with launched(tmp_path / "disturbed", *options, flags=_TRAINS + _PATIENT) as job:
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
    _assert_same(saved_tensors(tmp_path / "disturbed/saved"), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_outlives_ranks_that_are_killed_while_they_save(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    options = ("--keep-going", "--reserve", "2")
    saved = tmp_path / "disturbed/saved"
    with launched(
        tmp_path / "disturbed", *options, flags=_TRAINS + _PATIENT, save_interval=10
    ) as job:
        for rank, iteration in ((0, 10), (1, 20)):
            job.until(rf"iteration +{iteration - 2}/")
            victim = job.rank(rank)
            while not (saved / f"iter_{iteration:07d}").exists():
                assert job.launcher.poll() is None, job.text[-6000:]
                time.sleep(0.001)
            victim.kill()
            job.until_recovered()
        assert job.end() == 0, job.text[-6000:]
    assert re.findall(r"rank (\d) was lost", job.text) == ["0", "1"]
    _assert_same(saved_tensors(saved), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_loses_more_ranks_than_are_in_reserve_ends(tmp_path: Path) -> None:
    require_training()
    with launched(
        tmp_path / "job", "--keep-going", flags=f"{_TRAINS}{_PATIENT}--train-iters 1000"
    ) as job:
        job.until_steps()
        job.rank(0).kill()
        job.until_recovered()
        processes = job.processes()
        files = _files_in_shared_memory(processes)
        job.rank(1).kill()
        assert job.end() == 128 + signal.SIGKILL, job.text[-6000:]
    assert "rank 1 was lost (SIGKILL): only 1 ranks were in reserve" in job.text
    assert "failed first: localhost: rank 1 was killed by SIGKILL" in job.text
    assert not list(filter(_is_alive, processes))
    assert not list(filter(os.path.exists, files))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restarted_job_continues_from_its_local_checkpoints(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    options = ("--keep-going", "--max-restarts", "1")
    with launched(tmp_path / "job", *options, flags=_TRAINS + _PATIENT) as job:
        job.until(r"iteration +6/")
        for victim in (job.rank(0), job.rank(1)):  # one rank is in reserve
            victim.kill()
        job.until("restart 1 of 1")
        num_lines = len(job.lines)
        assert job.end() == 0, job.text[-6000:]
    restarted = "".join(job.lines[num_lines:])
    steps = [int(step) for step in _STEP.findall(restarted)]
    assert steps[0] in (6, 7)
    assert steps[-1] == 30
    _assert_same(saved_tensors(tmp_path / "job/saved"), undisturbed)
    assert len(list(tmp_path.glob("job/runs/*/local"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_is_lost_during_the_start_ends_the_job(tmp_path: Path) -> None:
    require_training()
    with launched(
        tmp_path / "job", "--keep-going", flags=f"{_TRAINS}{_PATIENT}"
    ) as job:
        job.until("run .*: 1 host")
        wait_until(lambda: len(marked(job.run_id, 0)) >= 4, 60)  # with the keeper
        processes = job.processes()
        job.rank(1).kill()
        assert job.end() == 128 + signal.SIGKILL, job.text[-6000:]
    assert (
        "no rank can replace it before all ranks have met, so the job stops" in job.text
    )
    assert "failed first: localhost: rank 1 was killed by SIGKILL" in job.text
    assert not marked(job.run_id, 0)
    assert not list(filter(_is_alive, processes))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_outlives_a_killed_keeper(tmp_path: Path) -> None:
    """NVRx's monitors run in other sessions than the ranks that they watch."""
    require_training()
    with launched(
        tmp_path / "job", "--keep-going", flags=f"{_TRAINS}{_PATIENT}--train-iters 1000"
    ) as job:
        job.until_steps()
        keeper = job.rank(0).parent()
        assert keeper is not None
        processes = job.processes()
        files = _files_in_shared_memory(processes)
        keeper.kill()
        assert job.end() == 128 + signal.SIGKILL, job.text[-6000:]
    told = "failed first: localhost: the keeper of the ranks was killed by SIGKILL"
    assert told in job.text
    assert not marked(job.run_id, 0)
    assert not list(filter(_is_alive, processes))
    assert not list(filter(os.path.exists, files))


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


_LOSES_A_RANK_IN_EVERY_ATTEMPT = """
import os
import runpy
import time

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
    rank = torch.distributed.get_rank()
    if is_second and attempt < {num_losses}:
        if attempt % {attempts_for_a_kill} == 0:
            if rank == 0:
                time.sleep(600)  # until the test kills it
        elif rank == attempt % 2:
            raise RuntimeError(f"failure of attempt {{attempt}}")
    return train_step(*args, **kwargs)


training.train_step = failing_train_step
runpy.run_path(os.environ["MEGATRON_LM_PATH"] + "/pretrain_gpt.py", run_name="__main__")
"""


_NUM_LOSSES = 9
"""One run killed 50 ranks: the survivor kept 38 threads and 96 descriptors, and its memory grew by
14 MiB in the first 13 losses and by 1 MiB in the others."""
_ATTEMPTS_FOR_A_KILL = 4
"""In every fourth attempt, a rank is killed; in the others, one of two ranks fails in turn."""
_SETTLED = 4
"""Number of losses after which a process has loaded all that it needs."""


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    num_threads: int
    num_descriptors: int
    memory_mib: float

    @classmethod
    def of(cls, process: psutil.Process) -> Usage:
        memory_mib = process.memory_full_info().uss / 2**20
        return cls(process.num_threads(), process.num_fds(), round(memory_mib, 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_losses_leave_nothing_behind(tmp_path: Path) -> None:
    """Most are errors, which cost no rank in reserve, so that few processes do for many losses."""
    if "MEGATRON_LM_PATH" not in os.environ:
        pytest.skip("the script that fails runs Megatron's own")
    script = tmp_path / "failing.py"
    script.write_text(
        _LOSES_A_RANK_IN_EVERY_ATTEMPT.format(
            num_losses=_NUM_LOSSES, attempts_for_a_kill=_ATTEMPTS_FOR_A_KILL
        )
    )
    flags = f"{FLAGS} --train-iters {2 * _NUM_LOSSES + 4} --pipeline-transport shm "
    num_kills = len(range(0, _NUM_LOSSES, _ATTEMPTS_FOR_A_KILL))
    # Reserve ranks stand in for lost ones, the last first.
    victims = [0, *range(num_kills + 1, 1, -1)][:num_kills]
    options = ("--keep-going", "--reserve", str(num_kills))
    usages, nums_processes = [], []
    with launched(
        tmp_path / "job", *options, flags=flags + _PATIENT, script=str(script)
    ) as job:
        for attempt in range(_NUM_LOSSES + 1):
            if attempt > 0:
                job.until(f"restart {attempt} in the same processes")
            job.until_steps(1)
            survivor = job.rank(1)
            keeper = survivor.parent()
            assert keeper is not None
            usages.append((Usage.of(survivor), Usage.of(keeper)))
            nums_processes.append(len(job.processes()))
            print(attempt, *usages[-1], nums_processes[-1])
            if attempt < _NUM_LOSSES and attempt % _ATTEMPTS_FOR_A_KILL == 0:
                job.rank(victims[attempt // _ATTEMPTS_FOR_A_KILL]).kill()
        processes = job.processes()
        files = _files_in_shared_memory(processes)
        assert job.end() == 0, job.text[-6000:]
    lost = re.findall(r"rank (\d+) was lost \(SIGKILL", job.text)
    assert list(map(int, lost)) == victims
    for settled, last in zip(usages[_SETTLED], usages[-1], strict=True):
        assert last.num_threads <= settled.num_threads + 5
        assert last.num_descriptors <= settled.num_descriptors + 5
        assert last.memory_mib <= settled.memory_mib + 40
    # A killed rank and its monitor end; a process that has just started may be counted.
    assert nums_processes[-1] <= nums_processes[0] - 2 * num_kills + 2
    assert not list(filter(_is_alive, processes))
    assert not list(filter(os.path.exists, files))


_LISTS_WHAT_KEEPS_GOING = """
import atexit
import os
import runpy
import sys

from megatron_ext.patches.registry import REGISTRY


def list_parts():
    parts = [name for name in sys.modules if name in {modules}]
    parts += [patch for patch in REGISTRY.acted if patch.startswith("inprocess_restart.")]
    print("rank", os.environ["RANK"], "parts:", *sorted(parts), flush=True)


atexit.register(list_parts)
runpy.run_path(os.environ["MEGATRON_LM_PATH"] + "/pretrain_gpt.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keeps_going", [False, True])
def test_none_of_it_runs_without_the_flag(tmp_path: Path, keeps_going: bool) -> None:
    if "MEGATRON_LM_PATH" not in os.environ:
        pytest.skip("the script that lists runs Megatron's own")
    modules = (
        "megatron_ext.training.survival",
        "megatron_ext.tools.launch.keeper",
        "megatron_ext.tools.launch.board",
        "megatron_ext.tools.launch.losses",
    )
    script = tmp_path / "listing.py"
    script.write_text(_LISTS_WHAT_KEEPS_GOING.format(modules=modules))
    options = ("--keep-going",) if keeps_going else ()
    flags = f"{FLAGS}--train-iters 2"
    with launched(tmp_path / "job", *options, flags=flags, script=str(script)) as job:
        job.until_steps(1)
        starters = [" ".join(process.cmdline()) for process in job.processes()]
        assert job.end() == 0, job.text[-6000:]
    parts = re.findall(r"rank \d parts:(.*)", job.text)  # in reserve, RANK is None
    assert len(parts) == 2
    has_keeper = any("megatron_ext.tools.launch.keeper" in line for line in starters)
    assert has_keeper == keeps_going
    if not keeps_going:
        assert parts == ["", ""]
        assert not re.search("non-persistent|local checkpoint", job.text)
    for line in parts if keeps_going else []:
        assert "megatron_ext.training.survival" in line
        assert "inprocess_restart.store_of_attempt" in line


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
        master_port=free_port(num_ports=3),
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
