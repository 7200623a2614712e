"""Memory that a forward keeps is counted in its graph."""

from __future__ import annotations

import torch

from megatron_ext.tracing.activations import kept_bytes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_each_kept_storage_counts_once_and_weights_do_not() -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    hidden = model(x)  # keeps x, which is 128 bytes
    assert kept_bytes([hidden], model) == 128
    squashed = torch.tanh(hidden)  # keeps its own output
    assert kept_bytes([squashed, None], model) == 256
    assert kept_bytes([Doubled.apply(squashed), squashed], model) == 256
    assert kept_bytes([Doubled.apply(hidden)], model) == 256
    squashed.sum().backward()


def test_without_a_graph_nothing_is_kept() -> None:
    model = torch.nn.Linear(8, 8)
    assert kept_bytes([torch.ones(3), None], model) == 0
