"""Waits of experts in recorded traces: which rank is slow, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_ext import cli
from megatron_ext.tools.trace import forecast, imbalance
from megatron_ext.tools.trace.aggregate import Run, read_run
from megatron_ext.tools.trace.imbalance import Place
from megatron_ext.tools.trace.report import page
from tests.tools.trace.runs import write_run

if TYPE_CHECKING:
    from megatron_ext.schedules import Action

_RANKS = 4
_TRANSFER_MS = 1.0
_PP = 2


def _slow_rank(rank: int, action: Action, layer: int) -> float:
    """Rank 2 of the first stage is the last in each exchange, for which the others wait 3 ms."""
    wait_ms = 0.0 if rank == 2 or action.stage else 3.0
    return _TRANSFER_MS + (1 + layer) / 2 * wait_ms


def _rotating(rank: int, action: Action, layer: int) -> float:
    """In each exchange another rank is the last, and the others wait 3 ms."""
    last_rank = (action.microbatch + action.stage + layer) % _RANKS
    return _TRANSFER_MS + (0.0 if rank % _RANKS == last_rank else 3.0)


def _even(_rank: int, _action: Action, _layer: int) -> float:
    return _TRANSFER_MS


def _run(
    tmp_path: Path,
    exchange_ms: Callable[[int, Action, int], float],
    schedule: str = "zb-h1",
    *,
    iterations: int = 3,
    **settings: object,
) -> Run:
    settings = {"expert_model_parallel_size": _RANKS, "pairs": True, **settings}
    directory = write_run(
        tmp_path,
        schedule=schedule,
        pp=_PP,
        replicas=_RANKS,
        iterations=iterations,
        exchange_ms=exchange_ms,
        settings=settings,
    )
    return read_run(directory)


def test_waits_are_measured_by_rank_and_layer(tmp_path: Path) -> None:
    groups = imbalance.expert_groups(_run(tmp_path, _slow_rank))
    assert [group.ranks for group in groups] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    slow, even = groups
    # Eight micro-batches, forwards and input gradients.
    by_layer = slow.waited_by_layer_ns
    assert by_layer[Place(0, 0)] == {0: 24e6, 1: 24e6, 2: 0, 3: 24e6}
    assert by_layer[Place(0, 1)] == {0: 48e6, 1: 48e6, 2: 0, 3: 48e6}
    assert slow.waited_ns == {0: 72e6, 1: 72e6, 2: 0, 3: 72e6}
    assert slow.share_last[2] == 1
    assert slow.worst_place == Place(0, 1)
    assert even.mean_ns == 0


def test_of_layers_with_equal_waits_the_first_recorded_one_is_named(
    tmp_path: Path,
) -> None:
    """Not one that the order of a set chooses, which differs between processes."""
    first, second = imbalance.expert_groups(_run(tmp_path, _rotating))
    for stage, group in enumerate((first, second)):
        [waits_ns] = {
            tuple(waits.values()) for waits in group.waited_by_layer_ns.values()
        }
        assert min(waits_ns) > 0
        assert group.worst_place == Place(stage, 0)


def test_no_schedule_cures_a_rank_that_is_always_slow(tmp_path: Path) -> None:
    run = _run(tmp_path, _slow_rank)
    [sentence] = imbalance.sentences(run)
    assert "longest in layer 1 of stage 0; rank 2 is the last in 100 %" in sentence
    assert "Postponed weight gradients would gain less than 1 %." in sentence
    assert "No schedule can remove the remaining " in sentence
    assert "rank 2 has that much more work over the whole step" in sentence


def test_work_that_fills_waits_gains_what_every_rank_waits(tmp_path: Path) -> None:
    run = _run(tmp_path, _rotating)
    groups = imbalance.expert_groups(run)
    for group in groups:
        assert set(group.waited_ns.values()) == {72e6}
        assert group.fillable_ns == 72e6
        assert group.persistent_ns == 0
    step_ns = groups[0].step_ns
    # The weight gradients of a step are shorter than these waits.
    gain = 100 * groups[0].weights_ns / step_ns
    assert 0 < groups[0].weights_ns < 72e6
    for sentence in imbalance.sentences(run):
        assert (
            f"(--pipeline-waiting-weights) would gain at most {gain:.1f} %" in sentence
        )
        assert "cures" not in sentence


def test_a_slow_rank_may_change_from_step_to_step(tmp_path: Path) -> None:
    """No order fills the waits within a step, although over all steps each rank waits."""
    num_calls: Counter[tuple[int, Action, int]] = Counter()

    def by_step(rank: int, action: Action, layer: int) -> float:
        step = num_calls[rank, action, layer]
        num_calls[rank, action, layer] += 1
        return _TRANSFER_MS + (0.0 if rank % _RANKS == step % _RANKS else 3.0)

    run = _run(tmp_path, by_step, iterations=5)
    group, _ = imbalance.expert_groups(run)
    assert min(group.waited_ns.values()) > 0
    assert group.fillable_ns == 0
    sentence, _ = imbalance.sentences(run)
    assert "a rank, not always the same one, has" in sentence


def test_whole_backwards_leave_nothing_that_fills_waits(tmp_path: Path) -> None:
    [sentence, _] = imbalance.sentences(_run(tmp_path, _rotating, "1f1b"))
    assert (
        "schedules that split backward passes, such as zb-h1, run them separately"
        in sentence
    )


def test_a_run_with_a_queue_says_what_is_left(tmp_path: Path) -> None:
    [sentence, _] = imbalance.sentences(_run(tmp_path, _rotating, waiting_weights=4))
    assert "With 4 waiting weight gradients, " in sentence


def test_even_experts_are_said_to_be_even(tmp_path: Path) -> None:
    run = _run(tmp_path, _even)
    assert [*imbalance.sentences(run)] == [
        "Experts wait less than 1 % of a step for each other."
    ]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"expert_model_parallel_size": 2}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            [(0, 2), (1, 3), (4, 6), (5, 7)],
        ),
        ({"expert_model_parallel_size": 1}, []),
        ({"expert_model_parallel_size": 3}, [(0, 1, 2), (4, 5, 6)]),  # rank 3: alone
    ],
)
def test_groups_are_those_of_megatron(
    tmp_path: Path, settings: dict[str, int], groups: list[tuple[int, ...]]
) -> None:
    run = _run(tmp_path, _rotating, **settings)
    assert sorted(group.ranks for group in imbalance.expert_groups(run)) == groups


def test_a_run_without_experts_says_nothing(tmp_path: Path) -> None:
    assert not [*imbalance.sentences(read_run(write_run(tmp_path)))]


def test_report_command_and_forecast_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path, _slow_rank)
    [sentence] = imbalance.sentences(run)
    html = page(run)
    assert "Which experts are slow" in html
    assert '["0","1","2","0: 48.00, 1: 48.00, 2: 0.00, 3: 48.00"]' in html
    assert cli.main(["aggregate", "--trace-dir", str(run.directory)]) == 0
    assert sentence in capsys.readouterr().out
    assert sentence in forecast.predict(run).notes
