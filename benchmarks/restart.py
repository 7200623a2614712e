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
import time
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
    "--eval-iters 0 --log-interval 1 --num-workers 0 --pipeline-model-parallel-size 2 --use-dpp "
    "--save-interval 2"
)
_KILLED_AFTER = 5
_BACKOFF_S = 1.0  # of the launcher's first restart
_PARTS = {
    "noticed, the other processes ended": r"restart 1 of 1",
    "hosts asked, agents started": r"run \S+-r1: ",
    "imports, groups, model, checkpoint": r"loaded .*, going on from iteration",
    "first step": r"iteration +\d+/",
}
"""What takes time, and the line that ends it."""


def measure(directory: Path) -> dict[str, float]:
    """Run a job whose rank 1 is killed; return the seconds of each part."""
    (directory / "hosts").write_text("localhost slots=2\n")
    saved = directory / "saved"
    command = [
        sys.executable, "-m", "megatron_ext", "launch", "--hostfile", str(directory / "hosts"),
        "--max-restarts", "1", "--num-microbatches", "4", "--", "pretrain_gpt.py",
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
        try:
            return _times_s(job)
        finally:
            job.terminate()


def _times_s(job: subprocess.Popen[str]) -> dict[str, float]:
    assert job.stdout is not None
    waiting = iter(_PARTS.items())
    part, ends = "", rf"iteration +{_KILLED_AFTER}/"
    found: dict[str, float] = {}
    text, last = [], 0.0
    for line in job.stdout:
        text.append(line)
        if not re.search(ends, line):
            continue
        if part:
            found[part] = time.monotonic() - last
        else:
            _rank_of(job.pid, 1).send_signal(signal.SIGKILL)
        last = time.monotonic()
        if len(found) == len(_PARTS):
            found["hosts asked, agents started"] -= _BACKOFF_S
            return found
        part, ends = next(waiting)
    raise SystemExit("the job did not restart:\n" + "".join(text[-30:]))


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
    first, *others = ((part, statistics.median(r[part] for r in rounds)) for part in _PARTS)
    rows = [first, ("pause before the first restart", _BACKOFF_S), *others]
    total = statistics.median(sum(r.values()) for r in rounds) + _BACKOFF_S
    lines = ["| from a killed rank to the next step | s |", "| --- | --- |"]
    lines += [f"| {part} | {seconds:.1f} |" for part, seconds in rows]
    return "\n".join([*lines, f"| all of it | {total:.1f} |"])


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
