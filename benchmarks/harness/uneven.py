"""Steps of experts with unequal loads, on an emulated device that its kernels share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.schedules import Placement

from . import ranks
from .command import markdown
from .loads import Size, Workload, imbalance_of, with_imbalance, workloads
from .metrics import seconds_of
from .ops import LAYERS, ExpertTimes, Sizes
from .systems import Peer, System, loop2, own

NUM_EXPERT_RANKS = 4
_SCHEDULE = "zb-h1"
_EXCHANGE = 0.3
"""Ratio of a layer's all-to-all to its computation."""
_HEADER = ("loads", "imbalance", "order", "T/work", "T/busiest", "gain")


def systems(num_waiting: int) -> list[System]:
    """Return Megatron's own overlap, and a table with pairs, without and with waiting W."""
    upstream = Peer(
        "megatron-core interleaved, overlap",
        "megatron_core",
        "interleaved-overlap, experts",
        loop2,
    )
    compared: list[System] = [upstream]
    for number in (0, num_waiting):
        name = f"{_SCHEDULE}, pairs"
        if number:
            name += f", {number} waiting"
        compared.append(
            own(name, _SCHEDULE, transport="torch", pairs=True, waiting_weights=number)
        )
    return compared


def cases(size: Size, imbalances: Sequence[float]) -> dict[str, Workload]:
    """Return the workloads and random draws with these imbalances."""
    by_name = dict(workloads(size))
    for imbalance in imbalances:
        name = f"drawn, {imbalance:g}"
        by_name[name] = Workload(with_imbalance(size, imbalance))
    return by_name


def busiest_s(times: ExpertTimes, placement: Placement, size: Size) -> float:
    """Return the busiest rank's work in one step, which no order can beat."""
    longest_s = 0.0
    for stages in placement.stages_of:
        for expert_rank in range(size.num_ranks):
            work_s = 0.0
            for stage in stages:
                for microbatch in range(size.num_microbatches):
                    work_s += times.stage_work_s(stage, microbatch, expert_rank)
            longest_s = max(longest_s, work_s)
    return longest_s


@dataclass(frozen=True)
class Result:
    """One system's step with one workload."""

    step_s: float
    busiest_s: float


def measure(
    compared: Sequence[System],
    sizes: Sizes,
    by_name: dict[str, Workload],
    *,
    connections: int,
    exchange_share: float,
    weight_waves: int,
) -> tuple[dict[str, dict[str, Result]], str]:
    """Run all workloads under each system. Return the results by workload, and the device."""
    size = Size(LAYERS * sizes.pp, sizes.num_microbatches, NUM_EXPERT_RANKS)
    where = ranks.emulated_device(sizes, connections, shared=1)
    device = where.pop("conditions")
    results: dict[str, dict[str, Result]] = {name: {} for name in by_name}
    for system in compared:
        print(system.name, file=sys.stderr)
        times = []
        for workload in by_name.values():
            times.append(
                ExpertTimes(
                    sizes.forward_s,
                    system.share(sizes.pp),
                    all_to_all=_EXCHANGE,
                    exchange_share=exchange_share,
                    weight_waves=weight_waves,
                    experts=workload.experts,
                    attention=workload.attention,
                )
            )
        steps = ranks.run(
            ranks.measure, system, sizes, times,
            repeats=2 * len(times), replicas=NUM_EXPERT_RANKS, **where,
        )  # fmt: skip
        placement = system.placement(sizes.pp)
        for number, name in enumerate(by_name):
            step_s = seconds_of([of_rank[number] for of_rank in steps])
            floor_s = busiest_s(times[number], placement, size)
            results[name][system.name] = Result(step_s, floor_s)
    return results, device


def table(
    results: dict[str, dict[str, Result]],
    by_name: dict[str, Workload],
    work_s: float,
) -> str:
    """Return the results as a Markdown table. Gains are over the same pairs without waiting."""
    rows = []
    for workload_name, by_system in results.items():
        imbalance = f"{imbalance_of(by_name[workload_name].experts):.2f}"
        pairs = by_system.get(f"{_SCHEDULE}, pairs")
        for system_name, result in by_system.items():
            gain = ""
            if pairs is not None:
                gain = f"{pairs.step_s / result.step_s:.3f}"
            rows.append(
                (
                    workload_name,
                    imbalance,
                    system_name,
                    f"{result.step_s / work_s:.3f}",
                    f"{result.step_s / result.busiest_s:.3f}",
                    gain,
                )
            )
    return markdown(_HEADER, rows)
