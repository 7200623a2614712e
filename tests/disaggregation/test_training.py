"""Disaggregated training is that of one stage after the other on half of the replicas."""

from __future__ import annotations

import os
import random
import signal
from functools import cache
from typing import Any

import pytest

from megatron_ext.errors import MegatronExtError
from tests.ranks import run_ranks
from tests.runtime import capture
from tests.runtime.capture import GPT, PP2, Captured, _merge
from tests.training.helpers import MOE

FBD = "--forward-backward-disaggregating "


def _values(tensor: Any) -> tuple[float, ...]:
    return tuple(tensor.detach().flatten().tolist())


def run_role(argv: list[str], values: bool = False) -> tuple[str, Captured]:
    """Train as one rank of either role, or of none; keep values instead of digests."""
    from megatron_ext.config import active

    if values:
        setattr(capture, "_digest", _values)  # noqa: B010
    captured = capture.run_here("gpt", argv)
    job = active.job()
    return (job.role if job else "backward"), captured


def train(
    num_ranks: int, flags: str, *, values: bool = False
) -> tuple[Captured, list[Captured]]:
    """Return what the backward ranks computed together, and the forward ranks one by one."""
    return together(
        run_ranks(num_ranks, run_role, flags.split(), values, timeout_s=240)
    )


def together(by_rank: list[tuple[str, Captured]]) -> tuple[Captured, list[Captured]]:
    """Return what the backward ranks computed together, and the forward ranks one by one."""
    forward = [captured for role, captured in by_rank if role == "forward"]
    backward = [captured for role, captured in by_rank if role == "backward"]
    whole = Captured(gradients=[{} for _ in backward[0].gradients])
    for rank, captured in enumerate(backward):
        whole.losses = captured.losses if any(captured.losses) else whole.losses
        for mine, theirs in zip(whole.gradients, captured.gradients, strict=True):
            _merge(mine, theirs, rank)
        _merge(whole.parameters, captured.parameters, rank)
    return whole, forward


@cache
def stock(num_ranks: int, flags: str) -> Captured:
    return capture.train(num_ranks, flags, timeout_s=240)


RNG = "--microbatch-rng "
"""What disaggregation implies where a forward draws."""
DROPOUT = GPT.replace("--hidden-dropout 0 --attention-dropout 0 ", RNG)
ROUTED = GPT + RNG + "--moe-router-force-load-balancing "
JITTER = GPT + RNG + "--moe-input-jitter-eps 0.1 "
BF16 = "--bf16 "
MOE_LAYERS = f"{MOE}--swiglu --disable-bias-linear "
EP2 = (
    MOE_LAYERS + "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
)
EXPERT_BIAS = (
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-bias-update-rate 0.1 "
)
TOP4 = "--num-experts 8 --moe-router-topk 4 "
MTP = "--mtp-num-layers 1 --position-embedding-type rope "
ETP1 = "--expert-tensor-parallel-size 1 "
RECOMPUTE_MOE = "--recompute-granularity selective --recompute-modules moe "
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "


def sizes(tp: int, pp: int) -> str:
    parallel = "--sequence-parallel " if tp > 1 else ""
    return f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {parallel}"


SHIP = "--fbd-activations ship "
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "flags"),
    [
        (1, 1, 1, GPT),
        (1, 2, 2, GPT + SHARDED),
        (1, 4, 1, DROPOUT),
        (2, 1, 2, DROPOUT),
        (2, 2, 1, DROPOUT + BF16),
        (1, 1, 2, DROPOUT + EP2 + SHARDED),
        (1, 2, 1, DROPOUT + MTP),
        (1, 2, 1, GPT + MOE_LAYERS + EXPERT_BIAS + TOP4),
        pytest.param(1, 2, 2, GPT + EP2 + BF16 + EXPERT_BIAS, marks=slow),
        pytest.param(2, 2, 2, GPT + EP2 + ETP1 + SHARDED, marks=slow),
        pytest.param(4, 1, 1, DROPOUT, marks=slow),
        pytest.param(2, 4, 1, GPT, marks=slow),
        pytest.param(1, 4, 2, DROPOUT + BF16, marks=slow),
        pytest.param(4, 4, 1, GPT, marks=slow),
        pytest.param(2, 4, 2, GPT + SHARDED, marks=slow),
        pytest.param(4, 2, 2, DROPOUT + BF16, marks=slow),
        (1, 2, 1, ROUTED + MOE_LAYERS),
        pytest.param(1, 2, 1, JITTER + MOE_LAYERS, marks=slow),
        (1, 2, 1, GPT + MTP + "--pipeline-model-parallel-layout Ettttm|L "),
        pytest.param(1, 2, 1, GPT + MOE_LAYERS + TOP4 + RECOMPUTE, marks=slow),
        pytest.param(1, 2, 1, GPT + MOE_LAYERS + TOP4 + RECOMPUTE_MOE, marks=slow),
    ],
)
def test_equal_to_half_the_replicas(tp: int, pp: int, dp: int, flags: str) -> None:
    flags += sizes(tp, pp)
    ours, _ = train(2 * tp * pp * dp, flags.replace(RNG, "") + FBD)
    assert_equal(ours, stock(tp * pp * dp, flags))


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "flags"),
    [
        (1, 1, 1, GPT),
        (2, 2, 1, DROPOUT),
        pytest.param(1, 2, 2, DROPOUT + BF16 + SHARDED, marks=slow),
        pytest.param(1, 2, 2, DROPOUT + MOE_LAYERS + SHARDED, marks=slow),
        pytest.param(4, 2, 1, GPT + BF16, marks=slow),
        pytest.param(1, 1, 2, GPT + EP2, marks=slow),
        pytest.param(2, 4, 1, DROPOUT, marks=slow),
        pytest.param(4, 4, 1, DROPOUT + BF16, marks=slow),
        pytest.param(1, 2, 1, ROUTED + MOE_LAYERS, marks=slow),
    ],
)
def test_shipped_activations_give_the_same(
    tp: int, pp: int, dp: int, flags: str
) -> None:
    flags += sizes(tp, pp) + RECOMPUTE
    ours, _ = train(2 * tp * pp * dp, flags.replace(RNG, "") + FBD + SHIP)
    assert_equal(ours, stock(tp * pp * dp, flags))


def test_over_tcp() -> None:
    flags = GPT + PP2
    ours, _ = train(4, flags + FBD + "--pipeline-transport tcp ")
    assert_equal(ours, stock(2, flags))


def run_varying(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank on samples of different lengths."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    whole = MockGPTDataset.__getitem__

    def cut(self: Any, index: int) -> dict[str, Any]:
        length = 32 - 5 * (index % 4)
        fields = whole(self, index)
        for name, field in fields.items():
            fields[name] = field[..., :length]
        if "attention_mask" in fields:
            fields["attention_mask"] = fields["attention_mask"][..., :length, :]
        return fields

    setattr(MockGPTDataset, "__getitem__", cut)  # noqa: B010
    return run_role(argv)


@pytest.mark.parametrize("activations", ["", RECOMPUTE + SHIP])
def test_lengths_may_vary(activations: str) -> None:
    flags = GPT.replace("--eval-iters 0", "--eval-iters 1 --eval-interval 2") + PP2
    flags += "--micro-batch-size 1 --variable-seq-lengths " + activations.removesuffix(
        SHIP
    )
    megatrons, _ = together(run_ranks(2, run_varying, flags.split()))
    ours, _ = together(
        run_ranks(4, run_varying, (flags + FBD + activations[-len(SHIP) :]).split())
    )
    assert_equal(ours, megatrons)


def run_in_parts(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank with attention over parts of sequences, as Transformer Engine has it."""
    from megatron_ext import devices

    setattr(type(devices.current()), "argument_errors", lambda *_: [])  # noqa: B010
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region as gather,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build: Any = DotProductAttention.__init__

    def of_one_part(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        build(self, config, *args, **kwargs)
        config.context_parallel_size = size

    def attend(_self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        parts, half = group.size(), query.size(0) // 2
        keys, values = (gather(part.contiguous(), group=group) for part in (key, value))
        # Of 2n equal pieces a rank has one of the beginning and one of the end.
        pieces = [torch.cat((torch.arange(half) + r * half,
                             torch.arange(half) + (2 * parts - 1 - r) * half))
                  for r in range(parts)]  # fmt: skip
        scores = torch.einsum("sbhd,tbhd->bhst", query, keys) / query.size(-1) ** 0.5
        later = torch.cat(pieces) > pieces[group.rank()][:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, values).flatten(2)

    setattr(DotProductAttention, "__init__", of_one_part)  # noqa: B010
    setattr(DotProductAttention, "forward", attend)  # noqa: B010
    return run_role(argv)


@pytest.mark.short_s(10)
def test_parts_of_a_sequence_have_their_own_forward_ranks() -> None:
    flags = GPT + PP2 + SHARDED + "--context-parallel-size 2 "
    megatrons, _ = together(run_ranks(4, run_in_parts, flags.split()))
    ours, _ = together(run_ranks(8, run_in_parts, (flags + FBD).split(), timeout_s=240))
    assert_equal(ours, megatrons)


def test_steps_that_loss_scaling_skips() -> None:
    """The steps after them go on from the weights that stayed."""
    flags = GPT.replace("--train-iters 3", "--train-iters 6") + PP2
    flags += "--fp16 --initial-loss-scale 1048576 --hysteresis 1 "
    ours, _ = train(4, flags + FBD)
    assert_equal(ours, stock(2, flags))


def run_clipping(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank that clips queries and keys after each step, as if logits were large."""
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.training import get_args, training

    train_step = training.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        get_args().qk_clip = True  # as a flag it needs Transformer Engine
        return train_step(*args, **kwargs)

    def clip(chunks: list[Any], **_: Any) -> float:
        for chunk in chunks:
            for name, weight in chunk.named_parameters():
                if "linear_qkv.weight" in name:
                    weight.data.mul_(0.5)
                    weight.main_param.data.mul_(0.5)
        return 0.0

    training.train_step, training.clip_qk = (
        step,
        clip,
    )  # this process is a rank and ends
    return run_role(argv)


def test_queries_are_clipped_after_steps_that_loss_scaling_skips() -> None:
    flags = GPT + PP2 + "--fp16 --initial-loss-scale 1048576 --hysteresis 1 "
    megatrons, _ = together(run_ranks(2, run_clipping, flags.split()))
    ours, _ = together(run_ranks(4, run_clipping, (flags + FBD).split(), timeout_s=100))
    assert_equal(ours, megatrons)


def run_changing(argv: list[str], change: str) -> tuple[str, Captured]:
    """Train as one rank whose loop changes its model when a training step has returned."""
    from megatron_ext import devices
    from megatron_ext.config import active

    devices.current()  # before Megatron is imported
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    build: Any = GPTModel.__init__

    def scaled(self: Any, *args: Any, **kwargs: Any) -> None:
        """Build the model with a scale on what layers compute: a buffer, or a frozen weight."""
        build(self, *args, **kwargs)
        scale = torch.ones(1)
        if change == "frozen weight":
            self.scale = torch.nn.Parameter(scale, requires_grad=False)
        else:
            self.register_buffer("scale", scale, persistent=False)
        self.decoder.register_forward_hook(
            lambda _module, _inputs, output: output * self.scale
        )

    train_step = training.train_step

    def step(
        forward_step: Any, data: Any, chunks: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        results = train_step(forward_step, data, chunks, *args, **kwargs)
        # Forward ranks have no gradients or moments, from which such changes often follow.
        for model in [] if active.has_role("forward") else unwrap_model(chunks):
            if change == "replaced":
                weight = model.decoder.layers[0].mlp.linear_fc1.weight
                weight.data = weight.data * 0.9
            elif change == "weights":
                for weight in model.parameters():
                    weight.data.mul_(0.9)
            else:
                model.scale.data.mul_(0.5)
        return results

    setattr(GPTModel, "__init__", scaled)  # noqa: B010
    training.train_step = step  # this process is a rank and ends
    return run_role(argv)


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (GPT, "weights"),
        (GPT + SHARDED, "frozen weight"),
        (GPT, "buffer"),
        pytest.param(GPT + SHARDED, "weights", marks=slow),
        pytest.param(GPT, "replaced", marks=slow),
    ],
)
def test_forwards_see_what_the_loop_changes_between_two_steps(
    flags: str, change: str
) -> None:
    replicas = 2 if SHARDED in flags else 1
    flags += PP2
    megatrons, _ = together(
        run_ranks(2 * replicas, run_changing, flags.split(), change)
    )
    ours, _ = together(
        run_ranks(4 * replicas, run_changing, (flags + FBD).split(), change)
    )
    assert_equal(ours, megatrons)


def run_replacing(argv: list[str]) -> str:
    """Train as one rank whose loop gives a weight other storage; return the refusal."""
    try:
        run_changing(argv, "replaced")
    except MegatronExtError as error:
        return str(error)
    return ""


def test_a_weight_that_leaves_megatrons_buffer_is_refused() -> None:
    """Its replicas then send what the buffer still holds."""
    refusals = run_ranks(4, run_replacing, (GPT + SHARDED + FBD).split())
    assert any(
        "linear_fc1.weight.data was replaced" in refusal for refusal in refusals
    ), refusals


def run_drawing(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank of a model that draws numbers which no flag tells of."""
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    import numpy as np
    import torch
    from megatron.core.models.gpt import GPTModel

    build: Any = GPTModel.__init__

    def noisy(self: Any, *args: Any, **kwargs: Any) -> None:
        def disturb(_module: Any, _inputs: Any, output: Any) -> Any:
            return output * (random.random() + np.random.random() + torch.rand(1))

        build(self, *args, **kwargs)
        self.decoder.register_forward_hook(disturb)

    setattr(GPTModel, "__init__", noisy)  # noqa: B010
    return run_role(argv)


def test_both_roles_draw_the_same_numbers_whatever_draws_them() -> None:
    megatrons, _ = together(run_ranks(2, run_drawing, (GPT + PP2 + RNG).split()))
    ours, _ = together(run_ranks(4, run_drawing, (GPT + PP2 + FBD).split()))
    assert_equal(ours, megatrons)


def run_frozen(argv: list[str]) -> tuple[str, Captured]:
    """Train some weights as one rank; forward ranks, which load nothing, begin with others."""
    from megatron_ext import devices
    from megatron_ext.config import active

    devices.current()  # before Megatron is imported
    from megatron.core.models.gpt import GPTModel

    build: Any = GPTModel.__init__

    def frozen(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for name, weight in self.named_parameters():
            weight.requires_grad_("linear_fc1" not in name)

    fill: Any = capture._fill_by_name

    def filled(*args: Any) -> None:
        if not active.has_role("forward"):
            fill(*args)

    setattr(GPTModel, "__init__", frozen)  # noqa: B010
    setattr(capture, "_fill_by_name", filled)  # noqa: B010
    return run_role(argv)


def test_weights_that_do_not_train_reach_forward_ranks() -> None:
    """The distributed optimizer has no shard of them."""
    flags = GPT + PP2 + SHARDED
    megatrons, _ = together(run_ranks(4, run_frozen, flags.split()))
    ours, _ = together(run_ranks(8, run_frozen, (flags + FBD).split(), timeout_s=240))
    assert_equal(ours, megatrons)


def run_signalled(argv: list[str]) -> tuple[str, Captured]:
    """Train as one rank; one backward rank gets SIGTERM after its second step."""
    from megatron.training import training

    from megatron_ext.config import active

    train_step, steps = training.train_step, iter(range(9))

    def step(*args: Any, **kwargs: Any) -> Any:
        done = train_step(*args, **kwargs)
        job = active.job()
        assert job is not None
        if next(steps) == 1 and (job.role, job.role_rank) == ("backward", 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    training.train_step = step  # this process is a rank and ends
    return run_role(argv)


def test_a_signal_to_one_backward_rank_ends_all_after_the_same_step() -> None:
    flags = GPT + PP2
    expected = stock(2, flags)
    by_rank = run_ranks(
        4, run_signalled, (flags + FBD + "--exit-signal-handler ").split()
    )
    assert {role for role, _ in by_rank} == {"forward", "backward"}
    ours, _ = together(by_rank)
    assert [len(one.gradients) for role, one in by_rank if role == "backward"] == [2, 2]
    assert ours.losses == expected.losses[:2]


def assert_equal(ours: Captured, theirs: Captured) -> None:
    assert ours.losses == theirs.losses
    assert ours.gradients == theirs.gradients
    assert ours.parameters == theirs.parameters


MERGED = FBD + "--ignore-forward-tensor-parallel "
SWIGLU = "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2 "
TOLERANCE = 2e-5
"""Of losses and parameters: sums over the width of a layer are added up in another order.

A parameter moves by up to 1e-3 a step, whatever the size of its gradient: so rounding shows most
where a gradient is next to nothing.
"""
TOLERANCE_BF16 = 5e-3


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "flags"),
    [
        (2, 2, 1, GPT + SWIGLU),
        pytest.param(2, 2, 1, GPT + MTP, marks=slow),
        pytest.param(2, 1, 2, GPT + RECOMPUTE + SHARDED + SHIP, marks=slow),
        pytest.param(4, 1, 2, GPT + RECOMPUTE + SHIP, marks=slow),
        pytest.param(4, 2, 1, GPT + BF16, marks=slow),
        pytest.param(4, 4, 1, GPT, marks=slow),
        pytest.param(2, 4, 2, GPT + RECOMPUTE + SHIP, marks=slow),
    ],
)
def test_merged_forward_ranks_compute_the_same_up_to_rounding(
    tp: int, pp: int, dp: int, flags: str
) -> None:
    flags += sizes(tp, pp)
    ours, _ = train((tp + 1) * pp * dp, flags + MERGED, values=True)
    theirs, _ = train(tp * pp * dp, flags.replace(SHIP, ""), values=True)
    tolerance = TOLERANCE_BF16 if BF16 in flags else TOLERANCE
    for mine, stocks in zip(ours.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(stocks, abs=tolerance)
    assert ours.parameters.keys() == theirs.parameters.keys()
    for name, values in theirs.parameters.items():
        assert ours.parameters[name] == pytest.approx(values, abs=tolerance), name


def test_stages_without_a_layer() -> None:
    """The first has no more than the embedding, the second nothing."""
    flags = f"{DROPOUT}--clip-grad 0 --pipeline-model-parallel-size 3 "
    flags += "--pipeline-model-parallel-layout E||ttttL --recompute-granularity full "
    flags += "--recompute-method uniform --recompute-num-layers 1 "
    whole, _ = train(6, flags + FBD + "--fbd-activations ship ")
    expected = stock(3, flags)
    assert whole.losses == expected.losses
    assert whole.gradients == expected.gradients
    assert whole.parameters == expected.parameters
