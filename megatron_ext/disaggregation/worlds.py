"""Turns the processes of one role into an ordinary Megatron job.

torch.distributed in each process knows only the processes of its role. So the backward ranks form
an ordinary Megatron job with its own data-parallel groups, optimizer, gradient norm, checkpoints
and logs, and the forward ranks form a second one. All processes share one store: transports find
each other in it, and the few values below travel through it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.rendezvous import rendezvous

from megatron_ext.config import active
from megatron_ext.errors import TransportTimeout

if TYPE_CHECKING:
    from megatron_ext.config.roles import Job
    from megatron_ext.disaggregation.ship import Replay
    from megatron_ext.disaggregation.weights import WeightReceiver, WeightSender
    from megatron_ext.runtime.program import Table
    from megatron_ext.transport.base import Transport

_LOG = logging.getLogger(__name__)

_PREFIX = "megatron_ext/fbd"
_BEATS = f"{_PREFIX}/beats"
_ENDED = f"{_PREFIX}/ended"
# Between two looks for a value.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1


@dataclass
class RoleRuntime:
    """State that lasts from step to step."""

    job: Job
    wire: Transport
    """Carries tensors and weights to the neighbours of this process."""
    weights: WeightSender | WeightReceiver
    layers: Sequence[torch.nn.Module] | None
    """Layers of this stage if their inputs are shipped, else None."""
    tables: dict[int, Table] = field(default_factory=dict)
    """By number of micro-batches."""
    is_evaluating: bool = False
    """Whether an evaluation is in progress, which has its weights."""


@dataclass
class Roles:
    """State that a process of a role keeps under a configuration."""

    store: Store
    """Shared by the processes of both roles."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of values exchanged so far, by name."""
    replay: Replay | None = None
    """The replay of shipped activations that is in progress."""
    sorts_experts: bool = False
    """Whether the forward in progress orders the experts of a token as one with gradients does."""
    runtime: RoleRuntime | None = None
    """State from step to step, after the first one."""

    def close(self) -> None:
        """Close the wire to the other ranks."""
        if self.runtime is not None:
            self.runtime.wire.close()


def join(backend: str) -> None:
    """Find all processes of the job, then start torch.distributed among those of one role."""
    job = _job()
    timeout = timedelta(seconds=job.timeout_s)
    # The launcher's own rendezvous, so a role needs no address besides MASTER_ADDR.
    everyone = rendezvous("env://", rank=job.rank, world_size=job.ranks.num_ranks, timeout=timeout)
    store, _, _ = next(iter(everyone))
    # Without it a process that waits for a key gives up after torch's own 5 minutes.
    store.set_timeout(timeout)
    # torchrun keeps it when it starts the ranks again: values of the attempt before are not ours.
    # Nodes of a c10d rendezvous that count restarts differently do not meet, until the time-out.
    store = PrefixStore("/".join(("megatron_ext/run", *active.required().environment.run)), store)
    active.required().roles = Roles(store)
    # With a prefix for each role: both number their groups and keys alike.
    dist.init_process_group(
        backend,
        store=PrefixStore(f"megatron_ext/{job.role}", store),
        rank=job.role_rank,
        world_size=job.ranks.role_size(job.role),
        timeout=timeout,
    )


def roles_in_force() -> Roles:
    """Return what this process keeps under the active configuration."""
    roles = active.required().roles
    assert isinstance(roles, Roles), "join() comes first"
    return roles


def beat() -> None:
    """Signal progress to the ranks that wait for an evaluation."""
    job = _job()
    if job.role_rank == job.ranks.role_size(job.role) - 1:
        roles_in_force().store.add(_BEATS, 1)


@contextmanager
def ending_both_roles() -> Iterator[None]:
    """Let the other role end as well where Megatron calls `sys.exit()` in the block.

    It does so where a checkpoint is missing or cannot be read. The exit code is 0, which no
    launcher takes for a failure, and the other role would wait for this one.
    """
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        roles_in_force().store.set(_ENDED, json.dumps([_job().name_of(None), code]))
        raise


def _end_with_other_role(store: Store) -> None:
    """End this process if a process of the other role has ended before the training."""
    if not store.check([_ENDED]):
        return
    name, code = json.loads(store.get(_ENDED))
    _LOG.warning("%s ended the training with exit code %d; so do forward ranks", name, code)
    raise SystemExit(code)


def hand_over(subject: str, value: Any, *, to: str, pause: Callable[[float], object]) -> Any:
    """Send a small value from the last process of one role to all processes of the other.

    Both roles call it equally often, in the same order for each subject.

    Args:
        subject: Name of the value, also for error messages.
        value: The value on the last process of the sending role, JSON-serialisable; ignored
            elsewhere.
        to: The receiving role.
        pause: Waits some seconds, and raises an error if another process has died.

    Returns:
        The sent value on the receiving role; the argument `value` on the other.

    Raises:
        SystemExit: A process of the other role has ended, see `ending_both_roles`.
        TransportTimeout: The other role has neither sent the value nor signalled progress.
    """
    job, roles = _job(), roles_in_force()
    store, number = roles.store, roles.counts.get(subject, 0) + 1
    roles.counts[subject] = number
    key = f"{_PREFIX}/{subject}/{number}"
    # Of either role the last process holds the last stage, which has the losses.
    if job.role != to:
        if job.role_rank == job.ranks.role_size(job.role) - 1:
            # JSON, not pickles: whoever reaches the store may write into it.
            store.set(key, json.dumps(value))
        return value
    # Not `store.wait`: it would not notice that a rank of the other role has died. Forward ranks
    # wait in each step of a job that ends by itself, so a value is seen soon after it is there.
    beats, pause_s = store.add(_BEATS, 0), _FIRST_PAUSE_S
    until = time.monotonic() + job.timeout_s  # a pause may end early, when a poll is woken
    while not store.check([key]):
        # Before the wire is open, nothing else notices that the other role has ended.
        _end_with_other_role(store)
        if time.monotonic() >= until:
            # An evaluation may take longer than the time-out, as long as it goes on.
            before, beats = beats, store.add(_BEATS, 0)
            if beats == before:
                raise TransportTimeout(
                    f"{job.role} rank {job.rank} waited {job.timeout_s:g} s for the {subject} of "
                    "the other role, which made no progress; see the logs of its ranks"
                )
            until = time.monotonic() + job.timeout_s
        pause(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 1.25 * pause_s)
    return json.loads(store.get(key))


def leave() -> None:
    """Wait for all processes of the job."""
    # Otherwise the host of the store would exit while others still use it.
    job, store = _job(), roles_in_force().store
    barrier(store, job.ranks.num_ranks, f"{_PREFIX}/left", job.timeout_s, rank=job.rank)


def _job() -> Job:
    job = active.job()
    assert job is not None
    return job
