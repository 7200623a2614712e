"""Tensors that skip stages of a pipeline, for authors of models.

    class Tower(torch.nn.Module):                    # in some early stage
        def __init__(self):
            routes.declare(self, publishes=["features"])
        def forward(self, images):
            return routes.publish("features", self.layers(images))

    class Layer(torch.nn.Module):                    # in any later stages
        def __init__(self):
            routes.declare(self, takes=["features"])
        def forward(self, x):
            return x + self.project(routes.take("features"))

Without a schedule of ours, and where there is one stage, `publish` and `take` hand the tensor on
inside the forward. Under a schedule it crosses to each rank with takers once, and its gradient
comes back.

**The order of sums.** Each `take` gives one gradient. They are added up as the backward reaches
them, from the last `take` to the first; the sum is added to what the publisher's own uses of the
tensor behind `publish` have. That is the same wherever the model is cut, so it has the same bits.
Autograd's own order would be another one at each cut, because a stage adds up what it has first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_ext.config.active import process_state
from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.runtime.trees import Leaf

__all__ = ["Batch", "Boundary", "Declared", "RouteStore", "declare", "declared", "publish", "take"]

Boundary = Literal["fixed", "varies"]

Batch = tuple[int, bool]
"""A micro-batch on a rank: its number, and whether it is one of the twin's."""

_ATTRIBUTE = "_megatron_ext_routes"


@dataclass(frozen=True)
class Declared:
    """What modules say about themselves."""

    publishes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    boundary: Boundary | None = None


def declare(
    module: torch.nn.Module,
    *,
    publishes: Iterable[str] = (),
    takes: Iterable[str] = (),
    boundary: Boundary | None = None,
) -> None:
    """Say what a module does beyond handing one tensor `[s, b, h]` to the next stage.

    To be called when the module is built: schedules are made before its first forward.

    Args:
        module: A layer, or the whole model.
        publishes: Routes that it publishes in each forward.
        takes: Routes that it takes in each forward.
        boundary: What its stage hands on is a tree of tensors, whose shapes are the same in all
            micro-batches ("fixed") or may change from one to the next ("varies").

    Raises:
        ScheduleError: A name is no text or stands twice, or there is no such boundary.
    """
    for given in (publishes, takes):
        if isinstance(given, str):
            raise ScheduleError(f"{given!r} is one name; give a list of names: [{given!r}]")
    made = Declared(tuple(publishes), tuple(takes), boundary)
    for names in (made.publishes, made.takes):
        if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise ScheduleError(f"{list(names)} are no names of routes: give each text once")
    if boundary not in (None, "fixed", "varies"):
        raise ScheduleError(f'there is no boundary {boundary!r}; take "fixed" or "varies"')
    setattr(module, _ATTRIBUTE, made)


def declared(chunk: torch.nn.Module) -> Declared:
    """Return what all modules of a stage declare together."""
    found: list[Declared] = [
        getattr(module, _ATTRIBUTE) for module in chunk.modules() if hasattr(module, _ATTRIBUTE)
    ]
    boundaries = [each.boundary for each in found if each.boundary is not None]
    varies = "varies" in boundaries
    return Declared(
        tuple(name for each in found for name in each.publishes),
        tuple(sorted({name for each in found for name in each.takes})),
        "varies" if varies else ("fixed" if boundaries else None),
    )


def publish(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Publish a tensor for all later `take(name)` of this micro-batch.

    Args:
        name: Of the route.
        tensor: Of any shape and dtype; None where this micro-batch has none.

    Returns:
        The same values. Use it in place of the tensor where the layer is recomputed
        (`--recompute-granularity full`): its backward is what brings the gradient of the takers.

    Raises:
        ScheduleError: The name was published before, is not declared, or the tensor has another
            shape in recomputation.
    """
    return _current().publish(name, tensor)


def take(name: str) -> torch.Tensor | None:
    """Return what was published under a name in this micro-batch, here or in an earlier stage.

    Raises:
        ScheduleError: Nothing was, or the name is not declared.
    """
    return _current().take(name)


class _Sum:
    """The gradient of a published tensor, as far as it is known."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.value = gradient if self.value is None else self.value + gradient

    def pop(self) -> torch.Tensor | None:
        value, self.value = self.value, None
        return value


class _Publish(torch.autograd.Function):
    """Adds what the takers have to the gradient of the publisher's own uses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, takers: _Sum) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.takers = takers
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        of_takers = ctx.takers.pop()
        if gradient is None or of_takers is None:
            return (of_takers if gradient is None else gradient), None
        return gradient + of_takers, None


class _Take(torch.autograd.Function):
    """Keeps its gradient in the sum; its edge to the publisher says only that it has run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, takers: _Sum) -> torch.Tensor:
        ctx.takers = takers
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.takers.add(gradient)
        return None, None


@dataclass
class _Published:
    """A published tensor of one micro-batch on this rank."""

    value: torch.Tensor | None
    """Without a graph; requires a gradient if the published one does, or may in recomputation."""
    look: tuple[torch.Size, torch.dtype] | None
    stage: int | None
    """Of this rank, where it was made; None: it came from another rank."""
    origin: torch.Tensor | None = None
    """With the graph of its stage, if it has one."""
    takers: _Sum = field(default_factory=_Sum)
    repeated: bool = False
    """Whether recomputation published it again, and so has to take its gradient."""


class RouteStore:
    """The published tensors of this rank.

    Args:
        declared: By stage of this rank; None: outside of a pipeline of ours, where a name is valid
            until it is published again.
    """

    def __init__(self, declared: dict[int, Declared] | None = None) -> None:
        self._declared = declared
        self._known: dict[tuple[Batch, str], _Published] = {}
        """By micro-batch and name."""
        self._stage = 0
        self._batch: Batch = (0, False)
        self._published: set[str] = set()
        self._taken: set[str] = set()

    @contextmanager
    def running(self, stage: int, batch: Batch) -> Iterator[None]:
        """Make this store the one of `publish` and `take` while an action runs."""
        self._stage, self._batch = stage, batch
        self._published, self._taken = set(), set()
        current = process_state(_Current)
        before, current.store = current.store, self
        try:
            yield
        finally:
            current.store = before

    def publish(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """See `publish`."""
        self._check_declared(name, "publishes")
        key = self._batch, name
        found = self._known.get(key)
        look = None if tensor is None else (tensor.shape, tensor.dtype)
        if found is not None and _recomputes():
            if look != found.look:
                raise ScheduleError(
                    f"{self._where(name)}: published {_text(found.look)} in forward and "
                    f"{_text(look)} in recomputation; publish the same in both"
                )
            if tensor is None or not _has_graph(tensor) or found.origin is not None:
                return tensor
            found.repeated = True
            return _Publish.apply(tensor, found.takers)  # type: ignore[no-any-return]
        if self._declared is not None and found is not None:
            raise ScheduleError(
                f"{self._where(name)}: published twice in one forward; give each tensor a name"
            )
        if found is not None:
            self._check_gradient_taken(name, found)
        made = self._known[key] = _Published(None, look, self._stage)
        self._published.add(name)
        if tensor is None:
            return None
        made.value = tensor.detach()
        # Without a graph it may get one in recomputation, or be meant to have none.
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            made.value.requires_grad_(tensor.requires_grad or not torch.is_grad_enabled())
        if not _has_graph(tensor):
            return tensor
        made.origin = _Publish.apply(tensor, made.takers)
        return made.origin

    def take(self, name: str) -> torch.Tensor | None:
        """See `take`."""
        self._check_declared(name, "takes")
        found = self._known.get((self._batch, name))
        if found is None:
            raise ScheduleError(
                f"{self._where(name)}: taken before it is published; publish it in an earlier "
                f"layer, and train pipelines with a schedule of ours (--pipeline-schedule)"
            )
        self._taken.add(name)
        value = found.value
        if value is None or not value.requires_grad or not torch.is_grad_enabled():
            return value
        # Recomputation, and other stages of the same rank, have graphs of their own.
        joins = found.origin is not None and found.stage == self._stage and not _recomputes()
        start = found.origin if joins else value.detach().requires_grad_()
        return _Take.apply(start, found.takers)  # type: ignore[no-any-return]

    def receive(self, batch: Batch, tensors: dict[str, torch.Tensor | None]) -> None:
        """Note what came from another rank."""
        for name, value in tensors.items():
            look = None if value is None else (value.shape, value.dtype)
            self._known[batch, name] = _Published(value, look, None)

    def values(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor | None]:
        """Return what was published, for another rank."""
        return {name: self._known[batch, name].value for name in names}

    def origins(self, batch: Batch, names: Sequence[str]) -> list[torch.Tensor]:
        """Return published tensors with their graph, from which a backward has to start."""
        found = (self._known[batch, name].origin for name in names)
        return [origin for origin in found if origin is not None]

    def with_gradient(self, batch: Batch, names: Sequence[str]) -> list[str]:
        """Return those of some names whose gradients travel."""
        return [name for name in names if self._wants(batch, name)]

    def _wants(self, batch: Batch, name: str) -> bool:
        value = self._known[batch, name].value
        return value is not None and value.requires_grad

    def put_gradients(self, batch: Batch, gradients: dict[str, torch.Tensor]) -> None:
        """Note what takers in later stages of other ranks have."""
        for name, gradient in gradients.items():
            self._known[batch, name].takers.add(gradient)

    def look(self, batch: Batch, name: str) -> Leaf:
        """Return what a published tensor, and so its gradient, looks like."""
        look = self._known[batch, name].look
        assert look is not None
        return Leaf(tuple(look[0]), look[1], requires_grad=True)

    def pop_gradients(self, batch: Batch, names: Sequence[str]) -> list[torch.Tensor]:
        """Return what the takers so far have, for the next one on another rank."""
        found = []
        for name in names:
            known = self._known[batch, name]
            gradient = known.takers.pop()
            assert known.value is not None
            found.append(torch.zeros_like(known.value) if gradient is None else gradient)
        return found

    def check_forward(self, stage: int) -> None:
        """Check that a forward did what its stage declares.

        Raises:
            ScheduleError: It left something out.
        """
        assert self._declared is not None
        said = self._declared[stage]
        for name in said.publishes:
            if name not in self._published:
                raise ScheduleError(f"{self._where(name)}: declared, and not published")
        for name in said.takes:
            if name not in self._taken:
                raise ScheduleError(f"{self._where(name)}: declared, and never taken")

    def forget(self, batch: Batch, names: Iterable[str]) -> None:
        """Drop what nobody on this rank needs any more.

        Raises:
            ScheduleError: A gradient is left that recomputation should have taken.
        """
        for name in names:
            found = self._known.pop((batch, name), None)
            if found is not None:
                self._check_gradient_taken(name, found)

    def release(self, batch: Batch, names: Iterable[str]) -> None:
        """Free published values that no other stage of this rank takes."""
        for name in names:
            found = self._known[batch, name]
            if found.value is not None:
                wants = found.value.requires_grad
                found.value = found.value.new_empty(0).requires_grad_(wants)

    def _check_gradient_taken(self, name: str, found: _Published) -> None:
        if found.takers.value is None:
            return
        if found.origin is None and not found.repeated:
            raise ScheduleError(
                f"{self._where(name)}: its takers have a gradient, but it was published without a "
                f"graph; publish it outside of torch.no_grad(), and of layers that are recomputed "
                f"and whose output leads nowhere"
            )
        raise ScheduleError(
            f"{self._where(name)}: its gradient did not reach the publisher; go on with what "
            f"publish returns: x = routes.publish({name!r}, x)"
        )

    def _check_declared(self, name: str, how: Literal["publishes", "takes"]) -> None:
        if self._declared is None or name in getattr(self._declared[self._stage], how):
            return
        raise ScheduleError(
            f"{self._where(name)}: not declared; call routes.declare(self, {how}=[{name!r}]) where "
            f"the layer is built"
        )

    def _where(self, name: str) -> str:
        if self._declared is None:
            return f"route {name!r}"
        return f"stage {self._stage}, micro-batch {self._batch[0]}, route {name!r}"


@dataclass
class _Current:
    """Which store is used now."""

    store: RouteStore | None = None
    """That of a pipeline, while one of its actions runs."""
    plain: RouteStore = field(default_factory=RouteStore)


def _current() -> RouteStore:
    current = process_state(_Current)
    return current.plain if current.store is None else current.store


def _has_graph(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _recomputes() -> bool:
    """Tell whether a backward runs, in which layers may be computed again."""
    return torch._C._current_graph_task_id() != -1


def _text(look: tuple[torch.Size, torch.dtype] | None) -> str:
    return "None" if look is None else f"{tuple(look[0])} of {look[1]}"
