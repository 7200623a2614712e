"""Steps cut into slices by length: what ranks agree on, and that it is the same training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_slices import (
    equal_cost_bounds,
    rising,
    slices_needed,
)
from megatron_ext.features.lengths.sliced_step import LengthSlicer
from megatron_ext.runtime.lengths import (
    cost_of_model,
    packed_bounds_in,
    sample_lengths,
)
from megatron_ext.schedules.table.length_cost import LengthCost
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

# One token, T and T + 1, primes, and most tokens of the step in one sample.
LENGTHS = (1, 8, 61, 9, 13, 2)
SLICE_TOKENS = 8
M = len(LENGTHS)
Item = dict[str, torch.Tensor]


def _items(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Item]:
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        yield {"tokens": torch.randint(1, 9, (1, length), generator=generator)}


def _packed(*samples_by_microbatch: tuple[int, ...]) -> Iterator[Item]:
    """Yield micro-batches with these samples."""
    for samples in samples_by_microbatch:
        bounds = torch.tensor([list(accumulate(samples, initial=0))])
        yield {"tokens": torch.zeros(1, sum(samples)), "cu_seqlens": bounds}


def _forward_step(
    data: Iterator[Item] | None, model: toy.Stage
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Take data on the first stage and on the last, as GPT does."""
    item = next(data) if data is not None else {}
    hidden = None
    if "tokens" in item:
        hidden = item["tokens"].T[:, :, None].expand(-1, -1, toy.WIDTH) / 8
    output = model(hidden)

    def loss(output: torch.Tensor) -> Any:
        assert len(output) == item["tokens"].shape[-1], "the tokens of another slice"
        total, count = (
            output.square().sum(),
            torch.tensor(output.shape[0], dtype=torch.int),
        )
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def _train(schedule: str, pp: int, options: dict[str, Any]) -> Any:
    """Return gradients by stage, reports, and the row of one step on this rank."""
    pipeline = make_pipeline(schedule, pp, M, slice_tokens=SLICE_TOKENS, **options)
    placement = pipeline.placement
    num_chunks = placement.num_stages // pp
    toy.start(pp, num_chunks if num_chunks > 1 else None)
    configuration = use(pipeline)
    stages = list(placement.stages_of[dist.get_rank()])
    model = toy.chunks(toy.config(**toy.VARYING), stages)
    for chunk in model:
        chunk.runs_in_slices = True
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
    runtimes: Any = configuration.runtimes
    [runtime] = runtimes
    assert runtime.measured.tables_s > 0
    assert gc.isenabled(), "tables are made without garbage collection"
    gradients = {chunk.number: chunk.weight.grad for chunk in model}
    return (
        gradients,
        [report["loss"].tolist() for report in reports],
        runtime.measured.peak_live,
    )


def _one_process(num_stages: int) -> tuple[list[torch.Tensor], list[list[float]]]:
    """Sum the gradients of whole micro-batches, without a pipeline."""
    model = [toy.Stage(None, stage, None) for stage in range(num_stages)]
    reports = []
    for item in _items():
        x = item["tokens"].T[:, :, None].expand(-1, -1, toy.WIDTH) / 8
        for stage in model:
            x = stage(x)
        loss = x.square().sum()
        (loss / len(x) / M).backward()
        reports.append([loss.item(), float(len(x))])
    return [stage.weight.grad for stage in model], reports  # type: ignore[misc]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param("zb-h1", {"balance": "order", "transport": "shm"}, id="zb-h1"),
        pytest.param("zb-v", {"balance": "order"}, id="zb-v", marks=pytest.mark.slow),
        pytest.param(
            "1f1b", {"dynamic": DynamicOrder()}, id="dynamic", marks=pytest.mark.slow
        ),
    ],
)
def test_a_step_by_length_trains_the_same(
    schedule: str, options: dict[str, Any]
) -> None:
    by_rank = run_ranks(2, _train, schedule, 2, options)
    gradients, reports = _one_process(
        sum(len(gradients) for gradients, _, _ in by_rank)
    )
    found = {stage: grad for grads, _, _ in by_rank for stage, grad in grads.items()}
    for stage, expected in enumerate(gradients):
        assert torch.allclose(found[stage], expected, rtol=1e-5, atol=1e-7), stage
    [reported] = [reports for _, reports, _ in by_rank if reports]
    for ours, expected in zip(reported, reports, strict=True):
        assert ours == pytest.approx(expected, rel=1e-6), "in the order of the file"
    # The longest micro-batch and one slice, which is at most a quarter longer than the mean one.
    share = 2 / len(gradients)
    assert share * max(peak for _, _, peak in by_rank) <= 1 + 1.25 / 8


COST = LengthCost(1.0, 0.01)
MAX_POSITIONS = 600


def _slicer(replicas: Any, pipeline_group: Any, **settings: Any) -> LengthSlicer:
    single = SimpleNamespace(size=lambda: 1)
    chunk = torch.nn.Linear(1, 1)
    chunk.max_sequence_length = MAX_POSITIONS  # type: ignore[assignment]
    model: Any = SimpleNamespace(
        pipeline=make_pipeline(
            "1f1b", 2, 3, **{"slice_tokens": SLICE_TOKENS, **settings}
        ),
        groups=SimpleNamespace(
            tp=single, pp=pipeline_group or single, dp=replicas or single
        ),
        chunks=[chunk],
        config=SimpleNamespace(sequence_parallel=False, variable_seq_lengths=False),
    )
    return LengthSlicer(model, COST, None)


def _agree() -> Any:
    """Return what two replicas, and then two stages, make of their lengths."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    lengths = [(40, 3, 9), (1, 16, 5)][rank]
    by_replica = _slicer(world, None, balance="order").step([_items(lengths)], 3)
    # The second stage reads no data.
    chunks = [_items((40, 3, 9)) if rank == 0 else None for _ in range(2)]
    assert len(_slicer(None, world).step(chunks, 3).iterators) == 2, (
        "one for each chunk"
    )
    data = [_items((40, 3, 9)) if rank == 0 else None]
    by_stage = _slicer(None, world).step(data, 3)
    failures = []
    slicer = _slicer(None, world)
    # Too many slices; data that ends; no data at all; lengths that only the second rank finds to
    # differ; a sample with more tokens than the model has positions.
    for by_rank in (
        [(513, 1, 1), None],
        [(1, 1), None],
        [None, None],
        [(40, 3, 9), (1, 3, 9)],
        [(1, 1, MAX_POSITIONS + 1), None],
    ):
        lengths = by_rank[rank]
        try:
            slicer.step([_items(lengths) if lengths else None], 3)
        except ScheduleError as error:
            failures.append(str(error))
    taken = [[len(item["tokens"][0]) for item in i] for i in by_replica.iterators if i]
    return by_replica, taken[0], by_stage, failures


def test_ranks_agree_on_slices() -> None:
    (first, lengths, stage_0, failed), (second, others, stage_1, also_failed) = (
        run_ranks(2, _agree)
    )
    assert lengths == [3, 9, 40]
    assert first.order == (1, 2, 0)
    assert others == [1, 5, 16]
    # The first replica needs 1, 2 and 5 slices, the second one 1, 1 and 2.
    assert list(map(len, first.slice_tokens)) == [1, 2, 5]
    assert first.slice_tokens == second.slice_tokens
    assert list(map(len, second.slice_bounds)) == [2, 3, 6]
    assert second.slice_bounds[2] == equal_cost_bounds([16], 5, COST)
    widths = zip(first.slice_bounds[2][1:], first.slice_bounds[2], strict=False)
    assert first.slice_tokens[2] == tuple(end - begin for end, begin in widths)
    assert stage_0.slice_bounds == stage_1.slice_bounds
    assert stage_0.order == stage_1.order == (0, 1, 2)
    assert [
        iterator is None for iterator in (*stage_0.iterators, *stage_1.iterators)
    ] == [
        False,
        True,
    ]
    assert "use --pipeline-slice-tokens 9 or more" in failed[0]
    assert "the data ended after 2 of 3" in failed[1]
    assert "see that rank's error" in also_failed[0]
    assert failed[2] == also_failed[2]
    assert "no rank has a data iterator" in failed[2]
    assert "different lengths; pass the same data" in failed[3]
    assert failed[3] == also_failed[3]
    assert f"the model has {MAX_POSITIONS} positions" in failed[4]


def _agree_on_packed() -> Any:
    """Return what two stages make of packed samples, which only the first one reads."""
    dist.init_process_group("gloo")
    rank, slicer = dist.get_rank(), _slicer(None, dist.group.WORLD)
    data = [_packed((4, 5, 0), (20,), (1, 1)) if rank == 0 else None]
    step = slicer.step(data, 3)
    unpacked = slicer.step([_items((3, 4)) if rank == 0 else None], 2)
    # The same lengths of micro-batches, but other samples.
    other_samples = ((4, 5), (20,)) if rank == 0 else ((5, 4), (20,))
    with pytest.raises(ScheduleError, match="different lengths"):
        slicer.step([_packed(*other_samples)], 2)
    return step.packed_bounds, unpacked.packed_bounds


def test_ranks_without_data_learn_the_bounds_of_packed_samples() -> None:
    """Reading them from the device in the middle of a step would wait for it."""
    for packed_bounds, unpacked_bounds in run_ranks(2, _agree_on_packed):
        assert packed_bounds == ((0, 4, 9, 9), (0, 20), (0, 1, 2))
        assert unpacked_bounds == ()


def _choose() -> Any:
    """Return the slices of steps whose number of tokens two replicas choose together."""
    dist.init_process_group("gloo")
    by_rank = [(64, 1), (3, 9)], [(64,) * 64, (1,) * 64], [(0, 0), (0, 0)]
    slicer = _slicer(dist.group.WORLD, None, slice_tokens="auto")
    counts = []
    for lengths in by_rank:
        own_lengths = lengths[dist.get_rank()]
        step = slicer.step([_items(own_lengths)], len(own_lengths))
        counts.append(list(map(len, step.slice_tokens)))
    return counts


def test_auto_follows_from_the_lengths_of_the_step() -> None:
    """Two slices for each of two ranks in the longest one, and not many more than 64 in a step."""
    for counts in run_ranks(2, _choose):
        assert counts == [[4, 1], [1] * 64, [1, 1]]


def test_padded_samples_have_no_bounds() -> None:
    """The forward step decides which of the two it gives the model."""
    bounds, padded = torch.tensor([[0, 3, 9]]), torch.tensor([[0, 4, 9]])
    assert packed_bounds_in({"cu_seqlens": bounds}) == (0, 3, 9)
    assert packed_bounds_in({"cu_seqlens_padded": padded}) == (0, 4, 9)
    both = {"cu_seqlens": bounds, "cu_seqlens_padded": bounds.clone()}
    assert packed_bounds_in(both) == (0, 3, 9)
    assert packed_bounds_in({"cu_seqlens": bounds, "cu_seqlens_padded": padded}) == ()
    assert packed_bounds_in({"tokens": bounds}) == ()


def test_lengths_of_samples() -> None:
    tokens = torch.zeros(2, 10)
    assert sample_lengths({"tokens": tokens}) == [10]
    packed = {"tokens": tokens[:1], "cu_seqlens": torch.tensor([[0, 4, 9]])}
    assert sample_lengths(packed) == [4, 5, 1]
    assert sample_lengths({"cu_seqlens": torch.tensor([0, 4, 9])}) == [4, 5]
    assert cost_of_model(toy.config()).attention_share(1) < 0.5
    order = rising([COST.of_length(length) for length in LENGTHS])
    assert [LENGTHS[number] for number in order] == sorted(LENGTHS)
    assert sum(slices_needed(length, SLICE_TOKENS) for length in LENGTHS) == 15
    assert all(
        end > begin
        for length in LENGTHS
        for begin, end in pairwise(
            equal_cost_bounds([length], slices_needed(length, SLICE_TOKENS), COST)
        )
    )
