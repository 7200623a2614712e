"""Runs a planned job: starts it on its hosts, watches it, and stops it on all hosts."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.agents import Agents
from megatron_ext.tools.launch.display import Display, say
from megatron_ext.tools.launch.failures import (
    CONNECTION_FAILED,
    Failure,
    Outcome,
    first_failure,
)
from megatron_ext.tools.launch.runs import KEEPER, STOPPED, Json
from megatron_ext.upstream import cause

if TYPE_CHECKING:
    from queue import SimpleQueue

    from megatron_ext.tools.launch.agents import Event
    from megatron_ext.tools.launch.plan import JobPlan
    from megatron_ext.upstream.cause import Cause

_ALIVE_S = 2.0
# How long a host may take to answer a second connection after losing the first one.
_REPORT_S = 15.0
# How long to wait for failures on other hosts after the first one: any of these failures may be the
# cause.
_SETTLE_S = 1.5


def supervise(
    agents: Agents,
    plan: JobPlan,
    hellos: Sequence[Json],
    display: Display,
    show: Sequence[int],
) -> Outcome:
    """Start a job whose agents have answered, and wait until it finishes.

    `plan` contains all process counts, `hellos` contains each host's answer, and `show` lists the
    global ranks whose output is shown.
    """
    agents.display = display
    with _signals_to(agents.events):
        for index, connection in agents.connections.items():
            first_rank = plan.first_rank(index)
            end_rank = plan.first_rank(index + 1)
            shown_here = []
            for rank in show:
                if first_rank <= rank < end_rank:
                    shown_here.append(rank - first_rank)
            # The ranks meet on the first host.
            port = hellos[0]["port"]
            argv = plan.agent_argv(index, hellos[index], port, shown_here)
            connection.send(op="start", argv=argv, first_rank=first_rank)
        watch = Watch(agents, plan, hellos, display)
        watch.run()
        # A lost connection does not reveal whether the agent died or only ssh did. A
        # second connection does, and it stops whatever is left of the job on that host.
        lost_hosts = tuple(plan.hosts[index] for index in watch.lost)
        plan_on_lost_hosts = replace(plan, hosts=lost_hosts)
        with Agents(plan_on_lost_hosts) as lost_agents:
            answers = lost_agents.ask("stop", _REPORT_S + plan.grace_s)
    stopped_by = watch.stopped_by
    # A signal may have arrived during this check.
    while not agents.events.empty():
        caught, message = agents.events.get()
        if message == "signal":
            stopped_by = caught
    code = 0
    stopped_name = None
    if stopped_by is not None:
        code = 128 + stopped_by
        stopped_name = signal.Signals(stopped_by).name
    # If the user stopped the job before anything failed, later failures are a consequence of that.
    if not watch.failures or display.is_stopping:
        return Outcome(code, stopped_by=stopped_name)
    failures = watch.failures
    for index, answer in zip(watch.lost, answers, strict=True):
        if index not in failures:  # the job continued without the host and was stopped
            continue
        lost = failures[index]
        note = lost.note + _what_was_left(answer, hellos[index])
        failures[index] = replace(lost, note=note)
    all_failures = list(failures.values())
    failure = first_failure(all_failures, display.iteration)
    code = failure.code
    if code == 0:
        # This rank exited early, so others failed.
        with_code = [failed for failed in all_failures if failed.code != 0]
        code = first_failure(with_code).code
    if code < 0:
        # As in a shell: 128 + n after signal n.
        code = 128 - code
    iteration = display.iteration
    for failed in all_failures:
        if failed.cause is not None:
            iteration = max(iteration, failed.cause.iteration or 0)
    return Outcome(code, failure, stopped_name, iteration)


@contextmanager
def _signals_to(events: SimpleQueue[Event]) -> Iterator[None]:
    """Put signals that stop the job into the agents' event queue."""

    def put(caught: int, _frame: object) -> None:
        events.put((caught, "signal"))

    stopping = [signal.SIGINT, signal.SIGTERM]
    # nohup ignores SIGHUP so that the job outlives the login session; do not handle it
    # then.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stopping.append(signal.SIGHUP)
    handlers = {}
    for number in stopping:
        handlers[number] = signal.signal(number, put)
    try:
        yield
    finally:
        for handled, handler in handlers.items():
            signal.signal(handled, handler)


def _what_was_left(answer: Json | str, hello: Json) -> str:
    """Describe what a second connection found on a host whose first connection was lost."""
    if isinstance(answer, str):
        return (
            ", and it cannot be reached to check what is left; its agent stops the job"
        )
    if answer["agent"]:
        return "; its agent was still running and has been stopped"
    return (
        f"; the agent (pid {hello['pid']}) died; {answer['killed']} remaining job processes "
        f"have been killed"
    )


class Watch:
    """A running job: the hosts that still run it, the failures, and what stopped it."""

    def __init__(
        self,
        agents: Agents,
        plan: JobPlan,
        hellos: Sequence[Json],
        display: Display,
    ) -> None:
        self._agents = agents
        self._plan = plan
        self._hellos = hellos
        self._display = display
        # A copy, because the agents' context closes all connections, including those that have
        # ended.
        self._running = dict(agents.connections)
        self.failures: dict[int, Failure] = {}
        """Host index -> failure."""
        self.lost: list[int] = []
        """Hosts whose connection was lost before their agent reported."""
        self._survived: dict[int, Failure] = {}
        """Index of a lost host -> failure, if the job continues without the host.

        Also contains hosts whose ranks called `sys.exit(0)`: other ranks may fail because of it."""
        self._finished: list[str] = []
        """Names of the hosts whose ranks all exited with code 0."""
        self.stopped_by: int | None = None
        """The signal with which the user stopped the job, if any."""
        self._is_stopping = False
        self._stop_at = math.inf
        """When to stop the remaining hosts after a failure, by `time.monotonic()`."""

    def run(self) -> None:
        """Wait until the job has finished on all hosts."""
        alive_at = time.monotonic() + _ALIVE_S
        while self._running:
            until = alive_at
            # After a stop request, agents stop the job on their own, so `_stop_at` has
            # no effect.
            if not self._is_stopping:
                until = min(alive_at, self._stop_at)
            index, message = self._agents.next_event(until)
            now = time.monotonic()
            if now >= alive_at:
                self._send_all(op="alive")
                alive_at = now + _ALIVE_S
            if message == "signal":
                self._stop_for_user(index, signal.Signals(index).name)
            elif message is not None:
                # `megatron-ext stop` on another machine reaches only the agents, not this launcher.
                if message["stopped"] == STOPPED and not self._is_stopping:
                    self._stop_for_user(signal.SIGTERM, STOPPED)
                if index in self._running:
                    self._end_host(index, message)
            elif index in self._running:
                self._lose_host(index)
            limit_s = self._plan.silence_s
            # A copy, because `_lose_host` removes the host.
            for host_index, connection in list(self._running.items()):
                silent_s = now - connection.heard_at
                if silent_s > limit_s:
                    self._lose_host(host_index, f" was silent for {limit_s:g} s")
            if self.failures and not self._is_stopping:
                # The first failure to arrive may be the effect of a failure on another host, so
                # wait for the other reports before stopping.
                self._stop_at = min(self._stop_at, now + _SETTLE_S)
                if now >= self._stop_at:
                    self._is_stopping = True
                    self._send_all(op="stop", grace_s=self._plan.grace_s)

    def _send_all(self, **message: object) -> None:
        for connection in self._running.values():
            connection.send(**message)

    def _stop_for_user(self, number: int, name: str) -> None:
        """Stop the job for the user, or kill it if it is already stopping."""
        if self.stopped_by is None:
            self.stopped_by = number
            # Ranks that are being stopped print meaningless errors about each other, so hide these
            # errors unless a failure came first.
            self._display.is_stopping = not self.failures
        if self._is_stopping:
            say(f"{name}: killing the job")
        else:
            say(f"{name}: stopping the job; repeat to kill it")
        grace_s = 0 if self._is_stopping else self._plan.grace_s
        self._send_all(op="stop", grace_s=grace_s)
        self._is_stopping = True

    def _end_host(self, index: int, message: Json) -> None:
        """Process an agent's report that its part of the job has finished."""
        del self._running[index]
        noted = message.get("cause")
        ending = None if noted is None else cause.from_json(noted)
        # A host that was stopped because of another failure did not fail, unless its cause shows
        # that it failed on its own but exited later.
        has_failures = bool(self.failures)
        is_job_ending = self._is_stopping or has_failures
        is_effect = message["stopped"] and is_job_ending
        is_sure = ending is not None and ending.is_sure
        is_cause = has_failures and is_sure
        if message["code"] == 0:
            # A keeper also exits with code 0 if another host reports why the job stops.
            if message["part"] != KEEPER:
                self._finish_host(index, message, ending)
            return
        if is_effect and not is_cause:
            return
        failure = self._failure_of(index, message, ending)
        # A host's ranks are killed along with their keeper.
        is_keeper_killed = message["part"] == KEEPER and message["code"] < 0
        if is_keeper_killed and self._may_continue:
            self._outlive(index, failure)
            return
        if ending is not None and ending.kind == "effect" and self._finished:
            names = ", ".join(self._finished)
            note = f" after the ranks on {names} had exited with exit code 0"
            failure = replace(failure, note=note)
        self.failures[index] = failure
        # A host that was lost earlier may be the cause.
        self.failures |= self._survived

    def _finish_host(self, index: int, message: Json, ending: Cause | None) -> None:
        """Record that ranks on a host exited with code 0, and which one did so early."""
        if message.get("all_exited", True):
            self._finished.append(self._plan.hosts[index].name)
        if ending is None:
            return
        self._survived[index] = self._failure_of(index, message, ending)
        if self.failures:
            # Ranks on other hosts may have failed because of it.
            self.failures |= self._survived

    def _failure_of(
        self,
        index: int,
        message: Json,
        ending: Cause | None,
    ) -> Failure:
        ahead_s = self._hellos[index]["ahead_s"]
        failure = Failure(
            host=self._plan.hosts[index].name,
            part=message["part"],
            code=message["code"],
            # The hosts' clocks differ, so convert times to the launcher's clock.
            at=message["time"] - ahead_s,
            tail=message["tail"],
            log=message.get("log"),
        )
        if ending is not None:
            host = failure.host
            # A waiting rank may blame a rank on another host. The script may have changed RANK.
            with suppress(LaunchError):
                host_index = self._plan.host_of(ending.rank)
                host = self._plan.hosts[host_index].name
            failed_at = ending.at - ahead_s
            return replace(failure, host=host, at=failed_at, cause=ending)
        if message["stopped"]:
            return replace(failure, note=f" ({message['stopped']})")
        return failure

    def _lose_host(self, index: int, note: str = "") -> None:
        connection = self._running.pop(index)
        self.lost.append(index)
        failure = Failure(
            host=connection.host,
            part="the connection to the agent",
            code=CONNECTION_FAILED,
            at=time.time(),
            tail=connection.noise()[-5:],
            note=note,
        )
        if self._may_continue:
            self._outlive(index, failure)
        else:
            self.failures[index] = failure

    @property
    def _may_continue(self) -> bool:
        """Whether the job may continue without the host that it has just lost."""
        # The first host's keeper hosts the stores, counts the losses, and stops the job
        # if too many ranks are lost with a host (`keeper.py`).
        is_kept = self._plan.reserve is not None and 0 in self._running
        return is_kept and not self._is_stopping

    def _outlive(self, index: int, failure: Failure) -> None:
        """Record that all ranks on a host are lost, but that the job may continue without them."""
        first_rank = self._plan.first_rank(index)
        last_rank = self._plan.first_rank(index + 1) - 1
        say(f"{failure}: ranks {first_rank} to {last_rank} are lost")
        self._survived[index] = failure
