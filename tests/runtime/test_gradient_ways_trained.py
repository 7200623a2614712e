"""Trainings whose weights have hooks and other uses: the bits of Megatron's own schedule."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.runtime.capture import GPT, PP2, Captured, run_here, train
from tests.runtime.test_equality import OVERLAP, TP2, UNCLIPPED, assert_equal
from tests.runtime.test_gradient_ways import Lines

_FLAGS = GPT + UNCLIPPED + OVERLAP + PP2 + "--untie-embeddings-and-output-weights "


def run_with_ways(model: str, argv: list[str], mean_delay_s: float) -> Captured:
    """Train as one rank, with a model that does all of it at once."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.mlp import MLP

    build, run_mlp, run_model = GPTModel.__init__, MLP.forward, GPTModel.forward

    def build_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # On one of the tensor-parallel ranks, as where only new tokens train.
        if self.post_process and parallel_state.get_tensor_model_parallel_rank() == 0:
            rows = torch.arange(self.output_layer.weight.size(0))[:, None] >= 9
            self.output_layer.weight.register_hook(lambda gradient: gradient * rows)

    def mlp_with_other_uses(
        self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.is_grad_enabled():
            probe = hidden.detach().requires_grad_()
            inner = run_mlp(self, probe)[0].square().sum()
            weight = self.linear_fc2.weight
            saliency, gradient = torch.autograd.grad(inner, (probe, weight))
            hidden = hidden + 0.01 * saliency.sign() * (1 + gradient.norm())
        output, bias = run_mlp(self, hidden, *args, **kwargs)
        wide = torch.nn.functional.linear(hidden, self.linear_fc1.weight)
        return output + 0.1 * wide @ self.linear_fc2.weight.t(), bias

    def model_with_penalty(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = run_model(self, *args, **kwargs)
        if not self.post_process:
            return output
        penalized = self.decoder.layers[-1].self_attention.linear_proj.weight
        return output + 0.01 * penalized.float().square().sum()

    GPTModel.__init__, GPTModel.forward = build_with_hook, model_with_penalty
    MLP.forward = mlp_with_other_uses
    return run_here(model, argv, mean_delay_s)


@cache
def _stock(num_ranks: int, flags: str) -> Captured:
    return train(num_ranks, flags, run=run_with_ways)


@pytest.mark.parametrize(
    "ours",
    ["--pipeline-schedule zb-h1 ", "--pipeline-schedule zb-v ", "--use-dpp "],
)
def test_hooks_and_other_uses(ours: str) -> None:
    assert_equal(train(2, _FLAGS + ours, run=run_with_ways), _stock(2, _FLAGS))


def run_with_a_detached_layer(
    model: str, argv: list[str], mean_delay_s: float
) -> Captured:
    """Train as one rank; one micro-batch passes the last layer without a graph behind it."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    run_layer, lines, calls = TransformerLayer.forward, Lines(), 0
    logging.getLogger("megatron_ext.runtime.compute").addHandler(lines)

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if self.layer_number == self.config.num_layers:
            calls += 1
            if calls == 2:
                hidden_states = hidden_states.detach()
        return run_layer(self, hidden_states, *args, **kwargs)

    TransformerLayer.forward = forward
    captured = run_here(model, argv, mean_delay_s)
    told = [line for line in lines.lines if "no gradient reaches the input" in line]
    is_last_stage = PP2.split()[0] in argv and any(captured.losses)
    assert len(told) == is_last_stage
    assert not told or told[0].startswith("stage 1, micro-batch 1:")
    return captured


_UNTIED = GPT + UNCLIPPED + "--untie-embeddings-and-output-weights "


@cache
def _single_with_a_detached_layer() -> Captured:
    return train(1, _UNTIED, run=run_with_a_detached_layer)


def test_a_stage_whose_input_gets_no_gradient_trains_as_on_one_device() -> None:
    for schedule in ("1f1b", "zb-h1"):
        ours = f"{PP2}--pipeline-schedule {schedule} "
        trained = train(2, _UNTIED + ours, run=run_with_a_detached_layer)
        assert_equal(trained, _single_with_a_detached_layer())


@pytest.mark.usefixtures("a_training_loop")
def test_backward_ranks_name_a_stage_whose_input_gets_no_gradient() -> None:
    argv = (_UNTIED + PP2 + "--forward-backward-disaggregating ").split()
    ranks = run_ranks(4, run_with_a_detached_layer, "gpt", argv, 0.0)
    [losses] = [captured.losses for captured in ranks if any(captured.losses)]
    assert losses == _single_with_a_detached_layer().losses


@pytest.mark.slow
def test_a_hook_on_one_of_the_ranks_that_share_a_sequence() -> None:
    flags = _FLAGS + TP2
    ours = train(4, flags + "--pipeline-schedule zb-h1 ", run=run_with_ways)
    assert_equal(ours, _stock(4, flags))
