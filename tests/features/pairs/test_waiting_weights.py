"""W that run before their place in the table: the same bits and order, and the table's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config import active
from megatron_ext.config.active import Active
from megatron_ext.config.entrances import running
from megatron_ext.config.pipeline_config import (
    Disaggregation,
    DynamicOrder,
    PipelineConfig,
)
from megatron_ext.errors import ConfigurationError, ScheduleError
from megatron_ext.features.pairs import pair_rules, waiting_weights
from megatron_ext.features.pairs.pair_steps import PairSteps
from megatron_ext.features.pairs.waiting_weights import DeviceWeights, SideStreams
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.runtime.weight_gradients import WeightGradient
from megatron_ext.schedules import Action, Schedule, generate, validate
from megatron_ext.schedules.table.memory import most_alive
from megatron_ext.schedules.table.transforms import weights_waiting
from tests.pipelines import make_pipeline
from tests.ranks import run_ranks
from tests.runtime.capture import train
from tests.runtime.test_equality import assert_equal, paired, stock

_SPLIT = ("zb-h1", "zb-v", "v-half", "dualpipe-v", "dualpipe", "bitpipe")
_WAITING = "--pipeline-waiting-weights 3 "


@given(
    name=st.sampled_from(_SPLIT),
    num_microbatches=st.integers(4, 9),
    num_waiting=st.integers(0, 12),
)
def test_only_w_move_and_only_back(
    name: str, num_microbatches: int, num_waiting: int
) -> None:
    table = generate(name, 4, 2 * num_microbatches, pairs=True)
    delayed = weights_waiting(table, num_waiting)
    validate(delayed)
    for rank, (row, delayed_row) in enumerate(
        zip(table.rows, delayed.rows, strict=True)
    ):
        for is_weight in (True, False):
            assert _of_kind(row, is_weight) == _of_kind(delayed_row, is_weight)
        assert _pairs(table, rank) == _pairs(delayed, rank)
        assert most_alive(delayed_row) <= most_alive(row) + num_waiting
        for stage in {action.stage for action in row}:
            # Both add to the same gradients, so their order decides the bits.
            kinds = [
                [a for a in r if a.kind in "BW" and a.stage == stage]
                for r in (row, delayed_row)
            ]
            assert kinds[0] == kinds[1]


def _of_kind(row: tuple[Action, ...], is_weight: bool) -> list[Action]:
    return [action for action in row if (action.kind == "W") == is_weight]


def _pairs(table: Schedule, rank: int) -> list[tuple[Action, Action]]:
    row = table.rows[rank]
    return [(row[index], row[index + 1]) for index in sorted(table.pairs_of(rank))]


def test_a_table_without_waiting_weights_is_the_same() -> None:
    table = generate("zb-h1", 4, 8, pairs=True)
    assert weights_waiting(table, 0) == table
    assert make_pipeline("zb-h1", 4, 8, pairs=True).full == table
    assert make_pipeline("zb-h1", 4, 8, pairs=True, waiting_weights=2).full != table


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"waiting_weights": -1}, "must be at least 0"),
        ({"schedule": "auto"}, "compares tables without it"),
        ({"dynamic": DynamicOrder()}, "cannot run with dynamic"),
        ({"schedule": None}, "requires one of this package's schedules"),
        (
            {"schedule": None, "pairs": False, "disaggregation": Disaggregation()},
            "cannot run with disaggregation, which has no pairs; remove waiting_weights",
        ),
    ],
)
def test_settings_that_exclude_waiting_weights(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PipelineConfig(
            **{"schedule": "zb-h1", "pairs": True, "waiting_weights": 2, **settings}
        )


@pytest.mark.parametrize(
    ("schedule", "pairs", "words"),
    [
        ("zb-h1", False, "zb-h1 runs no pairs"),
        ("1f1b", True, "1f1b pairs=True does not split backward passes"),
    ],
)
def test_tables_in_which_no_weights_can_wait(
    schedule: str, pairs: bool, words: str
) -> None:
    pipeline = make_pipeline(schedule, 4, 8, pairs=pairs, waiting_weights=2)
    with pytest.raises(ScheduleError, match=words):
        pipeline.schedule(8)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("streams", [("comp_stream", "comm_stream"), ("comm_stream",)])
def test_a_device_needs_a_release_whose_streams_wait(
    is_host: bool, streams: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pair_rules.devices, "current", lambda: SimpleNamespace(is_host=is_host)
    )
    monkeypatch.setattr(pair_rules, "parameters", lambda _place: streams)
    pipeline = make_pipeline("zb-h1", 4, 8, pairs=True, waiting_weights=2)
    if is_host or "comp_stream" not in streams:
        pair_rules.PairRules().refuse_device(pipeline.config)
        return
    pair_rules.PairRules().refuse_device(replace(pipeline.config, waiting_weights=0))
    with pytest.raises(ScheduleError, match="or later on a device"):
        PairSteps.refuse_model(pipeline, [], print)


@pytest.mark.parametrize("schedule", ["v-half", "1f1b"])
def test_the_weights_of_a_table_without_pairs_stay(schedule: str) -> None:
    """A ramp-up may start with so few micro-batches that no two of them meet."""
    pipeline = make_pipeline(schedule, 4, 1, pairs=True, waiting_weights=2)
    assert not any(pipeline.full.pairs)
    assert pipeline.full == make_pipeline(schedule, 4, 1, pairs=True).full
    assert "so no W waits for idle time" in running(pipeline)


@pytest.mark.parametrize("num_microbatches", [1, 8])
def test_a_step_in_which_no_weights_wait_is_a_departure(
    num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_EXT_DIGESTS", raising=False)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(
        "megatron_ext.devices.device_of", lambda _chunks: torch.device("cpu")
    )
    pipeline = make_pipeline(
        "v-half", 4, num_microbatches, pairs=True, waiting_weights=2
    )
    in_force = Active(pipeline.config)
    monkeypatch.setattr(active._PROCESS, "configuration", in_force)
    steps = PairSteps(SimpleNamespace(pipeline=pipeline, chunks=()))
    for _ in range(2):
        steps._report_no_pairs(pipeline.full)
    departures = []
    if num_microbatches == 1:
        label = pipeline.full.label
        departures = [
            f"--pipeline-waiting-weights has no effect: {label} forms no pairs (micro-batches: 1)"
        ]
    assert in_force.departures == departures


def test_the_weights_of_a_rank_without_pairs_stay() -> None:
    table = generate("zb-h1", 4, 8, pairs=True)
    without = replace(table, pairs=(frozenset(), *table.pairs[1:]))
    delayed = weights_waiting(without, 3)
    assert delayed.rows[0] == table.rows[0]
    assert delayed.rows[1:] == weights_waiting(table, 3).rows[1:]


@pytest.mark.parametrize("records_digests", [False, True])
def test_weights_stay_in_place_while_digests_are_recorded(
    records_digests: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Records of a W early would miss what it has added by the time of its place."""
    monkeypatch.delenv("MEGATRON_EXT_DIGESTS", raising=False)
    if records_digests:
        monkeypatch.setenv("MEGATRON_EXT_DIGESTS", "digests")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(
        "megatron_ext.devices.device_of", lambda _chunks: torch.device("cpu")
    )
    pipeline = make_pipeline("zb-h1", 4, 8, pairs=True, waiting_weights=2)
    steps = PairSteps(SimpleNamespace(pipeline=pipeline, chunks=()))
    assert steps._fills_waits != records_digests
    assert ("W runs at its place" in caplog.text) == records_digests


def test_a_failed_step_lets_its_weights_go() -> None:
    splits = SplitBackward()
    DeviceWeights((), splits, SimpleNamespace())
    assert splits.before_whole is not None
    splits.clear()
    assert splits.before_whole is None


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stream_of_an_earlier_training_is_logged(
    is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept_streams = [] if is_first else ["earlier"]
    utils = waiting_weights.utils
    monkeypatch.setattr(
        utils, "set_streams", lambda comm_stream: kept_streams.append(comm_stream)
    )
    monkeypatch.setattr(utils, "get_comm_stream", lambda: kept_streams[0])

    class Stream:
        priority_range = staticmethod(lambda: (0, -1))

        def __init__(self, _device: torch.device, priority: int) -> None:
            self.priority = priority

    backend = SimpleNamespace(runtime=SimpleNamespace(Stream=Stream))
    SideStreams.of_device(backend, torch.device("cpu"))
    assert ("an earlier training run in this process" in caplog.text) != is_first


def test_the_log_counts_the_activations_of_weights_that_wait() -> None:
    peaks = []
    for num_waiting in (0, 2):
        pipeline = make_pipeline(
            "zb-h1", 4, 16, pairs=True, waiting_weights=num_waiting
        )
        line = running(pipeline)
        peaks.append(float(line.partition(", peak ")[2].split()[0]))
        assert ("lets up to 2 more W wait" in line) == bool(num_waiting)
    assert peaks[1] == peaks[0] + 2


class _Added(WeightGradient):
    """A weight gradient that tells when it is computed."""

    def __init__(
        self, weight: torch.nn.Parameter, name: str, log: list[str], store: Any
    ) -> None:
        self.weights = (weight,)
        self._name, self._log, self._store = name, log, store

    def compute(self) -> list[torch.Tensor]:
        self._log.append(self._name)
        self._store.set(self._name, "computed")
        return [torch.ones_like(self.weights[0])]


def _weights_while_a_peer_is_late() -> list[str]:
    """Return what rank 0 computed before and after rank 1 came to their exchange."""
    import torch.distributed as dist

    from megatron_ext.features.pairs.waiting_weights import HostWeights

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    log: list[str] = []
    if dist.get_rank():
        store.wait(
            ["0.1"]
        )  # the last gradient that rank 0 may compute before the exchange
        dist.barrier()
        return log
    splits = SplitBackward()
    row = tuple(map(Action.parse, ("0I0", "0I1", "0W0", "0B2", "0W1")))
    weights = HostWeights(row, splits)
    layers = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for action in row[:2]:
        with splits.defer(0, action.microbatch):
            for number, layer in enumerate(layers):
                splits.record(
                    _Added(layer, f"{action.microbatch}.{number}", log, store)
                )
        weights.ended(action)
    weights.await_peers(dist.group.WORLD)
    log.append("exchange")
    weights.finish(0, 0)
    weights.ended(row[3])
    weights.finish(0, 1)
    return log


def test_a_host_runs_weights_until_its_peer_comes() -> None:
    """The W behind a whole backward of its stage adds to the same gradients after it."""
    log, _ = run_ranks(2, _weights_while_a_peer_is_late)
    assert log == ["0.0", "0.1", "exchange", "1.0", "1.1"]


@pytest.mark.short_s(10)
@pytest.mark.parametrize(
    "name",
    [
        "zb-v",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *(
                    "zb-h1",
                    "v-half",
                    "dualpipe-v",
                    "dualpipe",
                    "bitpipe",
                    "csv",
                    "gathered",
                ),
                *(
                    "all recomputed",
                    "all recomputed, where W comes later",
                    "recomputed",
                    "latent",
                    "experts on four ranks",
                    "one expert on each rank",
                    "two layers of multi-token prediction",
                ),
            )
        ),
    ],
)
def test_weights_that_fill_waits_keep_the_bits(name: str, tmp_path: Path) -> None:
    ranks, ours, theirs = paired(name, tmp_path)
    # With 0.19 torch compiles some modules in the first step, which is slow on a busy machine.
    trained = train(ranks, ours + _WAITING, timeout_s=240)
    assert trained.pairs > 0
    assert_equal(trained, stock(ranks, theirs))
