"""What the keepers of several hosts tell each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from megatron_ext.tools.launch import board
from megatron_ext.tools.launch.board import Board, FirstBoard, FirstHostLost, OtherBoard
from megatron_ext.tools.launch.losses import Loss, Losses

SIGKILL = -9


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(store: Any) -> Any:
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def losses(tmp_path: Path, said: list[str]) -> Losses:
    tmp_path.chmod(0o700)
    return Losses(tmp_path, 2, lambda _rank, text: said.append(text))


def first_board(store: Any, losses: Losses, counts: list[int]) -> FirstBoard:
    """Return the first board of ranks that have met if `ranks_met` is in the folder."""
    return FirstBoard(Board(store), losses, counts, losses.folder / "ranks_met")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is one in which the keepers look at each other."""
    monkeypatch.setattr(board, "_BEAT_S", 0.0)


def test_a_loss_and_the_next_step_reach_the_first_host(
    store: Any, losses: Losses, said: list[str]
) -> None:
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    other.note_step()  # before any restart, steps are not reported
    other.add(Loss(2, SIGKILL, 1000.0))
    other.take_turn()
    first.take_turn()
    assert [loss.rank for loss in losses.items] == [2]
    assert "1 of 2 ranks remain in reserve" in said[-1]
    first.note_restart(1, num_lost=1)  # rank 0 runs on the first host
    first.take_turn()
    other.take_turn()
    assert losses.items[0].back_after_s is None
    other.note_step()  # and the last stage on the other one
    other.note_step()
    other.take_turn()
    first.take_turn()
    assert losses.items[0].back_after_s is not None
    assert first.is_needed
    other.write_end_of_host(is_reported=False)
    first.take_turn()
    assert not first.is_needed


def test_an_early_exit_on_another_host_is_a_loss(store: Any, losses: Losses) -> None:
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    other.note_exit(2, time.time())
    other.take_turn()
    first.take_turn()
    assert not losses.items
    first.note_restart(1, num_lost=1)
    assert [(loss.rank, loss.exit_code) for loss in losses.items] == [(2, 0)]


def test_ranks_that_finish_after_a_restart_are_not_lost(
    store: Any, losses: Losses
) -> None:
    """Every host orders its ranks' exits and the restarts by its own clock."""
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    first.note_restart(1, num_lost=0)
    first.take_turn()
    other.take_turn()
    first.take_turn()  # reads its own note, too
    now = time.time()
    other.note_exit(1, now)
    other.note_exit(2, now - 600)  # its process took long to exit
    first.note_exit(0, now)
    other.note_restart(1, num_lost=0)  # a rank of this host reports it late
    other.take_turn()
    first.take_turn()
    assert [loss.rank for loss in losses.items] == [2]
    assert first.early_exits == [0, 1]


def test_a_rank_that_exits_and_whose_host_is_lost_counts_once(
    store: Any, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    other.note_exit(2, time.time())
    other.take_turn()
    first.take_turn()
    monkeypatch.setattr(board._Host, "is_silent", True)
    first._looks_at_s = 0.0
    first.take_turn()
    first.note_restart(1, num_lost=2)
    assert sorted(loss.rank for loss in losses.items) == [1, 2]


def test_the_end_reaches_the_other_host(store: Any, losses: Losses) -> None:
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    for rank in (1, 2, 0):
        first.add(Loss(rank, SIGKILL, 1000.0))
    first.note_exit(3, 1000.0)
    first.announce_end()
    other.take_turn()
    assert other.fatal == Loss(1, SIGKILL, 1000.0)
    assert other.survived == []
    assert other.early_exits == [3]


def test_the_host_that_reports_an_end_knows_what_the_job_had_survived(
    store: Any, losses: Losses
) -> None:
    first = first_board(store, losses, [1, 4])
    other = OtherBoard(Board(connected(store)), 1)
    first.add(Loss(2, 1, 1000.0))
    first.note_restart(1, num_lost=1)
    first.note_step()
    for rank in (3, 4):
        first.add(Loss(rank, 1, 2000.0))
    first.announce_end()
    other.take_turn()
    assert other.fatal is not None
    assert (other.fatal.rank, other.survived) == (3, [2])


def test_all_ranks_of_a_silent_host_are_lost(
    store: Any, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_board(store, losses, [1, 2, 1])
    others = [OtherBoard(Board(connected(store)), host) for host in (1, 2)]
    others[0].add(Loss(1, 7, 1000.0))
    for other in others:
        other.take_turn()
    first.take_turn()
    monkeypatch.setattr(board, "SILENCE_S", 0.2)
    time.sleep(0.3)
    others[1].take_turn()
    first.take_turn()
    assert sorted((loss.rank, loss.exit_code) for loss in losses.items) == [
        (1, 7),
        (2, SIGKILL),
    ]
    assert first.is_needed
    assert losses.fatal is not None
    assert losses.fatal.rank == 2, "no rank can replace it before all ranks have met"


def test_a_host_that_falls_silent_during_a_job_may_be_replaced(
    store: Any, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_board(store, losses, [1, 2])
    other = OtherBoard(Board(connected(store)), 1)
    other.take_turn()
    first.take_turn()
    monkeypatch.setattr(board, "SILENCE_S", 0.0)
    (losses.folder / "ranks_met").touch()
    first.take_turn()
    assert [loss.rank for loss in losses.items] == [1, 2]
    assert losses.fatal is None


def test_a_host_that_has_not_started_is_not_lost(
    store: Any, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "SILENCE_S", 0.0)
    first = first_board(store, losses, [1, 2])
    first.take_turn()
    assert not losses.items


def test_a_host_notices_that_the_first_one_is_gone() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = OtherBoard(Board(connected(store)), 1)
    other.take_turn()
    del store
    with pytest.raises(FirstHostLost):
        other.take_turn()


def test_a_keeper_that_dies_while_it_writes_does_not_hold_up_the_others(
    store: Any,
) -> None:
    reading, dying, living = (Board(connected(store)) for _ in range(3))
    dying._store = Mock(wraps=dying._store)
    for last_call in (dying._store.set, dying._store.append):
        last_call.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        dying.write({"kind": "step"})
    living.write({"kind": "restart", "num_lost": 1})
    assert reading.unread() == [{"kind": "restart", "num_lost": 1}]
    assert reading.unread() == []
