"""The file that a recorder writes: the seed's layout, sizes, sampling, and what is left of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import weakref
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config import active
from megatron_ext.config.pipeline_config import DynamicOrder, Tracing
from megatron_ext.errors import UserError
from megatron_ext.patches import trace
from megatron_ext.schedules import generate
from megatron_ext.schedules.table.actions import Action
from megatron_ext.tools.trace.reader import open_run
from megatron_ext.tracing import session as session_module
from megatron_ext.tracing.identity import Identity, settings_of
from megatron_ext.tracing.recorder import DeviceClock, Recorder
from megatron_ext.tracing.records import Header
from megatron_ext.tracing.session import Session
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.tools.trace.runs import Clock, trace_of, write_run

HEADER = Header(0, 0, 0, 0, (1, 1, 1), 1, "host", "boot", 1, 1)


def iterations(directory: Path) -> list:
    [file] = open_run(directory)[0]
    return list(file.iterations())


def test_each_file_is_a_chrome_trace_of_its_own(tmp_path: Path) -> None:
    directory = write_run(tmp_path, iterations=1)
    assert directory.name == "data-1-pipeline-4-tensor-1-pp"
    names = sorted(path.name for path in directory.glob("benchmark*"))
    assert names == [
        f"benchmark-data-0-pipeline-{rank}-tensor-0.json" for rank in range(4)
    ]
    head, *rest = json.loads(trace_of(directory, 3).read_text())
    named = [event for event in rest if event["ph"] == "M"]
    *spans, last = [event for event in rest if event["ph"] == "X"]
    assert head["args"]["rank"] == 3
    assert "rank 3 on host" in [event["args"].get("name") for event in named]
    assert {"iteration", "wires", "microbatches"} <= last["args"].keys()
    assert {(event["pid"], event["tid"]) for event in [*spans, last]} == {(3, 0)}
    assert all(e["ts"] >= last["ts"] for e in spans)
    assert all(e["ts"] + e["dur"] <= last["ts"] + last["dur"] + 0.001 for e in spans)
    actions = [e["args"] for e in spans if e["cat"] in ("forward", "backward")]
    assert all({"microbatch", "stage"} <= action.keys() for action in actions)
    assert len(actions) == 16


def test_a_restart_in_the_same_processes_says_that_it_replaces_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt in (0, 1):
        monkeypatch.setattr(active._PROCESS, "attempt", attempt)
        recorder = Recorder(lambda: (tmp_path, HEADER, None), Clock())
        recorder.begin_iteration(1)
        recorder.close()
    [line] = caplog.messages
    assert line.startswith("--trace: restart 1 in the same processes replaces ")


def test_an_event_takes_at_most_200_bytes(tmp_path: Path) -> None:
    clock = Clock()
    clock.now_ns = 10**18
    recorder = Recorder(lambda: (tmp_path, HEADER, None), clock)
    recorder.begin_iteration(1)
    empty = (tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json").stat().st_size
    clock.now_ns += 3_600 * 10**9  # after an hour in one iteration
    widest = {
        "cause": "input",
        "on": 99999,
        "for": "F",
        "stage": 999,
        "microbatch": 99999,
    }
    for _ in range(1000):
        recorder.add("wait", clock.now_ns - 20_000, widest)
    recorder.close()
    size = (tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json").stat().st_size
    assert (size - empty) / 1000 <= 200, "with the iteration's own event"
    [iteration] = iterations(tmp_path)
    assert len(iteration.spans) == 1000


def test_some_iterations_of_each_interval_are_traced(tmp_path: Path) -> None:
    clock = Clock()
    recorder = Recorder(
        lambda: (tmp_path, HEADER, None),
        clock,
        Tracing(interval=5, iterations=2),
    )
    for number in range(41, 53):
        recorder.begin_iteration(number)
        begin = recorder.stamp()
        clock.now_ns += 10
        recorder.add("optimizer", begin, {})
        clock.now_ns += 1
    recorder.close()
    assert [i.number for i in iterations(tmp_path)] == [41, 42, 46, 47, 51, 52]
    assert [s.name for i in iterations(tmp_path) for s in i.spans] == ["optimizer"] * 6


def test_a_run_can_be_read_while_it_goes_on_and_after_it_was_killed(
    tmp_path: Path,
) -> None:
    child = os.fork()
    if child == 0:
        recorder = Recorder(lambda: (tmp_path, HEADER, None))
        for number in range(1000):
            recorder.begin_iteration(number)
            begin = recorder.stamp()
            time.sleep(0.002)
            recorder.add("optimizer", begin, {})
    try:
        deadline = time.monotonic() + 60
        written = tmp_path.glob
        while (
            not any(p.stat().st_size for p in written("*"))
            or len(iterations(tmp_path)) < 3
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = iterations(tmp_path)
    assert len(found) >= 3
    assert all(len(iteration.spans) == 1 for iteration in found)


def test_device_marks_give_the_time_of_the_device(tmp_path: Path) -> None:
    class Event:
        """A mark in a stream that runs a second behind its host."""

        def record(self) -> None:
            self.ms = Device.now_ms

        def elapsed_time(self, end) -> float:
            return end.ms - self.ms

    class Device:
        now_ms = 500.0

        def timing_event(self) -> Event:
            return Event()

        def synchronize(self) -> None:
            pass

    recorder = Recorder(lambda: (tmp_path, HEADER, None), DeviceClock(Device()))
    recorder.begin_iteration(1)
    Device.now_ms += 3
    begin = recorder.stamp()
    Device.now_ms += 1.5
    recorder.add("forward", begin, {"stage": 0, "microbatch": 0})
    for waited_ms in (
        0.01,
        0.49,
    ):  # receives, of which the first found its message there
        begin = recorder.stamp()
        Device.now_ms += waited_ms
        recorder.add("wait", begin, {"on": 1})
    recorder.close()
    [iteration] = iterations(tmp_path)
    assert [span[:3] for span in iteration.spans] == [
        ("forward", 3_000_000, 4_500_000),
        ("wait", 4_510_000, 5_000_000),
    ]


def test_a_device_that_failed_hides_no_error(tmp_path: Path) -> None:
    class Failed(Clock):
        def resolve(self, stamps: list[int], timeout_s: float | None) -> list[int]:
            raise RuntimeError("the device is gone")

    def schedule(**_: object) -> None:
        raise ZeroDivisionError

    use(make_pipeline("1f1b", 2, 2))
    session = Session(active.required())
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None), Failed())
    active.required().observers.append(session)
    with pytest.raises(ZeroDivisionError):
        trace._in_steps(lambda: schedule, None, (), {})(num_microbatches=2)
    session.close()
    [events] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert [event["name"] for event in events if event["ph"] == "X"] == []


def test_a_device_that_is_stuck_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(record=lambda: None, query=lambda: False)
    synchronized = iter([None])  # at the begin of the step; then it would wait forever
    device = SimpleNamespace(
        timing_event=lambda: event, synchronize=lambda: next(synchronized)
    )
    use(make_pipeline("1f1b", 2, 2))
    monkeypatch.setattr("megatron_ext.tracing.session._STUCK_S", 0.1)
    session = Session(active.required())
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None), DeviceClock(device))  # type: ignore[arg-type]
    active.required().observers.append(session)

    def schedule(**_: object) -> None:
        session.begin_action(Action(0, "F", 0))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace._in_steps(lambda: schedule, None, (), {})(num_microbatches=2)
    session.close()
    assert iterations(tmp_path) == []


def test_an_evaluation_is_no_part_of_a_step_that_nobody_ended(tmp_path: Path) -> None:
    """Only Megatron's optimizers report that a step has ended."""
    use(make_pipeline("1f1b", 2, 2))
    session = Session(active.required())
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None))
    active.required().observers.append(session)

    def schedule(**_: object) -> None:
        session.begin_action(Action(0, "F", 0))
        session.end_action(0, Action(0, "F", 0))

    run = trace._in_steps(lambda: schedule, None, (), {})
    run(num_microbatches=2)
    run(num_microbatches=2, forward_only=True)
    session.close()
    [events] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert [event["name"] for event in events if event.get("cat") == "forward"] == [
        "forward 0"
    ]


def test_a_step_that_ends_in_an_action_has_failed(tmp_path: Path) -> None:
    use(make_pipeline("1f1b", 2, 2))
    session = Session(active.required())
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None))
    for fails in (False, True):
        session.begin_iteration(2)
        session.begin_action(Action(0, "F", 0))
        if not fails:
            session.end_action(0, Action(0, "F", 0))
        session.end_iteration()
    session.close()
    assert [step.figures.get("failed", False) for step in iterations(tmp_path)] == [
        False,
        True,
    ]


def test_a_step_that_begins_again_was_discarded(tmp_path: Path) -> None:
    """Megatron's rerun state machine calls the schedule again without an optimizer step before."""
    use(make_pipeline("1f1b", 2, 2))
    session = Session(active.required())
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None))
    for number in (0, 1, 1, 1, 2):
        active.begin_iteration(number)
        session.begin_iteration(2)
    session.close()
    found = [
        (each.number, each.figures.get("failed", False))
        for each in iterations(tmp_path)
    ]
    assert found == [(1, False), (2, True), (2, True), (2, False), (3, False)]


@pytest.mark.parametrize(
    ("given", "numbers"), [((7, 8), [8, 9]), ((0, 1), [1, 2]), ((None, None), [1, 2])]
)
def test_steps_have_the_number_that_a_host_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[int | None, ...],
    numbers: list[int],
) -> None:
    """Bridge gives that of a resumed run; other programs may give one, or none."""
    use(make_pipeline("1f1b", 2, 2, tracing=Tracing()))
    identity = Identity(tmp_path, HEADER, None)
    monkeypatch.setattr(session_module, "identity_of", lambda _configuration: identity)
    monkeypatch.setattr(session_module, "megatron_arguments", lambda: None)
    session_module.subscribe(active.required())
    [session] = active.required().observers
    for number in given:
        if number is not None:
            active.begin_iteration(number)
        session.begin_iteration(2)
    session.close()
    assert [each.number for each in iterations(tmp_path)] == numbers


def test_a_trace_has_the_slices_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic = DynamicOrder(extra_activations=0)
    use(make_pipeline("1f1b", 2, 2, tracing=Tracing(), slice_tokens=8, dynamic=dynamic))
    identity = Identity(tmp_path, HEADER, None)
    monkeypatch.setattr(session_module, "identity_of", lambda _configuration: identity)
    monkeypatch.setattr(session_module, "megatron_arguments", lambda: None)
    session_module.subscribe(active.required())
    [session] = active.required().observers
    sizes = ((0.25,), (0.5, 0.5))
    schedule = generate("1f1b", 2, 2, slice_sizes=sizes)
    session.begin_iteration(2)
    session.begin_step(SimpleNamespace(table=SimpleNamespace(schedule=schedule)))
    session.close()
    [iteration] = iterations(tmp_path)
    assert iteration.figures["slice_sizes"] == [list(parts) for parts in sizes]


def test_a_trace_names_the_settings_of_slices_by_length() -> None:
    configuration = use(
        make_pipeline("1f1b", 2, 2, slice_tokens=8, dynamic=DynamicOrder())
    )
    settings = settings_of(configuration, None)
    assert settings["slice_tokens"] == 8
    assert settings["dpp_extra_activations"] == 0, "of tables by length"


def identified(folder: Path) -> list[tuple[str, Any]]:
    """Return runs and layers in headers of a rank whose host is Bridge."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    headers = []
    for run in (("job", "1"), ("", "")):
        pipeline = make_pipeline("1f1b", 1, 2, tracing=Tracing(directory=folder))
        found = use(pipeline, environment=active.Environment(run=run))
        found.host = SimpleNamespace(arguments=Namespace(num_layers=8))  # type: ignore[assignment]
        headers.append(session_module.identity_of(found).header)
    return [(header.run, header.settings["num_layers"]) for header in headers]


def test_a_trace_names_its_attempt_and_has_the_settings_of_bridge(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, identified, tmp_path) == [[("job/1", 8), ("", 8)]]


def test_a_configuration_that_has_ended_is_let_go(tmp_path: Path) -> None:
    use(make_pipeline("1f1b", 2, 2, tracing=Tracing(directory=tmp_path)))
    session_module.subscribe(active.required())
    ended = weakref.ref(active.required())
    active.clear_configuration()
    gc.collect()
    assert ended() is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(lambda: (tmp_path / "file" / "run", HEADER, None), Clock())
    with pytest.raises(UserError, match="--trace-dir"):
        recorder.begin_iteration(1)
