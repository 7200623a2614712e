"""A step whose backward is split gives the gradients of one that is not, bit by bit."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.single import start_parallel
from tests.ranks import run_ranks

_MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "add_bias_linear": False,
}
_BF16 = {"bf16": True, "params_dtype": "bfloat16", "add_bias_linear": False}
_MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bf16": {**_BF16, "gated_linear_unit": True},
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective recompute": {"recompute_granularity": "selective"},
    "recomputed norms": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm"],
    },
    "tied": {"tied": True},
    "bf16 tied": {"tied": True, **_BF16},
    "mtp": {"mtp_num_layers": 2, **_BF16},
    "mtp tied": {"mtp_num_layers": 1, "tied": True},
    "moe": _MOE,
    "moe bf16 shared expert": {
        **_MOE,
        **_BF16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "mla": {"mla": True},
}


def _settings(name: str) -> dict[str, Any]:
    import torch

    settings = dict(_MODELS[name])
    if "params_dtype" in settings:
        settings["params_dtype"] = getattr(torch, settings["params_dtype"])
    return settings


def _recompute_norms_without_te() -> None:
    """Stand in for the names of TE that upstream's recomputation of norms takes for granted."""
    from megatron.core.tensor_parallel import random

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: nullcontext()
    random.fp8_autocast = lambda **_: nullcontext()


def equal_steps(settings: dict[str, Any] | str, **sizes: int) -> None:
    from tests.runtime import small_gpt

    start_parallel(**sizes)
    _recompute_norms_without_te()
    if isinstance(settings, str):
        settings = _settings(settings)
    fused, split = small_gpt.build(**settings), small_gpt.build(**settings)
    for _ in range(2):  # DDP learns from the first step which gradients come how often
        small_gpt.fused_step(fused)
        small_gpt.split_step(split)
        small_gpt.assert_equal(small_gpt.gradients(split), small_gpt.gradients(fused))


@pytest.mark.parametrize("name", _MODELS)
def test_equal_to_the_unsplit_backward(name: str) -> None:
    run_ranks(1, equal_steps, name)


_TP2 = {"tensor_model_parallel_size": 2}


def equal_steps_at_tp2(settings: dict[str, Any]) -> None:
    equal_steps({**settings, **_TP2}, **_TP2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"sequence_parallel": True}, {**_MOE, "sequence_parallel": True}],
    ids=["tensor", "sequence", "sequence, moe"],
)
def test_with_parallel_tensors(settings: dict[str, Any]) -> None:
    run_ranks(2, equal_steps_at_tp2, settings)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_data_parallelism(distributed: bool, overlap: bool) -> None:
    ddp = {"use_distributed_optimizer": distributed, "overlap_grad_reduce": overlap}
    run_ranks(2, equal_steps, {"ddp": {**ddp, "bucket_size": 2000}})


_LINEAR = "linear_qkv linear_proj linear_fc1 linear_fc2"
_MLA = "linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj"


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("dense", f"{_LINEAR} output_layer"),
        ("full recompute", f"{_LINEAR} output_layer"),
        ("tied", _LINEAR),
        ("mtp", f"{_LINEAR} output_layer eh_proj"),
        ("mtp tied", f"{_LINEAR} eh_proj"),
        ("moe", f"{_LINEAR} output_layer"),
        ("mla", f"{_MLA} linear_proj linear_fc1 linear_fc2 output_layer"),
    ],
)
def test_what_is_left_for_w(name: str, layers: str) -> None:
    (found,) = run_ranks(1, deferred_layers, name)
    assert found == set(layers.split())


def deferred_layers(name: str) -> set[str]:
    from tests.runtime import small_gpt

    start_parallel()
    names = small_gpt.deferred(small_gpt.build(**_settings(name)))
    assert all(name.endswith(".weight") for name in names)
    return {name.split(".")[-2] for name in names}


def operands_die() -> None:
    from tests.pipelines import splits
    from tests.runtime import small_gpt

    start_parallel()
    model = small_gpt.build()
    loss = small_gpt.forward(model, 0)
    with splits().defer(0, 0):
        loss.backward()
    waiting = list(chain(*splits()._waiting[0, 0].values()))
    operands = [weakref.ref(t) for g in waiting for t in (g.input, g.grad_output)]
    assert len(operands) == 2 * 9
    del waiting
    assert all(operand() is not None for operand in operands)
    splits().run(0, 0)
    assert all(operand() is None for operand in operands)


def test_w_frees_the_operands() -> None:
    run_ranks(1, operands_die)


def unsplit_after_split() -> None:
    """A micro-batch that is not split, after one that is: its gradient must not get lost."""
    from tests.pipelines import splits
    from tests.runtime import small_gpt

    start_parallel()
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    fused, mixed = small_gpt.build(**settings), small_gpt.build(**settings)
    for model in (fused, mixed):
        loss = small_gpt.forward(model, 0)
        with splits().defer(0, 0) if model is mixed else nullcontext():
            loss.backward()
        splits().run(0, 0)
        small_gpt.forward(model, 1).backward()
    small_gpt.assert_equal(small_gpt.gradients(mixed), small_gpt.gradients(fused))


def test_a_step_may_split_some_micro_batches_only() -> None:
    run_ranks(1, unsplit_after_split)


def failed_step() -> None:
    from tests.pipelines import splits
    from tests.runtime import small_gpt

    start_parallel()
    model = small_gpt.build()
    with suppress(ZeroDivisionError), splits().defer(0, 0):
        small_gpt.forward(model, 0).backward()
        raise ZeroDivisionError
    assert not splits().is_deferring
    assert splits().pending() == [(0, 0)]
    splits().clear()
    assert splits().pending() == []
    small_gpt.split_step(model)


def test_after_a_failed_step() -> None:
    run_ranks(1, failed_step)


def without_ddp(autocast: bool) -> None:
    import torch

    from tests.pipelines import splits
    from tests.runtime import small_gpt

    start_parallel()
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    fused, split = (small_gpt.build(**settings, use_ddp=False) for _ in range(2))
    for microbatch in range(2):
        with torch.autocast("cpu", enabled=autocast):
            small_gpt.forward(fused, microbatch).backward()
            loss = small_gpt.forward(split, microbatch)
            with splits().defer(0, microbatch):
                loss.backward()
        splits().run(0, microbatch)
    for found, expected in zip(split.parameters(), fused.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
        assert not hasattr(found, "main_grad")


def test_without_ddp_gradients_go_where_autograd_puts_them() -> None:
    run_ranks(1, without_ddp, False)


def test_under_autocast_w_has_the_precision_of_upstreams_backward() -> None:
    run_ranks(1, without_ddp, True)


def strided_gradient() -> None:
    """`torch.matmul` rounds differently if the weight seems to require no gradient."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from tests.pipelines import splits

    start_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    layer = ColumnParallelLinear(
        8, 8, config=config, init_method=torch.nn.init.normal_, bias=True
    )
    data = torch.randn(40, 2, 8)
    gradient = torch.randn(2, 40, 8).transpose(0, 1)
    results = []
    for is_split in (False, True):
        layer.zero_grad()
        leaf = data.clone().requires_grad_()
        output, _ = layer(leaf)
        with splits().defer(0, 0) if is_split else nullcontext():
            output.backward(gradient)
        splits().run(0, 0)
        results.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    assert all(map(torch.equal, *results))


def test_a_gradient_that_is_not_contiguous() -> None:
    run_ranks(1, strided_gradient)


def test_what_cannot_be_split_is_said() -> None:
    from megatron_ext.config.incompatible import why_not_split

    usual = {"enable_autocast": False, "transformer_impl": "local"}
    assert why_not_split(SimpleNamespace(**usual)) is None
    assert "autocast" in (
        why_not_split(SimpleNamespace(**{**usual, "enable_autocast": True})) or ""
    )
