"""The rank that holds a job up, found from what each reports."""

from __future__ import annotations

import json

from megatron_ext.message import Message
from megatron_ext.tracing.hang import OUTSIDE, RankState, explain, made_by
from megatron_ext.tracing.session import Session


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
    assert "rank 1, which says nothing: its process is gone" in verdict.chain


def test_circles_name_everybody_in_them() -> None:
    states = {
        0: RankState(0, "waits", ((1, "1B0"),)),
        1: RankState(1, "waits", ((2, "2B0"),)),
        2: RankState(2, "waits", ((1, "1F1"),)),
    }
    verdict = explain(states, 3, 0)
    assert verdict.culprits == (1, 2)
    assert "rank 1, which was named before: their tables do not fit each other" in verdict.chain


def test_ranks_in_a_collective_wait_for_those_that_are_not() -> None:
    inside = {"what": "is in the optimizer step", "collective": "the optimizer step"}
    states = {rank: RankState(rank, **inside) for rank in (0, 1, 3)}
    states[2] = RankState(2, "runs 2F7", since_s=5)
    verdict = explain(states, 4, 0)
    assert verdict.chain == (
        "rank 0 is in the optimizer step and waits there for rank 2, which runs 2F7 for 5.0 s"
    )
    states[2] = RankState(2, **inside, since_s=1)
    assert explain(states, 4, 0).culprits == (0,), "all are there, so nobody else is to blame"


def test_states_travel_as_text() -> None:
    state = RankState(3, "waits", ((1, "2B0"), (2, "4F1")), "", 1.5, "a.py:3 in f")
    assert str(RankState(**json.loads(json.dumps(state._asdict())))) == str(state)
    assert str(state) == "rank 3 waits for 2B0 of rank 1 or 4F1 of rank 2 for 1.5 s, at a.py:3 in f"
    crowd = RankState(0, "waits", tuple((rank, "0F0") for rank in range(9)))
    assert "or 5 others" in str(crowd)


def test_messages_are_named_by_the_action_that_makes_them() -> None:
    assert made_by(Message("B", 4, 3)) == "5B3"
    assert made_by(Message("F", 4, 3)) == "3F3"
    assert made_by(Message("D", 0, 7)) == "decision 7 of the leader"


def test_activity_outside_of_steps_is_not_watched() -> None:
    session = Session(None)  # type: ignore[arg-type]
    session.begin_send(Message("F", 1, 0), 1)
    assert session.state.what == OUTSIDE
    session.begin_iteration(2)
    session.begin_send(Message("F", 1, 0), 1)
    assert session.state.what == "sends 0F0 to rank 1"
    assert session.state.since_s > 0
    began_s = session.state.since_s
    session.end_iteration()
    assert session.state.what == OUTSIDE
    assert session.state.since_s >= began_s, "published if another rank raises an alarm"
