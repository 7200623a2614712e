"""Bubble, traffic and order of the steps since the last log line, for TensorBoard and W&B.

Every rank already counts the work of its steps; at each log line, one reduction of a few numbers
sums the counts of all ranks. That is an additional collective, so only runs with `--trace` or a
writer do it. It covers schedules of this package only: under Megatron's own, waiting cannot be
distinguished from work.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_ext.config import active

if TYPE_CHECKING:
    from collections.abc import Mapping

_WRITERS = ("tensorboard_dir", "wandb_project")
_SHOWN = "MEGATRON_EXT_STEP_BUBBLE"
"""Set to 1 on all ranks by programs that show `upstream/person_view.py` instead of the log."""
# Share of the pipelines' time in which ranks compute nothing; bytes of activations and gradients of
# all ranks per second; share of the actions that ran before an earlier action of the table.
_BUBBLE, _SENT, _JUMPED = (
    "pipeline/bubble",
    "pipeline/sent bytes per s",
    "pipeline/out of order",
)


def are_asked_for(settings: Mapping[str, Any]) -> bool:
    """Return whether the scalars have a destination.

    All ranks get the same answer from Megatron's settings.
    """
    traces = active.required().config.tracing is not None
    shown = os.environ.get(_SHOWN) == "1"
    return traces or shown or any(settings.get(name) for name in _WRITERS)


def report(iteration: int, writer: Any, wandb: Any) -> None:
    """Write the scalars of a log line, with the writers that this rank has.

    The rank that logs to a terminal also prints a line. Collective over all ranks.
    """
    import torch.distributed as dist

    scalars = since_last()
    if scalars is None:
        return
    if writer is not None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    if wandb is not None:
        wandb.log(scalars, iteration)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last and (os.environ.get(_SHOWN) == "1" or sys.stdout.isatty()):
        # Write where the line of the step follows, so that the two stay together.
        sys.stdout.write(f"{line_of(scalars)}\n")
        sys.stdout.flush()


def line_of(scalars: Mapping[str, float]) -> str:
    """Return the progress line."""
    bubble = ""
    if _BUBBLE in scalars:
        bubble = f"bubble {100 * scalars[_BUBBLE]:.1f} %, "
    return (
        f" pipeline: {bubble}{scalars[_SENT] / 2**20:.1f} MiB/s between ranks, "
        f"{100 * scalars[_JUMPED]:.1f} % of the actions out of order"
    )


def since_last() -> dict[str, float] | None:
    """Return the scalars of all ranks since the last call, by tag; None if no step ran."""
    import torch
    import torch.distributed as dist

    from megatron_ext import devices
    from megatron_ext.runtime.runtime import in_force, totals

    # Totals count all steps so far, so the difference to the last call is new.
    work, sent_bytes = totals()
    counts = [
        work.busy_s, work.wall_s, float(work.out_of_order), float(work.actions), float(sent_bytes),
    ]  # fmt: skip
    now_s = time.monotonic()
    runtimes = in_force()
    # Before the first call, use the time in steps as the time that has passed.
    last_s, last_counts = runtimes.last_counts or (
        now_s - work.wall_s,
        [0.0] * len(counts),
    )
    runtimes.last_counts = now_s, counts
    new = [count - last for count, last in zip(counts, last_counts, strict=True)]
    new.append(now_s - last_s)
    # The default group reduces tensors of the device that it was created for.
    backend = devices.current()
    device = backend.torch_device(dist.get_node_local_rank(0))
    # Use a row for each rank, so that a single sum also yields the largest value.
    ranks = torch.zeros(
        dist.get_world_size(), len(new), dtype=torch.float32, device=device
    )
    ranks[dist.get_rank()] = torch.tensor(new, dtype=torch.float32)
    dist.all_reduce(ranks)
    busy_s, wall_s, jumped, actions, sent, passed_s = ranks.T.tolist()
    if not max(wall_s) or not sum(actions):
        return None
    scalars = {
        _SENT: sum(sent) / max(fmean(passed_s), 1e-9),
        _JUMPED: sum(jumped) / sum(actions),
    }
    if (
        backend.is_host
    ):  # on other devices, the call of an action ends while they still compute
        # Ranks without further actions wait after their step for the last rank of all.
        scalars[_BUBBLE] = max(0.0, 1 - fmean(busy_s) / max(wall_s))
    return scalars
