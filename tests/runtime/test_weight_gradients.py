"""Single layers: the gradients of a split backward against those of upstream's own."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.single import start_parallel
from tests.ranks import run_ranks

_WIDTHS = {"input_size": 12, "output_size": 20}


def _layer(
    kind: str, bias: bool, dtype: torch.dtype, **settings: Any
) -> torch.nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        **settings,
    )
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias}
    torch.manual_seed(3)
    if kind == "column":
        return ColumnParallelLinear(**_WIDTHS, **options, gather_output=False)
    return RowParallelLinear(
        **_WIDTHS, **options, input_is_parallel=True, skip_bias_add=False
    )


def _gradients(layer: torch.nn.Module, split: bool) -> dict[str, torch.Tensor]:
    """Use a layer twice in one backward, as MTP does with the output layer; return gradients."""
    from tests.pipelines import splits

    for parameter in layer.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.25)
        parameter.grad = None
    generator = torch.Generator().manual_seed(5)
    width = layer.weight.size(1)
    dtype = layer.weight.dtype
    inputs = [
        torch.randn(6, 3, width, generator=generator).to(dtype).requires_grad_()
        for _ in range(2)
    ]
    with _deferring(split):
        outputs = [layer(x)[0] for x in inputs]
        seeds = [torch.randn(y.shape, generator=generator).to(dtype) for y in outputs]
        torch.autograd.backward(outputs, seeds)
    if split:
        assert layer.weight.grad is None
        assert torch.equal(layer.weight.main_grad, torch.full(layer.weight.shape, 0.25))
        del outputs
        splits().run(0, 0)
    if not layer.gradient_accumulation_fusion and not split:
        layer.weight.main_grad.add_(layer.weight.grad)
    found = {"weight": layer.weight.main_grad}
    if layer.bias is not None:
        found["bias"] = layer.bias.grad
    return {**found, "inputs": torch.cat([x.grad for x in inputs])}


def _deferring(split: bool) -> Any:
    from contextlib import nullcontext

    from tests.pipelines import splits

    return splits().defer(0, 0) if split else nullcontext()


def _assert_equal(layer: torch.nn.Module) -> None:
    expected, found = _gradients(layer, split=False), _gradients(layer, split=True)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def layers(tp: int, sequence_parallel: bool) -> None:
    start_parallel(tensor_model_parallel_size=tp)
    settings = {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": sequence_parallel,
    }
    for kind in ("column", "row"):
        for bias in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                _assert_equal(_layer(kind, bias, dtype, **settings))


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)]
)
def test_bits_are_upstreams(tp: int, sequence_parallel: bool) -> None:
    run_ranks(tp, layers, tp, sequence_parallel)


def fused_layers(tp: int) -> None:
    from megatron.core.tensor_parallel import layers as upstream

    calls = []

    def kernel(name: str) -> Any:
        def add(total_input: Any, grad_output: Any, main_grad: Any) -> None:
            assert total_input.dim() == grad_output.dim() == 2
            calls.append(name)
            main_grad.add_(grad_output.t().matmul(total_input))

        return add

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    upstream.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        **{n: kernel(n) for n in names}
    )
    upstream._grad_accum_fusion_available = True
    start_parallel(tensor_model_parallel_size=tp)
    settings = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
    layer = _layer(
        "column", True, torch.bfloat16, gradient_accumulation_fusion=True, **settings
    )
    _assert_equal(layer)
    assert calls == ["wgrad_gemm_accum_fp32"] * 4


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_accumulation_calls_upstreams_kernel(tp: int) -> None:
    run_ranks(tp, fused_layers, tp)


def gathers_and_gemms() -> list[str]:
    """Return what this rank did in a W of three gradients."""
    from megatron.core.tensor_parallel import layers as upstream

    from megatron_ext.runtime.split_linear import LinearGradient
    from tests.pipelines import splits

    log: list[str] = []

    def logged(what: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            log.append(what)
            return call(*args, **kwargs)

        return run

    start_parallel(tensor_model_parallel_size=2)
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layer = _layer("column", False, torch.float32, **settings)
    with splits().defer(0, 0):
        for _ in range(3):
            layer(torch.randn(6, 3, 12))[0].sum().backward()
    upstream.dist_all_gather_func = logged("gather", upstream.dist_all_gather_func)
    LinearGradient.compute = logged("GEMM", LinearGradient.compute)  # type: ignore[method-assign]
    splits().run(0, 0)
    return log


def test_the_next_input_is_gathered_while_a_gemm_runs() -> None:
    for log in run_ranks(2, gathers_and_gemms):
        assert log == ["gather", "gather", "GEMM", "gather", "GEMM", "GEMM"]


def modified_operand() -> None:
    from tests.pipelines import splits

    start_parallel()
    layer = _layer("row", False, torch.float32)
    x = torch.randn(4, 2, 12)
    with splits().defer(0, 0):
        layer(x)[0].sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        splits().run(0, 0)


def test_an_operand_that_was_overwritten_is_noticed() -> None:
    run_ranks(1, modified_operand)


# -- grouped experts -------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """Stands for grouped_gemm, in plain torch: the tokens of each expert times its matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        sizes: torch.Tensor,
        trans_b: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, experts, sizes)
        ctx.trans_b = trans_b
        return _product(tokens, experts, sizes, trans_b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, experts, sizes = ctx.saved_tensors
        grad_tokens = grad_experts = None
        if ctx.needs_input_grad[0]:
            grad_tokens = _product(grad.contiguous(), experts, sizes, not ctx.trans_b)
        if ctx.needs_input_grad[1]:
            parts = zip(
                tokens.split(sizes.tolist()), grad.split(sizes.tolist()), strict=True
            )
            products = [g.t() @ t if ctx.trans_b else t.t() @ g for t, g in parts]
            grad_experts = torch.stack(products)
        return grad_tokens, grad_experts, None, None


def _product(
    tokens: torch.Tensor, experts: torch.Tensor, sizes: torch.Tensor, trans_b: bool
) -> torch.Tensor:
    parts = zip(tokens.split(sizes.tolist()), experts, strict=True)
    return torch.cat([t @ (e.t() if trans_b else e) for t, e in parts])


def _gmm(a: Any, b: Any, batch_sizes: Any, trans_b: bool = False) -> Any:
    return _Grouped.apply(a, b, batch_sizes, trans_b)


def grouped_experts(overlap: bool) -> None:
    from megatron.core.transformer.moe import experts, grouped_gemm_util

    from megatron_ext.patches.split_backward import _grouped_ops
    from tests.runtime import small_gpt

    grouped_gemm_util.grouped_gemm = SimpleNamespace()
    experts.gg.ops = _grouped_ops(SimpleNamespace(gmm=_gmm))
    start_parallel()
    settings = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "add_bias_linear": False,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "ddp": {"overlap_grad_reduce": overlap},
    }
    fused, split = small_gpt.build(**settings), small_gpt.build(**settings)
    names = small_gpt.deferred(split)
    assert {n for n in names if "experts" in n} == {
        f"decoder.layers.{layer}.mlp.experts.weight{weight}"
        for layer in (0, 1)
        for weight in (1, 2)
    }
    for _ in range(2):
        small_gpt.fused_step(fused)
        small_gpt.split_step(split)
        small_gpt.assert_equal(small_gpt.gradients(split), small_gpt.gradients(fused))


@pytest.mark.parametrize("overlap", [False, True])
def test_grouped_experts(overlap: bool) -> None:
    if find_spec("megatron.core.transformer.moe.grouped_gemm_util") is None:
        pytest.skip("this release has no experts that use the library grouped_gemm")
    run_ranks(1, grouped_experts, overlap)
