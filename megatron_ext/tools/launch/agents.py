"""Connections to the agents on a job's hosts.

Each host's agent is reached through ssh or Slurm's srun, or runs as a local process. The user's own
ssh configuration, keys and jump hosts apply, and ssh never prompts.
"""

from __future__ import annotations

import queue
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_ext.tools.launch import slurm
from megatron_ext.tools.launch.runs import Json, decode, encode
from megatron_ext.upstream.releases import parse_release

if TYPE_CHECKING:
    from megatron_ext.tools.launch.display import Display
    from megatron_ext.tools.launch.hostfile import Host
    from megatron_ext.tools.launch.plan import JobPlan

MAX_SKEW_S = 5.0
"""Larger clock differences cause a warning, because log timestamps can no longer be compared."""
_CLOSE_S = 5.0
_FIRST_PATIENT_TORCH = (2, 12)
"""Since this release, torchrun gives its ranks the configured time to stop instead of only 30 s."""

# The first matching pattern applies, so specific patterns come before general ones.
_MEANINGS = {
    r"Invalid job id|Unable to confirm allocation|Access/permission denied": "Slurm refuses to "
    "start anything in this job; it has ended or belongs to another user (squeue --me)",
    r"Permission denied": "ssh needs a password or a key that it does not have, and cannot prompt; "
    "set up a key (ssh-copy-id {host}) or load it (ssh-add)",
    r"Host key verification failed|authenticity of host": "ssh does not know its host key; log in "
    "once by hand to check and accept it (ssh {host})",
    r"Could not resolve hostname": "its name cannot be resolved; correct the hostfile, or add an "
    "entry to ~/.ssh/config",
    r"Connection refused": "no ssh server answers there; start sshd, or set its port with port=N "
    "in the hostfile",
    r"timed out|No route to host|Network is unreachable": "it cannot be reached; check that it is "
    "up, or skip it with --exclude {host}",
    r"No module named .?megatron_ext": "megatron_ext is not installed there; install it, or copy "
    "this tree to the same path with rsync",
    r"No such file or directory|not found": "the path of this machine's Python does not exist "
    "there; install Python there, or set a different path with --python PATH",
}
"""Pattern in the output of ssh, srun or the login shell -> explanation and remedy."""

Event = tuple[int, Json | Literal["signal"] | None]
"""Host index and message (None if the connection was closed), or signal number and "signal"."""


def reach(
    plan: JobPlan,
    host: Host,
    remote: Sequence[str],
    timeout_s: float,
) -> list[str]:
    """Return the command that runs `remote` on a host, quoted for the login shell."""
    if host.local:
        return list(remote)
    if plan.slurm_job is not None:
        return slurm.argv(plan.slurm_job, host, remote)
    # ssh must give up before our own time-out expires, because its error message is more specific.
    connect_timeout_s = max(1, min(10, int(timeout_s)))
    options = [
        "BatchMode=yes",
        f"ConnectTimeout={connect_timeout_s}",
        # Detect a dead host within 15 s.
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
    ]
    # A terminal, which the user's configuration may request, would merge standard error into the
    # messages.
    words = [*plan.ssh, "-T"]
    for option in options:
        words += ["-o", option]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    return [*words, host.name, shlex.join(remote)]


def explain(host: str, code: int | None, printed: Sequence[str]) -> str:
    """Return one line that explains why an agent did not start on a host, with a remedy.

    `code` is the connection's exit code, and `printed` contains the lines printed by ssh or the
    login shell.
    """
    last = "no output"
    for line in printed:
        last = line.strip() or last
    text = "\n".join(printed)
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return f"{meaning.format(host=host)} ({last})"
    return f"the agent did not start there (exit code {code}): {last}"


class _Connection:
    """A connection to a host's agent through a local process: the agent itself, ssh or srun."""

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        put: Callable[[Json | None], None],
    ) -> None:
        self.host = host
        self._put = put
        self.heard_at = time.monotonic()
        self._noise: deque[str] = deque(maxlen=20)
        # Use a file: if nobody reads a pipe, the process blocks once the pipe is full.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Ctrl-C must reach only the launcher, which then shuts down the agents
            # cleanly.
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()

    def send(self, **message: object) -> None:
        """Send a message. If the agent has exited, do nothing, because an event will report it."""
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
                text = line.decode(errors="replace")
                self._noise.append(text.rstrip())
            else:
                self._put(message)
        # Get the exit code before sending the event, because `explain` reports it.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        self._put(None)

    def noise(self) -> list[str]:
        """Return the last lines from ssh, login scripts or the agent that are not messages."""
        self._stderr.seek(0)
        errors = self._stderr.read().decode(errors="replace")
        lines = []
        for line in [*self._noise, *errors.splitlines()]:
            if line.strip():
                lines.append(line)
        # Login scripts may print pages of text, but the reason for the agent's exit
        # comes last.
        return lines[-20:]

    def close(self) -> None:
        """Close the connection, which stops the agent and its job if they are still running."""
        assert self.process.stdin is not None
        # End of input reaches the agent through any number of ssh hops and makes it
        # stop its job. A signal would only reach the local ssh.
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Agents:
    """The agents on all hosts in a plan, as a context manager that stops them on exit."""

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self.connections: dict[int, _Connection] = {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.display: Display | None = None  # receives the ranks' output lines

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        # Close connections in parallel, so that an unresponsive host does not delay the others.
        num_threads = len(self.plan.hosts) or 1
        with ThreadPoolExecutor(num_threads) as pool:
            pool.map(_Connection.close, self.connections.values())

    def _put(self, index: int, message: Json | None) -> None:
        if message is None:
            self.events.put((index, None))
            return
        kind = message["kind"]
        if kind == "log" and self.display is not None:
            text = message["text"].encode(errors="surrogateescape")
            self.display.show(self.plan.hosts[index].name, text)
        # `alive` messages only update `heard_at`, which the reading thread has already
        # done.
        elif kind not in ("alive", "log"):
            self.events.put((index, message))

    def next_event(self, until: float) -> Event:
        """Return the next event, or an event with host index -1 if none arrives before `until`."""
        try:
            remaining_s = max(0.0, until - time.monotonic())
            return self.events.get(timeout=remaining_s)
        except queue.Empty:
            return -1, None

    def ask(
        self,
        op: str,
        timeout_s: float,
        **details: object,
    ) -> list[Json | str]:
        """Send a request to every host and return the answers, in host order.

        If a host does not answer, its entry states the reason and a remedy.
        """
        root = Path(__file__).resolve().parents[3]
        # The agent does not train, so start it without the patches to save time.
        variables = ["MEGATRON_EXT_DISABLE=1"]
        # If this is a source tree that is not installed, the hosts must import from the
        # same path.
        is_installed = "site-packages" in root.parts or "dist-packages" in root.parts
        if not is_installed:
            variables.append(f"PYTHONPATH={root}")
        # ssh servers reject most variables, and login shells differ in syntax, so let
        # the `env` command set them.
        argv = [
            "env",
            *variables,
            self.plan.python,
            "-m",
            "megatron_ext.tools.launch.agent",
        ]
        answers: dict[int, Json | str] = {}
        for index, host in enumerate(self.plan.hosts):
            put = partial(self._put, index)
            try:
                command = reach(self.plan, host, argv, timeout_s)
                connection = _Connection(host.name, command, put)
                self.connections[index] = connection
                request = self.plan.request(index, op) | details
                connection.send(**request)
            except (OSError, ValueError, TypeError) as error:
                # For `stop`, `status` and `logs`, the plan comes from a file. If the file is
                # damaged, a word of the command may contain a null byte (ValueError) or be a number
                # (TypeError).
                answers[index] = f"its agent cannot be started: {error}"
        num_hosts = len(self.plan.hosts)
        deadline = time.monotonic() + timeout_s
        while len(answers) < num_hosts and time.monotonic() < deadline:
            index, message = self.next_event(deadline)
            # A connection may close after the answer, unless the host is about to run the job.
            may_have_closed = op != "run" and index in answers
            if isinstance(message, dict):
                # Includes the time that the message took to arrive.
                ahead_s = message.get("clock", 0.0) - time.time()
                answers[index] = {**message, "ahead_s": ahead_s}
            elif index in self.connections and not may_have_closed:
                connection = self.connections[index]
                code = connection.process.returncode
                printed = connection.noise()
                answers[index] = explain(connection.host, code, printed)
        late = (
            f"no answer within {timeout_s:g} s; check that it is up and reachable by ssh, or "
            f"raise the limit (--preflight-timeout, --timeout)"
        )
        return [answers.get(index, late) for index in range(num_hosts)]

    def look(self, timeout_s: float) -> list[Json]:
        """Return each host's answer, with all problems that prevent it from running the job."""
        answers = self.ask("run", timeout_s)
        has_missing_host = any(isinstance(answer, str) for answer in answers)
        is_complete = bool(answers) and not has_missing_host
        hellos: list[Json] = []
        for answer in answers:
            if isinstance(answer, str):
                hellos.append({"problems": [answer], "warnings": []})
                continue
            if abs(answer["ahead_s"]) > MAX_SKEW_S:
                clock = f"its clock is {answer['ahead_s']:+.0f} s off this machine's"
                answer["warnings"].append(f"{clock}; synchronize it with NTP or chrony")
            # If a host is missing, report only that, because a comparison of the other hosts may be
            # misleading.
            if not is_complete:
                answer["problems"] = []
            hellos.append(answer)
        if is_complete:
            # `_compare` rejects differing torch releases, so checking one host is
            # enough.
            self._check_grace(hellos[0])
            self._compare(hellos)
        return hellos

    def _check_grace(self, hello: Json) -> None:
        """Warn if torchrun does not give ranks the configured grace period."""
        torch = hello["same"]["torch"]
        grace_s = self.plan.grace_s
        release = parse_release(torch) or _FIRST_PATIENT_TORCH
        has_torchrun = not self.plan.per_node
        is_patient = release >= _FIRST_PATIENT_TORCH
        if grace_s > 30 and has_torchrun and not is_patient:
            limit = (
                f"torch {torch} gives ranks 30 s to stop, but --grace is {grace_s:g}"
            )
            hello["warnings"].append(f"{limit}; install torch 2.12 or later")

    def _compare(self, hellos: Sequence[Json]) -> None:
        """Add a problem to each host whose versions or files differ from the majority."""
        names: dict[str, None] = {}
        for hello in hellos:
            names |= dict.fromkeys(hello["same"])
        for name in names:
            versions = [hello["same"].get(name) for hello in hellos]
            # Compare with the majority instead of the first host, which may be the one that
            # differs.
            num_hosts_by_version = Counter(filter(None, versions))
            commonest, _ = num_hosts_by_version.most_common(1)[0]
            host_index = versions.index(commonest)
            like = self.plan.hosts[host_index].name
            remedy = "install the same version on all hosts"
            if name == "python":
                remedy = "use the same Python on all hosts (--python PATH)"
            elif name.endswith(", content"):
                remedy = "copy it from here with rsync, or use the same file everywhere"
            for hello, version in zip(hellos, versions, strict=True):
                # A host without the value has already reported the reason (`fitness.look`).
                if version not in (commonest, None):
                    text = f"{name} {version}, but {like} has {commonest}; {remedy}"
                    hello["problems"].append(text)
