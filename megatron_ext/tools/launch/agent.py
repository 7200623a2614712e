"""The program on each host that runs its part of a job, and ends it with the launcher.

It receives its work as one message on standard input and answers with the findings of this host
(`probe`). On the start message it runs torchrun in a separate session, follows the logs and reports
the result. Standard input stays open while the job runs; end of file means that the launcher has
exited. Then, or on a signal, on a stop message, or if the launcher falls silent, the job gets
SIGTERM, and after the grace period every remaining process is killed.

    python -m megatron_ext.tools.launch.agent

The main thread only decides and kills; the forwarder does everything that may block on a
connection.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from megatron_ext.tools.launch import operations, probe, process, protocol, runs
from megatron_ext.tools.launch.tail import LogFiles, last_lines, rank_pattern

__all__ = ["Agent", "main"]

_FORWARD_S = 0.05
_ALIVE_S = 2.0
_TAIL_LINES = 50
_GOODBYE_S = 5.0
_CANNOT_START = 127  # as in a shell
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Forwarder:
    """Writes messages and new log lines to the launcher, in a thread: writing may block."""

    def __init__(self, fd: int, logs: LogFiles) -> None:
        self._fd = fd
        self._logs = logs
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._last_message: protocol.Message | None = None
        self._thread.start()

    def close(self, message: protocol.Message) -> None:
        """Send the rest of the logs and a last message; times out if the launcher stops reading."""
        self._last_message = message
        self._closing.set()
        self._thread.join(_GOODBYE_S)

    def _run(self) -> None:
        alive_at = time.monotonic()
        try:
            while not self._closing.wait(_FORWARD_S):
                while self._send_logs(final=False):
                    alive_at = time.monotonic()
                if time.monotonic() - alive_at > _ALIVE_S:
                    send(self._fd, {"kind": "alive"})
                    alive_at = time.monotonic()
            while self._send_logs(final=True):
                pass
            send(self._fd, self._last_message or {})
        except OSError:
            return  # the launcher is gone: the main thread sees that, too
        finally:
            self._logs.close()

    def _send_logs(self, *, final: bool) -> bool:
        """Send at most one chunk of each file; return whether there was any."""
        found = False
        for chunk in self._logs.read(final=final):
            found = True
            send(self._fd, {"kind": "log", "source": chunk.source}, chunk.data)
        return found


class Agent:
    """One host's part of one job.

    Args:
        request: The launcher's request (`plan.Plan.request`).
        reader: Source of further messages.
        output: Descriptor for answers.
    """

    def __init__(self, request: dict[str, Any], reader: protocol.Reader, output: int) -> None:
        self._request = request
        self._reader = reader
        self._output = output
        self._run_id: str = request["run_id"]
        self._node: int = request["node"]
        self._log_dir = operations.log_dir(request)
        self._me = process.record(psutil.Process())
        self._owns_log_dir = False
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_reason: str | None = None
        self._kill_at: float | None = None
        self._heard_at = time.monotonic()
        self._wakeup, self._wakeup_end = os.pipe()
        os.set_blocking(self._wakeup_end, False)

    def run(self) -> int:
        """Answer, wait for the start, run the job to its end; return the exit code."""
        self._watch_signals()
        os.environ.update(self._request["env"])
        search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path.extend(path for path in search if path and path not in sys.path)
        hello = probe.look(self._request, self._log_dir, self._enter(), self._make_log_dir())
        send(self._output, hello)
        start = self._await_start()
        if start is None:
            if self._owns_log_dir:
                operations.forget(self._log_dir)
            return 0
        try:
            self._start(start, hello)
        except OSError as error:
            why = f"{start['argv'][0]} cannot be started: {error.strerror}"
            send(self._output, {**self._ended(_CANNOT_START), "tail": [why]})
            return 0
        logs = LogFiles(self._log_dir, start["first_rank"], start["show"], self._plain_logs())
        forwarder = Forwarder(self._output, logs)
        code = self._supervise()
        self._end_everything()
        ended = self._report(code, start["first_rank"])
        with suppress(OSError):  # a full disk: the launcher is told all the same
            runs.write_json(self._log_dir / "ended.json", ended)
        forwarder.close(ended)
        return 0

    def _enter(self) -> str | None:
        """Enter the work directory; return an error or None."""
        workdir = self._request["workdir"]
        try:
            os.chdir(workdir)
        except OSError as error:
            return f"the work directory {workdir} cannot be entered: {error.strerror}"
        return None

    def _make_log_dir(self) -> str | None:
        """Create the log directory and record this agent there; return an error or None."""
        try:
            self._log_dir.mkdir(parents=True)
            self._owns_log_dir = True
            entry = {**self._me, "run_id": self._run_id, "node": self._node}
            runs.write_json(self._log_dir / "agent.json", entry)
        except FileExistsError:
            return f"{self._log_dir} belongs to another run"
        except OSError as error:
            return f"logs cannot be written to {self._log_dir}: {error.strerror}"
        return None

    def _await_start(self) -> protocol.Message | None:
        """Wait for the message that starts the job; None if it is cancelled."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                message = self._reader.take()
                if message is not None:
                    if message["op"] == "start":
                        return message
                    continue
                ready = {key.fd for key, _ in selector.select()}
                if self._wakeup in ready or not self._reader.fill():
                    return None

    def _start(self, start: protocol.Message, hello: protocol.Message) -> None:
        process.adopt_orphans()
        agent_pid = os.getpid()
        environment = {
            **os.environ,
            **start["env"],
            process.RUN_ID: self._run_id,
            process.NODE: str(self._node),
            process.AGENT_PID: str(agent_pid),
        }
        if "MEGATRON_EXT_DISABLE" not in self._request["env"]:
            environment.pop("MEGATRON_EXT_DISABLE", None)  # meant for the agent only
        if hello.get("interface"):
            environment.setdefault("GLOO_SOCKET_IFNAME", hello["interface"])
        with (self._log_dir / self._own_log()).open("wb") as log:
            self._child = subprocess.Popen(
                start["argv"],
                stdin=subprocess.DEVNULL,  # else the job would hold the launcher's end open
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: process.die_with_parent(agent_pid),  # noqa: PLW1509 - no threads yet
            )
        send(self._output, {"kind": "started", "pid": self._child.pid})

    def _own_log(self) -> str:
        return "output.log" if self._request["per_node"] else "torchrun.log"

    def _plain_logs(self) -> dict[str, str]:
        return {"output.log": ""} if self._request["per_node"] else {}

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        for number in (*_STOPPING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives through the pipe

    def _supervise(self) -> int:
        """Wait until the job has ended, stopping it when there is a reason to; its exit code."""
        assert self._child is not None
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while (code := self._child.poll()) is None:
                for key, _ in selector.select(self._wait_s()):
                    if key.fd == self._wakeup:
                        self._on_signals(os.read(self._wakeup, 64))
                    elif not self._on_input():
                        selector.unregister(0)
                        self._stop("the launcher exited")
                self._check_time()
        return code

    def _wait_s(self) -> float:
        times = [self._heard_at + self._request["silence_s"]]
        if self._stop_reason is not None:
            times = []
        if self._kill_at is not None:
            times.append(self._kill_at)
        return max(0.0, min(times, default=time.monotonic() + 1.0) - time.monotonic())

    def _check_time(self) -> None:
        now = time.monotonic()
        silence_s = self._request["silence_s"]
        if self._stop_reason is None and now - self._heard_at > silence_s:
            self._stop(f"the launcher was silent for {silence_s} s")
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._end_everything()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _STOPPING:
                self._stop(f"the agent got {signal.Signals(number).name}")

    def _on_input(self) -> bool:
        """Handle what the launcher says; False at the end of the stream."""
        if not self._reader.fill():
            return False
        self._heard_at = time.monotonic()
        while (message := self._reader.take()) is not None:
            if message["op"] == "stop":
                self._stop("the launcher requested it", message["grace_s"])
        return True

    def _stop(self, reason: str, grace_s: float | None = None) -> None:
        """Send SIGTERM to the job, and set the deadline for SIGKILL; 0 s means now."""
        assert self._child is not None
        if grace_s is None:
            grace_s = self._request["grace_s"]
        self._stop_reason = self._stop_reason or reason
        kill_at = time.monotonic() + grace_s
        self._kill_at = min(kill_at, self._kill_at or kill_at)
        if grace_s > 0:
            self._child.send_signal(signal.SIGTERM)

    def _end_everything(self) -> None:
        """Kill the remaining processes of the job; another round catches those forked meanwhile."""
        for _ in range(5):
            left = process.descendants(os.getpid()) | process.marked(
                self._run_id, self._node, self._me["start"]
            )
            if not left:
                return
            process.end(left, timeout_s=2.0)

    def _ended(self, code: int) -> protocol.Message:
        return {
            "kind": "ended",
            "code": code,
            "stopped": self._stop_reason,
            "time": time.time(),
            "what": self._own_log().partition(".")[0],
        }

    def _report(self, code: int, first_rank: int) -> protocol.Message:
        """Return how the job ended on this host."""
        ended = self._ended(code)
        if code == 0 or self._stop_reason is not None:
            return ended
        try:
            failure = json.loads((self._log_dir / "failure.json").read_text())
        except (OSError, ValueError):  # it failed before it had ranks, or was killed
            ended["tail"] = last_lines(self._log_dir / self._own_log(), _TAIL_LINES)
            return ended
        failure["tail"] = self._tail_of(failure["rank"] - first_rank)
        return {**ended, "failure": failure}

    def _tail_of(self, local_rank: int) -> list[str]:
        for stream in ("stderr", "stdout"):
            for path in self._log_dir.glob(rank_pattern(local_rank, stream)):
                lines = last_lines(path, _TAIL_LINES)
                if any(re.search(r"\S", line) for line in lines):
                    return lines
        return []


def send(fd: int, message: protocol.Message, payload: bytes | None = None) -> None:
    """Write a whole message to a blocking descriptor.

    Raises:
        OSError: The peer has closed its end.
    """
    data = memoryview(protocol.encode(message, payload))
    while data:
        data = data[os.write(fd, data) :]


def main() -> int:
    """Execute the request on standard input."""
    # Only messages may go to standard output: output of libraries goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    reader = protocol.Reader(0)
    request = reader.wait()
    if request is None:
        return 0
    if request.get("protocol") != protocol.VERSION:
        send(output, {"kind": "hello", "protocol": protocol.VERSION, "versions": probe.versions()})
        return 0
    if request["op"] == "run":
        return Agent(request, reader, output).run()
    operations.answer(request, lambda message, payload=None: send(output, message, payload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
