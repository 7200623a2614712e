"""What two runs promise of their numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.hosting import preflight
from megatron_ext.features.lengths.length_rules import LengthRules
from megatron_ext.features.slices.slice_rules import SliceRules
from megatron_ext.tools.compare.tolerances import (
    NORM_ROUNDING,
    REASONS,
    TOLERANCES,
    Promise,
    promise,
)

RECIPE = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 5 "
    "--pipeline-model-parallel-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --eval-interval 1000 "
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
SINGLE = Promise(*TOLERANCES["single"])
BITS = Promise(0.0, 0.0)
TOKENS = {
    "slices": SliceRules.summation_reason,
    "lengths": LengthRules.summation_reason,
}
WORDS = REASONS | TOKENS


def promised(
    recipe: str,
    reference: str,
    candidate: str,
    *,
    same_flags: bool = True,
    num_ranks: int | None = None,
) -> Promise:
    answers = []
    for flags in (reference, candidate):
        answer = preflight((recipe + flags).split(), device="cpu", world_size=num_ranks)
        assert answer.accepted, answer.refusals
        answers.append(answer)
    return promise(*answers, same_flags=same_flags)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--pipeline-schedule zb-h1", None),
        ("--pipeline-schedule gpipe", None),
        ("--pipeline-schedule 1f1b --use-dpp", None),
        ("--pipeline-transport shm", None),
        ("--pipeline-schedule zb-v", "clip"),
        (
            "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
            "clip",
        ),
        ("--enable-bitpipe-schedule", "twins"),
        ("--pipeline-schedule dualpipe --clip-grad 0", "twins"),
        (
            "--pipeline-schedule zb-h1 --pipeline-slices 2 --transformer-impl local",
            "slices",
        ),
        ("--pipeline-schedule zb-h1 --pipeline-balance order", "lengths"),
        (
            "--pipeline-schedule zb-h1 --pipeline-slice-tokens 8 --transformer-impl local",
            "lengths",
        ),
    ],
)
def test_a_schedule_promises_bits_unless_it_adds_up_in_another_order(
    flags: str, kind: str | None
) -> None:
    answer = promised(RECIPE + NO_DROPOUT, "", flags)
    if kind is None:
        assert answer == BITS
    else:
        assert answer == Promise(SINGLE.loss, SINGLE.norm, WORDS[kind])


def test_without_clipping_only_the_norm_of_another_placement_may_be_rounded() -> None:
    flags = "--pipeline-schedule v-half"
    answer = promised(RECIPE + NO_DROPOUT + "--clip-grad 0 ", "", flags)
    assert answer == Promise(0.0, NORM_ROUNDING, REASONS["norm"])
    assert not answer.has_tolerance
    assert "bit-equal losses" in answer.allowance


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("--pipeline-schedule v-half", "replicas"), ("--pipeline-schedule zb-h1", None)],
)
def test_three_replicas_add_up_in_an_order_of_their_placement(
    flags: str, kind: str | None
) -> None:
    recipe = RECIPE + NO_DROPOUT + "--clip-grad 0 --global-batch-size 24 "
    ranks = int(recipe.split("--pipeline-model-parallel-size ")[1].split()[0])
    answer = promised(recipe, "", flags, num_ranks=3 * ranks)
    if kind is None:
        assert answer == BITS
    else:
        assert answer == Promise(SINGLE.loss, SINGLE.norm, WORDS[kind])
    assert promised(recipe, "", flags, num_ranks=2 * ranks).loss == 0.0


@pytest.mark.parametrize(
    ("layout", "is_exact"), [("Ett|tt|tt|ttL", True), ("Et|ttt|tt|ttL", False)]
)
def test_another_cut_sums_the_norm_over_other_ranks(
    layout: str, *, is_exact: bool
) -> None:
    recipe = f"{RECIPE}{NO_DROPOUT}--num-layers 8 --pipeline-model-parallel-size 4 "
    answers = []
    for cut in (None, layout):
        answer = preflight(
            [*recipe.split(), "--pipeline-schedule", "zb-h1"], device="cpu"
        )
        assert answer.accepted, answer.refusals
        if cut is not None:  # as `--pipeline-layout auto` does
            answer.arguments["pipeline_model_parallel_layout"] = cut
        answers.append(answer)
    assert promise(*answers, same_flags=True).is_exact == is_exact


def test_interleaved_promises_bits_against_megatrons_own() -> None:
    chunks = "--num-virtual-stages-per-pipeline-rank 2 "
    recipe = RECIPE + NO_DROPOUT + chunks
    assert promised(recipe, "", "--pipeline-schedule interleaved") == BITS


def test_half_precision_has_wider_tolerances() -> None:
    answer = promised(RECIPE + NO_DROPOUT + "--bf16 ", "", "--pipeline-schedule zb-v")
    assert (answer.loss, answer.norm) == TOLERANCES["half"]


@pytest.mark.parametrize(
    ("recipe", "flags", "is_judged"),
    [
        (RECIPE, "--pipeline-schedule zb-h1", False),
        (RECIPE + "--microbatch-rng ", "--pipeline-schedule zb-h1", True),
        (RECIPE + "--microbatch-rng ", "--pipeline-schedule zb-v", False),
        (RECIPE + NO_DROPOUT, "--pipeline-schedule zb-v", True),
    ],
)
def test_dropout_is_judged_where_the_masks_are_the_same(
    recipe: str, flags: str, *, is_judged: bool
) -> None:
    assert (promised(recipe, "", flags).loss is not None) == is_judged


def test_other_flags_of_megatrons_promise_no_bits() -> None:
    answer = promised(
        RECIPE + NO_DROPOUT, "", "--pipeline-schedule zb-h1", same_flags=False
    )
    assert answer.reason == REASONS["flags"]


def test_the_page_states_the_same() -> None:
    rows = [
        f"| {kind} | {loss:g} | {norm:g} |" for kind, (loss, norm) in TOLERANCES.items()
    ]
    page = (Path(__file__).parents[3] / "docs/compare.md").read_text(encoding="utf-8")
    stated = page.partition("<!-- equality: begin -->")[2].partition(
        "<!-- equality: end -->"
    )[0]
    reasons, _, table = stated.strip().partition("\n\n")
    order = ["dropout", "flags", *TOKENS, *list(REASONS)[2:]]
    assert reasons.splitlines() == [f"- {WORDS[kind]}" for kind in order]
    assert table.splitlines()[2:] == rows
    assert f"norm may differ by {NORM_ROUNDING:g}" in " ".join(page.split())
