"""Steps on a device that runs behind its host: their measurement on a rank, figures and a table."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.common.tables import ratios

from .metrics import draws_of
from .noise import noisy
from .ops import Step

if TYPE_CHECKING:
    from .device_probe import DeviceProbe
    from .ops import OpTimes, Sizes
    from .systems import System

__all__ = ["DeviceFigures", "DeviceStep", "Row", "device_figures", "device_table",
           "measure_on_device", "measured", "speeds"]  # fmt: skip


class DeviceStep(NamedTuple):
    """Records of one rank in one step."""

    step: Step
    host_waits: dict[str, int]
    """How often the host waited for the device, by line."""


def measure_on_device(
    system: System, sizes: Sizes, scenario: str, repetitions: int = 1
) -> list[DeviceStep]:
    """Return what this rank recorded in each measured step of a scenario.

    Args:
        system: What is measured.
        sizes: Its `steps` are one repetition; they differ in their draws.
        scenario: Name of the disturbance.
        repetitions: How often these steps run, with the same draws.
    """
    from .device_probe import DeviceProbe  # torch: not by the parent, which imports this module

    return measured(system, sizes, DeviceProbe, noisy(system, sizes, scenario), repetitions)


def measured(
    system: System,
    sizes: Sizes,
    kind: type[DeviceProbe],
    draws: Sequence[OpTimes],
    repetitions: int,
) -> list[DeviceStep]:
    """Return what this rank recorded in a step of each draw, and again for each repetition."""
    import torch
    from torch_musa import host_waits

    from megatron_ext import devices

    device = devices.current()
    rank = int(os.environ["RANK"])
    device.bind(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        device.distributed_backend, timeout=timedelta(seconds=sizes.timeout_s)
    )
    probe = kind(draws[0], device.torch_device(rank))
    step = system.prepare(sizes.pp, sizes.num_microbatches, probe, sizes.timeout_s)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay launches
    found = []
    for times in (*draws[:1] * sizes.warmup, *list(draws) * repetitions):
        probe.times = times
        gc.collect()
        probe.set_clock()
        torch.distributed.barrier()
        host_waits.reset()
        begin_s = time.perf_counter()
        step()
        waits = {
            f"{what} at {line}": count
            for (what, line, thread), count in host_waits.by_line().items()
            if "megatron-ext" not in thread  # those beside a staged transport are there to wait
        }
        device.synchronize()
        end_s = time.perf_counter()
        found.append(DeviceStep(Step(begin_s, end_s, *probe.take(), 0.0), waits))
    torch.distributed.barrier()  # nobody leaves while others still wait for its messages
    return found[sizes.warmup :]


class Row(NamedTuple):
    """The key of one row of the table."""

    system: str
    scenario: str


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of one system in one scenario.

    Lists have one item for each draw, that of its shortest repetition: other load only adds time.
    """

    seconds: list[float]
    """Of the step, from its first rank's begin until all devices are idle."""
    order_s: list[float]
    """Time of the order that ran with exact ops and free messages."""
    overheads: list[float]
    """Share of that order, with its ops as they were, that runtime and messages added."""
    op_inflation: float
    """Time in ops over the time that they should take, minus 1."""
    ideal_s: float
    """Work of one rank in a step without noise."""
    num_actions: int
    """Of all ranks in all steps, all repetitions included."""
    host_waits: dict[str, int]
    """How often a host waited for its device in these, by line."""

    @property
    def of_order(self) -> float:
        """Median over the draws of the time of a step over that of its order."""
        return statistics.median(ratios(self.seconds, self.order_s))

    @property
    def waits_per_action(self) -> float:
        """How often a host waited for its device, for each action."""
        return sum(self.host_waits.values()) / self.num_actions


def device_figures(
    steps: Sequence[Sequence[DeviceStep]], system: System, sizes: Sizes, scenario: str
) -> DeviceFigures:
    """Return the figures of a measurement.

    Args:
        steps: By rank of the world, then by step. All draws, and again for each repetition.
        system: What was measured.
        sizes: How much was run.
        scenario: Name of the disturbance.
    """
    records = [[each.step for each in rank] for rank in steps]
    found = draws_of(records, system.placement(sizes.pp), noisy(system, sizes, scenario))
    waits: Counter[str] = Counter()
    for each in chain.from_iterable(steps):
        waits.update(each.host_waits)
    return DeviceFigures(
        seconds=found.seconds,
        order_s=found.order_s,
        overheads=found.overheads,
        op_inflation=found.op_inflation,
        ideal_s=3 * sizes.forward_s * sizes.num_microbatches,
        num_actions=sum(len(step.ops) for step in chain.from_iterable(records)),
        host_waits=dict(waits),
    )


def speeds(
    found: Mapping[Row, DeviceFigures], tables: Mapping[str, str]
) -> dict[Row, tuple[float, float]]:
    """Return, of each dynamic order, how much faster than its table it was, and should have been.

    Args:
        found: All figures.
        tables: Name of a dynamic system -> that of its table.

    Returns:
        Medians over the draws: the time of the table over that of the dynamic order, as measured,
        and with the simulated times of both orders that ran.
    """
    made = {}
    for row, dynamic in found.items():
        table = found.get(Row(tables.get(row.system, ""), row.scenario))
        if table is not None:
            made[row] = (
                statistics.median(ratios(table.seconds, dynamic.seconds)),
                statistics.median(ratios(table.order_s, dynamic.order_s)),
            )
    return made


_HEADER = (
    "system", "scenario", "T ms", "T/ideal", "T/order", "runtime %", "ops %", "waits/action",
    "speed", "of orders",
)  # fmt: skip


def device_table(
    found: Mapping[Row, DeviceFigures], faster: Mapping[Row, tuple[float, float]]
) -> str:
    """Return the figures as a Markdown table."""
    lines = [_HEADER, ("---", "---", *["---:"] * (len(_HEADER) - 2))]
    for row, figures in found.items():
        step_s = statistics.median(figures.seconds)
        lines.append(
            (
                *row,
                f"{1e3 * step_s:.0f}",
                f"{step_s / figures.ideal_s:.3f}",
                f"{figures.of_order:.3f}",
                f"{100 * statistics.median(figures.overheads):.1f}",
                f"{100 * figures.op_inflation:.1f}",
                f"{figures.waits_per_action:.2f}",
                *(f"{ratio:.3f}" for ratio in faster.get(row, ())),
                *[""] * (0 if row in faster else 2),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
