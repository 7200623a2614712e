"""The cost of this package on top of the work: imports, patches, executor, tables and traces.

    python benchmarks/overhead.py WHAT ... [--quick]

`imports`   the time that `import megatron_ext` adds to `import megatron.core`, alternating, each in
            a fresh interpreter. On devices other than CUDA, the patches keep Megatron from
            compiling its fused functions and therefore from importing torch's compiler, which takes
            longer than everything else. The fair baseline there is Megatron without the compiler.
`patches`   the number of calls per training step that go through patch points while no feature is
            in use, times how much longer a call through a point takes than one through a function
            inserted by hand.
`executor`  processor time per action that a step spends outside Megatron's `forward_step` and
            `backward_step` (or, for W, outside the split), in the best step: on one rank, which
            sends no messages, and on two, where most actions receive or send one. Megatron's own
            loop is measured in the same way.
`tables`    processor time to generate, validate and simulate tables for 64 ranks and 1024
            micro-batches.
`tracing`   the median difference between a traced step and the one before it, on sleeping stages,
            and every schedule's step as `plan --trace-dir` predicts it from the trace of 1f1b
            alone, followed by the time and the bytes per event.
`digests`   processor time that `MEGATRON_EXT_DIGESTS` adds to a step of a GPT on two ranks: the
            median over rounds of two steps, one of which records.
`traces`    time and memory for `aggregate` and `report` on the traces of simulated steps: an
            interleaved pipeline of 8 ranks, 8 hosts and 8 replicas, 100 iterations of 1000 spans
            per rank. If the headless browser that the report's tests use is installed, it then
            opens the report, and an empty page as the baseline.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks
from benchmarks.harness.command import machine, markdown, options
from benchmarks.harness.ops import Sizes
from benchmarks.harness.systems import PEERS, VARIANTS, Own, own
from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.schedules import generate, simulate, validate
from megatron_ext.tracing.recorder import Recorder
from megatron_ext.tracing.records import Header
from tests.ranks import run_ranks, train_here
from tests.tools.trace import browser
from tests.tools.trace.runs import write_run

_IMPORTS = {
    "megatron.core": "import megatron.core",
    "the same without torch's compiler":
        "import torch; torch.compile = lambda f=None, **_: f or (lambda g: g); "
        "import megatron.core",
    "megatron_ext and megatron.core": "import megatron_ext, megatron.core",
}  # fmt: skip


def imports(quick: bool) -> str:
    """Compare imports. The kinds alternate, so other load affects all of them equally."""
    environment = {**os.environ, "PYTHONPATH": sys.path[0]}
    times_s: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for turn in range(2 if quick else 12):
        for name, statement in _IMPORTS.items():
            code = (
                f"import time; b = time.perf_counter(); {statement}; "
                "print(time.perf_counter()-b)"
            )
            argv = [sys.executable, "-W", "ignore", "-c", code]
            printed = subprocess.check_output(
                argv, env=environment, text=True, timeout=300
            )
            if turn:  # the first run fills the file and bytecode caches
                times_s[name].append(float(printed.split()[-1]))
    ours_s = times_s["megatron_ext and megatron.core"]
    rows = [
        (name, f"{statistics.median(times):.3f}",
         *(f"{1e3 * (best(ours_s) - best(times)):.0f}" for best in (statistics.median, min)))
        for name, times in times_s.items()
    ]  # fmt: skip
    head = ("import", "s", "ours adds, ms (medians)", "ms (minima); bar: 100")
    return markdown(head, rows)


_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 "
    "--min-lr 1e-5 --eval-iters 0 --eval-interval 99 --log-interval 1 --mock-data --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 512 --pipeline-model-parallel-size 2"
)


def count_calls(flags: list[str]) -> list[tuple[int, float]]:
    """Train as one rank and return, per step, the calls through patch points and the seconds."""
    import megatron_ext
    from megatron_ext import devices
    from megatron_ext.patches.registry import REGISTRY

    devices.current()  # must precede the import of Megatron
    from megatron.training import training

    dispatch = REGISTRY._dispatch
    train_step = training.train_step
    count = 0
    steps = []

    def counting(*call: Any) -> Any:
        nonlocal count
        count += 1
        return dispatch(*call)

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = count
        begin_s = time.perf_counter()
        result = train_step(*args, **kwargs)
        steps.append((count - before, time.perf_counter() - begin_s))
        return result

    megatron_ext.deactivate()
    vars(REGISTRY)["_dispatch"] = counting
    megatron_ext.activate()
    training.train_step = timed
    train_here("gpt", flags)
    return steps


def point_s() -> tuple[float, float]:
    """Return the time of a call through a patch point and through a function inserted by hand."""
    import megatron_ext  # noqa: F401 - its registry is active
    from megatron_ext.patches.point import Patch, PatchPoint, Site
    from megatron_ext.patches.registry import REGISTRY

    def own(value: int) -> int:
        return value

    def wrap(call: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def by_hand(*args: Any, **kwargs: Any) -> Any:
        return wrap(own, None, args, kwargs)

    site = Site("none:own", [Patch("benchmark.own", "none:own", "measured", wrap)])
    point = PatchPoint(
        own, partial(REGISTRY._dispatch, site), enabled=lambda: REGISTRY.active
    )
    count = 100_000
    through, plain = (
        min(timeit.repeat(partial(function, 1), number=count)) / count
        for function in (point, by_hand)
    )
    return through, plain


def patches(quick: bool) -> str:
    """Compare the cost of patch points with a step of a small GPT on two stages."""
    flags = [*_MODEL.split(), "--train-iters", "4" if quick else "30"]
    steps = run_ranks(2, count_calls, flags, timeout_s=300)[-1][2:]
    calls, step_s = (statistics.median(column) for column in zip(*steps, strict=True))
    through_s, plain_s = point_s()
    share = calls * (through_s - plain_s) / step_s
    rows = [
        ("calls through patch points in a step", f"{calls:g}"),
        ("a call through one, us", f"{1e6 * through_s:.2f}"),
        ("a call through a function put there by hand, us", f"{1e6 * plain_s:.2f}"),
        ("a step, ms", f"{1e3 * step_s:.0f}"),
        ("what patch points add to it, % (bar: 1)", f"{100 * share:.3f}"),
    ]
    return markdown(("", "found"), rows)


def over_gloo(labels: Iterable[str]) -> list[Own]:
    """Return our schedules, running over gloo."""
    return [
        own(f"megatron_ext, gloo: {label}", label, transport="torch")
        for label in labels
    ]


def executor(quick: bool) -> str:
    """Run ops that take no time under Megatron's loop and under our executor."""
    count, steps = (8, 2) if quick else (64, 20)
    rows = []
    for system in (PEERS["megatron-core 1F1B"], *over_gloo(("1f1b", "gpipe", "zb-h1"))):
        overheads_s = (
            ranks.overhead_s(system, Sizes(n, count, 0.0, 2, steps)) for n in (1, 2)
        )
        rows.append((system.name, *(f"{1e6 * seconds:.0f}" for seconds in overheads_s)))
    return markdown(("us for each action", "one rank (bar: 50)", "two ranks"), rows)


def tables(quick: bool) -> str:
    """Generate, validate and simulate tables, and take the best of three runs."""
    pp, num_microbatches = (8, 32) if quick else (64, 1024)
    rows = []
    for name in ("interleaved", "1f1b", "zb-v"):
        runs = []
        for _ in range(1 if quick else 3):
            ticks = [time.process_time()]
            schedule = generate(name, pp, num_microbatches)
            for phase in (None, validate, simulate):
                if phase is not None:
                    phase(schedule)
                ticks.append(time.process_time())
            runs.append(
                [end_s - begin_s for begin_s, end_s in itertools.pairwise(ticks)]
            )
        best = min(runs, key=sum)
        rows.append((name, *(f"{seconds:.2f}" for seconds in (*best, sum(best)))))
    head = (f"s, pp {pp}, {num_microbatches} micro-batches", "generate", "validate", "simulate",
            "together (bar: 2)")  # fmt: skip
    return markdown(head, rows)


def traced_s(system: Own, sizes: Sizes, directory: Path) -> list[tuple[float, float]]:
    """Return this rank's step times by round: an untraced step and the traced step after it.

    Both steps belong to the same run, so other load on the machine affects them equally. The trace
    is written to `directory`. `sizes.steps` is the number of rounds.
    """
    from megatron_ext.config.active import required
    from megatron_ext.tracing.session import Session, subscribe

    tracing = Tracing(interval=2, iterations=1, directory=directory)
    config = replace(system.config, tracing=tracing)
    step, probe = ranks.prepare(replace(system, config=config), sizes)
    subscribe(required())  # the groups exist, but the runtime does not yet
    [observer] = required().observers
    assert isinstance(observer, Session)
    times_s = []
    # Every other step is traced, including the first. An extra step at the start makes
    # each round end with a traced one.
    for _ in range(2 * sizes.warmup + 1 + 2 * sizes.steps):
        probe.meet()
        begin_s = time.perf_counter()
        observer.begin_iteration(sizes.num_microbatches)
        step()
        observer.end_iteration()
        times_s.append(time.perf_counter() - begin_s)
    probe.meet()
    observer.close()
    measured = times_s[2 * sizes.warmup + 1 :]
    return list(zip(measured[::2], measured[1::2], strict=True))


def event(directory: Path, count: int = 1000, rounds: int = 50) -> tuple[float, float]:
    """Return how many seconds of processor time and how many file bytes an event takes."""
    header = Header(0, 0, 0, 0, (1, 1, 1), 1, "host", "boot", 1, 1)
    recorder = Recorder(
        lambda: (directory, header, None),
        sampling=Tracing(interval=rounds, iterations=rounds),
    )
    best_s = float("inf")
    for iteration in range(rounds):
        recorder.begin_iteration(iteration)
        begin_s = time.process_time()
        for number in range(count):
            about = {
                "from": 2,
                "for": "F",
                "stage": 3,
                "microbatch": number,
                "bytes": 8 << 20,
            }
            recorder.add("receive", recorder.stamp(), about)
        recorder.end_iteration()
        best_s = min(
            best_s, time.process_time() - begin_s
        )  # includes writing the iteration
    recorder.close()
    [path] = directory.iterdir()
    return best_s / count, path.stat().st_size / (count * rounds)


def tracing(quick: bool) -> str:
    """Trace every other step of each schedule."""
    from megatron_ext.tools.trace.aggregate import read_run
    from megatron_ext.tools.trace.forecast import predict

    pp, count, forward_ms, num_rounds = (2, 4, 5, 1) if quick else (4, 8, 40, 5)
    sizes = Sizes(pp, count, forward_ms / 1e3, 1, num_rounds)
    systems = over_gloo(("1f1b",) if quick else VARIANTS)
    costs_by_system: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="megatron_ext_tracing_") as scratch:
        for system in systems:
            folder = Path(scratch) / system.name
            by_rank = ranks.run(traced_s, system, sizes, folder, repeats=2)
            # The slowest rank determines the step time.
            steps = [[max(kind) for kind in zip(*rank_times, strict=True)]
                     for rank_times in zip(*by_rank, strict=True)]  # fmt: skip
            costs_by_system[system.name] = (
                statistics.median(plain for plain, _ in steps),
                statistics.median(traced / plain - 1 for plain, traced in steps),
            )
        run = Path(scratch) / "megatron_ext, gloo: 1f1b"
        predicted = {p.schedule: p.step_s for p in predict(read_run(run)).predictions}
        event_s, event_bytes = event(Path(scratch) / "events")
    rows = []
    for system in systems:
        table = system.pipeline(pp, count).schedule(count // system.weight_copies)
        (step_s, added), guess_s = costs_by_system[system.name], predicted[table.label]
        rows.append((system.name, f"{1e3 * step_s:.1f}", f"{100 * added:.1f}",
                     f"{1e3 * guess_s:.1f}", f"{100 * (guess_s / step_s - 1):.1f}"))  # fmt: skip
    head = (f"pp {pp}, {count} micro-batches, forward {forward_ms} ms, {num_rounds} x 2 steps",
            "step ms", "tracing %", "predicted ms", "off %")  # fmt: skip
    text = f"an event: {1e6 * event_s:.1f} us of processor time, {event_bytes:.0f} file bytes"
    return f"{markdown(head, rows)}\n\n{text}"


_MEASURED = """
import resource, subprocess, sys, time
begin_s = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=sys.stderr, timeout=1200, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - begin_s, used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
"""Runs a command from a small process, because a fork of this process would start out with its
memory."""
_DRAWN = """
requestAnimationFrame(() => { document.body.dataset.drawn = 1; });
document.getElementById("data")?.remove();  // the browser prints the page: not its data as well
"""


def opening_s(page: Path) -> float:
    """Return the time from a browser's start until a page is drawn, as the best of three."""
    found_s = []
    for _ in range(3):
        begin_s = time.perf_counter()
        browser.look(page, _DRAWN)
        found_s.append(time.perf_counter() - begin_s)
    return min(found_s)


def traces(quick: bool) -> str:
    """Aggregate a large run's traces and show them."""
    pp, replicas, count, iterations = (2, 2, 4, 2) if quick else (8, 8, 80, 100)
    rows = []
    with tempfile.TemporaryDirectory(prefix="megatron_ext_traces_") as scratch:
        directory = write_run(
            Path(scratch), schedule="interleaved", pp=pp, replicas=replicas, microbatches=count,
            iterations=iterations, clock_of=lambda rank: f"boot-{rank}",
        )  # fmt: skip
        size = sum(path.stat().st_size for path in directory.iterdir())
        for command in ("aggregate", "report"):
            words = [
                sys.executable,
                "-m",
                "megatron_ext",
                command,
                "--trace-dir",
                str(directory),
            ]
            printed = subprocess.check_output(
                [sys.executable, "-c", _MEASURED, *words], text=True
            )
            took_s, cpu_s, kib = map(float, printed.split())
            rows.append(
                (command, f"{took_s:.1f}", f"{cpu_s:.1f}", f"{kib / 2**20:.2f} GiB")
            )
        if any(map(shutil.which, browser.NAMES)):
            page = directory / "report.html"
            empty = Path(scratch) / "empty.html"
            empty.write_text("<!doctype html><html><body></body></html>")
            name = (
                f"the browser with the report ({page.stat().st_size / 2**20:.1f} MiB)"
            )
            for subject, file in (
                (name, page),
                ("the browser with an empty page", empty),
            ):
                rows.append((subject, f"{opening_s(file):.1f}", "", ""))
    run = (
        f"{pp * replicas} ranks, {iterations} iterations of {count} micro-batches: "
        f"{size / 2**20:.0f} MiB"
    )
    return markdown((run, "s", "s of processors", "of a process at most"), rows)


def digests(quick: bool) -> str:
    """Measure how much time recording digests adds to a step."""
    hidden_size, num_rounds = (64, 3) if quick else (1024, 16)
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(
            2, _steps_with_digests, folder, hidden_size, num_rounds, timeout_s=1800
        )
    rows = []
    for rank, rounds in enumerate(by_rank):
        added = [recorded_s / plain_s - 1 for recorded_s, plain_s in rounds]
        recorded_s, plain_s = map(statistics.median, zip(*rounds, strict=True))
        rows.append(
            [
                str(rank),
                f"{plain_s * 1e3:.0f}",
                f"{recorded_s * 1e3:.0f}",
                f"{statistics.median(added):.1%}",
                f"{min(added):.1%} to {max(added):.1%}",
            ]
        )
    head = ["rank", "step, ms of processor time", "with digests"]
    head += ["added (bar: 10 %)", "of rounds"]
    title = (
        f"hidden size {hidden_size}, 4 layers, zb-h1, 4 micro-batches of 256 tokens, "
        f"{num_rounds} x 2 steps"
    )
    return f"{title}\n\n{markdown(head, rows)}"


def _steps_with_digests(
    folder: str, hidden_size: int, num_rounds: int
) -> list[tuple[float, float]]:
    """Train as one rank; return processor times by round: a step with digests and one without."""
    from megatron_ext.config.active import required
    from megatron_ext.tracing.digest_files import VARIABLE
    from tests.tracing import recorded

    recorded.SEQUENCE = 256
    training = recorded.Training(
        f"{folder}/digests",
        "zb-h1",
        hidden_size=hidden_size,
        settings={"message_timeout_s": 600},
    )
    rounds = []
    with recorded.built(training) as (build, chunks):
        # The first step creates the table, the transport and the hooks.
        recorded.step(training, build, chunks, 0)
        observers = required().observers
        [recorder] = observers
        for number in range(num_rounds):
            times_s: dict[bool, float] = {}
            # Every other round starts with the step without digests,
            # which cancels steady drift.
            for records in (True, False) if number % 2 else (False, True):
                observers.clear()
                os.environ.pop(VARIABLE, None)
                if records:
                    observers.append(recorder)
                    os.environ[VARIABLE] = training.folder
                begin_s = time.process_time()
                recorded.step(training, build, chunks, 2 * number + len(times_s) + 1)
                times_s[records] = time.process_time() - begin_s
            rounds.append((times_s[True], times_s[False]))
        observers[:] = [recorder]
        os.environ[VARIABLE] = training.folder
    return rounds


_PARTS = {
    part.__name__: part
    for part in (imports, patches, executor, tables, tracing, digests, traces)
}


def main() -> None:
    """Measure and print the tables."""
    parser = options(__doc__, "small and short, for a test")
    parser.add_argument("what", nargs="+", choices=list(_PARTS), help="what to measure")
    args = parser.parse_args()
    ranks.clean_up_when_terminated()
    print(machine())
    for name in args.what:
        print(f"\n{_PARTS[name](args.quick)}", flush=True)


if __name__ == "__main__":
    from benchmarks import (
        overhead,  # ranks look up what they run by its module's name
    )

    overhead.main()
