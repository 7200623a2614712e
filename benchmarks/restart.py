"""The time from a killed rank to the next training step, and what takes it.

    python benchmarks/restart.py [--rounds N] [--json FILE]

`megatron-ext launch --max-restarts 1` trains a tiny Llama on two stages of this machine, with a
checkpoint after every second step. A rank is killed with SIGKILL after the fifth. The launcher's
own lines mark the parts: the failure is noticed and the other processes are ended, a pause of a
second, the hosts are asked and the agents start, the ranks import, build the model and load the
checkpoint, and the first step. The median of the rounds is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from benchmarks.common.json_output import add_json, write_json  # noqa: E402

_FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type "
    "NullTokenizer --vocab-size 100 --mock-data --micro-batch-size 2 --lr 1e-3 --train-iters 8 "
    "--eval-iters 0 --eval-interval 8 --log-interval 1 --num-workers 0 "
    "--pipeline-model-parallel-size 2 --use-dpp "
    "--save-interval 2"
)
_KILLED_AFTER = 5
_TIMEOUT_S = 300
_PAUSE = "pause before the first restart"
_PARTS = {
    "noticed, the other processes ended": r"restart 1 of 1 in (\S+) s",
    "hosts asked, agents started": r"run \S+-r1: ",
    "imports, groups, model, checkpoint": r"loaded .*(?:, going on from| at) iteration",
    "first step": r"iteration +\d+/",
}
"""Parts that take time, and the line that ends each. The first also names the pause after it."""


def measure(directory: Path) -> dict[str, float]:
    """Run a job whose rank 1 is killed; return the seconds of each part."""
    (directory / "hosts").write_text("localhost slots=2\n")
    saved = directory / "saved"
    command = [
        sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(directory / "hosts"),
        "--max-restarts", "1", "--num-microbatches", "4", "--raw", "--", "pretrain_gpt.py",
        *_FLAGS.split(), "--save", str(saved), "--load", str(saved),
    ]  # fmt: skip
    environment = {
        **{name: value for name, value in os.environ.items() if name != "MEGATRON_LM_PATH"},
        "PYTHONPATH": str(_ROOT),
        "MEGATRON_EXT_RUNS": str(directory / "runs"),
        "MEGATRON_EXT_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        watchdog = threading.Timer(_TIMEOUT_S, job.terminate)  # ends the lines of a job that hangs
        watchdog.start()
        try:
            return _times_s(job)
        finally:
            watchdog.cancel()
            job.terminate()


def _times_s(job: subprocess.Popen[str]) -> dict[str, float]:
    """Kill a rank, and return the seconds of each part from the lines that the launcher shows."""
    assert job.stdout is not None
    lines = _timed(job.stdout)
    last_s, _ = _next(lines, rf"iteration +{_KILLED_AFTER}/")
    _rank_of(job.pid, 1).send_signal(signal.SIGKILL)
    found: dict[str, float] = {}
    pause_s = 0.0
    for part, ends in _PARTS.items():
        now_s, match = _next(lines, ends)
        found[part] = now_s - last_s - pause_s
        last_s, pause_s = now_s, 0.0
        if match.groups():
            found[_PAUSE] = pause_s = float(match[1])
    return found


def _timed(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Add to each line when it came."""
    for line in lines:
        yield time.monotonic(), line


def _next(lines: Iterator[tuple[float, str]], pattern: str) -> tuple[float, re.Match[str]]:
    """Return when the next line with this pattern came, and the match."""
    text = []
    for at_s, line in lines:
        if match := re.search(pattern, line):
            return at_s, match
        text.append(line)
    raise SystemExit(f"the job ended before {pattern!r}:\n" + "".join(text[-30:]))


def _rank_of(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a rank."""
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            environment = process.environ()
        except psutil.Error:
            continue  # it ended meanwhile
        if "LOCAL_RANK" in environment and environment.get("RANK") == str(rank):
            return process
    raise SystemExit(f"no process of rank {rank} was found")


def table(rounds: list[dict[str, float]]) -> str:
    """Return the table of docs/launching.md."""
    lines = ["| from a killed rank to the next step | s |", "| --- | --- |"]
    lines += [
        f"| {part} | {statistics.median(r[part] for r in rounds):.1f} |" for part in rounds[0]
    ]
    return "\n".join(
        [*lines, f"| all of it | {statistics.median(sum(r.values()) for r in rounds):.1f} |"]
    )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="megatron_ext_restart_") as directory:
            rounds.append(measure(Path(directory)))
    print(table(rounds))
    if args.json:
        write_json(args.json, rounds)


if __name__ == "__main__":
    main()
