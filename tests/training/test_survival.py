"""Our part of `--inprocess-restart`: what runs before, at and after the loss of a rank."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from megatron_ext.config import active
from megatron_ext.errors import ArgumentsError, HangError, PeerDied
from megatron_ext.upstream import parent
from tests.ports import free_port
from tests.ranks import losses, require_training
from tests.saved_tensors import saved_tensors

pytest.importorskip(
    "nvidia_resiliency_ext.inprocess", reason="needs megatron-ext[resilience]"
)

from nvidia_resiliency_ext.inprocess import FrozenState

from megatron_ext.tools.compare.locate import compare
from megatron_ext.tools.launch import keeper
from megatron_ext.tracing.digest_files import VARIABLE
from megatron_ext.training import survival

if TYPE_CHECKING:
    from megatron_ext.sockets import OpenSocket


def state(**fields: Any) -> Any:
    return FrozenState(rank=0, world_size=2, **fields)


@pytest.fixture(autouse=True)
def first_attempt() -> Iterator[None]:
    yield
    active.begin_attempt(None)
    gc.unfreeze()


def test_a_survivor_and_a_rank_from_the_reserve_name_transports_alike() -> None:
    begin = survival.BeginAttempt()
    begin(state(iteration=0))
    assert active.name_transport("pipeline") == "pipeline/1"
    assert active.name_transport("pipeline") == "pipeline/2"
    begin(state(iteration=3))
    of_survivor = active.name_transport("pipeline")
    active._PROCESS.num_transports.clear()  # as in a process that has opened none
    begin(state(iteration=3))
    assert active.name_transport("pipeline") == of_survivor == "attempt 3/pipeline/1"


def test_the_launcher_knows_which_rank_is_in_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "in_reserve"
    monkeypatch.setenv(parent.IN_RESERVE, str(mark))
    begin = survival.BeginAttempt()
    begin(state(iteration=0, active_rank=None))
    assert mark.exists()
    begin(state(iteration=1, active_rank=0))
    assert not mark.exists()
    begin(state(iteration=2, active_rank=0))


def test_the_launcher_knows_the_line_with_which_a_restart_begins(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It comes at every --logging-level."""
    monkeypatch.setattr(
        logging.getLogger("megatron_ext.training.survival"), "level", logging.ERROR
    )
    begin = survival.BeginAttempt()
    begin(state(iteration=0))
    assert not capfd.readouterr().err
    begin(state(iteration=2, initial_world_size=5))
    line = keeper._RESTART.search(capfd.readouterr().err.encode())
    assert line is not None
    assert line.groups() == (b"2", b"2", b"5")


def test_torchs_hooks_for_uncaught_exceptions_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each puts the rank before every line of a traceback."""
    hook = sys.excepthook
    begin = survival.BeginAttempt()
    begin(state(iteration=0))
    monkeypatch.setattr(sys, "excepthook", lambda *error: hook(*error))
    begin(state(iteration=1))
    assert sys.excepthook is hook


def test_an_error_that_would_come_again_ends_the_rank() -> None:
    end = survival.EndConfiguration()
    assert end(state()) is not None  # ended by NVRx, for another rank
    with pytest.raises(ArgumentsError, match="two flags"):
        end(state(fn_exception=ArgumentsError("two flags")))
    lost, wrong = PeerDied("rank 1 died"), KeyError("step")
    for error in (lost, lost, wrong, lost):
        end(state(fn_exception=error))
    with pytest.raises(KeyError):
        end(state(fn_exception=KeyError("step")))
    end(state(fn_exception=HangError("rank 0 runs 0F0 for 20.1 s", 0)))
    with pytest.raises(HangError):
        end(state(fn_exception=HangError("rank 0 runs 0F0 for 20.3 s", 0)))


def test_an_error_in_a_step_that_training_has_passed_since_is_no_repetition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current_iteration: int | None = None
    monkeypatch.setattr(survival.cause, "current_iteration", lambda: current_iteration)
    end = survival.EndConfiguration()
    end(state(fn_exception=KeyError("data")))  # before the first step
    current_iteration = 5
    end(state(fn_exception=PeerDied("rank 1 died")))
    current_iteration = None
    end(state(fn_exception=KeyError("data")))
    current_iteration = 5
    end(state(fn_exception=KeyError("batch")))
    current_iteration = 6
    end(state())  # ended by NVRx, for another rank
    current_iteration = 5
    end(state(fn_exception=KeyError("batch")))
    with pytest.raises(KeyError):
        end(state(fn_exception=KeyError("batch")))


def test_a_blocked_module_of_megatron_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.blocked", None)
    assert survival.EndConfiguration()(state()).rank == 0


def test_nothing_of_an_attempt_stays_in_caches_of_megatron() -> None:
    rotary = pytest.importorskip(
        "megatron.core.models.common.embeddings.rotary_pos_embedding"
    )
    module = rotary.RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    module(4)
    instance = weakref.ref(module)
    del module
    assert instance() is not None, (
        "Megatron keeps it no longer; drop what clears its caches"
    )
    survival.EndConfiguration()(state())
    gc.collect()
    assert instance() is None


def test_an_abort_that_fails_keeps_nvrx_from_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def abort(self, reason: str) -> None:
            raise OSError(reason)

        def close(self) -> None:
            pass

        def abort_collectives(self) -> None:
            raise RuntimeError("of a device")

    shut_down = []
    monkeypatch.setattr(active._PROCESS, "configuration", Broken())
    monkeypatch.setattr(survival.devices, "current", Broken)
    monkeypatch.setattr(
        survival.store_connection, "shut_down", lambda: shut_down.append(True)
    )
    assert survival.EndWaits()(state()).rank == 0
    assert "could not abort its transports" in caplog.text
    assert "could not abort its collectives" in caplog.text
    assert shut_down


def test_a_wait_in_the_store_for_a_lost_rank_ends_and_the_next_attempt_has_a_store() -> (
    None
):
    """Ranks wait for an address that a rank lost during a recovery never publishes."""
    megatrons = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    survival.BeginAttempt()(state(iteration=1))
    store = survival.store_connection.open(PrefixStore("0", megatrons))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.get, "address of rank 1")
        time.sleep(0.2)
        survival.EndWaits()(state())
        with pytest.raises(RuntimeError):
            waiting.result(timeout=20)
    with pytest.raises(RuntimeError):  # the training thread may connect after the loss
        survival.store_connection.open(megatrons).get("address of rank 1")
    megatrons.set("iteration", "4")  # which Megatron's own connection outlives
    survival.EndConfiguration()(state(iteration=1))
    survival.BeginAttempt()(state(iteration=2))
    survival.store_connection.open(megatrons).set("address of rank 1", "there")
    assert not survival.store_connection.open(megatrons).check(["iteration"])
    survival.EndConfiguration()(state(iteration=2))
    survival.EndWaits()(
        state(iteration=3)
    )  # NVRx watches the others before an attempt begins
    survival.BeginAttempt()(state(iteration=3))
    with pytest.raises(RuntimeError):
        survival.store_connection.open(megatrons).get("address of rank 1")
    survival.EndConfiguration()(state(iteration=3))


def test_a_loss_ends_only_the_connection_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    megatrons = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = survival.StoreConnection()
    find_sockets = survival.open_sockets
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:

        def sockets_before() -> set[OpenSocket]:
            sockets = find_sockets()
            monkeypatch.setattr(survival, "open_sockets", find_sockets)
            client.connect(
                server.getsockname()
            )  # as another thread may, while torch connects
            return sockets - {
                item for item in sockets if item.descriptor == client.fileno()
            }

        monkeypatch.setattr(survival, "open_sockets", sockets_before)
        connection.open(megatrons)
        connection.shut_down()
        peer, _ = server.accept()
        with peer:
            client.sendall(b"whole")
            assert peer.recv(5) == b"whole"


def test_losses_that_an_interrupted_step_has_summed_are_dropped() -> None:
    """Megatron would add them to those of the next attempt's first step."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    moe_logging: Any = moe_utils
    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):  # early releases
        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER["load_balancing_loss"] = {"values": 1}
    else:
        from megatron.core.transformer.moe import moe_logging

        moe_logging.get_moe_metrics_tracker().record("z_loss", torch.ones(()), 1, 4)
    MTPLossLoggingHelper.tracker["values"] = torch.ones(1)
    survival.EndConfiguration()(state())
    assert not MTPLossLoggingHelper.tracker
    assert not getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {})
    if moe_logging is not moe_utils:
        assert not moe_logging.get_moe_metrics_tracker().metrics


def test_our_steps_run_before_theirs() -> None:
    from nvidia_resiliency_ext.inprocess.abort import Abort

    calls = []

    class Theirs(Abort):
        def __call__(self, state: Any) -> Any:
            calls.append("theirs")
            return state

    class Ours(survival.EndWaits):
        def __call__(self, state: Any) -> Any:
            calls.append("ours")
            return state

    survival.EndWaits, original = Ours, survival.EndWaits
    try:
        settings = survival.with_our_part({"abort": Theirs(), "enabled": True})
    finally:
        survival.EndWaits = original
    settings["abort"](state())
    assert calls == ["ours", "theirs"]
    assert settings["enabled"]
    assert isinstance(settings["initialize"], survival.BeginAttempt)


def test_nvrxs_own_abort_is_kept_where_a_program_names_none() -> None:
    """Without it, ranks on a device would stay in their collectives."""
    from nvidia_resiliency_ext.inprocess import Compose, Wrapper
    from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed

    abort = Wrapper().abort
    assert isinstance(abort, Compose)
    kinds = {type(step) for step in abort.instances}
    assert kinds == {AbortTorchDistributed, survival.EndWaits}


# -- whole jobs ------------------------------------------------------------------------------------

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 9 --lr 1e-3 "
    "--min-lr 1e-4 --lr-warmup-iters 1 --eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--num-workers 0 --tokenizer-type NullTokenizer --vocab-size 100 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --pipeline-model-parallel-size 2 "
)
QUICK = (
    "--inprocess-restart --inprocess-granularity rank "
    "--inprocess-progress-watchdog-interval 0.1 --inprocess-monitor-process-interval 0.2 "
    "--inprocess-monitor-thread-interval 0.2 --inprocess-last-call-wait 0.1 "
)


@dataclass
class Job:
    """Ranks that run, without a launcher."""

    folder: Path
    processes: list[subprocess.Popen[bytes]]

    def text(self) -> str:
        return "".join(
            path.read_text() for path in sorted(self.folder.glob("rank*.log"))
        )

    def wait_for(self, pattern: str, timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.02)

    def wait(self) -> list[int]:
        return [process.wait(timeout=600) for process in self.processes]


@contextmanager
def job(
    folder: Path,
    num_ranks: int,
    flags: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    port = free_port(num_ports=3)
    running = Job(folder, [])
    try:
        for rank in range(num_ranks):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "MEGATRON_EXT_DEVICE": "cpu",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
                "TORCH_CPP_LOG_LEVEL": "error",
                **(environment or {}),
            }
            words = [
                sys.executable,
                "-u",
                "-m",
                "megatron_ext",
                "pretrain_gpt.py",
                *flags.split(),
            ]
            with (folder / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(words, stdout=log, stderr=log, env=env)
            running.processes.append(process)
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        pytest.param(
            2, "--pipeline-schedule zb-h1 --pipeline-transport shm", id="zb-h1"
        ),
        pytest.param(
            2,
            "--use-dpp --num-layers-per-virtual-pipeline-stage 1 --pipeline-transport tcp",
            id="dpp",
        ),
        pytest.param(
            2, "--pipeline-schedule zb-v --pipeline-transport torch", id="zb-v"
        ),
        pytest.param(
            2, "--pipeline-schedule v-half --pipeline-transport shm", id="v-half"
        ),
        pytest.param(
            2,
            "--pipeline-schedule dualpipe-v --pipeline-transport tcp",
            id="dualpipe-v",
        ),
        pytest.param(
            2, "--pipeline-schedule 1f1b --pipeline-transport torch", id="1f1b"
        ),
        pytest.param(
            4,
            "--pipeline-model-parallel-size 4 --num-layers 8 --enable-bitpipe-schedule "
            "--pipeline-transport shm",
            id="bitpipe",
        ),
        pytest.param(
            4, "--pipeline-schedule zb-h1 --pipeline-transport shm", id="dp-2"
        ),
        pytest.param(
            4,
            "--tensor-model-parallel-size 2 --pipeline-schedule zb-h1 --pipeline-transport shm",
            id="tp-2",
        ),
    ],
)
def test_a_killed_rank_costs_a_step_at_most(
    tmp_path: Path, num_ranks: int, schedule: str
) -> None:
    require_training()
    saved = f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 1000 "
    saved += "--non-persistent-ckpt-type local --non-persistent-save-interval 1 "
    saved += f"--non-persistent-local-ckpt-dir {tmp_path}/local "
    saved += f"--inprocess-active-world-size {num_ranks} "
    with job(tmp_path, num_ranks + 1, f"{FLAGS}{QUICK}{saved}{schedule}") as disturbed:
        survivor = disturbed.processes[0].pid
        disturbed.wait_for(r"iteration +3/")
        disturbed.processes[1].send_signal(signal.SIGKILL)
        exit_codes = [0, -signal.SIGKILL, *[0] * (num_ranks - 1)]
        assert disturbed.wait() == exit_codes, disturbed.text()[-3000:]
        assert disturbed.processes[0].pid == survivor
        steps = re.findall(r"iteration +(\d+)/", disturbed.text())
        assert len(steps) <= 9 + 2
        by_step = dict(zip(steps, losses(disturbed.text()), strict=True))
    alone = tmp_path / "alone"
    alone.mkdir()
    saved = f"--save {alone}/saved --save-interval 1000 "
    with job(alone, num_ranks, f"{FLAGS}{saved}{schedule}") as undisturbed:
        assert undisturbed.wait() == [0] * num_ranks, undisturbed.text()[-3000:]
        expected = dict(enumerate(losses(undisturbed.text()), start=1))
    differing = [
        int(step) for step, loss in by_step.items() if loss != expected[int(step)]
    ]
    # Megatron keeps the loss of the first step after a start, so what it logs for the second one
    # is the mean of both.
    assert len(differing) <= 1, (by_step, expected)
    assert 9 not in differing
    weights = saved_tensors(tmp_path / "saved")
    expected_weights = saved_tensors(alone / "saved")
    assert weights.keys() == expected_weights.keys()
    assert not [
        name for name in weights if not weights[name].equal(expected_weights[name])
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_digests_continue_after_a_restart(tmp_path: Path) -> None:
    """The step that is repeated counts once, and no step is missing."""
    require_training()
    saved = f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 1000 "
    saved += "--non-persistent-ckpt-type local --non-persistent-save-interval 1 "
    saved += f"--non-persistent-local-ckpt-dir {tmp_path}/local "
    saved += "--inprocess-active-world-size 2 "
    schedule = "--pipeline-schedule zb-h1 --pipeline-transport shm "
    recorded = {VARIABLE: str(tmp_path / "restarted")}
    with job(tmp_path, 3, f"{FLAGS}{QUICK}{saved}{schedule}", recorded) as disturbed:
        disturbed.wait_for(r"iteration +3/")
        disturbed.processes[1].send_signal(signal.SIGKILL)
        exit_codes = [0, -signal.SIGKILL, 0]
        assert disturbed.wait() == exit_codes, disturbed.text()[-3000:]
    alone = tmp_path / "alone"
    alone.mkdir()
    recorded = {VARIABLE: str(alone / "undisturbed")}
    with job(alone, 2, f"{FLAGS}{schedule}", recorded) as undisturbed:
        assert undisturbed.wait() == [0, 0], undisturbed.text()[-3000:]
    comparison = compare(alone / "undisturbed", tmp_path / "restarted")
    assert comparison.difference is None, comparison.difference.sentence()
    assert (comparison.gap, comparison.num_steps) == ("", 10)
