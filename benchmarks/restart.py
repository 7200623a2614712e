"""The time from a killed rank to the next training step, and what takes it.

    python benchmarks/restart.py [--rounds N] [--json FILE]

`megatron-ext launch --max-restarts 1` trains a tiny Llama on two stages of this machine, with a
checkpoint after every second step. A rank is killed with SIGKILL after the fifth. The launcher's
own lines mark the parts: the failure is noticed and the other processes are ended, a pause of a
second, the hosts answer and the agents start, the ranks import, build the model and load the
checkpoint, and the first step. The median of the rounds is printed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import markdown
from benchmarks.launch import command, start

_FLAGS = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type "
    "NullTokenizer --vocab-size 100 --mock-data --micro-batch-size 2 --lr 1e-3 --train-iters 8 "
    "--eval-iters 0 --eval-interval 8 --log-interval 1 --num-workers 0 "
    "--pipeline-model-parallel-size 2 --use-dpp --save-interval 2 --save {0} --load {0}"
)
_KILLED_AFTER = 5
_TIMEOUT_S = 300
_PAUSE = "pause before the first restart"
_PARTS = {
    "noticed, the other processes ended": r"restart 1 of 1 in (\S+) s",
    "hosts answer, agents start": r"run \S+-r1: ",
    "imports, groups, model, checkpoint": r"loaded .*(?:, going on from| at) iteration",
    "first step": r"iteration +\d+/",
}
"""Parts that take time, and the line that ends each. The first also names the pause after it."""


def measure(directory: Path) -> dict[str, float]:
    """Run a job whose rank 1 is killed; return the seconds of each part."""
    argv = command(
        directory, "localhost slots=2\n", "--max-restarts", "1", "--num-microbatches", "4", "--raw",
        "--", "pretrain_gpt.py", *_FLAGS.format(directory / "saved").split(),
    )  # fmt: skip
    with start(directory, argv, subprocess.STDOUT) as job:
        watchdog = threading.Timer(_TIMEOUT_S, job.terminate)  # ends the lines of a job that hangs
        watchdog.start()
        assert job.stdout is not None
        seen: list[str] = []

        def line_with(pattern: str) -> tuple[float, re.Match[str]]:
            for line in job.stdout:
                if match := re.search(pattern, line):
                    return time.monotonic(), match
                seen.append(line)
            raise SystemExit(f"the job ended before {pattern!r}:\n" + "".join(seen[-30:]))

        try:
            last_s, _ = line_with(rf"iteration +{_KILLED_AFTER}/")
            _rank_of(job.pid, 1).kill()
            found: dict[str, float] = {}
            for part, ends in _PARTS.items():
                now_s, match = line_with(ends)
                found[part], last_s = now_s - last_s, now_s
                if match.groups():
                    found[_PAUSE] = float(match[1])
                    last_s += found[_PAUSE]  # of no part but its own
            return found
        finally:
            watchdog.cancel()
            job.terminate()


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


def main() -> None:
    """Measure and print the table of docs/launching.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="megatron_ext_restart_") as directory:
            rounds.append(measure(Path(directory)))
    rows = {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
    rows["all of it"] = statistics.median(sum(one.values()) for one in rounds)
    lines = [(part, f"{seconds:.1f}") for part, seconds in rows.items()]
    print(markdown(("from a killed rank to the next step", "s"), lines))
    if args.json:
        write_json(args.json, rounds)


if __name__ == "__main__":
    main()
