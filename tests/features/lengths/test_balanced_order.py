"""Micro-batches in the order of their costs: the bits of one process that sums in that order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config.pipeline_config import (
    Disaggregation,
    DynamicOrder,
    PipelineConfig,
)
from megatron_ext.errors import ConfigurationError, ScheduleError
from megatron_ext.features.lengths.balanced_step import BalancedStep, item_cost
from megatron_ext.features.lengths.length_balance import best_order
from megatron_ext.runtime.lengths import cost_of_model
from megatron_ext.schedules import generate
from megatron_ext.schedules.table.length_cost import LengthCost
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

LENGTHS = (40, 3, 25, 3, 40, 7, 12, 31)
M = len(LENGTHS)
Item = dict[str, torch.Tensor]


def _items() -> Iterator[Item]:
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn((length, 1, toy.WIDTH), generator=generator)
        yield {"hidden": hidden, "tokens": torch.zeros(1, length, dtype=torch.long)}


def _forward_step(
    data: Iterator[Item], model: toy.Stage
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Take data on the first stage and on the last, as GPT does."""
    item = next(data) if data is not None else {}
    output = model(item.get("hidden"))

    def loss(output: torch.Tensor) -> Any:
        assert len(output) == item["tokens"].shape[-1], (
            "the labels of another micro-batch"
        )
        found = output.square().sum()
        return found, {"loss": found.item()}

    return output, loss


def _train(schedule: str, pp: int, options: dict[str, Any]) -> Any:
    """Return stages, gradients and reports of one step on this rank, and what was fetched."""
    pipeline = make_pipeline(schedule, pp, M, **options)
    placement = pipeline.placement
    num_chunks = placement.num_stages // pp
    toy.start(pp, num_chunks if num_chunks > 1 else None)
    use(pipeline)
    stages = list(placement.stages_of[dist.get_rank()])
    config = toy.config(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    model = toy.chunks(config, stages)
    ends = (0, placement.num_stages - 1)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[_items() if stage in ends else None for stage in stages],
        model=model,
        num_microbatches=M,
        seq_length=max(LENGTHS),
        micro_batch_size=1,
    )
    gradients = {chunk.number: chunk.weight.grad for chunk in model}
    return gradients, [report["loss"] for report in reports]


def _one_process(
    num_stages: int, order: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[float]]:
    """Sum the gradients of the same micro-batches in an order, without a pipeline."""
    model = [toy.Stage(None, stage, None) for stage in range(num_stages)]
    items = list(_items())
    losses = {}
    for number in order:
        x = items[number]["hidden"]
        for stage in model:
            x = stage(x)
        loss = x.square().sum()
        (loss / M).backward()
        losses[number] = loss.item()
    return [stage.weight.grad for stage in model], [losses[i] for i in range(M)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schedule", "pp", "options"),
    [
        pytest.param("1f1b", 2, {}, id="1f1b"),
        pytest.param("1f1b", 4, {"transport": "shm"}, id="1f1b-shm"),
        pytest.param("interleaved", 2, {"chunks": 2}, id="interleaved"),
        pytest.param("zb-v", 2, {}, id="zb-v"),
        pytest.param(
            "interleaved",
            2,
            {"chunks": 2, "dynamic": DynamicOrder()},
            id="interleaved-dynamic",
        ),
    ],
)
def test_gradients_are_the_sum_in_that_order(
    schedule: str, pp: int, options: dict[str, Any]
) -> None:
    pipeline = make_pipeline(schedule, pp, M, balance="order", **options)
    cost = cost_of_model(toy_config())
    order = best_order(pipeline.full, [cost.of_length(length) for length in LENGTHS])
    assert order != tuple(range(M)), "no test if the file's order is best"
    gradients, losses = _one_process(pipeline.placement.num_stages, order)
    in_file_order, _ = _one_process(pipeline.placement.num_stages, tuple(range(M)))
    by_rank = run_ranks(pp, _train, schedule, pp, {"balance": "order", **options})
    found = {stage: grad for grads, _ in by_rank for stage, grad in grads.items()}
    for stage, expected in enumerate(gradients):
        assert torch.equal(found[stage], expected), stage
    assert any(
        not torch.equal(a, b) for a, b in zip(gradients, in_file_order, strict=True)
    )
    reported = [reports for _, reports in by_rank if reports]
    assert reported == [losses], "in the order of the file"


def _reports_of_two_tensor_parallel_ranks() -> dict[int, str]:
    """Report on the last stage, where only the first rank reads data."""
    dist.init_process_group("gloo")
    step = _step()
    if dist.get_rank() == 0:
        taken = step.iterator(
            iter([{"tokens": torch.zeros(1, n)} for n in (9, 2, 1, 8)])
        )
        assert taken is not None
        list(taken)
        assert step.order == (2, 0, 3, 1), "small ones at both ends"
    chunks = [torch.nn.Linear(1, 1)]
    world = dist.group.WORLD
    assert world is not None
    assert step.in_file_order({}, world, chunks) == {}  # another stage: nobody waits
    return step.in_file_order({0: "2", 1: "0", 2: "3", 3: "1"}, world, chunks)


def test_tensor_parallel_ranks_without_data_report_in_the_order_of_the_file() -> None:
    expected = {number: str(number) for number in range(4)}
    assert run_ranks(2, _reports_of_two_tensor_parallel_ranks) == [expected, expected]


def toy_config() -> Any:
    """Return what `cost_of_model` reads of the toy's configuration."""
    return toy.config(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")


def _step(m: int = 4) -> BalancedStep:
    schedule = generate("1f1b", 2, m)
    return BalancedStep(
        schedule, make_pipeline("1f1b", 2, m).costs, LengthCost(1.0, 0.1)
    )


def test_equal_lengths_keep_the_order_of_the_file() -> None:
    step = _step()
    items = [{"tokens": torch.full((2, 8), number)} for number in range(4)]
    taken = step.iterator(iter(items))
    assert taken is not None
    assert list(taken) == items
    assert step.order == (0, 1, 2, 3)


def test_empty_microbatches_are_ordered_too() -> None:
    step = _step()
    taken = step.iterator(iter([{"tokens": torch.zeros(1, n)} for n in (5, 0, 0, 5)]))
    assert taken is not None
    assert [item["tokens"].shape[-1] for item in taken] == [0, 5, 5, 0]


def test_nothing_is_fetched_beyond_the_step() -> None:
    step, items = (
        _step(),
        iter([{"tokens": torch.zeros(1, n)} for n in (9, 1, 9, 1, 5, 5)]),
    )
    taken = step.iterator(items)
    assert taken is not None
    assert len(list(taken)) == 4
    assert len(list(items)) == 2


class _Reader:
    """An iterator as Megatron's `RerunDataIterator`, which has no `__iter__`."""

    def __init__(self, items: list[Item]) -> None:
        self._items = iter(items)

    def __next__(self) -> Item:
        return next(self._items)


def test_megatrons_own_iterator_is_read() -> None:
    taken = _step().iterator(
        _Reader([{"tokens": torch.zeros(1, n)} for n in (9, 2, 1, 8)])
    )
    assert taken is not None
    assert [item["tokens"].shape[-1] for item in taken] == [1, 9, 8, 2]


def test_chunks_without_data_stay_so() -> None:
    assert _step().iterator(None) is None


def test_the_cost_of_a_packed_microbatch_is_that_of_its_samples() -> None:
    cost = LengthCost(1.0, 0.5)
    packed = {"tokens": torch.zeros(1, 10), "cu_seqlens": torch.tensor([[0, 4, 10]])}
    assert item_cost(packed, cost) == 10 + 0.5 * (16 + 36)
    assert item_cost({"cu_seqlens": torch.tensor([0, 4, 10])}, cost) == 10 + 0.5 * (
        16 + 36
    )
    padded = {
        "tokens": torch.zeros(2, 10),
        "cu_seqlens": torch.tensor([[0, 4, 10], [0, 10, 10]]),
    }
    assert item_cost(padded, cost) == 20 + 0.5 * (16 + 36 + 100)
    assert item_cost({"tokens": torch.zeros(3, 10)}, cost) == 3 * (10 + 0.5 * 100)
    assert item_cost({"tokens": torch.zeros(3, 0)}, cost) == 0


def test_the_cost_of_a_model_counts_the_experts_of_a_token() -> None:
    from megatron.core.transformer import TransformerConfig

    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
    }
    assert cost_of_model(TransformerConfig(**sizes)) == LengthCost.of_model(8, 32)
    moe = TransformerConfig(
        **sizes, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16,
        num_query_groups=1, gated_linear_unit=True, add_bias_linear=False,
    )  # fmt: skip
    assert cost_of_model(moe) == LengthCost.of_model(
        8, 32, gated=True, query_width=8, key_width=4
    )


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            iter([{"text": 1}] * 4),
            "tokens or cu_seqlens .* yields text; remove --pipeline-bal",
        ),
        (iter([1] * 4), "yields a int; remove --pipeline-balance"),
        (iter([]), "the data ended after 0 of 4 micro-batches of a step"),
    ],
)
def test_data_without_lengths_is_refused(items: Iterator[Any], said: str) -> None:
    taken = _step().iterator(items)
    assert taken is not None
    with pytest.raises(ScheduleError, match=said):
        next(taken)


def test_data_that_cannot_be_read_ahead_is_refused() -> None:
    with pytest.raises(ScheduleError, match="a SimpleNamespace does not allow; remove"):
        _step().iterator(SimpleNamespace())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            r"balance=order requires one of this package's schedules; add schedule=NAME",
        ),
        (
            {"disaggregation": Disaggregation()},
            "disaggregation cannot run with balance=order",
        ),
        (
            {"schedule": "1f1b", "balance": "best"},
            "balance 'best' must be one of off, order, pack",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PipelineConfig(**{"balance": "order", **settings})
