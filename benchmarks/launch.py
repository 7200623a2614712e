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
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import markdown

_LINE = "iteration {} | lm loss: 1.234567E+00 | grad norm: 0.123 | elapsed time (ms): 123.4"
_TIMEOUT_S = 300


def command(directory: Path, hosts: str, *words: str) -> list[str]:
    """Return the command that launches on these hosts; its hostfile is in the directory."""
    (directory / "hosts").write_text(hosts)
    return [sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(directory / "hosts"),
            "--ssh-cmd", f"sh {sys.path[0]}/tests/tools/launch/fake_ssh.sh", *words]  # fmt: skip


def start(directory: Path, argv: list[str], stderr: int) -> subprocess.Popen[str]:
    """Start a launcher, or torchrun, with the files of its runs in a directory."""
    environment = {
        # The launcher hands it on, and hosts would have to agree on the tree.
        **{name: value for name, value in os.environ.items() if name != "MEGATRON_LM_PATH"},
        "PYTHONPATH": sys.path[0],
        "MEGATRON_EXT_RUNS": str(directory / "runs"),
        "MEGATRON_EXT_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        argv, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def _spent_s() -> float:
    """Return the processor time of all processes that this one has started and awaited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_overhead(directory: Path, rounds: int) -> dict[str, float]:
    """Compare torchrun and the launcher with a script that does nothing."""
    (directory / "nothing.py").write_text("")
    ways = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1",
                     "--master-port", "0", "-m", "megatron_ext", "nothing.py"],
        "launch": command(directory, "localhost slots=1", "--", "nothing.py"),
    }  # fmt: skip
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, argv in ways.items():
            begin_s, before_s = time.perf_counter(), _spent_s()
            with start(directory, argv, subprocess.DEVNULL) as process:
                process.communicate(timeout=_TIMEOUT_S)
            if process.returncode != 0:
                raise SystemExit(f"{argv} ended with {process.returncode}")
            times[name].append((time.perf_counter() - begin_s, _spent_s() - before_s))
    found = {}
    for index, kind in enumerate(("", "cpu_")):
        for name, values in times.items():  # the first round warms up
            found[f"{name}_{kind}s"] = statistics.median(value[index] for value in values[1:])
        found[f"overhead_{kind}s"] = found[f"launch_{kind}s"] - found[f"torchrun_{kind}s"]
    return found


def measure_hosts(directory: Path, num_hosts: int) -> dict[str, float]:
    """Start and stop a command on many hosts."""
    hosts = "".join(f"host{number}\n" for number in range(num_hosts))
    begin_s, before_s = time.perf_counter(), _spent_s()
    argv = command(directory, hosts, "--per-node", "--", "sh", "-c", "echo up; exec sleep 1000")
    with start(directory, argv, subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        for _ in range(num_hosts):
            launcher.stdout.readline()
        started_s = time.perf_counter()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=_TIMEOUT_S)
        ended_s = time.perf_counter()
    if launcher.returncode != 128 + signal.SIGINT:
        raise SystemExit(f"{num_hosts} hosts: the launcher ended with {launcher.returncode}")
    return {
        "hosts": num_hosts, "start_s": started_s - begin_s, "stop_s": ended_s - started_s,
        "cpu_s": _spent_s() - before_s,
    }  # fmt: skip


def measure_lines(directory: Path, num_lines: int) -> dict[str, float]:
    """Show lines that are printed faster than they can be."""
    code = f"import sys\nfor i in range({num_lines}): print({_LINE!r}.format(i))"
    argv = command(directory, "localhost", "--per-node", "--", sys.executable, "-c", code)
    begin_s, ended = time.perf_counter(), threading.Event()
    peak_mib = [0.0, 0.0]  # of the launcher, and of its agents
    with start(directory, argv, subprocess.DEVNULL) as launcher:

        def watch() -> None:
            while not ended.wait(0.05):
                with suppress(psutil.Error):  # it has just ended
                    process = psutil.Process(launcher.pid)
                    for index, group in enumerate(([process], process.children())):
                        seen = (one.memory_info().rss / 2**20 for one in group)
                        peak_mib[index] = max([peak_mib[index], *seen])

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert launcher.stdout is not None
        shown = sum(1 for _ in launcher.stdout)
        seconds = time.perf_counter() - begin_s
        ended.set()
        watcher.join()
    if shown != num_lines:
        raise SystemExit(f"{shown} of {num_lines} lines were shown")
    launcher_mib, agent_mib = peak_mib
    return {
        "lines": num_lines, "lines_per_s": num_lines / seconds, "launcher_peak_mib": launcher_mib,
        "agent_peak_mib": agent_mib,
    }  # fmt: skip


def main() -> None:
    """Measure and print the table of docs/launching.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1_000_000)
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron_ext_launch_") as scratch:
        over = measure_overhead(Path(scratch), args.rounds)
        hosts = measure_hosts(Path(scratch), args.hosts)
        lines = measure_lines(Path(scratch), args.lines)
    plain = f"{over['torchrun_s']:.2f} s ({over['torchrun_cpu_s']:.2f} s of the processor)"
    added = f"{over['overhead_s']:.2f} s ({over['overhead_cpu_s']:.2f} s)"
    many = f"{hosts['start_s']:.1f} s and {hosts['stop_s']:.1f} s ({hosts['cpu_s']:.1f} s)"
    memory = f"{lines['launcher_peak_mib']:.0f} and {lines['agent_peak_mib']:.0f} MiB"
    print(markdown(("", "measured", "aim"), [
        ("torchrun, a script that does nothing", plain, ""),
        ("what launching adds", added, "1 s"),
        (f"{hosts['hosts']:.0f} hosts: start, stop", many, "5 s together"),
        ("log lines for each second", f"{lines['lines_per_s']:,.0f}", "50,000"),
        ("memory of launcher and agent meanwhile", memory, "bounded"),
    ]))  # fmt: skip
    if args.json:
        write_json(args.json, {"overhead": over, "hosts": hosts, "lines": lines})


if __name__ == "__main__":
    main()
