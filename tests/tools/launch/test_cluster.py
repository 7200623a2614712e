"""Jobs on two hosts with real ssh servers: they train, and whatever dies, all of it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.tools.launch.runs import marked
from tests.ranks import losses, require_training
from tests.tools.launch.cluster import (
    ADDRESSES,
    Cluster,
    cluster,
    commands_in,
    wait_until,
    why_not,
)

# Llama 3, small, as the example trains it.
LLAMA = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--rotary-base 500000 --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer "
    "--vocab-size 100 --mock-data --micro-batch-size 2 --lr 1e-3 --train-iters 3 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --num-workers 0 --pipeline-model-parallel-size 2 "
)
WAITING = """\
import os, signal, sys, time
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(300)
"""
ENDS_WITHIN_S = 15


class Stopwatch:
    """Seconds until a job has to be gone; more than 15 only where more runs than there are CPUs."""

    def __init__(self) -> None:
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        self.limit_s = ENDS_WITHIN_S * max(1.0, load / cpus)
        self.rule = f"limit {self.limit_s:.1f} s (load {load:.1f} on {cpus} CPUs)"
        self._begin = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def left_s(self) -> float:
        return self.limit_s - self.elapsed_s()

    def tell(self, what: str) -> None:
        print(f"{what}: all gone after {self.elapsed_s():.1f} s, {self.rule}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"needs two hosts with ssh servers: {reason}")
    directory = tmp_path_factory.mktemp("cluster")
    (directory / "waiting.py").write_text(WAITING)
    with cluster(directory) as made:
        yield made


def in_namespace(hosts: Cluster, index: int) -> list[str]:
    """Command lines of what runs on a host, besides its ssh server."""
    return commands_in(hosts.namespaces[index], "sshd")


def run_id_of(launcher: subprocess.Popen[str], lines: list[str], ranks: int) -> str:
    """Read a launcher's output until that many ranks have said their pid."""
    assert launcher.stdout is not None
    for line in launcher.stdout:
        lines.append(line)
        if sum("] pid " in seen for seen in lines) == ranks:
            [run_id] = re.findall(r"run ([\w-]+):", "".join(lines))
            return run_id
    raise AssertionError("".join(lines))


def test_llama3_trains_on_two_hosts(hosts: Cluster) -> None:
    require_training()
    tree = os.environ.get("MEGATRON_LM_PATH")
    words = ["--env", f"MEGATRON_LM_PATH={tree}"] if tree else []
    words += [
        "--raw",
        "--num-microbatches",
        "2",
        "--",
        "pretrain_gpt.py",
        *LLAMA.split(),
    ]
    words += ["--use-dpp", "--pipeline-transport", "tcp"]
    done = hosts.run(
        *hosts.launch_arguments(hosts.hostfile(slots=2), *words), timeout_s=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 hosts, 4 ranks: TP 1, PP 2, CP 1, DP 2; 8 samples per step" in done.stderr
    found = losses(done.stdout)
    assert len(found) == 3
    assert f"[{ADDRESSES[1]}:3]" in done.stdout  # the last rank logs the loss
    [run_id] = re.findall(r"run ([\w-]+):", done.stderr)
    status = hosts.run("status", run_id, "--ssh-cmd", hosts.ssh)
    assert status.stdout.startswith("succeeded (exit code 0)\n")
    assert all(
        f"{address}: ended with 0, no processes" in status.stdout
        for address in ADDRESSES
    )
    assert not in_namespace(hosts, 0) + in_namespace(hosts, 1)


@pytest.mark.slow
def test_upstreams_script_trains_on_two_hosts_and_ends_when_a_rank_is_killed(
    hosts: Cluster, megatron_lm_path: Path
) -> None:
    more = "--eval-interval 10 --split 98,1,1 --no-create-attention-mask-in-dataloader"
    flags = [
        *LLAMA.replace("--train-iters 3", "--train-iters 1000").split(),
        *more.split(),
    ]
    tree = [
        "--env",
        f"MEGATRON_LM_PATH={megatron_lm_path}",
        "--num-microbatches",
        "2",
        "--raw",
    ]
    job = hosts.start(hosts.hostfile(slots=1), *tree, "--", "pretrain_gpt.py", *flags)
    lines: list[str] = []
    try:
        assert job.stdout is not None
        while len(losses("".join(lines))) < 3:
            lines.append(next(job.stdout, "") or pytest.fail("".join(lines)))
        [run_id] = re.findall(r"run ([\w-]+):", "".join(lines))
        rank = rank_on(run_id, node=1)
        watch = Stopwatch()
        os.kill(rank, signal.SIGKILL)
        text = job.communicate(timeout=watch.left_s())[0]
        watch.tell("rank of upstream's script")
        assert f"failed first: {ADDRESSES[1]}: rank 1 was killed by SIGKILL" in text
        assert not marked(run_id, 0) | marked(run_id, 1)
        assert job.returncode == 137
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate(timeout=60)


def rank_on(run_id: str, node: int) -> int:
    """Return the process of the only rank of a job on a host; its own children are younger."""
    ranks = [
        process
        for process in marked(run_id, node)
        if b"\0LOCAL_RANK=0\0" in Path(f"/proc/{process.pid}/environ").read_bytes()
    ]
    return min(ranks, key=lambda process: process.create_time()).pid


@pytest.mark.parametrize(
    ("victim", "slots"),
    [("launcher", 1), ("agent", 1), ("torchrun", 1), ("rank", 2)],
    ids=["launcher", "agent", "torchrun", "rank with stubborn peers"],
)
def test_whatever_is_killed_all_of_it_ends_and_a_neighbour_does_not(
    hosts: Cluster, victim: str, slots: int
) -> None:
    hostfile = hosts.hostfile(slots=slots)
    neighbour_words = [
        "--per-node",
        "--run-id",
        f"neighbour-{victim}",
        "--",
        "sleep",
        "200",
    ]
    neighbour = hosts.start(hostfile, *neighbour_words)
    lines: list[str] = []
    stubborn = ["--stubborn"] * (victim == "rank")
    job = hosts.start(hostfile, "--show", "all", "--", "waiting.py", *stubborn)
    last = 2 * slots - 1
    try:
        run_id = run_id_of(job, lines, ranks=2 * slots)
        directory = hosts.directory / "logs" / run_id / f"001-{ADDRESSES[1]}"
        agent = json.loads((directory / "agent.json").read_text())["pid"]
        [rank] = [
            int(pid)
            for pid in re.findall(
                rf"\[{ADDRESSES[1]}:{last}\] pid (\d+)", "".join(lines)
            )
        ]
        torchrun = int(
            Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
        )
        launcher = int(
            json.loads(
                (hosts.directory / "runs" / run_id / "launcher.json").read_text()
            )["pid"]
        )
        pids = {
            "launcher": launcher,
            "agent": agent,
            "torchrun": torchrun,
            "rank": rank,
        }
        watch = Stopwatch()
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: not marked(run_id, 0) | marked(run_id, 1), watch.left_s())
        text = "".join(lines) + job.communicate(timeout=watch.left_s())[0]
        watch.tell(victim)
        assert "waitForInput" not in text, (
            "warnings of torch's store, while the ranks start"
        )
        died = {
            "agent": f"failed first: {ADDRESSES[1]}: the connection to the agent",
            "torchrun": f"failed first: {ADDRESSES[1]}: torchrun was killed by SIGKILL",
            "rank": f"failed first: {ADDRESSES[1]}: rank {last} was killed by SIGKILL",
        }
        if victim == "launcher":
            status = hosts.run("status", run_id, "--ssh-cmd", hosts.ssh).stdout
            assert status.startswith("the launcher has exited without a result\n")
            assert status.count("(the launcher exited)") == 2, status
        else:
            assert died[victim] in text
            assert (
                job.returncode == {"agent": 255, "torchrun": 137, "rank": 137}[victim]
            )
        if victim == "agent":
            assert f"the agent (pid {agent}) died" in text
        assert neighbour.poll() is None
        for index in range(2):
            assert sum("sleep 200" in line for line in in_namespace(hosts, index)) == 1
    finally:
        neighbour.send_signal(signal.SIGTERM)
        neighbour.communicate(timeout=60)
        if job.poll() is None:
            job.kill()
            job.communicate(timeout=60)
    wait_until(lambda: not in_namespace(hosts, 0) + in_namespace(hosts, 1), 30)


def test_hosts_that_refuse_or_do_not_answer(hosts: Cluster) -> None:
    hostfile = hosts.directory / "bad"
    hostfile.write_text(f"{ADDRESSES[0]}:1\n10.213.77.9:1\n")
    logs = str(hosts.directory / "logs")
    start = ["launch", "--hostfile", str(hostfile), "--log-dir", logs, "--ssh-cmd"]
    done = hosts.run(*start, hosts.ssh, "--", "waiting.py")
    assert done.returncode == 2
    assert (
        "error: 10.213.77.9: it cannot be reached; check that it is up" in done.stderr
    )
    no_key = hosts.ssh.replace("ssh_config", "no_key_config")
    config = (
        (hosts.directory / "ssh_config").read_text().replace("user_key", "host_key")
    )
    (hosts.directory / "no_key_config").write_text(config)
    refused = hosts.run(*start, no_key, "--include", ADDRESSES[0], "--", "waiting.py")
    assert refused.returncode == 2
    assert f"error: {ADDRESSES[0]}: ssh needs a password or a key" in refused.stderr
    assert not in_namespace(hosts, 0) + in_namespace(hosts, 1)


def test_a_port_that_is_taken_on_the_first_host(hosts: Cluster) -> None:
    taken = 2222  # its ssh server's
    words = ["--master-port", str(taken), "--", "waiting.py"]
    done = hosts.run(*hosts.launch_arguments(hosts.hostfile(slots=1), *words))
    assert done.returncode == 2
    assert (
        f"{ADDRESSES[0]}: port {taken} cannot be used for the rendezvous" in done.stderr
    )
    assert not in_namespace(hosts, 0) + in_namespace(hosts, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_on_another_host_stands_in_for_a_lost_one(hosts: Cluster) -> None:
    """It gets the lost rank's tensors from a third rank: the hosts share no local checkpoints."""
    pytest.importorskip(
        "nvidia_resiliency_ext.inprocess", reason="needs the extra resilience"
    )
    require_training()
    tree = os.environ.get("MEGATRON_LM_PATH")
    saved = hosts.directory / "saved"
    flags = LLAMA.replace("--train-iters 3", "--train-iters 24").split()
    flags += (
        "--hidden-dropout 0 --attention-dropout 0 --pipeline-schedule zb-h1".split()
    )
    flags += f"--pipeline-transport auto --save {saved} --load {saved}".split()
    flags += "--save-interval 1000 --hang-timeout 200".split()
    words = [*(["--env", f"MEGATRON_LM_PATH={tree}"] if tree else []), "--raw"]
    words += [
        "--show",
        "all",
        "--num-microbatches",
        "4",
        "--keep-going",
        "--",
        "pretrain_gpt.py",
    ]
    job = hosts.start(hosts.hostfile(slots=1), *words, *flags)
    lines: list[str] = []
    try:
        assert job.stdout is not None
        while len(losses("".join(lines))) < 3:
            lines.append(next(job.stdout, "") or pytest.fail("".join(lines)))
        [run_id] = re.findall(r"run ([\w-]+):", "".join(lines))
        os.kill(rank_on(run_id, node=0), signal.SIGKILL)
        lines += job.stdout
        text = "".join(lines)
        assert job.wait(60) == 0, text[-6000:]
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)
    assert "rank 0 was lost (SIGKILL): 0 of 1 ranks remain in reserve" in text
    restart = text.index("restart 1 in the same processes")
    # Local checkpoints are saved in each step.
    last_before = re.findall(r"iteration +(\d+)/", text[:restart])[-1]
    first_after = re.findall(r"iteration +(\d+)/", text[restart:])[0]
    assert int(first_after) >= int(last_before)
    status = hosts.run("status", run_id, "--ssh-cmd", hosts.ssh)
    assert re.search(r"rank 0 lost at .*the next step came after", status.stdout)
    assert not in_namespace(hosts, 0) + in_namespace(hosts, 1)
    print(text[-3000:])
