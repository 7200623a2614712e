"""Asks all hosts at once whether the job can run there, before any process of it is started.

Every agent reports its findings (`probe.look`); `judge` compares them. The connections stay open
for the job, so there is only one login on each host.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import protocol
from megatron_ext.tools.launch.connection import Connection, ConnectionLost
from megatron_ext.tools.launch.ssh import Ssh, explain

if TYPE_CHECKING:
    from megatron_ext.tools.launch.plan import Plan

__all__ = ["MIN_FREE_BYTES", "ask_all", "call_off", "judge", "meet", "warnings"]

MIN_FREE_BYTES = 64 << 20
"""Less free space than this for the logs of a host is an error."""
MAX_SKEW_S = 5.0
"""Difference of clocks that triggers a warning, because log lines cannot be compared then."""
MIN_SHARED_BYTES = 1 << 30
"""Less free shared memory than this triggers a warning; a container has 64 MiB by default."""
_CALL_OFF_S = 2.0


async def meet(
    plan: Plan, ssh: Ssh, timeout_s: float
) -> tuple[list[Connection], list[dict[str, Any]]]:
    """Start an agent on every host, collect the findings, and judge them.

    Args:
        plan: The job.
        ssh: How to reach hosts.
        timeout_s: Time-out for hosts that do not answer.

    Returns:
        The connections and the findings, by host.

    Raises:
        LaunchError: A host cannot take part; one line for each. No agent is left running.
    """
    connections: list[Connection | None] = [None] * len(plan.nodes)
    try:
        answers = await ask_all(plan, ssh, timeout_s, connections)
        problems = [
            f"{node.host.name}: {answer}"
            for node, answer in zip(plan.nodes, answers, strict=True)
            if isinstance(answer, str)
        ]
        findings = [answer for answer in answers if not isinstance(answer, str)]
        problems = problems or judge(plan, findings)
        if problems:
            raise LaunchError("\n".join(problems))
    except BaseException:
        await call_off(connections)
        raise
    return [connection for connection in connections if connection is not None], findings


async def ask_all(
    plan: Plan, ssh: Ssh, timeout_s: float, connections: list[Connection | None]
) -> list[dict[str, Any] | str]:
    """Start an agent on every host and collect the findings.

    Args:
        plan: The job.
        ssh: How to reach hosts.
        timeout_s: Time-out for hosts that do not answer.
        connections: A list with one place for each host, filled as connections open, so that the
            caller can always close them.

    Returns:
        The findings of each host, or why it did not answer, with the remedy.
    """

    async def ask(index: int) -> dict[str, Any]:
        node = plan.nodes[index]
        connection = await Connection.to(node.host, local=node.local, python=plan.python, ssh=ssh)
        connections[index] = connection
        await connection.send(plan.request(index))
        hello, _ = await connection.receive()
        return {**hello, "ahead_s": hello.get("clock", time.time()) - time.time()}

    tasks = [asyncio.create_task(ask(index)) for index in range(len(plan.nodes))]
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
        troubles = [
            _trouble(node.host.name, task, connection, timeout_s)
            for node, task, connection in zip(plan.nodes, tasks, connections, strict=True)
        ]
        return [
            task.result() if trouble is None else trouble
            for task, trouble in zip(tasks, troubles, strict=True)
        ]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def call_off(connections: Sequence[Connection | None]) -> None:
    """End all agents that have started."""
    await asyncio.gather(*(each.close(_CALL_OFF_S) for each in connections if each is not None))


def _trouble(
    host: str, task: asyncio.Task[dict[str, Any]], connection: Connection | None, timeout_s: float
) -> str | None:
    """Why a host did not answer, or None if it did."""
    if not task.done():
        return (
            f"no answer within {timeout_s:g} s; check that it is up and that ssh reaches it, or "
            f"give it longer with --preflight-timeout"
        )
    error = task.exception()
    if isinstance(error, ConnectionLost):
        if connection is None:
            return str(error)
        return explain(host, connection.exit_code, list(connection.noise))
    if error is not None:
        raise error
    return None


def judge(plan: Plan, findings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems of a plan's hosts, one line each."""
    names = [node.host.name for node in plan.nodes]
    old = [
        f"{name}: its megatron_ext ({found['versions']['megatron_ext']}) speaks another protocol; "
        f"install the same version everywhere, or copy this tree there with rsync"
        for name, found in zip(names, findings, strict=True)
        if found.get("protocol") != protocol.VERSION
    ]
    if old:
        return old
    problems = [
        f"{name}: {problem}"
        for index, (name, found) in enumerate(zip(names, findings, strict=True))
        for problem in _problems_of(plan, index, found)
    ]
    for what, remedy in (
        ("python", "use the same Python on all hosts (--python PATH)"),
        ("torch", "install the same version on all hosts"),
        ("megatron-core", "install the same version on all hosts"),
        ("megatron_ext", "install the same version on all hosts, or copy this tree there"),
    ):
        values = [found["versions"][what] for found in findings]
        problems += _differences(names, values, what, remedy)
    scripts = [str(found["script_hash"]) for found in findings]
    remedy = "copy it from here with rsync, or name the same file everywhere"
    return problems + _differences(names, scripts, f"{plan.command[0]}, content", remedy)


def _differences(names: list[str], values: list[str], what: str, remedy: str) -> list[str]:
    """Return one line for each host whose value differs from that of most hosts."""
    if len(set(values)) == 1:
        return []
    usual = Counter(values).most_common(1)[0][0]
    first = names[values.index(usual)]
    return [
        f"{name}: {what} {value}, but {first} has {usual}; {remedy}"
        for name, value in zip(names, values, strict=True)
        if value != usual
    ]


def _problems_of(plan: Plan, index: int, found: dict[str, Any]) -> list[str]:
    """Return the problems of a single host."""
    problems = []
    if found["log_error"] is not None:
        problems.append(f"{found['log_error']}; use another --run-id or --log-dir, or make room")
    elif found["free_bytes"] < MIN_FREE_BYTES:
        problems.append(
            f"only {found['free_bytes'] >> 20} MiB are free for logs in {found['log_dir']}; make "
            f"room ({MIN_FREE_BYTES >> 20} MiB at least), or use another --log-dir"
        )
    if found["script_error"] is not None:
        problems.append(f"{found['script_error']}; copy it there with rsync")
    if found.get("port_error") is not None:
        problems.append(
            f"port {plan.master_port} cannot be used for the ranks to meet: {found['port_error']}; "
            f"leave out --master-port to get a free one"
        )
    if "address_error" in found:
        problems.append(
            f"it cannot reach {found['address_error']}; give that host an address that all others "
            f"can reach, with addr=IP in the hostfile"
        )
    devices, nproc = found.get("devices", 0), plan.nodes[index].nproc
    if 0 < devices < nproc:
        problems.append(
            f"{nproc} processes are planned, but it has {devices} devices; lower its slots=N, or "
            f"--nproc"
        )
    return problems


def warnings(plan: Plan, findings: Sequence[dict[str, Any]]) -> list[str]:
    """Return warnings that do not stop the job."""
    return [
        f"{node.host.name}: {warning}"
        for node, found in zip(plan.nodes, findings, strict=True)
        for warning in _warnings_of(found)
    ]


def _warnings_of(found: dict[str, Any]) -> Iterator[str]:
    if abs(found["ahead_s"]) > MAX_SKEW_S:
        yield (
            f"its clock is {found['ahead_s']:+.0f} s off this machine's; let NTP or chrony set it"
        )
    free_bytes = found.get("shared_free_bytes", 0)
    if free_bytes < MIN_SHARED_BYTES:
        yield (
            f"{free_bytes >> 20} MiB are free in /dev/shm, and data loaders and NCCL take more; "
            f"start its container with more (docker run --shm-size=16g)"
        )
