"""CSV files: torch's load here, ours load there, and damaged ones are refused with the place."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Schedule, generate, simulate, validate
from megatron_ext.schedules.table import table_files
from tests.schedules import torch_tables
from tests.schedules.strategies import schedules

OURS = {
    "ours-zb-v": ("zb-v", False),
    "ours-dualpipe-v": ("dualpipe-v", False),
    "ours-interleaved": ("interleaved", False),
    "ours-paired-dualpipe-v": ("dualpipe-v", True),
    "ours-paired-interleaved": ("interleaved", True),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch's tables, ours, and ours as torch read them."""
    if not hasattr(torch_tables.torch_schedules, "ScheduleDualPipeV"):
        pytest.skip("this torch has fewer schedules than are compared")
    folder = tmp_path_factory.mktemp("tables")
    for stem, (name, pairs) in OURS.items():
        schedule = generate(
            name, torch_tables.PP, torch_tables.NUM_MICROBATCHES, pairs=pairs
        )
        (folder / f"{stem}.csv").write_text(table_files.csv_text(schedule), newline="")
    command = [sys.executable, torch_tables.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", torch_tables.MADE)
def test_tables_of_torch_load(tables: Path, name: str) -> None:
    schedule = generate(
        f"csv:{tables / name}.csv", torch_tables.PP, torch_tables.NUM_MICROBATCHES
    )
    expected = "v" if torch_tables.MADE[name] == torch_tables.V else "loop"
    assert schedule.placement.name == expected
    validate(schedule)
    with_communication = table_files.load_csv(str(tables / f"{name}-comms.csv"))
    assert with_communication.rows == schedule.rows


def test_tables_of_torch_take_as_long_as_ours(tables: Path) -> None:
    for theirs, name in (
        ("Interleaved1F1B", "interleaved"),
        ("ZBVZeroBubble", "zb-v"),
        ("DualPipeV", "dualpipe-v"),
    ):
        ours = generate(name, torch_tables.PP, torch_tables.NUM_MICROBATCHES)
        loaded = table_files.load_csv(str(tables / f"{theirs}.csv"))
        assert simulate(replace(loaded, pairs=())).makespan == simulate(ours).makespan
        assert loaded.placement == ours.placement


def test_pairs_of_torch_are_ours(tables: Path) -> None:
    theirs = table_files.load_csv(str(tables / "DualPipeV.csv"))
    ours = generate(
        "dualpipe-v", torch_tables.PP, torch_tables.NUM_MICROBATCHES, pairs=True
    )
    assert theirs.rows == ours.rows
    assert sum(map(len, theirs.pairs)) > 20
    for rank, pairs in enumerate(theirs.pairs):
        assert pairs <= ours.pairs[rank]  # ours has some more in the transitions
    assert "(3F5;4B1)OVERLAP_F_B" in (tables / "DualPipeV.csv").read_text(
        encoding="utf-8"
    )
    assert set(theirs.cells(3)) - {"3F4", "4B0"} < set(ours.cells(3))


@pytest.mark.parametrize("stem", OURS)
def test_torch_loads_our_tables(tables: Path, stem: str) -> None:
    back = stem.replace("ours-", "back-")
    assert (tables / f"{back}.csv").read_bytes() == (
        tables / f"{stem}.csv"
    ).read_bytes()


@given(schedules())
def test_there_and_back(schedule: Schedule) -> None:
    loaded = table_files.from_csv(table_files.csv_text(schedule), "csv:x")
    assert (loaded.rows, loaded.pairs) == (schedule.rows, schedule.pairs)
    assert loaded.placement.rank_of == schedule.placement.rank_of
    assert loaded.num_microbatches == schedule.num_microbatches


def test_idle_cells_pairs_and_communication() -> None:
    rows = (
        ",0F0,0SEND_F0,0WAIT_SEND_F0,(0F1;0B0)OVERLAP_F_B,0B1",
        ",1UNSHARD,1RECV_F0,1F0,1B0,,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD",  # torch 2.15 waits
    )
    loaded = table_files.from_csv("\r\n".join(rows), "csv:x")
    assert [" ".join(map(str, row)) for row in loaded.rows] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
    ]
    assert loaded.pairs == (frozenset({1}), frozenset())
    validate(loaded)


GOOD = table_files.csv_text(generate("1f1b", 4, 6))


def test_marks_and_blank_lines_of_editors_are_no_ranks() -> None:
    loaded = table_files.from_csv(f"\ufeff{GOOD}\r\n  \n", "csv:x")
    assert loaded.rows == generate("1f1b", 4, 6).rows


def _edit(row: int, old: str, new: str) -> Callable[[str], str]:
    """An edit of one row; `old` has to occur there."""

    def edit(text: str) -> str:
        lines = text.splitlines()
        assert old in lines[row].split(",") or "," in old
        lines[row] = re.sub(rf"(^|,){old}(?=,|$)", rf"\g<1>{new}", lines[row])
        return "\r\n".join(lines)

    return edit


@pytest.mark.parametrize(
    ("damage", "sizes", "messages"),
    [
        (lambda text: text[: len(text) * 2 // 3], (4, 6), ["not for pp 4"]),
        (lambda text: text.rsplit(",", 3)[0], (4, 6), ["rank 3 never runs 3", ">>"]),
        (lambda text: text.rstrip()[:-1], (4, 6), ["row 4, cell 12", "'3B' is not an action"]),
        (_edit(1, "1B2", "1B2,1B2"), (4, 6), ["1B2 cannot run here", "already", ">>1B2<<"]),
        (_edit(2, "2F3", ""), (4, 6), ["2B3 cannot run here", "2F3 has to run before", ">>2B3<<"]),
        (_edit(2, "2F3", "2F9"), (4, None), ["2F3 has to run before it"]),
        (_edit(2, "2F3", "1F3"), (4, 6), ["row 3 runs 1F3", "stage 1 is in row 2"]),
        (_edit(0, "0F4,0B1", "0B1,0F4"), (4, 6), None),
        (lambda text: text.replace("0F0,0F1", "0F1,0F0", 1), (4, 6), None),
        (lambda text: text, (8, 6), ["for pp 4 and not for pp 8", "--pp 4"]),
        (lambda text: text, (4, 8), ["runs 6 micro-batches", "--microbatches 6"]),
        (lambda text: "", (None, None), ["contains no action"]),
        (lambda text: text.replace("1F", "5F"), (None, None), ["no row runs stage 4"]),
        (_edit(0, "0F4", "999999999F4"), (None, None), ["row 1 runs 999999999F4", "48 actions"]),
        (_edit(0, "0F4", "0F999999999"), (None, None), ["row 1 runs 0F999999999", "complete?"]),
        (_edit(0, "0F4", "0F" + "9" * 5000), (None, None), ["row 1, cell ", "is not an action"]),
        (_edit(0, "0F4", "x" * 200_000), (None, None), ["this is not CSV", "limit"]),
    ],
)  # fmt: skip
def test_damaged_files(
    tmp_path: Path,
    damage: Callable[[str], str],
    sizes: tuple[int | None, int | None],
    messages: list[str] | None,
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(damage(GOOD), newline="")
    if messages is None:  # another order that is as correct
        validate(table_files.load_csv(str(path), *sizes))
        return
    with pytest.raises(ScheduleError) as caught:
        table_files.load_csv(str(path), *sizes)
    for message in (str(path), *messages):
        assert message in str(caught.value)


def test_a_cyclic_file_shows_the_cycle(tmp_path: Path) -> None:
    path = tmp_path / "cyclic.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError) as caught:
        table_files.load_csv(str(path))
    assert "0B0 on rank 0 needs 1B0, which comes after 1F1" in str(caught.value)
    assert "1F1 on rank 1 needs 0F1, which comes after 0B0" in str(caught.value)
    assert ">>0B0<<" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(
        ScheduleError, match="csv: does not name a file; write csv:FILE"
    ):
        generate("csv:")
    with pytest.raises(ScheduleError, match="cannot be read as a schedule"):
        table_files.load_csv(str(tmp_path / "absent.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\0\1")
    with pytest.raises(ScheduleError, match="cannot be read as a schedule"):
        table_files.load_csv(str(tmp_path / "binary.csv"))
