"""Time of a step without overhead, in forwards of the mean micro-batch on a rank."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.schedule_harness.systems import Own, System
from megatron_ext.schedules import Costs, generate, simulate
from megatron_ext.schedules.search.dynamic import simulate_dynamic

__all__ = ["step_time"]


def step_time(system: System, pp: int, scales: Sequence[float]) -> float:
    """Return the makespan of one replica.

    Megatron's interleaved schedule counts as our table of the same order, which lacks its extra
    warm-up for overlapped messages: here they take no time.

    Args:
        system: The runtime and its schedule.
        pp: Ranks of the pipeline.
        scales: What each micro-batch costs, in the order in which they run.
    """
    costs = Costs(microbatch_scale=tuple(scales))
    if not isinstance(system, Own):
        return simulate(generate("interleaved", pp, len(scales), chunks=2), costs).makespan
    pipeline = system.pipeline(pp, len(scales))
    if pipeline.dynamic is None:
        return simulate(pipeline.full, costs).makespan
    return simulate_dynamic(
        pipeline.full, lambda rank: pipeline.policy(len(scales), rank), costs
    ).makespan
