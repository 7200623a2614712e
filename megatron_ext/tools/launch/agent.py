"""The program on each host that runs its part of a job, and ends it with the launcher.

    python -m megatron_ext.tools.launch.agent

A request comes as one line of JSON on standard input. `run` answers with the fitness of this host,
waits for the start, runs torchrun in a session of its own and forwards its output. Standard input
stays open while the job runs: its end means that the launcher is gone. Then, or on a signal, a stop
message, or if the launcher falls silent, the job gets SIGTERM, and after the grace period every
remaining process is killed. `stop`, `status` and `logs` are about a job that another agent runs or
ran here, and find it through the file that the other one wrote.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil

from megatron_ext.devices import count_devices
from megatron_ext.errors import LaunchError, MegatronExtError
from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.tools.launch.runs import RANK_MARK, Json
from megatron_ext.transport.address import source_address
from megatron_ext.upstream import cause, parent
from megatron_ext.upstream.cause import Cause
from megatron_ext.version import code_hash, installed

MIN_FREE_BYTES = 64 << 20
"""Less free space than this for the logs of a host is a problem."""
MIN_SHARED_BYTES = 1 << 30
"""Less free shared memory than this is a warning; a container has 64 MiB by default."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_TAIL_LINES = 50
_CHUNK_BYTES = 1 << 18
_ALIVE_S = 2.0
_CLOSE_S = 5.0
_CANNOT_START = 127  # as in a shell
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Send = Callable[[Json], None]


def look(request: Json, log_dir: Path) -> Json:
    """Return the fitness of this host for a request, whose environment is already set.

    Problems, warnings, and what must be equal on every host. The request's directory becomes the
    current one; that of the logs must not be there yet.
    """
    problems: list[str] = []
    found: Json = {
        "kind": "hello",
        "pid": os.getpid(),
        "clock": time.time(),
        "log_dir": str(log_dir),
        # Without torch, whose import would take most of the time of an answer.
        "devices": 0 if request["per_node"] and request["nproc"] else count_devices(),
        "problems": problems,
        "warnings": [],
        "same": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "megatron_ext": f"files {code_hash()}",
            "torch": installed("torch") or "not installed",
            "megatron-core": installed("megatron-core") or "not installed",
        },
    }
    try:
        os.chdir(request["workdir"])
    except OSError as error:
        problems.append(
            f"the work directory {request['workdir']} cannot be entered: {error.strerror}; copy it "
            f"there with rsync"
        )
    found["free_bytes"], log_problem = _look_at_logs(log_dir)
    if log_problem is not None:
        problems.append(log_problem)
    has_shared = Path(SHARED_MEMORY).is_dir()
    if has_shared and (free := shutil.disk_usage(SHARED_MEMORY).free) < MIN_SHARED_BYTES:
        found["warnings"].append(
            f"{free >> 20} MiB are free in {SHARED_MEMORY}, and data loaders and NCCL take more; "
            f"start its container with more (docker run --shm-size=16g)"
        )
    script = request["command"][0]
    if request["per_node"]:
        if shutil.which(script) is None:
            problems.append(f"there is no command {script}; copy it there with rsync")
    elif not problems:
        from megatron_ext.training import runner

        try:
            chosen = runner.choose(script)
            content = chosen.read_bytes() if chosen else b"the wheel"
            found["same"][f"{script}, content"] = hashlib.sha256(content).hexdigest()[:8]
        except (MegatronExtError, OSError) as error:
            problems.append(f"{error}; copy it there with rsync")
    if 0 < found["devices"] < request["nproc"]:
        problems.append(
            f"{request['nproc']} processes are planned, but it has {found['devices']} devices; "
            f"lower its slots=N, or --nproc"
        )
    if request["is_first"]:
        # Another program may take a free port before rank 0 listens, seconds later. Below 32768,
        # where systems begin to number the ports of outgoing connections, nothing takes it.
        wanted = request["master_port"]
        for port in [wanted] if wanted else random.sample(range(20000, 32768), 5):
            found["port"] = port
            try:
                socket.create_server(("", port)).close()
                break
            except OSError as error:
                why = "it is in use" if error.errno == errno.EADDRINUSE else str(error)
        else:
            problems.append(
                f"port {port} cannot be used for the ranks to meet: {why}; leave out --master-port "
                f"to get a free one"
            )
    if request["peer"] is not None:
        try:
            found["address"] = source_address(request["peer"])
            found["interface"] = interface_of(found["address"])
        except OSError as error:
            problems.append(
                f"it cannot reach {request['peer']}: {error.strerror or error}; give that host an "
                f"address that all others can reach, with addr=IP in the hostfile"
            )
    return found


def _look_at_logs(log_dir: Path) -> tuple[int, str | None]:
    """Return the free bytes for the logs of a run here, and why they cannot be written, if so."""
    # The folder itself is made at the start only, so that a job that is refused leaves none.
    # Not Path.exists(), which raises for what lies below a folder that may not be entered.
    there = next(folder for folder in log_dir.parents if os.access(folder, os.F_OK))
    free_bytes = shutil.disk_usage(there).free
    why = None
    try:
        with _open(log_dir):
            why = "it belongs to another run"
    except LaunchError as error:
        return free_bytes, f"logs cannot be written: {error}"
    except OSError:  # there is none yet
        if not os.access(there, os.W_OK | os.X_OK):
            why = f"{there} is not writable"
    if why is not None:
        remedy = "use another --run-id or --log-dir"
        return free_bytes, f"logs cannot be written to {log_dir}: {why}; {remedy}"
    if free_bytes < MIN_FREE_BYTES:
        return free_bytes, (
            f"only {free_bytes >> 20} MiB are free for logs in {there}; make room "
            f"({MIN_FREE_BYTES >> 20} MiB at least), or use another --log-dir"
        )
    return free_bytes, None


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an address, or None."""
    # Link-local addresses end in %INTERFACE.
    wanted = address.partition("%")[0]
    for name, found in psutil.net_if_addrs().items():
        if wanted in [each.address.partition("%")[0] for each in found]:
            return str(name)
    return None


class _Job:
    """A job that runs here: its process, and why it is stopped, if it is."""

    def __init__(self, argv: list[str], environment: dict[str, str], request: Json) -> None:
        self.stopped: str | None = None
        self._grace_s, self._silence_s = request["grace_s"], request["silence_s"]
        agent_pid = os.getpid()
        parent.adopt_orphans()
        self.child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,  # else the job would hold the launcher's end open
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, parent.AGENT_PID: str(agent_pid)},
            start_new_session=True,
            preexec_fn=lambda: parent.die_with_parent(agent_pid),  # noqa: PLW1509 - needs no lock of ours
        )
        whys = {number: f"the agent got {number.name}" for number in _STOPPING}
        whys[signal.SIGUSR1] = runs.STOPPED
        whys[signal.SIGALRM] = f"the launcher was silent for {self._silence_s:g} s"
        for number, why in whys.items():
            signal.signal(number, lambda *_, why=why: self.stop(why, self._grace_s))
        signal.signal(signal.SIGCHLD, self._reap)
        threading.Thread(target=self._follow_launcher, daemon=True).start()

    def stop(self, why: str, grace_s: float) -> None:
        """Send SIGTERM, and kill what is left after the grace."""
        # Once: another SIGTERM would start torchrun's own grace, and what a rank does then, again.
        if self.stopped is None and grace_s > 0:
            self.child.send_signal(signal.SIGTERM)
        self.stopped = self.stopped or why
        killer = threading.Timer(grace_s, self.end)
        killer.daemon = True  # a job that ends in time leaves the agent nothing to wait for
        killer.start()

    def end(self) -> None:
        """Kill what is left of the job; another round catches what was forked meanwhile."""
        for _ in range(5):
            # Also orphans, which are adopted.
            runs.end(psutil.Process().children(recursive=True), timeout_s=2.0)

    def _reap(self, *_: object) -> None:
        """Wait for adopted orphans that have ended, which would stay for as long as the job."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != self.child.pid:
                os.waitpid(ended.si_pid, 0)

    def _follow_launcher(self) -> None:
        """Stop the job when the launcher says so, exits or falls silent."""
        signal.setitimer(signal.ITIMER_REAL, self._silence_s)  # SIGALRM, which stops the job
        for message in map(runs.decode, sys.stdin.buffer):
            signal.setitimer(signal.ITIMER_REAL, self._silence_s)
            if message is not None and message["op"] == "stop":
                self.stop("the launcher requested it", message["grace_s"])
        self.stop("the launcher exited", self._grace_s)


def _run(request: Json, directory: Path, send: Send) -> None:
    os.environ.pop("MEGATRON_EXT_DISABLE", None)  # meant for the agent only
    os.environ.update(request["env"])
    # The script's own modules may be on the job's path only.
    sys.path += [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    hello = look(request, directory)
    send(hello)
    # The launcher compares all hosts first, so that a job starts everywhere or nowhere.
    start = runs.decode(sys.stdin.buffer.readline())
    if start is None:
        return
    per_node = request["per_node"]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",  # lines of a rank are shown when they are written
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_MARK.decode() + "${rank} ",
        runs.RUN_ID: request["run_id"],
        runs.NODE: str(request["node"]),
    }
    if hello.get("interface"):
        environment.setdefault("GLOO_SOCKET_IFNAME", hello["interface"])
    own_log = directory / ("output.log" if per_node else "torchrun.log")
    ended: Json = {
        "kind": "ended",
        "what": "the command" if per_node else "torchrun",
        "code": _CANNOT_START,
        "stopped": None,
        "tail": [],
        "cause": None,
        "log": None,
    }
    try:
        folder = _open(directory, create=True)  # as long as this process
        if folder.exists("agent.json"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
        folder.write_json("agent.json", runs.record())
        log = folder.create(own_log.name)
        sockets = TemporaryDirectory(prefix="pymp-", ignore_cleanup_errors=True)
        environment[parent.SOCKETS] = sockets.name
        job = _Job(start["argv"], environment, request)
    except (OSError, LaunchError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"{error.filename or start['argv'][0]}: {error.strerror}"
        send({**ended, "time": time.time(), "tail": [reason]})
        return
    output = job.child.stdout
    forwarder = threading.Thread(target=_forward, args=(output, log, send, per_node), daemon=True)
    forwarder.start()
    code, ended["time"] = job.child.wait(), time.time()  # of several hosts, the first is named
    job.end()  # torchrun's end is not that of all it has started, and may take seconds
    sockets.cleanup()
    ended.update(code=code, stopped=job.stopped)
    forwarder.join(_CLOSE_S)
    if code != 0:
        ended.update(_failure(folder, directory, own_log.name, is_stopped=job.stopped is not None))
    with suppress(OSError):  # a full disk: the launcher hears of the end all the same
        folder.write_json("agent.json", {**runs.record(), **ended})
    last = threading.Thread(target=send, args=(ended,), daemon=True)
    last.start()
    last.join(_CLOSE_S)  # the launcher may have stopped reading


def _forward(output: IO[bytes], log: IO[bytes], send: Send, every_line: bool) -> None:
    """Send lines of ranks, or every line, to the launcher; write those of no rank to the log."""
    assert isinstance(output, io.BufferedReader)
    rest = b""
    while data := output.read1(_CHUNK_BYTES) or (rest and b"\n"):
        if len(rest) > _CHUNK_BYTES:
            data = b"\n" + data  # a progress bar without an end
        *lines, rest = (rest + data).split(b"\n")
        own = [line for line in lines if not line.startswith(RANK_MARK)]
        shown = lines if every_line else [line for line in lines if line.startswith(RANK_MARK)]
        # Neither a full disk nor a launcher that is gone may block the job.
        if own:
            with suppress(OSError):
                log.write(b"\n".join(own) + b"\n")
        if shown:
            text = (b"\n".join(shown) + b"\n").decode(errors="surrogateescape")  # any bytes
            with suppress(OSError):
                send({"kind": "log", "text": text})


def _open(directory: Path, create: bool = False) -> RunFolder:
    """Open the folder of a run on this host, ROOT/RUN_ID/HOST; see `RunFolder.open`."""
    run = directory.parent
    return RunFolder.open(run.parent, run.name, directory.name, create=create)


def _failure(folder: RunFolder, directory: Path, own_log: str, *, is_stopped: bool) -> Json:
    """Return what failed here, for the launcher: the failed part, its exit code, last lines, cause.

    A host that was stopped may have the cause all the same: its ranks were slower to end.
    """
    # None: it failed before it had ranks, or was killed.
    report: Json = folder.read_json("failure.json") or {}
    causes = cause.read(folder.anchor / "ranks")
    now = time.time()
    for stopped in report.get("stopped", ()):
        reason = f"its process {stopped['pid']} is stopped, by SIGSTOP or a debugger"
        causes.append(Cause(stopped["rank"], "stopped", reason, now))
    if "rank" in report:
        rank, code = report["rank"], report["exit_code"]
        # A rank that has left a note may be killed in its exit, by torchrun.
        if rank not in [ending.rank for ending in causes]:
            kind = "killed" if code < 0 else "unknown"
            causes.append(Cause(rank, kind, "", now, code=code))
    tail = last_lines(folder.anchor / own_log, _TAIL_LINES)
    first = cause.first(causes)
    if first is None or (is_stopped and not first.is_sure):
        return {} if is_stopped else {"tail": tail}
    # torchrun's own code says which rank failed first only in its log.
    failure: Json = {"what": f"rank {first.rank}", "cause": asdict(first), "tail": tail}
    if first.code is not None:
        failure["code"] = first.code
    elif "exit_code" in report:
        failure["code"] = report["exit_code"]
    first_rank = report.get("rank", 0) - report.get("local_rank", 0)
    for path in _rank_logs(folder, first.rank - first_rank):
        failure["log"] = str(directory / path.parent.relative_to(folder.anchor))
        lines = last_lines(path, _TAIL_LINES)
        failure["tail"] = lines if any(map(str.strip, lines)) else failure["tail"]
    return failure


def _rank_logs(folder: RunFolder, local_rank: int) -> list[Path]:
    """Return torchrun's output files of a rank, below the run's folder on its host."""
    folders = folder.anchor.glob(f"ranks/*/attempt_0/{local_rank}")
    return [each / f"{stream}.log" for each in folders for stream in ("stdout", "stderr")]


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file that may be large; none if it cannot be read."""
    try:
        # Opening a pipe would wait for its writer, and a link may lead anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))  # logs of weeks have gigabytes
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:]


def _stop(request: Json, directory: Path) -> Json:
    agent = None
    with suppress(FileNotFoundError), _open(directory) as folder:
        agent = runs.recorded(folder.read_json("agent.json"))
    if agent is not None:  # it ends its job in order, which takes about the grace
        with suppress(psutil.Error):
            agent.send_signal(signal.SIGUSR1)
            agent.wait(request["grace_s"] + _CLOSE_S)  # its launcher needs its report
        with suppress(psutil.Error):
            agent.kill()
    left = runs.marked(request["run_id"], request["node"])
    stuck = sorted(one.pid for one in runs.end(left))
    text = "nothing runs"
    if stuck:
        text = f"processes {stuck} cannot be killed (they wait for a device)"
    elif agent is not None or left:
        text = f"stopped ({len(left)} processes killed after the grace)"
    return {"failed": bool(stuck), "text": text, "agent": agent is not None, "killed": len(left)}


def _status(request: Json, directory: Path) -> Json:
    try:
        with _open(directory) as folder:
            ended = folder.read_json("agent.json")
    except FileNotFoundError:
        return {"text": "has no record of this run"}
    state = "running, " if runs.recorded(ended) else ""
    with suppress(KeyError, TypeError):  # it has not ended, or could not write that
        why = f" ({ended['stopped']})" if ended["stopped"] else ""
        state = f"ended with {ended['code']}{why}, "
    count = len(runs.marked(request["run_id"], request["node"]))
    return {"text": f"{state}{count or 'no'} processes, logs in {directory}"}


def _logs(request: Json, directory: Path) -> Json:
    lines: list[str] = []
    with suppress(FileNotFoundError), _open(directory) as folder:
        paths = [folder.anchor / "output.log", folder.anchor / "torchrun.log"]
        if request["local_rank"] is not None:
            paths = _rank_logs(folder, request["local_rank"])
        for path in filter(Path.exists, paths):
            lines.append(str(directory / path.relative_to(folder.anchor)))
            lines += last_lines(path, request["lines"])
    return {"text": "\n".join(lines)}


def main() -> int:
    """Execute the request on standard input."""
    # Only messages may go to standard output: output of libraries goes to standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: Json) -> None:
        with lock:
            output.write(runs.encode(message))
            output.flush()

    def live() -> None:
        with suppress(OSError):  # the launcher is gone, which the end of our input shows too
            while True:
                time.sleep(_ALIVE_S)
                send({"kind": "alive"})

    request = runs.decode(sys.stdin.buffer.readline())
    if request is None:
        return 0
    threading.Thread(target=live, daemon=True).start()
    # Hosts may share a file system, and have names of any characters.
    host = re.sub(r"[^A-Za-z0-9._-]", "_", request["host"])
    root = Path(request["log_root"] or runs.runs_root())
    directory = root / request["run_id"] / f"{request['node']:03d}-{host}"
    if request["op"] == "run":
        _run(request, directory, send)
    else:
        operation = {"stop": _stop, "status": _status, "logs": _logs}[request["op"]]
        try:
            answer = operation(request, directory)
        except (OSError, LaunchError) as error:
            answer = {"failed": True, "text": f"the run's folder cannot be used: {error}"}
        send({"kind": "answer", "failed": False, **answer})
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the thread that reads standard input would abort the interpreter's own exit
