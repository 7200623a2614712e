"""Restarts a job after a failure, on the hosts that answer, spare hosts included.

Every attempt is a run of its own, with preflight, logs and a result: RUN_ID, RUN_ID-r1, RUN_ID-r2.
The training script resumes from its last complete checkpoint: Megatron records a checkpoint's
iteration only after it has written all of it.
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
from megatron_ext.tools.launch import preflight
from megatron_ext.tools.launch.plan import flag_value

if TYPE_CHECKING:
    from megatron_ext.tools.launch.connection import Connection
    from megatron_ext.tools.launch.plan import Node, Plan
    from megatron_ext.tools.launch.ssh import Ssh
    from megatron_ext.tools.launch.supervise import Outcome

__all__ = ["Restarts", "run"]

_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 60.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restarts:
    """The restart policy of a job: how often, and on which hosts."""

    limit: int = 0
    """Maximum number of restarts within `window_s`. More failures suggest a permanent cause."""
    window_s: float = 3600.0
    spares: tuple[Node, ...] = ()
    """Hosts that stay idle until another one does not answer."""
    timeout_s: float = 30.0
    """How long hosts may take to answer before a restart."""


async def run(
    plan: Plan, ssh: Ssh, restarts: Restarts, attempt: Callable[[Plan], Awaitable[Outcome]]
) -> Outcome:
    """Run a job until it succeeds, is stopped, or has used up its restarts.

    Args:
        plan: Plan of the first attempt.
        ssh: Runs commands on the hosts.
        restarts: Restart policy.
        attempt: Runs a plan to its end.

    Returns:
        The outcome of the last attempt.

    Raises:
        LaunchError: An attempt cannot start, or too few hosts answer.
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
    """Sleep with default signal handlers: without a job to stop, a signal ends the launcher."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.remove_signal_handler(number)
    await asyncio.sleep(seconds)


async def _answering(
    everywhere: Plan, count: int, ssh: Ssh, restarts: Restarts
) -> tuple[Node, ...]:
    """Return the first `count` hosts that answer, in the order of the plan.

    Raises:
        LaunchError: Fewer hosts answer.
    """
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
