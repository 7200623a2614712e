"""Forward/backward disaggregation: computed and measured step times, memory, transfer of weights.

    python benchmarks/disaggregation.py [--forward-ms MS] [--steps N] [--json FILE]

1. Stages that sleep (a backward takes twice as long as a forward) run under the disaggregated
   executor and under this package's 1F1B, both over shared memory. Beside each measured step stands
   what the simulator says. Forward ranks that stand in for TP ranks sleep TP times as long. Times
   are in forwards of a stage; the bar is a deviation of 3 %.
2. A GPT is trained in both ways: most resident memory of a process of the first stage above what it
   held before the first step, and the time that forward ranks take to receive new weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.schedule_harness import launch  # noqa: E402
from benchmarks.schedule_harness.roles import (  # noqa: E402
    Case,
    Trained,
    measure_steps,
    measure_training,
)
from tests.ranks import run_ranks  # noqa: E402

CASES = (
    Case("1f1b", 1, 8),
    Case("fbd", 1, 8),
    Case("1f1b", 2, 8),
    Case("1f1b", 2, 4),
    Case("fbd", 2, 8),
    Case("1f1b", 4, 8),
    Case("1f1b", 4, 4),
    Case("fbd", 4, 8),
    Case("fbd", 2, 8, tp=2),
    Case("fbd", 4, 8, tp=2),
    Case("fbd", 2, 8, tp=4),
    Case("fbd", 4, 8, tp=4),
)


def step_units(case: Case, forward_s: float, steps: int) -> float:
    """Return the median time of a step, over all ranks, in forwards of a stage."""
    by_rank = run_ranks(case.num_processes, measure_steps, case, forward_s, steps, timeout_s=300)
    spans = [
        max(end for _, end in ranks) - min(begin for begin, _ in ranks)
        for ranks in zip(*by_rank, strict=True)
    ]
    median: float = statistics.median(spans)
    return median / forward_s


_MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 32 --train-iters 4 "
    "--eval-iters 0 --lr 1e-4 --min-lr 1e-5 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --num-workers 0 --log-interval 100 --hidden-dropout 0 --attention-dropout 0 "
)
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
_FBD = "--forward-backward-disaggregating "
WAYS = {
    "1f1b": "",
    "1f1b, full recomputation": _RECOMPUTE,
    "fbd recompute": _FBD,
    "fbd ship": _FBD + _RECOMPUTE + "--fbd-activations ship ",
}


def trained(way: str, pp: int) -> list[Trained]:
    """Train in one way on all ranks."""
    flags = f"{_MODEL}{WAYS[way]}--pipeline-model-parallel-size {pp} ".split()
    num_ranks = 2 * pp if _FBD in WAYS[way] else pp
    return list(run_ranks(num_ranks, measure_training, flags, timeout_s=300))


def print_steps(forward_s: float, steps: int) -> list[dict[str, Any]]:
    """Measure and print the first part."""
    rows = []
    print(f"{'':<6}{'TP':>4}{'PP':>4}{'M':>4}{'devices':>9}{'computed':>10}{'measured':>10}{'':>9}")
    for case in CASES:
        computed, measured = case.computed(), step_units(case, forward_s, steps)
        deviation = measured / computed - 1
        print(
            f"{case.way:<6}{case.tp:>4}{case.pp:>4}{case.num_microbatches:>4}"
            f"{case.num_devices:>9}{computed:>10.1f}{measured:>10.2f}{100 * deviation:>+8.1f} %"
        )
        rows.append({**vars(case), "computed": computed, "measured": measured})
    return rows


def print_training(pp: int) -> dict[str, list[dict[str, Any]]]:
    """Measure and print the second part."""
    found = {}
    print(f"\nGPT on {pp} stages: memory of the first stage, weights of all forward ranks")
    for way in WAYS:
        ranks = trained(way, pp)
        found[way] = [vars(rank) for rank in ranks]
        print(f"{way:<26}{max(rank.step_ms for rank in ranks):>8.0f} ms a step")
        for rank in ranks:
            if rank.stage == 0:
                print(f"{'':<8}{rank.role:<18}{rank.peak_mib:>8.0f} MiB")
        transfers = [f"{rank.transfer_ms:.1f}" for rank in ranks if rank.role == "forward"]
        if transfers:
            print(f"{'':<8}{'weights, by stage':<18}{' '.join(transfers):>12} ms a step")
    return found


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward-ms", type=float, default=40.0, help="of one stage (default: 40)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pp", type=int, default=2, help="stages of the GPT (default: 2)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    launch.clean_up_when_terminated()
    steps = print_steps(args.forward_ms / 1e3, args.steps)
    training = print_training(args.pp)
    if args.json:
        content = {"steps": steps, "training": training}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
