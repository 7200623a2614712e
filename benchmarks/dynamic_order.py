"""The gain of a dynamic order: all comparisons of docs/results-dynamic-orders.md.

Stages are emulated:

    python benchmarks/dynamic_order.py [--simulate] [--draws N] [--repetitions N] [--forward-ms T]
        [--json FILE]

Processes and messages are real; stages emulate computation by sleeping (see schedules.py). All
systems get the same draws of noise. The numbers are speed-ups, the time of the reference over that
of the system: the median of the draws (lowest .. highest). Each draw counts with its shortest
repetition, since other load only adds time. Scenarios without randomness have equal draws and get
fewer repetitions. The defaults take 20 minutes on two idle cores.

The last column is a computed upper bound for any order, with unlimited memory: each rank has to
wait for its first input and do all of its work, and then other ranks have to finish theirs.

The final table is the overhead of runtime and messages, with ops of the length of schedules.py: the
measured time over that of a replay of the same order with the measured ops.

`--simulate` computes the same tables without peers, and those of the policies that were tried.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))  # the ranks are those of the tests

from benchmarks.common.json_output import add_json, write_json  # noqa: E402
from benchmarks.schedule_harness import comparisons, launch, tried  # noqa: E402


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="compute what to expect instead")
    parser.add_argument("--draws", type=int, default=5, help="seeds of the noise")
    parser.add_argument("--repetitions", type=int, default=5, help="of each draw")
    parser.add_argument(
        "--forward-ms",
        type=float,
        help="forward of 1/pp of the model; default: 8, 10 at pp 8, 40 for what the runtime adds",
    )
    parser.add_argument("--pp", type=int, nargs="+", default=[4, 8], help="sizes: 4, 8 or both")
    add_json(parser)
    return parser.parse_args(argv)


def conditions(args: argparse.Namespace) -> str:
    """Say how the figures were found."""
    if args.simulate:
        return "Simulated; median of the draws (lowest .. highest)."
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "megatron-core"))
    return (
        f"Measured; median of the draws (lowest .. highest). {packages}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores."
    )


def main() -> int:
    """Measure and print; 1 if a system failed."""
    args = parse()
    launch.clean_up_when_terminated()
    found = []
    for part in comparisons.PARTS:
        if part.pp not in args.pp or (args.simulate and part.most_overhead is not None):
            continue
        sizes = part.sizes(args.draws, args.forward_ms)
        if args.simulate:
            found.append(comparisons.simulate(part, sizes))
        else:
            found.append(comparisons.measure(part, sizes, args.repetitions))
    name = "simulated" if args.simulate else "measured"
    texts = [conditions(args), *map(comparisons.markdown, found)]
    if args.simulate:
        texts += [tried.markdown(each.part.sizes(args.draws)) for each in found]
    print(f"<!-- {name}: begin -->\n" + "\n\n".join(texts) + f"\n<!-- {name}: end -->")
    if args.json:
        content: dict[str, Any] = {"conditions": texts[0]}
        content["parts"] = [
            {"size": each.part.name, "how": each.how, **each.measured.as_dict()} for each in found
        ]
        write_json(args.json, content)
    return 1 if any(each.measured.failures for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
