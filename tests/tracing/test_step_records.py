"""What a rank records about each step for `megatron-ext compare`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ext.config import active
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.schedules.generators.catalog import generate
from megatron_ext.tracing.digest_files import MEGATRONS
from megatron_ext.tracing.step_records import FOLDER, LIMIT, StepRecord, requested
from megatron_ext.transport.base import Stats
from megatron_ext.transport.observed import observed

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(FOLDER, str(tmp_path / "steps"))
    monkeypatch.setenv(LIMIT, "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "cpu")
    active.activate_configuration(active.Active(PipelineConfig()))
    yield
    active.clear_configuration()


def record() -> StepRecord:
    step_record = requested()
    assert step_record is not None
    return step_record


def end_step(iteration: int) -> None:
    record().add(iteration, {}, None, skipped=False, learning_rate=None)


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "steps" / "rank-1.jsonl").read_text()
    header, *steps = map(json.loads, text.splitlines())
    assert header["rank"] == 1
    return steps


def computing(schedule: Schedule) -> Any:
    return SimpleNamespace(table=SimpleNamespace(schedule=schedule))


def test_a_step_that_no_table_runs_is_megatrons_own(tmp_path: Path) -> None:
    record().connected({0: "shm"})
    for iteration, name in enumerate(("zb-h1", MEGATRONS, "gpipe"), start=1):
        if name != MEGATRONS:
            record().begin_step(computing(generate(name, 2, 4)))
        end_step(iteration)
    steps = lines(tmp_path)
    assert [step["schedule"] for step in steps] == ["zb-h1", MEGATRONS, "gpipe"]
    assert [step["wires"] for step in steps] == [["shm"], None, ["shm"]]
    assert record().is_complete


def test_messages_over_our_transport_are_recorded_by_step(tmp_path: Path) -> None:
    record().connected({0: "tcp"})
    record().begin_carried_step()
    end_step(1)
    end_step(2)
    assert [step["wires"] for step in lines(tmp_path)] == [["tcp"], None]
    assert lines(tmp_path)[0]["schedule"] == MEGATRONS


def test_slices_by_length_are_counted(tmp_path: Path) -> None:
    sizes = ((1.0,), (0.5, 0.5), (1.0,), (1.0,))
    record().begin_step(computing(generate("1f1b", 2, 4, slice_sizes=sizes)))
    end_step(1)
    record().begin_step(computing(generate("1f1b", 2, 4)))
    end_step(2)
    assert [step["num_slices"] for step in lines(tmp_path)] == [2, None]


def test_a_departure_is_logged_and_recorded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end_step(1)
    active.report_departure("hooks do not run")
    end_step(2)
    end_step(3)
    departures = [step["departures"] for step in lines(tmp_path)]
    assert departures == [[], ["hooks do not run"], []]
    assert caplog.messages == ["hooks do not run"]


def test_steps_after_the_end_of_a_configuration_are_recorded_too(
    tmp_path: Path,
) -> None:
    """Otherwise, the run would not stop, and the earlier steps would be overwritten."""
    record().begin_step(computing(generate("zb-h1", 2, 4)))
    end_step(1)
    active.clear_configuration()
    end_step(2)
    schedules = [step["schedule"] for step in lines(tmp_path)]
    assert schedules == ["zb-h1", MEGATRONS]


def test_the_record_delays_no_message() -> None:
    transport: Any = SimpleNamespace(stats=lambda: Stats(wires={0: "shm"}))
    assert observed(transport, [record()]) is transport


def test_nothing_is_recorded_unless_it_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(FOLDER)
    active.clear_configuration()
    assert requested() is None
    assert active.active() is None
