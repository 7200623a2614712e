"""A real Slurm cluster of two nodes, each a network namespace on this machine.

Everything is in one directory: munge's key and socket, configuration, state, spools and logs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.tools.launch import cluster

_ROOT = Path(__file__).resolve().parents[3]
_CONTROLLER = "10.213.77.1"
NODES = ("n1", "n2")
_NEEDED = (
    "munged",
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "salloc",
    "squeue",
    "scancel",
)
_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost({controller})
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_min_interval=100000
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=30 State=UP
"""


def why_not() -> str | None:
    """Return why this machine cannot run Slurm, or None."""
    missing = [name for name in _NEEDED if shutil.which(name, path=_SEARCH) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        return f"there is no {missing[0]} (Debian: apt-get install {packages})"
    return cluster.why_not()


def _inside(namespace: str) -> list[str]:
    """Return a prefix like `ip netns exec` that keeps /sys, because slurmd needs control groups."""
    return ["nsenter", f"--net=/run/netns/{namespace}"]


@dataclass
class Slurm:
    """A running Slurm cluster, and the namespace that its commands run from."""

    directory: Path
    namespaces: tuple[str, str, str]
    servers: dict[str, subprocess.Popen[bytes]]

    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        env.pop("MEGATRON_LM_PATH", None)
        return {
            **env,
            "SLURM_CONF": str(self.directory / "slurm.conf"),
            "MEGATRON_EXT_DEVICE": "cpu",
            "MEGATRON_EXT_RUNS": str(self.directory / "runs"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command on the login node; its output goes to a pipe."""
        return subprocess.Popen(
            [*_inside(self.namespaces[2]), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            cwd=self.directory,
        )

    def run(self, *command: str, timeout_s: float = 200) -> tuple[int, str]:
        """Run a command on the login node; return its exit code and output."""
        process = self.start(*command)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
            process.wait()
        return process.returncode, output

    def ours(self, *words: str) -> list[str]:
        """`megatron-ext WORDS`."""
        return [sys.executable, "-m", "megatron_ext", *words]

    def ask(self, *command: str) -> str:
        """Run one of Slurm's commands, which must succeed."""
        code, output = self.run(*command, timeout_s=60)
        assert code == 0, output
        return output.strip()

    def left_on(self, node: int) -> list[str]:
        """Return the command lines of processes on a node other than Slurm's."""
        return cluster.commands_in(self.namespaces[node], "slurmd", "slurmstepd")


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """Start Slurm in a directory, and end it with everything that runs in it."""
    directory.chmod(
        0o755
    )  # munge requires a path to its socket that others can traverse
    prefix = f"megatron-ext-slurm-{os.getpid()}-{directory.name}"
    namespaces = (f"{prefix}-a", f"{prefix}-b", f"{prefix}-c")
    running_slurm = Slurm(directory, namespaces, {})
    with ExitStack() as stack:
        stack.callback(_end, running_slurm)
        cluster.make_network(namespaces)
        _configure(directory)
        _serve(running_slurm, "munged", namespaces[2], "munged", "--foreground", "--force",
               f"--socket={directory}/munge.socket", f"--key-file={directory}/munge.key",
               f"--pid-file={directory}/munge.pid", f"--log-file={directory}/munge.log",
               f"--seed-file={directory}/munge.seed")  # fmt: skip
        cluster.wait_until((directory / "munge.socket").exists, 20)
        configuration = str(directory / "slurm.conf")
        _serve(
            running_slurm,
            "slurmctld",
            namespaces[2],
            "slurmctld",
            "-D",
            "-f",
            configuration,
        )
        for name, namespace in zip(NODES, namespaces, strict=False):
            _serve(
                running_slurm,
                name,
                namespace,
                "slurmd",
                "-D",
                "-f",
                configuration,
                "-N",
                name,
            )
        cluster.wait_until(lambda: _idle(running_slurm), 60)
        yield running_slurm


def _configure(directory: Path) -> None:
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    (directory / "state").mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={17000 + index} CPUs=2"
        for index, (name, address) in enumerate(
            zip(NODES, cluster.ADDRESSES, strict=True)
        )
    )
    text = _CONFIGURATION.format(
        directory=directory, controller=_CONTROLLER, nodes=nodes
    )
    (directory / "slurm.conf").write_text(text)


def _serve(
    running_slurm: Slurm, name: str, namespace: str, program: str, *flags: str
) -> None:
    path = shutil.which(program, path=_SEARCH)
    assert path is not None
    with (running_slurm.directory / f"{name}.output").open("wb") as log:
        running_slurm.servers[name] = subprocess.Popen(
            [*_inside(namespace), path, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=running_slurm.environment(),
        )


def _idle(running_slurm: Slurm) -> bool:
    code, output = running_slurm.run(
        "sinfo", "--noheader", "--format=%T %D", timeout_s=60
    )
    return code == 0 and output.split() == ["idle", str(len(NODES))]


def _end(running_slurm: Slurm) -> None:
    for server in reversed(running_slurm.servers.values()):
        server.send_signal(signal.SIGTERM)
    for server in running_slurm.servers.values():
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
    cluster.remove_network(
        running_slurm.namespaces
    )  # and processes that ignored signals
    for server in running_slurm.servers.values():
        server.wait(10)
