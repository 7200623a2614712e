"""Runs a planned job: starts it on all hosts, monitors it, and ends it everywhere as one.

It reports the first failure with host, rank, exit code and last lines, and stops all other hosts.
One signal stops the job in order, a second one immediately. `Outcome.code` is the exit code of the
command: that of the first failure, 128 + n after signal n, 255 for a lost host.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext.tools.launch.connection import Connection, ConnectionLost
from megatron_ext.tools.launch.ssh import CONNECTION_FAILED, Ssh

if TYPE_CHECKING:
    from megatron_ext.tools.launch import protocol
    from megatron_ext.tools.launch.display import Display
    from megatron_ext.tools.launch.plan import Plan

__all__ = ["Failure", "Job", "Outcome", "ask_agent"]

_ALIVE_S = 2.0
_SETTLE_S = 1.5
_REPORT_S = 15.0
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """How a job failed on one host."""

    host: str
    what: str
    """The failed part: `rank 3`, `torchrun`, `the command`, `the agent`."""
    code: int
    """Exit code, negative for a signal, as Python counts."""
    at: float
    """When, by the launcher's clock."""
    tail: tuple[str, ...] = ()
    note: str = ""

    @property
    def exit_code(self) -> int:
        """What the launcher exits with."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return f"{self.host}: {self.what} {how}{self.note}"


@dataclass
class Outcome:
    """How a job ended."""

    code: int = 0
    failure: Failure | None = None
    stopped_by: str | None = None
    hosts: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    """The last iteration that the log named; 0: none."""

    def to_json(self) -> dict[str, Any]:
        """Return what `result.json` says."""
        return {
            "exit_code": self.code,
            "failure": str(self.failure) if self.failure else None,
            "last_lines": list(self.failure.tail) if self.failure else [],
            "stopped_by": self.stopped_by,
            "hosts": self.hosts,
        }


class Job:
    """A job whose agents have answered and wait for the start.

    Args:
        plan: The plan, with every number of processes known.
        connections: Connections to the agents, by host.
        findings: Findings of the agents, by host.
        display: Display of the logs.
        ssh: How to reach hosts, to check one whose connection is lost.
    """

    def __init__(
        self,
        plan: Plan,
        connections: Sequence[Connection],
        findings: Sequence[dict[str, Any]],
        display: Display,
        ssh: Ssh,
    ) -> None:
        self._plan = plan
        self._connections = connections
        self._findings = findings
        self._display = display
        self._ssh = ssh
        self._failures: list[Failure] = []
        self._stopped_by: str | None = None
        self._running = set(range(len(connections)))
        self._stop_now = asyncio.Event()
        self._last_order: asyncio.Future[None] | None = None
        """Kept, because the loop alone does not keep a task."""
        self._outcome = Outcome()

    async def run(self, show: Sequence[int]) -> Outcome:
        """Start the job and run it to its end.

        Args:
            show: Global ranks whose output to show.
        """
        self._watch_signals()
        await asyncio.gather(*(self._start(i, show) for i in range(len(self._connections))))
        followers = [asyncio.create_task(self._follow(i)) for i in range(len(self._connections))]
        heartbeat = asyncio.create_task(self._heartbeat())
        stopper = asyncio.create_task(self._stop_when_needed())
        try:
            await asyncio.gather(*followers)
        finally:
            heartbeat.cancel()
            stopper.cancel()
            await asyncio.gather(heartbeat, stopper, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in self._connections))
        return self._conclude()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop_now.is_set():
            self._stopped_by = number.name
            self._display.is_stopping = True
            _logger.warning("%s: stops the job; once more kills it", number.name)
            self._outcome.code = 128 + number
            self._stop_now.set()
        else:  # the job is already stopping, after a signal or a failure
            self._last_order = asyncio.ensure_future(self._tell_all({"op": "stop", "grace_s": 0}))

    async def _start(self, index: int, show: Sequence[int]) -> None:
        plan, found = self._plan, self._findings[index]
        first = plan.first_rank(index)
        port = self._findings[0]["port"]
        await self._connections[index].send({
            "op": "start",
            "argv": plan.agent_argv(index, port, found.get("address"), found["log_dir"]),
            "env": {"PYTHONUNBUFFERED": "1"},  # lines of a rank are shown when they are written
            "first_rank": first,
            "show": [r - first for r in show if first <= r < first + plan.nodes[index].nproc],
        })  # fmt: skip

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_S)
            await self._tell_all({"op": "alive"})

    async def _tell_all(self, message: protocol.Message) -> None:
        await asyncio.gather(*(self._connections[i].send(message) for i in tuple(self._running)))

    async def _stop_when_needed(self) -> None:
        """Wait for a reason to stop the job, then stop what is left of it."""
        await self._stop_now.wait()
        if self._failures and self._stopped_by is None:
            # Another host's failure may have caused the one that arrived first.
            await asyncio.sleep(_SETTLE_S)
        await self._tell_all({"op": "stop", "grace_s": self._plan.grace_s})

    async def _follow(self, index: int) -> None:
        """Process the messages of a host until its part of the job has ended."""
        connection, host = self._connections[index], self._plan.nodes[index].host.name
        try:
            while True:
                silence_s = self._plan.silence_s
                message, data = await asyncio.wait_for(connection.receive(), silence_s)
                if message["kind"] == "log":
                    source = message["source"]
                    await self._display.show(f"{host}:{source}" if source else host, data)
                elif message["kind"] == "ended":
                    self._on_ended(index, message)
                    return
        except asyncio.TimeoutError:
            await self._on_lost(index, f"was not heard of for {self._plan.silence_s:g} s")
        except ConnectionLost:
            await self._on_lost(index, "")
        finally:
            self._running.discard(index)

    def _on_ended(self, index: int, message: protocol.Message) -> None:
        host = self._plan.nodes[index].host.name
        self._outcome.hosts[host] = {"code": message["code"], "stopped": message["stopped"]}
        if message["code"] == 0 or (self._stop_now.is_set() and message["stopped"]):
            return
        failure = message.get("failure")
        at = message["time"] - self._findings[index]["ahead_s"]
        if failure is not None:
            what, code, tail = f"rank {failure['rank']}", failure["exit_code"], failure["tail"]
        else:
            what, code, tail = message["what"], message["code"], message.get("tail", [])
            what = "the command" if what == "output" else what
        note = f" ({message['stopped']})" if message["stopped"] else ""
        self._fail(Failure(host, what, code, at, tuple(tail), note))

    async def _on_lost(self, index: int, how: str) -> None:
        """Handle a lost agent: ensure that its part of the job has ended, and report what died."""
        host = self._plan.nodes[index].host.name
        at = time.time()
        said = [line for line in self._connections[index].noise if line.strip()]
        self._outcome.hosts[host] = {"code": CONNECTION_FAILED, "stopped": None}
        # Stop the others first: this one may not answer at all.
        failure = Failure(host, "the connection", CONNECTION_FAILED, at, tuple(said[-5:]))
        self._failures.append(failure)
        self._stop_now.set()
        answer = await self._clean_up(index)
        if answer is None:
            note = f" {how}, and it cannot be reached to see what is left; its agent stops the job"
        elif answer["agent"]:
            note = f" {how}; its agent was still there and has been stopped"
        else:
            left = f"{answer['killed']} processes of the job were left and have been killed"
            note = f"; the agent (pid {self._findings[index]['pid']}) died; {left}"
        position = self._failures.index(failure)
        self._failures[position] = Failure(
            host, "the connection to the agent", CONNECTION_FAILED, at, tuple(said[-5:]), note
        )

    async def _clean_up(self, index: int) -> protocol.Message | None:
        with suppress(ConnectionLost, asyncio.TimeoutError):
            request = {**self._plan.request(index, "stop"), "grace_s": self._plan.grace_s}
            return await asyncio.wait_for(
                ask_agent(self._plan, index, self._ssh, request), _REPORT_S
            )
        return None

    def _fail(self, failure: Failure) -> None:
        if self._stopped_by is not None:
            return  # it ended on our request
        self._failures.append(failure)
        self._stop_now.set()

    def _conclude(self) -> Outcome:
        outcome = self._outcome
        outcome.stopped_by = self._stopped_by
        if self._failures and self._stopped_by is None:
            outcome.failure = first_failure(self._failures)
            outcome.code = outcome.failure.exit_code
        return outcome


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others.

    Other ranks fail within milliseconds after the loss of a rank, on hosts whose clocks differ. A
    process ended by a signal, or an agent that died, did not fail for that reason.
    """

    def key(failure: Failure) -> tuple[int, float]:
        ended_from_outside = failure.code < 0 or failure.what.startswith("the connection")
        return (0 if ended_from_outside else 1, failure.at)

    return min(failures, key=key)


async def ask_agent(
    plan: Plan, index: int, ssh: Ssh, request: protocol.Message
) -> protocol.Message:
    """Send one request to a new agent on a host and return its answer.

    Raises:
        ConnectionLost: The host cannot be reached, or the agent did not answer.
    """
    node = plan.nodes[index]
    connection = await Connection.to(node.host, local=node.local, python=plan.python, ssh=ssh)
    try:
        await connection.send(request)
        return (await connection.receive())[0]
    finally:
        await connection.close()
