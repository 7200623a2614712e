"""The program that runs a host's part of a job and stops it when the launcher exits.

    python -m megatron_ext.tools.launch.agent

The agent reads one request, a line of JSON, from standard input. For `run`, it reports whether the
host is fit, waits for the start message, runs torchrun in a separate session and forwards its
output. Standard input stays open while the job runs, so if it closes, the launcher has exited. In
that case, or on a signal, on a stop message, or if the launcher goes silent, the agent stops the
job: it sends SIGTERM, then kills all remaining processes after the grace period. `stop`, `status`
and `logs` act on a job that a different agent is running or has run on this host. They find the job
through a file that the other agent wrote.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.fitness import look, open_folder
from megatron_ext.tools.launch.losses import LOSSES, loss_in_words
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.tools.launch.runs import RANK_MARK, Json
from megatron_ext.upstream import cause, parent
from megatron_ext.upstream.cause import Cause

_TAIL_LINES = 50
_TAIL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 18
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_CANNOT_START = 127  # a shell's exit code for a command that it cannot start
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Send = Callable[[Json], None]


class _Job:
    """A job that runs on this host: its process and, if the job is being stopped, the reason."""

    def __init__(
        self,
        argv: list[str],
        environment: dict[str, str],
        request: Json,
    ) -> None:
        self.stopped: str | None = None
        self.stopped_at = math.inf
        self._grace_s = request["grace_s"]
        self._silence_s = request["silence_s"]
        agent_pid = os.getpid()
        child_environment = {**environment, parent.AGENT_PID: str(agent_pid)}
        # torchrun makes each rank a process group leader, so if torchrun is killed, its
        # ranks are not in any process group that the agent knows. Orphaned ranks
        # therefore become children of this process.
        parent.adopt_orphans()
        self.child = subprocess.Popen(
            argv,
            # If the job inherited our standard input, it could read the launcher's messages.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment,
            start_new_session=True,
            # A killed agent cannot stop the job, so have the kernel kill the child.
            # Each rank makes the same request for itself.
            preexec_fn=lambda: parent.die_with_parent(agent_pid),  # noqa: PLW1509 - takes none of our locks
        )
        # Signal -> the reason to report. `megatron-ext stop` sends SIGUSR1, and the timer in
        # `_follow_launcher` sends SIGALRM.
        whys = {number: f"the agent received {number.name}" for number in _STOPPING}
        whys[signal.SIGUSR1] = runs.STOPPED
        whys[signal.SIGALRM] = f"the launcher was silent for {self._silence_s:g} s"
        for number, why in whys.items():
            signal.signal(number, partial(self._stop_on_signal, why))
        signal.signal(signal.SIGCHLD, self._reap)
        follower = threading.Thread(target=self._follow_launcher, daemon=True)
        follower.start()

    def stop(self, why: str, grace_s: float) -> None:
        """Send SIGTERM, then kill the remaining processes after the grace period."""
        # Send SIGTERM only once: a second one would restart torchrun's grace period and run the
        # ranks' handlers again. If the grace period is 0, as after a second Ctrl-C, kill without
        # sending SIGTERM.
        if self.stopped is None and grace_s > 0:
            self.child.send_signal(signal.SIGTERM)
        self.stopped = self.stopped or why
        self.stopped_at = min(self.stopped_at, time.time())
        killer = threading.Timer(grace_s, self.end)
        # If the job exits in time, the agent exits without waiting for the timer.
        killer.daemon = True
        killer.start()

    def end(self) -> None:
        """Kill the job's remaining processes repeatedly, because they may fork in the meantime."""
        for _ in range(5):
            # These include orphans, because the agent adopts them.
            descendants = psutil.Process().children(recursive=True)
            runs.end(descendants, timeout_s=2.0)

    def _stop_on_signal(self, why: str, *_: object) -> None:
        self.stop(why, self._grace_s)

    def _reap(self, *_: object) -> None:
        """Reap adopted orphans that exited; otherwise, they stay zombies until the job ends."""
        # WNOWAIT does not reap the process, because only its `Popen` may reap `child`.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while True:
                # None if all children are still running.
                ended = os.waitid(os.P_ALL, 0, look)
                if ended is None or ended.si_pid == self.child.pid:
                    return
                os.waitpid(ended.si_pid, 0)

    def _follow_launcher(self) -> None:
        """Stop the job when the launcher requests it, exits or goes silent."""
        # Reads from standard input have no time-out, so use a kernel timer, which every
        # message resets. When it expires, SIGALRM stops the job.
        signal.setitimer(signal.ITIMER_REAL, self._silence_s)
        for line in sys.stdin.buffer:
            message = runs.decode(line)
            signal.setitimer(signal.ITIMER_REAL, self._silence_s)
            if message is not None and message["op"] == "stop":
                self.stop("the launcher requested it", message["grace_s"])
        self.stop("the launcher exited", self._grace_s)


def _run(request: Json, directory: Path, send: Send) -> None:
    os.environ.pop("MEGATRON_EXT_DISABLE", None)  # meant for the agent only
    # The checks must see the job's variables, for example to count devices.
    os.environ.update(request["env"])
    # Some of the script's modules may only be found on the job's path.
    python_path = request["env"].get("PYTHONPATH", "")
    for path in python_path.split(os.pathsep):
        if path:
            sys.path.append(path)
    hello = look(request, directory)
    send(hello)
    # The launcher compares all hosts first, so that the job starts on all hosts or on none. If it
    # finds a problem, it closes this connection without a message.
    line = sys.stdin.buffer.readline()
    start = runs.decode(line)
    if start is None:
        return
    per_node = request["per_node"]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # show the ranks' output immediately
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_MARK.decode() + "${rank} ",
        runs.RUN_ID: request["run_id"],
        runs.NODE: str(request["node"]),
    }
    # By default, gloo uses the interface that this host's name resolves to, which the
    # other hosts may be unable to reach.
    if hello.get("interface"):
        environment.setdefault("GLOO_SOCKET_IFNAME", hello["interface"])
    log_name = "torchrun.log"
    child_name = "torchrun"
    if per_node:
        log_name = "output.log"
        child_name = "the command"
    elif request["reserve"] is not None:
        child_name = runs.KEEPER
    ended: Json = {
        "kind": "ended",
        "part": child_name,
        "code": _CANNOT_START,
        "stopped": None,
        "tail": [],
        "cause": None,
        "log": None,
    }
    try:
        # The folder stays open for as long as this process runs.
        folder = open_folder(directory, create=True)
        # Another launch may have taken the run id since `look` checked it.
        if folder.exists("agent.json"):
            why = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, why, str(directory))
        earlier_run = request["local_checkpoints_of"]
        if earlier_run is not None:
            # This host may not have been in the earlier run. Ranks unpickle the checkpoints, so
            # nobody else may write to the folder.
            with RunFolder.open(directory.parent.parent, earlier_run, create=True):
                pass
        # `stop` finds this agent through the file, so write it before the job starts.
        folder.write_json("agent.json", runs.record())
        log = folder.create(log_name)
        # The folder for DataLoader workers' sockets is removed when the job ends
        # (`upstream/parent.py`).
        sockets = TemporaryDirectory(prefix="pymp-", ignore_cleanup_errors=True)
        environment[parent.SOCKETS] = sockets.name
        job = _Job(start["argv"], environment, request)
    except (OSError, LaunchError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.filename or start['argv'][0]}: {error.strerror}"
        ended["time"] = time.time()
        ended["tail"] = [reason]
        send(ended)
        return
    output = job.child.stdout
    forwarder = threading.Thread(
        target=_forward,
        args=(output, log, send, per_node),
        daemon=True,
    )
    forwarder.start()
    code = job.child.wait()
    # The launcher compares this time across hosts to find the first failure.
    ended["time"] = time.time()
    job.end()  # processes started by torchrun may outlive it by a few seconds
    sockets.cleanup()
    ended.update(code=code, stopped=job.stopped)
    # A process that cannot be killed keeps the pipe open, so limit the wait.
    forwarder.join(_CLOSE_S)
    if child_name == runs.KEEPER and code < 0:
        # The keeper did not report which errors the job survived, so ignore the
        # recorded errors.
        ended["tail"] = last_lines(folder.anchor / log_name, _TAIL_LINES)
    else:
        is_stopped = job.stopped is not None
        first_rank = start.get("first_rank", 0)
        logs = _Logs(folder, directory, log_name, first_rank)
        failure: Json = {}
        if code != 0:
            failure = _failure(logs, is_stopped=is_stopped)
        if not failure and child_name != runs.KEEPER:
            failure = _early_exit(logs, job.stopped_at)
        ended.update(failure)
    # Even if the disk is full, the launcher gets the report.
    with suppress(OSError):
        report = {**runs.record(), **ended}
        folder.write_json("agent.json", report)
    # Send in a thread with a time limit, because a launcher that no longer reads would block this
    # process.
    last = threading.Thread(target=send, args=(ended,), daemon=True)
    last.start()
    last.join(_CLOSE_S)


def _forward(
    output: IO[bytes],
    log: IO[bytes],
    send: Send,
    every_line: bool,
) -> None:
    """Send the ranks' lines, or every line, to the launcher; log the lines that no rank printed."""
    assert isinstance(output, io.BufferedReader)
    unfinished = b""
    while True:
        # `read1` returns whatever the pipe contains, or nothing at the end of the output.
        data = output.read1(_CHUNK_BYTES)
        if not data:
            if not unfinished:
                return
            # Complete the last line.
            data = b"\n"
        if len(unfinished) > _CHUNK_BYTES:
            # A progress bar may never finish its line, so break the line here to limit memory use.
            data = b"\n" + data
        lines = (unfinished + data).split(b"\n")
        unfinished = lines.pop()
        of_ranks = []
        of_no_rank = []
        for line in lines:
            if line.startswith(RANK_MARK):
                of_ranks.append(line)
            else:
                of_no_rank.append(line)
        shown = lines if every_line else of_ranks
        # torchrun or the keeper has already written the ranks' lines to other files. Neither a full
        # disk nor a dead launcher may block the job.
        if of_no_rank:
            with suppress(OSError):
                log.write(b"\n".join(of_no_rank) + b"\n")
        if shown:
            joined = b"\n".join(shown) + b"\n"
            # `surrogateescape` keeps bytes that are not valid UTF-8.
            text = joined.decode(errors="surrogateescape")
            with suppress(OSError):
                send({"kind": "log", "text": text})


@dataclass(frozen=True)
class _Logs:
    """The logs that a job left on this host."""

    folder: RunFolder
    directory: Path
    """Path to the folder, as shown to users."""
    without_rank: str
    """The file with the lines that no rank printed."""
    first_rank: int
    """Global rank of the first process on this host."""

    def of_rank(self, rank: int) -> list[Path]:
        """Return torchrun's output files for a global rank, or none if the rank runs elsewhere."""
        return _rank_logs(self.folder, rank - self.first_rank)


def _failure(logs: _Logs, *, is_stopped: bool) -> Json:
    """Return the failure on this host: which part failed, its exit code, last lines and cause.

    A host that was stopped may still have caused the failure, if its ranks exited later.
    """
    anchor = logs.folder.anchor
    # If there is no report, torchrun either failed before it started any ranks or was killed.
    report: Json = logs.folder.read_json("failure.json") or {}
    # Local ranks whose loss the job survived, so they explain nothing.
    survived = [rank - logs.first_rank for rank in report.get("survived", ())]
    causes = cause.read(anchor / "ranks", survived)
    now = time.time()
    for stopped in report.get("stopped", ()):
        reason = f"its process {stopped['pid']} is stopped, by SIGSTOP or a debugger"
        causes.append(Cause(stopped["rank"], "stopped", reason, now))
    if "rank" in report:
        rank = report["rank"]
        code = report["exit_code"]
        ranks_with_cause = [ending.rank for ending in causes]
        # torchrun may kill a rank that has recorded its cause before the rank exits on
        # its own, so ignore its exit code.
        if rank not in ranks_with_cause:
            kind = "killed" if code < 0 else "unknown"
            causes.append(Cause(rank, kind, "", now, code=code))
        for exited_rank in report.get("early_exits", ()):
            if exited_rank not in ranks_with_cause:  # on another host
                causes.append(Cause(exited_rank, "left", "", now, code=0))
    first = cause.first(causes)
    # Being stopped may make a rank fail, so report only causes that a stop cannot
    # produce.
    is_sure = first is not None and first.is_sure
    if is_stopped and not is_sure:
        return {}
    lines = last_lines(anchor / logs.without_rank, _TAIL_LINES)
    failure: Json = {"tail": lines}
    if first is None:
        return failure
    failure |= _blamed(first, logs)
    # torchrun's exit code may differ from the exit code of the rank that failed first.
    if first.code:
        failure["code"] = first.code
    elif "exit_code" in report:
        # The rank that caused the failure is either still running without making
        # progress or exited with code 0.
        failure["code"] = report["exit_code"]
    return failure


def _early_exit(logs: _Logs, stopped_at: float) -> Json:
    """Return which rank on this host first called `sys.exit(0)`, for a host that has not failed.

    Ranks on other hosts fail if they needed it. A rank may also exit with code 0 because the job
    was stopped, which explains nothing.
    """
    exits = []
    all_exited = True
    for ending in cause.read(logs.folder.anchor / "ranks"):
        if ending.kind == "left" and ending.at < stopped_at:
            exits.append(ending)
        else:
            all_exited = False
    first = cause.first(exits)
    if first is None:
        return {}
    # torchrun waits for the other hosts before it exits. If it is stopped meanwhile, its own exit
    # code is not 0.
    return {**_blamed(first, logs), "code": 0, "all_exited": all_exited}


def _blamed(first: Cause, logs: _Logs) -> Json:
    """Return the part of a report that names a rank, its cause and its log."""
    blamed: Json = {"part": f"rank {first.rank}", "cause": asdict(first)}
    # Standard error comes last and takes precedence, because it contains the traceback.
    for path in logs.of_rank(first.rank):
        rank_folder = path.parent.relative_to(logs.folder.anchor)
        blamed["log"] = str(logs.directory / rank_folder)
        lines = last_lines(path, _TAIL_LINES)
        if any(map(str.strip, lines)):
            blamed["tail"] = lines
    return blamed


def _rank_logs(folder: RunFolder, local_rank: int) -> list[Path]:
    """Return torchrun's output files for a local rank, in the run's folder on this host."""
    # torchrun creates a folder with a random suffix in `--log-dir`. With
    # `--max-restarts 0`, there is only the first attempt.
    folders = folder.anchor.glob(f"ranks/*/attempt_0/{local_rank}")
    paths = []
    for rank_folder in folders:
        paths += [rank_folder / "stdout.log", rank_folder / "stderr.log"]
    return paths


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a possibly large file, or none if it cannot be read."""
    try:
        # Without O_NONBLOCK, opening a pipe blocks; without O_NOFOLLOW, a link could lead anywhere.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - opens a descriptor
            size = file.seek(0, os.SEEK_END)
            # Read only the end, because several weeks of logs can take up gigabytes.
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def _stop(request: Json, directory: Path) -> Json:
    agent = None
    with suppress(FileNotFoundError), open_folder(directory) as folder:
        agent = runs.recorded(folder.read_json("agent.json"))
    if agent is not None:
        # Let the agent shut down its job cleanly and report to its launcher, which
        # takes about as long as the grace period.
        with suppress(psutil.Error):
            agent.send_signal(signal.SIGUSR1)
            agent.wait(request["grace_s"] + _CLOSE_S)
        with suppress(psutil.Error):
            # The kernel kills torchrun and its ranks along with their agent
            # (`parent.die_with_parent`).
            agent.kill()
    # If the agent died earlier, its processes can only be identified by the mark in
    # their environment.
    remaining = runs.marked(request["run_id"], request["node"])
    unkillable = runs.end(remaining)
    stuck = sorted(process.pid for process in unkillable)
    text = "nothing was running"
    if stuck:
        text = f"processes {stuck} cannot be killed (they may be blocked on a device)"
    elif agent is not None or remaining:
        text = f"stopped ({len(remaining)} processes killed after the grace period)"
    return {
        "failed": bool(stuck),
        "text": text,
        "agent": agent is not None,
        "killed": len(remaining),
    }


def _status(request: Json, directory: Path) -> Json:
    try:
        with open_folder(directory) as folder:
            ended = folder.read_json("agent.json")
            losses = folder.read_json(LOSSES) or []
    except FileNotFoundError:
        return {"text": "has no record of this run"}
    state = ""
    if runs.recorded(ended):
        state = "running, "
    # `ended` contains no exit code if the job is still running or its agent could not write the
    # report.
    with suppress(KeyError, TypeError):
        state = f"ended with {ended['code']}"
        if ended["stopped"]:
            state += f" ({ended['stopped']})"
        state += ", "
    processes = runs.marked(request["run_id"], request["node"])
    count = len(processes) or "no"
    lost = ""
    for loss in losses:
        lost += f"{loss_in_words(loss)}, "
    return {"text": f"{state}{lost}{count} processes, logs in {directory}"}


def _logs(request: Json, directory: Path) -> Json:
    lines: list[str] = []
    with suppress(FileNotFoundError), open_folder(directory) as folder:
        paths = [folder.anchor / "output.log", folder.anchor / "torchrun.log"]
        if request["local_rank"] is not None:
            paths = _rank_logs(folder, request["local_rank"])
        for path in paths:
            if path.exists():
                shown_path = directory / path.relative_to(folder.anchor)
                lines.append(str(shown_path))
                lines += last_lines(path, request["lines"])
    return {"text": "\n".join(lines)}


def main() -> int:
    """Handle the request on standard input."""
    # The launcher reads messages from standard output, so redirect output from libraries to
    # standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: Json) -> None:
        with lock:
            output.write(runs.encode(message))
            output.flush()

    def live() -> None:
        # If the launcher is gone, `_follow_launcher` notices, because standard input
        # closes.
        with suppress(OSError):
            while True:
                time.sleep(_ALIVE_S)
                send({"kind": "alive"})

    line = sys.stdin.buffer.readline()
    request = runs.decode(line)
    if request is None:
        return 0
    heartbeat = threading.Thread(target=live, daemon=True)
    heartbeat.start()
    # Hosts may share a file system, and their names may contain any characters.
    host = re.sub(r"[^A-Za-z0-9._-]", "_", request["host"])
    root = Path(request["log_root"] or runs.runs_root())
    host_folder = f"{request['node']:03d}-{host}"
    directory = root / request["run_id"] / host_folder
    if request["op"] == "run":
        _run(request, directory, send)
    else:
        operations = {"stop": _stop, "status": _status, "logs": _logs}
        operation = operations[request["op"]]
        try:
            answer = operation(request, directory)
        except (OSError, LaunchError) as error:
            answer = {
                "failed": True,
                "text": f"the run's folder cannot be used: {error}",
            }
        send({"kind": "answer", "failed": False, **answer})
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # A normal exit would abort the interpreter, because a thread is still reading standard input.
    os._exit(code)
