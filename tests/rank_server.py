"""A process that has already imported torch and Megatron, and forks ranks for tests.

Importing them takes ten seconds per rank; forking takes milliseconds. `tests.ranks` starts one
server per device. Requests and answers are length-prefixed pickles on stdin and stdout; the ranks'
output goes to log files. The server stays single-threaded, so forking it is safe. When its stdin
closes, it kills everything it started and exits; a rank dies with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_FINALIZING_S = 30.0
"""The same as in torchrun, because on a busy machine the interpreter's exit takes seconds."""
_LATER = (
    "torch._dynamo",  # imported in the first step of any optimizer
    "megatron.core.datasets.helpers",
    "megatron.core.tokenizers.text",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo",
    "megatron_ext.config.entrances",
    "megatron_ext.patches.listing",
    "megatron_ext.training.runner",
    "megatron_ext.runtime.entry",
    "megatron_ext.runtime.megatron_messages",
    "megatron_ext.runtime.runtime",
    "megatron_ext.features.slices.sliced_compute",
    "megatron_ext.disaggregation.step",
    "megatron_ext.tracing.scalars",
    "megatron_ext.transport.native_transport",
    "tests.pipelines",
    "tests.runtime.capture",
)
"""Modules that ranks would import during a training, which takes most of a short one's time."""
PRELOAD = "MEGATRON_EXT_TESTS_PRELOAD"
"""Environment variable with more modules that every rank needs, separated by commas."""


@dataclass
class Request:
    """One run: a module-level function to call on every rank."""

    module: str
    function: str
    args: tuple[Any, ...]
    num_ranks: int
    timeout_s: float
    directory: str
    env: dict[str, str] = field(default_factory=dict)
    finalizes: bool = False
    """Whether ranks end like a program, through the interpreter's exit with its hooks."""


@dataclass
class Answer:
    """How a run ended, by rank; -n: killed by signal n; None: the rank had to be stopped."""

    exit_codes: list[int | None]
    first_failed: int | None
    timed_out: bool
    num_orphans: int = 0
    """Number of processes that ranks left behind."""


def send(stream: BinaryIO, message: object) -> None:
    """Write one length-prefixed pickle."""
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one length-prefixed pickle; raise EOFError if the other side has closed."""
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def preload() -> None:
    """Import the modules that every rank needs."""
    from tests.mutations.run_mutant import install_from_environment

    install_from_environment()
    import pytest  # noqa: F401
    import torch  # noqa: F401

    import megatron_ext  # noqa: F401  (arms the patches first)

    for name in (
        "megatron.core",
        "megatron.core.models.gpt",
        "megatron.core.pipeline_parallel",
    ):
        importlib.import_module(name)
    if os.environ.get("MEGATRON_LM_PATH"):
        importlib.import_module("megatron.training.training")
    from megatron_ext.upstream import releases

    wheel = ["megatron_ext.training.wheel"] if releases.has_training() else []
    for name in (*_LATER, *wheel):
        importlib.import_module(name)
    if releases.has_training() or os.environ.get("MEGATRON_LM_PATH"):
        _remember_help()
    _shrink_mock_data()
    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        importlib.import_module(name)


def _remember_help() -> None:
    """Cache the texts of `--help`, for which Megatron parses the source of 28 classes."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    read_docstrings = ArgumentGroupFactory._get_field_docstrings
    factory = ArgumentGroupFactory.__new__(ArgumentGroupFactory)
    remembered = functools.cache(lambda config: read_docstrings(factory, config))
    ArgumentGroupFactory._get_field_docstrings = lambda _, config: remembered(config)
    inspect.unwrap(arguments.add_megatron_arguments)(ArgumentParser())


def _shrink_mock_data() -> None:
    """Reduce mock data to few documents, because each rank takes seconds to shuffle 100 000."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _kill_orphans() -> int:
    """Kill orphans of ranks (checkpoint writers and their managers), which this process adopted.

    Returns:
        The number of killed processes.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    count = 0
    while pids := children.read_text().split():
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            count += 1
    return count


def _use_file_store(path: str, rank: int, num_ranks: int) -> None:
    """Serve `env://` rendezvous from files, which cannot collide as ports do."""
    from torch.distributed import FileStore

    # In torch.distributed, the function `rendezvous` shadows its submodule of the same name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    count = 0

    def handler(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[Any]:
        nonlocal count
        count += 1
        store = FileStore(f"{path}.{count}", num_ranks)
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, rank, num_ranks

    handlers["env"] = handler


def _rank_main(request: Request, rank: int, parent: int) -> None:
    """Become one rank; never return, except by SystemExit if the request says so."""
    _die_with_parent(parent)
    directory = Path(request.directory)
    log = os.open(
        directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    null = os.open(os.devnull, os.O_RDONLY)
    for source, destination in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, destination)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # The server sends SIGUSR1 before it kills a rank, so that the stacks explain a hang.
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    n = str(request.num_ranks)
    failure = (
        directory / "failures" / str(rank) / "error.json"
    )  # the same layout as torchrun's
    failure.parent.mkdir(parents=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=n, LOCAL_WORLD_SIZE=n,
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        TORCHELASTIC_ERROR_FILE=str(failure),
        TMPDIR=request.directory,  # helpers of a rank must leave nothing in /tmp
    )  # fmt: skip
    tempfile.tempdir = None
    os.environ.update(request.env)
    os.chdir(directory)
    code = 1
    try:
        _use_file_store(str(directory / "store"), rank, request.num_ranks)
        function: Any = importlib.import_module(request.module)
        for name in request.function.split("."):
            function = getattr(function, name)
        value = function(*request.args)
        (directory / f"rank{rank}.value").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        from torch import distributed

        if code == 0 and distributed.is_initialized():
            distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    if request.finalizes:
        raise SystemExit(code)  # unwinds the server's frames and ends the interpreter
    os._exit(code)


class _Run:
    """The running ranks of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.exit_codes: dict[int, int] = {}
        self.first_failed: int | None = None
        self.deadline = time.monotonic() + request.timeout_s
        self.timed_out = False
        parent = os.getpid()
        self.pids: dict[int, int] = {}  # pidfd -> rank
        self.pid_of: dict[int, int] = {}
        for rank in range(request.num_ranks):
            pid = os.fork()
            if pid == 0:
                _rank_main(request, rank, parent)
            self.pids[os.pidfd_open(pid)] = rank
            self.pid_of[rank] = pid

    def wait(self, stdin: int) -> Answer:
        """Wait for all ranks; the first failure shortens the deadline of the others."""
        while self.pids:
            left_s = max(0.0, self.deadline - time.monotonic())
            readable, _, _ = select.select([stdin, *self.pids], [], [], left_s)
            if stdin in readable or not readable:
                self.timed_out = not readable and self.first_failed is None
                self._kill()
                break
            for pidfd in readable:
                self._reap(pidfd)
        num_orphans = _kill_orphans()
        codes = [self.exit_codes.get(rank) for rank in range(self.request.num_ranks)]
        return Answer(codes, self.first_failed, self.timed_out, num_orphans)

    def _reap(self, pidfd: int) -> None:
        rank = self.pids.pop(pidfd)
        os.close(pidfd)
        status = os.waitpid(self.pid_of.pop(rank), 0)[1]
        code = os.waitstatus_to_exitcode(status)
        self.exit_codes[rank] = code
        if code != 0 and self.first_failed is None:
            self.first_failed = rank
            grace_s = _FINALIZING_S if self.request.finalizes else _GRACE_S
            self.deadline = min(self.deadline, time.monotonic() + grace_s)

    def _kill(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for pidfd in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            time.sleep(0.3 if number == signal.SIGUSR1 else 0)
        for pidfd, rank in self.pids.items():
            os.close(pidfd)
            os.waitpid(self.pid_of[rank], 0)
        self.pids.clear()


def main() -> None:
    """Serve requests until stdin closes."""
    # Requests use a private descriptor, so that output of the ranks cannot corrupt the protocol.
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preload()
    gc.freeze()  # a rank's collections would copy all pages shared with the server
    send(answers, "ready")
    try:
        while True:
            try:
                request = receive(requests)
            except EOFError:
                return
            send(answers, _Run(request).wait(requests.fileno()))
    finally:
        gc.unfreeze()  # nanobind reports objects still frozen at exit as leaked
