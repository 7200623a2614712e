"""The published bubble and activation peak of each schedule, which hold for every table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.schedules import Costs, Schedule


def bubble(schedule: Schedule, costs: Costs) -> float | None:
    """Return makespan minus ideal for even stages and free links; None if no formula is known."""
    pp, m, work = schedule.pp, schedule.total_microbatches, costs.work
    is_even = costs.forward == costs.input == costs.weight
    match schedule.name:
        case "gpipe" | "1f1b":
            return (pp - 1) * work
        case "interleaved" if m % pp == 0:
            return (pp - 1) * work * pp / schedule.num_stages
        case "zb-h1" if m >= pp:
            forward, backward, weight = costs.forward, costs.input, costs.weight
            return (pp - 1) * max(forward, backward, forward + backward - weight)
        case "zb-v" if m >= pp and is_even:
            return (pp - 1) * costs.forward / 2
        case "dualpipe-v" if m >= 2 * pp and is_even:
            return (pp - 1) * costs.forward / 2
        case "dualpipe" if m >= 2 * pp and is_even:
            return (pp / 2 - 1) * costs.forward
        case "fbd":
            return (pp - 2) * work + schedule.ships_activations * pp * costs.forward
        case "bitpipe" if schedule.options["order"] == "paper" and m == pp:
            return (pp / 2 - 1) * max(costs.forward, costs.backward)
        case "bitpipe" if schedule.options["order"] == "paper" and m % pp == 0:
            is_usual = costs.backward == 2 * costs.forward
            return (m // pp + 1) * (pp - 2) / 2 * costs.forward if is_usual else None
        case "bitpipe" if schedule.options["order"] == "zb" and pp <= 40 and is_even:
            is_reached = m in (pp, 2 * pp - 2, 2 * pp, 3 * pp, 4 * pp)
            return (pp - 2) / 4 * costs.forward if is_reached else None
    return None


def peak(schedule: Schedule) -> float:
    """Return an upper bound on the activations of any rank, in Ma."""
    pp, m = schedule.pp, schedule.total_microbatches
    chunks = schedule.num_stages / schedule.placement.num_ranks
    return {
        "gpipe": m,
        "1f1b": min(pp, m),
        "interleaved": min((2 * (pp - 1) + (chunks - 1) * pp + 1) / chunks, m),
        "zb-h1": min(pp, m),
        "zb-v": min(pp, m),
        "v-half": min((pp + 2) / 2, m),
        "dualpipe": pp + 1,
        "dualpipe-v": pp + 0.5,
        "bitpipe": min(pp, m),
        "fbd": 2,
    }[schedule.name]
