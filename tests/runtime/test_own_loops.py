"""Programs with their own training loop: what they could get wrong is refused or said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.errors import MegatronExtError
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks

from . import toy

if TYPE_CHECKING:
    from megatron_ext.config.active import Active


def _message(chunks: list[toy.Stage], **keywords: Any) -> str:
    """Return the error of a step, or an empty string."""
    try:
        toy.step(chunks[0].config, chunks, **keywords)
    except (MegatronExtError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _configured(name: str, **facts: Any) -> Active:
    """Put a schedule in force as `configure` does."""
    pipeline = make_pipeline(name, dist.get_world_size(), toy.M)
    return use(pipeline, requested=pipeline.config, **facts)


# Settings of the objects that the model was built from.


def _changed_settings() -> list[str]:
    toy.start(1)
    messages = []
    # Built for Megatron's own schedule, and trained under ours.
    use(None)
    model = toy.chunks(toy.config(cuda_graph_impl="local"), [0])
    _configured("1f1b")
    messages.append(_message(model))
    # Changed after it was built under our schedule.
    model = toy.chunks(toy.config(), [0])
    model[0].config.cuda_graph_impl = "local"
    messages.append(_message(model))
    # Flags have been checked, and Megatron builds the objects from them.
    use(make_pipeline("1f1b", 1, toy.M))
    messages.append(_message(model))
    return messages


def test_settings_of_a_model_are_checked_in_its_first_step() -> None:
    [(switched, changed, by_flags)] = run_ranks(1, _changed_settings)
    rule = "ArgumentsError: schedule=1f1b cannot run with cuda_graph_impl"
    assert switched.startswith(rule)
    assert changed.startswith(rule)
    assert by_flags == ""


# What the forward step and the loss function return.


def _counted(dtype: torch.dtype, names: tuple[str | None, ...]) -> list[Any]:
    toy.start(2)
    results: list[Any] = []
    for name in names:
        if name is None:
            use(None)
        else:
            _configured(name)
        config = toy.config(calculate_per_token_loss=True)
        totals: list[torch.Tensor] = []

        def finalize(
            _: Any, total: torch.Tensor, into: list[Any] = totals, **__: Any
        ) -> None:
            into.append(total)

        config.finalize_model_grads_func = finalize

        def loss(output: torch.Tensor) -> Any:
            return output.sum(), torch.tensor(6, dtype=dtype), {}

        def forward_step(
            items: Any, stage: toy.Stage, loss_func: Callable[..., Any] = loss
        ) -> Any:
            output, _ = toy.forward_step(items, stage)
            return output, loss_func

        model = toy.chunks(config, [dist.get_rank()])
        message = _message(model, forward_step_func=forward_step)
        results.append((message, [(total.dtype, total.item()) for total in totals]))
    return results


def test_counts_of_tokens_have_one_type_on_all_ranks() -> None:
    """Ranks without the last stage count zeros of 32 bits, and would read others' bits as these."""
    expected = [[(torch.int32, 0)], [(torch.int32, 24)]]
    whole_numbers = run_ranks(2, _counted, torch.int64, (None, "1f1b"))
    for rank, results in enumerate(whole_numbers):
        assert results == [("", expected[rank])] * 2
    # Megatron's own schedule raises the same error, but leaves its peer waiting.
    [first], [last] = run_ranks(2, _counted, torch.float32, ("1f1b",))
    assert first == ("", expected[0])
    assert "can't be cast to the desired output type Int" in last[0]


def _wrong_type() -> str:
    toy.start(2)
    _configured("1f1b")
    config = toy.config(pipeline_dtype=torch.bfloat16)
    return _message(toy.chunks(config, [dist.get_rank()]))


def test_outputs_of_another_type_than_stages_exchange_are_refused() -> None:
    first, _ = run_ranks(2, _wrong_type)
    assert (
        "output of torch.float32, but the model's configuration has pipeline_dtype"
        in first
    )


# The data that the forward step reads.


def _reads_once_in_two(calls: list[int]) -> Callable[..., Any]:
    def forward_step(items: Iterator[Any], stage: toy.Stage) -> Any:
        calls.append(1)
        item = next(items) if len(calls) % 2 else next(toy.samples(1))
        return stage(item), toy._loss

    return forward_step


def _too_rarely_read() -> str:
    toy.start(1)
    _configured("1f1b")
    model = toy.chunks(toy.config(), [0])
    return _message(model, forward_step_func=_reads_once_in_two([]))


def test_data_that_no_micro_batch_takes_are_refused() -> None:
    [message] = run_ranks(1, _too_rarely_read)
    assert message.startswith(
        "ScheduleError: the forward step did not call next() for micro-batches 1, whose data would "
        "be lost"
    )


# Random numbers by micro-batch.


def _drawn(seeds: tuple[int, int], iterations: tuple[int, int]) -> str:
    toy.start(2)
    _configured("1f1b", seed=seeds[dist.get_rank()])
    megatron_ext.begin_iteration(iterations[dist.get_rank()])
    model = toy.chunks(toy.config(), [dist.get_rank()])
    return _message(model)


@pytest.mark.parametrize(
    ("seeds", "iterations", "message"),
    [
        ((1, 1), (3, 3), ""),
        ((1, 2), (3, 3), "the seed on rank {} differs from the seeds on ranks {}"),
        (
            (1, 1),
            (3, 4),
            "on rank {} differs from the numbers on ranks {}; pass the same number",
        ),
    ],
)
def test_ranks_draw_from_the_same_seed_and_iteration(
    seeds: tuple[int, int], iterations: tuple[int, int], message: str
) -> None:
    for rank, line in enumerate(run_ranks(2, _drawn, seeds, iterations)):
        assert message.format(rank, 1 - rank) in line
        assert bool(message) == bool(line)


def _repeated(iterations: tuple[int, ...]) -> list[str]:
    toy.start(1)
    in_force = _configured("1f1b", seed=1)
    model = toy.chunks(toy.config(), [0])
    for iteration in iterations:
        megatron_ext.begin_iteration(iteration)
        assert not _message(model)
    return in_force.departures


def test_steps_that_draw_the_same_numbers_are_reported_once() -> None:
    [(line,)] = run_ranks(1, _repeated, (0, 0, 0))
    assert line.startswith("two training steps of a model ran as iteration 0, so both")
    assert run_ranks(1, _repeated, (0, 1, 2)) == [[]]


# Several models under one configuration.


def _two_models() -> list[list[int]]:
    from megatron_ext.runtime import folded

    toy.start(2)
    _configured("zb-v")
    stages = [(0, 3), (1, 2)][dist.get_rank()]
    config = toy.config()
    models = [toy.chunks(config, list(stages)) for _ in range(2)]
    checked: list[int] = []

    def recorded(chunks: list[Any]) -> None:
        for number, model in enumerate(models):
            if chunks[0] is model[0]:
                checked.append(number)

    folded.differing_copies = recorded
    counts = []
    for number, forward_only in (
        (0, False),
        (0, False),
        (0, False),
        (1, True),
        (1, False),
    ):
        # Programs may pass a tuple as well as a list.
        chunks: Any = tuple(models[number])
        assert not _message(models[number], model=chunks, forward_only=forward_only)
        counts.append(len(checked))
    return [counts, checked]


def test_copies_of_tied_embeddings_are_checked_for_each_model() -> None:
    """In an evaluation that comes first, and in the first two training steps."""
    for counts, checked in run_ranks(2, _two_models):
        assert counts == [1, 2, 2, 3, 4]
        assert checked == [0, 0, 1, 1]
