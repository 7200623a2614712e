"""`publish` and `take` without a pipeline: plain calls, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_ext import routes
from megatron_ext.errors import ScheduleError
from megatron_ext.features.trees.routes import Declared, declared


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_CURRENT", routes._Current())


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(4)]


Run = Callable[..., torch.Tensor]


def _gradients(run: Run, *, plain: bool = False) -> list[torch.Tensor]:
    """Return the gradients of a model of four layers; with `plain` a variable is the route."""
    first, second, third, fourth = weights = _weights()
    kept: list[torch.Tensor] = []

    def publish(x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(x @ first)
        kept[:] = [made]
        published = made if plain else routes.publish("made", made)
        assert published is not None
        return torch.tanh(published @ second)

    def take(x: torch.Tensor) -> torch.Tensor:
        taken = kept[0] if plain else routes.take("made")
        assert taken is not None
        return torch.tanh(x @ third) + taken * 3

    def take_again(x: torch.Tensor) -> torch.Tensor:
        taken = kept[0] if plain else routes.take("made")
        assert taken is not None
        return torch.tanh(x @ fourth + taken)

    x = torch.ones(2, 4, requires_grad=True)
    for layer in (publish, take, take_again):
        x = run(layer, x)
    x.square().sum().backward()
    return [weight.grad for weight in weights]  # type: ignore[misc]


def _straight(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    return layer(x)


def _reentrant(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


def _saved(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [_straight, _reentrant, _saved])
def test_the_gradients_of_a_variable(run: Run) -> None:
    expected = _gradients(_straight, plain=True)
    for _ in range(2):  # the second step publishes the same name again
        for found, wanted in zip(_gradients(run), expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_recomputation_changes_no_bit() -> None:
    for run in (_reentrant, _saved):
        for found, wanted in zip(_gradients(run), _gradients(_straight), strict=True):
            assert torch.equal(found, wanted)


def test_what_only_takers_use_gets_its_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    routes.publish("alone", weight * 2)
    taken = routes.take("alone")
    assert taken is not None
    (taken * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("run", [_reentrant, _saved])
def test_a_second_forward_before_a_recomputation_is_an_error(run: Run) -> None:
    """It took the tensor of the second one: wrong gradients, without a word."""
    w, v = (torch.full((1,), value, requires_grad=True) for value in (2.0, 3.0))

    def forward(value: float, run: Run) -> torch.Tensor:
        x = routes.publish("f", w * value)
        assert x is not None
        return run(lambda y: y * v * routes.take("f"), x).sum()

    first, second = (forward(value, run) for value in (1.0, 10.0))
    with pytest.raises(ScheduleError, match="'f': published again by a later forward"):
        first.backward()
    del first, second
    for value in (1.0, 10.0):  # one after the other
        forward(value, run).backward()
    w.grad = v.grad = None
    first, second = (forward(value, _straight) for value in (1.0, 10.0))
    first.backward()
    second.backward()
    assert w.grad is not None
    assert v.grad is not None
    # d/dw and d/dv of sum((w x)^2 v)
    assert (w.grad.item(), v.grad.item()) == (2 * 2 * 3 * 101.0, 4 * 101.0)


def test_none_and_tensors_without_gradient() -> None:
    routes.publish("none", None)
    assert routes.take("none") is None
    numbers = torch.arange(3)
    routes.publish("numbers", numbers)
    assert torch.equal(routes.take("numbers"), numbers)  # type: ignore[arg-type]
    frozen = torch.ones(2)
    routes.publish("frozen", frozen)
    found = routes.take("frozen")
    assert found is not None
    assert not found.requires_grad


def test_evaluation() -> None:
    with torch.no_grad():
        routes.publish("x", torch.ones(2))
        assert routes.take("x").sum() == 2  # type: ignore[union-attr]


def test_taken_before_it_is_published() -> None:
    with pytest.raises(
        ScheduleError, match="route 'later': taken before it is published"
    ):
        routes.take("later")


@pytest.mark.parametrize("run", [_reentrant, _saved])
def test_another_shape_in_recomputation(run: Run) -> None:
    lengths = iter([2, 3])

    def layer(x: torch.Tensor) -> torch.Tensor:
        routes.publish("x", x[: next(lengths)] * 1)
        return torch.tanh(x)

    made = run(layer, torch.ones(4, requires_grad=True))
    with pytest.raises(
        ScheduleError, match=r"published \(2,\) .* but \(3,\) .* in its recomputation"
    ):
        made.sum().backward()


def test_a_gradient_that_does_not_reach_a_recomputed_publisher() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        routes.publish("x", x * 2)  # and goes on with something else
        return x * 3

    made = _reentrant(layer, torch.ones(2, requires_grad=True))
    taken = routes.take("x")
    assert taken is not None
    (made + taken).sum().backward()
    with pytest.raises(
        ScheduleError, match="continue with the tensor that publish returns"
    ):
        routes.publish("x", torch.ones(2, requires_grad=True) * 2)


def test_a_gradient_for_what_was_published_without_a_graph() -> None:
    with torch.no_grad():
        routes.publish("x", torch.ones(2))
    taken = routes.take("x")
    assert taken is not None
    taken.sum().backward()
    with pytest.raises(ScheduleError, match="was published without a graph"):
        routes.publish("x", torch.ones(2))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"publishes": "x"}, "pass a list of names"),
        ({"takes": ["x", "x"]}, "pass each name once"),
        ({"publishes": [1]}, "pass each name once"),
        ({"boundary": "tree"}, 'use "fixed" or "varies"'),
    ],
)
def test_declarations_that_say_nothing(keywords: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        routes.declare(torch.nn.Identity(), **keywords)  # type: ignore[arg-type]


def test_a_stage_declares_what_its_modules_do() -> None:
    stage = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    assert declared(stage) == Declared()
    routes.declare(stage[0], publishes=["a"], takes=["b"])
    routes.declare(stage[1], takes=["b", "c"], boundary="fixed")
    assert declared(stage) == Declared(("a",), ("b", "c"), "fixed")
    routes.declare(stage, boundary="varies")
    assert declared(stage).boundary == "varies"
