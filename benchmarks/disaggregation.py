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
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import launch  # noqa: E402
from benchmarks.schedule_harness.roles import (  # noqa: E402
    Case,
    Trained,
    measure_steps,
    measure_training,
)
from tests.ranks import run_ranks  # noqa: E402

_BAR = 0.03


class Row(NamedTuple):
    """A line of the first table."""

    name: str
    case: Case
    replicas: int = 1


def _rows() -> list[Row]:
    rows = []
    for pp in (1, 2, 4):
        rows += [
            Row("1F1B", Case("1f1b", pp, 8, activations="keep")),
            Row("1F1B, full recomputation", Case("1f1b", pp, 8)),
            Row("1F1B, two replicas", Case("1f1b", pp, 4, activations="keep"), replicas=2),
            Row("plain, recompute", Case("fbd", pp, 8)),
            Row("plain, ship", Case("fbd", pp, 8, activations="ship")),
        ]
    for tp in (2, 4):
        for pp in (1, 2, 4):
            rows += [
                Row("merged, recompute", Case("fbd", pp, 8, tp)),
                Row("merged, ship", Case("fbd", pp, 8, tp, "ship")),
            ]
    return rows


def step_units(case: Case, forward_s: float, steps: int) -> tuple[list[float], float]:
    """Return the time of each step, over all ranks, and of a message, in forwards of a stage."""
    by_rank = run_ranks(case.num_processes, measure_steps, case, forward_s, steps, timeout_s=300)
    spans = [
        max(end for _, end in ranks) - min(begin for begin, _ in ranks)
        for ranks in zip(*(rank.steps for rank in by_rank), strict=True)
    ]
    message_s = 0.0  # one process sends none
    if len(by_rank) > 1:
        sent, here = by_rank[0].messages, by_rank[1].messages
        message_s = statistics.median(b - a for a, b in zip(sent, here, strict=True))
    return [span / forward_s for span in spans], message_s / forward_s


def measure_rows(rows: list[Row], forward_s: float, steps: int) -> list[dict[str, Any]]:
    """Measure the first table; relative figures are to 1F1B on as many stages."""
    found: list[dict[str, Any]] = []
    baseline: dict[int, dict[str, Any]] = {}
    for name, case, replicas in rows:
        units, message = step_units(case, forward_s, steps)
        row = {
            "name": name, **vars(case), "devices": replicas * case.num_devices,
            "units": case.computed(), "message_ms": 1e3 * forward_s * message,
            "computed": case.computed(message), "measured": statistics.median(units),
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
        f"steps on {os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}. Units are the step if "
        "messages took no time. Last, time and devices relative to 1F1B on as many stages."
    )
    head = (
        "| | TP | PP | M | units | ms a message | computed | measured | "
        "| time, computed | measured | devices |"
    )
    lines = [
        conditions,
        "",
        head,
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = row["way"] == "1f1b" or row["name"].startswith("plain")
        lines.append(
            f"| {row['name']} | {'any' if own else row['tp']} | {row['pp']} "
            f"| {row['num_microbatches']}{' each' if 'replicas' in row['name'] else ''} "
            f"| {row['units']:g} | {row['message_ms']:.2f} "
            f"| {row['computed']:.2f} | {row['measured']:.2f} | {100 * row['deviation']:+.1f} % "
            f"| {row['relative_computed']:.2f} | {row['relative_measured']:.2f} "
            f"| {row['relative_devices']:g} |"
        )
    beyond = [row for row in rows if abs(row["deviation"]) > _BAR]
    worst = max(rows, key=lambda row: abs(row["deviation"]))
    summary = (
        f"{len(beyond)} of {len(rows)} rows are more than {100 * _BAR:g} % off; the most is "
        f"{100 * worst['deviation']:+.1f} % ({worst['name']}, TP {worst['tp']}, PP {worst['pp']})."
    )
    return "\n".join([*lines, "", summary])


_MODEL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 4 --train-iters 4 "
    "--eval-iters 0 --lr 1e-4 --min-lr 1e-5 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --num-workers 0 --log-interval 100 --hidden-dropout 0 --attention-dropout 0 "
    "--pipeline-model-parallel-size 2 "
)
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
_FBD = "--forward-backward-disaggregating "
_SHARDED = "--use-distributed-optimizer --overlap-grad-reduce "


class Way(NamedTuple):
    """A line of the second table."""

    name: str
    num_ranks: int
    flags: str


WAYS = (
    Way("1F1B", 2, "--global-batch-size 32 "),
    Way("1F1B, full recomputation", 2, "--global-batch-size 32 " + _RECOMPUTE),
    Way("recompute", 4, "--global-batch-size 32 " + _FBD),
    Way("ship", 4, "--global-batch-size 32 " + _FBD + _RECOMPUTE + "--fbd-activations ship "),
    Way("two replicas, gathered, then sent", 8, "--global-batch-size 16 " + _FBD + _SHARDED),
    Way(
        "two replicas, shares sent", 8,
        "--global-batch-size 16 " + _FBD + _SHARDED + "--overlap-param-gather ",
    ),
)  # fmt: skip


def measure_ways() -> dict[str, list[Trained]]:
    """Train in each way on all ranks."""
    found = {}
    for way in WAYS:
        flags = (_MODEL + way.flags).split()
        found[way.name] = list(run_ranks(way.num_ranks, measure_training, flags, timeout_s=300))
        print(f"trained: {way.name}", file=sys.stderr)
    return found


def training_as_markdown(found: dict[str, list[Trained]]) -> str:
    """Return the second table."""
    head = (
        "| 8 layers, hidden size 256, PP 2 | ms a step | MiB, first stage, backward rank "
        "| forward rank | ms for new weights, backward ranks | forward ranks |"
    )
    lines = [
        head,
        "|---|---|---|---|---|---|",
    ]
    for name, ranks in found.items():
        step_ms = max(rank.step_ms for rank in ranks)
        cells = [
            f"{max(values):.{digits}f}" if (values := _of(ranks, what, roles)) else ""
            for what, roles, digits in (
                ("peak_mib", ("both", "backward"), 0),
                ("peak_mib", ("forward",), 0),
                ("weights_ms", ("backward",), 1),
                ("weights_ms", ("forward",), 1),
            )
        ]
        lines.append(f"| {name} | {step_ms:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(ranks: list[Trained], what: str, roles: tuple[str, ...]) -> list[float]:
    wanted = [rank for rank in ranks if rank.role in roles]
    if what == "peak_mib":
        wanted = [rank for rank in wanted if rank.stage == 0]
    return [getattr(rank, what) for rank in wanted]


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward-ms", type=float, default=40.0, help="of one stage (default: 40)")
    parser.add_argument("--steps", type=int, default=3)
    add_json(parser)
    args = parser.parse_args()
    launch.clean_up_when_terminated()
    rows = measure_rows(_rows(), args.forward_ms / 1e3, args.steps)
    trained = measure_ways()
    parts = {
        "step": steps_as_markdown(rows, args.forward_ms / 1e3),
        "training": training_as_markdown(trained),
    }
    for name, text in parts.items():
        print(f"<!-- {name}: begin -->\n{text}\n<!-- {name}: end -->")
    if args.json:
        training = {name: [vars(rank) for rank in ranks] for name, ranks in trained.items()}
        content = {"steps": rows, "training": training}
        write_json(args.json, content)


if __name__ == "__main__":
    main()
