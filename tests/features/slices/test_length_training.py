"""Slices by length under several steps, evaluation, tensor parallelism and replicas: in bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megatron_ext.config.active import clear_configuration
from megatron_ext.config.pipeline_config import DynamicOrder
from tests.features.slices.length_training import Job, Trained, train
from tests.ranks import RanksFailed, run_ranks

T = 8
BY_LENGTH: dict[str, Any] = {"slice_tokens": T}
DYNAMIC: dict[str, Any] = {"dynamic": DynamicOrder(), "transport": "shm"}
LENGTHS = (8, 1, 31, 9, 64, 2, 17, 8)
FEW = (1, 1, 2, 1, 3, 1, 0, 8)
"""Of a second replica, most of whose slices are empty."""
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
STEPS = (
    # Empty ones, one token, T, T + 1, and primes.
    (0, 1, 8, 9, 13, 61, 0, 7),
    # One slice each.
    (8, 8, 8, 8, 8, 8, 8, 8),
    # One sample of all tokens.
    (64, 0, 0, 0, 0, 0, 0, 0),
    (1, 1, 1, 1, 1, 1, 1, 0),
    # No token at all.
    (0, 0, 0, 0, 0, 0, 0, 0),
    (3, 64, 2, 64, 1, 7, 5, 53),
)
EVEN = ((2, 8, 32, 10, 64, 6, 18, 8), (64, 2, 2, 2, 2, 2, 0, 2))
EXPERTS = {
    "num_moe_experts": 4,
    "moe_aux_loss_coeff": 0.3,
    "moe_router_load_balancing_type": "aux_loss",
    "add_bias_linear": False,
}
MODERN = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
slow = partial(pytest.param, marks=pytest.mark.slow)


def by_step(*steps: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Return the lengths of one replica's steps."""
    return [[lengths] for lengths in steps]


def assert_same_bits(ranks: list[Trained], expected: list[Trained]) -> None:
    """Compare weights, gradients, reports and log-probabilities of all ranks."""
    for kind in ("weights", "gradients"):
        tensors, expected_tensors = {}, {}
        for rank in ranks:
            tensors |= getattr(rank, kind)
        for rank in expected:
            expected_tensors |= getattr(rank, kind)
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in tensors.items():
            assert tensor.equal(expected_tensors[name]), (kind, name)
    # Data-parallel replicas and tensor-parallel ranks report one after the other.
    reporting = [rank for rank in ranks if rank.reports]
    expected_reporting = [rank for rank in expected if rank.reports]
    for rank, expected_rank in zip(reporting, expected_reporting, strict=True):
        assert rank.reports == expected_rank.reports
        for output, expected_output in zip(
            rank.log_probabilities, expected_rank.log_probabilities, strict=True
        ):
            assert output.equal(expected_output)


def check(job: Job, **changes: Any) -> None:
    """Compare the job on one stage with the same job on more of them."""
    settings = {**job.settings, **changes.pop("settings", {})}
    pipelined = replace(job, settings=settings, **changes)
    expected = run_ranks(job.num_ranks, train, job)
    assert_same_bits(run_ranks(pipelined.num_ranks, train, pipelined), expected)


@pytest.mark.short_s(8)
@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("zb-h1", {"transport": "shm"}),
        slow("zb-v", {"transport": "torch"}),
        slow("zb-v", DYNAMIC),
        slow("1f1b", {"dynamic": DynamicOrder()}),
        slow("interleaved", {}),
        slow("gpipe", DYNAMIC),
    ],
)
def test_each_step_has_other_lengths(schedule: str, settings: dict[str, Any]) -> None:
    check(
        Job(by_step(*STEPS), settings=BY_LENGTH),
        schedule=schedule,
        pp=2,
        settings=settings,
    )


@pytest.mark.short_s(8)
@pytest.mark.parametrize(
    ("job", "schedule", "settings"),
    [
        pytest.param(
            Job(by_step(LENGTHS, (1, 7, 9, 13, 61, 2, 3, 5))),
            "zb-v",
            DYNAMIC,
            id="several lengths",
        ),
        slow(
            # More micro-batches than in the first step, and fewer.
            Job(
                by_step((64, 1), (1,) * 11, (5, 63, 8)),
                model={"variable_seq_lengths": False},
                positions="learned_absolute",
            ),
            "zb-h1",
            {"transport": "tcp"},
            id="several numbers of micro-batches",
        ),
        slow(
            Job([[((8, 23), 1, (64,)), ((1, 1), (3, 50), 7)]], is_packed=True),
            "interleaved",
            {"transport": "torch"},
            id="packed, of two replicas",
        ),
    ],
)
def test_evaluation_and_log_probabilities_between_steps(
    job: Job, schedule: str, settings: dict[str, Any]
) -> None:
    """Both run whole micro-batches, also ahead of the first training step."""
    job = replace(job, settings=BY_LENGTH, evaluates=True)
    check(job, schedule=schedule, pp=2, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "schedule", "settings"),
    [
        pytest.param(
            Job(by_step(*EVEN), tp=2, model={"sequence_parallel": True}),
            "zb-h1",
            {},
            id="sequence parallel",
        ),
        pytest.param(
            Job(by_step(LENGTHS), tp=2), "zb-v", {"transport": "shm"}, id="tp"
        ),
        pytest.param(Job(by_step(LENGTHS), rows=2), "zb-v", {}, id="two rows"),
        pytest.param(Job(by_step(LENGTHS), model=FULL), "zb-v", DYNAMIC, id="full"),
        pytest.param(
            Job([[LENGTHS, FEW]], is_packed=True), "zb-v", {}, id="two replicas"
        ),
        pytest.param(
            Job([[LENGTHS, FEW]], model=EXPERTS), "zb-h1", DYNAMIC, id="experts"
        ),
        pytest.param(
            Job([[((8, 23), 1, (1, 2, 61)), (2, (1, 1), 0)]], is_packed=True),
            "zb-v",
            DYNAMIC,
            id="packed",
        ),
        pytest.param(
            Job(
                by_step(*EVEN),
                tp=2,
                model={**MODERN, "sequence_parallel": True},
                positions="learned_absolute",
            ),
            "zb-v",
            {"transport": "tcp"},
            id="learned positions, normalized queries, sequence parallel",
        ),
        pytest.param(
            Job(by_step(*STEPS[:5]), model={"calculate_per_token_loss": True}),
            "zb-h1",
            DYNAMIC,
            id="per token",
        ),
        pytest.param(
            Job([[LENGTHS, FEW]], model={**EXPERTS, **FULL}, ep=2, is_packed=True),
            "zb-v",
            {"transport": "tcp"},
            id="recomputed experts on two ranks",
        ),
        pytest.param(
            Job(
                [[((), 8, (3, 0)), (1, (), ())]],
                model={"recompute_granularity": "selective"},
                is_packed=True,
            ),
            "zb-h1",
            {"transport": "torch"},
            id="no samples, attention recomputed",
        ),
        pytest.param(
            Job(
                [[((8, 23), 1, (1, 2, 61))]],
                tp=2,
                is_packed=True,
                only_first_reads=True,
            ),
            "zb-h1",
            {},
            id="packed, data on the first tensor-parallel rank only",
        ),
    ],
)
def test_models_and_replicas(job: Job, schedule: str, settings: dict[str, Any]) -> None:
    job = replace(job, settings=BY_LENGTH)
    check(job, schedule=schedule, pp=2, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "model", "settings"),
    [
        pytest.param("zb-h1", {}, {"transport": "shm"}, id="zb-h1"),
        pytest.param("zb-h1", {"mtp_num_layers": 1}, DYNAMIC, id="zb-h1, mtp"),
        pytest.param("zb-v", {}, {}, id="zb-v"),
        pytest.param("interleaved", {}, {}, id="interleaved"),
    ],
)
def test_a_weight_of_both_ends_gets_the_same_sum_from_all_tables(
    schedule: str, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    """One stage would add up the two gradients in another order."""
    replicas = [LENGTHS, FEW]
    if model:
        # From one token, Megatron 0.16 predicts no later one, and divides by that number.
        replicas = [tuple(2 if n == 1 else n for n in lengths) for lengths in replicas]
    job = Job([replicas], pp=2, settings=BY_LENGTH, model=model, is_tied=True)
    check(job, schedule=schedule, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("model", [DROPOUT, DROPOUT | FULL])
@pytest.mark.parametrize(
    ("schedule", "settings"), [("zb-h1", {"transport": "tcp"}), ("1f1b", DYNAMIC)]
)
def test_dropout_is_the_same_in_all_tables(
    schedule: str, settings: dict[str, Any], model: dict[str, Any]
) -> None:
    """By micro-batch and slice; the masks depend on the stage, so there are two on both sides."""
    job = Job(by_step(*STEPS[:3]), pp=2, settings=BY_LENGTH, model=model, seed=5)
    check(job, schedule=schedule, settings=settings)


PACKS = (((8, 23), 1, (1, 2, 61), 5), (2, (1, 1), 0, (3, 3)))
"""Packed samples of two replicas."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job([[LENGTHS, FEW]]), id="uneven"),
        pytest.param(Job([[(8,), (0,), (64,), (0,)]]), id="more replicas than samples"),
        pytest.param(
            Job([PACKS], schedule="zb-v", pp=2, is_packed=True),
            id="packed, in a pipeline",
        ),
        pytest.param(
            Job([PACKS], schedule="zb-h1", pp=2, is_packed=True, model=FULL),
            id="packed and recomputed, in a pipeline",
        ),
    ],
)
def test_replicas_share_out_samples(job: Job) -> None:
    """What a sample adds does not depend on its replica, up to rounding."""
    packed = replace(job, settings={**BY_LENGTH, "balance": "pack"})
    apart = replace(job, settings=BY_LENGTH)
    ranks = run_ranks(packed.num_ranks, train, packed)
    expected = run_ranks(apart.num_ranks, train, apart)
    for name, gradient in ranks[0].gradients.items():
        worst = (gradient - expected[0].gradients[name]).abs().max()
        assert worst < 2e-6 * gradient.abs().max(), name
    reports, expected_reports = [], []
    for rank, expected_rank in zip(ranks, expected, strict=True):
        reports += rank.reports
        expected_reports += expected_rank.reports
    # A micro-batch may have more slices in its new place, so sums are rounded differently.
    for report, expected_report in zip(
        sorted(reports), sorted(expected_reports), strict=True
    ):
        assert report == pytest.approx(expected_report, rel=1e-6, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, DYNAMIC])
def test_all_tables_share_out_the_same_samples(settings: dict[str, Any]) -> None:
    """In bits, several steps long."""
    job = Job(
        [PACKS, [(64, 1, 1, 1), (1, 1, 1, (2, 30))]],
        pp=2,
        settings={**BY_LENGTH, "balance": "pack"},
        is_packed=True,
    )
    check(job, schedule="zb-h1", settings=settings)


@pytest.mark.short_s(8)
def test_auto_cuts_as_the_number_that_it_chooses() -> None:
    """In bits: 15 tokens in a step whose longest of 60 has two slices for each of two ranks."""
    job = Job(by_step((60, 8, 8, 1)), pp=2, settings={"slice_tokens": 15})
    check(job, schedule="zb-h1", settings={"slice_tokens": "auto"})


def _train_alone(job: Job) -> Trained:
    """Train on this rank, and end what it has started."""
    from megatron.core import parallel_state

    try:
        return train(job)
    finally:
        clear_configuration()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _compare_small_steps() -> None:
    """Compare steps in slices with the same steps of whole micro-batches."""

    @examples(max_examples=20, deadline=None, database=None)
    @given(
        st.lists(
            st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4
        ),
        st.integers(1, 9),
        st.booleans(),
        st.sampled_from(["rope", "learned_absolute"]),
    )
    def check_step(
        samples_by_microbatch: list[tuple[int, ...]],
        slice_tokens: int,
        is_packed: bool,
        positions: str,
    ) -> None:
        lengths: Any = samples_by_microbatch
        if not is_packed:
            lengths = list(map(sum, samples_by_microbatch))
        job = Job([[lengths]], is_packed=is_packed, positions=positions)
        sliced = _train_alone(replace(job, settings={"slice_tokens": slice_tokens}))
        # More than any micro-batch has, so only empty ones run in a special way.
        whole = _train_alone(replace(job, settings={"slice_tokens": 64}))
        for name, expected in whole.gradients.items():
            worst = (sliced.gradients[name] - expected).abs().max()
            # Nine slices sum in another order than one: seen up to 2.2e-6.
            assert worst <= 5e-6 * expected.abs().max(), name
        for report, expected_report in zip(sliced.reports, whole.reports, strict=True):
            assert report == pytest.approx(expected_report, rel=1e-6, abs=0)

    check_step()


def test_small_steps_train_as_whole_micro_batches() -> None:
    run_ranks(1, _compare_small_steps)


def test_evaluation_names_a_micro_batch_without_tokens() -> None:
    job = Job(by_step((8, 0, 3)), settings=BY_LENGTH, evaluates=True)
    with pytest.raises(RanksFailed, match=r"micro-batch 1 has no tokens.*loss_mask 0"):
        run_ranks(1, train, job)
