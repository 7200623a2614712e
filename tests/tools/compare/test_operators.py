"""The first operator that differs inside a module, on files made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from megatron_ext.tools.compare.locate import Difference, Origin
from megatron_ext.tools.compare.operators import first_operator, place_of
from megatron_ext.tracing import operator_files
from megatron_ext.tracing.digest_files import (
    OPERATORS,
    ROUNDING,
    VARIABLE,
    folder_asked_for,
)
from megatron_ext.tracing.operator_files import (
    Operator,
    OperatorFile,
    OperatorHeader,
    Place,
    place_asked_for,
    write,
)

PLACE = Place(1, 0, "forward", "decoder.layers.2")


def operator(name: str, bits: str = "0", projection: float = 1.0) -> Operator:
    return Operator(f"aten.{name}", [[4, 8]], bits, 2.0, [projection] * 4)


def recorded(folder: Path, operators: Sequence[Operator], place: Place = PLACE) -> Path:
    folder.mkdir()
    header = OperatorHeader(0, "a", 0, 0, "2F0", str(place))
    write(folder, OperatorFile(header, list(operators)))
    return folder


LAYER = [operator("mm"), operator("gelu"), operator("mm"), operator("add")]


def test_equal_operators_are_counted(tmp_path: Path) -> None:
    comparison = first_operator(
        recorded(tmp_path / "a", LAYER), recorded(tmp_path / "b", LAYER)
    )
    assert comparison.are_equal
    assert comparison.sentence == (
        "none of the 4 operators that both runs have in the forward pass of decoder.layers.2 "
        "differs"
    )


def test_the_first_that_differs_is_named(tmp_path: Path) -> None:
    wrong = [*LAYER[:2], operator("mm", "1", 2.0), operator("add", "1", 2.0)]
    comparison = first_operator(
        recorded(tmp_path / "a", LAYER), recorded(tmp_path / "b", wrong)
    )
    assert not comparison.are_equal
    assert comparison.sentence == (
        "first operator that differs in the forward pass of decoder.layers.2: aten.mm -> [4, 8], "
        "number 3 of 4, differs by 0.5 of its norm"
    )


def test_an_operator_of_one_run_alone_is_named_with_what_it_changes(
    tmp_path: Path,
) -> None:
    wrong = [*LAYER[:3], operator("mul", "1"), operator("add", "1", 2.0)]
    comparison = first_operator(
        recorded(tmp_path / "a", LAYER), recorded(tmp_path / "b", wrong)
    )
    assert comparison.sentence.endswith(
        "aten.add -> [4, 8], number 4 of 4, differs by 0.5 of its norm; before it, only the "
        "candidate ran aten.mul -> [4, 8]"
    )


def test_a_split_backward_runs_fewer_operators(tmp_path: Path) -> None:
    place = replace(PLACE, direction="backward")
    whole = [
        operator("mm"),
        Operator("aten.mm", [[8, 8]], "5", 1.0, [1.0] * 4),
        operator("add"),
    ]
    inputs_only = [operator("mm"), operator("add")]
    folders = (
        recorded(tmp_path / "a", whole, place),
        recorded(tmp_path / "b", inputs_only, place),
    )
    assert first_operator(*folders).are_equal


def test_a_tolerance_allows_other_bits(tmp_path: Path) -> None:
    near = [operator("mm", "1", 1.0001), *LAYER[1:]]
    folders = recorded(tmp_path / "a", LAYER), recorded(tmp_path / "b", near)
    assert not first_operator(*folders).are_equal
    assert first_operator(*folders, 1e-3).are_equal


@pytest.mark.parametrize(
    ("run", "is_candidate"), [("candidate", True), ("reference", False)]
)
def test_operators_that_follow_the_last_match_are_a_difference(
    tmp_path: Path, run: str, is_candidate: bool
) -> None:
    short, long = recorded(tmp_path / "short", LAYER), [*LAYER, operator("mul")]
    folders = [short, recorded(tmp_path / "long", long)]
    comparison = first_operator(*(folders if is_candidate else folders[::-1]))
    assert not comparison.are_equal
    assert comparison.sentence.endswith(
        f"after the last operator of both; only the {run} ran aten.mul -> [4, 8]"
    )


def test_runs_without_a_common_operator_are_not_equal(tmp_path: Path) -> None:
    folders = recorded(tmp_path / "a", LAYER[:1]), recorded(tmp_path / "b", LAYER[1:2])
    assert not first_operator(*folders).are_equal
    with pytest.raises(DataError, match="neither run has operators in the forward"):
        first_operator(recorded(tmp_path / "c", []), recorded(tmp_path / "d", []))


def test_every_context_parallel_rank_is_compared(tmp_path: Path) -> None:
    folders = []
    for name, bits in (("a", "0"), ("b", "1")):
        folder = recorded(tmp_path / name, LAYER)
        second = [operator("mm", bits, float(bits)), *LAYER[1:]]
        header = OperatorHeader(1, "a", 0, 1, "2F0", str(PLACE))
        write(folder, OperatorFile(header, second))
        folders.append(folder)
    assert not first_operator(*folders).are_equal


def test_operators_of_another_version_are_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "a", LAYER)
    path = folder / operator_files.FILE_NAME.format(0)
    current = operator_files.FORMAT
    path.write_text(path.read_text().replace(f'"format": {current}', '"format": 1'))
    with pytest.raises(DataError, match=f"format 1, not {current}; record"):
        first_operator(folder, folder)


def test_operators_of_different_places_are_refused(tmp_path: Path) -> None:
    other_place = replace(PLACE, microbatch=1)
    folders = (
        recorded(tmp_path / "a", LAYER),
        recorded(tmp_path / "b", LAYER, other_place),
    )
    with pytest.raises(DataError, match="record both runs for the same place"):
        first_operator(*folders)


def test_a_folder_without_operators_is_refused(tmp_path: Path) -> None:
    first = recorded(tmp_path / "a", LAYER)
    with pytest.raises(
        DataError, match="has no operators: the module did not run as a whole"
    ):
        first_operator(first, tmp_path)


HERE = Origin("2F1", 0, "a")
IN_LAYER = Difference(
    iteration=3, microbatches=(1, 2), num_microbatches=4, kind="forward", layer=2, module="mlp",
    name="decoder.layers.2.mlp", reference=HERE, candidate=HERE, relative=0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, Place(3, 1, "forward", "decoder.layers.2")),
        (
            {"kind": "backward", "name": "embedding"},
            Place(3, 1, "backward", "embedding"),
        ),
        ({"kind": "weight gradient"}, None),
        ({"name": "model"}, None),
        ({"name": "model 2.model"}, None),
        (
            {"name": "model 2.decoder.layers.2.mlp"},
            Place(3, 1, "forward", "model 2.decoder.layers.2"),
        ),
        ({"candidate": None}, None),
    ],
)
def test_the_whole_layer_is_searched(
    changes: dict[str, object], place: Place | None
) -> None:
    """What precedes a part of a layer, such as a norm, has no digests."""
    assert place_of(replace(IN_LAYER, **changes)) == place  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["1:0:forward", "one:0:forward:x", "1:0:sideways:x", "1:0"]
)
def test_a_place_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(OPERATORS, text)
    with pytest.raises(
        DataError, match="give iteration, micro-batch, forward or backward, and module"
    ):
        place_asked_for()


def test_a_place_survives_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPERATORS, str(PLACE))
    assert place_asked_for() == PLACE


@pytest.mark.parametrize(
    ("installed", "is_refused"), [("2.9.1+cpu", True), ("2.10.0", False)]
)
def test_an_old_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, is_refused: bool
) -> None:
    monkeypatch.setattr(operator_files, "version", lambda _name: installed)
    monkeypatch.setenv(OPERATORS, str(PLACE))
    if is_refused:
        with pytest.raises(
            DataError, match=r"torch 2.10 or later, but torch is 2.9.1\+cpu"
        ):
            place_asked_for()
    else:
        assert place_asked_for() == PLACE


@pytest.mark.parametrize(
    ("variable", "value"), [(ROUNDING, "1"), (OPERATORS, str(PLACE))]
)
def test_what_needs_digests_is_refused_without_them(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(DataError, match=f"{variable} has no effect without {VARIABLE}"):
        folder_asked_for()
    monkeypatch.setenv(VARIABLE, "digests")
    assert folder_asked_for() == Path("digests")
