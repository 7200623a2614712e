"""Ranks that may be lost: who ends with whom, what is recorded, and what is shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.keeper import STORES
from megatron_ext.tools.launch.losses import CleanExit, Loss, Losses, loss_in_words
from megatron_ext.upstream import parent
from tests.commands import run_python
from tests.ports import free_port
from tests.tools.launch.cluster import wait_until

ROOT = Path(__file__).parents[3]
NUM_PORTS = 1 + len(STORES)

# No rank needs torch: each only ends as its rank says, and prints a line about a step afterwards.
RANKS = """\
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
assert os.environ["MEGATRON_EXT_HOSTED_STORES"] == "1"
print("started as", os.environ["MEGATRON_EXT_STARTED_RANK"], flush=True)
ending = sys.argv[1 + rank]
if "dies early" not in sys.argv:
    pathlib.Path(os.environ["MEGATRON_EXT_RANKS_MET"]).touch()
if ending == "killed with a child":
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    ending = "killed"
if ending == "killed in reserve":
    pathlib.Path(os.environ["MEGATRON_EXT_IN_RESERVE"]).touch()
    ending = "killed"
if ending in ("killed", "dies early"):
    os.kill(os.getpid(), signal.SIGKILL)
if ending == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
if ending == "exits7 later":
    time.sleep(1.5)
    ending = "exits7"
if ending.startswith("exits"):
    sys.exit(int(ending[5:]))
time.sleep(1.5)
line = f"restart 1 in the same processes: {len(sys.argv) - 2} of {len(sys.argv) - 1} ranks are left"
if rank == sys.argv.index("goes on") - 1:
    print("megatron_ext:", line, flush=True)
time.sleep(1.5)  # other hosts hear of a restart within a second, and a real one takes longer
print(f" iteration        4/       6 | lm loss: 1.0 | of rank {rank}", flush=True)
"""


def keep(tmp_path: Path, reserve: int, *endings: str) -> tuple[Any, Path]:
    (tmp_path / "ranks_that_end.py").write_text(RANKS)
    folder = tmp_path / "host"
    folder.mkdir(mode=0o700)
    done = run_python(
        "-m", "megatron_ext.tools.launch.keeper", str(folder / "failure.json"), "1", str(reserve),
        str(len(endings)), "--nnodes", "1", "--node-rank", "0",
        "--nproc-per-node", str(len(endings)), "--master-addr", "127.0.0.1",
        "--master-port", str(free_port(NUM_PORTS)), "--max-restarts", "0", "--rdzv-id", "run",
        "--log-dir", str(folder / "ranks"), "--redirects", "3", "--tee", "0:3,1:3",
        "-m", "ranks_that_end", *endings, PYTHONPATH=f"{ROOT}:{tmp_path}",
    )  # fmt: skip
    return done, folder


def test_a_lost_rank_ends_no_other(tmp_path: Path) -> None:
    done, folder = keep(tmp_path, 1, "goes on", "killed", "goes on")
    assert done.returncode == 0, done.stderr
    assert (
        "\x1e1 megatron_ext: rank 1 was lost (SIGKILL): 0 of 1 ranks remain in reserve"
        in (done.stdout)
    )
    assert "\x1e0  iteration        4/" in done.stdout
    assert "of rank 2" not in done.stdout  # not shown, and in its file
    assert "of rank 2" in (folder / "ranks/kept/attempt_0/2/stdout.log").read_text()
    [loss] = json.loads((folder / "losses.json").read_text())
    assert (loss["rank"], loss["exit_code"]) == (1, -signal.SIGKILL)
    assert 0 < loss["back_after_s"] < 60
    assert re.fullmatch(
        r"rank 1 lost at \d\d:\d\d:\d\d \(SIGKILL; the next step came after \d+\.\d s\)",
        loss_in_words(loss),
    )
    assert not (folder / "failure.json").exists()


def test_a_rank_that_exits_early_with_code_0_is_lost(tmp_path: Path) -> None:
    done, folder = keep(tmp_path, 1, "goes on", "exits0", "goes on")
    assert done.returncode == 0, done.stderr
    assert "rank 1 was lost (exit code 0): 0 of 1 ranks remain in reserve" in (
        done.stdout
    )
    [loss] = json.loads((folder / "losses.json").read_text())
    assert (loss["rank"], loss["exit_code"]) == (1, 0)


def test_children_of_a_lost_rank_end_with_it(tmp_path: Path) -> None:
    done, _ = keep(tmp_path, 1, "goes on", "killed with a child")
    assert done.returncode == 0, done.stderr
    child_id = int((tmp_path / "child").read_text())
    with suppress(psutil.NoSuchProcess):
        # The first process of a container may not wait for orphans.
        assert psutil.Process(child_id).status() == psutil.STATUS_ZOMBIE


def test_more_losses_than_reserves_end_the_job_with_the_first_cause(
    tmp_path: Path,
) -> None:
    done, folder = keep(tmp_path, 1, "deaf", "exits7", "killed")
    losses = json.loads((folder / "losses.json").read_text())
    assert {loss["rank"] for loss in losses[:2]} == {1, 2}
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["rank"] == losses[0]["rank"]
    assert done.returncode in (7, 128 + signal.SIGKILL)
    assert "so the job stops" in done.stdout


def test_a_loss_before_all_ranks_have_met_ends_the_job_at_once(tmp_path: Path) -> None:
    done, folder = keep(tmp_path, 2, "deaf", "dies early", "deaf", "deaf")
    assert done.returncode == 128 + signal.SIGKILL
    assert "no rank can replace it before all ranks have met" in done.stdout
    assert json.loads((folder / "failure.json").read_text())["rank"] == 1


def test_wrong_flags_end_the_job_though_there_are_ranks_in_reserve(
    tmp_path: Path,
) -> None:
    done, _ = keep(tmp_path, 2, "deaf", "exits2", "deaf")
    assert done.returncode == 2
    assert "its replacement would fail too" in done.stdout


def test_a_rank_knows_the_number_with_which_it_was_started(tmp_path: Path) -> None:
    _, folder = keep(tmp_path, 0, "goes on", "goes on")
    log = folder / "ranks/kept/attempt_0/1/stdout.log"
    assert "started as 1" in log.read_text()


def test_ranks_end_with_their_keeper_without_an_agent(tmp_path: Path) -> None:
    """As if a user had started the command that `--dry-run` prints."""
    ranks = "from megatron_ext.upstream import parent\nparent.die_with_parent()\n"
    (tmp_path / "ranks_that_end.py").write_text(ranks + RANKS)
    words = [
        sys.executable, "-m", "megatron_ext.tools.launch.keeper", str(tmp_path / "failure.json"),
        "1", "0", "2", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port(NUM_PORTS)),
        "--rdzv-id", "run", "--log-dir", str(tmp_path / "ranks"), "-m", "ranks_that_end",
        "deaf", "deaf",
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        runs.RUN_ID: "by-hand",
        runs.NODE: "7",
    }
    env.pop(parent.AGENT_PID, None)
    with subprocess.Popen(words, env=env) as keeper:
        try:
            wait_until((tmp_path / "ranks/ranks_met").exists, 60)
            keeper.kill()
            keeper.wait(60)
            wait_until(lambda: runs.marked("by-hand", 7) == set(), 10)
        finally:
            keeper.kill()
            runs.end(runs.marked("by-hand", 7))


def test_a_stopped_job_leaves_no_rank(tmp_path: Path) -> None:
    (tmp_path / "ranks_that_end.py").write_text(RANKS)
    words = [
        sys.executable, "-m", "megatron_ext.tools.launch.keeper", str(tmp_path / "failure.json"),
        "0.5", "1", "2", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port(NUM_PORTS)),
        "--rdzv-id", "run", "--log-dir", str(tmp_path / "ranks"), "-m", "ranks_that_end",
        "deaf", "deaf",
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        runs.RUN_ID: "kept",
        runs.NODE: "7",
    }
    with subprocess.Popen(words, env=env) as keeper:
        try:
            for _ in range(600):
                if len(list(tmp_path.glob("ranks/kept/attempt_0/1/stdout.log"))) == 1:
                    break
                with pytest.raises(subprocess.TimeoutExpired):
                    keeper.wait(0.1)
            keeper.send_signal(signal.SIGTERM)
            assert keeper.wait(60) == 128 + signal.SIGTERM
            assert runs.marked("kept", 7) == set()
            assert not (tmp_path / "losses.json").exists(), (
                "ranks that it ended are not lost"
            )
        finally:
            keeper.kill()
            runs.end(runs.marked("kept", 7))


def test_only_steps_after_a_restart_count_and_later_losses_are_kept(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    said: list[str] = []
    losses = Losses(tmp_path, 3, lambda rank, text: said.append(text))
    losses.note_step()
    losses.add(Loss(4, 64, 100.0))
    losses.note_step()  # the last one that the others complete
    assert json.loads((tmp_path / "losses.json").read_text())[0]["back_after_s"] is None
    losses.note_restart(1, num_lost=1)
    losses.add(Loss(2, -64, 100.0))  # during the recovery from the first
    losses.note_restart(2, num_lost=2)
    losses.note_step()
    losses.add(Loss(0, 1, 200.0))
    records = json.loads((tmp_path / "losses.json").read_text())
    assert [record["back_after_s"] is None for record in records] == [
        False,
        False,
        True,
    ]
    assert "exit code 64" in said[0]
    assert "(signal 64)" in said[1] or "SIGRTMAX" in said[1]
    assert losses.fatal is None


def test_a_rank_that_ends_after_the_others_have_restarted_counts_as_recovered(
    tmp_path: Path,
) -> None:
    """A rank that fails joins the others' barrier for the restart, and only then ends."""
    tmp_path.chmod(0o700)
    losses = Losses(tmp_path, 2, lambda _rank, _text: None)
    losses.note_restart(1, num_lost=1)
    losses.note_step()
    losses.add(Loss(1, 1, time.time()))
    losses.note_step()
    assert losses.items[0].back_after_s is not None
    # The others go on until they restart.
    losses.add(Loss(3, -9, time.time(), was_in_reserve=True))
    losses.note_step()
    losses.note_step()
    assert losses.items[1].back_after_s is None
    losses.add(Loss(0, 7, time.time()))
    assert losses.fatal is not None
    assert losses.fatal.rank == 0
    assert losses.survived == [1, 3]


def test_a_rank_that_the_others_have_restarted_without_is_not_why_a_job_ends(
    tmp_path: Path,
) -> None:
    """Steps may be long: the next failure may come before the first step after a restart."""
    tmp_path.chmod(0o700)
    losses = Losses(tmp_path, 1, lambda _rank, _text: None)
    losses.add(Loss(2, -9, 100.0))  # in reserve
    losses.note_restart(1, num_lost=1)
    losses.add(Loss(0, 7, 200.0))
    assert losses.fatal is not None
    assert losses.fatal.rank == 0
    assert losses.survived == [2]


def test_a_lost_rank_in_reserve_is_not_why_a_job_ends(tmp_path: Path) -> None:
    done, folder = keep(tmp_path, 1, "deaf", "killed in reserve", "exits7 later")
    assert done.returncode == 7, done.stdout
    failure = json.loads((folder / "failure.json").read_text())
    assert (failure["rank"], failure["survived"]) == (2, [1])


def test_ranks_that_exit_with_code_0_use_up_the_reserve_if_the_others_restart(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    losses = Losses(tmp_path, 1, lambda _rank, _text: None)
    losses.note_restart(1, num_lost=1)
    losses.note_exit(CleanExit(1, time.time(), num_restarts=0))
    losses.note_exit(CleanExit(2, time.time(), num_restarts=1))
    assert [loss.rank for loss in losses.items] == [1]
    losses.note_step()
    assert losses.items[0].back_after_s is not None
    assert losses.fatal is None
    losses.add(Loss(0, 1, time.time()))  # no rank can replace rank 2
    assert losses.fatal is not None
    assert losses.fatal.rank == 0
    assert losses.survived == [1]


def test_the_loss_that_ended_a_job_is_not_one_that_it_survived(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    losses = Losses(tmp_path, 1, lambda _rank, _text: None)
    losses.note_step()
    losses.add(Loss(3, -9, 100.0))
    losses.note_restart(1, num_lost=1)
    losses.note_step()
    losses.add(Loss(5, 1, 200.0))
    losses.add(Loss(6, -15, 201.0))
    assert losses.fatal is not None
    assert losses.fatal.rank == 5
    assert losses.survived == [3]
    losses.add(Loss(7, 2, 202.0))
    assert losses.fatal.rank == 7, "wrong flags, which a replacement would have, too"


def keep_on_two_hosts(
    tmp_path: Path, reserve: int, *endings_by_host: tuple[str, ...]
) -> tuple[list[int], list[str], list[Path]]:
    """Run a keeper for each host; return exit codes, what they printed, and their folders."""
    (tmp_path / "ranks_that_end.py").write_text(RANKS)
    counts = ",".join(str(len(endings)) for endings in endings_by_host)
    endings = [ending for host in endings_by_host for ending in host]
    port = str(free_port(NUM_PORTS))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    keepers, folders = [], []
    for host, endings_here in enumerate(endings_by_host):
        folder = tmp_path / f"host{host}"
        folder.mkdir(mode=0o700)
        folders.append(folder)
        words = [
            sys.executable, "-m", "megatron_ext.tools.launch.keeper", str(folder / "failure.json"),
            "1", str(reserve), counts, "--nnodes", "2", "--node-rank", str(host),
            "--nproc-per-node", str(len(endings_here)), "--master-addr", "127.0.0.1",
            "--master-port", port, "--rdzv-id", "run", "--log-dir", str(folder / "ranks"),
            "--local-addr", f"127.0.0.{1 + host}", "--tee", "0:3,1:3", "-m", "ranks_that_end",
            *endings,
        ]  # fmt: skip
        keepers.append(
            subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
        )
    try:
        printed = [keeper.communicate(timeout=100)[0] for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.kill()
    return [keeper.returncode for keeper in keepers], printed, folders


def test_the_first_host_records_the_losses_of_all(tmp_path: Path) -> None:
    codes, printed, folders = keep_on_two_hosts(
        tmp_path, 2, ("goes on",), ("goes on", "killed", "goes on")
    )
    assert codes == [0, 0], printed
    [loss] = json.loads((folders[0] / "losses.json").read_text())
    assert (loss["rank"], loss["exit_code"]) == (2, -signal.SIGKILL)
    assert 0 < loss["back_after_s"] < 60
    assert "rank 2 was lost (SIGKILL)" in printed[0]
    assert not (folders[1] / "losses.json").exists()


def test_too_many_losses_end_all_hosts_and_one_of_them_says_why(tmp_path: Path) -> None:
    codes, printed, folders = keep_on_two_hosts(
        tmp_path, 0, ("deaf",), ("deaf", "exits7", "deaf")
    )
    assert codes == [0, 7], printed
    failure = json.loads((folders[1] / "failure.json").read_text())
    assert (failure["rank"], failure["local_rank"], failure["exit_code"]) == (2, 1, 7)
    assert not (folders[0] / "failure.json").exists()


def test_a_host_whose_ranks_have_exited_early_is_reported_by_another(
    tmp_path: Path,
) -> None:
    codes, printed, folders = keep_on_two_hosts(
        tmp_path, 0, ("exits7 later",), ("exits0",)
    )
    assert codes == [7, 0], printed
    failure = json.loads((folders[0] / "failure.json").read_text())
    assert (failure["rank"], failure["early_exits"]) == (0, [1])


def test_the_first_host_reports_a_loss_of_a_host_that_has_ended(tmp_path: Path) -> None:
    codes, printed, folders = keep_on_two_hosts(tmp_path, 0, ("deaf",), ("killed",))
    reported = [folder for folder in folders if (folder / "failure.json").exists()]
    assert len(reported) == 1, printed
    assert sorted(codes) == [0, 128 + signal.SIGKILL]
    assert json.loads((reported[0] / "failure.json").read_text())["rank"] == 1


def test_ranks_end_with_the_keeper_of_the_first_host(tmp_path: Path) -> None:
    """It hosts their stores, so they could not meet again."""
    (tmp_path / "ranks_that_end.py").write_text(RANKS)
    port = free_port(NUM_PORTS)
    words = [
        sys.executable, "-m", "megatron_ext.tools.launch.keeper", str(tmp_path / "failure.json"),
        "0.5", "1", "1,1", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1",
        "--master-addr", "127.0.0.1", "--master-port", str(port), "--rdzv-id", "run", "--log-dir",
        str(tmp_path / "ranks"), "-m", "ranks_that_end", "deaf", "deaf",
    ]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        runs.RUN_ID: "orphaned",
        runs.NODE: "7",
    }
    serve = (
        f"from torch.distributed import TCPStore; import time; store = TCPStore('127.0.0.1', "
        f"{port + 1}, is_master=True, wait_for_workers=False); time.sleep(100)"
    )
    first_host = subprocess.Popen([sys.executable, "-c", serve])
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            for _ in range(600):
                if len(list(tmp_path.glob("ranks/kept/attempt_0/0/stdout.log"))) == 1:
                    break
                with pytest.raises(subprocess.TimeoutExpired):
                    keeper.wait(0.1)
            first_host.kill()
            _, errors = keeper.communicate(timeout=60)
            assert keeper.returncode == 1
            assert "the first host's keeper does not answer" in errors
            assert runs.marked("orphaned", 7) == set()
        finally:
            keeper.kill()
            first_host.kill()
            first_host.wait()
            runs.end(runs.marked("orphaned", 7))
