"""The rank that holds a job up, found from what each reports."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore

from megatron_ext.config import active
from megatron_ext.message import Message
from megatron_ext.tracing import hang
from megatron_ext.tracing.hang import OUTSIDE, RankState, explain, made_by
from megatron_ext.tracing.recorder import Recorder
from megatron_ext.tracing.session import Session
from tests.ranks import start_ranks


def test_the_chain_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    states = {
        2: RankState(2, "waits", ((3, "5B3"),), since_s=9),
        3: RankState(3, "waits", ((1, "6B3"),), since_s=9),
        1: RankState(1, "runs 6B3", since_s=12, where="model.py:7 in forward"),
    }
    verdict = explain(states, 4, 2)
    assert verdict.chain == (
        "rank 2 waits for 5B3 of rank 3, which waits for 6B3 of rank 1, which runs 6B3 for 12.0 s, "
        "at model.py:7 in forward"
    )
    assert verdict.culprits == (1,)
    assert verdict.message.startswith("rank 1 holds the job up: rank 2 waits")


def test_a_rank_that_says_nothing_ends_the_chain() -> None:
    states = {0: RankState(0, "waits", ((2, "1B0"), (1, "3B0")))}
    states[2] = RankState(2, "waits", ((0, "0F1"),))
    verdict = explain(states, 3, 0)
    assert verdict.culprits == (1,), "of several, whoever says nothing comes first"
    assert "rank 1, which does not answer: its process is gone" in verdict.chain


def test_circles_name_everybody_in_them() -> None:
    states = {
        0: RankState(0, "waits", ((1, "1B0"),)),
        1: RankState(1, "waits", ((2, "2B0"),)),
        2: RankState(2, "waits", ((1, "1F1"),)),
    }
    verdict = explain(states, 3, 0)
    assert verdict.culprits == (1, 2)
    assert (
        "rank 1, which appears above: these ranks' tables do not match" in verdict.chain
    )


def test_ranks_in_a_collective_wait_for_those_that_are_not() -> None:
    inside = {
        "activity": "is in the optimizer step",
        "in_collective": True,
        "entered": 2,
    }
    states = {rank: RankState(rank, **inside) for rank in (0, 1, 3)}
    states[2] = RankState(2, "runs 2F7", since_s=5)
    verdict = explain(states, 4, 0)
    assert verdict.chain == (
        "rank 0 is in the optimizer step and waits there for rank 2, which runs 2F7 for 5.0 s"
    )
    states[2] = RankState(2, **inside, since_s=1)
    assert explain(states, 4, 0).culprits == (0,), (
        "all are there, so nobody else is to blame"
    )


@pytest.mark.parametrize("activity", ["is in the optimizer step", "runs 0F3"])
def test_a_rank_inside_a_collective_waits_for_those_that_have_not_reached_it(
    activity: str,
) -> None:
    """Of ranks in the same part of a step, torch's own collectives tell who waits for whom."""
    is_counted = activity != "runs 0F3"
    inside = RankState(0, activity, (), is_counted, 9, entered=2, runs_collective=True)
    late = RankState(2, activity, (), is_counted, 9, "model.py:7 in f", entered=2)
    states = {0: inside, 1: inside._replace(rank=1), 2: late}
    states[3] = RankState(3, "waits", ((0, "0F3"),), entered=2)
    verdict = explain(states, 4, 0)
    assert verdict.chain == (
        f"rank 0 {activity} and waits there for rank 2, which {activity} for 9.0 s, "
        "at model.py:7 in f"
    )
    assert explain({0: inside, 1: inside}, 2, 0).culprits == (0,), (
        "nobody else is to blame"
    )
    assert explain({0: inside}, 2, 0).culprits == (1,), (
        "a rank that says nothing comes first"
    )


@pytest.mark.parametrize("function", [dist.all_reduce, torch.zeros_like])
def test_a_thread_inside_a_collective_of_torch_is_told_apart(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dog = hang.Watchdog(lambda: RankState(-1, "runs 0F0"), 1.0)
    dog._training = threading.get_ident()
    frame = SimpleNamespace(
        f_code=test_states_travel_as_text.__code__, f_lineno=7, f_back=None
    )
    if function is dist.all_reduce:
        # Its wrapper is elsewhere in torch; the thread itself is in C++, below the function.
        frame = SimpleNamespace(
            f_code=inspect.unwrap(function).__code__, f_lineno=1, f_back=frame
        )
    monkeypatch.setattr(sys, "_current_frames", lambda: {dog._training: frame})
    state = dog._state(3)
    assert state.runs_collective == (function is dist.all_reduce)
    assert state.where == "test_hang.py:7 in test_states_travel_as_text"


@pytest.mark.parametrize(
    "other",
    [
        RankState(0, "is in the optimizer step", in_collective=True, entered=4),
        RankState(0, entered=4),
        RankState(0, "waits", ((1, "weights 0"),), entered=math.inf),
    ],
)
def test_ranks_that_have_passed_a_collective_hold_nobody_up_in_it(
    other: RankState,
) -> None:
    """Nor do forward ranks of a disaggregated job, which wait for weights meanwhile."""
    stuck = RankState(1, "is in the reduction", (), True, 9, "d.py:7 in f", entered=3)
    verdict = explain(
        {0: other, 1: stuck}, 2, 0 if other.waits_for or other.in_collective else 1
    )
    assert verdict.culprits == (1,), verdict.chain
    assert verdict.chain.endswith("is in the reduction for 9.0 s, at d.py:7 in f")


def test_ranks_agree_on_a_verdict_however_long_the_time_out_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first to answer gives up on a rank that says nothing before the others give up on it."""
    monkeypatch.setattr(hang, "_ANSWER_S", 1.0)
    store = HashStore()
    store.set("alarm", "0")
    dogs = [
        hang.Watchdog(lambda: RankState(-1, "waits", ((2, "1B0"),)), 300.0)
        for _ in "01"
    ]
    for dog in dogs:
        dog._training = threading.get_ident()
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(dog._ask, store, rank, 3) for rank, dog in enumerate(dogs)]
        first, second = (each.result(timeout=10) for each in asked)
    assert list(first.culprits) == list(second.culprits) == [2]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_stores_without_clone_are_connected_again(kind: str, tmp_path: Path) -> None:
    """Torch 2.7 has such stores; a SimpleNamespace stands in for the prefix around them."""
    base: Store
    if kind == "tcp":
        base = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    else:
        base = FileStore(str(tmp_path / "store"))
    base.set_timeout(timedelta(seconds=77))
    prefixed = SimpleNamespace(_underlying_non_prefix_store=base)
    one, other = hang._connected_again(prefixed), hang._connected_again(prefixed)
    one.set_timeout(timedelta(seconds=1))
    one.set("state", "stuck")
    assert other.get("state") == b"stuck"
    assert not base.check(["state"]), "keys of the watchdog are apart"
    assert base.timeout == timedelta(seconds=77)


def test_a_restart_finds_nothing_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though torchrun keeps the store, and the verdict of the hang in it."""
    store = FileStore(str(tmp_path / "store"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    hang._connected_again(store).set("verdict", "rank 1 holds the job up")
    assert hang._connected_again(store).check(["verdict"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not hang._connected_again(store).check(["verdict"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(active._PROCESS, "attempt", 1)  # in the same processes
    assert not hang._connected_again(store).check(["verdict"])


def test_a_stuck_process_that_something_else_ends_is_not_ended() -> None:
    watchdog = hang.Watchdog(lambda: RankState(-1), 1.0, ends_process=False)
    watchdog._is_main = False  # as if the signal had not reached the training thread
    watchdog._end(0, hang.Verdict("rank 0 runs 0F0", (0,)))


def stuck_beside_the_main_thread() -> None:
    torch.distributed.init_process_group("gloo")
    dog = hang.Watchdog(lambda: RankState(-1, "runs 0F0"), 0.4)

    def train() -> None:
        dog.start()
        time.sleep(60)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def test_a_thread_beside_the_main_one_is_watched() -> None:
    run = start_ranks(1, stuck_beside_the_main_thread, timeout_s=60)
    assert run.exit_codes == [1], run.describe()
    assert "rank 0 holds the job up" in run.logs[0]


def _one_rank_misses_a_collective(*, is_asynchronous: bool) -> None:
    dist.init_process_group("nccl")
    dist.barrier()
    state = RankState(-1, "is in the optimizer step", since_s=time.monotonic())
    hang.Watchdog(lambda: state, 2.0).start()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=is_asynchronous)
        if work is not None:
            work.wait()
    time.sleep(60)


def one_rank_misses_a_collective() -> None:
    """Wait in a collective of gloo, whose waits this package replaces, or elsewhere."""
    _one_rank_misses_a_collective(is_asynchronous=False)


def one_rank_misses_an_asynchronous_collective() -> None:
    """As above, but no function of torch.distributed is on the stack."""
    _one_rank_misses_a_collective(is_asynchronous=True)


@pytest.mark.parametrize(
    "program",
    [one_rank_misses_a_collective, one_rank_misses_an_asynchronous_collective],
)
def test_a_rank_that_misses_a_collective_of_gloo_is_to_blame(
    program: Callable[[], None],
) -> None:
    run = start_ranks(2, program, timeout_s=60)
    step = "is in the optimizer step"
    assert f"rank 1 holds the job up: rank 0 {step} and waits there" in run.logs[0]


def stuck_beside_a_store_that_is_stopped() -> None:
    torch.distributed.init_process_group("gloo")
    silent: Any = SimpleNamespace(set_timeout=lambda _: None)
    silent.set = silent.check = lambda *_: time.sleep(60)
    hang._connected_again = lambda _: silent  # this process is a rank and ends
    hang._ANSWER_S = 0.1
    hang.Watchdog(lambda: RankState(-1, "runs 0F0"), 0.4).start()
    time.sleep(60)


def test_a_store_that_does_not_answer_does_not_hold_the_watchdog_up() -> None:
    run = start_ranks(1, stuck_beside_a_store_that_is_stopped, timeout_s=60)
    assert run.exit_codes == [1], run.describe()
    assert "rank 0 holds the job up: rank 0 runs 0F0" in run.logs[0]
    assert "the job's store does not answer" in run.logs[0]


def test_steps_end_for_the_watchdog_when_their_trace_has_been_read_from_the_device() -> (
    None
):
    session, seen = Session(Namespace(job=None, iteration=None)), []  # type: ignore[arg-type]
    session.recorder = Recorder(lambda: (Path(), None, None))  # type: ignore[arg-type, return-value]
    session._report("runs 0F0")
    session.recorder.active = True
    session.recorder.end_iteration = lambda _: seen.append(session.state.activity)  # type: ignore[method-assign]
    session.end_iteration()
    assert seen == ["waits until its device has finished the step"]
    assert session.state.activity == OUTSIDE


def test_states_travel_as_text() -> None:
    state = RankState(3, "waits", ((1, "2B0"), (2, "4F1")), False, 1.5, "a.py:3 in f")
    assert str(RankState(**json.loads(json.dumps(state._asdict())))) == str(state)
    assert (
        str(state)
        == "rank 3 waits for 2B0 of rank 1 or 4F1 of rank 2 for 1.5 s, at a.py:3 in f"
    )
    crowd = RankState(0, "waits", tuple((rank, "0F0") for rank in range(9)))
    assert "or 5 more" in str(crowd)


def test_messages_are_named_by_the_action_that_makes_them() -> None:
    assert made_by(Message("B", 4, 3)) == "5B3"
    assert made_by(Message("F", 4, 3)) == "3F3"
    assert made_by(Message("D", 0, 7)) == "decision 7 of the leader"


def test_activity_outside_of_steps_is_not_watched() -> None:
    session = Session(Namespace(job=None, iteration=None))  # type: ignore[arg-type]
    session.begin_send(Message("F", 1, 0), 1)
    assert session.state.activity == OUTSIDE
    session.begin_iteration(2)
    session.begin_send(Message("F", 1, 0), 1)
    assert session.state.activity == "sends 0F0 to rank 1"
    assert session.state.since_s > 0
    began_s = session.state.since_s
    session.end_iteration()
    assert session.state.activity == OUTSIDE
    assert session.state.since_s >= began_s, "published if another rank raises an alarm"


def test_a_step_without_an_optimizer_of_megatrons_ends_with_its_schedule() -> None:
    """What follows, an evaluation or a checkpoint, may take longer than the time-out."""
    session = Session(Namespace(job=None, iteration=None))  # type: ignore[arg-type]
    session.begin_iteration(2)
    session.begin_collective("reduce")
    session.end_collective("reduce")
    assert session.state.activity != OUTSIDE
    session.end_schedule()
    session.begin_send(Message("F", 1, 0), 1)
    session.begin_collective("reduce")  # a program may reduce gradients itself
    session.end_collective("reduce")
    assert session.state.activity == OUTSIDE
    session.begin_collective("optimizer")
    assert session.state.activity == "is in the optimizer step"
    session.end_collective("optimizer")
    assert session.state.activity == OUTSIDE


def test_the_process_of_a_silent_rank_is_looked_at() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as process:
        try:
            place = f"its process {process.pid} on {socket.gethostname()}"
            assert hang.process_state(socket.gethostname(), process.pid).startswith(
                place
            )
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            said = hang.process_state(socket.gethostname(), process.pid)
            assert said == f"{place} is stopped, by SIGSTOP or a debugger"
        finally:
            process.kill()
    assert hang.process_state(socket.gethostname(), process.pid) == f"{place} is gone"
    assert "is gone, stopped, or" in hang.process_state("elsewhere", process.pid)
