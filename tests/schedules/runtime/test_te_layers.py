"""Transformer Engine's layers, by stand-ins that keep and work off weight gradients as its do."""

from __future__ import annotations

import queue
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.runtime import te_layers
from megatron_ext.schedules.runtime.split import SplitBackward, prepare_config, why_not


class _Store:
    """`WeightGradStore` of transformer_engine.pytorch.module._common."""

    def __init__(self, delay: bool) -> None:
        self.context = queue.Queue() if delay else None
        self.enabled = delay

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.enabled = False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: _Store) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.store = weight, store
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.store.delay_wgrad_compute():
            ctx.store.context.put((x, grad))
        else:
            ctx.weight.main_grad.add_(grad.t() @ x)
        return grad @ weight, None, None


class _Layer(torch.nn.Module):
    """A layer with gradient accumulation fusion."""

    def __init__(self, delay: bool = True) -> None:
        super().__init__()
        self.wgrad_store = _Store(delay)
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.weight.main_grad = torch.zeros(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.wgrad_store)

    def backward_dw(self) -> None:
        assert self.wgrad_store.enabled
        x, grad = self.wgrad_store.context.get_nowait()
        self.weight.main_grad.add_(grad.t() @ x)


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


def _loss(chunk: _Chunk, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return chunk(torch.randn(5, 4, generator=generator)).square().sum()


def _main_grads(chunk: _Chunk) -> list[torch.Tensor]:
    return [layer.weight.main_grad for layer in (chunk.first, chunk.twice, chunk.pair)]


def _backwards(split: SplitBackward, chunk: _Chunk, count: int, stage: int = 1) -> None:
    for microbatch in range(count):
        with split.defer(stage, microbatch):
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


def test_another_order_is_refused() -> None:
    chunk, split = _Chunk(delay=True), SplitBackward()
    split.register_modules(0, chunk)
    _backwards(split, chunk, 2, stage=0)
    with pytest.raises(ScheduleError, match="W of micro-batch 1 comes before W of 0"):
        split.run(0, 1)


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


def _config(**settings: Any) -> SimpleNamespace:
    usual = {
        "cuda_graph_impl": "none",
        "defer_embedding_wgrad_compute": False,
        "overlap_moe_expert_parallel_comm": False,
        "enable_autocast": False,
        "transformer_impl": "transformer_engine",
        "gradient_accumulation_fusion": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "tp_comm_overlap": False,
        "delay_wgrad_compute": False,
    }
    return SimpleNamespace(**{**usual, **settings})


@pytest.fixture
def te_version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that a version of Transformer Engine is installed."""
    from megatron.core import utils

    def pretend(version: str) -> None:
        from packaging.version import Version

        spec = ModuleSpec("transformer_engine", None)
        monkeypatch.setattr(te_layers, "find_spec", lambda _name: spec)
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
    assert [c.delay_wgrad_compute for c in (absent, local, config)] == [False, False, True]


@pytest.mark.parametrize(
    ("version", "settings", "reason"),
    [
        ("2.2.0", {}, "Transformer Engine 2.2.0"),
        ("2.9.0", {"gradient_accumulation_fusion": False}, "accumulation fusion"),
        ("2.9.0", {"add_bias_linear": True}, "--disable-bias-linear"),
        ("2.9.0", {"add_qkv_bias": True}, "--add-qkv-bias"),
        ("2.9.0", {"tp_comm_overlap": True}, "--tp-comm-overlap"),
    ],
)
def test_what_its_layers_cannot_do_is_said(
    version: str, settings: dict[str, Any], reason: str, te_version: Any
) -> None:
    te_version(version)
    answer = why_not(_config(**settings))
    assert answer is not None
    assert reason in answer
    assert why_not(_config(transformer_impl="local", **settings)) is None


def test_its_layers_can_be_split(te_version: Any) -> None:
    assert why_not(_config(add_bias_linear=True)) is None  # it is not installed
    te_version("2.3.0")
    assert why_not(_config()) is None
