"""Pipeline schedules and runtimes side by side, on emulated stages.

    python benchmarks/schedules.py [--pp P ...] [--microbatches M] [--only TEXT ...] [--steps N]
        [--rounds N] [--forward-ms T] [--json FILE] [--svg FILE] [--markdown]

All figures of the documentation come from one run of `--markdown --svg docs/images/measured.svg`: 4
and 8 ranks, 15 minutes. With several sizes the first runs all systems, the others leave out this
package's schedules over gloo, unless `--only` selects systems.

Every system runs the same model in real processes with real messages; stages emulate computation by
sleeping. Each rank is bound to CPUs of its own, or shares one if there are too few. Columns of the
table:

    T ms       median step time, from the start of the first rank to the end of the last
    T/ideal    T over the work of one rank, which is the time without any bubble
    order      T/ideal of the order that ran, with exact ops and free messages
    replay %   overhead of runtime and messages over that order with the measured ops
    ops %      excess of ops over their sleep; marked ! above 5: the machine is too busy
    peak act.  peak of live activations, as tensors in memory, on the worst rank; the unit is the
               activations of one micro-batch on 1/pp of the model
    of order   activations that the order must hold
    weights    copies of each weight
    ops        actions of a rank
    hops       messages on the longest path of the order: their latency extends the step
    gap us     from the end of an op to the start of the next on its rank, if it waits for nothing
    hop us     from the end of an op to the start of one on another rank that waits for it
    cpu %      CPU time of a rank over T: beyond cores/pp ranks wait for cores

Sleeping ops say nothing about kernels, memory bandwidth or collectives that share a GPU with them.
Steps with ops and messages of random times: `dynamic_order.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json
from benchmarks.common.tables import add_only, chosen, machine
from benchmarks.schedule_harness import launch, rank
from benchmarks.schedule_harness.metrics import Figures, evaluate
from benchmarks.schedule_harness.ops import Sizes, Step
from benchmarks.schedule_harness.systems import Own, System, all_systems
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.commands import aligned
from tests.ranks import RanksFailed

_HEADS = ("system", "T ms", "T/ideal", "order", "replay %", "ops %", "peak act.", "of order",
          "weights", "ops", "hops", "gap us", "hop us", "cpu %")  # fmt: skip
_NOISY = 0.05
"""Ops that took longer than this above their time: the machine was too busy."""
_ANSWER_S = 60.0


def wakeup_s(idle_s: float, num_samples: int = 25) -> float:
    """Return the median time from a write to a pipe until its reader, asleep, goes on.

    No message costs less. Reader and writer are on different CPUs if there are several, and idle
    for `idle_s` before each sample.

    Raises:
        TimeoutError: The reader does not answer.
    """
    context = multiprocessing.get_context("fork")
    there, here = context.Pipe(duplex=True)
    reader = context.Process(target=_read, args=(there, num_samples), daemon=True)
    reader.start()
    there.close()
    found_s = []
    for _ in range(num_samples):
        time.sleep(idle_s)
        begin_s = time.perf_counter()
        here.send_bytes(b"wake up")
        if not here.poll(_ANSWER_S):
            raise TimeoutError(f"a process did not answer within {_ANSWER_S:g} s of a write to it")
        found_s.append(here.recv() - begin_s)
    reader.join(_ANSWER_S)
    here.close()
    return statistics.median(found_s)


def _read(connection: Connection, num_samples: int) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for _ in range(num_samples):
        connection.recv_bytes()
        connection.send(time.perf_counter())  # the clock is the machine's


@dataclass
class Measured:
    """All systems at one size."""

    sizes: Sizes
    conditions: str
    figures: dict[str, Figures]
    failures: dict[str, str]

    @property
    def size(self) -> str:
        """The size in words."""
        return f"pp {self.sizes.pp}, {self.sizes.num_microbatches} micro-batches"


def compare(systems: list[System], sizes: Sizes, rounds: int) -> Measured:
    """Run all systems in turn, round after round, so that a drift of the machine hits all alike."""
    steps: dict[str, list[list[Step]]] = {}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for index, system in enumerate(systems):
            place = f"round {number + 1} of {rounds}, {index + 1} of {len(systems)}"
            print(f"{place}: {system.name}", file=sys.stderr)
            if system.name in failures:
                continue
            try:
                system.check(sizes.pp, sizes.num_microbatches)
                found = launch.run(rank.measure, system, sizes)
            except (ScheduleError, RanksFailed) as error:
                failures[system.name] = str(error)
                continue
            earlier = steps.get(system.name, [[] for _ in found])
            steps[system.name] = [old + new for old, new in zip(earlier, found, strict=True)]
    conditions = (
        f"pp {sizes.pp}, {sizes.num_microbatches} micro-batches, forward = input gradient = weight "
        f"gradient = {1e3 * sizes.forward_s:g} ms, peers over gloo, median of "
        f"{sizes.steps * rounds} steps; {machine()}, {1e6 * wakeup_s(sizes.forward_s):.0f} us to "
        f"wake a process by a pipe"
    )
    figures = {
        system.name: evaluate(steps[system.name], system.placement(sizes.pp), system.times(sizes))
        for system in systems
        if system.name in steps
    }
    return Measured(sizes, conditions, figures, failures)


def table(figures: Mapping[str, Figures], weights: Mapping[str, int]) -> str:
    """Return the comparison as text; `weights`: how often each system stores every weight."""
    rows = [
        (
            name,
            f"{1e3 * found.median_s:.0f}",
            f"{found.ratio:.3f}",
            f"{found.optimum_s / found.ideal_s:.3f}",
            f"{100 * found.replay_overhead:.1f}",
            f"{'!' * (found.op_inflation > _NOISY)}{100 * found.op_inflation:.1f}",
            f"{found.peak_live:g}",
            f"{found.peak_of_order:g}",
            f"{weights[name]}x",
            f"{found.num_ops}",
            f"{found.hops:g}",
            f"{1e6 * found.gap_s:.0f}",
            f"{1e6 * found.hop_s:.0f}",
            f"{100 * found.cpu_s / found.median_s:.1f}",
        )
        for name, found in figures.items()
    ]
    return aligned([_HEADS, *rows])


_BAR_OF_REPLAY, _BAR_OF_BITPIPE = 0.015, 1.04


def explain(figures: Mapping[str, Figures]) -> str:
    """Return in words which aims our schedules reach over shared memory, and what they miss by."""
    prefix = "megatron_ext, shm: "
    ours = {
        name.removeprefix(prefix): found
        for name, found in figures.items()
        if name.startswith(prefix) and " for latency " not in name
    }
    reached = [n for n, found in ours.items() if found.replay_overhead < _BAR_OF_REPLAY + 5e-4]
    lines = [
        f"Replay over shm is at most {100 * _BAR_OF_REPLAY:g} % for {', '.join(reached) or 'none'}."
    ]
    lines += [
        f"{name}: {100 * found.replay_overhead:.1f} %, with {found.num_ops} ops, "
        f"{1e6 * found.gap_s:.0f} us from one to the next of a rank, and {found.hops:g} messages "
        f"on the longest path, {1e6 * found.hop_s:.0f} us from op to op."
        for name, found in ours.items()
        if name not in reached
    ]
    if (bitpipe := ours.get("bitpipe order=zb")) is not None:
        shares = ", ".join(
            f"{part} {100 * took_s / bitpipe.ideal_s:.1f}" for part, took_s, _ in _parts(bitpipe)
        )
        verdict = "within" if bitpipe.ratio <= _BAR_OF_BITPIPE else "not within"
        lines.append(
            f"bitpipe order=zb is {100 * (bitpipe.ratio - 1):.1f} % above ideal ({shares}), "
            f"{verdict} {100 * (_BAR_OF_BITPIPE - 1):.0f} %."
        )
    return "\n".join(lines)


def _parts(found: Figures) -> list[tuple[str, float, str]]:
    """Return what a step takes beyond ideal: name, seconds, and what that is."""
    return [
        ("order", found.optimum_s - found.ideal_s, "bubble of the order that ran"),
        ("ops", found.replay_s - found.optimum_s, "ops that took longer"),
        ("replay", found.median_s - found.replay_s, "runtime and messages"),
    ]


_ROW, _TOP, _NAME, _SCALE, _BAR = 22, 46, 290, 600, 15
_STYLE = """\
text { font: 12px sans-serif; fill: #1f2328 }
.axis { stroke: #8888; stroke-width: 1 }
.order { fill: #79b8ff } .ops { fill: #d0d7de } .replay { fill: #f9b384 }
.own .order { fill: #388bfd } .own .ops { fill: #afb8c1 } .own .replay { fill: #e5714b }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }"""


def draw(measured: Mapping[str, Mapping[str, Figures]]) -> str:
    """Return bars as SVG: what each system takes beyond ideal, as a share of it.

    Args:
        measured: Figures by name of the system, by size of the pipeline in words.
    """
    every = [found for figures in measured.values() for found in figures.values()]
    scale = _SCALE / max([0.1, *(found.ratio - 1 for found in every)])
    title, width = "time beyond ideal, measured", _NAME + _SCALE + 60
    height = _TOP + _ROW * (len(every) + 2 * len(measured)) + 34
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<text x="4" y="17">{title}</text>',
    ]
    bottom = _TOP
    for size, figures in measured.items():
        parts.append(f'<text x="4" y="{bottom + 12}" font-weight="bold">{escape(size)}</text>')
        top = bottom + _ROW
        bottom = top + _ROW * len(figures)
        for index, (name, found) in enumerate(figures.items()):
            parts += _bar(name, found, top + _ROW * index, scale)
        parts.append(f'<path class="axis" d="M{_NAME} {top - 6}V{bottom}"/>')
        bottom += _ROW
    for index, (kind, _, text) in enumerate(_parts(every[0]) if every else ()):
        left = _NAME + 210 * index
        parts.append(f'<rect class="{kind}" x="{left}" y="{bottom + 8}" width="12" height="12"/>')
        parts.append(f'<text x="{left + 17}" y="{bottom + 18}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(name: str, found: Figures, y: int, scale: float) -> Iterator[str]:
    style, x = ' class="own"' if name.startswith("megatron_ext") else "", float(_NAME)
    yield f"<g{style}>"
    yield f'<text x="4" y="{y + 12}">{escape(name)}</text>'
    reached_s = until_s = found.ideal_s
    for kind, took_s, _ in _parts(found):  # a part may be negative
        until_s += took_s
        length = scale * max(0.0, until_s - reached_s) / found.ideal_s
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_BAR}"/>'
        x, reached_s = x + length, max(reached_s, until_s)
    yield f'<text x="{x + 5:.1f}" y="{y + 12}">+{100 * (found.ratio - 1):.1f} %</text>'
    yield "</g>"


def main() -> int:
    """Measure and print; 1 if a system failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pp", type=int, nargs="+", default=[4, 8], help="ranks of the pipeline (default: 4 8)")
    add("--microbatches", type=int, help="in one step; default: 4 for each rank")
    add("--steps", type=int, default=4, help="measured steps, after two others")
    add("--rounds", type=int, default=1, help="how often all of that is done")
    add("--forward-ms", type=float, help="forward of 1/pp of the model; either gradient takes as "
        "long; default: 160/pp")  # fmt: skip
    add("--timeout-s", type=float, default=60.0, help="for every wait")
    add("--svg", type=Path, help="also draw them to this file")
    add("--markdown", action="store_true", help="print the section of the documentation instead")
    add_only(parser)
    add_json(parser)
    args = parser.parse_args()
    systems = chosen(parser, all_systems(), args.only)
    weights = {system.name: system.weight_copies for system in systems}
    launch.clean_up_when_terminated()
    measured = []
    for pp in args.pp:
        forward_s, count = (args.forward_ms or 160 / pp) / 1e3, args.microbatches or 4 * pp
        sizes = Sizes(pp, count, forward_s, 2, args.steps, args.timeout_s)
        over_gloo = [s for s in systems if isinstance(s, Own) and s.transport == "torch"]
        # Gloo's share shows at the first size already.
        left_out = [] if args.only or pp == args.pp[0] else over_gloo
        measured.append(compare([s for s in systems if s not in left_out], sizes, args.rounds))
    texts = []
    for found in measured:
        lines = table(found.figures, weights)
        if args.markdown:
            lines = f"```text\n{lines}\n```"
        texts.append(f"{lines}\n\n{found.conditions}.\n\n{explain(found.figures)}")
        for name, reason in found.failures.items():
            print(f"\n{name}: {reason}", file=sys.stderr)
    text = "\n\n".join(texts)
    print(f"<!-- measured: begin -->\n{text}\n<!-- measured: end -->" if args.markdown else text)
    if args.json:
        write_json(args.json, {"measured": [
            {"conditions": found.conditions, "pp": found.sizes.pp,
             "num_microbatches": found.sizes.num_microbatches, "forward_s": found.sizes.forward_s,
             "systems": {n: {**f.as_dict(), "weights": weights[n]}
                         for n, f in found.figures.items()},
             "failures": found.failures}
            for found in measured
        ]})  # fmt: skip
    if args.svg:
        args.svg.write_text(draw({m.size: m.figures for m in measured}), encoding="utf-8")
    return 1 if any(found.failures for found in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
