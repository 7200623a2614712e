"""Runs a planned job: asks its hosts, starts it, watches it, and ends it everywhere as one.

It reports the first failure with host, rank, exit code and last lines, and stops all other hosts.
One signal stops the job in order, a second one at once. `Outcome.code` is the exit code of the
command: that of the first failure, 128 + n after signal n, 255 for a lost host.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.runs import Message, decode, encode
from megatron_ext.tools.launch.ssh import CONNECTION_FAILED, Ssh, explain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.tools.launch.logs import Display
    from megatron_ext.tools.launch.plan import Plan

__all__ = ["Failure", "Outcome", "ask", "close_all", "first_failure", "judge", "meet", "supervise",
           "warnings"]  # fmt: skip

MAX_SKEW_S = 5.0
"""Difference of clocks that triggers a warning, because log lines cannot be compared then."""
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_REPORT_S = 15.0
_SETTLE_S = 1.5

_logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[tuple[int, Message | None]]
"""Messages by the rank of their host; None: the connection has ended."""


class Connection:
    """An agent on a host of a plan: messages, and whatever else its ssh prints.

    Raises:
        OSError, ValueError, TypeError: ssh cannot be started, or not with these words.
    """

    def __init__(self, plan: Plan, index: int, ssh: Ssh, inbox: Inbox) -> None:
        self._index, self._inbox = index, inbox
        self.show: Callable[[bytes], None] | None = None  # gets lines of logs
        self.heard_at = time.monotonic()
        self._noise: deque[str] = deque(maxlen=20)
        root = Path(__file__).resolve().parents[3]
        variables = ["MEGATRON_EXT_DISABLE=1"]
        if not {"site-packages", "dist-packages"} & set(root.parts):
            variables.append(f"PYTHONPATH={root}")  # the agent has to have the same files
        argv = ["env", *variables, plan.python, "-m", "megatron_ext.tools.launch.agent"]
        node = plan.nodes[index]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            argv if node.local else ssh.argv(node.host, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C goes to the launcher, which stops the agents
        )
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; if the agent has exited, the inbox hears of it."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard_at = time.monotonic()
            message = decode(line)
            if message is None:
                self._noise.append(line.decode(errors="replace").rstrip())
            elif message["kind"] == "log" and self.show is not None:
                self.show(message["text"].encode(errors="surrogateescape"))
            elif message["kind"] not in ("alive", "log"):
                self._inbox.put((self._index, message))
        with suppress(subprocess.TimeoutExpired):  # for the exit code
            self._process.wait(_CLOSE_S)
        self._inbox.put((self._index, None))

    def noise(self) -> list[str]:
        """Return the last lines other than messages: of ssh, login scripts, or a dying agent."""
        self._stderr.seek(0)
        errors = self._stderr.read().decode(errors="replace").splitlines()
        return [line for line in [*self._noise, *errors] if line.strip()][-20:]

    @property
    def exit_code(self) -> int | None:
        """The exit code of ssh; None while it runs."""
        return self._process.returncode

    def close(self, patience_s: float) -> None:
        """End the connection, which ends the agent and its job if they still run."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def close_all(connections: Iterable[Connection], patience_s: float = _CLOSE_S) -> None:
    """Close connections at once."""
    threads = [threading.Thread(target=one.close, args=(patience_s,)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(
    plan: Plan, requests: dict[int, Message], ssh: Ssh, timeout_s: float
) -> tuple[dict[int, Connection], Inbox, dict[int, Message | str]]:
    """Send each host a request and wait for its first answer.

    Args:
        plan: The job.
        requests: Rank of a host -> what to ask it.
        ssh: How to reach hosts.
        timeout_s: Time-out for all of them.

    Returns:
        The connections that are open, which the caller closes; their inbox; and for each host the
        answer, or in one line why there is none, with the remedy.
    """
    inbox: Inbox = queue.SimpleQueue()
    connections: dict[int, Connection] = {}
    answers: dict[int, Message | str] = {}
    try:
        for index, request in requests.items():
            try:
                connections[index] = Connection(plan, index, ssh, inbox)
            except (OSError, ValueError, TypeError) as error:  # noqa: PERF203
                answers[index] = f"its agent cannot be started: {error}"
            else:
                connections[index].send(request)
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Empty):
            while len(answers) < len(requests):
                index, message = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                if message is not None:
                    message["ahead_s"] = message.get("clock", 0.0) - time.time()
                elif index not in answers:
                    one, host = connections[index], plan.nodes[index].host.name
                    answers[index] = explain(host, one.exit_code, one.noise())
                answers.setdefault(index, message or "")
    except BaseException:
        close_all(connections.values(), 2.0)
        raise
    for index in requests.keys() - answers.keys():
        answers[index] = (
            f"no answer within {timeout_s:g} s; check that it is up and that ssh reaches it, or "
            f"wait longer with --preflight-timeout"
        )
    return connections, inbox, answers


def meet(
    plan: Plan, ssh: Ssh, timeout_s: float
) -> tuple[dict[int, Connection], Inbox, list[Message]]:
    """Start an agent on every host, and return the connections and how fit the hosts are.

    Raises:
        LaunchError: A host cannot take part; one line for each. No agent is left running.
    """
    requests = {index: plan.request(index) for index in range(len(plan.nodes))}
    connections, inbox, answers = ask(plan, requests, ssh, timeout_s)
    found = [answer for _, answer in sorted(answers.items()) if not isinstance(answer, str)]
    problems = [
        f"{plan.nodes[index].host.name}: {answer}"
        for index, answer in sorted(answers.items())
        if isinstance(answer, str)
    ] or judge(plan, found)
    if problems:
        close_all(connections.values(), 2.0)
        raise LaunchError("\n".join(problems))
    return connections, inbox, found


def judge(plan: Plan, findings: Sequence[Message]) -> list[str]:
    """Return the problems of a plan's hosts, one line each."""
    names = [node.host.name for node in plan.nodes]
    problems = [f"{n}: {p}" for n, f in zip(names, findings, strict=True) for p in f["problems"]]
    for what in {what: None for found in findings for what in found["same"]}:
        values = [found["same"].get(what) for found in findings]
        usual = Counter(value for value in values if value is not None).most_common(1)[0][0]
        if what == "python":
            remedy = "use the same Python on all hosts (--python PATH)"
        elif what.endswith(", content"):
            remedy = "copy it from here with rsync, or name the same file everywhere"
        else:
            remedy = "install the same version on all hosts"
        problems += [
            f"{name}: {what} {value}, but {names[values.index(usual)]} has {usual}; {remedy}"
            for name, value in zip(names, values, strict=True)
            if value not in (usual, None)
        ]
    return problems


def warnings(plan: Plan, findings: Sequence[Message]) -> list[str]:
    """Return warnings that do not stop the job, one line each."""
    lines = []
    for node, found in zip(plan.nodes, findings, strict=True):
        clock = f"its clock is {found['ahead_s']:+.0f} s off this machine's"
        late = [f"{clock}; let NTP or chrony set it"] * (abs(found["ahead_s"]) > MAX_SKEW_S)
        lines += [f"{node.host.name}: {warning}" for warning in [*late, *found["warnings"]]]
    return lines


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


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    failure: Failure | None
    stopped_by: str | None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others.

    Other ranks fail within milliseconds after the loss of a rank, on hosts whose clocks differ. A
    process ended by a signal, or an agent that died, did not fail for that reason.
    """
    is_effect = {
        failure: failure.code >= 0 and not failure.what.startswith("the connection")
        for failure in failures
    }
    return min(failures, key=lambda failure: (is_effect[failure], failure.at))


@contextmanager
def _signals(inbox: Inbox) -> Iterator[list[int]]:
    """Collect the signals that end a process, instead of ending."""
    found: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        found.append(number)
        inbox.put((-1, None))

    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            previous[number] = signal.signal(number, on_signal)
    try:
        yield found
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def supervise(
    plan: Plan,
    connections: dict[int, Connection],
    inbox: Inbox,
    findings: Sequence[Message],
    display: Display,
    show: Sequence[int],
    ssh: Ssh,
) -> Outcome:
    """Start a job whose agents have answered, and run it to its end.

    Args:
        plan: The plan, with every number of processes known.
        connections: Connections to the agents, by host; closed at the end.
        inbox: Their messages.
        findings: First answers of the agents, by host.
        display: Display of the logs.
        show: Global ranks whose output to show.
        ssh: How to reach hosts, to look after one whose connection is lost.
    """
    failures: list[Failure] = []
    lost: dict[int, Failure] = {}
    running = set(connections)
    names = [node.host.name for node in plan.nodes]
    stopped_by: int | None = None
    stop_at: float | None = None  # when the hosts that still run are stopped, after a failure
    is_stopping = False

    def tell(message: Message) -> None:
        for index in running:
            connections[index].send(message)

    with _signals(inbox) as signals:
        for index, connection in connections.items():
            first, found = plan.first_rank(index), findings[index]
            local = [rank - first for rank in show if 0 <= rank - first < plan.nodes[index].nproc]
            argv = plan.agent_argv(index, found, findings[0]["port"], local)
            connection.show = partial(display.show, names[index])
            connection.heard_at = time.monotonic()
            connection.send({"op": "start", "argv": argv, "first_rank": first})
        alive_at = time.monotonic() + _ALIVE_S
        while running:
            index, message = _next(inbox, min(alive_at, stop_at or alive_at))
            now = time.monotonic()
            if now >= alive_at:
                tell({"op": "alive"})
                alive_at = now + _ALIVE_S
            if signals:
                number = signals.pop(0)
                if not failures:
                    stopped_by = stopped_by or number
                    display.is_stopping = True
                # It may be stopping already, after a signal or a failure.
                what = "kills the job" if is_stopping else "stops the job; once more kills it"
                _logger.warning("%s: %s", signal.Signals(number).name, what)
                tell({"op": "stop", "grace_s": 0 if is_stopping else plan.grace_s})
                is_stopping = True
            if message is not None and index in running:
                running.discard(index)
                is_effect = message["stopped"] and (is_stopping or failures)
                if message["code"] != 0 and not is_effect:
                    note = f" ({message['stopped']})" if message["stopped"] else ""
                    at = message["time"] - findings[index]["ahead_s"]
                    tail = tuple(message["tail"])
                    failures.append(
                        Failure(names[index], message["what"], message["code"], at, tail, note)
                    )
            silent = {i for i in running if now - connections[i].heard_at > plan.silence_s}
            for each in silent | (running & {index} if message is None else set()):
                running.discard(each)
                note = f" was silent for {plan.silence_s:g} s" if each in silent else ""
                lost[each] = Failure(
                    names[each], "the connection to the agent", CONNECTION_FAILED, time.time(),
                    tuple(connections[each].noise()[-5:]), note,
                )  # fmt: skip
                failures.append(lost[each])
            if failures and not is_stopping:
                # Another host's failure may have caused the one that arrived first.
                stop_at = stop_at or now + _SETTLE_S
                if now >= stop_at:
                    is_stopping, stop_at = True, None
                    tell({"op": "stop", "grace_s": plan.grace_s})
        close_all(connections.values())
        notes = _end_lost(plan, list(lost), findings, ssh)
    if stopped_by is not None:
        return Outcome(128 + stopped_by, None, signal.Signals(stopped_by).name)
    if not failures:
        return Outcome(0, None, None)
    failure = first_failure(failures)
    note = "".join(notes[index] for index, one in lost.items() if one is failure)
    return Outcome(failure.exit_code, replace(failure, note=failure.note + note), None)


def _next(inbox: Inbox, until: float) -> tuple[int, Message | None]:
    """Return the next message; rank -1 if a signal or nothing comes."""
    try:
        return inbox.get(timeout=max(0.0, until - time.monotonic()))
    except queue.Empty:
        return -1, None


def _end_lost(
    plan: Plan, lost: Sequence[int], findings: Sequence[Message], ssh: Ssh
) -> dict[int, str]:
    """End the part of a job on hosts whose agents are lost; return what was found there."""
    if not lost:
        return {}
    requests = {index: plan.request(index, "stop") for index in lost}
    opened, _, answers = ask(plan, requests, ssh, _REPORT_S + plan.grace_s)
    close_all(opened.values())
    notes = {}
    for index, left in answers.items():
        if isinstance(left, str):
            notes[index] = ", and it cannot be reached to see what is left; its agent stops the job"
        elif left["agent"]:
            notes[index] = "; its agent was still there and has been stopped"
        else:
            notes[index] = (
                f"; the agent (pid {findings[index]['pid']}) died; {left['killed']} processes of "
                f"the job were left and have been killed"
            )
    return notes
