"""Micro-batches of any length, and any number of them in each step: the bits of one process."""

from __future__ import annotations

import os
import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_ext
from megatron_ext import devices
from megatron_ext.config.active import clear_configuration
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.lengths import refusing_long_sequences
from megatron_ext.schedules import generate, registered
from megatron_ext.schedules.search.policies import POLICIES
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks, start_ranks

from . import fake, threads_as_ranks, toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_ext.config.active import Pipeline

STEPS = 4
"""Of each model. Each has its own number of micro-batches, and the last one is an evaluation."""


class Microbatch(NamedTuple):
    """The data of one micro-batch."""

    data: torch.Tensor
    """`[s, b, h]`"""

    @property
    def num_tokens(self) -> int:
        return self.data.shape[0] * self.data.shape[1]


class _Stage(toy.Stage):
    """A causal layer with one of Megatron's linear layers, whose W may come later."""

    def __init__(self, config: Any, number: int, vp_stage: int | None) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__(config, number, vp_stage)
        self.linear = ColumnParallelLinear(
            toy.WIDTH,
            toy.WIDTH,
            config=config,
            init_method=_init,
            bias=True,
            skip_bias_add=False,
        )

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        x = data if self.input is None else self.input
        made, _ = self.linear(x @ self.weight)
        scores = torch.einsum("sbh,tbh->bst", x, torch.tanh(made)).tril()
        mixed: torch.Tensor = (
            x + torch.einsum("bst,tbh->sbh", torch.tanh(scores), x) / 4
        )
        return mixed


def _init(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))


class _Reader(_Stage):
    """A stage whose model has a limit, as language models do, and reads tokens `[b, s]`."""

    max_sequence_length = 8

    @property
    def pre_process(self) -> bool:
        return self.number == 0

    def forward(self, tokens: torch.Tensor | None) -> torch.Tensor:
        embedded = None
        if tokens is not None:
            embedded = torch.nn.functional.one_hot(tokens.T, toy.WIDTH).float()
        return super().forward(embedded)


def _microbatches(draw: random.Random, number: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    shapes = [
        (
            draw.choice((0, 1, 2, 7, draw.randint(1, 40))),
            draw.choice((1, 1, 2)),
            toy.WIDTH,
        )
        for _ in range(number)
    ]
    return [Microbatch(torch.randn(shape, generator=generator)) for shape in shapes]


def _forward_step(
    batches: Iterator[Microbatch], stage: _Stage
) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    made = stage(batch.data if stage.number == 0 else None)

    def loss(output: torch.Tensor) -> Any:
        assert output.shape == batch.data.shape
        total = output.square().sum()
        return total, torch.tensor(batch.num_tokens, dtype=torch.int), total.item()

    return made, loss


def _alone(stages: list[_Stage], batches: list[Microbatch]) -> list[float]:
    """Run a step of a model without a pipeline, with the loss as Megatron scales it."""
    losses = []
    for batch in batches:
        x = None
        for stage in stages:
            stage.set_input_tensor([x])
            x = stage(batch.data if x is None else None)
        assert x is not None
        loss = x.square().sum()
        losses.append(loss.item())
        if torch.is_grad_enabled():
            (loss / max(batch.num_tokens, 1) / len(batches)).backward()
    return losses


def _step(
    model: list[_Stage], batches: list[Microbatch], **keywords: Any
) -> list[float]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    single = len(model) == 1
    iterators = [iter(batches) for _ in model]
    found: list[float] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iterators[0] if single else iterators,
        model=model[0] if single else model,
        num_microbatches=len(batches),
        seq_length=toy.LENGTH,
        micro_batch_size=toy.BATCH,
        **keywords,
    )
    return found


def _start(num_ranks: int) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    toy.start(num_ranks)
    model_parallel_cuda_manual_seed(1)


def _random_steps(first: int, number: int) -> int:
    """Run random models; return how many gradients were compared."""
    devices.current().bind(int(os.environ["RANK"]))
    _start(int(os.environ["WORLD_SIZE"]))
    compared = 0
    for seed in range(first, first + number):
        draw = random.Random(seed)
        pipeline = _random_pipeline(draw)
        use(pipeline, seed=1)
        config = toy.config(**toy.VARYING)
        mine = pipeline.placement.stages_of[dist.get_rank()]
        model = [
            _Stage(config, s, i if len(mine) > 1 else None) for i, s in enumerate(mine)
        ]
        whole = [_Stage(config, s, None) for s in range(pipeline.placement.num_stages)]
        for step in range(STEPS):
            megatron_ext.begin_iteration(step)
            batches = _microbatches(draw, draw.randint(1, 3 * pipeline.pp))
            is_last = pipeline.placement.num_stages - 1 in mine
            if step == STEPS - 1:
                with torch.no_grad():
                    losses, expected = _step(model, batches, forward_only=True), None
                    expected = _alone(whole, batches)
            else:
                losses, expected = _step(model, batches), _alone(whole, batches)
            what = f"seed {seed}, step {step}, {len(batches)} micro-batches: {pipeline.config}"
            assert losses == (expected if is_last else []), what
            compared += _compare(model, whole, what)
        dist.barrier()
        clear_configuration()
    return compared


def _random_pipeline(draw: random.Random) -> Pipeline:
    pp = dist.get_world_size()
    name = draw.choice(
        [name for name, found in registered().items() if found.twins == 1]
    )
    options: dict[str, Any] = {"transport": draw.choice(("shm", "tcp", "torch"))}
    if draw.random() < 0.4:
        dynamic = DynamicOrder(policy=draw.choice(list(POLICIES)))
        options = {"dynamic": dynamic, "transport": draw.choice(("shm", "tcp"))}
    chunks = draw.choice((2, 3)) if name == "interleaved" else None
    return make_pipeline(
        name, pp, draw.randint(1, 8), chunks, message_timeout_s=60.0, **options
    )


def _compare(model: list[_Stage], whole: list[_Stage], what: str) -> int:
    compared = 0
    for stage in model:
        expected = dict(whole[stage.number].named_parameters())
        for name, parameter in stage.named_parameters():
            wanted = expected[name].grad
            assert (parameter.grad is None) == (wanted is None), f"{what}: {name}"
            if wanted is not None:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, wanted), (
                    f"{what}, stage {stage.number}: {name}"
                )
                compared += 1
    return compared


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        pytest.param(2, 6, marks=pytest.mark.short_s(15)),
        (2, 40),
        (3, 40),
        (4, 40),
        pytest.param(4, 200, marks=pytest.mark.slow),
        pytest.param(8, 50, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1300)  # hundreds of steps, on as many cores as there are
def test_bits_of_one_process(ranks: int, number: int) -> None:
    timeout_s = 60 + 6 * number * max(1, ranks // 4)
    for compared in run_ranks(ranks, _random_steps, 0, number, timeout_s=timeout_s):
        assert compared > number


def _one_step(schedule: str, transport: str, lengths: list[int], varying: bool) -> None:
    """Run a step in which the first stage reads sequences of these lengths."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    _start(2)
    pipeline = make_pipeline(
        schedule, 2, len(lengths), transport=transport, message_timeout_s=30.0
    )
    use(pipeline)
    mine = pipeline.placement.stages_of[dist.get_rank()]
    config = toy.config(**(toy.VARYING if varying else {}))
    model = [
        _Reader(config, s, i if len(mine) > 1 else None) for i, s in enumerate(mine)
    ]

    def forward_step(tokens: Iterator[torch.Tensor], stage: _Reader) -> Any:
        read = next(tokens)
        made = stage(read if stage.number == 0 else None)
        return made, lambda output: (output.sum(), output.sum().item())

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[map(_tokens, lengths) for _ in model],
        model=model,
        num_microbatches=len(lengths),
        seq_length=4,
        micro_batch_size=1,
    )


def _tokens(length: int) -> torch.Tensor:
    return torch.arange(length)[None] % toy.WIDTH


@pytest.mark.parametrize("transport", ["shm", "tcp", "torch"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_sequence_beyond_the_model_ends_the_step_on_every_rank(
    schedule: str, transport: str
) -> None:
    says = "stage 0, micro-batch 2: a sequence has 9 tokens, but the model has 8 positions; shorten"
    _ends_with(says, schedule, transport, [8, 1, 9, 8], True)


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_lengths_that_vary_unannounced_end_the_step_on_every_rank(
    transport: str,
) -> None:
    says = (
        "stage 0, micro-batch 1: output [3, 1, 4], but the step expects [4, 1, 4]; if "
    )
    _ends_with(says, "1f1b", transport, [4, 3, 4], False)


def _ends_with(says: str, *settings: Any) -> None:
    begin_s = time.monotonic()
    ended = start_ranks(2, _one_step, *settings, timeout_s=60)
    assert ended.exit_codes == [1, 1], ended.describe()
    assert time.monotonic() - begin_s < 30, "nobody waits for a time-out"
    # Over torch.distributed others learn the reason from a store, which here dies with rank 0.
    told = ended.logs[:1] if settings[1] == "torch" else ended.logs
    for log in told:
        assert says in log.splitlines()[-1]


def test_packed_sequences_are_measured_one_by_one() -> None:
    model = torch.nn.Identity()
    model.max_sequence_length, model.pre_process = 8, True  # type: ignore[assignment]
    tokens, sums = torch.zeros(1, 12, dtype=torch.int64), torch.tensor([0, 8, 12])
    for longest in (None, 8):
        packed = SimpleNamespace(max_seqlen_q=longest, cu_seqlens_q=sums)
        with refusing_long_sequences(model, 0, 0, 1):
            _call(model, tokens, packed)
    with (
        refusing_long_sequences(model, 0, 3, 1),
        pytest.raises(ScheduleError, match="micro-batch 3: a sequence has 9 tokens"),
    ):
        _call(model, tokens, SimpleNamespace(max_seqlen_q=9, cu_seqlens_q=sums))
    with (
        refusing_long_sequences(model, 0, 0, 2),
        pytest.raises(ScheduleError, match="10 tokens"),
    ):
        model(tokens[:, :5])
    model(tokens)  # nothing is left of the checks


def _call(model: torch.nn.Module, tokens: torch.Tensor, packed: Any) -> None:
    model.forward = lambda x, **_: x
    model(tokens, packed_seq_params=packed)


class _LongCompute(fake.Compute):
    """A computation whose tensors are as long as their micro-batch, and hold one number each."""

    def __init__(self, lengths: list[int], start: float) -> None:
        super().__init__(start=start)
        self.lengths = lengths

    def run(self, action: Any, inputs: Any, **keywords: Any) -> Any:
        length = self.lengths[action.microbatch]
        assert all(tensor.shape == (length,) for tensor in inputs)
        made = super().run(action, [tensor[:1] for tensor in inputs], **keywords)
        return [tensor.repeat(length) for tensor in made]


@settings(max_examples=200)
@given(data=st.data())
def test_every_action_gets_what_the_chain_of_stages_has_for_it(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(list(registered())))
    twins = registered()[name].twins
    ranks = 4 if twins == 2 else data.draw(st.integers(2, 4))
    count = data.draw(st.integers(1, 9))
    schedule = generate(name, ranks, count * twins)
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    for row, compute, expected in threads_as_ranks.by_rank(
        schedule, make=lambda start: _LongCompute(lengths, start)
    ):
        assert compute.inputs.keys() >= {action for action in row if action.kind != "W"}
        for action in row:
            if action.kind != "W":
                assert compute.inputs[action] == expected(action)
