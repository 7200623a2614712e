"""The program on each host that runs its part of a job, and ends it with the launcher.

    python -m megatron_ext.tools.launch.agent

A request comes as one line of JSON on standard input. `run` answers with the fitness of this host
(`fitness.py`), waits for the start, runs torchrun in a session of its own and forwards its output.
Standard input stays open while the job runs: its end means that the launcher is gone. Then, or on a
signal, a stop message, or if the launcher falls silent, the job gets SIGTERM, and after the grace
period every remaining process is killed. `stop`, `status` and `logs` are about a job that another
agent runs or ran here: they find it through the file that this agent wrote.
"""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from megatron_ext.tools.launch import fitness, process, runs
from megatron_ext.tools.launch.logs import MARK, last_lines, rank_logs
from megatron_ext.tools.launch.runs import Message

_TAIL_LINES = 50
_CHUNK_BYTES = 1 << 18
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_CANNOT_START = 127  # as in a shell
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Send = Callable[[Message], None]
Events = queue.SimpleQueue[tuple[str, Any]]


def _run(request: Message, directory: Path, send: Send) -> None:
    for number in _STOPPING:
        signal.signal(number, lambda *_: sys.exit(0))  # before the start there is nothing to stop
    os.environ.update(request["env"])
    # The script's own modules may be on the job's path only.
    sys.path += [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    hello = fitness.look(request, directory)
    send(hello)
    messages = (runs.decode(line) or {} for line in sys.stdin.buffer)
    start = next((each for each in messages if each.get("op") == "start"), None)
    if start is None:
        return
    events: Events = queue.SimpleQueue()
    for number in _STOPPING:
        signal.signal(number, lambda which, _: events.put(("signal", which)))
    process.adopt_orphans()
    agent_pid, per_node = os.getpid(), request["per_node"]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # lines of a rank are shown when they are written
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": MARK.decode() + "${rank} ",
        process.RUN_ID: request["run_id"],
        process.NODE: str(request["node"]),
        process.AGENT_PID: str(agent_pid),
    }
    if "MEGATRON_EXT_DISABLE" not in request["env"]:
        environment.pop("MEGATRON_EXT_DISABLE", None)  # meant for the agent only
    if hello.get("interface"):
        environment.setdefault("GLOO_SOCKET_IFNAME", hello["interface"])
    own_log = directory / ("output.log" if per_node else "torchrun.log")
    ended: Message = {"kind": "ended", "what": "the command" if per_node else "torchrun",
             "code": _CANNOT_START, "stopped": None, "tail": []}  # fmt: skip
    try:
        directory.mkdir(parents=True)
        runs.write_json(directory / "agent.json", process.record(psutil.Process()))
        log = own_log.open("wb", buffering=0)
        child = subprocess.Popen(
            start["argv"],
            stdin=subprocess.DEVNULL,  # else the job would hold the launcher's end open
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: process.die_with_parent(agent_pid),  # noqa: PLW1509 - no threads yet
        )
    except OSError as error:
        reason = f"{error.filename or start['argv'][0]}: {error.strerror}"
        send({**ended, "time": time.time(), "tail": [reason]})
        return

    def listen() -> None:
        for line in sys.stdin.buffer:
            events.put(("message", runs.decode(line) or {}))
        events.put(("gone", None))

    def wait() -> None:
        events.put(("ended", child.wait()))

    def forward() -> None:
        _forward(child.stdout, log, send, every_line=per_node)

    forwarder, *others = [threading.Thread(target=t, daemon=True) for t in (forward, listen, wait)]
    for thread in (forwarder, *others):
        thread.start()
    ended["code"], ended["stopped"] = _watch(request, child, events, hello["clock"])
    ended["time"] = time.time()
    forwarder.join(_CLOSE_S)
    if ended["code"] != 0 and ended["stopped"] is None:
        ended["tail"] = last_lines(own_log, _TAIL_LINES)
        with suppress(OSError, ValueError):  # it failed before it had ranks, or was killed
            failure = json.loads((directory / "failure.json").read_text())
            ended.update(what=f"rank {failure['rank']}", code=failure["exit_code"])
            for path in rank_logs(directory, failure["rank"] - start["first_rank"]):
                lines = last_lines(path, _TAIL_LINES)
                ended["tail"] = lines if any(map(str.strip, lines)) else ended["tail"]
    with suppress(OSError):  # a full disk: the launcher hears of the end all the same
        runs.write_json(directory / "ended.json", ended)
    last = threading.Thread(target=send, args=(ended,), daemon=True)
    last.start()
    last.join(_CLOSE_S)  # the launcher may have stopped reading


def _forward(output: IO[bytes] | None, log: IO[bytes], send: Send, *, every_line: bool) -> None:
    """Send whole lines of ranks to the launcher, and write torchrun's own, until both end.

    Args:
        output: The job's output.
        log: Gets the lines that no rank wrote.
        send: Sends a message.
        every_line: Send these too.
    """
    assert isinstance(output, io.BufferedReader)
    rest = b""
    while data := output.read1(_CHUNK_BYTES) or (rest and b"\n"):
        if len(rest) > _CHUNK_BYTES:
            data = b"\n" + data  # a progress bar without an end
        *lines, rest = (rest + data).split(b"\n")
        own = [line for line in lines if not line.startswith(MARK)]
        shown = lines if every_line else [line for line in lines if line.startswith(MARK)]
        # Neither a full disk nor a launcher that is gone may block the job.
        if own:
            with suppress(OSError):
                log.write(b"\n".join(own) + b"\n")
        if shown:
            text = (b"\n".join(shown) + b"\n").decode(errors="surrogateescape")  # any bytes
            with suppress(OSError):
                send({"kind": "log", "text": text})


def _watch(
    request: Message, child: subprocess.Popen[bytes], events: Events, since: float
) -> tuple[int, str | None]:
    """Wait for the end of a job, and stop it when there is a reason to.

    Returns:
        The exit code of its process, and the reason for stopping it, if there was one.
    """

    def end_everything() -> None:
        """Kill what is left of the job; another round catches what was forked meanwhile."""
        for _ in range(5):
            marked = process.marked(request["run_id"], request["node"], since)
            left = process.descendants(os.getpid()) | marked
            if not left:
                return
            process.end(left, timeout_s=2.0)

    stopped: str | None = None
    kill_at, heard_at = float("inf"), time.monotonic()
    while True:
        silent_at = heard_at + request["silence_s"] if stopped is None else float("inf")
        now = time.monotonic()
        try:
            event, value = events.get(timeout=max(0.0, min(kill_at, silent_at, now + 60) - now))
        except queue.Empty:
            event, value = "time", None
        now, why, grace_s = time.monotonic(), None, request["grace_s"]
        if event == "ended":
            end_everything()
            return value, stopped
        if event == "message":
            heard_at = now
            if value.get("op") == "stop":
                why, grace_s = "the launcher requested it", value["grace_s"]
        elif event == "gone":
            why = "the launcher exited"
        elif event == "signal":
            why = f"the agent got {signal.Signals(value).name}"
        elif now >= silent_at:
            why = f"the launcher was silent for {request['silence_s']:g} s"
        if why is not None:
            stopped = stopped or why
            kill_at = min(kill_at, now + grace_s)
            if grace_s > 0:
                child.send_signal(signal.SIGTERM)
        if now >= kill_at:
            kill_at = float("inf")
            end_everything()


def _stop(request: Message, directory: Path, send: Send) -> None:
    agent = process.recorded(directory / "agent.json")
    if agent is not None:
        process.send(agent, signal.SIGTERM)
        with suppress(psutil.TimeoutExpired):
            agent.wait(request["grace_s"])
        process.send(agent, signal.SIGKILL)
    left = process.marked(request["run_id"], request["node"])
    stuck = process.end(left)
    send({"kind": "stopped", "agent": agent is not None, "killed": len(left),
          "stuck": sorted(one.pid for one in stuck)})  # fmt: skip


def _status(request: Message, directory: Path, send: Send) -> None:
    ended = None
    with suppress(OSError, ValueError):
        ended = json.loads((directory / "ended.json").read_text(encoding="utf-8"))
    send({
        "kind": "status",
        "log_dir": str(directory) if directory.is_dir() else None,
        "agent": process.recorded(directory / "agent.json") is not None,
        "processes": len(process.marked(request["run_id"], request["node"])),
        "ended": ended,
    })  # fmt: skip


def _logs(request: Message, directory: Path, send: Send) -> None:
    paths = [directory / "output.log", directory / "torchrun.log"]
    if request["local_rank"] is not None:
        paths = rank_logs(directory, request["local_rank"])
    files = {str(path): last_lines(path, request["lines"]) for path in paths if path.exists()}
    send({"kind": "logs", "files": files})


def main() -> int:
    """Execute the request on standard input."""
    # Only messages may go to standard output: output of libraries goes to standard error.
    output = os.dup(1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: Message) -> None:
        data = memoryview(runs.encode(message))
        with lock:
            while data:
                data = data[os.write(output, data) :]

    def live() -> None:
        with suppress(OSError):  # the launcher is gone, which the end of our input shows too
            while True:
                time.sleep(_ALIVE_S)
                send({"kind": "alive"})

    request = runs.decode(sys.stdin.buffer.readline())
    if request is not None:
        threading.Thread(target=live, daemon=True).start()
        operations = {"run": _run, "stop": _stop, "status": _status, "logs": _logs}
        operations[request["op"]](request, runs.log_dir(request), send)
    return 0


if __name__ == "__main__":
    sys.exit(main())
