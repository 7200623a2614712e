"""Ranks that choose their order compute what Megatron's own schedule does, within their memory.

The delays that make them choose differently are drawn by rank: sleeps in forwards and backwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import active
from megatron_ext.config.active import Active, activate_configuration
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import TransportTimeout
from megatron_ext.runtime.ordering import leaders
from megatron_ext.runtime.runtime import Runtimes
from megatron_ext.schedules.search.policies import Hint, PolicyName
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.training.helpers import LLAMA, MOCK, MOE, NO_DROPOUT, bert_flags

from . import toy
from .capture import PP2, PP4, train
from .test_equality import (
    EP2,
    EXPERTS,
    PAIRS,
    SHARDED,
    TP2,
    UNCLIPPED,
    VPP2,
    assert_equal,
    stock,
)

M = 8
SEEDS = range(20)
MEAN_DELAY_S = 5e-4


class _Late(toy.Stage):
    """A stage that drops elements, keeps an activation, and takes its time in both directions."""

    draw: random.Random | None = None
    dropout = 0.0

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        x = data if self.input is None else self.input
        x = torch.nn.functional.dropout(x * 1.0, self.dropout)
        self._sleep()
        if x.requires_grad:
            x.register_hook(lambda _gradient: self._sleep())
        return x + torch.tanh(x) @ self.weight

    def _sleep(self) -> None:
        if self.draw is not None:
            time.sleep(self.draw.expovariate(1 / MEAN_DELAY_S))


def _train(
    under: Active,
    stages: list[int],
    dropout: float,
    seed: int | None,
    last_batch: int = toy.BATCH,
) -> Any:
    """Take three steps, whose last micro-batch has a size of its own; return losses and weights."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    activate_configuration(under)
    interleaved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,  # upstream's other way needs more than two ranks
        "batch_p2p_comm": False,
    }
    config = toy.config(
        **(interleaved if len(stages) > 1 else {}),
        **(toy.VARYING if last_batch < toy.BATCH else {}),
    )
    model = [
        _Late(config, s, i if len(stages) > 1 else None) for i, s in enumerate(stages)
    ]
    for stage in model:
        stage.dropout = dropout
        stage.draw = (
            None if seed is None else random.Random(f"{seed} {dist.get_rank()}")
        )
    losses = []
    for iteration in range(3):
        active.begin_iteration(iteration)
        reports = get_forward_backward_func()(
            forward_step_func=toy.forward_step,
            data_iterator=[_samples(last_batch) for _ in model],
            model=model,
            num_microbatches=M,
            seq_length=toy.LENGTH,
            micro_batch_size=toy.BATCH,
        )
        losses += [report["loss"].item() for report in reports]
        for stage in model:
            with torch.no_grad():
                stage.weight -= 0.01 * stage.weight.grad
            stage.weight.grad = None
    return losses, [stage.weight.detach() for stage in model]


def _samples(last_batch: int) -> Iterator[torch.Tensor]:
    for number, sample in enumerate(toy.samples(M), 1):
        yield sample[:, :last_batch] if number == M else sample


def _same(ours: Any, theirs: Any) -> bool:
    return ours[0] == theirs[0] and all(map(torch.equal, ours[1], theirs[1]))


def _under_delays(
    policy: PolicyName, extra: int | None, seeds: list[int]
) -> tuple[int, int, int]:
    """Compare with Megatron's interleaved schedule; return what was measured, and the cap."""

    toy.start(2, chunks_per_rank=2)
    megatrons = use(None, seed=11)
    order = DynamicOrder(policy=policy, extra_activations=extra)
    chosen = make_pipeline("interleaved", 2, M, 2, transport="shm", dynamic=order)
    ours = use(chosen, seed=11)
    stages = list(chosen.placement.stages_of[dist.get_rank()])
    for dropout in (0.0, 0.3):
        theirs = _train(megatrons, stages, dropout, seed=None)
        assert (not theirs[0]) == (dist.get_rank() == 0)
        for seed in seeds[int(dropout > 0) :: 2]:
            assert _same(_train(ours, stages, dropout, seed), theirs), (dropout, seed)
    assert isinstance(ours.runtimes, Runtimes)
    [runtime] = ours.runtimes
    rule = chosen.policy(M, dist.get_rank())
    cap = rule.cap if isinstance(rule, Hint) else M * len(stages)
    return runtime.measured.out_of_order, runtime.measured.peak_live, cap


@pytest.mark.parametrize(
    ("policy", "extra", "seeds"),
    [
        ("hint", 0, 2),
        ("hint", 1, len(SEEDS)),
        ("breadth-first", None, 2),
        ("depth-first", None, 2),
    ],
)
def test_delays_change_the_order_and_nothing_else(
    policy: PolicyName, extra: int | None, seeds: int
) -> None:
    table = make_pipeline("interleaved", 2, M, 2)
    peaks = [_peak(row) for row in table.schedule(M).rows]
    measured = run_ranks(2, _under_delays, policy, extra, list(SEEDS[:seeds]))
    assert any(out_of_order for out_of_order, _, _ in measured)
    for (_, peak, cap), of_table in zip(measured, peaks, strict=True):
        if extra is not None:
            assert cap == max(peaks) + 2 * extra, (
                "extra micro-batches count on both stages"
            )
            assert of_table <= peak <= cap
        assert peak <= 2 * M


def _peak(row: Any) -> int:
    live = [1 if action.kind == "F" else -1 for action in row if action.kind != "I"]
    return max(sum(live[: i + 1]) for i in range(len(live)))


def _ends_with_a_smaller_micro_batch() -> int:
    """Compare with Megatron's 1F1B, which tells shapes before tensors; return what was measured."""

    toy.start(2)
    megatrons = use(None, seed=11)
    stages = [dist.get_rank()]
    theirs = _train(megatrons, stages, 0.3, seed=None, last_batch=1)
    assert not _same(_train(megatrons, stages, 0.3, seed=None), theirs)
    chosen = make_pipeline("1f1b", 2, M, transport="shm", dynamic=DynamicOrder())
    ours = use(chosen, seed=11)
    for seed in range(3):
        assert _same(_train(ours, stages, 0.3, seed, last_batch=1), theirs), seed
    assert isinstance(ours.runtimes, Runtimes)
    [runtime] = ours.runtimes
    return runtime.measured.out_of_order


def test_a_last_batch_that_is_not_full() -> None:
    """A loader that drops nothing ends with fewer samples, so shapes differ within a step."""
    assert any(run_ranks(2, _ends_with_a_smaller_micro_batch))


def _alone() -> str:
    toy.start(2)
    chosen = make_pipeline(
        "1f1b", 2, M, transport="shm", message_timeout_s=1.0, dynamic=DynamicOrder()
    )
    ours = use(chosen, seed=1)
    if dist.get_rank() == 0:
        from megatron_ext.runtime.compute import StageCompute

        StageCompute.forward = lambda *_, **__: time.sleep(4)  # type: ignore[method-assign, assignment]
    try:
        _train(ours, [dist.get_rank()], 0.0, None)
    except TransportTimeout as error:
        return str(error)
    except Exception:
        if dist.get_rank() == 1:
            raise
    return ""


def test_a_rank_with_nothing_to_run_says_what_its_table_waits_for() -> None:
    message = run_ranks(2, _alone)[1]
    assert (
        "rank 1 (pipeline rank 1) cannot run any of its 24 remaining actions in 1f1b"
        in message
    )
    assert (
        "the first one in the table is 1F0, which needs the activation that stage 1"
        in message
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b", "interleaved"])
def test_members_of_an_expert_group_choose_the_same_pairs(schedule: str) -> None:
    """With dropout, under delays: each forward draws what it draws alone."""
    flags = f"{MOCK}{UNCLIPPED}--eval-iters 0 --global-batch-size 16 {EP2}{EXPERTS}--train-iters 2 "
    flags += PP2 + (VPP2 if schedule == "interleaved" else "")
    dynamic = f"{flags}--pipeline-schedule {schedule} --use-dpp {PAIRS}"
    found = train(4, dynamic, mean_delay_s=MEAN_DELAY_S)
    assert found.pairs > 0
    static = f"{flags}--pipeline-schedule {schedule} --microbatch-rng "
    assert_equal(found, train(4, static))


def test_ranks_that_share_a_group_follow_the_lowest_one() -> None:
    assert leaders([[0], [1]]) == [0, 1]
    # Tensor-parallel pairs, tied together by the experts of two of them.
    assert leaders([[0, 1], [0, 1], [2, 3], [3, 2, 5], [4, 5], [4, 5, 3]]) == [
        0,
        0,
        2,
        2,
        2,
        2,
    ]


DROPOUT = MOCK + "--eval-iters 1 --eval-interval 2 --train-iters 3 --num-layers 8 "
DROPOUT += "--global-batch-size 16 "


GROUPS = pytest.mark.parametrize(
    "group",
    [
        pytest.param(SHARDED, id="dp2-distributed-optimizer-overlaps"),
        pytest.param(TP2, id="tp2", marks=pytest.mark.slow),
        pytest.param(LLAMA + MOE + EP2, id="ep2", marks=pytest.mark.slow),
    ],
)


@pytest.mark.short_s(4)
@GROUPS
def test_gpt_with_dropout_under_delays(group: str) -> None:
    """Under Megatron's interleaved schedule the same masks are drawn, and gradients are clipped."""
    flags = DROPOUT + PP2 + VPP2.replace("1", "2") + group
    found = train(4, flags + "--use-dpp ", mean_delay_s=1e-3)
    assert found.orders == ["hint", "table"], "for training, and for evaluation"
    assert found.transports == ["NativeTransport"]
    assert_equal(found, stock(4, flags + "--microbatch-rng "))


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["", NO_DROPOUT], ids=["dropout", "no-dropout"])
@GROUPS
def test_twenty_steps_each_with_other_delays(group: str, dropout: str) -> None:
    flags = DROPOUT + "--train-iters 20 --eval-iters 0 " + PP2 + VPP2.replace("1", "2")
    flags += group + dropout
    found = train(4, flags + "--use-dpp ", mean_delay_s=1e-3)
    assert found.orders == ["hint"]
    assert len(found.losses) == 20
    assert_equal(found, stock(4, flags + "--microbatch-rng "))


def test_twins_that_read_data_for_each_other_agree(tmp_path: Path) -> None:
    """BERT's stages in the middle need the padding of the twin's micro-batches."""
    flags = (
        bert_flags(tmp_path)
        + "--clip-grad 0 --num-layers 8 --train-iters 2 --eval-iters 0 "
    )
    flags += "--split 100,0,0 "
    flags += "--hidden-dropout 0 --attention-dropout 0 "
    ours = f"{PP4}--enable-bitpipe-schedule --use-dpp --dpp-policy breadth-first "
    found = train(4, flags + ours, model="bert", mean_delay_s=1e-3)
    assert found.orders == ["breadth-first"]
    assert_equal(found, stock(4, flags + PP2, "bert"))
