"""The reason why a rank exited, written by the rank and read by its launcher.

torchrun gives each rank a file for its error and reports the rank that exited first. That rank
often only lost its peer, while the rank that caused the failure is still exiting. So each rank also
records how it exited, and `first` picks the cause from all ranks' records.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext import files
from megatron_ext.errors import (
    HangError,
    MegatronExtError,
    TransportError,
    UserError,
    line_of,
    message_of,
    shortened,
)
from megatron_ext.upstream import parent
from megatron_ext.upstream.signatures import megatron_arguments

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file that torchrun reads when a rank fails."""

# Ordered from the most certain cause to the most certain consequence. A process that was stopped or
# killed did not fail because of its peers. Megatron's result check stops all ranks, including the
# ranks with good results. A rank that exited with code 0 comes late in this order: it only explains
# why its peers lost their connection to it.
KINDS = (
    "stopped",
    "killed",
    "rejected",
    "error",
    "exit",
    "hang",
    "unknown",
    "left",
    "effect",
)

_MAX_REASON = 600
_RESULTS_REJECTED = (16, 17)
"""Exit codes of Megatron's rerun state machine: the last result was NaN, infinite or too large."""
# torch.distributed raises plain RuntimeErrors for lost connections; these phrases come from gloo
# and NCCL.
_PEER_LOST = re.compile(
    r"gloo/|Connection (?:closed|reset|refused) by|Connection was likely closed|remote process "
    r"exited|ncclRemoteError|Timed out waiting \d+ ?ms"
)

# torchrun stops a failed job with SIGTERM, which a data loader's worker may receive
# before its rank does. If the system kills a worker, for example because memory is
# full, the signal is SIGKILL.
_STOPPED_WORKER = re.compile(r"DataLoader worker .* is killed by signal: Terminated")


@dataclass(frozen=True)
class Cause:
    """The reason why a rank exited or stopped making progress."""

    rank: int
    """Global rank of the culprit if the reporting rank knows it, else of the reporting rank."""
    kind: str
    """One of `KINDS`."""
    reason: str
    """The exception's text, in one line."""
    at: float
    """When the rank exited, in seconds since 1970, according to its host's clock."""
    iteration: int | None = None
    """The training iteration, counted from 1. None before training and in programs without
    iterations."""
    order: int = 0
    """Order of rejected results within a step: losses come before gradients."""
    code: int | None = None
    """The rank's exit code, negative for a signal; None if the rank does not exit on its own."""

    @property
    def is_sure(self) -> bool:
        """Whether stopping a job can never make a rank exit for this kind of reason."""
        return self.kind in ("stopped", "rejected", "error", "hang")

    @property
    def precedence(self) -> tuple[int, int, float]:
        """The sort key: the smallest one belongs to the first cause."""
        return KINDS.index(self.kind), self.order, self.at


def first(causes: Sequence[Cause]) -> Cause | None:
    """Return the cause that explains the others; any of them may provide its iteration."""
    if not causes:
        return None
    earliest = min(causes, key=lambda cause: cause.precedence)
    iterations = []
    for cause in causes:
        if cause.iteration is not None:
            iterations.append(cause.iteration)
    if earliest.iteration is None and iterations:
        # A rank that was killed or stopped reports nothing, but its peers were in the same step.
        earliest = replace(earliest, iteration=max(iterations))
    return earliest


def of_error(error: BaseException) -> Cause:
    """Return the cause for an exception that stops this rank."""
    error = _explaining(error)
    rank = started_rank()
    code = 1  # also the exit code of `SystemExit` with a text
    if isinstance(error, UserError):
        code = 2
    elif isinstance(error, SystemExit) and isinstance(error.code, int | None):
        code = error.code or 0
    ending = Cause(
        rank,
        "error",
        _words(error),
        time.time(),
        current_iteration(),
        code=code,
    )
    # The rank that failed first writes the reason into its own file.
    if isinstance(error, TransportError) or _is_consequence(error):
        return replace(ending, kind="effect")
    # Megatron stops a rank that has a rejected result with an exit code or a plain RuntimeError, so
    # the exception alone does not identify this case.
    message = _rejected_result()
    if message is not None:
        order = _order_in_step(message)
        return replace(ending, kind="rejected", reason=message, order=order)
    if isinstance(error, HangError):
        # The watchdog uses the ranks of the current attempt.
        current_rank = os.environ.get("RANK", "0")
        if error.rank is None or str(error.rank) == current_rank:
            return replace(ending, kind="hang")
        # Blame the rank that the others are waiting for. It is still running, so it has
        # no exit code.
        return replace(ending, kind="hang", rank=error.rank, code=None)
    if isinstance(error, SystemExit):
        has_result_check = "megatron.core.rerun_state_machine" in sys.modules
        if code in _RESULTS_REJECTED and has_result_check:
            reason = "Megatron's result check failed on another rank"
            return replace(ending, kind="effect", reason=reason)
        reason = _exit_words(error)
        if left_while_loading(error):
            reason = f"Megatron did not load the checkpoint; its log above says why: {reason}"
            return replace(ending, kind="exit", reason=reason, code=1)
        kind = "exit" if code else "left"
        return replace(ending, kind=kind, reason=reason)
    return ending


def _explaining(error: BaseException) -> BaseException:
    """Return the hang or lost-peer error that was being handled when this error was raised.

    While a job shuts down, its data loader's workers are killed. torch raises an error for each of
    them at whatever line the rank is running, even while it reports the first error.
    """
    earlier: BaseException | None = error
    while earlier is not None:
        if isinstance(earlier, HangError | TransportError):
            return earlier
        earlier = earlier.__cause__ or earlier.__context__
    return error


def left_while_loading(error: SystemExit) -> bool:
    """Return whether Megatron stopped this rank with exit code 0 because of its checkpoint.

    Megatron does so if the checkpoint is missing (`--exit-on-missing-checkpoint`), damaged or of an
    unknown version. Rank 0 prints the reason before it exits.
    """
    module = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # The last frame is the innermost one.
        module = frame.f_globals.get("__name__")
    return not error.code and module == "megatron.training.checkpointing"


def current_iteration() -> int | None:
    """Return the number of Megatron's current iteration, counted from 1; None before the first."""
    # At the start of each iteration, Megatron sets it to the number of completed
    # iterations.
    completed = getattr(megatron_arguments(), "curr_iteration", None)
    return None if completed is None else completed + 1


def started_rank() -> int:
    """Return the global rank that this process had when the launcher started it.

    The launcher uses this number for ranks and their logs, even after a restart in the same
    processes has given them different ranks.
    """
    text = os.environ.get(parent.STARTED_RANK) or os.environ.get("RANK", "0")
    # Without our launcher, a reserve rank's initial rank is unknown.
    return int(text) if text.isdecimal() else 0


def write(cause: Cause, callstack: str) -> None:
    """Write the file that torchrun and the launcher's agent read; without torchrun, do nothing.

    The file is written atomically: when a rank is killed, its peers fail, and torchrun sends them
    SIGTERM while they write. An incomplete file would crash torchrun with a traceback.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    # torchrun compares whole seconds, and reports the lowest of the ranks that exited within the
    # same second. Shift the time stamps so that a cause precedes its effects.
    shift_s = 1 if cause.kind == "effect" else -1
    timestamp_s = int(cause.at) + shift_s
    extra = {
        "py_callstack": callstack,
        "timestamp": str(timestamp_s),
    }
    content = {
        "message": {"message": cause.reason, "extraInfo": extra},
        "cause": asdict(cause),
    }
    with suppress(OSError):  # the disk may be full, which may be why the rank failed
        files.write_text(Path(path), json.dumps(content))


def read(folder: Path, survived: Sequence[int] = ()) -> list[Cause]:
    """Return the causes in a job's error files on this host, inside torchrun's log folder.

    Args:
        folder: The log folder.
        survived: Local ranks whose loss the job survived, so they explain nothing.
    """
    causes = []
    survived_names = [str(rank) for rank in survived]
    for path in folder.glob("*/attempt_0/*/error.json"):
        if path.parent.name in survived_names:
            continue
        # Programs that were not started through this package write files in torch's own format.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            content = json.loads(path.read_text(encoding="utf-8"))
            causes.append(from_json(content["cause"]))
    return causes


def from_json(fields: Any) -> Cause:
    """Return a cause from its JSON form.

    Raises:
        TypeError, ValueError: The fields do not match this version of `Cause`.
    """
    cause = Cause(**fields)
    if cause.kind not in KINDS or not math.isfinite(cause.at):
        raise ValueError(f"unknown cause {cause.kind} at {cause.at}")
    return cause


def _is_consequence(error: BaseException) -> bool:
    """Return whether torch raised this error because another rank failed."""
    # In some releases of torch, DistBackendError and similar errors have no common
    # public base class.
    kind = type(error)
    is_torchs = kind.__module__.startswith("torch")
    if is_torchs and kind.__name__.startswith("Dist"):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return bool(_PEER_LOST.search(message) or _STOPPED_WORKER.search(message))


def _rejected_result() -> str | None:
    """Return the invalid result that Megatron's rerun state machine found on this rank, if any.

    Only results of the current step are returned. Megatron then stops all ranks, with an exit code,
    or with an error if `--save` is not set.
    """
    module: Any = sys.modules.get("megatron.core.rerun_state_machine")
    machine: Any = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)
    call = getattr(machine, "failed_validation_call", None)
    if call is None or machine.continue_requested:
        return None
    is_checking = machine.rerun_requested or "CHECKPOINT" in machine.state.name
    if not is_checking:
        return None  # the call belongs to an earlier step
    return line_of(f"{call.caller.message} (result: {machine.initial_result})")


def _order_in_step(message: str) -> int:
    """Return the order of a rejected result within a step: losses come before gradients."""
    if "loss" in message:
        return 0
    # A NaN gradient makes the gradients of all earlier stages NaN, so the latest of these stages
    # had it first.
    groups: Any = sys.modules["megatron.core.parallel_state"]
    num_stages = groups.get_pipeline_model_parallel_world_size()
    stage = groups.get_pipeline_model_parallel_rank()
    return int(num_stages - stage)


def _words(error: BaseException) -> str:
    """Return an exception in one line, preceded by the exception that caused it."""
    causing = error
    while causing.__cause__ is not None:
        causing = causing.__cause__
    words = _own_words(causing)
    if causing is not error:
        words = f"{words}; this led to {_own_words(error)}"
    return shortened(line_of(words), _MAX_REASON)


def _own_words(error: BaseException) -> str:
    message = str(error)
    if error.__traceback__ is not None:
        message = message_of(error)
    stripped_lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in stripped_lines if line]
    # A DataLoader worker sends its whole traceback, whose last line contains the error.
    is_workers = any("Original Traceback" in line for line in lines)
    # In other messages, the first line contains the error: torch appends stacks and hints.
    line = ""
    if lines:
        line = lines[-1] if is_workers else lines[0]
    if isinstance(error, MegatronExtError) or is_workers:
        return line
    if isinstance(error, KeyError):
        line = str(error)
    name = type(error).__name__
    return f"{name}: {line}" if line else name


def _exit_words(error: SystemExit) -> str:
    """Return which line of the program called `sys.exit` and with which argument."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        innermost = frames[-1]
        file_name = Path(innermost.filename).name
        place = f" at {file_name}:{innermost.lineno}"
    words = f"sys.exit({error.code}){place}"
    if error.code is None:
        words = f"sys.exit(){place}"
    elif isinstance(error.code, str):
        words = f"{error.code} (sys.exit{place})"
    return shortened(line_of(words), _MAX_REASON)
