"""Schedules in slices of a sequence beside those of whole micro-batches, in time and memory.

    python benchmarks/slices.py [--size PPxM ...] [--slices K ...] [--attention SHARE ...]
        [--only TEXT ...] [--forward-ms T] [--slice-ms T] [--steps N] [--parts PART ...]
        [--simulate] [--json FILE]

Without options it takes about eight minutes on two cores. Its parts:

`schedules`: stages sleep, processes and messages are real, as in `schedules.py`. A forward of a
micro-batch on 1/pp of the model is the unit of time; its two gradients take as long. With a share
of attention in a forward, slices have equal cost. Columns:

    bubble     T less the work of a rank: of the simulated order, and measured
    over %     measured T over that of the simulated order, minus 1, the median of the steps, and of
               the best one
    peak act.  peak of live activations on the worst rank, in micro-batches on 1/pp of the model:
               simulated, and measured as tensors in memory
    weights    copies of each weight
    cpu %      of all cores, what the ranks' processes took; there are few cores, and ranks sleep
    gap us     from the end of an action to the begin of the next one of its rank, whose input was
               there: the median, with the wait for a core that other ranks use
    ideal %    with attention: the time of the simulated order over that without, minus 1

Below a table stands what the executor computes between two actions of it, with its messages: the
processor's time, in which waits for a core do not count.

`memory`: one step of a GPT on CPU ranks at 4096 tokens, a layer on each rank, attention recomputed.
What autograd keeps at most, over what it keeps of one whole micro-batch, beside the table's peak,
which bounds a dynamic order too.

`join`: what attention of a slice pays to join its keys and values with those before it, beside
attention itself.

`--simulate` computes what to expect of `schedules`, and measures nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.harness import ranks
from benchmarks.harness.command import chosen, figure, machine, options, size, write_json
from benchmarks.harness.metrics import evaluate
from benchmarks.harness.ops import SEQUENCE_LENGTH, Sizes
from benchmarks.harness.systems import OVERLAPPED, Own, System, all_systems
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Costs, generate
from megatron_ext.schedules.commands import aligned
from megatron_ext.schedules.search.simulate import simulate
from megatron_ext.schedules.table.memory import measure as memory
from tests.ranks import RanksFailed

_PARTS = ("schedules", "memory", "join")
_LENGTH = 4 * SEQUENCE_LENGTH
"""Tokens of the samples of real models."""


_Line = dict[str, Any]
"""One schedule at one size: what it is, and its figures, in forwards, as far as there are any."""
_COLUMNS = (
    ("bubble", "of_order", ".2f", 1),
    ("measured", "bubble", ".2f", 1),
    ("over %", "over", ".2f", 100),
    ("best", "best", ".2f", 100),
    ("peak act.", "peak_of_order", ".2f", 1),
    ("measured", "peak", ".2f", 1),
    ("ideal %", "ideal", ".2f", 100),
    ("weights", "weights", "d", 1),
    ("cpu %", "cpu", ".0f", 100),
    ("gap us", "gap_s", ".0f", 1e6),
)
"""Head, figure, format and scale."""


def systems(slices: list[int], attention: list[float]) -> list[System]:
    """Return what is compared: the rivals with whole micro-batches, then ours in slices.

    Shares of attention above 0 are for eight slices, or the most of fewer.
    """
    few = max([k for k in slices if k <= 8], default=min(slices))
    return [
        *(peer for peer in all_systems() if peer.name == OVERLAPPED),
        Own("1f1b", "1f1b", transport="shm"),
        Own("zb-v", "zb-v", transport="shm"),
        Own("bitpipe order=zb", "bitpipe", {"order": "zb"}, transport="shm"),
        *(
            Own(
                f"zb-h1 slices={k}" + (f" attention {100 * share:g} %" if share else ""),
                "zb-h1",
                transport="shm",
                slices=k,
                attention=share,
            )
            for share in attention
            for k in slices
            if not share or k == few
        ),
    ]


def line_of(system: System, sizes: Sizes, *, simulates: bool) -> _Line | None:
    """Return a line; None if there is no such schedule of this size."""
    dimensions = sizes.pp, sizes.num_microbatches
    line: _Line = {"pp": sizes.pp, "num_microbatches": sizes.num_microbatches}
    line |= {"name": system.name, "weights": system.weight_copies}
    try:
        system.check(*dimensions)
        if isinstance(system, Own):
            costs = Costs(attention=system.attention)
            table = generate(
                system.schedule, *dimensions, costs=costs, slices=system.slices, **system.options
            )
            makespan = simulate(table, costs).makespan
            line |= {
                "of_order": makespan - sizes.work,
                "peak_of_order": max(memory(table).activations),
            }
            if system.attention:
                even = generate(system.schedule, *dimensions, slices=system.slices)
                line["ideal"] = makespan / simulate(even).makespan - 1
        if simulates:
            return line if isinstance(system, Own) else None
        steps = ranks.run(ranks.measure, system, sizes)
    except (ScheduleError, RanksFailed) as error:
        print(f"{system.name}: {error}", file=sys.stderr)
        return None
    found = evaluate(steps, system.placement(sizes.pp), system.times(sizes))
    if isinstance(system, Own):
        order_s = makespan * sizes.forward_s
        line |= {"over": found.median_s / order_s - 1, "best": found.min_s / order_s - 1}
    return line | {
        "bubble": found.median_s / sizes.forward_s - sizes.work,
        "peak": found.peak_live,
        "cpu": found.cpu_s * len(steps) / found.median_s / len(os.sched_getaffinity(0)),
        "gap_s": found.gap_s,
    }


def text_of(lines: list[_Line]) -> str:
    """Return the lines of one size as a table, without columns that are empty."""
    columns = [["schedule", *(line["name"] for line in lines)]]
    for head, name, form, scale in _COLUMNS:
        cells = [figure(line.get(name), form, scale) for line in lines]
        if any(cells):
            unit = "x" if name == "weights" else ""
            columns.append([head, *(cell + unit for cell in cells)])
    return aligned(list(zip(*columns, strict=True)))


def executors_own(systems: list[System], pp: int, num_microbatches: int) -> str:
    """Return the processor's time between actions, of whole micro-batches and of most slices."""
    of_slices = [s for s in systems if isinstance(s, Own) and s.schedule == "zb-h1"]
    ends = {cut: s for s in of_slices if not s.attention and (cut := s.slices)}
    found = []
    for cut in sorted({min(ends), max(ends)}) if ends else ():
        # Ops may be short: their own time does not count.
        sizes = Sizes(pp, num_microbatches, 2e-3 * cut, 1, 2)
        most_s = max(ranks.run(ranks.measure_overhead, ends[cut], sizes))
        found.append(f"{1e6 * most_s:.0f} us with slices={cut}")
    return f"zb-h1, processor time between two actions: {', '.join(found)}\n" if found else ""


def join(length: int, num_slices: int) -> str:
    """Return what joining keys and values costs beside attention, forward and backward."""
    import torch

    from megatron_ext.runtime.sliced_compute import _Joined, _Kept

    torch.set_num_threads(1)
    heads, width = 4, 64
    kept, losses, join_s = (_Kept(), _Kept()), [], 0.0
    begin_s = time.perf_counter()
    for number in range(num_slices):
        size = length * (number + 1) // num_slices - length * number // num_slices
        shape = 3, size, 1, heads, width
        query, key, value = torch.randn(shape, requires_grad=True).unbind()
        join_begin_s = time.perf_counter()
        key, value = (
            _Joined.apply(own, of, number) for own, of in zip((key, value), kept, strict=True)
        )
        join_s += time.perf_counter() - join_begin_s
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # heads first
        losses.append(torch.nn.functional.scaled_dot_product_attention(q, k, v).sum())
    for loss in reversed(losses):
        loss.backward()
    all_s = time.perf_counter() - begin_s
    whole = 2 * length * heads * width * 4 / 2**20
    return (
        f"{length} tokens in {num_slices} slices, {heads} heads of {width}: keys and values "
        f"{whole:.1f} MiB, joined {whole * (num_slices + 1) / 2:.1f} MiB in {1e3 * join_s:.1f} ms "
        f"of {1e3 * all_s:.1f} ms for attention, forward and backward"
    )


def memory_of_a_model(length: int, slices: int) -> str:
    """Return what a real model keeps, as a table beside what the schedule's says."""
    from tests.planning.model_memory import HIDDEN, sliced  # with Megatron, torch

    pp, num_microbatches = 4, 4
    one = sliced("1f1b", pp, 1, 1, length)
    keys = 2 * 2 * length * HIDDEN  # in bf16
    rows = [["schedule", "peak act.", "measured", "off %", "keys, values", "measured"]]
    for name, cut, more in (
        ("1f1b", 1, ""),
        ("1f1b", slices, ""),
        ("zb-h1", slices, ""),
        ("zb-h1", slices, "--use-dpp --dpp-extra-activations 0"),
    ):
        found = sliced(name, pp, num_microbatches, cut, length, more)
        saved = [mine.held.kept / whole.held.kept for mine, whole in zip(found, one, strict=True)]
        planned = max(mine.planned for mine in found)
        most = max(mine.planned_keys for mine in found)
        figures = (planned, max(saved), 100 * (max(saved) / planned - 1), most)
        kept = max(mine.keys_bytes for mine in found) / keys
        label = f"{name} slices={cut}" + (", dynamic" if more else "")
        rows.append([label, *(f"{figure:.2f}" for figure in (*figures, kept))])
    return f"pp {pp}, {num_microbatches} micro-batches of {length} tokens\n\n{aligned(rows)}"


def main() -> int:
    """Measure and print."""
    parser = options(__doc__, only=True)
    add = parser.add_argument
    add("--size", nargs="+", type=size, default=[(4, 4), (4, 8), (8, 16)], metavar="PPxM",
        help="ranks of a pipeline and its micro-batches (default: 4x4 4x8 8x16)")  # fmt: skip
    add("--slices", nargs="+", type=int, default=[1, 4, 8, 16], metavar="K")
    add("--attention", nargs="+", type=float, default=[0.0, 0.3, 0.6], metavar="SHARE")
    add("--forward-ms", type=float, default=80, help="forward of 1/pp of the model")
    add("--slice-ms", type=float, default=25,
        help="forward of the shortest slice: the whole one is longer if it has to be")  # fmt: skip
    add("--steps", type=int, default=2, help="measured steps, after another one")
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    add("--simulate", action="store_true", help="compute what to expect only")
    args = parser.parse_args()
    compared = chosen(parser, systems(args.slices, args.attention), args.only)
    ranks.clean_up_when_terminated()
    lines: list[_Line] = []
    for pp, num_microbatches in args.size if "schedules" in args.parts else ():
        found = []
        for system in compared:
            cut = system.slices if isinstance(system, Own) else 1
            forward_s = max(args.forward_ms, cut * args.slice_ms) / 1e3
            sizes = Sizes(pp, num_microbatches, forward_s, 1, args.steps)
            line = line_of(system, sizes, simulates=args.simulate)
            found += [] if line is None else [line]
        lines += found
        print(f"pp {pp}, {num_microbatches} micro-batches\n\n{text_of(found)}\n", flush=True)
        if not args.simulate:
            print(executors_own(compared, pp, num_microbatches), flush=True)
    if not args.simulate:
        if "memory" in args.parts:
            print(f"{memory_of_a_model(_LENGTH, 8)}\n", flush=True)
        for num_slices in args.slices if "join" in args.parts else ():
            print(join(_LENGTH, num_slices), flush=True)
    print(
        f"forward {args.forward_ms:g} ms, of a slice at least {args.slice_ms:g} ms, median of "
        f"{args.steps} steps; {machine()}"
    )
    write_json(args.json, {"lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
