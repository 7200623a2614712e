"""The cost of `megatron-ext launch`: over plain torchrun, with many hosts, with many log lines.

    python benchmarks/launch.py [--rounds N] [--hosts N] [--lines N] [--json FILE]

- overhead: torchrun and the launcher start a script on this machine, alternately. The launcher's
  overhead is the difference of the medians, in wall-clock time and in CPU time, which is the more
  reliable one on a busy machine.
- hosts: one agent for each host, through a stand-in for ssh that runs them here, so they share this
  machine's cores; real hosts start in parallel. Measured are the time from the start of the
  launcher to the first output of every host's command, and from Ctrl-C to the launcher's exit.
- lines: one process prints as fast as it can. Measured are the lines per second over the whole run,
  up to the display of the last one, and the peak memory of launcher and agent.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from benchmarks.common.json_output import add_json, write_json  # noqa: E402

_FAKE_SSH = f"sh {_ROOT / 'tests' / 'tools' / 'launch' / 'fake_ssh.sh'}"
_LINE = "iteration {} | lm loss: 1.234567E+00 | grad norm: 0.123 | elapsed time (ms): 123.4"
_TIMEOUT_S = 300


class _Place:
    """A directory for one run, and the launcher in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "MEGATRON_EXT_RUNS": str(directory / "runs"),
            "MEGATRON_EXT_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
        }

    def launch(self, hosts: str, *words: str) -> list[str]:
        """The command that launches on these hosts."""
        hostfile = self.directory / "hosts"
        hostfile.write_text(hosts)
        return [sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(hostfile),
                "--ssh-cmd", _FAKE_SSH, *words]  # fmt: skip

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a command here, its output in a pipe."""
        return subprocess.Popen(
            command, env=self.environment, cwd=self.directory, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def times_s(self, command: list[str]) -> tuple[float, float]:
        """Run a command to its end; return the seconds it took, and those of the processor."""
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        with self.start(command) as process:
            process.communicate(timeout=_TIMEOUT_S)
        if process.returncode != 0:
            raise SystemExit(f"{command} ended with {process.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - begin, cpu_s


def measure_overhead(place: _Place, rounds: int) -> dict[str, float]:
    """Compare torchrun and the launcher with a script that does nothing."""
    (place.directory / "nothing.py").write_text("")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1",
                "--master-port", "0", "-m", "megatron_ext", "nothing.py"]  # fmt: skip
    launcher = place.launch("localhost slots=1", "--", "nothing.py")
    times: dict[str, list[tuple[float, float]]] = {"torchrun": [], "launch": []}
    for _ in range(rounds + 1):  # the first one warms up
        times["torchrun"].append(place.times_s(torchrun))
        times["launch"].append(place.times_s(launcher))
    found = {}
    for index, kind in enumerate(("", "cpu_")):
        for name, values in times.items():
            found[f"{name}_{kind}s"] = statistics.median(value[index] for value in values[1:])
        added = found[f"launch_{kind}s"] - found[f"torchrun_{kind}s"]
        found[f"overhead_{kind}s"] = added
    return found


def measure_hosts(place: _Place, num_hosts: int) -> dict[str, float]:
    """Start and stop a command on many hosts."""
    hosts = "".join(f"host{number}\n" for number in range(num_hosts))
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["--per-node", "--", "sh", "-c", "echo up; exec sleep 1000"]
    with place.start(place.launch(hosts, *command)) as launcher:
        assert launcher.stdout is not None
        for _ in range(num_hosts):
            launcher.stdout.readline()
        started = time.perf_counter()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=_TIMEOUT_S)
        ended = time.perf_counter()
    if launcher.returncode != 128 + signal.SIGINT:
        raise SystemExit(f"{num_hosts} hosts: the launcher ended with {launcher.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "hosts": num_hosts, "start_s": started - begin, "stop_s": ended - started, "cpu_s": cpu_s,
    }  # fmt: skip


def measure_lines(place: _Place, num_lines: int) -> dict[str, float]:
    """Show lines that are printed faster than they can be."""
    code = f"import sys\nfor i in range({num_lines}): print({_LINE!r}.format(i))"
    command = place.launch("localhost", "--per-node", "--", sys.executable, "-c", code)
    begin = time.perf_counter()
    with place.start(command) as launcher:
        memory = _Memory(launcher.pid)
        assert launcher.stdout is not None
        shown = sum(1 for _ in launcher.stdout)
        seconds = time.perf_counter() - begin
        memory.stop()
    if shown != num_lines:
        raise SystemExit(f"{shown} of {num_lines} lines were shown")
    return {
        "lines": num_lines,
        "lines_per_s": num_lines / seconds,
        "launcher_peak_mib": memory.launcher_kib / 1024,
        "agent_peak_mib": memory.agent_kib / 1024,
    }


class _Memory:
    """Watches how much memory a launcher and its local agent have."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._stopped = threading.Event()
        self.launcher_kib = self.agent_kib = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.05):
            self.launcher_kib = max(self.launcher_kib, _peak_kib(self._launcher))
            children = Path(f"/proc/{self._launcher}/task/{self._launcher}/children")
            for pid in children.read_text().split() if children.exists() else ():
                self.agent_kib = max(self.agent_kib, _peak_kib(int(pid)))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line), 0)


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the table of docs/launching.md."""
    over, hosts, lines = found["overhead"], found["hosts"], found["lines"]
    plain = f"{over['torchrun_s']:.2f} s ({over['torchrun_cpu_s']:.2f} s of the processor)"
    added = f"{over['overhead_s']:.2f} s ({over['overhead_cpu_s']:.2f} s)"
    many = f"{hosts['start_s']:.1f} s and {hosts['stop_s']:.1f} s ({hosts['cpu_s']:.1f} s)"
    memory = f"{lines['launcher_peak_mib']:.0f} and {lines['agent_peak_mib']:.0f} MiB"
    rows = [
        ("", "measured", "aim"),
        ("---", "---", "---"),
        ("torchrun, a script that does nothing", plain, ""),
        ("what launching adds", added, "1 s"),
        (f"{hosts['hosts']:.0f} hosts: start, stop", many, "5 s together"),
        ("log lines for each second", f"{lines['lines_per_s']:,.0f}", "50,000"),
        ("memory of launcher and agent meanwhile", memory, "bounded"),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1_000_000)
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_launch_") as directory:
        place = _Place(Path(directory))
        found = {
            "overhead": measure_overhead(place, args.rounds),
            "hosts": measure_hosts(place, args.hosts),
            "lines": measure_lines(place, args.lines),
        }
    print(table(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
