"""Skip connections across pipeline stages, for model authors: `megatron_ext.routes`.

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

Without a megatron_ext schedule, or with a single stage, `publish` and `take` hand the tensor over
within the forward pass. Under a schedule, the tensor is sent once to every rank that has takers,
and its gradient is sent back. The results are bitwise identical wherever the model is cut into
stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType, ref

import torch

from megatron_ext.errors import ScheduleError


def declare(
    module: torch.nn.Module,
    *,
    publishes: Iterable[str] = (),
    takes: Iterable[str] = (),
    boundary: Boundary | None = None,
) -> None:
    """Declare a module's routes, and whether its stage outputs a tree instead of one tensor.

    Call this in the module's constructor, because schedules are built before the first forward
    pass.

    Args:
        module: A layer or the whole model. Replaces any earlier declaration of the module.
        publishes: Routes that the module publishes in every forward pass.
        takes: Routes that the module takes in every forward pass.
        boundary: Set this if the stage outputs a tree of tensors. "fixed": structure, shapes and
            dtypes are the same in all micro-batches. "varies": they may change.

    Raises:
        ScheduleError: A name is not a string or appears twice, or the boundary is unknown.
    """
    # A string is an iterable of characters, so reject it before it is converted.
    for names in (publishes, takes):
        if isinstance(names, str):
            raise ScheduleError(
                f"{names!r} is a single name; pass a list of names: [{names!r}]"
            )
    declaration = Declared(tuple(publishes), tuple(takes), boundary)
    for names in (declaration.publishes, declaration.takes):
        has_duplicates = len(set(names)) < len(names)
        has_only_strings = all(isinstance(name, str) for name in names)
        if has_duplicates or not has_only_strings:
            raise ScheduleError(
                f"{list(names)} are not route names; pass each name once, as a string"
            )
    if boundary not in (None, "fixed", "varies"):
        raise ScheduleError(
            f'there is no boundary {boundary!r}; use "fixed" or "varies"'
        )
    setattr(module, _ATTRIBUTE, declaration)


def publish(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Publish a tensor of any shape and dtype, or None, for every later `take` in this micro-batch.

    Continue with the returned tensor, which has the same values. Its backward pass adds the takers'
    gradients.

    Raises:
        ScheduleError: The name is already published or not declared, or a recomputation publishes a
            different shape or dtype.
    """
    return current_store().publish(name, tensor)


def take(name: str) -> torch.Tensor | None:
    """Return the tensor that this or an earlier stage published for this micro-batch.

    Raises:
        ScheduleError: The route has not been published yet, or the name is not declared.
    """
    return current_store().take(name)


Boundary = Literal["fixed", "varies"]

_ATTRIBUTE = "_megatron_ext_routes"


@dataclass(frozen=True)
class Declared:
    """The declarations of one or more modules."""

    publishes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    boundary: Boundary | None = None


def declared(chunk: torch.nn.Module) -> Declared:
    """Return the combined declarations of all modules in a stage."""
    publishes: list[str] = []
    takes: set[str] = set()
    boundary: Boundary | None = None
    for module in chunk.modules():
        declaration: Declared | None = getattr(module, _ATTRIBUTE, None)
        if declaration is None:
            continue
        # A stage may take a route several times. `connect` rejects publishing one
        # twice.
        publishes.extend(declaration.publishes)
        takes.update(declaration.takes)
        if boundary != "varies":
            boundary = declaration.boundary or boundary
    return Declared(tuple(publishes), tuple(sorted(takes)), boundary)


Batch = tuple[int, bool]
"""A micro-batch on a rank: its index and whether it belongs to the twin."""


# Every `take` has one gradient. The backward pass adds these gradients from the last
# `take` to the first, then adds the sum to the gradient of the publisher's own uses of
# the tensor after `publish`. This order does not depend on where the model is cut into
# stages, so the sum's bits do not either. In autograd's own order, they would, because
# each stage would first sum the gradients of its own takers.
class _Sum:
    """The running sum of the takers' gradients for a published tensor."""

    value: torch.Tensor | None = None
    done = False
    """Whether the publisher's backward pass has run."""

    def add(self, gradient: torch.Tensor) -> None:
        if self.value is None:
            self.value = gradient
        else:
            # Do not add in place: a backward pass must not change autograd's gradients.
            self.value = self.value + gradient

    def pop(self) -> torch.Tensor | None:
        value = self.value
        self.value = None
        return value


class _Publish(torch.autograd.Function):
    """Identity whose backward pass adds the takers' gradients to the publisher's own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, takers: _Sum) -> torch.Tensor:
        # Leave a missing gradient None: adding zeros would cost time and turn -0.0 into
        # 0.0.
        ctx.set_materialize_grads(False)
        ctx.takers = takers
        return tensor.detach()

    @staticmethod
    def backward(
        ctx: Any,
        gradient: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, None]:
        # All takers have run their backward passes: those in this stage because of
        # their edges to this node, those in later stages because they run before this
        # stage's pass.
        of_takers = ctx.takers.pop()
        ctx.takers.done = True
        if gradient is None:
            return of_takers, None
        if of_takers is None:
            return gradient, None
        return gradient + of_takers, None


class _Take(torch.autograd.Function):
    """Identity whose backward pass adds to the sum of gradients.

    The edge to the publisher carries no gradient and only determines the order of backward passes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, takers: _Sum) -> torch.Tensor:
        ctx.takers = takers
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.takers.add(gradient)
        return None, None


class Look(NamedTuple):
    """The shape and dtype of a published tensor and of its gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Look | None:
        """Return a tensor's look, or None if there is no tensor."""
        if tensor is None:
            return None
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass
class Published:
    """One micro-batch's published tensor on this rank."""

    value: torch.Tensor | None
    """The detached tensor, which requires grad if the published tensor does, or may do so in a
    recomputation."""
    look: Look | None
    stage: int | None
    """The stage on this rank that published the tensor, or None if it was received."""
    origin: torch.Tensor | None = None
    """The tensor in its stage's graph, if it has one."""
    takers: _Sum = field(default_factory=_Sum)
    repeated: bool = False
    """Whether a recomputation has published the tensor again. If so, the gradient goes to the
    recomputation's backward pass.
    """

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient is sent back. Frozen features, for example, have none."""
        return self.value is not None and self.value.requires_grad

    def pop_gradient(self) -> torch.Tensor:
        """Return and reset the sum of the takers' gradients so far; zeros if there are none."""
        assert self.value is not None
        gradient = self.takers.pop()
        if gradient is None:
            return torch.zeros_like(self.value)
        return gradient


class RouteStore:
    """This rank's published tensors.

    If `declared` is None, the store is for use outside a megatron_ext pipeline. A published tensor
    then remains valid until its name is published again.
    """

    def __init__(self, declared: Mapping[int, Declared] | None = None) -> None:
        self._declared = declared
        self._known: dict[tuple[Batch, str], Published] = {}
        # Name -> the sums of tensors that a later publish has replaced. The references
        # are weak, so the sums live only as long as their graphs.
        self._replaced: dict[str, list[ReferenceType[_Sum]]] = {}
        # The running action, and the names its forward pass has published and taken so
        # far.
        self._stage = 0
        self._batch: Batch = (0, False)
        self._published: set[str] = set()
        self._taken: set[str] = set()

    @contextmanager
    def running(self, stage: int, batch: Batch) -> Iterator[None]:
        """Return an action's context, in which `publish` and `take` use this store."""
        self._stage = stage
        self._batch = batch
        self._published = set()
        self._taken = set()
        before = _CURRENT.store
        _CURRENT.store = self
        try:
            yield
        finally:
            _CURRENT.store = before

    def __getitem__(self, key: tuple[Batch, str]) -> Published:
        """Return the tensor published for a micro-batch on a route."""
        return self._known[key]

    def publish(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """See `megatron_ext.routes.publish`."""
        self._check_declared(name, "publishes")
        key = (self._batch, name)
        before = self._known.get(key)
        if before is not None and _recomputes():
            return self._publish_again(name, tensor, before)
        if before is not None:
            self._replace(name, before)
        published = Published(None, Look.of(tensor), self._stage)
        self._known[key] = published
        self._published.add(name)
        if tensor is None:
            return None
        published.value = tensor.detach()
        # Under no_grad, the tensor may get a graph in a later recomputation, or never,
        # so assume that it has a gradient.
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            may_have_gradient = tensor.requires_grad or not torch.is_grad_enabled()
            published.value.requires_grad_(may_have_gradient)
        if not _needs_gradient(tensor):
            return tensor
        published.origin = _Publish.apply(tensor, published.takers)
        return published.origin

    def _publish_again(
        self,
        name: str,
        tensor: torch.Tensor | None,
        in_forward: Published,
    ) -> torch.Tensor | None:
        """Publish a tensor in a recomputation after the forward pass has published it."""
        look = Look.of(tensor)
        if look != in_forward.look:
            raise ScheduleError(
                f"{self._where(name)}: published {_text(in_forward.look)} in the forward pass, but "
                f"{_text(look)} in its recomputation; publish the same shape and dtype in both"
            )
        if tensor is None or not _needs_gradient(tensor):
            return tensor
        if in_forward.origin is not None:
            return tensor
        # The forward pass ran without a graph, so the gradient must enter through this
        # one.
        in_forward.repeated = True
        return _Publish.apply(tensor, in_forward.takers)  # type: ignore[no-any-return]

    def _replace(self, name: str, before: Published) -> None:
        """Prepare for the next micro-batch's tensor outside a pipeline."""
        if self._declared is not None:
            raise ScheduleError(
                f"{self._where(name)}: published twice in one forward pass; give each tensor a "
                "different name"
            )
        # Without a pipeline, only the next publish shows that a micro-batch has ended.
        self._check_gradient_taken(name, before)
        if before.origin is not None:
            unfinished = self._unfinished(name)
            self._replaced[name] = [*unfinished, ref(before.takers)]

    def take(self, name: str) -> torch.Tensor | None:
        """See `megatron_ext.routes.take`."""
        self._check_declared(name, "takes")
        published = self._known.get((self._batch, name))
        if published is None:
            raise ScheduleError(
                f"{self._where(name)}: taken before it is published; publish it in an earlier "
                f"layer, and train pipelines with a megatron_ext schedule (--pipeline-schedule)"
            )
        if _recomputes() and self._unfinished(name):
            raise ScheduleError(
                f"{self._where(name)}: published again by a later forward pass, so the "
                "recomputation of this one would take the wrong tensor; take it outside "
                "recomputed layers and pass it in, or train with a megatron_ext schedule"
            )
        self._taken.add(name)
        value = published.value
        if value is None or not _needs_gradient(value):
            return value
        # Recomputations and other stages on this rank have separate graphs, which must
        # stay unconnected.
        is_of_this_graph = published.stage == self._stage and not _recomputes()
        start = published.origin
        if start is None or not is_of_this_graph:
            start = value.detach().requires_grad_()
        return _Take.apply(start, published.takers)  # type: ignore[no-any-return]

    def _unfinished(self, name: str) -> list[ReferenceType[_Sum]]:
        """Return the replaced tensors of a name whose backward passes have not run yet."""
        unfinished = []
        for reference in self._replaced.get(name, ()):
            takers = reference()
            if takers is not None and not takers.done:
                unfinished.append(reference)
        return unfinished

    def receive(
        self,
        batch: Batch,
        tensors: dict[str, torch.Tensor | None],
    ) -> None:
        """Store tensors, by route, received from another rank."""
        for name, value in tensors.items():
            published = Published(value, Look.of(value), stage=None)
            self._known[batch, name] = published

    def check_forward(self, stage: int) -> None:
        """Check that a forward pass published and took every route that its stage declares.

        Raises:
            ScheduleError: A declared route was not published or not taken.
        """
        assert self._declared is not None
        declared = self._declared[stage]
        for name in declared.publishes:
            if name not in self._published:
                raise ScheduleError(
                    f"{self._where(name)}: declared but not published; publish it in every "
                    f"forward pass, or publish None if there is no tensor"
                )
        for name in declared.takes:
            if name not in self._taken:
                raise ScheduleError(
                    f"{self._where(name)}: declared but never taken; take it in every forward pass"
                )

    def forget(self, batch: Batch, names: Iterable[str]) -> None:
        """Drop tensors that this rank no longer needs.

        Raises:
            ScheduleError: A taker's gradient has not reached the publisher.
        """
        for name in names:
            published = self._known.pop((batch, name), None)
            if published is not None:
                self._check_gradient_taken(name, published)

    def release(self, batch: Batch, names: Iterable[str]) -> None:
        """Free the data of published tensors that no other stage on this rank takes."""
        for name in names:
            published = self._known[batch, name]
            if published.value is not None:
                # Keep an empty tensor, because its `requires_grad` determines whether a
                # gradient is sent.
                requires_grad = published.value.requires_grad
                without_data = published.value.new_empty(0)
                published.value = without_data.requires_grad_(requires_grad)

    def _check_gradient_taken(self, name: str, published: Published) -> None:
        if published.takers.value is None:
            return
        if published.origin is None and not published.repeated:
            raise ScheduleError(
                f"{self._where(name)}: a layer that took it has a gradient for it, but it was "
                f"published without a graph; publish it outside torch.no_grad() and outside "
                f"recomputed layers whose output is not used"
            )
        raise ScheduleError(
            f"{self._where(name)}: its gradient did not reach the publisher; continue with the "
            f"tensor that publish returns: x = routes.publish({name!r}, x)"
        )

    def _check_declared(self, name: str, how: Literal["publishes", "takes"]) -> None:
        if self._declared is None:
            return
        declared_names = getattr(self._declared[self._stage], how)
        if name in declared_names:
            return
        raise ScheduleError(
            f"{self._where(name)}: not declared; call routes.declare(self, {how}=[{name!r}]) in "
            f"the layer's constructor"
        )

    def _where(self, name: str) -> str:
        if self._declared is None:
            return f"route {name!r}"
        return f"stage {self._stage}, micro-batch {self._batch[0]}, route {name!r}"


@dataclass
class _Current:
    """The store that `publish` and `take` use."""

    store: RouteStore | None = None
    """The pipeline's store while one of its actions runs."""
    plain: RouteStore = field(default_factory=RouteStore)
    """The store for use outside a megatron_ext pipeline."""


# One per process instead of one per configuration, because models also publish and take
# tensors without a configuration.
_CURRENT = _Current()


def current_store() -> RouteStore:
    """Return the running action's store, or the plain store if no action is running."""
    if _CURRENT.store is None:
        return _CURRENT.plain
    return _CURRENT.store


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def _recomputes() -> bool:
    """Return whether a backward pass is running; if so, any forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _text(look: Look | None) -> str:
    if look is None:
        return "None"
    return f"{look.shape} of {look.dtype}"
