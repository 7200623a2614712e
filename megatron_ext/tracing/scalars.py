"""Reports the bubble, traffic and order since the last log line to TensorBoard and W&B.

Every rank counts the work in its steps. At each log line, an all-reduce of a few numbers sums the
counts over all ranks. Only runs with `--trace` or a writer pay for this additional collective. The
scalars cover only this package's schedules, because waiting cannot be distinguished from work in
Megatron's own schedules.
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
"""Environment variable that programs set to 1 on all ranks if they show `upstream/person_view.py`
instead of the log."""
_BUBBLE = "pipeline/bubble"
"""Fraction of the pipelines' time in which ranks are idle."""
_SENT = "pipeline/sent bytes per s"
"""Bytes of activations and gradients that all ranks send per second."""
_JUMPED = "pipeline/out of order"
"""Fraction of actions that ran before an earlier action in the table."""


def are_asked_for(settings: Mapping[str, Any]) -> bool:
    """Return whether the scalars have a destination.

    All ranks must get the same result, because `report` is collective, so check the settings rather
    than the writers, which exist on only one rank.
    """
    traces = active.required().config.tracing is not None
    shown = os.environ.get(_SHOWN) == "1"
    has_writer = any(settings.get(name) for name in _WRITERS)
    return traces or shown or has_writer


def report(iteration: int, writer: Any, wandb: Any) -> None:
    """Write the scalars for a log line to the writers that this rank has.

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
        # Write to stdout, where Megatron prints the step's log line right after this.
        sys.stdout.write(f"{line_of(scalars)}\n")
        sys.stdout.flush()


def line_of(scalars: Mapping[str, float]) -> str:
    """Return the progress line."""
    bubble = ""
    if _BUBBLE in scalars:
        bubble = f"bubble {100 * scalars[_BUBBLE]:.1f} %, "
    sent_mib_per_s = scalars[_SENT] / 2**20
    jumped_percent = 100 * scalars[_JUMPED]
    return (
        f" pipeline: {bubble}{sent_mib_per_s:.1f} MiB/s between ranks, "
        f"{jumped_percent:.1f} % of the actions out of order"
    )


def since_last() -> dict[str, float] | None:
    """Return the scalars across all ranks since the last call, by tag; None if no step ran."""
    import torch
    import torch.distributed as dist

    from megatron_ext import devices
    from megatron_ext.runtime.runtime import in_force, totals

    # The totals cover all steps so far, so subtract the totals at the last call.
    work, sent_bytes = totals()
    counts = [
        work.busy_s,
        work.wall_s,
        float(work.out_of_order),
        float(work.actions),
        float(sent_bytes),
    ]
    now_s = time.monotonic()
    runtimes = in_force()
    # On the first call, use the time within steps as the elapsed time.
    first_s = now_s - work.wall_s
    zeros = [0.0] * len(counts)
    last_s, last_counts = runtimes.last_counts or (first_s, zeros)
    runtimes.last_counts = now_s, counts
    # The order of these values is that of the unpacking below.
    increases = []
    for count, last_count in zip(counts, last_counts, strict=True):
        increases.append(count - last_count)
    increases.append(now_s - last_s)
    # The default group's backend only accepts tensors on its device.
    backend = devices.current()
    device = backend.torch_device(dist.get_node_local_rank(0))
    # Give each rank a row, so that the sum gathers all values, including the largest wall time.
    increases_by_rank = torch.zeros(
        dist.get_world_size(),
        len(increases),
        dtype=torch.float32,
        device=device,
    )
    increases_by_rank[dist.get_rank()] = torch.tensor(increases, dtype=torch.float32)
    dist.all_reduce(increases_by_rank)
    busy_s, wall_s, jumped, actions, sent, passed_s = increases_by_rank.T.tolist()
    if not max(wall_s) or not sum(actions):
        return None
    scalars = {
        _SENT: sum(sent) / max(fmean(passed_s), 1e-9),
        _JUMPED: sum(jumped) / sum(actions),
    }
    # On other devices, the call that runs an action returns while the device is still computing, so
    # the busy time is unknown.
    if backend.is_host:
        # Divide by the longest wall time: ranks that finish early wait for the last rank.
        scalars[_BUBBLE] = max(0.0, 1 - fmean(busy_s) / max(wall_s))
    return scalars
