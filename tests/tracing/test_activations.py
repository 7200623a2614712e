"""Memory that a forward keeps is counted in its graph."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from megatron_ext.tracing.recorder import Recorder
from megatron_ext.tracing.session import Session, kept_bytes
from tests.tracing.test_recorder import HEADER


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


def test_what_is_offloaded_stays_where_it_is(tmp_path: Path) -> None:
    """As Megatron's, and Transformer Engine's: what was brought back once is gone."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor
        return len(kept) - 1

    model = torch.nn.Linear(8, 8)
    model.config = Namespace(cpu_offloading=True)  # type: ignore[assignment]
    session = Session(Namespace(job=None, iteration=None))  # type: ignore[arg-type]
    session.recorder = Recorder(lambda: (tmp_path, HEADER, None))
    session.begin_iteration(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
        output = model(torch.randn(4, 8, requires_grad=True))
    session.made(0, [output], model)
    output.sum().backward()
    assert not kept
    session.close()
