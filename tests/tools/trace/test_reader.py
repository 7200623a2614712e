"""Whatever state a trace is in, what is in it is read, and what is not is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import DataError
from megatron_ext.tools.trace import reader, run_folder
from megatron_ext.tools.trace.aggregate import aggregated_name, read_run, write_chrome_trace
from tests.tools.trace.runs import trace_of, write_run

NAME = "benchmark-data-0-pipeline-0-tensor-0.json"


def read(text: bytes, folder: Path) -> tuple[list[reader.Iteration], int]:
    (folder / NAME).write_bytes(text)
    [file], _ = run_folder.open_run(folder)
    return list(file.iterations()), file.damaged


def test_both_ways_of_reading_agree(tmp_path: Path) -> None:
    path = trace_of(write_run(tmp_path), 2)
    text = path.read_bytes()
    [file] = [f for f in run_folder.open_run(path.parent)[0] if f.path == path]
    fast = list(file.iterations())
    path.write_bytes(text.replace(b'"ph":', b'"ph": '))  # as another program would write it
    slow = list(file.iterations())
    assert fast == slow
    assert len(fast) == 3
    assert file.damaged == 0
    assert [i.number for i in file.iterations(only=2)] == [2]


def test_a_file_cut_at_any_place_gives_what_is_before(tmp_path: Path) -> None:
    run = write_run(tmp_path, pp=2, microbatches=2, iterations=2)
    text = trace_of(run, 0).read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    header = text.index(b"\n") + 1
    counts = []
    for length in range(header, len(text), 7):
        found, damaged = read(text[:length], folder)
        counts.append(sum(len(iteration.spans) for iteration in found))
        assert damaged <= 2
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(read(text, folder)[0][0].spans) * 2


@settings(max_examples=200, deadline=None)
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
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), pp=2, microbatches=2, iterations=2)
        return trace_of(run, 1).read_bytes()


SAMPLE = _sample()


@pytest.mark.parametrize(
    "record",
    [
        '{"name":"x","ph":"E","rel_ts":5}',
        '{"name":"x","ph":"B","rel_ts":-1}',
        '{"name":"x","ph":"B","rel_ts":1e300}',
        '{"name":"x","ph":"B","rel_ts":' + "9" * 5000 + "}",
        '{"name":["x"],"ph":"B","rel_ts":5}',
        '{"name":"x","ph":"B"}',
        "[" * 100_000,
        "null",
        '"text"',
    ],
)
def test_strange_records_are_skipped_and_counted(tmp_path: Path, record: str) -> None:
    opening = '[{"name":"iteration","ph":"B","pad_before":0}\n'
    good = ',{"name":"forward","ph":"B","rel_ts":1}\n,{"name":"forward","ph":"E","rel_ts":2}\n'
    [iteration], damaged = read(f"{opening},{record}\n{good}]".encode(), tmp_path)
    assert [span.name for span in iteration.spans] == ["forward"]
    assert damaged == 1


def test_a_trace_of_megatronapp_is_read(tmp_path: Path) -> None:
    records = [
        {"name": "iteration", "ph": "B", "pad_before": 10},
        {"name": "forward", "ph": "B", "rel_ts": 1},
        {
            "name": "forward",
            "ph": "E",
            "rel_ts": 5,
            "microbatch": 0,
            "model_chunk": 1,
            "pp_rank": 2,
        },
        {"name": "note", "ph": "i", "rel_ts": 6},
        {"name": "iteration", "ph": "E", "duration_wall": 9, "duration_cuda": 8},
    ]
    folder = tmp_path / "data-2-pipeline-4-tensor-1-dpp-True"
    folder.mkdir()
    path = folder / "benchmark-data-1-pipeline-2-tensor-0.json"
    path.write_text(json.dumps(records * 2))
    [file], notes = run_folder.open_run(folder)
    assert notes == ["7 of 8 ranks left no trace"]
    first, second = file.iterations()
    assert first.spans == second.spans
    assert second.begin_ns == first.begin_ns + 9 + 10
    assert (file.header.rank, file.header.row) == (5, (6, 0))


def test_directories_without_traces_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be listed"):
        run_folder.open_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no trace of a rank; give the folder"):
        run_folder.open_run(tmp_path)
    os.mkfifo(tmp_path / NAME)  # opening it would wait for ever
    with pytest.raises(DataError, match="no trace"):
        run_folder.open_run(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text('[{"name":"run","ph":"M","args":{"format":7}}\n')
    with pytest.raises(DataError, match="another format than 1"):
        run_folder.open_run(tmp_path)
    (tmp_path / NAME).write_text("#!/bin/sh\n")
    with pytest.raises(DataError, match="does not begin with"):
        run_folder.open_run(tmp_path)


def test_text_stays_text(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script>\\"'
    run = write_run(tmp_path, settings={"schedule": evil})
    found = read_run(run)
    output = aggregated_name(run)
    write_chrome_trace(found, output)
    json.loads(output.read_text())


def test_what_no_rank_of_ours_wrote_is_left_out_with_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    path = trace_of(run, 0)
    path.write_bytes(path.read_bytes().replace(b'"stage":', b'"stage":[1],"was":'))
    found = read_run(run)
    assert path not in [survey.path for survey in found.surveys]
    [note] = [note for note in found.notes if "is damaged and left out" in note]
    assert path.name in note
    assert "\n" not in note
