"""Forward/backward disaggregation: predicted and measured step times, memory, weight transfer.

    python benchmarks/disaggregation.py [--forward-ms MS] [--steps N] [--json FILE]

1. Sleeping stages (a backward takes twice as long as a forward) run under the disaggregated
   executor and under this package's 1F1B, both over shared memory. The table shows each measured
   step beside the simulator's prediction, which uses the message time that the same processes
   measured before. Forward ranks that represent TP ranks sleep TP times as long. The unit of time
   is a stage's forward; the target is a deviation of at most 3 %.
2. A GPT is trained in each way. Reported are the peak resident memory of a first-stage process
   above that before the first step, and the time that new weights cost either role.

Prints the tables of `docs/disaggregation.md`. Takes about 10 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import machine, markdown
from benchmarks.schedule_harness import launch
from benchmarks.schedule_harness.roles import Case, Trained, measure_steps, measure_training
from tests.ranks import run_ranks

_BAR = 0.03
_STEP_HEAD = ("", "TP", "PP", "M", "units", "ms a message", "computed", "measured", "",
              "time, computed", "measured", "devices")  # fmt: skip
_TRAINING_HEAD = ("8 layers, hidden size 256, PP 2", "ms a step", "MiB, first stage, backward rank",
                  "forward rank", "ms for new weights, backward ranks",
                  "forward ranks")  # fmt: skip
_MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --train-iters 4 "
    "--eval-iters 0 --eval-interval 4 --lr 1e-4 --min-lr 1e-5 --mock-data "
    "--tokenizer-type NullTokenizer "
    "--vocab-size 1000 --num-workers 0 --log-interval 100 --hidden-dropout 0 --attention-dropout 0 "
    "--pipeline-model-parallel-size 2 --global-batch-size "
)
_RECOMPUTE = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_FBD = " --forward-backward-disaggregating"
_SHARDED = _FBD + " --use-distributed-optimizer --overlap-grad-reduce"
WAYS = {
    "1F1B": (2, "32"),
    "1F1B, full recomputation": (2, "32" + _RECOMPUTE),
    "recompute": (4, "32" + _FBD),
    "ship": (4, "32" + _FBD + _RECOMPUTE + " --fbd-activations ship"),
    "two replicas, gathered, then sent": (8, "16" + _SHARDED),
    "two replicas, shares sent": (8, "16" + _SHARDED + " --overlap-param-gather"),
}
"""Lines of the second table: ranks and flags."""


def cases() -> list[tuple[str, Case, int]]:
    """Return the rows of the first table: name, case and replicas."""
    rows = []
    for pp in (1, 2, 4):
        rows += [
            ("1F1B", Case("1f1b", pp, 8, activations="keep"), 1),
            ("1F1B, full recomputation", Case("1f1b", pp, 8), 1),
            ("1F1B, two replicas", Case("1f1b", pp, 4, activations="keep"), 2),
            ("plain, recompute", Case("fbd", pp, 8), 1),
            ("plain, ship", Case("fbd", pp, 8, activations="ship"), 1),
        ]
    for tp in (2, 4):
        for pp in (1, 2, 4):
            rows += [
                ("merged, recompute", Case("fbd", pp, 8, tp), 1),
                ("merged, ship", Case("fbd", pp, 8, tp, "ship"), 1),
            ]
    return rows


def measure_rows(forward_s: float, steps: int) -> list[dict[str, Any]]:
    """Measure the first table; relative figures are to 1F1B on as many stages."""
    found: list[dict[str, Any]] = []
    baseline: dict[int, dict[str, Any]] = {}
    for name, case, replicas in cases():
        by_rank = run_ranks(
            case.num_processes, measure_steps, case, forward_s, steps, timeout_s=300
        )
        units = [
            (max(end for _, end in ranks) - min(begin for begin, _ in ranks)) / forward_s
            for ranks in zip(*(rank.steps for rank in by_rank), strict=True)
        ]
        message_s = 0.0  # one process sends none
        if len(by_rank) > 1:
            sent, here = by_rank[0].messages, by_rank[1].messages
            message_s = statistics.median(b - a for a, b in zip(sent, here, strict=True))
        row = {
            "name": name, **vars(case), "devices": replicas * case.num_devices,
            "units": case.computed(), "message_ms": 1e3 * message_s,
            "computed": case.computed(message_s / forward_s), "measured": statistics.median(units),
            "fastest": min(units), "steps": units,
        }  # fmt: skip
        first = baseline.setdefault(case.pp, row)
        row["relative_devices"] = row["devices"] / (case.tp * first["devices"])
        row["relative_computed"] = row["computed"] / first["computed"]
        row["relative_measured"] = row["measured"] / first["measured"]
        row["deviation"] = row["measured"] / row["computed"] - 1
        found.append(row)
        print(f"{name}, pp {case.pp}, tp {case.tp}: {row['measured']:.2f}", file=sys.stderr)
    return found


def steps_as_markdown(rows: list[dict[str, Any]], forward_s: float) -> str:
    """Return the first table."""
    conditions = (
        f"Forwards of a stage, {1e3 * forward_s:g} ms each; the median of {len(rows[0]['steps'])} "
        f"steps; {machine()}. Units are the step if messages took no time. Last, time and devices "
        "relative to 1F1B on as many stages."
    )
    lines = [
        (
            row["name"],
            "any" if row["way"] == "1f1b" or row["name"].startswith("plain") else str(row["tp"]),
            str(row["pp"]),
            f"{row['num_microbatches']}{' each' if 'replicas' in row['name'] else ''}",
            f"{row['units']:g}",
            *(f"{row[name]:.2f}" for name in ("message_ms", "computed", "measured")),
            f"{100 * row['deviation']:+.1f} %",
            f"{row['relative_computed']:.2f}",
            f"{row['relative_measured']:.2f}",
            f"{row['relative_devices']:g}",
        )
        for row in rows
    ]
    beyond = [row for row in rows if abs(row["deviation"]) > _BAR]
    worst = max(rows, key=lambda row: abs(row["deviation"]))
    summary = (
        f"{len(beyond)} of {len(rows)} rows are more than {100 * _BAR:g} % off; the most is "
        f"{100 * worst['deviation']:+.1f} % ({worst['name']}, TP {worst['tp']}, PP {worst['pp']})."
    )
    return f"{conditions}\n\n{markdown(_STEP_HEAD, lines)}\n\n{summary}"


def training_as_markdown(found: dict[str, list[Trained]]) -> str:
    """Return the second table."""
    rows = []
    for name, ranks in found.items():
        first = [rank for rank in ranks if rank.stage == 0]
        columns = (
            (0, [rank.peak_mib for rank in first if rank.role != "forward"]),
            (0, [rank.peak_mib for rank in first if rank.role == "forward"]),
            (1, [rank.weights_ms for rank in ranks if rank.role == "backward"]),
            (1, [rank.weights_ms for rank in ranks if rank.role == "forward"]),
        )
        cells = (f"{max(values):.{digits}f}" if values else "" for digits, values in columns)
        rows.append((name, f"{max(rank.step_ms for rank in ranks):.0f}", *cells))
    return markdown(_TRAINING_HEAD, rows)


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward-ms", type=float, default=40.0, help="of one stage (default: 40)")
    parser.add_argument("--steps", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()
    launch.clean_up_when_terminated()
    rows = measure_rows(args.forward_ms / 1e3, args.steps)
    trained: dict[str, list[Trained]] = {}
    for name, (num_ranks, flags) in WAYS.items():
        words = (_MODEL + flags).split()
        trained[name] = list(run_ranks(num_ranks, measure_training, words, timeout_s=300))
        print(f"trained: {name}", file=sys.stderr)
    parts = {
        "step": steps_as_markdown(rows, args.forward_ms / 1e3),
        "training": training_as_markdown(trained),
    }
    for name, text in parts.items():
        print(f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->")
    if args.json:
        training = {name: [vars(rank) for rank in ranks] for name, ranks in trained.items()}
        write_json(args.json, {"steps": rows, "training": training})


if __name__ == "__main__":
    main()
