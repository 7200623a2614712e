"""Two hosts with real ssh servers, as network namespaces on this machine; a third starts jobs.

The namespaces share processes, users and files, but not addresses and ports, so `launch` cannot
tell the difference. Nothing outside the namespaces and a temporary directory is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[3]
_PORT = 2222
ADDRESSES = ("10.213.77.2", "10.213.77.3")
_OWN = "10.213.77.1"


def why_not() -> str | None:
    """Return why this machine cannot create such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if _sshd() is None:
        return "there is no sshd (Debian: apt-get install openssh-server)"
    probe = f"megatron-ext-{os.getpid()}-probe"
    done = _run("ip", "netns", "add", probe, check=False)
    if done.returncode != 0:
        return f"network namespaces cannot be made: {done.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=check, timeout=60
    )


def commands_in(namespace: str, *without: str) -> list[str]:
    """Return the command lines of a namespace's processes that contain none of these words."""
    commands = []
    for pid in _run("ip", "netns", "pids", namespace).stdout.split():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
        if text and not any(word in text for word in without):
            commands.append(text)
    return commands


@dataclass
class Cluster:
    """Hosts that accept logins, and the namespace that commands run from."""

    directory: Path
    namespaces: tuple[str, str, str]
    ssh: str
    """Value of `--ssh-cmd`."""

    def hostfile(self, *, slots: int) -> Path:
        """Write a hostfile with both hosts."""
        path = self.directory / f"hosts-{slots}"
        path.write_text("".join(f"{address} slots={slots}\n" for address in ADDRESSES))
        return path

    def environment(self) -> dict[str, str]:
        """The environment of commands, with plans and logs under the directory."""
        env = {**os.environ, "MEGATRON_EXT_DEVICE": "cpu", "PYTHONPATH": str(_ROOT)}
        env.pop("MEGATRON_LM_PATH", None)
        return {
            **env,
            "MEGATRON_EXT_RUNS": str(self.directory / "runs"),
            "OMP_NUM_THREADS": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        """`megatron-ext ARGUMENTS` in the third namespace."""
        inside = ["ip", "netns", "exec", self.namespaces[2]]
        return [*inside, sys.executable, "-m", "megatron_ext", *arguments]

    def run(
        self, *arguments: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a subcommand and wait for it."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.environment(),
            cwd=self.directory,
        )

    def launch_arguments(self, hostfile: Path, *words: str) -> list[str]:
        """Arguments of a launch on these hosts."""
        logs = str(self.directory / "logs")
        return ["launch", "--hostfile", str(hostfile), "--ssh-cmd", self.ssh, "--log-dir", logs,
                *words]  # fmt: skip

    def start(self, hostfile: Path, *words: str) -> subprocess.Popen[str]:
        """Start a launch; its output goes to a pipe."""
        return subprocess.Popen(
            self.command(*self.launch_arguments(hostfile, *words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            cwd=self.directory,
            start_new_session=True,
        )


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Create two hosts under a directory, and remove them with everything that runs in them."""
    prefix = f"megatron-ext-{os.getpid()}"
    namespaces = (f"{prefix}-a", f"{prefix}-b", f"{prefix}-c")
    servers: list[subprocess.Popen[bytes]] = []
    try:
        make_network(namespaces)
        config = _make_keys(directory)
        servers = [
            _start_sshd(directory, namespaces[i], ADDRESSES[i]) for i in range(2)
        ]
        running_cluster = Cluster(directory, namespaces, f"ssh -F {config}")
        wait_until(
            lambda: all(_answers(running_cluster, address) for address in ADDRESSES), 20
        )
        yield running_cluster
    finally:
        remove_network(namespaces)
        for server in servers:
            server.wait(10)


def remove_network(namespaces: Sequence[str]) -> None:
    """Remove namespaces with everything that runs in them."""
    for name in namespaces:
        remove_processes(name)
    for name in namespaces:
        _run("ip", "netns", "del", name, check=False)


def remove_processes(namespace: str) -> None:
    """Kill everything that runs in a namespace."""
    pids = _run("ip", "netns", "pids", namespace, check=False).stdout.split()
    for pid in map(int, pids):
        with_suppressed_kill(pid)


def with_suppressed_kill(pid: int) -> None:
    """Kill one of our processes, if it still exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def make_network(namespaces: Sequence[str]) -> None:
    """Connect two namespaces with a bridge in the third."""
    for name in namespaces:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
    bridge_space = namespaces[2]
    _run("ip", "-n", bridge_space, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", bridge_space, "addr", "add", f"{_OWN}/24", "dev", "br0")
    _run("ip", "-n", bridge_space, "link", "set", "br0", "up")
    for index, name in enumerate(namespaces[:2]):
        port = f"port{index}"
        _run(
            "ip", "link", "add", "eth0", "netns", name,
            "type", "veth", "peer", "name", port, "netns", bridge_space,
        )  # fmt: skip
        _run("ip", "-n", bridge_space, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{ADDRESSES[index]}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")


def _make_keys(directory: Path) -> Path:
    """Create the keys of hosts and user; return the client's configuration."""
    for name in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name))
    host_key = (directory / "host_key.pub").read_text()
    known_hosts = "".join(f"[{address}]:{_PORT} {host_key}" for address in ADDRESSES)
    (directory / "known_hosts").write_text(known_hosts)
    shutil.copy(directory / "user_key.pub", directory / "authorized_keys")
    config = directory / "ssh_config"
    config.write_text(
        f"Port {_PORT}\nUser root\nIdentityFile {directory}/user_key\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {directory}/known_hosts\nStrictHostKeyChecking yes\n"
    )
    return config


def _start_sshd(
    directory: Path, namespace: str, address: str
) -> subprocess.Popen[bytes]:
    Path("/run/sshd").mkdir(
        mode=0o755, exist_ok=True
    )  # for sshd's privilege separation
    config = directory / f"sshd_config_{address}"
    config.write_text(
        f"Port {_PORT}\nListenAddress {address}\nHostKey {directory}/host_key\n"
        f"AuthorizedKeysFile {directory}/authorized_keys\nStrictModes no\nUsePAM no\n"
        f"PidFile none\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        # 64 sessions at once are a normal start.
        f"MaxStartups 100\n"
    )
    sshd = _sshd()
    assert sshd is not None
    with (directory / f"sshd_{address}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, sshd, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _answers(running_cluster: Cluster, address: str) -> bool:
    ssh = [
        "ip",
        "netns",
        "exec",
        running_cluster.namespaces[2],
        *running_cluster.ssh.split(),
    ]
    done = _run(*ssh, "-o", "ConnectTimeout=2", address, "true", check=False)
    return done.returncode == 0


def rank_of(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a rank in a job started on this machine."""
    processes = []
    for process in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):  # it ended in the meantime
            environment = process.environ()
            if environment.get("RANK") == str(rank) and "LOCAL_RANK" in environment:
                processes.append(process)
    assert processes, f"no process of rank {rank}"
    # The processes that a rank forks (DataLoader workers, NVRx's monitor) have its environment.
    return min(processes, key=psutil.Process.create_time)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition, and fail the test if it does not become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.1)
