"""Runs a training script: upstream's own if a Megatron-LM tree is present, otherwise one for GPT.

Without a tree, `megatron_ext/training/wheel.py` runs in place of `pretrain_gpt.py`. It uses the
wheel's `megatron.training` (0.17 or newer).

The runner arms the patches and then runs the script's file unmodified, as `__main__`. An error that
the user can fix is reported in one line, with exit code 2.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import runpy
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType

import wrapt

from megatron_ext import devices
from megatron_ext.errors import (
    ArgumentsError,
    MegatronExtError,
    PeerDied,
    UserError,
    message_of,
)
from megatron_ext.upstream import failure, releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.upstream.scripts import find_script

# Text of the error that a gloo or NCCL collective raises after another rank has exited.
_LOST = re.compile(
    r"Connection (?:closed|reset) by peer(?: \S+\d)?|remote process exited"
)

# Importing this module registers stack dumps for SIGINT and SIGTERM (`_without_stacks`).
_DUMPS_STACKS = "megatron.core.inference.data_parallel_inference_coordinator"


def choose(script: str) -> Path | None:
    """Return a script's file (`find_script`) and select the tree that contains it."""
    path = find_script(script)
    if path is not None and upstream.is_tree(path.parent):
        # Everything else in this process, and all of its child processes, find the tree through
        # this variable.
        os.environ["MEGATRON_LM_PATH"] = str(path.parent)
    return path


def execute(script: Path | None) -> None:
    """Run the script from `choose` in this process; errors propagate."""
    if script is None:
        # The replacement needs the patches; without them, our flags would have no effect.
        if os.environ.get("MEGATRON_EXT_DISABLE", "0") == "1":
            raise UserError(
                "MEGATRON_EXT_DISABLE=1 disables the replacement for upstream's script; unset it, "
                "or run upstream's own script: set MEGATRON_LM_PATH to a Megatron-LM tree"
            )
        from megatron_ext.training import wheel

        wheel.main()
        return
    # As with `python SCRIPT`, let the script import the modules next to it. Our import
    # finder still ignores the tree's megatron.core.
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _address_of_one() -> None:
    """Set the rendezvous variables that torch needs if a single process runs without a launcher."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks != "1" or "MASTER_ADDR" in os.environ:
        return
    with socket.socket() as probe:
        # A fixed port would make two training runs on one host connect to each other.
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    defaults = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "MASTER_PORT": port,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    os.environ["MASTER_ADDR"] = "localhost"


def _explained(error: BaseException) -> MegatronExtError | None:
    """Return the error to report in one line, or None if the traceback is more helpful."""
    if isinstance(error, MegatronExtError):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ModuleNotFoundError):
        missing_package = _missing_package(error, frames)
        if missing_package is not None:
            return missing_package
    raised_in = frames[-1]
    is_megatrons = _is_of_megatron(raised_in)
    # Megatron checks some rules when creating its configuration rather than in
    # validate_args.
    is_rule = is_megatrons and raised_in.f_code.co_name == "__post_init__"
    if is_rule and isinstance(error, (AssertionError, ValueError)):
        return ArgumentsError(f"Megatron-LM refused the arguments: {message_of(error)}")
    if type(error).__module__.startswith("nvidia_resiliency_ext."):
        return _ended_by_restarts(error)
    if isinstance(error, RuntimeError):
        lost_peer = _lost_peer(error)
        if lost_peer is not None:
            return lost_peer
    cause = error.__cause__  # set, for example, for "MockGPTDataset failed to build"
    if is_megatrons and cause is not None and cause.__traceback__ is not None:
        return _explained(cause)
    return None


def _ended_by_restarts(error: BaseException) -> MegatronExtError | None:
    """Return the error that stopped in-process restarts; None if the traceback is clearer."""
    if type(error).__name__ == "RestartAbort":
        return PeerDied(
            "--inprocess-restart: fewer ranks are left than --inprocess-active-world-size, or "
            f"--inprocess-max-iterations is reached ({error}); start the job again"
        )
    reason = error.__cause__ or error.__context__
    if reason is None or reason.__traceback__ is None:
        return None
    return _explained(reason)


def _is_of_megatron(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("megatron.")


def _missing_package(
    error: ModuleNotFoundError,
    frames: Sequence[FrameType],
) -> UserError | None:
    """Return the error for a package that Megatron imports but that is not installed."""
    # Skip the import system's frames, which are between the importing line and the error.
    outside_imports = [
        frame for frame in frames if "importlib" not in frame.f_code.co_filename
    ]
    full_name = error.name or ""
    package = full_name.partition(".")[0]
    is_megatrons_import = _is_of_megatron(outside_imports[-1])
    if not is_megatrons_import or package in {"megatron", "megatron_ext"}:
        return None
    remedy = f"none of megatron-ext's extras installs it: pip install {package}, if it can run here"
    if _is_in_extra(package, "upstream"):
        remedy = "pip install 'megatron-ext[upstream]' installs what its scripts need"
    return UserError(
        f"Megatron-LM's own code imports {error.name}, which is not installed; {remedy}"
    )


def _is_in_extra(package: str, extra: str) -> bool:
    """Return whether one of this package's extras installs another package."""
    requirements: list[str] = []
    # A checkout on PYTHONPATH has no metadata.
    with suppress(metadata.PackageNotFoundError):
        requirements = metadata.requires("megatron-ext") or []
    for requirement in requirements:
        is_named = re.match(rf"{re.escape(package)}\b", requirement)
        if is_named and requirement.endswith((f'"{extra}"', f"'{extra}'")):
            return True
    return False


def _lost_peer(error: RuntimeError) -> PeerDied | None:
    """Return the error for a collective that failed because another rank exited."""
    # The script itself may raise an error with the same text about another connection.
    text = str(error)
    is_torchs = type(error).__module__ == "torch.distributed" or "gloo/" in text
    lost_connection = _LOST.search(text)
    if not is_torchs or lost_connection is None:
        return None
    # The innermost frame outside torch called the collective.
    for caller in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(caller.filename)
        if "torch" not in path.parts:
            return PeerDied(
                f"{caller.name} ({path.name}:{caller.lineno}) lost the connection to another rank, "
                f"whose own error or traceback gives the reason: {lost_connection[0]}"
            )
    return None


def run(script: str, argv: Sequence[str]) -> int:
    """Run a patched script in this process, with these arguments; return the exit code.

    Errors from other packages propagate with their traceback.
    """
    if {"-h", "--help"} & set(argv):
        if not _is_rank_0():
            return 0  # rank 0 prints the help
        warnings.simplefilter("ignore")
    # Do not use basicConfig: upstream calls it later, which has no effect once the root
    # logger has a handler.
    level = logging.WARNING
    if _is_rank_0():
        level = logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("megatron_ext: %(message)s"))
    logger = logging.getLogger("megatron_ext")
    logger.handlers = [handler]
    # Megatron adds a handler to the root logger, which would print each line twice.
    logger.propagate = False
    logger.setLevel(level)
    with failure.interrupts() as interrupted:
        try:
            _run(script, argv)
        except BaseException as error:
            # The launcher terminates all ranks as soon as one exits. Ignore its signal, so that
            # this rank still reports its own reason and exits with its own code.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if interrupted.is_set():
                failure.report_interrupt()
                return 128 + signal.SIGINT
            if isinstance(error, SystemExit):
                if failure.report_exit(error):
                    return 1
                raise
            explained = _explained(error)
            if explained is None:
                raise
            failure.report(explained)
            return 2 if isinstance(explained, UserError) else 1
    return 0


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _without_stacks(_coordinator: ModuleType) -> None:
    """Undo a side effect of importing this Megatron module: stack dumps on Ctrl-C and SIGTERM.

    A launcher sends these signals to every rank when a job ends, so a dump would not indicate a
    fault.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        faulthandler.unregister(number)


def _run(script: str, argv: Sequence[str]) -> None:
    releases.check_core()
    path = choose(script)
    # Megatron parses the process's command line.
    sys.argv = [str(path or script), *argv]
    # Select the device (from --device-backend) before Megatron is imported, because Megatron copies
    # names from torch.cuda.
    devices.current()
    if path is None and _is_rank_0():
        print(
            "megatron_ext trains GPT with the wheel's megatron.training (no Megatron-LM tree was "
            "found)",
            flush=True,
        )
    _address_of_one()
    wrapt.register_post_import_hook(_without_stacks, _DUMPS_STACKS)
    with failure.watching_other_hosts():
        execute(path)
