"""Exchanges between the two roles besides tensors, for training loops.

Every rank of a disaggregated job must call these functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import update_num_microbatches

from megatron_ext.disaggregation import step, worlds
from megatron_ext.disaggregation.job import current

__all__ = ["share_evaluation", "share_exit", "shared_progress"]

_PROGRESS = (
    "iteration",
    "num_floating_point_operations_so_far",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
)


def shared_progress(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Resume forward ranks from the checkpoint that backward ranks have loaded.

    Args:
        counters: Counters of the training, by the names of Megatron's arguments; may hold others.

    Returns:
        The counters of the backward ranks; empty in an ordinary job.
    """
    if current() is None:
        return {}
    mine = {name: counters[name] for name in _PROGRESS if name in counters}
    found: dict[str, Any] = worlds.hand_over(
        "progress of the checkpoint", mine, to="forward", pause=time.sleep
    )
    consumed = found.get("consumed_train_samples", counters["consumed_train_samples"])
    update_num_microbatches(consumed_samples=consumed, verbose=False)
    return found


def share_exit(chunks: Sequence[torch.nn.Module], *, is_over: bool) -> bool:
    """Return whether backward ranks have found that the training ends with this step.

    Args:
        chunks: The model of this rank, in its wrappers.
        is_over: What this rank has found; ignored on forward ranks.
    """
    link = step.link_of_this_rank(chunks)
    return bool(
        worlds.hand_over("end of the training", is_over, to="forward", pause=link.wire.poll)
    )


def share_evaluation(
    chunks: Sequence[torch.nn.Module], losses: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Send the losses of an evaluation from forward ranks, which run it, to the ranks that log.

    Args:
        chunks: The model of this rank, in its wrappers.
        losses: On forward ranks, the losses of the last stage.

    Returns:
        The losses, in fp32 on the host.
    """
    link = step.link_of_this_rank(chunks)
    shared = worlds.hand_over(
        "losses of an evaluation",
        {key: loss.tolist() for key, loss in losses.items()},
        to="backward",
        pause=link.wire.poll,
    )
    return {key: torch.tensor(loss, dtype=torch.float32) for key, loss in shared.items()}
