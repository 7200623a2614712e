"""Starts a job again after a failure, on hosts that answer, spare ones included.

Every attempt is a run of its own, with preflight, logs and a result: RUN_ID, RUN_ID-r1, RUN_ID-r2.
Where it goes on is the matter of the script, which loads its last whole checkpoint: Megatron writes
the name of a checkpoint after all of it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.errors import LaunchError
from megatron_ext.launch import preflight
from megatron_ext.launch.plan import flag_value

if TYPE_CHECKING:
    from megatron_ext.launch.connection import Connection
    from megatron_ext.launch.plan import Node, Plan
    from megatron_ext.launch.ssh import Ssh
    from megatron_ext.launch.supervise import Outcome

__all__ = ["Restarts", "run"]

_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 60.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restarts:
    """How often, and on which hosts, a job may start again."""

    limit: int = 0
    """Restarts within `window_s`; a job that fails faster has a cause that does not go away."""
    window_s: float = 3600.0
    spares: tuple[Node, ...] = ()
    """Hosts that take no part until another one does not answer."""
    timeout_s: float = 30.0
    """For hosts to answer."""


async def run(
    plan: Plan, ssh: Ssh, restarts: Restarts, attempt: Callable[[Plan], Awaitable[Outcome]]
) -> Outcome:
    """Run a job until it ends well, is stopped, or has used up its restarts.

    Args:
        plan: The first attempt.
        ssh: How hosts are reached.
        restarts: How often it may start again, and where.
        attempt: Runs a plan to its end.

    Raises:
        LaunchError: An attempt cannot start; too few hosts are left, one line for each.
    """
    hosts = (*plan.nodes, *restarts.spares)
    if restarts.limit and flag_value(plan.command, "--load") is None:
        _logger.warning("without --save and --load, a restart begins with the first iteration")
    failed_at: list[float] = []
    number, current = 0, plan
    while True:
        outcome = await attempt(current)
        now = time.monotonic()
        failed_at = [at for at in failed_at if now - at < restarts.window_s]
        if outcome.failure is None or len(failed_at) >= restarts.limit:
            return outcome
        failed_at.append(now)
        number += 1
        backoff_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (len(failed_at) - 1))
        _logger.warning(
            "restart %d of %d in %g s, because of %s",
            len(failed_at), restarts.limit, backoff_s, outcome.failure,
        )  # fmt: skip
        await _interruptible(backoff_s)
        nodes = await _answering(replace(plan, nodes=hosts), len(plan.nodes), ssh, restarts)
        current = replace(plan, run_id=f"{plan.run_id}-r{number}", nodes=nodes)


async def _interruptible(seconds: float) -> None:
    """Sleep; between attempts a signal ends the launcher, as no job is there to be stopped."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)
    await asyncio.sleep(seconds)


async def _answering(
    everywhere: Plan, count: int, ssh: Ssh, restarts: Restarts
) -> tuple[Node, ...]:
    """Return the first hosts that answer, in their order."""
    asked = replace(everywhere, run_id=f"{everywhere.run_id}-ask")
    connections: list[Connection | None] = [None] * len(asked.nodes)
    try:
        answers = await preflight.ask_all(asked, ssh, restarts.timeout_s, connections)
    finally:
        await preflight.call_off(connections)
    pairs = list(zip(everywhere.nodes, answers, strict=True))
    found = tuple(node for node, answer in pairs if not isinstance(answer, str))[:count]
    silent = [f"{node.host.name}: {answer}" for node, answer in pairs if isinstance(answer, str)]
    for line in silent:
        _logger.warning("%s", line)
    if len(found) < count:
        raise LaunchError(
            f"the job needs {count} hosts and {len(found)} of {len(pairs)} answer; mend them, or "
            f"give more spare hosts (--spares)"
        )
    return found
