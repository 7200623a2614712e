"""Megatron's packing scheduler (0.20) deals out samples; ours orders the packs that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ConfigurationError
from megatron_ext.features.lengths.length_balance import best_order
from megatron_ext.runtime.lengths import cost_of_model
from megatron_ext.upstream import releases
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

pytestmark = pytest.mark.skipif(
    (releases.installed_release() or (0, 0)) < (0, 20),
    reason="0.20 has the packing scheduler",
)

LENGTHS = (7, 40, 3, 25, 36, 3, 38, 2, 7, 12, 31, 1, 40, 9, 5, 30)
"""Of samples; each is padded to a multiple of four."""
PADDED = [4 * -(-length // 4) for length in LENGTHS]
LONGEST = 40
"""A pack has as many tokens at most."""
Batch = tuple[Any, ...]


def _samples() -> Iterator[dict[str, torch.Tensor]]:
    """Yield the samples of a step, as a data set whose samples are not packed."""
    for number, (length, padded) in enumerate(zip(LENGTHS, PADDED, strict=True)):
        positions = torch.arange(padded)
        is_padding = positions >= length  # Megatron zeroes it too
        yield {
            "tokens": (positions + number).masked_fill(is_padding, 0),
            "labels": (positions * number).masked_fill(is_padding, 0),
            "loss_mask": torch.ones(padded),
            "position_ids": positions,
            "original_seq_len": torch.tensor([length]),
            "padded_seq_len": torch.tensor([padded]),
        }


def _hidden(tokens: torch.Tensor) -> torch.Tensor:
    """Return an embedding, `[s, 1, h]`, of tokens `[1, s]`."""
    return torch.sin(tokens.t()[..., None] * torch.arange(1.0, 1 + toy.WIDTH))


def _train(schedule: str, pp: int, options: dict[str, Any]) -> Any:
    """Pack and run a step; return the packs that this rank's chunks read, gradients and reports."""
    from megatron.core.datasets.data_schedule import (
        get_batch_on_this_rank_for_sequence_packing,
        wrap_data_iterator,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    pipeline = make_pipeline(schedule, pp, 8, **options)
    num_chunks = pipeline.placement.num_stages // pp
    toy.start(pp, num_chunks if num_chunks > 1 else None)
    use(pipeline)
    config = toy.config(
        **toy.VARYING,
        max_seqlen_per_dp_cp_rank=LONGEST,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        microbatch_group_size_per_vp_stage=pp,
    )
    config.sequence_packing_scheduler = "dp_balanced"
    read: list[list[int]] = []

    def forward_step(
        data: Any, model: toy.Stage
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch: Batch = get_batch_on_this_rank_for_sequence_packing(
            data, vpp_size=num_chunks, vp_stage=model.vp_stage
        )
        tokens, labels, _, _, _, packed, _ = batch
        read.append(packed.cu_seqlens_q.tolist())
        output = model(None if tokens is None else _hidden(tokens))
        assert len(output) == packed.cu_seqlens_q[-1], (
            "the bounds of another micro-batch"
        )

        def loss(output: torch.Tensor) -> Any:
            found = (output.sum(dim=-1).t() * labels).square().sum() / 1e6
            return found, {"loss": found.item()}

        return output, loss

    rank = dist.get_rank()
    # Megatron builds data sets on the first and the last rank.
    samples: Any = _samples() if rank in (0, pp - 1) else None
    data, num_microbatches, *_ = wrap_data_iterator(
        samples if num_chunks == 1 else [samples] * num_chunks, config, len(LENGTHS)
    )
    model = toy.chunks(config, list(pipeline.placement.stages_of[rank]))
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=LONGEST,
        micro_batch_size=1,
    )
    gradients = {chunk.number: chunk.weight.grad for chunk in model}
    return read, gradients, [report["loss"] for report in reports]


def _packs(number: int) -> list[list[int]]:
    """Return the samples of each micro-batch, as the scheduler packs them for one replica."""
    from megatron.core.datasets.data_schedule import DpBalancedScheduler

    scheduler = DpBalancedScheduler(LONGEST, 1, 1, number)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(PADDED)))
    return [group for [group] in groups]


def _one_process(
    num_stages: int, packs: list[list[int]]
) -> tuple[list[Any], list[float]]:
    """Sum the gradients of packs in their order, without a pipeline."""
    model = [toy.Stage(None, stage, None) for stage in range(num_stages)]
    samples = list(_samples())
    losses = []
    for pack in packs:
        x = _hidden(torch.cat([samples[number]["tokens"] for number in pack])[None])
        for stage in model:
            x = stage(x)
        labels = torch.cat([samples[number]["labels"] for number in pack])[None]
        loss = (x.sum(dim=-1).t() * labels).square().sum() / 1e6
        (loss / len(packs)).backward()
        losses.append(loss.item())
    return [stage.weight.grad for stage in model], losses


@pytest.mark.parametrize(
    ("schedule", "pp", "options"),
    [
        pytest.param("1f1b", 4, {"transport": "shm"}, id="1f1b"),
        pytest.param("interleaved", 2, {"chunks": 2}, id="interleaved"),
        pytest.param(
            "interleaved", 2, {"chunks": 2, "dynamic": DynamicOrder()}, id="dynamic"
        ),
    ],
)
def test_packs_run_in_the_order_of_their_costs(
    schedule: str, pp: int, options: dict[str, Any]
) -> None:
    """Every stage takes the same pack at the same time, those that see only its bounds too."""
    pipeline = make_pipeline(schedule, pp, 8, balance="order", **options)
    packs = _packs(pp if "chunks" in options else 1)
    cost = cost_of_model(toy.config(**toy.VARYING))
    costs = [sum(cost.of_length(PADDED[number]) for number in pack) for pack in packs]
    order = best_order(pipeline.schedule(len(packs)), costs)
    assert order != tuple(range(len(packs))), "no test if the file's order is best"
    unpadded = [
        sum(cost.of_length(LENGTHS[number]) for number in pack) for pack in packs
    ]
    assert order != best_order(pipeline.schedule(len(packs)), unpadded), (
        "padding has to matter"
    )
    expected, losses = _one_process(
        pipeline.placement.num_stages, [packs[i] for i in order]
    )

    by_rank = run_ranks(pp, _train, schedule, pp, {"balance": "order", **options})
    found = {stage: grad for _, grads, _ in by_rank for stage, grad in grads.items()}
    for stage, gradient in enumerate(expected):
        assert torch.equal(found[stage], gradient), stage
    in_file_order = [losses[order.index(number)] for number in range(len(packs))]
    assert [reports for _, _, reports in by_rank if reports] == [in_file_order]


@pytest.mark.parametrize(
    ("schedule", "options", "reason"),
    [
        (
            "zb-v",
            {"balance": "order"},
            "does not place its last stage.*use 1f1b, gpipe, zb-h1 or",
        ),
        ("bitpipe", {}, "does not place its last stage"),
        ("1f1b", {"balance": "pack"}, "already distributed; use balance=order"),
    ],
)
def test_what_would_be_misplaced_is_refused(
    schedule: str, options: dict[str, Any], reason: str
) -> None:
    from megatron.core.datasets import data_schedule

    use(make_pipeline(schedule, 4, 8, **options))
    try:
        with pytest.raises(ConfigurationError, match=reason):
            data_schedule.wrap_data_iterator(None, None, 8)
        with pytest.raises(ConfigurationError, match=reason):
            data_schedule.get_batch_on_this_rank_for_sequence_packing(None)
    finally:
        use(None)
