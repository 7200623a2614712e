"""Memory that the actions of a stage leave behind, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.runtime.compute import StageCompute
from megatron_ext.schedules import Action
from tests.ranks import run_ranks


def _compute(*, deallocates: bool = True) -> StageCompute:
    call: Any = SimpleNamespace(
        config=SimpleNamespace(deallocate_pipeline_outputs=deallocates)
    )
    table: Any = None
    return StageCompute(call, table)


def _output(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, 5, dtype=dtype, requires_grad=True) * 2


def test_release_frees_the_data_and_keeps_the_graph() -> None:
    outputs = [_output(), _output(torch.bfloat16), _output()]
    graphs = [output.grad_fn for output in outputs]
    data = [StorageWeakRef(output.untyped_storage()) for output in outputs]
    _compute().release([*outputs, None])
    assert all(storage.expired() for storage in data)
    assert [output.grad_fn for output in outputs] == graphs
    # Upstream's `custom_backward` asks for a single element, of the dtype of the gradient.
    assert [output.shape for output in outputs] == [(1,)] * 3
    assert [output.dtype for output in outputs] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]


def test_release_keeps_what_megatron_was_told_to_keep() -> None:
    output = _output()
    _compute(deallocates=False).release([output])
    assert output.shape == (3, 5)


def _a_recomputed_layer() -> list[Any]:
    """Run a layer of two parts that draw, as it is and recomputed; return what each leaves."""
    from megatron.core.pipeline_parallel import utils

    from megatron_ext import devices
    from megatron_ext.features.pairs.plans import PlannedCompute

    devices.current()
    found = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        calls: list[str] = []
        weights = [torch.ones(4, requires_grad=True) for _ in range(2)]

        def part(
            name: str, weight: torch.Tensor, calls: list[str] = calls
        ) -> utils.ScheduleNode:
            def run(x: torch.Tensor) -> torch.Tensor:
                calls.append(name)
                return torch.nn.functional.dropout(torch.tanh(x * weight))

            event = torch.cuda.Event()
            return utils.ScheduleNode(run, torch.cuda.current_stream, event, name=name)

        layer = SimpleNamespace(
            attn=part("attn", weights[0]), mlp=part("mlp", weights[1])
        )
        layer.moe_dispatch = layer.moe_combine = utils.NoopScheduleNode()
        if recomputes:
            PlannedCompute._recompute(layer)
        begun = torch.arange(4.0, requires_grad=True)
        made = layer.mlp.forward(layer.attn.forward(begun))
        held = [node.inputs for node in (layer.attn, layer.mlp) if node.inputs]
        torch.rand(3)  # other micro-batches draw between
        gradient = layer.attn.backward(layer.mlp.backward(torch.ones(4)))
        found.append((
            len(held), made.tolist(), gradient.tolist(), [w.grad.tolist() for w in weights],
            calls, torch.rand(1).item(),
        ))  # fmt: skip
    return found


def test_a_recomputed_layer_keeps_its_input_and_draws_the_same_again() -> None:
    [(plain, recomputed)] = run_ranks(1, _a_recomputed_layer)
    assert (plain[0], recomputed[0]) == (2, 0), "parts that keep what they took"
    assert (plain[4], recomputed[4]) == (["attn", "mlp"], 2 * ["attn", "mlp"])
    assert plain[1:4] == recomputed[1:4]
    assert plain[5] == recomputed[5], "what follows draws as if nothing was recomputed"


def test_release_refuses_views() -> None:
    with pytest.raises(AssertionError, match=r"torch.Size\(\[15\]\) is a view"):
        _compute().release([_output().view(15)])


def test_release_in_inference_leaves_training_alone() -> None:
    dtype = (
        torch.float64
    )  # of no other test: the first to be freed is one of an inference
    with torch.inference_mode():
        evaluated = _output(dtype)
        _compute().release([evaluated])
    assert evaluated.shape == (1,)
    trained = _output(dtype)
    _compute().release([trained])
    assert trained.requires_grad
    assert not trained.is_inference()


class Called(StageCompute):
    """Says which step it was asked for, and with what."""

    def forward(self, stage: int, microbatch: int, inputs: Any) -> Any:
        return ["forward", inputs]

    def backward(
        self, stage: int, microbatch: int, gradients: Any, *, split: bool
    ) -> Any:
        return ["split" if split else "backward", gradients]


def _run(kind: Any, inputs: Any, splits: Any = None) -> Any:
    compute = Called(SimpleNamespace(), None, num_inputs=2, splits=splits)  # type: ignore[arg-type]
    return compute.run(Action(1, kind, 2), inputs)


def test_each_kind_of_action_has_its_step() -> None:
    gradient, ran = torch.ones(3), []
    splits = SimpleNamespace(run=lambda *place: ran.append(place))
    assert _run("B", [gradient]) == ["backward", [gradient]]
    assert _run("I", [gradient]) == ["split", [gradient]]
    assert _run("W", [], splits) == []
    assert ran == [(1, 2)]


def test_a_forward_gets_leaves_and_the_ends_of_the_pipeline_get_none() -> None:
    activation = torch.ones(3)
    step, [leaf] = _run("F", [activation])
    assert (step, leaf.requires_grad, leaf.is_leaf) == ("forward", True, True)
    assert _run("F", [])[1] == [None, None]
    assert _run("B", []) == ["backward", [None]]


def test_the_previous_stage_gets_zeros_for_an_input_that_was_ignored() -> None:
    compute = StageCompute(SimpleNamespace(), None)  # type: ignore[arg-type]
    used, ignored, gradient = torch.ones(2), torch.ones(3), torch.full((2,), 5.0)
    sent = compute._sent_back(3, 7, [used, ignored, None], [gradient, None, None])
    assert sent[0] is gradient
    assert sent[1] is not None
    assert sent[1].tolist() == [0, 0, 0]
    assert sent[2] is None
    assert compute.ignored_inputs == [(3, 7)]
