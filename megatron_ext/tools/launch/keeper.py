"""Runs one host's ranks so that losing one rank does not stop the others (`--keep-going`).

    python -m megatron_ext.tools.launch.keeper REPORT.json GRACE_S RESERVE COUNTS TORCHRUN_FLAGS ...

RESERVE is the total number of reserve ranks, and COUNTS lists the number of ranks on each host. The
keeper accepts torchrun's flags and writes the same files. torchrun itself stops all ranks within a
second of the first loss. So does nvidia-resiliency-ext's `ft_launcher` since release 0.6, which
dropped the policy that tolerated losses. The ranks restart themselves within their processes
(`megatron_ext/training/survival.py`). The first host's keeper hosts the stores that the ranks use
to rendezvous, so that the job can lose any rank. The other keepers report their losses to it
(`megatron_ext/tools/launch/board.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.board import Board, FirstBoard, FirstHostLost, OtherBoard
from megatron_ext.tools.launch.losses import Loss, Losses
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.upstream import parent

STORES = {1: "the ranks' store", 2: "nvidia-resiliency-ext's store"}
"""Offset from the master port, as chosen by Megatron and nvidia-resiliency-ext -> the store."""
_STORE_TIMEOUT_S = 300.0
_TURN_S = 0.5
"""How often notes from other hosts are read. A rank that exits triggers a turn immediately."""
_LAST_NOTES_S = 10.0
"""How long the first host waits for the others to finish, after the grace period."""
_STEP = re.compile(rb"\biteration +\d+/ *\d+ \|")
"""Matches the line that Megatron logs after a step."""
_RESTART = re.compile(
    rb"\brestart (\d+) in the same processes: (\d+) of (\d+) ranks are left"
)
"""Matches the line that announces a restart (`megatron_ext/training/survival.py`)."""


class Rank:
    """A rank on this host and the thread that reads its output."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        command: list[str],
        log_dir: Path,
        *,
        is_shown: bool,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.is_noted = False
        """Whether the board knows that the rank has exited."""
        log_dir.mkdir(parents=True)
        self._error_file = log_dir / "error.json"
        self._reserve_mark = log_dir / "in_reserve"
        # Open the log unbuffered, so that `logs` and the agent can read every line immediately.
        self._log = (log_dir / "stdout.log").open("wb", buffering=0)
        self._is_shown = is_shown
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            parent.STARTED_RANK: str(rank),
            parent.IN_RESERVE: str(self._reserve_mark),
            # The rank writes its cause here (`upstream/cause.py`).
            "TORCHELASTIC_ERROR_FILE": str(self._error_file),
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # `end_children` signals the process group, which must only contain this
            # rank's processes.
            start_new_session=True,
        )

    def follow(self, board: FirstBoard | OtherBoard) -> None:
        """Write the rank's output to its log, and show it if requested, until the rank exits."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Keep reading even if the disk is full, because otherwise the rank would block on a
            # full pipe.
            with suppress(OSError):
                self._log.write(line)
            if self._is_shown:
                _show(self.rank, line)
            restart = _RESTART.search(line)
            if restart is not None:
                number, num_left, num_before = map(int, restart.groups())
                board.note_restart(number, num_lost=num_before - num_left)
            elif _STEP.search(line):
                board.note_step()
        self._log.close()

    @property
    def is_in_reserve(self) -> bool:
        """Whether the rank is in reserve or, if it has exited, was in reserve."""
        return self._reserve_mark.exists()

    @property
    def exited_at(self) -> float:
        """When this rank, which has exited, called `sys.exit`; now if it has not."""
        # Not the file's time, which may come from a file server's clock.
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self._error_file.read_text(encoding="utf-8"))
            return float(content["cause"]["at"])
        return time.time()

    def end_children(self) -> None:
        """Stop the processes that a lost rank started, such as checkpoint writers.

        NVRx's monitor runs in a different session, so it survives and can report the loss.
        """
        # Use SIGTERM, which Python's resource trackers ignore: they remove semaphores
        # and shared memory once the other processes have exited.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)


# All ranks' threads write to the same stream; the lock keeps lines intact.
_OUTPUT = threading.Lock()


def _show(rank: int, line: bytes) -> None:
    prefix = runs.RANK_MARK + b"%d " % rank
    text = line.rstrip(b"\n")
    with _OUTPUT, suppress(OSError):
        sys.stdout.buffer.write(prefix + text + b"\n")
        sys.stdout.buffer.flush()


def _say(rank: int, text: str) -> None:
    _show(rank, text.encode())


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse torchrun's flags, as the launcher writes them, and the command for a rank."""
    parser = argparse.ArgumentParser()
    for flag in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--master-addr", "--rdzv-id", "--log-dir"):
        parser.add_argument(flag, required=True)
    # The launcher passes the same flags to torchrun. `--max-restarts` and `--redirects` have no
    # effect here.
    for flag in ("--max-restarts", "--local-addr", "--redirects", "--tee"):
        parser.add_argument(flag)
    parser.add_argument("-m", dest="command", nargs=argparse.REMAINDER, required=True)
    return parser.parse_args(words)


def _hosted_stores(args: argparse.Namespace) -> list[Any]:
    """Return the stores that rank 0 usually hosts, which would be lost with rank 0."""
    from torch._C._distributed_c10d import TCPStore

    stores = []
    for distance, purpose in STORES.items():
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
                f"port {port} ({purpose}) cannot be used: {error}; choose another "
                "--master-port that is followed by two free ports"
            ) from error
        stores.append(store)
    return stores


def _store_of_first_host(args: argparse.Namespace) -> Any:
    """Return a connection to the ranks' store, after waiting until the first host serves it."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        args.master_addr,
        args.master_port + 1,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT_S),
    )


class Keeper:
    """Runs the ranks on this host until the last one has exited."""

    def __init__(
        self,
        args: argparse.Namespace,
        board: FirstBoard | OtherBoard,
        grace_s: float,
        counts: Sequence[int],
        ranks_met: Path,
    ) -> None:
        self._board = board
        self._grace_s = grace_s
        self._stopped_by: int | None = None
        self._ranks_met = ranks_met
        self._signaled = threading.Event()
        """Set by a signal: a rank has exited, or this process must stop."""
        shown = set()
        for item in (args.tee or "").split(","):
            # Each item has the form RANK:STREAMS.
            if item:
                shown_rank, _, _ = item.partition(":")
                shown.add(int(shown_rank))
        # Ranks exit with this process, even if a user started it without an agent.
        agent_pid = os.environ.get(parent.AGENT_PID, str(os.getpid()))
        # torchrun sets these variables for its ranks, except the last four.
        os.environ.update(
            {
                "WORLD_SIZE": str(sum(counts)),
                "LOCAL_WORLD_SIZE": str(args.nproc_per_node),
                "MASTER_ADDR": args.master_addr,
                "MASTER_PORT": str(args.master_port),
                "TORCHELASTIC_RUN_ID": args.rdzv_id,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "GROUP_RANK": str(args.node_rank),
                parent.HOSTED_STORES: "1",
                parent.RANKS_MET: str(ranks_met),
                parent.AGENT_PID: agent_pid,
                # Hides torch's warnings about store time-outs, which NVRx uses deliberately.
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "error"),
            }
        )
        if args.local_addr is not None:
            os.environ[parent.HOST_ADDRESS] = args.local_addr
        # Install the handlers before the first rank starts, because otherwise a signal would kill
        # this process and leave the ranks running.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, self._wake)
        command = [sys.executable, "-u", "-m", *args.command]
        # Use torchrun's layout, which the agent expects for logs and causes.
        folder = Path(args.log_dir) / "kept" / "attempt_0"
        first_rank = sum(counts[: args.node_rank])
        self._ranks: list[Rank] = []
        for local_rank in range(args.nproc_per_node):
            rank = Rank(
                first_rank + local_rank,
                local_rank,
                command,
                folder / str(local_rank),
                is_shown=local_rank in shown,
            )
            self._ranks.append(rank)

    def run(self) -> Loss | None:
        """Wait for the ranks; return the loss that stopped the job if this host must report it.

        The first host waits for the ranks on all hosts, because they rendezvous through its stores.

        Raises:
            FirstHostLost: The keeper on the first host does not answer; the ranks have exited.
        """
        threads = []
        for rank in self._ranks:
            thread = threading.Thread(
                target=rank.follow,
                args=(self._board,),
                daemon=True,
            )
            thread.start()
            threads.append(thread)
        try:
            self._watch()
        except FirstHostLost:
            self._end_all()
            raise
        for thread in threads:
            # A process that outlives its rank, such as NVRx's monitor, may keep the pipe open.
            thread.join(self._grace_s)
        if self._stopped_by is not None:
            raise SystemExit(128 + self._stopped_by)
        return self._reported_end()

    def _watch(self) -> None:
        """Wait until no ranks are running anymore or the ranks had to be stopped."""
        while True:
            # Clear this before polling the ranks, so that a rank that exits later
            # triggers a turn.
            self._signaled.clear()
            # Check this before recording losses. If a rank exits in between, the next turn records
            # its loss.
            is_needed = self._runs_ranks() or self._board.is_needed
            self._note_losses()
            self._board.take_turn()
            if self._board.fatal is not None:
                self._board.announce_end()
            # Ranks that the keeper stops are not lost, so record no losses from here on.
            if self._stopped_by is not None or self._board.fatal is not None:
                self._end_all()
                return
            if not is_needed:
                return
            self._signaled.wait(_TURN_S)

    def _runs_ranks(self) -> bool:
        return any(rank.process.poll() is None for rank in self._ranks)

    def _reported_end(self) -> Loss | None:
        """Return the loss that stopped the job, if this host must report it.

        The lost rank's host reports it to its agent; if that host is gone, the first host reports
        it.
        """
        board = self._board
        fatal = board.fatal
        ranks_here = [rank.rank for rank in self._ranks]
        is_lost_here = fatal is not None and fatal.rank in ranks_here
        if isinstance(board, OtherBoard):
            # The first host may have exited already, because no rank on this host needs it any
            # more.
            with suppress(FirstHostLost):
                board.write_end_of_host(is_reported=is_lost_here)
            return fatal if is_lost_here else None
        if fatal is None:
            return None
        # Keep serving the stores as long as other hosts may use them.
        deadline = time.monotonic() + self._grace_s + _LAST_NOTES_S
        while board.is_needed and time.monotonic() < deadline:
            board.take_turn()
            time.sleep(_TURN_S)
        return None if board.is_end_reported else fatal

    def _note_losses(self) -> None:
        """Record the ranks that have exited since the last call."""
        for rank in self._ranks:
            code = rank.process.poll()
            if code is None or rank.is_noted:
                continue
            rank.is_noted = True
            if code == 0:
                self._board.note_exit(rank.rank, rank.exited_at)
            else:
                rank.end_children()
                is_early = not self._ranks_met.exists()
                loss = Loss(
                    rank.rank,
                    code,
                    time.time(),
                    is_early=is_early,
                    was_in_reserve=rank.is_in_reserve,
                )
                self._board.add(loss)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped_by = number
        self._signaled.set()

    def _wake(self, _number: int, _frame: object) -> None:
        self._signaled.set()

    def _end_all(self) -> None:
        """Ask the remaining ranks to exit, and kill them after the grace period."""
        deadline = time.monotonic() + self._grace_s
        for rank in self._ranks:
            with suppress(OSError):
                rank.process.send_signal(signal.SIGTERM)
        while True:
            self._signaled.clear()
            if not self._runs_ranks():
                return
            if time.monotonic() > deadline:
                for rank in self._ranks:
                    rank.process.kill()
            self._signaled.wait(_TURN_S)


def main() -> int:
    """Run the ranks; return 0 if enough of them finished, otherwise the fatal loss's exit code."""
    report = Path(sys.argv[1])
    grace_s = float(sys.argv[2])
    reserve = int(sys.argv[3])
    counts = [int(count) for count in sys.argv[4].split(",")]
    parent.die_with_parent()
    args = _parsed(sys.argv[5:])
    ranks_met = Path(args.log_dir) / "ranks_met"
    stores = []
    board: FirstBoard | OtherBoard
    if args.node_rank == 0:
        stores = _hosted_stores(args)
        losses = Losses(report.parent, reserve, _say)
        board = FirstBoard(Board(stores[0]), losses, counts, ranks_met)
    else:
        board = OtherBoard(Board(_store_of_first_host(args)), args.node_rank)
    try:
        keeper = Keeper(args, board, grace_s, counts, ranks_met)
        fatal_loss = keeper.run()
    except FirstHostLost as error:
        sys.stderr.write(f"the first host's keeper does not answer: {error}\n")
        return 1
    del stores  # the ranks need them up to this point
    if fatal_loss is None:
        return 0
    first_rank = sum(counts[: args.node_rank])
    exit_code = fatal_loss.exit_code or 1
    # Report the loss in `elastic`'s format, which the agent reads. Errors that the job
    # survived do not explain why it ended.
    failure = {
        "stopped": [],
        "survived": board.survived,
        "early_exits": board.early_exits,
        "rank": fatal_loss.rank,
        "local_rank": fatal_loss.rank - first_rank,
        "exit_code": exit_code,
    }
    with suppress(OSError), RunFolder.open(report.parent) as folder:
        folder.write_json(report.name, failure)
    return exit_code if exit_code > 0 else 128 - exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
