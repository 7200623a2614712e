"""Whatever state a trace is in, what is in it is read, and what is not is told."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import DataError
from megatron_ext.tools.trace import reader, survey
from megatron_ext.tools.trace.aggregate import (
    aggregated_name,
    read_run,
    slow,
    write_chrome_trace,
)
from megatron_ext.tools.trace.report import page
from megatron_ext.tracing.records import SCHEDULE_FILE
from tests.tools.trace.runs import trace_of, write_run

NAME = "benchmark-data-0-pipeline-0-tensor-0.json"


def read(text: bytes, folder: Path) -> tuple[list[reader.Iteration], int]:
    (folder / NAME).write_bytes(text)
    [file], _ = reader.open_run(folder)
    return list(file.iterations()), len(file.damaged)


def test_one_iteration_is_read_by_its_number(tmp_path: Path) -> None:
    path = trace_of(write_run(tmp_path, iterations=10), 2)
    [file] = [f for f in reader.open_run(path.parent)[0] if f.path == path]
    found = list(file.iterations())
    assert [i.number for i in found] == list(range(1, 11))
    assert list(file.iterations(only=1)) == [found[0]], "and not 10"
    assert not file.damaged


def test_a_file_cut_at_any_place_gives_what_is_before(tmp_path: Path) -> None:
    run = write_run(tmp_path, pp=2, microbatches=2, iterations=2)
    text = trace_of(run, 0).read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    header = text.index(b"\n") + 1
    counts = []
    for length in [*range(header, len(text), 7), len(text)]:
        found, damaged = read(text[:length], folder)
        counts.append(sum(len(iteration.spans) for iteration in found))
        assert damaged <= 1
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(read(text, folder)[0][0].spans) * 2


@settings(max_examples=200)
@given(st.data())
def test_noise_never_breaks_the_reader(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("noise")
    text = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        found, _ = read(bytes(text), folder)
    except DataError:
        return
    for iteration in found:
        assert all(0 <= span.begin_ns <= span.end_ns for span in iteration.spans)


def _sample() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), pp=2, microbatches=2, iterations=2)
        return trace_of(run, 1).read_bytes()


SAMPLE = _sample()


GOOD = '{"name":"x","cat":"forward","ts":1.5,"dur":2,"args":{"stage":0,"microbatch":0}}'
CLOSING = '{"name":"iteration 1","cat":"iteration","ph":"X","ts":1,"dur":9,"args":{"iteration":1}}'


@pytest.mark.parametrize(
    "record",
    [
        '{"name":"x","cat":"x","ph":"X","ts":5,"dur":-1,"args":{}}',
        '{"name":"x","cat":"x","ph":"X","ts":1e400,"dur":1,"args":{}}',
        '{"name":"x","cat":"x","ph":"X","ts":' + "9" * 5000 + ',"dur":1,"args":{}}',
        '{"name":"x","cat":"x","ph":"X","ts":"5","dur":1,"args":{}}',
        '{"name":"x","cat":"x","ph":"X","ts":5,"dur":1,"args":7}',
        '{"name":"x","cat":"x","ph":"X","dur":1}',
        "[" * 100_000,
        "null",
        '"text"',
    ],
)
def test_strange_lines_are_skipped_and_counted(tmp_path: Path, record: str) -> None:
    header = SAMPLE.split(b"\n")[0].decode()
    good = f",{GOOD},{CLOSING}\n"
    found, damaged = read(
        f"{header}\n{good},{record},{CLOSING}\n{good}]".encode(), tmp_path
    )
    assert [span.name for iteration in found for span in iteration.spans] == [
        "forward"
    ] * 2
    assert damaged == 1
    assert found[0].spans[0][1:3] == (500, 2500)


def test_directories_without_traces_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be listed"):
        reader.open_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match="contains no trace of a rank; give the folder"):
        reader.open_run(tmp_path)
    os.mkfifo(tmp_path / NAME)  # opening it would wait for ever
    with pytest.raises(DataError, match="no trace"):
        reader.open_run(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text('[{"name":"run","ph":"M","args":{"format":7}}\n')
    with pytest.raises(
        DataError, match="it has format 7, but this version reads format 5"
    ):
        reader.open_run(tmp_path)
    (tmp_path / NAME).write_text("#!/bin/sh\n")
    with pytest.raises(DataError, match="it is not a trace"):
        reader.open_run(tmp_path)


def test_text_stays_text(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script>\\"'
    run = write_run(tmp_path, settings={"schedule": evil})
    found = read_run(run)
    output = aggregated_name(run)
    write_chrome_trace(found, output)
    json.loads(output.read_text())


def test_what_no_rank_of_ours_wrote_is_skipped_with_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    path = trace_of(run, 0)
    path.write_bytes(path.read_bytes().replace(b'"stage":', b'"stage":[1],"was":'))
    found = read_run(run)
    assert [len(survey.steps) for survey in found.surveys] == [0, 3, 3, 3]
    assert f"{path.name}: 3 damaged lines were skipped" in found.notes


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=3,
) | st.sampled_from([10**30, -1, 2, 7, 1e308])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_wrong_value_leaves_out_a_line_or_a_rank(tmp_path_factory, data) -> None:
    """Whichever value of a header or a record it is: the commands say it and go on."""
    folder = tmp_path_factory.mktemp("run")
    for rank, text in enumerate(TEXTS):
        trace_of(folder, rank).write_text(text)
    (folder / SCHEDULE_FILE).write_text(TABLE)
    rank = data.draw(st.integers(0, 1), "rank")
    lines = TEXTS[rank].splitlines()
    number = data.draw(st.integers(0, len(lines) - 2), "line")
    events = json.loads(f"[{lines[number].strip('[,]')}]")
    place = events
    while isinstance(place, dict | list) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        container, key = place, data.draw(st.sampled_from(keys), "key")
        place = place[key]
    container[key] = data.draw(VALUES, "value")
    lines[number] = f"{'[' if number == 0 else ','}{json.dumps(events)[1:-1]}"
    trace_of(folder, rank).write_text("\n".join(lines))
    try:
        run = read_run(folder)
    except DataError:
        return
    assert {survey.header.rank for survey in run.surveys} <= {0, 1}
    write_chrome_trace(run, folder / "all.json")
    json.loads((folder / "all.json").read_text(), parse_constant=pytest.fail)
    survey.text(run.surveys)
    slow(run)
    _, _, content = page(run).partition('id="data">')
    json.loads(content.partition("</script>")[0], parse_constant=pytest.fail)


def _texts() -> tuple[list[str], str]:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(
            Path(folder), pp=2, microbatches=2, iterations=2, sizes=[(5, 25)] * 2,
            wire_of=lambda rank, peer: "shm", settings={"stash_ratio": 1.0, "cpus": "0,1"},
            clock_of=str,
        )  # fmt: skip
        texts = [trace_of(run, rank).read_text() for rank in range(2)]
        return texts, (run / SCHEDULE_FILE).read_text()


TEXTS, TABLE = _texts()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clock", ["boot"]), ("clock", 7), ("rank", -1), ("rank", 4), ("rank", True), ("sizes", 4),
        ("sizes", [1, 4]), ("pipeline", 4), ("clock_ns", 1.5), ("settings", []), ("host", None),
        ("settings", {"stash_ratio": "1"}), ("settings", {"cpus": 3}), ("run", {}),
    ],
)  # fmt: skip
def test_a_header_that_no_rank_writes_leaves_its_file_out(
    tmp_path: Path, field: str, value: object
) -> None:
    run = write_run(tmp_path)
    path = trace_of(run, 1)
    first, _, rest = path.read_text().partition("\n")
    events = json.loads(f"{first.rstrip(',')}]")
    events[0]["args"][field] = value
    path.write_text(json.dumps(events)[:-1] + "\n" + rest)
    found = read_run(run)
    assert [survey.header.rank for survey in found.surveys] == [0, 2, 3]
    assert (
        f"{path.name}: it is not a trace, or its first line is damaged" in found.notes
    )


def test_a_header_with_the_rank_of_another_one_proves_nothing_about_clocks(
    tmp_path: Path,
) -> None:
    """Ranks 0 to 2 exchange messages with a rank 3, whose file says that it is rank 4 of 5."""
    run = write_run(tmp_path, clock_of=str, clock_offset_ns=lambda rank: 50 * rank)
    path = trace_of(run, 3)
    path.write_text(path.read_text().replace('"rank":3', '"rank":4'))
    for rank in range(4):
        text = trace_of(run, rank).read_text()
        trace_of(run, rank).write_text(text.replace('"num_ranks":4', '"num_ranks":5'))
    found = read_run(run)
    assert [survey.header.rank for survey in found.surveys] == [0, 1, 2, 4]
    slow(found)
