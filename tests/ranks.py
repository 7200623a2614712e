"""Runs a function, or a training script, on several real ranks (processes, gloo) of this machine.

    def add(x):                      # module level, so that ranks find it by name
        ...torch.distributed...
    assert run_ranks(4, add, 1) == [10, 10, 10, 10]

Ranks are forked from a server that has already imported torch and Megatron (`tests.rank_server`),
so a run is as cheap as a unit test. A rank that fails ends the run: the error shows the first
failing rank and the end of its log. A run that lasts too long is killed, and the error shows where
each rank was.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_ext.upstream import releases
from tests.rank_server import Answer, Request, receive, send

_ROOT = Path(__file__).resolve().parent.parent
_TAIL_LINES = 50
_OTHERS_TIMEOUT_S = 1800.0
_BASE_ENV = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}


class RanksFailed(AssertionError):
    """A run in which not all ranks succeeded."""


@dataclass(frozen=True)
class RankRun:
    """A finished run; lists are by rank."""

    exit_codes: list[int | None]
    logs: list[str]
    values: list[Any]
    first_failed: int | None
    timed_out: bool
    num_orphans: int = 0
    """Processes that ranks left behind."""

    def describe(self) -> str:
        """Return which rank failed first, and the end of its log."""
        if self.timed_out:
            tails = (f"rank {r}:\n{_tail(log)}" for r, log in enumerate(self.logs))
            return "the ranks did not end in time\n" + "\n".join(tails)
        rank = self.first_failed or 0
        return (
            f"rank {rank} failed first (exit code {self.exit_codes[rank]}; all: "
            f"{self.exit_codes})\n{_tail(self.logs[rank])}"
        )


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-_TAIL_LINES:])


class _Server:
    """A running `tests.rank_server` for one device."""

    def __init__(self, device: str) -> None:
        env = {**os.environ, **_BASE_ENV, "MEGATRON_EXT_DEVICE": device}
        env.update(_device_env(device))
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_ROOT), env.get("PYTHONPATH")])
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.rank_server import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=_ROOT,
        )
        try:
            assert receive(self.process.stdout) == "ready"
        except EOFError:
            raise RanksFailed(
                f"the rank server for {device} did not start; see stderr"
            ) from None

    def run(self, request: Request) -> Answer:
        send(self.process.stdin, request)
        try:
            return receive(self.process.stdout)
        except EOFError:
            raise RanksFailed("the rank server died; see stderr") from None
        except (
            BaseException
        ):  # a test's time-out: the answer would be mistaken for the next one's
            self.process.kill()
            self.process.wait()
            raise

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _device_env(device: str) -> dict[str, str]:
    if device != "musa":
        return {}
    from tests.fake_musa.build import environment

    return environment()


_servers: dict[str, _Server] = {}


def _server(device: str) -> _Server:
    server = _servers.get(device)
    if server is None or server.process.poll() is not None:
        server = _servers[device] = _Server(device)
        atexit.register(server.close)
    return server


def start_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    device: str = "cpu",
    finalizes: bool = False,
) -> RankRun:
    """Run `fn(*args)` on every rank and return how it ended, failed or not.

    With `finalizes` each rank ends through the interpreter's exit; otherwise it ends at once, which
    is faster.
    """
    with tempfile.TemporaryDirectory(prefix="megatron_ext_ranks_") as directory:
        request = Request(
            module=fn.__module__,
            function=fn.__qualname__,
            args=args,
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            directory=directory,
            env=dict(env or {}),
            finalizes=finalizes,
        )
        server = _server(device)
        with ExitStack() as held:
            with _waiting_for_others():
                held.enter_context(_turn(num_ranks))
            answer = server.run(request)
        base = Path(directory)
        logs = [
            (base / f"rank{r}.log").read_text(errors="replace")
            for r in range(num_ranks)
        ]
        values = [_value(base / f"rank{r}.value") for r in range(num_ranks)]
    return RankRun(
        answer.exit_codes,
        logs,
        values,
        answer.first_failed,
        answer.timed_out,
        answer.num_orphans,
    )


@contextmanager
def _waiting_for_others() -> Iterator[None]:
    """Exclude the time that other tests use from this test's time-out.

    pytest-timeout uses this timer. The other tests have separate time-outs.
    """
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if left_s > 0:
        signal.setitimer(signal.ITIMER_REAL, left_s + _OTHERS_TIMEOUT_S)
    try:
        yield
    finally:
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, left_s)


@contextmanager
def _turn(num_ranks: int, file: Path = Path(__file__)) -> Iterator[None]:
    """Wait for one free core per rank, or for all cores if there are more ranks than cores.

    Otherwise runs of the same checkout, even in several test sessions, would slow each other down
    until they time out. Each core is represented by a byte of this file, which a run locks. A run
    that finds no free core waits for one particular core, even if another becomes free earlier.
    """
    num_cores = os.cpu_count() or 1
    with file.open("rb+") as cores, file.open() as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)  # few ranks must not starve many
        wanted_cores = min(num_ranks, num_cores)
        free = [
            core for core in range(num_cores) if _locked(cores, core, fcntl.LOCK_NB)
        ]
        for core in free[wanted_cores:]:
            fcntl.lockf(cores, fcntl.LOCK_UN, 1, core)
        for core in [core for core in range(num_cores) if core not in free][
            : wanted_cores - len(free)
        ]:
            _locked(cores, core)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def _locked(cores: IO[bytes], core: int, flags: int = 0) -> bool:
    try:
        fcntl.lockf(cores, fcntl.LOCK_EX | flags, 1, core)
    except BlockingIOError:
        return False
    return True


def _value(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """Run `fn(*args)` on every rank and return the results by rank.

    Raises:
        RanksFailed: A rank failed or the run lasted longer than `timeout_s`.
    """
    run = start_ranks(num_ranks, fn, *args, timeout_s=timeout_s, env=env, device=device)
    if any(code != 0 for code in run.exit_codes):
        raise RanksFailed(run.describe())
    return run.values


def require_training(script: str = "pretrain_gpt.py") -> None:
    """Skip a test if no script of this name can train: neither upstream's nor the wheel's loop."""
    import pytest  # not needed by benchmarks that use this module

    tree = os.environ.get("MEGATRON_LM_PATH")
    if tree and not Path(tree, script).is_file():
        pytest.skip(f"Megatron-LM {releases.core_version()} has no {script}")
    if not tree and (script != "pretrain_gpt.py" or not releases.has_training()):
        pytest.skip(
            f"{script} of {releases.core_version()} needs a tree: set MEGATRON_LM_PATH"
        )


def _run_script(script: str, argv: Sequence[str]) -> None:
    """Run a training script as the runner does."""
    from megatron_ext.training import runner

    code = runner.run(script, argv)
    if code:
        raise SystemExit(code)


def train_here(model: str, argv: Sequence[str]) -> None:
    """Train in this process as `_run_script` does, but let errors propagate."""
    from megatron_ext import devices
    from megatron_ext.training import runner

    sys.argv = [f"pretrain_{model}.py", *argv]
    devices.current()  # before Megatron is imported
    runner.execute(runner.choose(sys.argv[0]))


def parse(model: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Any:
    """Parse and validate flags in this process, as a training script does."""
    require_training()
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.training.arguments import parse_args, validate_args

    tokenizer = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}[model]
    environ, words = dict(os.environ), sys.argv
    sys.argv = ["pretrain.py", *argv]
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", **(env or {})})
    try:
        return validate_args(parse_args(), {"tokenizer_type": tokenizer})
    finally:
        sys.argv = words
        os.environ.clear()
        os.environ.update(environ)


def start_script(
    num_ranks: int,
    script: str,
    argv: Sequence[str],
    *,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> RankRun:
    """Run a training script as `python -m megatron_ext` does; return how it ended."""
    require_training(script)
    return start_ranks(
        num_ranks,
        _run_script,
        script,
        list(argv),
        timeout_s=timeout_s,
        env=env,
        device=device,
    )


def run_script(
    num_ranks: int, script: str, argv: Sequence[str], **options: Any
) -> list[str]:
    """Run a training script on every rank and return the output of each.

    Raises:
        RanksFailed: A rank failed or the run lasted too long.
    """
    run = start_script(num_ranks, script, argv, **options)
    if any(code != 0 for code in run.exit_codes):
        raise RanksFailed(run.describe())
    return run.logs


def losses(logs: Sequence[str] | str, name: str = "lm loss") -> list[float]:
    """Return the training losses that a run logged, in order (the last rank logs them)."""
    text = logs if isinstance(logs, str) else "\n".join(logs)
    return [
        float(value)
        for value in re.findall(
            rf"iteration\s+\d+/.*?\| {re.escape(name)}: ([-+.\dE]+|nan)", text
        )
    ]
