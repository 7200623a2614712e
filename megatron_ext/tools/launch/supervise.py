"""Runs a planned job: checks its hosts, starts it, watches it, and ends it everywhere as one.

Each host has an agent, reached by ssh, by Slurm's srun, or as a process of this machine. The user's
own ssh configuration, keys and jump hosts apply; ssh never prompts.
"""

from __future__ import annotations

import math
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from megatron_ext.tools.launch import slurm
from megatron_ext.tools.launch.runs import RANK_MARK, STOPPED, Json, decode, encode
from megatron_ext.upstream import cause
from megatron_ext.upstream.cause import KINDS, Cause
from megatron_ext.upstream.releases import parse_release

if TYPE_CHECKING:
    from megatron_ext.tools.launch.hostfile import Host
    from megatron_ext.tools.launch.plan import JobPlan
    from megatron_ext.upstream.person_view import PersonView

MAX_SKEW_S = 5.0
"""Difference of clocks that triggers a warning, because log lines cannot be compared then."""
CONNECTION_FAILED = 255
"""Exit code of ssh for its own failures, and for a remote command that a signal ended."""
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_REPORT_S = 15.0
_SETTLE_S = 1.5
_MAX_CHUNKS = 32
_PATIENCE_S = 1.0
_MARKED = re.compile(RANK_MARK + rb"(\d+) ")
_ITERATION = re.compile(rb"iteration\s+(\d+)/\s*\d+ \|")

_MEANINGS = {
    r"Invalid job id|Unable to confirm allocation|Access/permission denied": "Slurm starts nothing "
    "for you in this job; it has ended or is somebody else's (squeue --me)",
    r"Permission denied": "ssh needs a password or a key that it does not have, and cannot ask; "
    "set one up (ssh-copy-id {host}) or load it (ssh-add)",
    r"Host key verification failed|authenticity of host": "ssh does not know its host key; log in "
    "once by hand to check and accept it (ssh {host})",
    r"Could not resolve hostname": "its name cannot be resolved; correct the hostfile, or give it "
    "an entry in ~/.ssh/config",
    r"Connection refused": "no ssh server answers there; start sshd, or give its port with port=N "
    "in the hostfile",
    r"timed out|No route to host|Network is unreachable": "it cannot be reached; check that it is "
    "up, or leave it out with --exclude {host}",
    r"No module named .?megatron_ext": "megatron_ext is not installed there; install it, or copy "
    "this tree to the same path with rsync",
    r"No such file or directory|not found": "the Python of this machine is not there; install it, "
    "or name another with --python PATH",
}
"""Pattern in the output of ssh or the login shell -> explanation and remedy."""

Event = tuple[int, Json | Literal["signal"] | None]
"""Rank of a host and its message, None if its connection has ended; or the number of a signal."""


def say(text: str) -> None:
    """Print a line of the launcher's own; a terminal that is gone must not keep it from its job."""
    with suppress(OSError):
        print(f"megatron-ext: {text}", file=sys.stderr, flush=True)  # noqa: T201


def reach(plan: JobPlan, host: Host, remote: Sequence[str], timeout_s: float) -> list[str]:
    """Return the command that runs `remote` on a host, its words quoted for the login shell."""
    if host.local:
        return list(remote)
    if plan.slurm_job is not None:
        return slurm.argv(plan.slurm_job, host, remote)
    options = [
        # ssh has to give up before us: its own words say more than our time-out.
        "BatchMode=yes", f"ConnectTimeout={max(1, min(10, int(timeout_s)))}",
        "ServerAliveInterval=5", "ServerAliveCountMax=3",  # a dead host is noticed in 15 s
    ]  # fmt: skip
    words = [*plan.ssh, "-T", *(word for each in options for word in ("-o", each))]
    words += [] if host.port is None else ["-p", str(host.port)]
    words += [] if host.user is None else ["-l", host.user]
    return [*words, host.name, shlex.join(remote)]


def explain(host: str, code: int | None, printed: Sequence[str]) -> str:
    """Explain in one line why an agent did not start on a host, with a remedy.

    `code` is the exit code of the connection, `printed` the lines of ssh or the login shell.
    """
    last = next((line.strip() for line in reversed(printed) if line.strip()), "no output")
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, "\n".join(printed), re.IGNORECASE):
            return f"{meaning.format(host=host)} ({last})"
    return f"the agent did not start there (exit code {code}): {last}"


class Display:
    """Shows the lines of all hosts in bounded memory.

    Ranks write to files on their own host, which stay complete; torchrun follows those to show. A
    thread writes here, because a terminal or a pipe may block for any time. If it blocks for long,
    output is dropped and counted. The log gets every line, and so does the output, unless a view
    shortens it. Neither is closed.
    """

    def __init__(self, output: BinaryIO, log: BinaryIO, view: PersonView | None = None) -> None:
        self._output, self._log, self._view = output, log, view
        self._chunks: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_CHUNKS)
        self.iteration = 0
        """The last iteration of the training that a line named."""
        self.is_stopping = False
        """True if the user has stopped the job: a view has no errors to show then."""
        self.left_out = 0
        """Lines that were not shown."""
        self._is_blocked = False
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def show(self, host: str, data: bytes) -> None:
        """Show output of a host, or drop it if the display blocks for a second."""
        try:
            # In the thread of a connection: its host would wait as long as we do. Once for all
            # chunks, because the report of the job's end comes behind them.
            self._chunks.put((host, data), timeout=0 if self._is_blocked else _PATIENCE_S)
        except queue.Full:
            self._is_blocked = True
            self.left_out += data.count(b"\n")

    def close(self) -> None:
        """Show the rest; times out if the display blocks."""
        with suppress(queue.Full):
            self._chunks.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._is_blocked = False
            host, data = chunk
            every, short = list[bytes](), list[bytes]()
            for marked in data.removesuffix(b"\n").split(b"\n"):
                rank = _MARKED.match(marked)
                source = f"{host}:{rank[1].decode()}" if rank else host
                # torchrun repeats the mark within a line that pauses.
                line = _MARKED.sub(b"", marked) if rank else marked
                every.append(b"[%s] %s" % (source.encode(), line))
                if found := _ITERATION.search(line):
                    self.iteration = int(found[1])
                if self._view is not None and not self.is_stopping:
                    text = line.decode(errors="replace")
                    short += map(str.encode, self._view.feed(text, source))
            self._write(self._log, every)
            self._write(self._output, every if self._view is None else short)
        if self._view is not None and not self.is_stopping:
            self._write(self._output, map(str.encode, self._view.flush()))

    def _write(self, file: BinaryIO, lines: Iterable[bytes]) -> None:
        # A full disk, or a reader that is gone (`| head`): the job goes on, and its hosts have all.
        with suppress(OSError, ValueError):
            file.write(b"\n".join([*lines, b""]))
            file.flush()


class _Connection:
    """An agent on a host: its process or that of ssh, and whatever else that prints."""

    def __init__(self, host: str, argv: Sequence[str], put: Callable[[Json | None], None]) -> None:
        self.host, self._put = host, put
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

    def send(self, **message: object) -> None:
        """Send a message; if the agent has exited, an event says so."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard_at = time.monotonic()
            if (message := decode(line)) is None:
                self._noise.append(line.decode(errors="replace").rstrip())
            else:
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

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.connections: dict[int, _Connection] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.display: Display | None = None  # gets the lines of ranks

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        # Side by side: one host that does not answer must not delay the others.
        with ThreadPoolExecutor(len(self.plan.hosts) or 1) as pool:
            pool.map(_Connection.close, self.connections.values())

    def _put(self, index: int, message: Json | None) -> None:
        kind = None if message is None else message["kind"]
        if message is not None and kind == "log" and self.display is not None:
            text = message["text"].encode(errors="surrogateescape")
            self.display.show(self.plan.hosts[index].name, text)
        elif kind not in ("alive", "log"):
            self.events.put((index, message))

    def next_event(self, until: float) -> Event:
        """Return the next event, or host -1 when there is none until a time."""
        try:
            return self.events.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return -1, None

    def ask(self, op: str, timeout_s: float, **more: object) -> list[Json | str]:
        """Send a request to every host and return their answers, in order.

        In place of an answer stands why there is none, with the remedy.
        """
        root = Path(__file__).resolve().parents[3]
        variables = ["MEGATRON_EXT_DISABLE=1"]  # an agent trains nothing, and starts faster so
        if not {"site-packages", "dist-packages"} & set(root.parts):
            variables.append(f"PYTHONPATH={root}")  # the agent has to have the same files
        argv = ["env", *variables, self.plan.python, "-m", "megatron_ext.tools.launch.agent"]
        answers: dict[int, Json | str] = {}
        for index, host in enumerate(self.plan.hosts):
            put = partial(self._put, index)
            try:
                command = reach(self.plan, host, argv, timeout_s)
                self.connections[index] = connection = _Connection(host.name, command, put)
                connection.send(**self.plan.request(index, op) | more)
            except (OSError, ValueError, TypeError) as error:
                answers[index] = f"its agent cannot be started: {error}"
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self.plan.hosts) and time.monotonic() < deadline:
            index, message = self.next_event(deadline)
            if isinstance(message, dict):
                answers[index] = {**message, "ahead_s": message.get("clock", 0.0) - time.time()}
            # A host that has answered ends then, unless it is to run the job.
            elif index in self.connections and (op == "run" or index not in answers):
                one = self.connections[index]
                answers[index] = explain(one.host, one.process.returncode, one.noise())
        late = (
            f"no answer within {timeout_s:g} s; check that it is up and that ssh reaches it, or "
            f"wait longer (--preflight-timeout, --timeout)"
        )
        return [answers.get(index, late) for index in range(len(self.plan.hosts))]

    def look(self, timeout_s: float) -> list[Json]:
        """Return the answer of each host, with all problems that keep it from the job."""
        answers = self.ask("run", timeout_s)
        found: list[Json] = [
            {"problems": [a], "warnings": []} if isinstance(a, str) else a for a in answers
        ]
        for each in found:
            if abs(each.get("ahead_s", 0.0)) > MAX_SKEW_S:
                clock = f"its clock is {each['ahead_s']:+.0f} s off this machine's"
                each["warnings"].append(f"{clock}; let NTP or chrony set it")
        if not answers or any(isinstance(answer, str) for answer in answers):
            # Hosts are compared when all of them answer; one may miss just the one that does not.
            return [{**a, "problems": []} if a in answers else a for a in found]
        torch, grace_s = found[0]["same"]["torch"], self.plan.grace_s
        if grace_s > 30 and not self.plan.per_node and (parse_release(torch) or (2, 12)) < (2, 12):
            limit = f"torchrun of torch {torch} gives ranks 30 s to stop, --grace is {grace_s:g}"
            found[0]["warnings"].append(f"{limit}; install torch 2.12 or later")
        for what in {what: None for each in found for what in each["same"]}:
            values = [each["same"].get(what) for each in found]
            usual = Counter(filter(None, values)).most_common(1)[0][0]
            like = self.plan.hosts[values.index(usual)].name
            remedy = "install the same version on all hosts"
            if what == "python":
                remedy = "use the same Python on all hosts (--python PATH)"
            elif what.endswith(", content"):
                remedy = "copy it from here with rsync, or name the same file everywhere"
            for each, value in zip(found, values, strict=True):
                if value not in (usual, None):
                    each["problems"].append(f"{what} {value}, but {like} has {usual}; {remedy}")
        return found


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
    cause: Cause | None = None
    """The note that the rank has left, or what its agent has seen of it."""
    log: str | None = None
    """The folder with the rank's output on its host."""

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code < 0:
            names = {each.value: each.name for each in signal.Signals}  # lacks most real-time ones
            how = f"was ended by {names.get(-self.code, f'signal {-self.code}')}"
        if self.cause is None:
            return f"{self.host}: {self.what} {how}{self.note}"
        reason = self.cause.reason
        blamed = f"{self.what} holds the job up: "  # by the watchdog
        if self.cause.kind == "stopped":
            how = "stands still"
        elif reason.startswith(blamed):
            how, reason = "holds the job up", reason.removeprefix(blamed)
        when = ""
        if self.cause.iteration is not None:
            when = f" in iteration {self.cause.iteration}"
        because = f": {reason}" if reason else ""
        return f"{self.host}: {self.what} {how}{when}{self.note}{because}"

    @property
    def rank(self) -> int | None:
        """The global rank that failed; None if another part did."""
        return None if self.cause is None else self.cause.rank

    @property
    def precedence(self) -> tuple[int, int, float]:
        """Return the key by which the first failure is the smallest."""
        if self.cause is not None:
            return (*self.cause.precedence[:2], self.at)
        # An agent or torchrun that died did not fail because of the other hosts.
        has_died = self.code < 0 or self.code == CONNECTION_FAILED
        return KINDS.index("killed" if has_died else "unknown"), 0, self.at


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int = 0
    """Exit code of the command: that of the first failure, 128 + n after signal n, 255 for a lost
    host."""
    failure: Failure | None = None
    stopped_by: str | None = None
    """The signal that the user ended it with, which may have come after the failure."""

    @property
    def failed_rank(self) -> int | None:
        """The global rank that failed first, if the failed part is a rank."""
        return None if self.failure is None else self.failure.rank


def first_failure(failures: Sequence[Failure], last_iteration: int = 0) -> Failure:
    """Return the failure that explains the others, with the iteration that any host knows of.

    Other ranks fail within milliseconds after the loss of a rank, on hosts whose clocks differ. A
    process ended by a signal, or an agent that died, did not fail for that reason.
    """
    first = min(failures, key=lambda failure: failure.precedence)
    causes = [failure.cause for failure in failures if failure.cause is not None]
    iterations = [ending.iteration for ending in causes if ending.iteration is not None]
    if first.cause is None or first.cause.iteration is not None:
        return first
    if iterations:
        return replace(first, cause=replace(first.cause, iteration=max(iterations)))
    if last_iteration:
        return replace(first, note=f" after iteration {last_iteration}{first.note}")
    return first


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
    agents.display = display
    try:
        for index, connection in agents.connections.items():
            first, end = plan.first_rank(index), plan.first_rank(index + 1)
            local = [rank - first for rank in show if first <= rank < end]
            argv = plan.agent_argv(index, found[index], found[0]["port"], local)
            connection.send(op="start", argv=argv)
        stopped_by, failures, lost = _watch(agents, plan, found, display)
        # A lost connection does not tell whether the agent died or only ssh: a second look does.
        with Agents(replace(plan, hosts=tuple(plan.hosts[index] for index in lost))) as others:
            answers = others.ask("stop", _REPORT_S + plan.grace_s)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    while not agents.events.empty():  # signals during that look
        index, message = agents.events.get()
        stopped_by = index if message == "signal" else stopped_by
    name = None if stopped_by is None else signal.Signals(stopped_by).name
    if not failures:
        return Outcome(0 if stopped_by is None else 128 + stopped_by, stopped_by=name)
    for index, left in zip(lost, answers, strict=True):
        if isinstance(left, str):
            note = ", and it cannot be reached to see what is left; its agent stops the job"
        elif left["agent"]:
            note = "; its agent was still there and has been stopped"
        else:
            note = f"; the agent (pid {found[index]['pid']}) died; {left['killed']} processes "
            note += "of the job were left and have been killed"
        failures[index] = replace(failures[index], note=failures[index].note + note)
    failure = first_failure(list(failures.values()), display.iteration)
    return Outcome(failure.code if failure.code >= 0 else 128 - failure.code, failure, name)


def _failure_of(
    message: Json, ending: Cause | None, plan: JobPlan, index: int, ahead_s: float
) -> Failure:
    """Return the failure that the agent of a host reports."""
    host = plan.hosts[index].name
    # Hosts' clocks differ: which failure came first is decided on the launcher's.
    at = message["time"] - ahead_s
    note = ""
    if ending is not None:
        at = ending.at - ahead_s
        # A rank that waits may name one of another host.
        host = plan.hosts[plan.host_of(ending.rank)].name
    elif message["stopped"]:
        note = f" ({message['stopped']})"
    return Failure(
        host,
        message["what"],
        message["code"],
        at,
        message["tail"],
        note,
        ending,
        message.get("log"),
    )


def _watch(
    agents: Agents, plan: JobPlan, found: Sequence[Json], display: Display
) -> tuple[int | None, dict[int, Failure], list[int]]:
    """Return the signal that stopped a job, its failures by host, and the hosts that were lost.

    What fails after the signal does so because of it.
    """
    running, failures, lost = dict(agents.connections), dict[int, Failure](), list[int]()
    stopped_by: int | None = None
    is_stopping = False
    stop_at = math.inf  # when the hosts that still run are stopped, after a failure
    alive_at = time.monotonic() + _ALIVE_S

    def send_all(**message: object) -> None:
        for each in running.values():
            each.send(**message)

    while running:
        index, message = agents.next_event(alive_at if is_stopping else min(alive_at, stop_at))
        now = time.monotonic()
        if now >= alive_at:
            send_all(op="alive")
            alive_at = now + _ALIVE_S
        # `stop` on another machine than this reaches the agents alone.
        by_command = isinstance(message, dict) and message["stopped"] == STOPPED
        if message == "signal" or (by_command and not is_stopping):
            if stopped_by is None:
                stopped_by = signal.SIGTERM if by_command else index
                display.is_stopping = not failures
            # It may be stopping already, after a signal or a failure.
            send_all(op="stop", grace_s=0 if is_stopping else plan.grace_s)
            what = "kills the job" if is_stopping else "stops the job; once more kills it"
            say(f"{STOPPED if by_command else signal.Signals(index).name}: {what}")
            is_stopping = True
        if isinstance(message, dict) and index in running:
            del running[index]
            noted = message.get("cause")
            ending = None if noted is None else cause.from_json(noted)
            # What ends because it was stopped did not fail, unless it was the slower one to end.
            is_effect = message["stopped"] and (is_stopping or failures)
            is_cause = bool(failures) and ending is not None and ending.is_sure
            if message["code"] != 0 and (is_cause or not is_effect):
                failures[index] = _failure_of(message, ending, plan, index, found[index]["ahead_s"])
        silent = {i for i, one in running.items() if now - one.heard_at > plan.silence_s}
        for each in silent | (running.keys() & {index} if message is None else set()):
            one = running.pop(each)
            lost.append(each)
            what, tail = "the connection to the agent", one.noise()[-5:]
            note = f" was silent for {plan.silence_s:g} s" if each in silent else ""
            failures[each] = Failure(one.host, what, CONNECTION_FAILED, time.time(), tail, note)
        if failures and not is_stopping:
            # Another host's failure may have caused the one that arrived first.
            stop_at = min(stop_at, now + _SETTLE_S)
            is_stopping = now >= stop_at
            if is_stopping:
                send_all(op="stop", grace_s=plan.grace_s)
    return stopped_by, {} if display.is_stopping else failures, lost
