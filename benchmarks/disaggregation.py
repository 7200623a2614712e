"""Forward/backward disaggregation: predicted and measured step times, memory, weight transfer.

    python benchmarks/disaggregation.py [--quick] [--json FILE]

1. Sleeping stages (a backward takes twice as long as a forward) run under the disaggregated
   executor and under this package's 1F1B, both over shared memory. The table shows each measured
   step beside the simulated one, whose messages take no time. Forward ranks that represent TP ranks
   sleep TP times as long. The unit of time is a stage's forward; the target is a deviation of at
   most 3 %.
2. A GPT is trained in each way. Reported are the peak resident memory of a first-stage process
   above that before the first step, and the time that new weights cost either role.

Prints the tables of `docs/disaggregation.md`. Takes about 10 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import machine, markdown
from benchmarks.schedule_harness import launch, rank
from benchmarks.schedule_harness.metrics import seconds_of
from benchmarks.schedule_harness.ops import Sizes
from benchmarks.schedule_harness.roles import Case, Trained, measure_training
from tests.ranks import run_ranks

_BAR, _FORWARD_S = 0.03, 0.04
_STEP_HEAD = ("", "TP", "PP", "M", "computed", "measured", "", "time, computed", "measured",
              "devices")  # fmt: skip
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


@dataclass(frozen=True)
class Row:
    """One row of the first table; steps in forwards of a stage."""

    case: Case
    pp: int
    num_microbatches: int
    computed: float
    measured: float

    @property
    def deviation(self) -> float:
        """Measured over computed, minus 1."""
        return self.measured / self.computed - 1


WAYS = {
    "1F1B": (2, "32"),
    "1F1B, full recomputation": (2, "32" + _RECOMPUTE),
    "recompute": (4, "32" + _FBD),
    "ship": (4, "32" + _FBD + _RECOMPUTE + " --fbd-activations ship"),
    "two replicas, gathered, then sent": (8, "16" + _SHARDED),
    "two replicas, shares sent": (8, "16" + _SHARDED + " --overlap-param-gather"),
}
"""Lines of the second table: ranks and flags."""


def cases() -> list[tuple[Case, int, int]]:
    """Return the rows of the first table: case, stages and micro-batches."""
    rows = []
    for pp in (1, 2, 4):
        rows += [
            (Case("1F1B", "1f1b", activations="keep"), pp, 8),
            (Case("1F1B, full recomputation", "1f1b"), pp, 8),
            (Case("1F1B, two replicas", "1f1b", activations="keep", replicas=2), pp, 4),
            (Case("plain, recompute", "fbd"), pp, 8),
            (Case("plain, ship", "fbd", activations="ship"), pp, 8),
        ]
    for tp in (2, 4):
        for pp in (1, 2, 4):
            rows += [
                (Case("merged, recompute", "fbd", tp), pp, 8),
                (Case("merged, ship", "fbd", tp, "ship"), pp, 8),
            ]
    return rows


def measure_rows(wanted: list[tuple[Case, int, int]], steps: int) -> list[Row]:
    """Measure the first table."""
    found = []
    for case, pp, count in wanted:
        sizes = Sizes(pp, count, _FORWARD_S, 2, steps, 60.0)
        replicas = case.num_processes(pp) // pp
        by_rank = launch.run(rank.measure, case, sizes, replicas=replicas, repeats=case.tp)
        seconds = map(seconds_of, zip(*by_rank, strict=True))
        units = statistics.median(each / _FORWARD_S for each in seconds)
        found.append(Row(case, pp, count, case.computed(pp, count), units))
        print(f"{case.name}, pp {pp}, tp {case.tp}: {units:.2f}", file=sys.stderr)
    return found


def steps_as_markdown(rows: list[Row], conditions: str) -> str:
    """Return the first table; relative figures are to 1F1B on as many stages."""
    first: dict[int, Row] = {}
    lines = []
    for row in rows:
        than = first.setdefault(row.pp, row)
        devices = row.case.num_devices(row.pp) / (row.case.tp * than.case.num_devices(row.pp))
        lines.append((
            row.case.name,
            str(row.case.tp) if row.case.name.startswith("merged") else "any",
            str(row.pp),
            f"{row.num_microbatches}{' each' * (row.case.replicas > 1)}",
            f"{row.computed:g}",
            f"{row.measured:.2f}",
            f"{100 * row.deviation:+.1f} %",
            f"{row.computed / than.computed:.2f}",
            f"{row.measured / than.measured:.2f}",
            f"{devices:g}",
        ))  # fmt: skip
    worst = max(rows, key=lambda row: abs(row.deviation))
    summary = (
        f"{sum(abs(row.deviation) > _BAR for row in rows)} of {len(rows)} rows are more than "
        f"{100 * _BAR:g} % off; the most is {100 * worst.deviation:+.1f} % ({worst.case.name}, TP "
        f"{worst.case.tp}, PP {worst.pp})."
    )
    return f"{conditions}\n\n{markdown(_STEP_HEAD, lines)}\n\n{summary}"


def training_as_markdown(found: dict[str, list[Trained]]) -> str:
    """Return the second table."""
    rows = []
    for name, ranks in found.items():
        first = [one for one in ranks if one.stage == 0]
        columns = (
            (0, [one.peak_mib for one in first if one.role != "forward"]),
            (0, [one.peak_mib for one in first if one.role == "forward"]),
            (1, [one.weights_ms for one in ranks if one.role == "backward"]),
            (1, [one.weights_ms for one in ranks if one.role == "forward"]),
        )
        cells = (f"{max(values):.{digits}f}" if values else "" for digits, values in columns)
        rows.append((name, f"{max(one.step_ms for one in ranks):.0f}", *cells))
    return markdown(_TRAINING_HEAD, rows)


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one stage, one step, no training")
    add_json(parser)
    args = parser.parse_args()
    launch.clean_up_when_terminated()
    wanted = [(case, pp, count) for case, pp, count in cases() if pp == 1 or not args.quick]
    steps = 1 if args.quick else 3
    rows = measure_rows(wanted, steps)
    conditions = (
        f"Forwards of a stage, {1e3 * _FORWARD_S:g} ms each; the median of {steps} steps; "
        f"{machine()}. Last, time and devices relative to 1F1B on as many stages."
    )
    table = steps_as_markdown(rows, conditions)
    print(f"<!-- step: begin -->\n{table}\n<!-- step: end -->", flush=True)
    trained: dict[str, list[Trained]] = {}
    for name, (num_ranks, flags) in {} if args.quick else WAYS.items():
        words = (_MODEL + flags).split()
        trained[name] = list(run_ranks(num_ranks, measure_training, words, timeout_s=300))
        print(f"trained: {name}", file=sys.stderr)
    if trained:
        print(f"<!-- training: begin -->\n{training_as_markdown(trained)}\n<!-- training: end -->")
    if args.json:
        training = {name: [vars(one) for one in ranks] for name, ranks in trained.items()}
        write_json(args.json, {"steps": list(map(asdict, rows)), "training": training})


if __name__ == "__main__":
    main()
