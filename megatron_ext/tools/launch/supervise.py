"""Runs a planned job: checks its hosts, starts it, watches it, and ends it everywhere as one.

`Outcome.code` is the exit code of the command: that of the first failure, 128 + n after signal n,
255 for a lost host.
"""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_ext.tools.launch.runs import Json, decode, encode
from megatron_ext.tools.launch.ssh import CONNECTION_FAILED, Ssh, explain

if TYPE_CHECKING:
    from megatron_ext.tools.launch.logs import Display
    from megatron_ext.tools.launch.plan import JobPlan

MAX_SKEW_S = 5.0
"""Difference of clocks that triggers a warning, because log lines cannot be compared then."""
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_REPORT_S = 15.0
_SETTLE_S = 1.5

_logger = logging.getLogger(__name__)

Event = tuple[int, Json | Literal["signal"] | None]
"""Rank of a host and its message, None if its connection has ended; or the number of a signal."""


class _Connection:
    """An agent on a host: its process or that of ssh, and whatever else that prints."""

    def __init__(self, argv: Sequence[str], put: Callable[[Json | None], None]) -> None:
        self._put = put
        self.show: Callable[[bytes], None] | None = None  # gets lines of logs
        self.heard_at = time.monotonic()
        self._noise: deque[str] = deque(maxlen=20)
        # A file, which never blocks the process; a pipe that nobody reads would.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C goes to the launcher, which stops the agents
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Json) -> None:
        """Send a message; if the agent has exited, an event says so."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard_at = time.monotonic()
            message = decode(line)
            if message is None:
                self._noise.append(line.decode(errors="replace").rstrip())
            elif message["kind"] == "log" and self.show is not None:
                self.show(message["text"].encode(errors="surrogateescape"))
            elif message["kind"] not in ("alive", "log"):
                self._put(message)
        with suppress(subprocess.TimeoutExpired):  # for the exit code
            self.process.wait(_CLOSE_S)
        self._put(None)

    def noise(self) -> list[str]:
        """Return the last lines other than messages: of ssh, login scripts, or a dying agent."""
        self._stderr.seek(0)
        errors = self._stderr.read().decode(errors="replace").splitlines()
        return [line for line in [*self._noise, *errors] if line.strip()][-20:]

    def close(self) -> None:
        """End the connection, which ends the agent and its job if they still run."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Agents:
    """An agent on each host of a plan, as a context that ends them all."""

    def __init__(self, plan: JobPlan, ssh: Ssh) -> None:
        self.plan, self.ssh = plan, ssh
        self.names = [host.name for host in plan.hosts]
        self.connections: dict[int, _Connection] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        # Side by side: one host that does not answer must not delay the others.
        threads = [threading.Thread(target=each.close) for each in self.connections.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def next_event(self, until: float) -> Event:
        """Return the next event, or host -1 when there is none until a time."""
        try:
            return self.events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return -1, None

    def ask(
        self, op: str, timeout_s: float, more: Mapping[int, Json] | None = None
    ) -> dict[int, Json | str]:
        """Send a request to every host, or to those with `more` to say, by their index.

        Returns:
            The answers, or why there is none, with the remedy.
        """
        hosts = range(len(self.names)) if more is None else sorted(more)
        requests = {i: self.plan.request(i, op) | (more[i] if more else {}) for i in hosts}
        root = Path(__file__).resolve().parents[3]
        variables = ["MEGATRON_EXT_DISABLE=1"]  # an agent trains nothing, and starts faster so
        if not {"site-packages", "dist-packages"} & set(root.parts):
            variables.append(f"PYTHONPATH={root}")  # the agent has to have the same files
        argv = ["env", *variables, self.plan.python, "-m", "megatron_ext.tools.launch.agent"]
        answers: dict[int, Json | str] = {}
        for index, request in requests.items():
            command = self.ssh.argv(self.plan.hosts[index], argv)
            # Bound now: the loop goes on before the connection puts anything.
            put = partial(lambda index, message: self.events.put((index, message)), index)
            try:
                self.connections[index] = _Connection(command, put)
                self.connections[index].send(request)
            except (OSError, ValueError, TypeError) as error:
                answers[index] = f"its agent cannot be started: {error}"
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(requests) and time.monotonic() < deadline:
            index, message = self.next_event(deadline)
            if isinstance(message, dict):
                answers[index] = {**message, "ahead_s": message.get("clock", 0.0) - time.time()}
            elif index in requests and index not in answers:
                one = self.connections[index]
                answers[index] = explain(self.names[index], one.process.returncode, one.noise())
        late = (
            f"no answer within {timeout_s:g} s; check that it is up and that ssh reaches it, or "
            f"wait longer (--preflight-timeout, --timeout)"
        )
        return {index: answers.get(index, late) for index in requests}

    def look(self, timeout_s: float) -> tuple[dict[str, Json], list[str], list[str]]:
        """Return how fit each host is, what keeps hosts from the job, and warnings, a line each."""
        answers = self.ask("run", timeout_s)
        by_name = {self.names[index]: answer for index, answer in answers.items()}
        found = {name: each for name, each in by_name.items() if not isinstance(each, str)}
        warnings = []
        for name, each in found.items():
            if abs(each["ahead_s"]) > MAX_SKEW_S:
                clock = f"its clock is {each['ahead_s']:+.0f} s off this machine's"
                warnings.append(f"{name}: {clock}; let NTP or chrony set it")
            warnings += [f"{name}: {warning}" for warning in each["warnings"]]
        problems = [f"{name}: {text}" for name, text in by_name.items() if isinstance(text, str)]
        if problems:  # those who answer are compared when all of them do
            return found, problems, warnings
        problems = [f"{name}: {text}" for name in found for text in found[name]["problems"]]
        for what in {what: None for each in found.values() for what in each["same"]}:
            values = {name: each["same"].get(what) for name, each in found.items()}
            usual = Counter(filter(None, values.values())).most_common(1)[0][0]
            like = next(name for name, value in values.items() if value == usual)
            remedy = "install the same version on all hosts"
            if what == "python":
                remedy = "use the same Python on all hosts (--python PATH)"
            elif what.endswith(", content"):
                remedy = "copy it from here with rsync, or name the same file everywhere"
            problems += [
                f"{name}: {what} {value}, but {like} has {usual}; {remedy}"
                for name, value in values.items()
                if value not in (usual, None)
            ]
        return found, problems, warnings


@dataclass(frozen=True)
class Failure:
    """How a job failed on one host."""

    host: str
    what: str
    """The failed part: `rank 3`, `torchrun`, `the command`, `the connection to the agent`."""
    code: int
    """Exit code, negative for a signal, as Python counts."""
    at: float
    """When, by the launcher's clock."""
    tail: Sequence[str] = ()
    note: str = ""

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code < 0:
            how = f"was ended by {signal.Signals(-self.code).name}"
        return f"{self.host}: {self.what} {how}{self.note}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int = 0
    failure: Failure | None = None
    stopped_by: str | None = None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others.

    Other ranks fail within milliseconds after the loss of a rank, on hosts whose clocks differ. A
    process ended by a signal, or an agent that died, did not fail for that reason.
    """
    return min(failures, key=lambda one: (one.code >= 0 and one.code != CONNECTION_FAILED, one.at))


def supervise(
    agents: Agents, plan: JobPlan, found: Sequence[Json], display: Display, show: Sequence[int]
) -> Outcome:
    """Start a job whose agents have answered, and run it to its end.

    `plan` knows every number of processes, `found` are the answers of the hosts in order, `show`
    the global ranks whose output to show.
    """
    stopping = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup the job outlives a login
        stopping.append(signal.SIGHUP)
    put = agents.events.put
    previous = {each: signal.signal(each, lambda n, _: put((n, "signal"))) for each in stopping}
    try:
        for index, connection in agents.connections.items():
            first, end = plan.first_rank(index), plan.first_rank(index + 1)
            local = [rank - first for rank in show if first <= rank < end]
            argv = plan.agent_argv(index, found[index], found[0]["port"], local)
            connection.show = partial(display.show, agents.names[index])
            connection.heard_at = time.monotonic()
            connection.send({"op": "start", "argv": argv, "first_rank": first})
        stopped_by, failures, lost = _watch(agents, plan, found, display)
        # A lost connection does not tell whether the agent died or only ssh: a second look does.
        with Agents(plan, agents.ssh) as others:
            answers = others.ask("stop", _REPORT_S + plan.grace_s, {index: {} for index in lost})
        for index, left in answers.items():
            if isinstance(left, str):
                note = ", and it cannot be reached to see what is left; its agent stops the job"
            elif left["agent"]:
                note = "; its agent was still there and has been stopped"
            else:
                note = f"; the agent (pid {found[index]['pid']}) died; {left['killed']} processes "
                note += "of the job were left and have been killed"
            failures[index] = replace(failures[index], note=failures[index].note + note)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped_by is not None:
        return Outcome(128 + stopped_by, stopped_by=signal.Signals(stopped_by).name)
    if not failures:
        return Outcome()
    failure = first_failure(list(failures.values()))
    return Outcome(failure.code if failure.code >= 0 else 128 - failure.code, failure)


def _watch(
    agents: Agents, plan: JobPlan, found: Sequence[Json], display: Display
) -> tuple[int | None, dict[int, Failure], set[int]]:
    """Return the signal that stopped a job, its failures by host, and the hosts that were lost."""
    names, connections = agents.names, agents.connections
    running, lost = set(connections), set[int]()
    failures: dict[int, Failure] = {}
    stopped_by: int | None = None
    is_stopping = False
    stop_at: float | None = None  # when the hosts that still run are stopped, after a failure
    alive_at = time.monotonic() + _ALIVE_S

    def send_all(message: Json) -> None:
        for each in running:
            connections[each].send(message)

    while running:
        index, message = agents.next_event(min(alive_at, stop_at or alive_at))
        now = time.monotonic()
        if now >= alive_at:
            send_all({"op": "alive"})
            alive_at = now + _ALIVE_S
        if message == "signal":
            if not failures:
                stopped_by = stopped_by or index
                display.is_stopping = True
            # Before the log line: a terminal that is gone must not keep the job alive.
            send_all({"op": "stop", "grace_s": 0 if is_stopping else plan.grace_s})
            # It may be stopping already, after a signal or a failure.
            what = "kills the job" if is_stopping else "stops the job; once more kills it"
            _logger.warning("%s: %s", signal.Signals(index).name, what)
            is_stopping = True
        elif isinstance(message, dict) and index in running:
            running.discard(index)
            # What ends because it was stopped is no failure of its own.
            is_effect = message["stopped"] and (is_stopping or failures)
            if message["code"] != 0 and not is_effect:
                note = f" ({message['stopped']})" if message["stopped"] else ""
                # Hosts' clocks differ: what came first is decided on the launcher's.
                at = message["time"] - found[index]["ahead_s"]
                what, code, tail = message["what"], message["code"], message["tail"]
                failures[index] = Failure(names[index], what, code, at, tail, note)
        silent = {each for each in running if now - connections[each].heard_at > plan.silence_s}
        for each in silent | (running & {index} if message is None else set()):
            running.discard(each)
            lost.add(each)
            what, tail = "the connection to the agent", connections[each].noise()[-5:]
            note = f" was silent for {plan.silence_s:g} s" if each in silent else ""
            failures[each] = Failure(names[each], what, CONNECTION_FAILED, time.time(), tail, note)
        if failures and not is_stopping:
            # Another host's failure may have caused the one that arrived first.
            stop_at = stop_at or now + _SETTLE_S
            if now >= stop_at:
                is_stopping, stop_at = True, None
                send_all({"op": "stop", "grace_s": plan.grace_s})
    return stopped_by, failures, lost
