"""Time and memory of `megatron-ext aggregate` and `report` on the trace of a large run.

    python benchmarks/trace_aggregate.py      # 64 ranks, 100 iterations, 1,000 events in each:
                                              # two to three minutes on two cores
    python benchmarks/trace_aggregate.py --ranks 8 --keep /tmp/run

The trace is synthetic: an interleaved pipeline of 8 ranks and 8 replicas, in the recorder's format.
An event is a span, two records of the file. If the headless browser of the report's tests is
installed, it then opens the report, and an empty page as the baseline.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_ext.tracing.records import (
    Header,
    Span,
    directory_name,
    file_name,
    header_line,
    iteration_line,
)
from tests.tools.trace import browser

STEP_NS = 400_000_000
_DRAWN = """
requestAnimationFrame(() => { document.body.dataset.drawn = 1; });
document.getElementById("data")?.remove();  // the browser prints the page: not its data as well
"""


def spans(rank: int, ranks: int, count: int) -> list[Span]:
    """Return the spans of one iteration: receive, wait, action, send, and again."""
    found, now = [], 1000
    last, after = (rank - 1) % ranks, (rank + 1) % ranks
    for index in range(count // 4):
        microbatch, stage = index // 2 % 512, rank + ranks * (index % 2)
        message = {"for": "F", "stage": stage, "microbatch": microbatch}
        action = {"microbatch": microbatch, "model_chunk": index % 2, "stage": stage, "pp_rank": 3}
        sent = {"to": after, "for": "F", "stage": stage + 1, "microbatch": microbatch}
        for name, length, about in (
            ("wait", 20_000, {"cause": "input", "on": last, **message}),
            ("receive", 5_000, {"from": last, **message, "bytes": 8 << 20}),
            ("forward" if index % 3 else "backward", 1_200_000, action),
            ("send", 8_000, {**sent, "bytes": 8 << 20}),
        ):
            found.append(Span(name, now, now + length, about))
            now += length + 500
    return found


def generate(directory: Path, ranks: int, iterations: int, events: int) -> int:
    """Write the traces of a run; return their bytes."""
    replicas = 8 if ranks % 8 == 0 else 1
    sizes = (replicas, ranks // replicas, 1)
    directory.mkdir(parents=True, exist_ok=True)
    total = 0
    for rank in range(ranks):
        data, pipeline = rank % replicas, rank // replicas
        header = Header(rank, data, pipeline, 0, sizes, "host", f"boot-{rank // 8}", 1, 1)
        path = directory / file_name(data, pipeline, 0)
        body = spans(rank, ranks, events)
        with path.open("w", encoding="utf-8") as file:
            file.write(header_line(header))
            for number in range(1, iterations + 1):
                end = {"iteration": number, "duration_wall": STEP_NS, "memory_bytes": 1 << 30}
                file.write(iteration_line(header.row, number * STEP_NS, body, end))
            file.write("]\n")
        total += path.stat().st_size
    return total


def main() -> None:
    """Make a run, aggregate it, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--events", type=int, default=1000, help="spans of one iteration")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the run here and keep it")
    args = parser.parse_args()
    print("```text")
    with tempfile.TemporaryDirectory(prefix="megatron_ext_trace_") as scratch:
        root = args.keep or Path(scratch)
        directory = root / directory_name((8, args.ranks // 8, 1), dynamic=False)
        size = generate(directory, args.ranks, args.iterations, args.events)
        count = args.ranks * args.iterations * args.events
        print(f"{args.ranks} ranks x {args.iterations} iterations x {args.events} events: "
              f"{size / 2**20:.0f} MiB, {size / count:.0f} bytes for an event")  # fmt: skip
        for command in ("aggregate", "report"):
            words = [sys.executable, "-m", "megatron_ext", command, "--trace-dir", str(directory)]
            before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(words, check=True, stdout=sys.stderr)
            took_s = time.perf_counter() - begin_s
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"{command}: {took_s:.1f} s ({cpu_s:.1f} s of processors), at most "
                  f"{after.ru_maxrss / 2**20:.2f} GiB in a process", flush=True)  # fmt: skip
        if any(map(shutil.which, browser.NAMES)):
            page, empty = directory / "report.html", Path(scratch) / "empty.html"
            empty.write_text("<!doctype html><html><body></body></html>")
            print(f"the report ({page.stat().st_size / 2**20:.1f} MiB) opens in "
                  f"{opening_s(page):.1f} s, an empty page in {opening_s(empty):.1f} s, both with "
                  f"the start of the browser")  # fmt: skip
    print("```")


def opening_s(page: Path) -> float:
    """Return how long a browser takes from its start until a page is drawn, at best of three."""
    found_s = []
    for _ in range(3):
        begin_s = time.perf_counter()
        browser.look(page, _DRAWN)
        found_s.append(time.perf_counter() - begin_s)
    return min(found_s)


if __name__ == "__main__":
    main()
