"""Comparing schedules."""

from __future__ import annotations

import pytest

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules import Costs, comparison


def test_all_schedules_the_fastest_first() -> None:
    timelines, left_out = comparison.compare("all", 8, 16, Costs())
    assert not left_out
    assert timelines[0].schedule.label == "bitpipe order=zb"
    assert [t.makespan for t in timelines] == sorted(t.makespan for t in timelines)
    labels = [t.schedule.label for t in timelines]
    assert {
        "interleaved chunks=2",
        "interleaved chunks=4",
        "bitpipe order=paper",
    } < set(labels)
    assert len(labels) == len(set(labels))


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    timelines, left_out = comparison.compare("all", 3, 5, Costs())
    names = {t.schedule.name for t in timelines}
    assert names == {
        "1f1b",
        "dualpipe-v",
        "gpipe",
        "interleaved",
        "v-half",
        "zb-h1",
        "zb-v",
    }
    assert [reason.split()[0] for reason in left_out] == ["bitpipe", "dualpipe"]
    with pytest.raises(ScheduleError, match="no schedule can run") as raised:
        comparison.compare("all", 0, 5, Costs())
    assert len(str(raised.value).splitlines()) == 2, "one reason, told once"


def test_choices_of_the_user_are_kept() -> None:
    options = {"bitpipe": {"order": "paper"}}
    timelines, _ = comparison.compare("all", 4, 8, Costs(), chunks=3, options=options)
    labels = [t.schedule.label for t in timelines]
    assert "interleaved chunks=3" in labels
    assert "interleaved chunks=2" not in labels
    assert "bitpipe order=zb" not in labels


@pytest.mark.parametrize(
    ("name", "options", "flags"),
    [
        ("1f1b", {}, " --pipeline-schedule 1f1b"),
        (
            "interleaved",
            {"chunks": 4},
            " --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4",
        ),
        ("zb-v", {}, " --pipeline-schedule zb-v"),
        ("bitpipe", {}, " --enable-bitpipe-schedule"),
        (
            "bitpipe",
            {"order": "paper", "routing": "local"},
            " --enable-bitpipe-schedule --bitpipe-order paper --bitpipe-routing local",
        ),
    ],
)
def test_flags_to_paste(name: str, options: dict[str, object], flags: str) -> None:
    chunks = options.pop("chunks", None)
    for slices, of_slices in ((1, ""), (2, " --pipeline-slices 2")):
        [timeline], _ = comparison.compare(
            name, 4, 8, Costs(), chunks, {name: options}, slices=slices
        )
        found = comparison.training_flags(timeline.schedule)
        assert found == f"--pipeline-model-parallel-size 4{flags}{of_slices}"
