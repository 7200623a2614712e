"""Skip connections across pipeline stages, for model authors.

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

Without a megatron_ext schedule, or with a single stage, `publish` and `take` pass the tensor on
inside the forward. Under a schedule the tensor is sent once to each rank with takers, and its
gradient comes back.

**Summation order.** Each `take` yields one gradient. The backward adds them in the order in which
it reaches them, from the last `take` to the first. Then it adds the sum to the gradient of the
publisher's own uses of the tensor after `publish`. This order does not depend on where the model is
split into stages, so the bits do not either. With autograd's own order they would, because each
stage would sum its own gradients first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.route_declarations import Boundary, Declared, attach
from megatron_ext.runtime.route_store import current_store

if TYPE_CHECKING:
    import torch

__all__ = ["Boundary", "declare", "publish", "take"]


def declare(
    module: torch.nn.Module,
    *,
    publishes: Iterable[str] = (),
    takes: Iterable[str] = (),
    boundary: Boundary | None = None,
) -> None:
    """Declare a module's routes, and whether its stage outputs a tree instead of one `[s, b, h]`.

    Call it in the module's constructor: schedules are built before the first forward.

    Args:
        module: A layer, or the whole model.
        publishes: Routes that it publishes in every forward.
        takes: Routes that it takes in every forward.
        boundary: Set it if the stage outputs a tree of tensors. "fixed": structure, shapes and
            dtypes are the same for all micro-batches. "varies": they may change.

    Raises:
        ScheduleError: A name is not a string or appears twice, or the boundary is unknown.
    """
    for given in (publishes, takes):
        if isinstance(given, str):
            raise ScheduleError(f"{given!r} is one name; give a list of names: [{given!r}]")
    made = Declared(tuple(publishes), tuple(takes), boundary)
    for names in (made.publishes, made.takes):
        if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise ScheduleError(
                f"{list(names)} are not names of routes; give each name once, as text"
            )
    if boundary not in (None, "fixed", "varies"):
        raise ScheduleError(f'there is no boundary {boundary!r}; take "fixed" or "varies"')
    attach(module, made)


def publish(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Publish a tensor for every later `take(name)` of this micro-batch.

    Args:
        name: The route.
        tensor: Of any shape and dtype; None if this micro-batch has none.

    Returns:
        The same values. In recomputed layers (`--recompute-granularity full`) continue with this
        tensor: the takers' gradient enters through its backward.

    Raises:
        ScheduleError: The name is already published or not declared, or recomputation publishes
            another shape or dtype.
    """
    return current_store().publish(name, tensor)


def take(name: str) -> torch.Tensor | None:
    """Return the tensor published in this micro-batch, in this or an earlier stage.

    Args:
        name: The route.

    Raises:
        ScheduleError: The route is not published yet, or the name is not declared.
    """
    return current_store().take(name)
