"""A job on this machine alone: no hostfile, and a person's view of its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import run_package
from tests.ranks import require_training
from tests.tools.launch.test_cluster import LLAMA

ROOT = Path(__file__).parents[3]
LONG = """\
import os, sys, time
print("megatron_ext: device cpu", flush=True)
if os.environ["RANK"] == "1":
    for n in range(1, 1000):
        print(f" iteration {n}/ 1000 | lm loss: 4.855E+00 | grad norm: 1.0 |", flush=True)
        if n == 3 and "--fails" in sys.argv:
            sys.exit("the data ends here")
        time.sleep(0.1)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    Path("pretrain_long.py").write_text(LONG)


def test_without_a_hostfile_one_replica_trains_here_in_a_few_lines() -> None:
    require_training()
    flags = [
        *LLAMA.split(),
        "--global-batch-size",
        "8",
        "--no-create-attention-mask-in-dataloader",
    ]
    done = run_package("launch", "--", "pretrain_gpt.py", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 host, 2 ranks: TP 1, PP 2, CP 1, DP 1; 8 samples per step" in done.stderr
    steps = re.findall(r"^iteration [123]/3  loss \S+ .*", done.stdout, re.MULTILINE)
    assert len(steps) == 3, done.stdout
    assert len(done.stdout.splitlines()) < 25, done.stdout
    [log] = re.findall(r"everything the ranks print: (\S+)", done.stderr)
    assert (
        len(
            re.findall(
                r"^\[localhost:1\] .*iteration +[123]/", Path(log).read_text(), re.M
            )
        )
        == 3
    )


def test_a_failure_ends_in_its_reason_and_the_path_of_the_log() -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--fails"]
    done = run_package("launch", "--", "pretrain_long.py", *flags)
    assert done.returncode == 1
    end = done.stderr.splitlines()[-1]
    assert re.search(
        r"failed first: localhost: rank 1 ended with exit code 1 after iteration 3: the data "
        r"ends here \(sys\.exit at pretrain_long\.py:\d+\); everything: ",
        end,
    )
    log = Path(end.rpartition("everything: ")[2])
    assert "the data ends here" in log.read_text()
    said = run_package("status", log.parent.name).stdout
    assert said.startswith(
        "failed (exit code 1): " + end.partition("failed first: ")[2]
    ), said
    assert "iteration    3/1000  loss 4.8550" in done.stdout
    # Ranks on the CPU are not counted by the devices of the machine.
    raw = run_package(
        "launch", "--raw", "--", "pretrain_long.py", *flags, "--device-backend", "cpu",
        MEGATRON_EXT_DEVICE="", CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip
    assert "[localhost:1]  iteration 3/ 1000 | lm loss: 4.855E+00" in raw.stdout


CAUSE = """\
import atexit, os, time
from megatron_ext.errors import PeerDied
if os.environ["RANK"] == "0":
    raise PeerDied("rank 1 died")
atexit.register(time.sleep, 2)
raise KeyError("the cause")
"""


def test_the_rank_with_the_cause_failed_first_though_it_ends_later() -> None:
    Path("pretrain_cause.py").write_text(CAUSE)
    done = run_package("launch", "--nproc", "2", "--", "pretrain_cause.py")
    assert done.returncode == 1
    assert "megatron_ext: error: rank 1 died" in done.stdout
    assert "KeyError: 'the cause'" in done.stdout
    end = "failed first: localhost: rank 1 ended with exit code 1: KeyError: 'the cause'; every"
    assert end in done.stderr


LEAVES = """\
import os, sys, time
from megatron_ext.errors import PeerDied
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(3)
raise PeerDied("rank 1 died")
"""


def test_a_host_whose_ranks_exit_early_is_named() -> None:
    """torchrun reports no failure there, and the rank on the other host only missed its peer."""
    Path("leaves.py").write_text(LEAVES)
    Path("hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    done = run_package("launch", "--hostfile", "hosts", "--", "leaves.py")
    assert done.returncode == 1
    end = (
        "failed first: 127.0.0.3: rank 1 exited early with exit code 0: sys.exit(0) at "
        "leaves.py:4; logs: "
    )
    assert end in done.stderr


STOPPED = """\
import os, signal, sys, time
from megatron_ext.errors import TransportTimeout
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
raise TransportTimeout("2F0 did not come from rank 1: waited 1.0 s")
"""


def test_a_stopped_rank_is_named_and_not_one_that_waited_for_it() -> None:
    Path("pretrain_stopped.py").write_text(STOPPED)
    done = run_package(
        "launch", "--nproc", "2", "--grace", "1", "--", "pretrain_stopped.py"
    )
    assert done.returncode == 1
    end = done.stderr.splitlines()[-1]
    assert re.search(
        r"failed first: localhost: rank 1 makes no progress: its process \d+ is stopped, by SIG",
        end,
    ), done.stderr


SURVIVES = """\
import os, pathlib, time
rank = int(os.environ["RANK"])
pathlib.Path(os.environ["MEGATRON_EXT_RANKS_MET"]).touch()
if rank == 1:
    raise ValueError("which the job survives")
if rank == 2:
    folder = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[4]
    while not (folder / "losses.json").exists():
        time.sleep(0.1)
    print("megatron_ext: restart 1 in the same processes: 2 of 3 ranks are left", flush=True)
    print(" iteration        4/       6 | lm loss: 1.0", flush=True)
    os.environ["RANK"] = "1"  # as NVRx does
    time.sleep(1)
    raise KeyError("the cause")
time.sleep(100)
"""
KEPT = (
    "launch --nproc 2 --keep-going --reserve 1 --grace 1 -- pretrain_kept.py --save a --load a "
    "--pipeline-model-parallel-size 2"
).split()


def test_an_error_that_a_job_has_survived_is_not_why_it_ends() -> None:
    Path("pretrain_kept.py").write_text(SURVIVES)
    done = run_package(*KEPT)
    assert done.returncode == 1
    end = done.stderr.splitlines()[-1]
    told = "failed first: localhost: rank 2 ended with exit code 1"
    assert told in end, done.stderr
    assert "KeyError: 'the cause'" in end
    log = Path(end.rpartition("everything: ")[2])
    assert "ValueError: which the job survives" in log.read_text()


KILLS_KEEPER = """\
import os, pathlib, signal, time
pathlib.Path(f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    while len(list(pathlib.Path().glob("*.pid"))) < 3:
        time.sleep(0.1)
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(100)
"""


def test_a_killed_keeper_is_named_and_its_ranks_end() -> None:
    Path("pretrain_kept.py").write_text(KILLS_KEEPER)
    done = run_package(*KEPT)
    assert done.returncode == 128 + signal.SIGKILL
    end = done.stderr.splitlines()[-1]
    told = (
        "failed first: localhost: the keeper of the ranks was killed by SIGKILL; logs"
    )
    assert told in end, done.stderr
    process_ids = [int(path.read_text()) for path in Path().glob("*.pid")]
    assert len(process_ids) == 3
    assert not any(map(psutil.pid_exists, process_ids))


SOCKETS = """\
import os, signal, time
from multiprocessing import Process, util
def work():
    open(f"{util.get_temp_dir()}/listener-{os.getpid()}", "w").close()
    time.sleep(100)
Process(target=work).start()
util.get_temp_dir()
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_is_killed_leaves_no_sockets_of_its_workers(tmp_path: Path) -> None:
    Path("pretrain_workers.py").write_text(SOCKETS)
    (tmp_path / "temporary").mkdir()
    done = run_package(
        "launch",
        "--nproc",
        "1",
        "--",
        "pretrain_workers.py",
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert "failed first: localhost: rank 0 was killed by SIGKILL; " in done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_ctrl_c_names_the_iteration_and_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    flags = [
        "--pipeline-model-parallel-size",
        "2",
        "--save",
        "saved",
        "--load",
        "saved",
    ]
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron_ext",
            "launch",
            "--",
            "pretrain_long.py",
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if line.startswith("iteration    3/1000"):
                break
        launcher.send_signal(signal.SIGINT)
        rest = launcher.stdout.read().splitlines()
        assert launcher.wait(60) == 130
    assert re.match(
        r"megatron-ext: interrupted at iteration \d+; checkpoint 2; run again to resume; every",
        rest[-1],
    )
