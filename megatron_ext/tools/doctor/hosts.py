"""Checks of the hosts of a hostfile: reachable, same versions, room for logs, clocks, addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ext.tools.doctor.finding import Finding, fail, ok, warn
from megatron_ext.tools.launch import preflight

if TYPE_CHECKING:
    from megatron_ext.tools.launch.connection import Connection
    from megatron_ext.tools.launch.plan import Plan
    from megatron_ext.tools.launch.ssh import Ssh

__all__ = ["check_hosts"]


def check_hosts(plan: Plan, ssh: Ssh, timeout_s: float) -> Iterator[Finding]:
    """Run the preflight checks of a launch on every host, without starting anything.

    Args:
        plan: A plan whose command needs no torchrun.
        ssh: How to reach the hosts.
        timeout_s: Time-out for hosts that do not answer.
    """
    answers = asyncio.run(_ask(plan, ssh, timeout_s))
    names = [node.host.name for node in plan.nodes]
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, str):
            found, _, remedy = answer.partition("; ")
            yield fail(f"host {name}", found, remedy)
    if any(isinstance(answer, str) for answer in answers):
        return  # nothing to compare with
    findings = [answer for answer in answers if not isinstance(answer, str)]
    bad = set()
    for problem in preflight.judge(plan, findings):
        name, _, text = problem.partition(": ")
        bad.add(name)
        found, _, remedy = text.partition("; ")
        yield fail(f"host {name}", found, remedy)
    for warning in preflight.warnings(plan, findings):
        name, _, text = warning.partition(": ")
        found, _, remedy = text.partition("; ")
        yield warn(f"host {name}", found, remedy)
    for name, finding in zip(names, findings, strict=True):
        if name not in bad:
            yield ok(f"host {name}", _described(finding))


async def _ask(plan: Plan, ssh: Ssh, timeout_s: float) -> list[dict[str, Any] | str]:
    connections: list[Connection | None] = [None] * len(plan.nodes)
    try:
        return await preflight.ask_all(plan, ssh, timeout_s, connections)
    finally:
        await preflight.call_off(connections)


def _described(finding: dict[str, Any]) -> str:
    versions = finding["versions"]
    text = f"torch {versions['torch']}, megatron-core {versions['megatron-core']}"
    text += f", {finding['devices']} devices, clock {finding['ahead_s']:+.1f} s"
    return text + f", {finding['free_bytes'] >> 30} GiB free for logs"
