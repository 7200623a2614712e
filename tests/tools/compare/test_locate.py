"""The first tensor that differs between two recorded runs, on files made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import DataError
from megatron_ext.tools.compare.locate import Difference, compare, locate
from megatron_ext.tracing.digest_files import (
    FILE_NAME,
    KINDS,
    MEGATRONS,
    NO_MICROBATCH,
    Header,
    Kind,
    Record,
    Writer,
    read,
    read_folder,
)
from tests.tools.compare.digests import (
    NUM_LAYERS,
    NUM_MICROBATCHES,
    SLICED,
    changed,
    record,
    slightly,
    step_records,
    write,
)


def compared(folder: Path, candidate: Sequence[Record]) -> Difference | None:
    first = write(folder / "reference", step_records())
    return locate(first, write(folder / "candidate", candidate, header=Header(3, "b")))


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    assert compared(tmp_path, step_records()) is None


def test_it_says_all_that_the_issue_asks_for(tmp_path: Path) -> None:
    difference = compared(tmp_path, changed(step_records(), ("backward", 1, 2)))
    assert difference is not None
    assert difference.sentence() == (
        "first difference: iteration 1, micro-batch 1: the gradient of the input of layer 2 "
        "differs by 0.5 of its norm: reference 2B1, rank 0 on a; candidate 2B1, rank 3 on b"
    )


def test_all_micro_batches_that_differ_at_the_place_are_named(tmp_path: Path) -> None:
    places: list[tuple[Kind, int, int]] = [
        ("forward", 0, 3),
        ("forward", 0, 1),
        ("forward", 1, 1),
    ]
    difference = compared(tmp_path, changed(step_records(), *places))
    assert difference is not None
    assert (difference.layer, difference.microbatches) == (1, (0, 1))
    assert "all 2 micro-batches: the output of layer 1" in difference.sentence()


_PLACES = st.tuples(
    st.sampled_from(KINDS[:2]),
    st.integers(0, NUM_MICROBATCHES - 1),
    st.integers(0, NUM_LAYERS - 1),
)


@settings(deadline=None, max_examples=40)
@given(places=st.sets(_PLACES, min_size=1))
def test_the_first_is_what_a_step_computes_first(
    tmp_path_factory: pytest.TempPathFactory, places: set[tuple[Kind, int, int]]
) -> None:
    """Forwards go up the layers, backwards down."""

    def order(place: tuple[Kind, int, int]) -> tuple[int, int]:
        kind, _, layer = place
        return (0, layer) if kind == "forward" else (1, -layer)

    folder = tmp_path_factory.mktemp("runs")
    difference = compared(folder, changed(step_records(), *places))
    assert difference is not None
    kind, _, layer = min(places, key=order)
    assert (difference.kind, difference.layer) == (kind, layer)
    assert set(difference.microbatches) == {
        m for k, m, at in places if (k, at) == (kind, layer)
    }


def test_an_earlier_step_comes_before_an_earlier_layer(tmp_path: Path) -> None:
    records = step_records()
    first = write(tmp_path / "reference", records, records)
    late = changed(records, ("forward", 0, 0))
    early = changed(records, ("weights", NO_MICROBATCH, 3))
    difference = locate(first, write(tmp_path / "candidate", early, late))
    assert difference is not None
    assert (difference.iteration, difference.kind) == (1, "weights")
    assert "after iteration 1: the weight of layer 3" in difference.sentence()


@pytest.mark.parametrize("is_reference", [True, False])
def test_a_micro_batch_that_only_one_run_computed_is_a_difference(
    tmp_path: Path, is_reference: bool
) -> None:
    records = step_records()
    lacking = [r for r in records if (r.kind, r.microbatch) != ("forward", 1)]
    whole, part = write(tmp_path / "whole", records), write(tmp_path / "part", lacking)
    difference = locate(whole, part) if is_reference else locate(part, whole)
    assert difference is not None
    assert (difference.kind, difference.microbatches, difference.layer) == (
        "forward",
        (1,),
        0,
    )
    assert "never computed" in difference.sentence()


def test_a_module_that_only_one_run_records_is_no_difference(tmp_path: Path) -> None:
    """Pairs of schedule plans, for one, call parts of layers and not the layers."""
    only_here = [record("forward", m, 1, module="decoder.layers.1.mlp") for m in (0, 1)]
    assert compared(tmp_path, [*step_records(), *only_here]) is None


def test_a_killed_rank_leaves_its_complete_steps(tmp_path: Path) -> None:
    records = step_records()
    first = write(tmp_path / "reference", records, changed(records, ("forward", 0, 0)))
    second = write(tmp_path / "candidate", records, records)
    path = second / FILE_NAME.format(0)
    path.write_text(path.read_text()[:-20])
    assert read(path).is_cut
    assert locate(first, second) is None


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", step_records())
    path = folder / FILE_NAME.format(0)
    path.write_text(path.read_text().replace("2.0,", "3.0,", 1))
    with pytest.raises(DataError, match="line 2: no digests: its checksum is wrong"):
        read(path)


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", step_records())
    with pytest.raises(DataError, match="use a new folder for each"):
        Writer(folder, Header(0))


def _write_attempt(folder: Path, restart: int, first: int, last: int) -> None:
    """Write the weights after step `first`, and the steps from there to `last`."""
    header = replace(Header(0, f"host-{restart}"), restart=restart)
    weights = [item for item in step_records() if item.kind == "weights"]
    writer = Writer(folder, header)
    writer.step(first, weights)
    for number in range(first + 1, last + 1):
        writer.step(number, step_records(), MEGATRONS)
    writer.close()


def test_steps_before_and_after_a_restart_are_those_of_one_training(
    tmp_path: Path,
) -> None:
    """The second restart came before a step, and the third one repeats a step."""
    _write_attempt(tmp_path / "alone", 0, 0, 6)
    restarted = tmp_path / "restarted"
    _write_attempt(restarted, 0, 0, 5)
    _write_attempt(restarted, 1, 3, 4)
    Writer(restarted, replace(Header(0, "host-2"), restart=2)).close()
    _write_attempt(restarted, 3, 3, 6)
    comparison = compare(tmp_path / "alone", restarted)
    assert comparison.difference is None
    assert (comparison.gap, comparison.num_steps) == ("", 7)
    [file] = read_folder(restarted)
    assert file.header.host == "host-0, then host-1, then host-2, then host-3"
    assert sorted(file.schedules) == [1, 2, 3, 4, 5, 6]


def test_a_step_that_no_restart_has_repeated_is_missing(tmp_path: Path) -> None:
    _write_attempt(tmp_path / "alone", 0, 0, 5)
    _write_attempt(tmp_path / "restarted", 0, 0, 5)
    _write_attempt(tmp_path / "restarted", 1, 3, 4)
    [file] = read_folder(tmp_path / "restarted")
    assert sorted(file.steps) == [0, 1, 2, 3, 4]
    assert "step" in compare(tmp_path / "alone", tmp_path / "restarted").gap


def test_a_restart_that_loads_other_weights_differs_there(tmp_path: Path) -> None:
    _write_attempt(tmp_path / "alone", 0, 0, 3)
    restarted = tmp_path / "restarted"
    _write_attempt(restarted, 0, 0, 3)
    weights = [item for item in step_records() if item.kind == "weights"]
    writer = Writer(restarted, Header(0, restart=1))
    writer.step(2, changed(weights, ("weights", NO_MICROBATCH, 1)))
    writer.step(3, step_records(), MEGATRONS)
    writer.close()
    difference = locate(tmp_path / "alone", restarted)
    assert difference is not None
    assert difference.sentence().startswith(
        "first difference: after iteration 2: the weight of layer 1 differs"
    )


def test_a_restart_with_other_ranks_is_refused(tmp_path: Path) -> None:
    write(tmp_path, step_records(), header=Header(0, data_size=2))
    write(tmp_path, step_records(), header=Header(0, data_size=1, restart=1))
    with pytest.raises(DataError, match="restart 1 has data_size = 1, but"):
        read_folder(tmp_path)


def test_a_folder_without_digests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MEGATRON_EXT_DIGESTS="):
        locate(tmp_path, tmp_path)


def test_micro_batches_that_are_numbered_by_length_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "reference", step_records())
    balanced = replace(Header(0), balance="pack")
    second = write(tmp_path / "candidate", step_records(), header=balanced)
    with pytest.raises(DataError, match="--pipeline-balance"):
        locate(first, second)


@pytest.mark.parametrize(
    ("settings_of_runs", "reason"),
    [
        (({}, {"slices": 2}), "only one of the runs has 2 slices"),
        (({"slices": 4}, {"slices": 2}), "the runs have 4 and 2 slices"),
        (
            ({"tokens per slice": "auto on 2 ranks"}, {"tokens per slice": 8}),
            "the runs have auto on 2 ranks and 8 tokens per slice",
        ),
        (({"slices": 2}, {"slices": 2}), ""),
    ],
)
def test_settings_that_order_sums_over_tokens_are_compared(
    tmp_path: Path, settings_of_runs: tuple[dict[str, Any], ...], reason: str
) -> None:
    folders = []
    for name, summation in zip(("one", "two"), settings_of_runs, strict=True):
        header = Header(0, summation=summation)
        folders.append(write(tmp_path / name, step_records(), header=header))
    tolerance = compare(*folders).tolerance
    assert tolerance.endswith(f"because {reason}") if reason else "none" in tolerance


# Other orders of the same sums.


def _with_larger_gradients(factor: float) -> list[Record]:
    records = []
    for item in step_records():
        if item.kind in ("backward", "weight gradient") and factor != 1.0:
            projections = [factor * projection for projection in item.projections]
            item = item._replace(
                bits="3" * 32, norm=factor * item.norm, projections=projections
            )
        records.append(item)
    return records


@pytest.mark.parametrize(
    ("kind", "by", "is_allowed"),
    [
        ("reduced gradient", 1e-6, True),
        ("reduced gradient", 1e-2, False),
        ("forward", 1e-6, False),
    ],
)
def test_other_numbers_of_replicas_may_differ_where_they_add_up(
    tmp_path: Path, kind: Kind, by: float, is_allowed: bool
) -> None:
    """The first forwards still have the same bits: no sum over replicas comes before them."""
    first = write(tmp_path / "reference", step_records())
    candidate = slightly(_with_larger_gradients(2.0), kind, by)
    second = write(tmp_path / "candidate", candidate, header=Header(0, data_size=2))
    difference = locate(first, second)
    assert (difference is None) == is_allowed


@pytest.mark.parametrize(
    ("num_replicas", "is_moved", "kind", "is_allowed"),
    [
        (3, True, "reduced gradient", True),
        (3, True, "weights", True),
        (3, True, "backward", False),  # before the sum
        (3, False, "reduced gradient", False),
        (2, True, "reduced gradient", False),
    ],
)
def test_three_replicas_add_up_in_an_order_of_their_placement(
    tmp_path: Path, num_replicas: int, kind: Kind, *, is_moved: bool, is_allowed: bool
) -> None:
    header = Header(0, data_size=num_replicas)
    first = write(tmp_path / "reference", step_records(), header=header)
    candidate = slightly(step_records(), kind, 1e-6)
    if is_moved:  # one stage has two layers
        candidate = [item._replace(stage=item.stage // 2) for item in candidate]
    second = write(tmp_path / "candidate", candidate, header=header)
    result = compare(first, second)
    assert (result.difference is None) == is_allowed
    assert ("three or more replicas" in result.tolerance) == (
        is_moved and num_replicas == 3
    )


@pytest.mark.parametrize(
    ("sizes", "factor", "is_allowed"),
    [
        ({"data_size": 2}, 2.0, True),
        ({"data_size": 2}, 3.0, False),
        ({"data_size": 2}, 1.0, False),
        ({"context_size": 2}, 2.0, True),
        ({"context_size": 2}, 1.0, False),
        ({"data_size": 2, "loss_is_per_token": True}, 1.0, True),
        ({"data_size": 2, "loss_is_per_token": True}, 2.0, False),
    ],
)
def test_gradients_of_ranks_that_average_over_more_are_larger(
    tmp_path: Path, sizes: dict[str, int], factor: float, is_allowed: bool
) -> None:
    """Each has fewer micro-batches or tokens, by which it divides a loss that is a mean."""
    header = Header(0, **sizes)  # type: ignore[arg-type]
    alone = replace(header, data_size=1, context_size=1)
    first = write(tmp_path / "reference", step_records(), header=alone)
    second = write(
        tmp_path / "candidate", _with_larger_gradients(factor), header=header
    )
    difference = locate(first, second)
    assert (difference is None) == is_allowed
    if difference is not None:
        assert (difference.kind, difference.layer) == ("backward", NUM_LAYERS - 1)


def test_losses_of_other_kinds_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "reference", step_records())
    per_token = Header(0, loss_is_per_token=True)
    second = write(tmp_path / "candidate", step_records(), header=per_token)
    with pytest.raises(DataError, match="--calculate-per-token-loss"):
        locate(first, second)


def test_parts_that_are_cut_differently_are_held_against_each_other_by_norm(
    tmp_path: Path,
) -> None:
    whole = [record("reduced gradient", NO_MICROBATCH, 0, num_elements=50, norm=5.0)]
    parts = [
        record(
            "reduced gradient", NO_MICROBATCH, 0, part="d0", num_elements=25, norm=3.0
        ),
        record(
            "reduced gradient", NO_MICROBATCH, 0, part="d1", num_elements=25, norm=4.0
        ),
    ]
    first = write(tmp_path / "reference", whole)
    assert locate(first, write(tmp_path / "candidate", parts)) is None
    parts[1] = parts[1]._replace(norm=4.5)
    difference = locate(first, write(tmp_path / "changed", parts))
    assert difference is not None
    assert "differs in its norm, where" in difference.sentence()


# Tolerances learned from a run that was rounded differently.

ROUNDED = Header(0, "a", rounded=True)


@pytest.mark.parametrize(("by", "is_allowed"), [(3e-5, True), (9e-5, False)])
def test_a_learned_tolerance_takes_the_place_of_the_stated_one(
    tmp_path: Path, by: float, is_allowed: bool
) -> None:
    """The stated tolerance allows both; four times what rounding does allows one of them."""
    records = step_records()
    first = write(tmp_path / "reference", records)
    rounded = records
    for kind in KINDS:
        rounded = slightly(rounded, kind, 1e-5)
    learned_from = write(tmp_path / "rounded", rounded, header=ROUNDED)
    candidate = slightly(records, "backward", by)
    second = write(tmp_path / "candidate", candidate, header=SLICED)
    assert locate(first, second) is None
    comparison = compare(first, second, learned_from)
    assert (comparison.difference is None) == is_allowed
    assert comparison.tolerance.startswith(
        "4 times the differences of each module's tensors in"
    )
    assert comparison.tolerance.endswith(
        "at most 2e-05 of a norm, because only one of the runs has 2 slices"
    )


def test_what_is_not_finite_is_no_tolerance(tmp_path: Path) -> None:
    records = step_records()
    first = write(tmp_path / "reference", records)
    with_nan = [records[0]._replace(bits="4" * 32, norm=math.nan), *records[1:]]
    learned_from = write(tmp_path / "rounded", with_nan, header=ROUNDED)
    candidate = changed(records, ("forward", 0, 1))
    second = write(tmp_path / "candidate", candidate, header=SLICED)
    assert compare(first, second, learned_from).difference is not None


def test_only_steps_with_learned_tolerances_are_compared(tmp_path: Path) -> None:
    records = step_records()
    near = slightly(records, "forward", 1e-5)
    first = write(tmp_path / "reference", records, records)
    second = write(tmp_path / "candidate", near, near, header=SLICED)
    learned_from = write(tmp_path / "rounded", near, header=ROUNDED)
    comparison = compare(first, second, learned_from)
    assert comparison.difference is None
    assert comparison.num_steps == 1
    assert (
        comparison.gap
        == "the run to learn tolerances from lacks 1 steps, which were not compared"
    )


def test_steps_of_one_run_alone_are_a_gap(tmp_path: Path) -> None:
    records = step_records()
    first = write(tmp_path / "reference", records, records, records)
    second = write(tmp_path / "candidate", records)
    assert compare(first, second).gap == (
        "the runs have 3 and 1 steps, of which they share 1; record both for the same steps"
    )


def test_runs_without_a_common_tensor_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "reference", step_records())
    second = write(tmp_path / "candidate", [])
    with pytest.raises(DataError, match="no tensor in common, so nothing was compared"):
        compare(first, second)


def test_a_learned_tolerance_allows_nothing_where_bits_are_promised(
    tmp_path: Path,
) -> None:
    records = step_records()
    first = write(tmp_path / "reference", records)
    learned_from = write(
        tmp_path / "rounded", slightly(records, "forward", 1e-2), header=ROUNDED
    )
    second = write(tmp_path / "candidate", slightly(records, "forward", 1e-6))
    comparison = compare(first, second, learned_from)
    assert comparison.difference is not None
    assert comparison.tolerance == "none, all bits must be equal"


@pytest.mark.parametrize("model", ["model", "model 2.model", "model 2.stage 0.model"])
def test_the_gradient_of_a_model_is_that_of_its_output(
    tmp_path: Path, model: str
) -> None:
    whole = record("backward", 0, 0, module=model)
    first = write(tmp_path / "reference", [whole])
    second = write(tmp_path / "candidate", [whole._replace(bits="1" * 32)])
    difference = locate(first, second)
    assert difference is not None
    assert f"the gradient of the output of {model} differs" in difference.sentence()


def test_a_step_that_was_not_recorded_is_a_gap(tmp_path: Path) -> None:
    """The restart repeats the step, but nothing shows that it ran the same."""
    folders = []
    for name in ("reference", "candidate"):
        folder = write(tmp_path / name, step_records())
        writer = Writer(folder, Header(0, "a", restart=1))
        writer.gap("step 2 trained several models")
        writer.step(2, step_records())
        writer.close()
        folders.append(folder)
    comparison = compare(*folders)
    assert comparison.difference is None
    assert comparison.gap == f"{folders[0]}: step 2 trained several models"


def test_gradients_of_other_replicas_are_not_held_to_a_tolerance_of_zero(
    tmp_path: Path,
) -> None:
    """The gradient of a loss is a constant, which no rounding changes; other numbers of replicas
    scale it."""
    records = [*step_records(), record("backward", 0, 0, module="model")]
    first = write(tmp_path / "reference", records)
    learned_from = write(tmp_path / "rounded", records, header=ROUNDED)
    doubled = []
    for item in records:
        if item.kind == "backward":
            projections = [2 * projection for projection in item.projections]
            item = item._replace(
                bits="3" * 32, norm=2 * item.norm, projections=projections
            )
        doubled.append(item)
    second = write(tmp_path / "candidate", doubled, header=Header(0, data_size=2))
    assert compare(first, second, learned_from).difference is None


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            (Header(0, "a"), Header(0, "b"), Header(0, "c")),
            "without MEGATRON_EXT_DIGESTS_ROUNDING=1",
        ),
        ((Header(0, "a"), ROUNDED, ROUNDED), "pass it as the third folder"),
        ((ROUNDED, Header(0, "a"), ROUNDED), "pass it as the third folder"),
    ],
)
def test_a_folder_of_the_wrong_kind_of_run_is_refused(
    tmp_path: Path, headers: tuple[Header, Header, Header], message: str
) -> None:
    folders = []
    for name, header in zip(
        ("reference", "candidate", "rounded"), headers, strict=True
    ):
        folders.append(write(tmp_path / name, step_records(), header=header))
    with pytest.raises(DataError, match=message):
        compare(*folders)


def test_tolerances_of_another_cut_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "reference", step_records())
    second = write(
        tmp_path / "candidate",
        step_records(),
        header=SLICED,
    )
    other_parts = [item._replace(part="t0") for item in step_records()]
    learned_from = write(tmp_path / "rounded", other_parts, header=ROUNDED)
    with pytest.raises(DataError, match="record it with the reference's flags"):
        compare(first, second, learned_from)


def test_copies_of_a_module_are_compared_by_their_first_stage(tmp_path: Path) -> None:
    """A rank of a folded pipeline has both; the embedding of multi-token prediction is one."""
    first = record("forward", 0, 0, module="embedding", bits="1" * 32)
    last = record("forward", 0, 3, module="embedding", bits="3" * 32)
    reference, candidate = tmp_path / "reference", tmp_path / "candidate"
    write(reference, [first])
    write(reference, [last], header=Header(1))
    write(candidate, [last, first])
    assert locate(reference, candidate) is None
