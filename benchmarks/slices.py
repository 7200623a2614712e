"""Time and memory of schedules with sequence slices, compared with whole micro-batches.

    python benchmarks/slices.py [--slice-ms T] [--parts PART ...] [--quick]

Without options, this takes about eight minutes on two cores. Parts:

`schedules`: stages sleep, while processes and messages are real, as in `schedules.py`, which has
the same columns. If attention takes up a share of a forward, slices are cut to equal cost. Below
each table is the executor's processor time between two actions, which includes messages but not
waiting for a core.

`memory`: one step of a GPT on CPU ranks, with 4096 tokens, one layer per rank, and recomputed
attention. Prints the peak of what autograd keeps, relative to one whole micro-batch, next to the
table's peak, which is also a bound for dynamic orders.

`keys`: two ways of handling one layer's keys and values for one sample, in alternation: writing
them to the buffer that later slices read, and appending them to a copy of all earlier slices' ones.
Prints the bytes that each way writes in forwards and backwards, what autograd keeps, and the ratio
of their times, without attention.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks
from benchmarks.harness.command import machine, options
from benchmarks.harness.comparison import Compared, compare, report_failures, table
from benchmarks.harness.ops import SEQUENCE_LENGTH, Sizes
from benchmarks.harness.systems import OVERLAPPED, PEERS, Own, System, own
from megatron_ext.text_table import aligned

_PARTS = ("schedules", "memory", "keys")
_LENGTH = 4 * SEQUENCE_LENGTH
"""Tokens per sample, for real models."""
_SLICES = (1, 4, 8, 16)
_ATTENTION = (0.3, 0.6)
_FORWARD_MS = 80.0
_COLUMNS = ("system", "T/ideal", "order", "T/order", "peak act.", "weights")


def systems() -> list[System]:
    """Return the systems to compare: rivals with whole micro-batches, then ours with slices."""

    def sliced(count: int, share: float = 0.0) -> Own:
        label = f"zb-h1 slices={count}" + (
            f" attention {100 * share:g} %" if share else ""
        )
        return own(label, "zb-h1", slices=count, attention=share)

    return [
        PEERS[OVERLAPPED],
        *(own(label, label) for label in ("1f1b", "zb-v", "bitpipe order=zb")),
        *map(sliced, _SLICES),
        *(sliced(8, share) for share in _ATTENTION),
    ]


def executors_own(pp: int, num_microbatches: int) -> str:
    """Return the processor time between actions, with whole micro-batches and the most slices."""
    figures = []
    for cut in (_SLICES[0], _SLICES[-1]):
        # Ops may be short, because their own time does not count.
        sizes = Sizes(pp, num_microbatches, 2e-3 * cut, 1, 2)
        most_s = ranks.overhead_s(own("", "zb-h1", slices=cut), sizes)
        figures.append(f"{1e6 * most_s:.0f} us with slices={cut}")
    return f"zb-h1, processor time between two actions: {', '.join(figures)}\n"


def memory_of_a_model(length: int, slices: int) -> str:
    """Return a table of what a real model keeps, next to the schedule's figures."""
    from tests.planning.model_memory import HIDDEN, sliced  # imports Megatron and torch

    pp, num_microbatches = 4, 4
    one_microbatch = sliced("1f1b", pp, 1, 1, length)
    keys = 2 * 2 * length * HIDDEN  # in bf16
    rows = [["schedule", "peak act.", "measured", "off %", "keys, values", "measured"]]
    for name, cut, flags in (
        ("1f1b", 1, ""),
        ("1f1b", slices, ""),
        ("zb-h1", slices, ""),
        ("zb-h1", slices, "--use-dpp --dpp-extra-activations 0"),
    ):
        ranks_of_run = sliced(name, pp, num_microbatches, cut, length, flags)
        microbatches = [
            rank.held.kept / single.held.kept
            for rank, single in zip(ranks_of_run, one_microbatch, strict=True)
        ]
        planned = max(rank.planned for rank in ranks_of_run)
        max_keys = max(rank.planned_keys for rank in ranks_of_run)
        figures = (
            planned,
            max(microbatches),
            100 * (max(microbatches) / planned - 1),
            max_keys,
        )
        measured_keys = max(rank.keys_bytes for rank in ranks_of_run) / keys
        label = f"{name} slices={cut}" + (", dynamic" if flags else "")
        rows.append([label, *(f"{figure:.2f}" for figure in (*figures, measured_keys))])
    return f"pp {pp}, {num_microbatches} micro-batches of {length} tokens\n\n{aligned(rows)}"


def main() -> int:
    """Measure, print the results, and return 1 if a system failed."""
    parser = options(__doc__, "only one small size, with short actions")
    add = parser.add_argument
    add("--slice-ms", type=float, default=25,
        help="minimum forward per slice; the whole forward is lengthened if needed")  # fmt: skip
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    args = parser.parse_args()
    at_sizes = [(4, 4), (4, 8), (8, 16)]
    forward_ms = _FORWARD_MS
    if args.quick:
        at_sizes, args.slice_ms, forward_ms = [(4, 4)], 2.0, 4.0
    ranks.clean_up_when_terminated()
    measured: list[Compared] = []
    for pp, num_microbatches in at_sizes if "schedules" in args.parts else ():
        compared = []
        for system in systems():
            cut = system.config.slices if isinstance(system, Own) else 1
            forward_s = max(forward_ms, cut * args.slice_ms) / 1e3
            sizes = Sizes(pp, num_microbatches, forward_s, 1, 1 if args.quick else 2)
            compared.append(compare([(system, ["quiet"])], sizes))
        measured += compared
        print(
            f"pp {pp}, {num_microbatches} micro-batches\n\n{table(compared, _COLUMNS)}\n",
            flush=True,
        )
        print(executors_own(pp, num_microbatches), flush=True)
    if "memory" in args.parts:
        print(f"{memory_of_a_model(_LENGTH, 8)}\n", flush=True)
    if "keys" in args.parts:
        from benchmarks.harness.slice_keys import (
            compare_ways,
        )  # imports Megatron and torch

        print(
            f"{compare_ways(_LENGTH if args.quick else 2 * _LENGTH, _SLICES[1:])}\n",
            flush=True,
        )
    print(
        f"forward {forward_ms:g} ms, at least {args.slice_ms:g} ms per slice, median of two steps; "
        f"{machine()}"
    )
    return report_failures(measured)


if __name__ == "__main__":
    sys.exit(main())
