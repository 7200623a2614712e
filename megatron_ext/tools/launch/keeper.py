"""Runs the ranks of one host so that losing one rank does not end the others (`--keep-going`).

    python -m megatron_ext.tools.launch.keeper REPORT.json GRACE_S RESERVE TORCHRUN_FLAGS SCRIPT ...

It takes torchrun's flags and writes the same files. torchrun itself ends all ranks within a second
of the first loss. So does nvidia-resiliency-ext's `ft_launcher` from 0.6 on, which dropped the
policy that tolerated losses. The ranks restart themselves, inside their processes
(`megatron_ext/training/survival.py`). This process hosts the stores through which they rendezvous,
so that the job can lose any rank.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.losses import Loss, Losses
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.upstream import parent

_STORES = {1: "the store of the ranks", 2: "the store of nvidia-resiliency-ext"}
"""Distance from the master port, as Megatron and nvidia-resiliency-ext choose it -> the store."""
_STORE_TIMEOUT_S = 300.0
_TURN_S = 0.05
_STEP = re.compile(rb"\biteration +\d+/ *\d+ \|")
"""Matches the line that Megatron logs after a step."""
_RESTART = re.compile(
    rb"\brestart \d+ in the same processes: (\d+) of (\d+) ranks are left"
)
"""Matches the line that announces a restart (`megatron_ext/training/survival.py`)."""


class Rank:
    """A rank on this host, and the thread that reads its output."""

    def __init__(
        self, rank: int, command: list[str], log_dir: Path, *, is_shown: bool
    ) -> None:
        self.rank = rank
        self.is_lost = False
        log_dir.mkdir(parents=True)
        self._log = (log_dir / "stdout.log").open("wb", buffering=0)
        self._is_shown = is_shown
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(log_dir / "error.json"),
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def follow(self, losses: Losses) -> None:
        """Write every line of the rank to its log, and show it if required, until the rank ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A full disk must not end this loop: the rank would block when its pipe is full.
            with suppress(OSError):
                self._log.write(line)
            if self._is_shown:
                _show(self.rank, line)
            if restart := _RESTART.search(line):
                losses.note_restart(num_lost=int(restart[2]) - int(restart[1]))
            elif _STEP.search(line):
                losses.note_step()
        self._log.close()

    def end_children(self) -> None:
        """End the processes that a lost rank has started, such as writers of a checkpoint.

        NVRx's monitor survives, because it runs in another session. It must report the loss.
        """
        # Use SIGTERM, which Python's resource trackers ignore. They remove semaphores and shared
        # memory once the other processes have ended.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)


# The threads of all ranks write to the same stream; the lock keeps their lines whole.
_OUTPUT = threading.Lock()


def _show(rank: int, line: bytes) -> None:
    with _OUTPUT, suppress(OSError):
        sys.stdout.buffer.write(
            runs.RANK_MARK + b"%d " % rank + line.rstrip(b"\n") + b"\n"
        )
        sys.stdout.buffer.flush()


def _say(rank: int, text: str) -> None:
    _show(rank, text.encode())


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse torchrun's flags, as the launcher writes them, and the command of a rank."""
    parser = argparse.ArgumentParser()
    for flag in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--master-addr", "--rdzv-id", "--log-dir"):
        parser.add_argument(flag, required=True)
    for flag in ("--max-restarts", "--local-addr", "--redirects", "--tee"):
        parser.add_argument(flag)
    parser.add_argument("-m", dest="command", nargs=argparse.REMAINDER, required=True)
    return parser.parse_args(words)


def _hosted_stores(args: argparse.Namespace) -> list[Any]:
    """Return the stores that rank 0 usually hosts, where they would end with rank 0."""
    from torch._C._distributed_c10d import TCPStore

    stores = []
    for distance, purpose in _STORES.items():
        port = args.master_port + distance
        try:
            store = TCPStore(
                args.master_addr,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            )
        except RuntimeError as error:
            raise SystemExit(
                f"port {port} for the store ({purpose}) cannot be used: {error}; give another "
                "--master-port, with two free ports after it"
            ) from error
        stores.append(store)
    return stores


class Keeper:
    """Runs the ranks of this host until the last one has ended."""

    def __init__(
        self, args: argparse.Namespace, losses: Losses, grace_s: float
    ) -> None:
        self._losses = losses
        self._grace_s = grace_s
        self._stopped_by: int | None = None
        self._ranks_met = Path(args.log_dir) / "ranks_met"
        shown = set()
        for item in (args.tee or "").split(","):
            # An item is RANK:STREAMS.
            if item:
                shown.add(int(item.partition(":")[0]))
        # torchrun sets these variables for its ranks, except for the last three.
        os.environ.update(
            {
                "WORLD_SIZE": str(args.nproc_per_node),
                "LOCAL_WORLD_SIZE": str(args.nproc_per_node),
                "MASTER_ADDR": args.master_addr,
                "MASTER_PORT": str(args.master_port),
                "TORCHELASTIC_RUN_ID": args.rdzv_id,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "GROUP_RANK": "0",
                parent.HOSTED_STORES: "1",
                parent.RANKS_MET: str(self._ranks_met),
                # Hides torch's warnings about store time-outs, which NVRx uses deliberately.
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "error"),
            }
        )
        # Install the handlers before the first rank starts: without them, a signal would end this
        # process and leave the ranks.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        command = [sys.executable, "-u", "-m", *args.command]
        folder = Path(args.log_dir) / "kept" / "attempt_0"
        self._ranks = [
            Rank(rank, command, folder / str(rank), is_shown=rank in shown)
            for rank in range(args.nproc_per_node)
        ]

    def run(self) -> Loss | None:
        """Wait for all ranks; return the loss that ended the job, or None."""
        threads = []
        for rank in self._ranks:
            thread = threading.Thread(
                target=rank.follow, args=(self._losses,), daemon=True
            )
            thread.start()
            threads.append(thread)
        while any(rank.process.poll() is None for rank in self._ranks):
            self._note_losses()
            if self._stopped_by is not None or self._losses.fatal is not None:
                self._end_all()
                break
            time.sleep(_TURN_S)
        else:
            # The last ranks have ended since the last turn, perhaps with a failure.
            self._note_losses()
        for thread in threads:
            thread.join(self._grace_s)
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)
        return self._losses.fatal

    def _note_losses(self) -> None:
        """Record the ranks that were lost since the last call."""
        for rank in self._ranks:
            code = rank.process.poll()
            # A rank that ends with code 0 has finished, and is not lost.
            if code and not rank.is_lost:
                rank.is_lost = True
                rank.end_children()
                is_early = not self._ranks_met.exists()
                self._losses.add(Loss(rank.rank, code, time.time(), is_early=is_early))

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped_by = number

    def _end_all(self) -> None:
        """Ask the remaining ranks to end, and kill them after the grace period."""
        deadline = time.monotonic() + self._grace_s
        for rank in self._ranks:
            with suppress(OSError):
                rank.process.send_signal(signal.SIGTERM)
        while any(rank.process.poll() is None for rank in self._ranks):
            if time.monotonic() > deadline:
                for rank in self._ranks:
                    rank.process.kill()
            time.sleep(_TURN_S)


def main() -> int:
    """Run the ranks; return 0 if enough of them finished, else the code of the fatal loss."""
    report = Path(sys.argv[1])
    grace_s = float(sys.argv[2])
    reserve = int(sys.argv[3])
    parent.die_with_parent()
    args = _parsed(sys.argv[4:])
    stores = _hosted_stores(args)
    losses = Losses(report.parent, reserve, _say)
    fatal_loss = Keeper(args, losses, grace_s).run()
    del stores  # ranks need them until here
    if fatal_loss is None:
        return 0
    failure = {
        "stopped": [],
        "rank": fatal_loss.rank,
        "local_rank": fatal_loss.rank,
        "exit_code": fatal_loss.exit_code,
    }
    with suppress(OSError), RunFolder.open(report.parent) as folder:
        folder.write_json(report.name, failure)
    return (
        fatal_loss.exit_code if fatal_loss.exit_code > 0 else 128 - fatal_loss.exit_code
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
