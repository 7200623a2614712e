"""Turns the processes in one role into an ordinary Megatron job.

In every process, torch.distributed spans only the processes in the same role. The backward ranks
thus form an ordinary Megatron job with data-parallel groups, an optimizer, a gradient norm,
checkpoints and logs, and the forward ranks form a second one. All processes share a single store,
through which transports find each other and the roles exchange a few small values.
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
# While a process waits for a value, the pauses between checks grow from the first to the longest.
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1


@dataclass
class RoleRuntime:
    """State that persists from step to step."""

    job: Job
    wire: Transport
    """Transfers tensors and weights between this process and its neighbours."""
    weights: WeightSender | WeightReceiver
    layers: Sequence[torch.nn.Module] | None
    """This stage's layers if forward ranks ship layer inputs, otherwise None."""
    tables: dict[int, Table] = field(default_factory=dict)
    """Number of micro-batches -> table."""
    is_evaluating: bool = False
    """Whether an evaluation, whose weights have already arrived, is in progress."""
    has_ignored_input: bool = False
    """Whether a stage input that got no gradient has been logged."""


@dataclass
class Roles:
    """State of a process with a role; lives as long as the process's configuration is active."""

    store: Store
    """Shared by the processes in both roles."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of values exchanged so far, by value name."""
    replay: Replay | None = None
    """The replay of shipped activations in progress, if any."""
    sorts_experts: bool = False
    """Whether the current forward pass orders a token's experts the same way as a forward pass with
    gradients."""
    runtime: RoleRuntime | None = None
    """State that persists from step to step; None before the first step."""

    def close(self) -> None:
        """Close the wire to the other ranks."""
        if self.runtime is not None:
            self.runtime.wire.close()


def join(backend: str) -> None:
    """Connect to the job's store and start torch.distributed within this role."""
    job = _job()
    timeout = timedelta(seconds=job.timeout_s)
    # Use the launcher's rendezvous, so that no address besides MASTER_ADDR is needed.
    everyone = rendezvous(
        "env://",
        rank=job.rank,
        world_size=job.ranks.num_ranks,
        timeout=timeout,
    )
    store, _, _ = next(iter(everyone))
    # Otherwise, a process that waits for a key would give up after torch's default of 5 minutes.
    store.set_timeout(timeout)
    # torchrun keeps the store when it restarts the ranks, so this prefix hides values from the
    # previous attempt. If nodes in a c10d rendezvous count restarts differently, they wait for each
    # other until they time out.
    run = active.required().environment.run
    prefix = "/".join(["megatron_ext/run", *run])
    store = PrefixStore(prefix, store)
    active.required().roles = Roles(store)
    # Use one prefix per role, because both roles use the same names for groups and
    # keys.
    dist.init_process_group(
        backend,
        store=PrefixStore(f"megatron_ext/{job.role}", store),
        rank=job.role_rank,
        world_size=job.ranks.role_size(job.role),
        timeout=timeout,
    )


def roles_in_force() -> Roles:
    """Return this process's role state under the active configuration."""
    roles = active.required().roles
    assert isinstance(roles, Roles), "join() comes first"
    return roles


def beat() -> None:
    """Signal progress to ranks that are waiting for an evaluation."""
    if _is_last_in_role(_job()):
        roles_in_force().store.add(_BEATS, 1)


@contextmanager
def ending_both_roles() -> Iterator[None]:
    """Make the other role exit as well if Megatron calls `sys.exit()` in the block.

    Megatron does so if a checkpoint is missing or unreadable. The exit code is 0, which launchers
    do not treat as a failure, so the other role would keep waiting for this one.
    """
    try:
        yield
    except SystemExit as ended:
        # As in Python, no code means 0, and a code that is not a number means 1.
        code = int(ended.code is not None)
        if isinstance(ended.code, int):
            code = ended.code
        name_and_code = [_job().name_of(None), code]
        roles_in_force().store.set(_ENDED, json.dumps(name_and_code))
        raise


def _end_with_other_role(store: Store) -> None:
    """Exit if a process in the other role has exited before the end of training."""
    if not store.check([_ENDED]):
        return
    name, code = json.loads(store.get(_ENDED))
    _LOG.warning(
        "%s stopped the training with exit code %d; forward ranks exit as well",
        name,
        code,
    )
    raise SystemExit(code)


def hand_over(
    subject: str,
    value: Any,
    *,
    to: str,
    pause: Callable[[float], object],
) -> Any:
    """Send a small value from one role's last process to all processes in the other role.

    Both roles must make the same calls for each subject in the same order.

    Args:
        subject: The value's name, which also appears in error messages.
        value: The JSON-serialisable value to send. Only the last process in the sending role reads
            it.
        to: The receiving role.
        pause: Waits for a number of seconds and raises an error if another process has died.

    Returns:
        The received value in the receiving role; the argument `value` in the sending role.

    Raises:
        SystemExit: A process in the other role has exited (see `ending_both_roles`).
        TransportTimeout: The other role has neither sent the value nor signalled progress.
    """
    job = _job()
    roles = roles_in_force()
    store = roles.store
    number = roles.counts.get(subject, 0) + 1
    roles.counts[subject] = number
    key = f"{_PREFIX}/{subject}/{number}"
    # In both roles, the last process holds the last stage, which has the losses.
    if job.role != to:
        if _is_last_in_role(job):
            # Use JSON, never pickle: anyone who can reach the store can write to it.
            store.set(key, json.dumps(value))
        return value
    # Do not use `store.wait`, which would not notice that a rank in the other role has
    # died. Poll often, because forward ranks wait here in every step if the job may
    # stop on its own.
    beats = store.add(_BEATS, 0)
    pause_s = _FIRST_PAUSE_S
    # Read the clock instead of adding up pauses, because a message may cut a pause short.
    until = time.monotonic() + job.timeout_s
    while not store.check([key]):
        # Before the wire is open, `pause` cannot notice that the other role has exited.
        _end_with_other_role(store)
        if time.monotonic() >= until:
            # An evaluation may take longer than the time-out as long as it makes progress.
            before = beats
            beats = store.add(_BEATS, 0)
            if beats == before:
                raise TransportTimeout(
                    f"{job.role} rank {job.rank} waited {job.timeout_s:g} s for the other "
                    f"role's {subject}, but that role made no progress; see its ranks' logs"
                )
            until = time.monotonic() + job.timeout_s
        pause(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 1.25 * pause_s)
    return json.loads(store.get(key))


def leave() -> None:
    """Wait until all processes in the job are ready to exit."""
    # Otherwise, the process that hosts the store could exit while other processes still
    # use it.
    job = _job()
    store = roles_in_force().store
    barrier(
        store,
        job.ranks.num_ranks,
        f"{_PREFIX}/left",
        job.timeout_s,
        rank=job.rank,
    )


def _is_last_in_role(job: Job) -> bool:
    """Return whether this process has its role's highest rank."""
    return job.role_rank == job.ranks.role_size(job.role) - 1


def _job() -> Job:
    job = active.job()
    assert job is not None
    return job
