"""Values that one role hands over to the other."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from megatron_ext.disaggregation import worlds
from megatron_ext.errors import TransportTimeout

TIMEOUT_S = 60.0


class Clock:
    """A clock that a pause moves on, by a part of what it was to last."""

    def __init__(
        self, patch: pytest.MonkeyPatch, part: float, store: HashStore
    ) -> None:
        self.now, self.part, self.beats, self.store = 0.0, part, 0, store
        patch.setattr(time, "monotonic", lambda: self.now)

    def pause(self, seconds: float) -> None:
        self.now += self.part * seconds
        if self.beats:
            self.beats -= 1
            self.store.add(worlds._BEATS, 1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    made = HashStore()
    ranks = SimpleNamespace(role_size=lambda _role: 1)
    job = SimpleNamespace(
        role="forward", rank=0, role_rank=0, timeout_s=TIMEOUT_S, ranks=ranks
    )
    roles = SimpleNamespace(store=made, counts={})
    monkeypatch.setattr(worlds, "_job", lambda: job)
    monkeypatch.setattr(worlds, "roles_in_force", lambda: roles)
    return made


@pytest.mark.parametrize("part", [1.0, 0.01])
def test_the_time_out_is_that_of_the_clock(
    monkeypatch: pytest.MonkeyPatch, store: HashStore, part: float
) -> None:
    """A pause may end early, as a `poll` does that is woken."""
    clock = Clock(monkeypatch, part, store)
    with pytest.raises(TransportTimeout, match="waited 60 s for the other role's end"):
        worlds.hand_over("end", None, to="forward", pause=clock.pause)
    assert TIMEOUT_S <= clock.now < TIMEOUT_S + 1


def test_progress_of_the_other_role_prolongs_it(
    monkeypatch: pytest.MonkeyPatch, store: HashStore
) -> None:
    clock = Clock(monkeypatch, 1.0, store)
    clock.beats = 900  # more than fit into the time-out
    with pytest.raises(TransportTimeout):
        worlds.hand_over("losses", None, to="forward", pause=clock.pause)
    assert clock.now >= 2 * TIMEOUT_S


def test_a_value_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, store: HashStore
) -> None:
    clock = Clock(monkeypatch, 1.0, store)

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        if clock.now > 1.0:
            store.set(f"{worlds._PREFIX}/losses/1", "[1.5]")

    assert worlds.hand_over("losses", None, to="forward", pause=pause) == [1.5]
    assert clock.now < 1.2


def test_a_restart_finds_no_value_of_the_attempt_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though torchrun keeps the store."""
    kept = HashStore()
    ranks = SimpleNamespace(num_ranks=1, role_size=lambda _role: 1)
    job = SimpleNamespace(
        role="backward", rank=0, role_rank=0, timeout_s=TIMEOUT_S, ranks=ranks
    )
    monkeypatch.setattr(worlds, "_job", lambda: job)
    monkeypatch.setattr(worlds, "rendezvous", lambda *_, **__: iter([(kept, 0, 1)]))
    monkeypatch.setattr(worlds.dist, "init_process_group", lambda *_, **__: None)
    stores = []
    for attempt in "01":
        found = SimpleNamespace(
            environment=SimpleNamespace(run=("job", attempt)), roles=None
        )
        monkeypatch.setattr(worlds.active, "required", lambda found=found: found)
        worlds.join("gloo")
        stores.append(found.roles.store)
        if attempt == "0":
            worlds.hand_over("progress", 5, to="forward", pause=time.sleep)
    assert [store.check([f"{worlds._PREFIX}/progress/1"]) for store in stores] == [
        True,
        False,
    ]
