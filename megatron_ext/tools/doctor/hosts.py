"""Checks of the hosts of a hostfile: reachable, same versions, room for logs, clocks, addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ext.tools.doctor.finding import Finding, fail, ok, warn
from megatron_ext.tools.launch.supervise import Agents, judge, warnings

if TYPE_CHECKING:
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
    requests = {index: plan.request(index) for index in range(len(plan.nodes))}
    with Agents(plan, ssh) as agents:
        answers = agents.ask(requests, timeout_s)
    names = agents.names
    found = [answer for answer in answers.values() if not isinstance(answer, str)]
    problems = [f"{names[i]}: {text}" for i, text in answers.items() if text not in found]
    is_comparable = not problems
    for level, lines in (
        (fail, problems or judge(names, found)),
        (warn, warnings(names, found) if is_comparable else []),
    ):
        for line in lines:
            name, _, text = line.partition(": ")
            what, _, remedy = text.partition("; ")
            yield level(f"host {name}", what, remedy)
    bad = {line.partition(": ")[0] for line in problems or judge(names, found)}
    for name, each in zip(names, found, strict=False) if is_comparable else ():
        if name not in bad:
            same = each["same"]
            yield ok(
                f"host {name}",
                f"torch {same['torch']}, megatron-core {same['megatron-core']}, {each['devices']} "
                f"devices, clock {each['ahead_s']:+.1f} s, {each['free_bytes'] >> 30} GiB free for "
                f"logs",
            )
