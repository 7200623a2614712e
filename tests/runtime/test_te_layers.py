"""Transformer Engine's layers, by stand-ins that keep and work off weight gradients as its do."""

from __future__ import annotations

import gc
import queue
import weakref
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config import incompatible
from megatron_ext.config.incompatible import te_leaves_whole, why_not_split
from megatron_ext.patches.split_backward import prepare_config
from megatron_ext.runtime import split_te
from megatron_ext.runtime.split import SplitBackward


class _Store:
    """`WeightGradStore` of transformer_engine.pytorch.module._common."""

    def __init__(self, delay: bool) -> None:
        self.context = queue.Queue() if delay else None
        self.enabled = delay

    def put(self, operands: list[Any], product: Any) -> None:
        assert self.enabled
        self.context.put([operands, product])

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        store: _Store,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.store, ctx.biased = weight, store, bias is not None
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias_grad = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([x, grad], partial(_products, ctx.weight, biased=ctx.biased))
        else:
            bias_grad = _products(ctx.weight, x, grad, ctx.biased)
        return grad @ weight, None, bias_grad, None


def _products(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, biased: bool
) -> torch.Tensor | None:
    """Add to the weight's gradient, and return the bias's: one product of matrices makes both."""
    weight.main_grad.add_(grad.t() @ x)
    return grad.sum(0) if biased else None


class _Layer(torch.nn.Module):
    """A layer with gradient accumulation fusion."""

    def __init__(self, delay: bool = True) -> None:
        super().__init__()
        self.wgrad_store = _Store(delay)
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.weight.main_grad = torch.zeros(4, 4)
        self.use_bias, self.fuse_wgrad_accumulation = False, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, None, self.wgrad_store)

    def backward_dw(self) -> None:
        """Do as `TransformerEngineBaseModule.backward_dw`."""
        assert self.wgrad_store.enabled
        operands, product = self.wgrad_store.context.get_nowait()
        bias_grad = product(*operands)
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = bias_grad.to(self.bias.dtype)


class _BiasedLayer(_Layer):
    """A layer with a bias: added by the product, behind it, or by who gets it returned."""

    def __init__(
        self, delay: bool, *, returned: bool = False, behind: bool = False
    ) -> None:
        super().__init__(delay)
        self.bias = torch.nn.Parameter(torch.randn(4))
        self.bias.main_grad = torch.zeros(4)
        self.use_bias, self.apply_bias, self.gemm_bias_unfused_add = (
            True,
            not returned,
            behind,
        )
        self.bias.register_post_accumulate_grad_hook(_hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_product = self.apply_bias and not self.gemm_bias_unfused_add
        output = _Linear.apply(
            x, self.weight, self.bias if in_product else None, self.wgrad_store
        )
        return output if in_product else output + self.bias


def _hook(parameter: torch.Tensor) -> None:
    """Do as DDP's hook."""
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


class _TwoWeights(_Layer):
    """Takes two entries at once, as `LayerNormMLP` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))

    def backward_dw(self) -> None:
        super().backward_dw()
        super().backward_dw()


class _Chunk(torch.nn.Module):
    """Megatron's own modules have a `backward_dw` as well, which calls that of their parts."""

    def __init__(self, delay: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.twice = _Layer(delay), _Layer(delay)
        self.pair = _TwoWeights(delay)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.pair(self.twice(self.twice(self.first(x)))))

    def backward_dw(self) -> None:
        raise AssertionError


def _loss(chunk: torch.nn.Module, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return chunk(torch.randn(5, 4, generator=generator)).square().sum()


def _main_grads(chunk: _Chunk) -> list[torch.Tensor]:
    return [layer.weight.main_grad for layer in (chunk.first, chunk.twice, chunk.pair)]


def _backwards(
    split: SplitBackward, chunk: torch.nn.Module, count: int, stage: int = 1
) -> None:
    for microbatch in range(count):
        with split.postponing(stage):
            loss = _loss(chunk, microbatch)
        with split.defer(stage, microbatch):
            loss.backward()


def test_each_w_takes_the_entries_of_its_micro_batch() -> None:
    expected = []
    for count in (1, 2, 3):
        whole = _Chunk(delay=False)
        for microbatch in range(count):
            _loss(whole, microbatch).backward()
        expected.append(_main_grads(whole))
    chunk, split = _Chunk(delay=True), SplitBackward()
    SplitBackward().register_modules(1, chunk)
    for _ in range(2):  # as before each step
        split.register_modules(1, chunk)
    _backwards(split, chunk, 3)
    assert split.pending() == [(1, 0), (1, 1), (1, 2)]
    assert not any(gradient.any() for gradient in _main_grads(chunk))
    for microbatch, gradients in enumerate(expected):
        split.run(1, microbatch)
        assert all(map(torch.allclose, _main_grads(chunk), gradients))
    assert split.pending() == []
    split.run(1, 2)  # nothing is left to do


def test_a_layer_with_a_weight_that_was_frozen_after_its_forward_is_left_whole() -> (
    None
):
    chunk, whole, split = _Chunk(delay=True), _Chunk(delay=False), SplitBackward()
    split.register_modules(1, chunk)
    with split.postponing(1):
        loss = _loss(chunk, 0)
    expected_loss = _loss(whole, 0)
    for model in (chunk, whole):
        model.first.weight.requires_grad_(False)
    expected_loss.backward()
    with split.defer(1, 0):
        loss.backward()
    split.run(1, 0)
    for gradient, expected in zip(_main_grads(chunk), _main_grads(whole), strict=True):
        assert torch.equal(gradient, expected)


def test_layers_are_left_alone_where_no_backward_splits() -> None:
    chunk = _Chunk(delay=True)
    SplitBackward().register_modules(1, chunk, splits=False)
    assert all(
        layer.wgrad_store.enabled
        for layer in chunk.modules()
        if isinstance(layer, _Layer)
    )
    SplitBackward().register_modules(1, chunk)
    assert not any(
        layer.wgrad_store.enabled
        for layer in chunk.modules()
        if isinstance(layer, _Layer)
    )


def test_a_backward_in_parts_is_one_w() -> None:
    """As the nodes of a schedule plan run it, those of a partner in between."""
    layers = [_Layer(), _Layer()]
    split = SplitBackward()
    split.register_modules(1, torch.nn.Sequential(*layers))
    for microbatch in range(2):
        with split.postponing(1):
            middle = layers[0](torch.ones(2, 4))
            cut = middle.detach().requires_grad_()
            loss = layers[1](cut).sum()
        with split.defer(1, microbatch):
            loss.backward()
        with split.defer(1, microbatch):
            middle.backward(cut.grad)
    assert split.pending() == [(1, 0), (1, 1)]
    split.run(1, 0)
    assert split.pending() == [(1, 1)]
    first = [layer.weight.main_grad.clone() for layer in layers]
    assert all(gradient.any() for gradient in first)
    split.run(1, 1)
    assert split.pending() == []
    for layer, gradient in zip(layers, first, strict=True):
        assert torch.allclose(layer.weight.main_grad, 2 * gradient)


class _UnfusedLinear(torch.autograd.Function):
    """Gradients without accumulation fusion: the sum in `grad` is what DDP adds."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: _Store
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.store.delay_wgrad_compute():
            ctx.store.put([x, grad], lambda x, grad: grad.t() @ x)
            return grad @ weight, None, None
        return grad @ weight, grad.t() @ x, None


class _UnfusedLayer(_Layer):
    def __init__(self, delay: bool, *, by_ddp: bool) -> None:
        super().__init__(delay)
        self.fuse_wgrad_accumulation = False
        self.nodes = [self._hooked(self.weight)] if by_ddp else []
        if not by_ddp:
            del self.weight.main_grad

    def _hooked(self, weight: torch.nn.Parameter) -> Any:
        """Do as DDP: it hooks the node that autograd reaches without a gradient too."""
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 4), False
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: _ddp_hook(weight))
        return node

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _UnfusedLinear.apply(x, self.weight, self.wgrad_store)

    def backward_dw(self) -> None:
        operands, product = self.wgrad_store.context.get_nowait()
        self.weight.grad = product(*operands)


def _ddp_hook(weight: torch.Tensor) -> None:
    assert weight.grad is not None, "it is not safe to overlap reductions"
    if not weight.grad_added_to_main_grad:
        weight.main_grad.add_(weight.grad)
    weight.grad = None


class _GroupedProducts(torch.autograd.Function):
    """What `GroupedLinear` does without accumulation fusion, with half of the tokens each."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, store: _Store, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.store = store
        return torch.cat([x @ w.t() for x, w in zip(x.chunk(2), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        halves = grad.chunk(2)
        grad_x = torch.cat([g @ w for g, w in zip(halves, weights, strict=True)])
        gradients = list(
            torch.full((2, 4, 4), torch.nan)
        )  # memory that nothing has filled

        def products(x: Any, halves: Any, gradients: Any) -> None:
            for each, half, into in zip(x, halves, gradients, strict=True):
                into.copy_(half.t() @ each)

        if ctx.store.delay_wgrad_compute():
            ctx.store.put([x.chunk(2), halves, gradients], products)
        else:
            products(x.chunk(2), halves, gradients)
        return grad_x, None, *gradients  # filled or not


class _UnfusedExperts(_UnfusedLayer):
    """Two experts."""

    def __init__(self, delay: bool, *, by_ddp: bool) -> None:
        super().__init__(delay, by_ddp=by_ddp)
        del self.weight
        self.num_gemms = 2
        self.weight0, self.weight1 = (
            torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)
        )
        self.nodes = [self._hooked(weight) for weight in self.parameters() if by_ddp]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GroupedProducts.apply(x, self.wgrad_store, self.weight0, self.weight1)

    def backward_dw(self) -> None:
        operands, product = self.wgrad_store.context.get_nowait()
        product(*operands)
        self.weight0.grad, self.weight1.grad = operands[2]


class _Replaced(_UnfusedLayer):
    """A layer that holds the weight of a fused operation (--use-transformer-engine-op-fuser)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class _Unfused(torch.nn.Module):
    def __init__(self, delay: bool, *, by_ddp: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.once, self.twice = (_UnfusedLayer(delay, by_ddp=by_ddp) for _ in range(2))
        self.experts = _UnfusedExperts(delay, by_ddp=by_ddp)
        self.replaced = _Replaced(delay, by_ddp=by_ddp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.replaced(self.twice(self.twice(self.once(x)))))


@pytest.mark.parametrize("by_ddp", [True, False])
def test_gradients_without_accumulation_fusion_are_those_of_whole_backwards(
    by_ddp: bool,
) -> None:
    """Bit for bit: in `main_grad`, or without DDP in `grad`; a whole backward is among them."""
    chunk, whole, split = (
        *(_Unfused(d, by_ddp=by_ddp) for d in (True, False)),
        SplitBackward(),
    )
    split.register_modules(0, chunk)
    _backwards(split, chunk, 2, stage=0)
    for microbatch in range(2):
        split.run(0, microbatch)
        _loss(whole, microbatch).backward()
    for model in (chunk, whole):
        _loss(model, 2).backward()
    for found, expected in zip(chunk.parameters(), whole.parameters(), strict=True):
        name = "main_grad" if by_ddp else "grad"
        assert torch.equal(getattr(found, name), getattr(expected, name))
        assert (found.grad is None) == by_ddp


class _InBuffer(_Layer):
    """A layer that gathers its input for W in a buffer, as with --tp-comm-overlap."""

    buffer = torch.empty(5, 4)

    def __init__(self, delay: bool) -> None:
        super().__init__(delay)
        self.ub_bulk_dgrad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(
            x, self.weight, None, _Gathering(self.wgrad_store, self.buffer)
        )


class _Gathering:
    """A store whose layers fill one buffer, one after the other."""

    def __init__(self, store: _Store, buffer: torch.Tensor) -> None:
        self._store, self._buffer = store, buffer

    def delay_wgrad_compute(self) -> bool:
        return self._store.delay_wgrad_compute()

    def put(self, operands: list[torch.Tensor], product: Any) -> None:
        self._store.put([self._buffer.copy_(operands[0]), operands[1]], product)


def test_operands_in_a_buffer_outlive_the_next_layer() -> None:
    chunk, whole, split = torch.nn.Sequential(), torch.nn.Sequential(), SplitBackward()
    for model, delay in ((chunk, True), (whole, False)):
        torch.manual_seed(4)
        model.extend(_InBuffer(delay) for _ in range(3))
    split.register_modules(0, chunk)
    _backwards(split, chunk, 2, stage=0)
    for microbatch in range(2):
        split.run(0, microbatch)
        _loss(whole, microbatch).backward()
    for found, expected in zip(chunk, whole, strict=True):
        assert torch.equal(found.weight.main_grad, expected.weight.main_grad)


class _Quantised:
    """The operand of a product in 8 bits: Transformer Engine takes its tensors out and back."""

    def __init__(self) -> None:
        self.data, self.scale = torch.ones(2), None

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], _Quantised]:
        tensors = [self.data, self.scale]
        self.data = self.scale = None
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> None:
        self.data, self.scale = tensors


def test_quantised_operands_get_memory_of_their_own() -> None:
    operand = _Quantised()
    buffer = operand.data
    assert split_te._copied(operand) is operand
    buffer.zero_()
    assert operand.data.tolist() == [1.0, 1.0]


class _Biased(torch.nn.Module):
    """Layers as attention and MLP have them."""

    def __init__(self, delay: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv = _BiasedLayer(delay)
        self.projection = _BiasedLayer(delay, behind=True)
        self.mlp = _BiasedLayer(delay, returned=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.projection(self.qkv(x)))


def test_biases_get_their_gradients_in_i() -> None:
    chunk, whole, split = _Biased(delay=True), _Biased(delay=False), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 2, stage=0)
    for microbatch in range(2):
        _loss(whole, microbatch).backward()
    expected = {name: p.main_grad for name, p in whole.named_parameters()}
    in_i = {"qkv.weight", "qkv.bias", "projection.bias", "mlp.bias"}
    for name, parameter in chunk.named_parameters():
        done = expected[name] if name in in_i else torch.zeros_like(expected[name])
        assert torch.equal(parameter.main_grad, done), name
    for microbatch in range(2):
        split.run(0, microbatch)
    for name, parameter in chunk.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name]), name
        assert parameter.grad is None
    assert split.pending() == []


def test_gradients_of_biases_without_ddp_stay() -> None:
    chunk, split = _BiasedLayer(True, returned=True), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 1, stage=0)
    chunk.bias.grad = torch.full((4,), 3.0)
    split.run(0, 0)
    assert chunk.bias.grad.tolist() == [3.0] * 4


def _always(_weights: Any) -> bool:
    return True


def test_a_layer_of_two_weights_with_biases_is_left_whole() -> None:
    layer = _TwoWeights(delay=True)
    layer.use_bias, layer.fc1_bias = True, torch.nn.Parameter(torch.zeros(4))
    assert not split_te.PostponingLayers(layer, layer.wgrad_store.put, _always).layers
    assert not layer.wgrad_store.enabled


def test_experts_in_one_parameter_postpone_only_what_they_accumulate() -> None:
    layer = _Layer()
    layer.single_grouped_weight = True
    assert split_te.PostponingLayers(layer, layer.wgrad_store.put, _always).layers
    layer.fuse_wgrad_accumulation = False
    assert not split_te.PostponingLayers(layer, layer.wgrad_store.put, _always).layers


def test_a_backward_that_is_not_split_computes_all() -> None:
    chunk, whole, split = _Chunk(delay=True), _Chunk(delay=False), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 1, stage=0)
    _loss(chunk, 1).backward()
    _loss(whole, 1).backward()
    assert all(map(torch.allclose, _main_grads(chunk), _main_grads(whole)))
    split.run(0, 0)
    _loss(whole, 0).backward()
    assert all(map(torch.allclose, _main_grads(chunk), _main_grads(whole)))


def test_ws_may_run_in_another_order_than_backwards() -> None:
    chunk, whole, split = _Chunk(delay=True), _Chunk(delay=False), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 3, stage=0)
    for microbatch in (1, 2, 0):
        split.run(0, microbatch)
        _loss(whole, microbatch).backward()
        assert all(map(torch.allclose, _main_grads(chunk), _main_grads(whole)))


def test_what_a_failed_step_left_is_dropped() -> None:
    chunk, split = _Chunk(delay=True), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 2, stage=0)
    split.clear()
    assert split.pending() == []
    _backwards(split, chunk, 1, stage=0)
    split.run(0, 0)
    whole = _Chunk(delay=False)
    _loss(whole, 0).backward()
    assert all(map(torch.allclose, _main_grads(chunk), _main_grads(whole)))


class _OverwritingLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, first: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.first = weight, first
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.first:
            ctx.weight.main_grad.zero_()
        ctx.weight.main_grad.add_(grad.t() @ x)
        return grad @ weight, None, None


class _Overwriting(torch.nn.Module):
    """A layer whose first micro-batch of a step overwrites the gradient, as Megatron wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.weight.main_grad = torch.zeros(4, 4)
        self.fuse_wgrad_accumulation = self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, self.is_first_microbatch = self.is_first_microbatch, False
        return _OverwritingLinear.apply(x, self.weight, first)


@pytest.mark.parametrize("forwards", [(0, 1), (1, 0)])
def test_a_gradient_before_that_of_the_first_forward_is_lost(
    forwards: tuple[int, int],
) -> None:
    layer = _Overwriting()
    losses = {microbatch: _loss(layer, microbatch) for microbatch in forwards}
    for microbatch in range(2):
        losses[microbatch].backward()
    expected = torch.zeros(4, 4)
    for microbatch in range(2):
        single = _Overwriting()
        _loss(single, microbatch).backward()
        expected += single.weight.main_grad
    assert torch.allclose(layer.weight.main_grad, expected) == (forwards == (0, 1))


def test_layers_that_overwrite_are_known() -> None:
    chunk = torch.nn.Sequential(torch.nn.LayerNorm(4), _Overwriting())
    assert split_te.overwrites_first(chunk)
    chunk[
        1
    ].disable_parameter_transpose_cache = True  # then Megatron names no first one
    assert not split_te.overwrites_first(chunk)
    chunk[1].disable_parameter_transpose_cache, chunk[1].fuse_wgrad_accumulation = (
        False,
        False,
    )
    assert not split_te.overwrites_first(chunk)
    assert not split_te.overwrites_first(_Chunk(delay=True))


class _Config(SimpleNamespace):
    """A configuration; unlike its base class, it can be referenced weakly."""


def _config(**settings: Any) -> _Config:
    usual = {
        "cuda_graph_impl": "none",
        "defer_embedding_wgrad_compute": False,
        "overlap_moe_expert_parallel_comm": False,
        "enable_autocast": False,
        "transformer_impl": "transformer_engine",
        "gradient_accumulation_fusion": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "multi_latent_attention": False,
        "tp_comm_overlap": False,
        "tp_comm_bulk_wgrad": True,
        "delay_wgrad_compute": False,
    }
    return _Config(**{**usual, **settings})


@pytest.fixture
def te_version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that a version of Transformer Engine is installed."""
    from megatron.core import utils

    def pretend(version: str) -> None:
        from packaging.version import Version

        spec = ModuleSpec("transformer_engine", None)
        monkeypatch.setattr(incompatible, "find_spec", lambda _name: spec)
        monkeypatch.setattr(utils, "get_te_version", lambda: Version(version))
        monkeypatch.setattr(utils, "_te_version", Version(version))
        monkeypatch.setattr(
            utils, "is_te_min_version", lambda least: Version(version) >= Version(least)
        )

    return pretend


def test_layers_are_told_before_they_are_built(te_version: Any) -> None:
    absent, local, config = _config(), _config(transformer_impl="local"), _config()
    prepare_config(absent)
    te_version("2.9.0")
    prepare_config(local)
    prepare_config(config)
    assert [c.delay_wgrad_compute for c in (absent, local, config)] == [
        False,
        False,
        True,
    ]
    assert not config.tp_comm_bulk_wgrad


def test_old_layers_cannot_postpone(te_version: Any) -> None:
    te_version("2.2.0")
    assert "Transformer Engine 2.2.0" in (why_not_split(_config()) or "")
    assert why_not_split(_config(transformer_impl="local")) is None


def test_its_layers_can_be_split(te_version: Any) -> None:
    assert why_not_split(_config(tp_comm_overlap=True)) is None  # it is not installed
    te_version("2.3.0")
    assert why_not_split(_config()) is None
    assert why_not_split(_config(add_bias_linear=True)) is None
    assert (
        why_not_split(_config(tp_comm_overlap=True, gradient_accumulation_fusion=False))
        is None
    )


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({}, ""),
        (
            {"add_bias_linear": True},
            "of the projections to queries, keys and values are",
        ),
        (
            {"add_qkv_bias": True, "moe_grouped_gemm": True},
            "queries, keys and values are",
        ),
        ({"add_bias_linear": True, "multi_latent_attention": True}, ""),
        (
            {
                "add_bias_linear": True,
                "multi_latent_attention": True,
                "moe_grouped_gemm": True,
            },
            "gradients of the first layer of grouped experts are",
        ),
        (
            {"add_bias_linear": True, "moe_grouped_gemm": True, "moe_latent_size": 8},
            "and values and of the first layer of grouped experts and of the projections of latent",
        ),
        ({"moe_single_grouped_weight": True}, ""),
        (
            {"moe_single_grouped_weight": True, "gradient_accumulation_fusion": False},
            "of grouped experts are computed in I",
        ),
        ({"use_transformer_engine_op_fuser": True}, "of MLPs are computed in I"),
        ({"fp8_output_proj": True, "fp8": "e4m3", "fp8_recipe": "delayed"}, ""),
        (
            {"fp8_output_proj": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
            "of the output layer are computed in I",
        ),
    ],
)
def test_layers_that_are_left_whole_are_named(
    settings: dict[str, Any], whole: str, te_version: Any
) -> None:
    config = _config(**settings)
    assert not [*te_leaves_whole(config)]  # it is not installed
    te_version("2.9.0")
    notices = [*te_leaves_whole(config)]
    assert len(notices) == bool(whole)
    assert not whole or whole in notices[0]


@pytest.mark.parametrize("is_on", [True, False], ids=["the user's", "built for W"])
def test_closing_restores_the_layers(is_on: bool) -> None:
    chunk, split = _Chunk(delay=True), SplitBackward()
    store = chunk.first.wgrad_store
    store.enabled = is_on
    queue_of_layer = store.context
    split.register_modules(0, chunk)
    _backwards(split, chunk, 1, stage=0)
    split.run(0, 0)
    split.close()
    assert store.enabled == is_on
    assert store.context is queue_of_layer
    assert "put" not in vars(store)


def test_another_chunk_of_a_stage_restores_the_layers_of_the_one_before() -> None:
    chunk, split = _Chunk(delay=True), SplitBackward()
    split.register_modules(0, chunk)
    split.register_modules(0, _Chunk(delay=True))
    assert chunk.first.wgrad_store.enabled
    assert "put" not in vars(chunk.first.wgrad_store)


def test_a_layer_whose_configuration_no_longer_defers_is_left_whole() -> None:
    """Megatron's `backward_dw` would leave its entries in the queue."""
    layer = _Layer()
    layer.config = _config()
    assert not split_te.PostponingLayers(layer, layer.wgrad_store.put, _always).layers
    layer.config.delay_wgrad_compute = True
    assert split_te.PostponingLayers(layer, layer.wgrad_store.put, _always).layers


def test_closing_lets_go_of_a_model_whose_weights_autograd_holds() -> None:
    """DDP keeps the accumulators of its weights, and a layer keeps its DDP."""
    layer: Any = torch.nn.Linear(2, 2)
    layer.accumulator = torch.autograd.graph.get_gradient_edge(layer.weight).node
    split = SplitBackward()
    split.register_modules(0, layer)
    split._watch(layer.weight, id(layer.weight))
    split.close()
    model = weakref.ref(layer)
    del layer
    gc.collect()
    assert model() is None
