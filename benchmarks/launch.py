"""The cost of `megatron-ext launch`: over plain torchrun, with many hosts or lines, after a kill.

    python benchmarks/launch.py WHAT ... [--quick]

`torchrun`  torchrun and the launcher take turns starting a script on this machine. The launcher's
            cost is the difference between the medians, in elapsed time and in processor time, which
            is more reliable on a busy machine.
`hosts`     one agent per host, through a stand-in for ssh that runs them all here, so they share
            this machine's cores; real hosts start in parallel. Measures the time from the
            launcher's start to the first output of every host's command, and from Ctrl-C to the
            launcher's exit.
`lines`     one process prints as fast as it can. Measures the lines per second over the whole run,
            until the last one is displayed, and the peak memory of the launcher and the agent.
`restart`   from a killed rank to the next training step. A tiny Llama is trained on two stages with
            `--max-restarts 1` and a checkpoint after every second step, and a rank is killed with
            SIGKILL after the fifth step. The launcher's own log lines delimit the parts: the
            failure is noticed and the other processes are ended, a one-second pause, the hosts
            answer and the agents start, the ranks import, build the model and load the checkpoint,
            and the first step. Prints the median over the rounds. Needs MEGATRON_LM_PATH, or
            megatron-core 0.17 or later, whose wheel includes a training loop.
`survive`   from a killed rank to the next step with `--keep-going`: randomly drawn ranks, including
            reserve ranks, are killed with SIGKILL at random moments, five per run, over shared
            memory and over TCP. For comparison, also measures a restart of the whole job with
            `--max-restarts 1`. Counts the repeated steps, and the runs whose final weights differ
            in any bit from those of one undisturbed run over shared memory. Every recovery is also
            printed when it ends. Takes ten minutes, or an hour on two busy cores. Needs
            nvidia-resiliency-ext.
`kept`      the step time with `--keep-going`, relative to the same job without it, alternating, and
            the processor time that it adds to a step, which is more reliable. Local checkpoints are
            disabled, because Megatron itself logs what they cost. Needs nvidia-resiliency-ext.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness.command import markdown, options
from tests.saved_tensors import saved_tensors
from tests.tools.launch.cluster import rank_of
from tests.tools.launch.test_cluster import LLAMA

Row = tuple[str, str, str]
"""A figure: its name, its value with the unit, and the aim."""

_LINE = (
    "iteration {} | lm loss: 1.234567E+00 | grad norm: 0.123 | elapsed time (ms): 123.4"
)
_TIMEOUT_S = 300
_TRAINING_TIMEOUT_S = 1800
"""Time-out for a training job. On a busy machine, it takes minutes to start, not seconds."""
_FLAGS = f"{LLAMA}--train-iters 8 --use-dpp"
_KEPT = f"{LLAMA}--hidden-dropout 0 --attention-dropout 0 --pipeline-schedule zb-h1 "
"""A model whose next steps depend only on its checkpoint."""
_KILLED_AFTER = 5
_KILLS_IN_A_RUN = 5
_STEPS_BETWEEN_KILLS = 4
_STEPS_AFTER_KILLS = 60
"""Enough for the job to notice that it lost a reserve rank before it ends."""
_LONGEST_STEP_S = 0.3
_RANKS_THAT_MAY_HANG = 1
"""Reserve ranks beyond the number of kills. A rank that hangs in a recovery is also lost, and
reported."""
_TIMED_MODEL = (
    LLAMA.replace("--hidden-size 32 --ffn-hidden-size 88", "--hidden-size 256")
    .replace("--seq-length 16", "--seq-length 128")
    .replace("--max-position-embeddings 16", "--max-position-embeddings 128")
    .replace("--train-iters 3", "")
)
"""A model with steps long enough to show a cost of 1 %."""
_TIMED_STEPS = 40
_TIMED_RANKS = 2
_STEPS_TO_SETTLE = 10
_PAUSE = "pause before the first restart"
_PARTS = {
    "noticed, the other processes ended": r"restart 1 of 1 in (\S+) s",
    "hosts answer, agents start": r"run \S+-r1: ",
    "imports, groups, model, checkpoint": r"loaded .*(?:, going on from| at) iteration",
    "first step": r"iteration +\d+/",
}
"""The parts of a restart and the log line that ends each part. The first line also contains the
length of the pause that follows."""


def command(directory: Path, hosts: str, *words: str) -> list[str]:
    """Return the command that launches on these hosts, with its hostfile in the directory."""
    (directory / "hosts").write_text(hosts)
    return [sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(directory / "hosts"),
            "--ssh-cmd", f"sh {sys.path[0]}/tests/tools/launch/fake_ssh.sh", *words]  # fmt: skip


@contextmanager
def start(
    directory: Path, argv: list[str], stderr: int, timeout_s: float = _TIMEOUT_S
) -> Iterator[subprocess.Popen[str]]:
    """Run a launcher or torchrun, with the files of its runs in this directory.

    On a time-out, stop it, which ends its output and everything that waits for it.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": sys.path[0],
        "MEGATRON_EXT_RUNS": str(directory / "runs"),
        "MEGATRON_EXT_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        argv,
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )

    def end() -> None:
        print(f"ended after {timeout_s:g} s: {shlex.join(argv)}", file=sys.stderr)
        process.terminate()

    watchdog = threading.Timer(timeout_s, end)
    watchdog.start()
    try:
        with process:
            yield process
    finally:
        watchdog.cancel()


def _spent_s() -> float:
    """Return the processor time of all processes that this process has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def torchrun(directory: Path, rounds: int) -> list[Row]:
    """Compare torchrun and the launcher, using a script that does nothing."""
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
                process.communicate()
            if process.returncode != 0:
                raise SystemExit(f"{argv} ended with {process.returncode}")
            times[name].append((time.perf_counter() - begin_s, _spent_s() - before_s))
    medians: dict[str, tuple[float, float]] = {}
    for name, rounds_of_way in times.items():
        # The first round warms up.
        took_s, spent_s = zip(*rounds_of_way[1:], strict=True)
        medians[name] = statistics.median(took_s), statistics.median(spent_s)
    torchrun_s, torchrun_cpu_s = medians["torchrun"]
    launch_s, launch_cpu_s = medians["launch"]
    added = f"{launch_s - torchrun_s:.2f} s ({launch_cpu_s - torchrun_cpu_s:.2f} s)"
    return [
        (
            "torchrun, a script that does nothing",
            f"{torchrun_s:.2f} s ({torchrun_cpu_s:.2f} s)",
            "",
        ),
        ("what launching adds", added, "1 s"),
    ]


def hosts(directory: Path, num_hosts: int) -> list[Row]:
    """Start and stop a command on many hosts."""
    hostfile = "".join(f"host{number}\n" for number in range(num_hosts))
    begin_s, before_s = time.perf_counter(), _spent_s()
    argv = command(
        directory, hostfile, "--per-node", "--", "sh", "-c", "echo up; exec sleep 1000"
    )
    with start(directory, argv, subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        for _ in range(num_hosts):
            launcher.stdout.readline()
        started_s = time.perf_counter()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate()
        ended_s = time.perf_counter()
    if launcher.returncode != 128 + signal.SIGINT:
        raise SystemExit(
            f"{num_hosts} hosts: the launcher ended with {launcher.returncode}"
        )
    took = f"{started_s - begin_s:.1f} s and {ended_s - started_s:.1f} s"
    name = f"{num_hosts} hosts: start, stop"
    return [(name, f"{took} ({_spent_s() - before_s:.1f} s)", "5 s together")]


def lines(directory: Path, num_lines: int) -> list[Row]:
    """Display lines that arrive faster than they can be displayed."""
    code = f"import sys\nfor i in range({num_lines}): print({_LINE!r}.format(i))"
    argv = command(
        directory, "localhost", "--per-node", "--", sys.executable, "-c", code
    )
    begin_s, shown = time.perf_counter(), 0
    launcher_mib = agent_mib = 0.0
    with start(directory, argv, subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        for _ in launcher.stdout:
            shown += 1
            if shown % (num_lines // 100) == 0:
                with suppress(psutil.Error):  # the agent has just exited
                    process = psutil.Process(launcher.pid)
                    sizes_mib = [
                        child.memory_info().rss / 2**20 for child in process.children()
                    ]
                    agent_mib = max([agent_mib, *sizes_mib])
                    launcher_mib = max(launcher_mib, process.memory_info().rss / 2**20)
        seconds = time.perf_counter() - begin_s
    if shown != num_lines:
        raise SystemExit(f"{shown} of {num_lines} lines were shown")
    memory = f"{launcher_mib:.0f} and {agent_mib:.0f} MiB"
    return [
        ("log lines for each second", f"{num_lines / seconds:,.0f}", "50,000"),
        ("memory of launcher and agent meanwhile", memory, "bounded"),
    ]


def one_restart(directory: Path, flags: str) -> dict[str, float]:
    """Run a job, kill its rank 1, and return the seconds that each part takes."""
    saved = directory / "saved"
    flags = f"{flags} --save-interval 2 --save {saved} --load {saved}"
    argv = command(
        directory, "localhost slots=2\n", "--max-restarts", "1", "--num-microbatches", "4", "--raw",
        "--", "pretrain_gpt.py", *flags.split(),
    )  # fmt: skip
    with start(directory, argv, subprocess.STDOUT, _TRAINING_TIMEOUT_S) as job:
        assert job.stdout is not None
        output, former_lines = job.stdout, list[str]()

        def line_with(pattern: str) -> tuple[float, re.Match[str]]:
            for line in output:
                if match := re.search(pattern, line):
                    return time.monotonic(), match
                former_lines.append(line)
            raise SystemExit(
                f"the job ended before {pattern!r}:\n" + "".join(former_lines[-30:])
            )

        try:
            last_s, match = line_with(rf"iteration +{_KILLED_AFTER}/|restart 1 of 1")
            if match[0].startswith("restart"):
                raise SystemExit(
                    "the job failed before the kill:\n" + "".join(former_lines[-60:])
                )
            rank_of(job.pid, 1).kill()
            seconds_by_part: dict[str, float] = {}
            for part, ends in _PARTS.items():
                now_s, match = line_with(ends)
                seconds_by_part[part], last_s = now_s - last_s, now_s
                if match.groups():
                    seconds_by_part[_PAUSE] = float(match[1])
                    last_s += seconds_by_part[_PAUSE]  # counts towards the pause only
            return seconds_by_part
        finally:
            job.terminate()


def restart(directory: Path, rounds: int) -> list[Row]:
    """Return the median time for each part of a restart."""
    restarts = []
    for number in range(rounds):
        folder = directory / f"restart-{number}"
        folder.mkdir()
        restarts.append(one_restart(folder, _FLAGS))
    rows = {
        part: statistics.median(seconds_by_part[part] for seconds_by_part in restarts)
        for part in restarts[0]
    }
    rows["from a killed rank to the next step"] = statistics.median(
        sum(seconds_by_part.values()) for seconds_by_part in restarts
    )
    return [(part, f"{seconds:.1f} s", "") for part, seconds in rows.items()]


@dataclass
class Disturbed:
    """A run in which ranks were killed."""

    folder: Path
    """Its last checkpoint."""
    back_after_s: list[float] = field(default_factory=list)
    """Time from each kill to the first step after the restart."""
    num_steps: int = 0
    """Number of logged steps, including repeated ones."""


def _num_steps(num_kills: int) -> int:
    """Return how many steps a run with this number of kills has."""
    return _STEPS_BETWEEN_KILLS * num_kills + _STEPS_AFTER_KILLS


def _kept_job(directory: Path, wire: str, num_kills: int) -> list[str]:
    """Return the command for a job that can lose this number of ranks."""
    saved = directory / "saved"
    num_steps = _num_steps(num_kills)
    return [
        sys.executable, "-m", "megatron_ext", "launch", "--keep-going", "--reserve",
        str(num_kills + _RANKS_THAT_MAY_HANG), "--num-microbatches", "4", "--raw", "--show", "all",
        "--", "pretrain_gpt.py", *_KEPT.split(), "--train-iters", str(num_steps),
        "--pipeline-transport", wire, "--save", str(saved), "--load", str(saved),
        "--save-interval", str(10 * num_steps), *_cached_data(directory),
    ]  # fmt: skip


def _cached_data(directory: Path) -> list[str]:
    """Return the flags that cache the data index, as Megatron does for data in files.

    Otherwise, every start would spend 1.3 s on rebuilding the index of the mock data.
    """
    return ["--data-cache-path", str(directory.parent / "data")]


def _disturbed(
    directory: Path, wire: str, num_kills: int, draw: random.Random
) -> Disturbed:
    """Train and kill a rank every few steps, at a random moment."""
    directory.mkdir()
    run = Disturbed(directory / "saved")
    alive = list(range(2 + num_kills + _RANKS_THAT_MAY_HANG))
    num_killed = 0
    killed_s: float | None = None
    has_restarted = False
    output: list[str] = []
    argv = _kept_job(directory, wire, num_kills)
    with start(directory, argv, subprocess.STDOUT, _TRAINING_TIMEOUT_S) as job:
        assert job.stdout is not None
        for line in job.stdout:
            output.append(line)
            if "in the same processes" in line:
                has_restarted = True
            lost = re.search(r"megatron_ext: rank (\d+) was lost", line)
            if lost is not None and int(lost[1]) in alive:
                alive.remove(int(lost[1]))
                print(f"{wire}: rank {lost[1]} was lost, not killed", file=sys.stderr)
            step = re.search(r"iteration +(\d+)/.*lm loss: ", line)
            if step is None:
                continue
            run.num_steps += 1
            if killed_s is not None:
                if not has_restarted:
                    continue  # the last step that the other ranks completed
                run.back_after_s.append(time.monotonic() - killed_s)
                print(
                    f"{wire}: kill {num_killed}: the next step came after "
                    f"{run.back_after_s[-1]:.1f} s",
                    file=sys.stderr,
                )
                killed_s = None
            is_due = int(step[1]) >= _STEPS_BETWEEN_KILLS * (num_killed + 1)
            if num_killed < num_kills and is_due:
                # Longer than a step, so the kill may hit any part
                # of a step or of saving it.
                time.sleep(draw.uniform(0.0, _LONGEST_STEP_S))
                rank = alive.pop(draw.randrange(len(alive)))
                rank_of(job.pid, rank).kill()
                killed_s, has_restarted = time.monotonic(), False
                num_killed += 1
    if job.returncode != 0 or len(run.back_after_s) != num_kills:
        raise SystemExit(
            f"the job ended with {job.returncode}:\n" + "".join(output[-60:])
        )
    return run


def _differ(folder: Path, reference_folder: Path) -> bool:
    """Return whether the last checkpoints of two runs differ in any bit of any tensor."""
    tensors = saved_tensors(folder)
    references = saved_tensors(reference_folder)
    if tensors.keys() != references.keys():
        return True
    return not all(tensor.equal(references[name]) for name, tensor in tensors.items())


def _undisturbed(directory: Path, num_kills: int) -> Path:
    """Train without kills for as many steps as with kills, and return the checkpoint's folder."""
    directory.mkdir()
    argv = _kept_job(directory, "shm", num_kills)
    with start(directory, argv, subprocess.STDOUT, _TRAINING_TIMEOUT_S) as job:
        output, _ = job.communicate()
    if job.returncode != 0:
        raise SystemExit(output[-6000:])
    return directory / "saved"


def survive(directory: Path, num_kills: int) -> list[Row]:
    """Return the cost of random kills for each transport, and that of restarting the whole job."""
    rows = []
    draw = random.Random(1)
    kills_in_a_run = min(_KILLS_IN_A_RUN, num_kills)
    expected = _undisturbed(directory / "undisturbed", kills_in_a_run)
    for wire in ("shm", "tcp"):
        back_after_s: list[float] = []
        num_repeated, num_other_ends = 0, 0
        for number in range(num_kills // kills_in_a_run):
            run = _disturbed(directory / f"{wire}-{number}", wire, kills_in_a_run, draw)
            back_after_s += run.back_after_s
            num_repeated += run.num_steps - _num_steps(kills_in_a_run)
            num_other_ends += _differ(run.folder, expected)
        restart_folder = directory / f"{wire}-whole"
        restart_folder.mkdir()
        flags = [
            *_KEPT.split(), "--train-iters", "8", "--pipeline-transport", wire,
            *_cached_data(restart_folder),
        ]  # fmt: skip
        parts = one_restart(restart_folder, " ".join(flags))
        rows += [
            (
                f"{wire}: from a kill to the next step, median of {num_kills}",
                f"{statistics.median(back_after_s):.1f} s",
                "2.5 s",
            ),
            (f"{wire}: the longest", f"{max(back_after_s):.1f} s", "6 s"),
            (
                f"{wire}: a restart of the whole job instead",
                f"{sum(parts.values()):.1f} s",
                "",
            ),
            (f"{wire}: steps repeated", str(num_repeated), f"at most {num_kills}"),
            (
                f"{wire}: runs whose final weights differ in a bit",
                str(num_other_ends),
                "0",
            ),
        ]
    return rows


@dataclass
class StepCost:
    """The cost of a job's step, in milliseconds."""

    step_ms: float
    """Median step time."""
    beside_ms: float
    """Mean processor time per step, over all threads except those that compute."""


def _beside_ms(job: psutil.Process) -> float:
    """Return the processor time used so far by all threads except those that compute, in ms."""
    beside_ns = 0
    main_threads_ns: list[int] = []
    for process in job.children(recursive=True):
        # A process or a thread may exit in the meantime.
        with suppress(OSError, psutil.Error):
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                running_ns = int((task / "schedstat").read_text().split()[0])
                if int(task.name) == process.pid:
                    main_threads_ns.append(running_ns)
                else:
                    beside_ns += running_ns
    # The training ranks' main threads are the ones that run for the longest time.
    beside_ns += sum(sorted(main_threads_ns)[:-_TIMED_RANKS])
    return beside_ns / 1e6


def _step_cost(directory: Path, *flags: str) -> StepCost:
    """Return what a job's step costs."""
    directory.mkdir()
    saved = str(directory / "saved")
    argv = [
        sys.executable, "-m", "megatron_ext", "launch", *flags, "--num-microbatches", "8",
        "--raw", "--", "pretrain_gpt.py", *_TIMED_MODEL.split(), "--pipeline-schedule", "zb-h1",
        "--pipeline-transport", "shm", "--save", saved, "--load", saved, "--save-interval",
        "100000", "--train-iters", str(_TIMED_STEPS), "--no-save-optim",
    ]  # fmt: skip
    if flags:
        argv += ["--non-persistent-ckpt-type", "global"]
    times_ms: list[float] = []
    beside_ms: list[float] = []
    output: list[str] = []
    with start(directory, argv, subprocess.STDOUT, _TRAINING_TIMEOUT_S) as job:
        assert job.stdout is not None
        for line in job.stdout:
            output.append(line)
            step = re.search(r"elapsed time per iteration \(ms\): ([0-9.]+)", line)
            if step is None:
                continue
            times_ms.append(float(step[1]))
            if len(times_ms) in (_STEPS_TO_SETTLE, _TIMED_STEPS - 1):
                beside_ms.append(_beside_ms(psutil.Process(job.pid)))
    if job.returncode != 0 or len(times_ms) != _TIMED_STEPS:
        raise SystemExit("".join(output[-60:]))
    begin_ms, end_ms = beside_ms
    num_steps = _TIMED_STEPS - 1 - _STEPS_TO_SETTLE
    return StepCost(
        statistics.median(times_ms[_STEPS_TO_SETTLE:]), (end_ms - begin_ms) / num_steps
    )


def kept(directory: Path, rounds: int) -> list[Row]:
    """Return what `--keep-going` costs per step."""
    ratios = []
    shares = []
    for number in range(rounds):
        plain = _step_cost(directory / f"plain-{number}")
        keeping = _step_cost(directory / f"kept-{number}", "--keep-going")
        print(f"{plain}, with --keep-going {keeping}", file=sys.stderr)
        ratios.append(keeping.step_ms / plain.step_ms)
        added_ms = keeping.beside_ms - plain.beside_ms
        shares.append(added_ms / (_TIMED_RANKS * plain.step_ms))
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    share = f"{100 * statistics.median(shares):.1f} % ({100 * max(shares):.1f} %)"
    return [
        ("a step with --keep-going, relative to one without", ratio, "1.01"),
        ("processor time that it adds, of two full cores (worst)", share, "1 %"),
    ]


def main() -> None:
    """Measure and print the table in docs/launching.md."""
    parser = options(__doc__, "one round, few hosts and lines")
    # How much each part runs: rounds, hosts or lines.
    parts = {
        torchrun: 5,
        hosts: 64,
        lines: 1_000_000,
        restart: 3,
        survive: 20,
        kept: 5,
    }
    names = [part.__name__ for part in parts]
    parser.add_argument("what", nargs="+", choices=names, help="what to measure")
    args = parser.parse_args()
    if args.quick:
        parts = {torchrun: 1, hosts: 4, lines: 10_000, restart: 1, survive: 2, kept: 1}
    rows = []
    with tempfile.TemporaryDirectory(prefix="megatron_ext_launch_") as scratch:
        for part, count in parts.items():
            if part.__name__ in args.what:
                rows += part(Path(scratch), count)
    print(markdown(("", "measured", "aim"), rows))


if __name__ == "__main__":
    main()
