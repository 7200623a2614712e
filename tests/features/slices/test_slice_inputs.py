"""A forward step that computes from a slice what depends on the micro-batch is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import RanksFailed, run_ranks

SEQUENCE = 16
ROWS = 2
NUM_MICROBATCHES = 4
Step = Callable[..., Any]


def item(number: int, length: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(64, (ROWS, length + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(ROWS, length),
        "position_ids": torch.arange(length).repeat(ROWS, 1),
    }


def changed_step(change: Callable[[dict[str, Any]], None]) -> Step:
    """Return a forward step that changes each of its items."""
    import torch

    def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        given = next(data)
        change(given)
        output = model(
            given["tokens"],
            given["position_ids"],
            given.get("attention_mask"),
            labels=given["labels"],
            loss_mask=given.get("loss_mask"),
        )

        mask = given.get("loss_mask")

        def loss(losses: Any) -> tuple[Any, Any, Any]:
            total, count = (losses * mask).sum(), mask.sum().int()
            if "averages" in given:
                total, count = total / count, torch.ones_like(count)
            report = torch.stack([total.detach(), count.float()])
            return total, count, {"loss": report}

        return output, loss

    return forward_step


def leave(_given: dict[str, Any]) -> None:
    """Change nothing."""


def count_positions(given: dict[str, Any]) -> None:
    import torch

    length = given["tokens"].shape[1]
    given["position_ids"] = torch.arange(length)[None].expand(ROWS, -1)


def count_positions_in_place(given: dict[str, Any]) -> None:
    import torch

    given["position_ids"].copy_(torch.arange(given["tokens"].shape[1]))


def shift_labels(given: dict[str, Any]) -> None:
    given["labels"] = given["tokens"].roll(-1, 1)


def shift_tokens(given: dict[str, Any]) -> None:
    given["tokens"] = given["tokens"].roll(1, 1)
    given["tokens"][:, 0] = 0


def cut_labels(given: dict[str, Any]) -> None:
    given["labels"] = given["labels"][:, :-1]


def mask_loss(given: dict[str, Any]) -> None:
    given["loss_mask"] = given["loss_mask"].clone()
    given["loss_mask"][:, -1] = 0


def make_attention_mask(given: dict[str, Any]) -> None:
    import torch

    length = given["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    given["attention_mask"] = mask.triu(1)


def average(given: dict[str, Any]) -> None:
    given["averages"] = True


def convert(given: dict[str, Any]) -> None:
    """Convert types, and pass one row of positions for all samples."""
    import torch

    given["position_ids"] = given["position_ids"][:1].to(torch.int32)


def mask_labels(given: dict[str, Any]) -> None:
    given["labels"] = given["labels"].masked_fill(given["labels"] < 8, 0)


def use_targets(given: dict[str, Any]) -> None:
    given["labels"] = given["targets"]


def train(
    change: Callable[[dict[str, Any]], None],
    positions: str = "learned_absolute",
    lengths: tuple[int, ...] = (SEQUENCE,),
    declared: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    extra: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
) -> tuple[list[float], list[int]]:
    """Return the losses of the last step, and how many inputs each step compared.

    `lengths` are the numbers of tokens in the samples of each step.
    """
    import torch
    from megatron.core import parallel_state, pipeline_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    import megatron_ext
    from megatron_ext.features.slices import sliced_compute

    build = megatron_ext.configure(
        megatron_ext.PipelineConfig(
            schedule="zb-h1", device="cpu", **(pipeline or {"slices": 2})
        ),
        pipeline_ranks=2,
        num_microbatches=NUM_MICROBATCHES,
        num_layers=2,
        seed=1,
    )
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**build.groups)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **build.transformer,
        **(settings or {}),
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    chunks = []
    for chunk in build.chunks(parallel_state.get_pipeline_model_parallel_rank()):
        mtp = None
        if config.mtp_num_layers and chunk["post_process"]:
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=False
            )
        model = GPTModel(
            config,
            spec,
            64,
            SEQUENCE,
            position_embedding_type=positions,
            mtp_block_spec=mtp,
            **chunk,
        )
        chunks.append(
            DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        )
    compared = [0] * len(lengths)
    check = sliced_compute.check_inputs
    losses: list[float] = []

    def items(length: int) -> Iterator[dict[str, Any]]:
        for number in range(NUM_MICROBATCHES):
            given = item(number, length)
            for name in extra:
                given[name] = given["tokens"] + 0
            for name in left_out:
                del given[name]
            yield given

    for step, length in enumerate(lengths):

        def counted(*args: Any, step: int = step, **kwargs: Any) -> None:
            compared[step] += 1
            check(*args, **kwargs)

        sliced_compute.check_inputs = counted
        forward_step = changed_step(change)
        for name, value in (declared or {}).items():
            setattr(forward_step, name, value)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reports = pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[items(length) for _ in chunks],
            model=chunks,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=length,
            micro_batch_size=ROWS,
        )
        losses = [(r["loss"][0] / r["loss"][1]).item() for r in reports]
    return losses, compared


def losses_of(results: list[tuple[list[float], list[int]]]) -> list[float]:
    [losses] = [losses for losses, _ in results if losses]
    return losses


MTP: dict[str, Any] = {"settings": {"mtp_num_layers": 1}, "positions": "rope"}
DECLARED: dict[str, Any] = {"declared": {"runs_in_slices": True}}


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (
            count_positions,
            {},
            (
                r"slice 1 of micro-batch 0: .* position_ids .* are 0 at token (\d+), .* are \1; .* "
                r"take position_ids from .* set forward_step.runs_in_slices = True"
            ),
        ),
        (count_positions_in_place, {}, "passes position_ids to the model that are 0 "),
        (shift_labels, {}, "slice 0 .* passes labels .* take labels from the data"),
        (shift_tokens, {}, "passes input_ids .* the data's tokens are"),
        (
            cut_labels,
            {},
            r"passes labels to the model that have the shape \[2, \d\], not \[2, \d",
        ),
        (mask_labels, {}, "passes labels .*forward_step.runs_in_slices = True"),
        (
            average,
            {},
            r"micro-batch 0: .* counts 1 tokens in every slice, but .* keep \[\d+, \d+\]",
        ),
        (
            make_attention_mask,
            {},
            r"attention_mask \[1, 1, (\d), \1\] in a slice of \1 tokens must end with \[\1, 16\]",
        ),
        (
            leave,
            MTP | {"left_out": ("loss_mask",)},
            "the data has no loss_mask, of which multi-token prediction reads the next",
        ),
        # Later tokens come from the data's fields, even if the forward step passes others.
        (mask_loss, MTP, "passes loss_mask .* take loss_mask from the data"),
        (
            mask_labels,
            MTP | DECLARED,
            "passes labels .*forward_step.fields_.*; or disable",
        ),
    ],
)
def test_what_is_computed_from_a_slice_is_refused(
    change: Callable[[dict[str, Any]], None], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RanksFailed) as raised:
        run_ranks(2, train, *with_defaults(change, options))
    assert re.search(f"ScheduleError: .*{reason}", str(raised.value))


def with_defaults(
    change: Callable[[dict[str, Any]], None], options: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of `train` in order, as `run_ranks` takes them."""
    defaults: dict[str, Any] = {
        "positions": "learned_absolute",
        "lengths": (SEQUENCE,),
        "declared": None,
        "pipeline": None,
        "settings": None,
        "extra": (),
        "left_out": (),
    }
    return (change, *(defaults | options).values())


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (leave, {}),
        (convert, {}),
        (count_positions, {"positions": "rope"}),
        (mask_labels, DECLARED),
        (leave, MTP),
        (
            use_targets,
            {
                "extra": ("targets",),
                "declared": {"fields_along_sequence": ("targets",)},
            },
        ),
    ],
)
def test_what_does_not_depend_on_slices_trains_as_without_them(
    change: Callable[[dict[str, Any]], None], options: dict[str, Any]
) -> None:
    sliced = losses_of(run_ranks(2, train, *with_defaults(change, options)))
    options = options | {"pipeline": {"slices": 1}}
    whole = losses_of(run_ranks(2, train, *with_defaults(change, options)))
    assert sliced == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("pipeline", "lengths", "expected"),
    [
        ({"slices": 2}, (SEQUENCE, SEQUENCE), [2 * NUM_MICROBATCHES, 0]),
        # Nothing is cut in the first step.
        ({"slice_tokens": 8}, (8, SEQUENCE, SEQUENCE), [0, 2 * NUM_MICROBATCHES, 0]),
    ],
)
def test_inputs_are_compared_only_in_the_first_step_with_slices(
    pipeline: dict[str, Any], lengths: tuple[int, ...], expected: list[int]
) -> None:
    """The forward step is another object in each step, as of a program that makes closures."""
    options = {"pipeline": pipeline, "lengths": lengths}
    for _, compared in run_ranks(2, train, *with_defaults(leave, options)):
        assert compared[: len(expected)] == expected
    with pytest.raises(RanksFailed, match="passes position_ids to the model that are"):
        run_ranks(2, train, *with_defaults(count_positions, options))


def test_a_forward_step_is_known_by_its_code() -> None:
    import torch

    from megatron_ext.features.slices.slice_inputs import CheckedSteps

    class Trainer:
        def step(self, _data: Any, _model: Any) -> None:
            """Do nothing."""

        def other_step(self, _data: Any, _model: Any) -> None:
            """Do nothing else."""

    model, other_model = torch.nn.Identity(), torch.nn.Identity()
    checked = CheckedSteps()
    assert not checked.includes(model, Trainer().step)
    checked.add(model, functools.partial(Trainer().step, _model=None))
    assert checked.includes(model, Trainer().step)
    assert not checked.includes(model, Trainer().other_step)
    assert not checked.includes(other_model, Trainer().step)


@pytest.mark.parametrize(
    ("received", "is_part"),
    [
        ([[4, 5], [6, 7]], True),
        ([[4, 5], [6, 8]], False),
        ([4, 5], False),
        ([[4, 5]], False),
        ([[4, 5], [6, 7], [4, 5]], False),
        ([[4], [6]], False),
        ([[[4, 5], [6, 7]]] * 3, True),  # axes of multimodal positions
        ([[[4, 5], [6, 7]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]], True),
        ([[[4, 5], [6, 7]], [[0, 1], [0, 2]], [[0, 1], [0, 1]]], False),
        ([[[[4, 5], [6, 7]]]], False),
    ],
)
def test_positions_are_part_of_a_field(received: Any, is_part: bool) -> None:
    import torch

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.slice_inputs import check_inputs

    model = SimpleNamespace(
        position_embedding_type="mrope",
        pre_process=False,
        post_process=False,
        config=SimpleNamespace(mtp_num_layers=None),
    )
    fields = {
        "position_ids": torch.tensor([[4, 5], [6, 7]]),
        "heights": torch.tensor([[0, 1], [0, 1]]),
    }
    arguments = {"position_ids": torch.tensor(received)}
    refused = pytest.raises(ScheduleError, match="slice 1: the forward step passes pos")
    with nullcontext() if is_part else refused:
        check_inputs(
            model, arguments, fields, 4, "slice 1", only_later_predictions=False
        )
