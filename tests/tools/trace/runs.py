"""Writes directories of traces of simulated steps, with the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pipeline_config import Tracing
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.communication import exchanges
from megatron_ext.tracing.recorder import HostClock, Recorder
from megatron_ext.tracing.records import (
    ACTION_NAMES,
    FILE_NAME,
    SCHEDULE_FILE,
    Header,
    directory_name,
)

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, SliceSizes

MS = 1_000_000
COSTS = Costs(0.010, 0.012, 0.008, latency=0.001)


class Clock(HostClock):
    """A clock that shows the time it is set to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def stamp(self) -> int:
        return self.now_ns


def write_run(
    parent: Path,
    *,
    schedule: str = "1f1b",
    pp: int = 4,
    replicas: int = 1,
    microbatches: int = 8,
    iterations: int = 3,
    costs: Costs = COSTS,
    clock_offset_ns: Callable[[int], int] = lambda rank: 0,
    clock_of: Callable[[int], str] = lambda rank: "boot",
    settings: dict[str, object] | None = None,
    wire_of: Callable[[int, int], str] | None = None,
    sizes: Sequence[tuple[int, int]] = (),
    ramp: Sequence[int] = (),
    pairs: bool = False,
    slices: int = 1,
    slice_sizes: SliceSizes = (),
    optimizer_s: float = 0.0,
    run: str = "",
    sampling: Tracing = Tracing(iterations=100),  # noqa: B008 - it is frozen
    exchange_ms: Callable[[int, Action, int], float] | None = None,
) -> Path:
    """Simulate some steps and record them; return the folder of the run.

    With `sizes` (tokens and sum of squares of each micro-batch), the first rank records them. With
    `ramp`, the first steps have these numbers of micro-batches, the others `microbatches`. With
    `slice_sizes`, the slices of all steps depend on lengths. With `exchange_ms` (of a global rank,
    an action and a layer), stages have two layers that exchange tokens.
    """
    cut = {"pairs": pairs, "slices": slices, "costs": Costs(attention=costs.attention)}
    table = generate(schedule, pp, microbatches, **cut)
    counts = [*ramp, *[microbatches] * (iterations - len(ramp))]
    tables = {count: generate(schedule, pp, count, **cut) for count in counts}
    if slice_sizes:
        tables[microbatches] = generate(
            schedule, pp, microbatches, slice_sizes=slice_sizes
        )
    timelines = {count: simulate(tables[count], costs) for count in counts}
    world = (replicas, pp, 1)
    directory = parent / directory_name(world, dynamic=False)
    default_settings = {
        "schedule": table.label,
        "transport": "torch",
        "num_layers": 16 * pp,
    }
    for rank, data in product(range(pp), range(replicas)):
        clock = Clock()
        now_ns = 3_600_000 * MS + clock_offset_ns(rank)
        header = Header(
            replicas * rank + data, data, rank, 0, world, replicas * pp,
            "host", clock_of(rank), now_ns, 1,
            {"torch": "2"} | default_settings | (settings or {}), run,
        )  # fmt: skip
        recorder = Recorder(
            lambda header=header: (directory, header, None), clock, sampling
        )
        if wire_of is not None:
            recorder.wires |= {
                peer: wire_of(rank, peer) for peer in range(pp) if peer != rank
            }
        origin = 5_000 * MS + clock_offset_ns(rank)
        for number, count in enumerate(counts, start=1):
            timeline = timelines[count]
            begins = tables[count].begins(rank)
            step_ns = round(1e9 * timeline.makespan) + 20 * MS
            clock.now_ns = origin
            recorder.begin_iteration(number)
            for exchange, at in zip(
                exchanges(tables[count], rank), begins, strict=True
            ):
                times = timeline.starts[rank][at], timeline.ends[rank][at]
                halves = [exchange]
                if exchange.partner is not None:
                    first = exchange._replace(inputs=exchange.all_inputs, outputs=())
                    halves = [
                        first,
                        exchange.partner._replace(
                            inputs=(), outputs=exchange.all_outputs
                        ),
                    ]
                for half in halves:
                    if exchange_ms is not None and half.action.kind != "W":
                        of_rank = partial(exchange_ms, header.rank, half.action)
                        record_exchanges(recorder, clock, half.action, of_rank)
                    record(recorder, clock, origin, half, *times, costs)
            clock.now_ns = origin + step_ns - MS
            if optimizer_s:
                recorder.add("optimizer", clock.now_ns - round(1e9 * optimizer_s), {})
            recorder.notes |= {
                "out_of_order": 2,
                "microbatches": count,
                "memory_bytes": 0,
            }
            if slice_sizes:
                recorder.notes["slice_sizes"] = slice_sizes
            if rank == 0:
                recorder.notes["lengths"] = dict(enumerate(sizes))
            recorder.end_iteration()
            origin += step_ns
        recorder.close()
    (directory / SCHEDULE_FILE).write_text(table_files.json_text(table))
    return directory


def record(recorder, clock, origin, exchange, start, end, costs) -> None:
    stage, kind, microbatch, part = exchange.action
    begin = origin + round(1e9 * start)
    for arriving in exchange.inputs:
        about = about_message(arriving.message)
        before, clock.now_ns = clock.now_ns, begin
        if begin > before:
            recorder.add(
                "wait", before, {"cause": "input", "on": arriving.peer, **about}
            )
        recorder.add("receive", begin, {"from": arriving.peer, **about, "bytes": 1024})
    if costs.all_to_all and kind == "F":
        exchanged = begin + round(1e9 * costs.all_to_all * costs.forward)
        about = {"of": kind, "stage": stage, "microbatch": microbatch}
        recorder.add("exchange", begin, about, exchanged)
    clock.now_ns = origin + round(1e9 * end)
    attributes = {
        "microbatch": microbatch,
        "model_chunk": 0,
        "stage": stage,
        "pp_rank": stage,
    }
    attributes |= {"slice": part} if part else {}
    recorder.add(ACTION_NAMES[kind], begin, attributes)
    for leaving in exchange.outputs:
        about = about_message(leaving.message)
        recorder.add("send", clock.now_ns, {"to": leaving.peer, **about, "bytes": 1024})


def record_exchanges(recorder, clock, action, exchange_ms) -> None:
    for layer in range(2):
        about = {"of": action.kind, "stage": action.stage, "layer": layer}
        about["microbatch"] = action.microbatch
        end_ns = clock.now_ns + round(MS * exchange_ms(layer))
        recorder.add("exchange", clock.now_ns, about, end_ns)


def about_message(message) -> dict[str, object]:
    about = {
        "for": message.kind,
        "stage": message.stage,
        "microbatch": message.microbatch,
    }
    return about | ({"slice": message.slice} if message.slice else {})


def arrows(
    events: Iterable[dict[str, Any]],
) -> tuple[dict[int, float], dict[int, float]]:
    """Return when arrows in a Chrome trace start and end, by the number that connects the two."""
    return (
        {e["bind_id"]: e["ts"] for e in events if e.get("flow_out")},
        {e["bind_id"]: e["ts"] + e["dur"] for e in events if e.get("flow_in")},
    )


def trace_of(directory: Path, rank: int) -> Path:
    return directory / FILE_NAME.format(0, rank, 0)
