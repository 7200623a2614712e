"""Trees of tensors between stages: their wire format, and the actions of models that use them.

A tree is a tensor, None, or a tuple, list or dict with string keys of trees. Its tensors travel as
one message of bytes. A `TreeForm` describes structure, shapes and dtypes. It is sent once if all
micro-batches share it; otherwise it travels as a header before each tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.devices import device_of
from megatron_ext.errors import MessageMismatch, ScheduleError
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.runtime.program import Form
from megatron_ext.runtime.routes import Declared, RouteStore, declared
from megatron_ext.schedules.table.route_plan import connect, plan_routes
from megatron_ext.transport.dtypes import plain

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import Call, Tensors
    from megatron_ext.runtime.program import Shapes
    from megatron_ext.runtime.routes import Batch, Published
    from megatron_ext.schedules.table.actions import Action, Route
    from megatron_ext.schedules.table.placement import Placement

Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""

# As wide as any dtype, and as a line of a CPU's cache: the receiver uses the tensors in place.
_ALIGNMENT = 64


class Leaf(NamedTuple):
    """Shape, dtype and requires_grad of a tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')} {shape}"


@dataclass(frozen=True)
class TreeForm:
    """The form of a tree: everything but its tensors' data."""

    # The whole form: forms are equal if their texts are.
    text: str
    """Skeleton and leaves as JSON."""
    skeleton: Any = field(compare=False)
    """The tree with 0 for each tensor: null, 0, ["tuple", ...], ["list", ...], or
    ["dict", keys, ...]."""
    leaves: tuple[Leaf, ...] = field(compare=False)
    """All tensors, in order."""

    def header(self) -> torch.Tensor:
        """Return the header to send: uint8 on the CPU, `[number of bytes]`."""
        return torch.frombuffer(bytearray(self.text.encode()), dtype=torch.uint8)

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """Rebuild the tree from its tensors, given in order."""
        return _grown(self.skeleton, iter(tensors))

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.leaves)) + "]"


@lru_cache(maxsize=1024)  # most micro-batches have the same form
def parsed(text: bytes) -> TreeForm:
    """Return the form that a header describes.

    Raises:
        MessageMismatch: The header is corrupt, or another version of this package sent it.
    """
    try:
        skeleton, described = json.loads(text)
        leaves = []
        for shape, name, requires_grad in described:
            dtype = getattr(torch, name)
            # Whatever name a damaged header has, what torch keeps under it need not be a type.
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"torch.{name} is not a dtype")
            leaves.append(Leaf(tuple(shape), dtype, requires_grad))
        return TreeForm(text.decode(), skeleton, tuple(leaves))
    except (ValueError, TypeError, AttributeError) as error:
        raise MessageMismatch(
            f"a header of {len(text)} bytes cannot be read: {error}; install the same "
            f"megatron_ext for all ranks"
        ) from error


def flatten(tree: Tree, what: str, *, trains: bool) -> tuple[list[torch.Tensor], TreeForm]:
    """Return a tree's tensors, in order, and its form; in an evaluation no leaf requires grad.

    Raises:
        ScheduleError: The tree, which `what` names, contains an object of an unsupported type.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _cut(tree, tensors, what)
    leaves = [
        (list(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad and trains)
        for x in tensors
    ]
    return tensors, parsed(json.dumps([skeleton, leaves], separators=(",", ":")).encode())


def _cut(tree: Tree, tensors: list[torch.Tensor], what: str) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return 0
    if tree is None:
        return None
    kind = type(tree)
    if kind in (tuple, list):
        return [kind.__name__, *(_cut(each, tensors, what) for each in tree)]
    if kind is dict and all(isinstance(key, str) for key in tree):
        return ["dict", list(tree), *(_cut(each, tensors, what) for each in tree.values())]
    raise ScheduleError(
        f"{what} holds a {kind.__name__}; hand on a tensor, None, or a tuple, list or dict of "
        f"them, whose keys are text"
    )


def _grown(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Tree:
    if skeleton is None:
        return None
    if skeleton == 0:
        return next(tensors)
    kind, *rest = skeleton
    if kind == "dict":
        keys, *values = rest
        return {key: _grown(each, tensors) for key, each in zip(keys, values, strict=True)}
    grown = [_grown(each, tensors) for each in rest]
    return tuple(grown) if kind == "tuple" else grown


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate the bytes of tensors of any dtype and shape: uint8, `[number of bytes]`.

    Each is aligned to 64 bytes. A single tensor is not copied.
    """
    parts = [plain(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    ranges, end = _placed([part.numel() for part in parts])
    packed = torch.empty(end, dtype=torch.uint8, device=device)
    for place, part in zip(ranges, parts, strict=True):
        packed[place].copy_(part)
    return packed


def unpack(packed: torch.Tensor, leaves: Sequence[Leaf], what: str) -> list[torch.Tensor]:
    """Return the tensors that `pack` has packed, with these shapes and dtypes, as views.

    Raises:
        MessageMismatch: The number of bytes does not match the leaves of `what`.
    """
    sizes = [torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in leaves]
    ranges, end = _placed(sizes)
    if packed.dtype != torch.uint8 or packed.numel() != end:
        raise MessageMismatch(
            f"{what} has {packed.nbytes} bytes, but its tensors need {end}; declare "
            f'boundary="varies" where shapes change from micro-batch to micro-batch'
        )
    found = zip(ranges, leaves, strict=True)
    return [packed[place].view(leaf.dtype).view(leaf.shape) for place, leaf in found]


def _placed(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Return where each part lies, and the offset in bytes at which the last one ends."""
    # Aligned, so that the receiver can view the bytes as any dtype, in place.
    begins = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    ranges = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
    return ranges, ranges[-1].stop if ranges else 0


# Upstream's `backward_step` starts from one tensor only.
class _Join(torch.autograd.Function):
    """Joins tensors into one root, a float32 scalar; their data may be freed.

    `gradients` has one for each tensor when the backward runs. None adds no gradient, but the
    tensor's autograd node still runs.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: list[torch.Tensor | None], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


# -- actions ---------------------------------------------------------------------------------------


@dataclass
class Forms:
    """The forms of the trees that this rank sends and receives, once they are known."""

    varies: bool
    """Whether they may change between micro-batches."""
    agreed: bool = False
    # By (message kind, sending stage, receiving stage).
    _sent: dict[tuple[str, int, int], TreeForm] = field(default_factory=dict)
    _received: dict[tuple[str, int, int], TreeForm] = field(default_factory=dict)

    @property
    def of_messages(self) -> dict[str, list[Form]]:
        """The tensors of one message, by kind: bytes, after a header until forms are agreed."""
        tree = Form(None, torch.uint8)
        with_header = [tree] if self.agreed else [tree._replace(header=True), tree]
        # Gradients need no header: they have the form of what they belong to.
        return {"F": with_header, "P": with_header, "B": [tree], "G": [tree]}

    def step_done(self) -> None:
        """Record that this rank completed a step, so it has sent and received every form."""
        # Both ends have seen the same headers in the same step, so this needs no handshake.
        self.agreed = not self.varies

    def headers(self, key: tuple[str, int, int], form: TreeForm, what: str) -> list[torch.Tensor]:
        """Return the header to send with a tree of this form; empty once forms are agreed.

        Raises:
            ScheduleError: A fixed form has changed.
        """
        if not self.varies:
            known = self._sent.setdefault(key, form)
            if known != form:
                raise ScheduleError(
                    f"{what} is {form}, but was {known} in an earlier micro-batch; declare "
                    f'boundary="varies" where the model is built (routes.declare)'
                )
        return [] if self.agreed else [form.header()]

    def read(self, key: tuple[str, int, int], inputs: Iterator[torch.Tensor | None]) -> TreeForm:
        """Return the form of the next tree; consume its header from `inputs` if there is one."""
        if self.agreed:
            return self._received[key]
        header = next(inputs)
        assert header is not None
        form = self._received[key] = parsed(bytes(header.cpu().numpy()))
        return form


@dataclass
class Trees:
    """The declarations of all stages of a model, and the forms of what they exchange."""

    routes: tuple[Route, ...]
    declared: Mapping[int, Declared]
    """By stage."""
    varies: bool
    """Whether a tree's form may change between micro-batches."""
    _forms: dict[tuple[bool, str], Forms] = field(default_factory=dict)
    """By (forward only, shapes): training and evaluation differ, and so do micro-batch sizes."""

    def forms(self, call: Call, shapes: Shapes) -> Forms:
        """Return the tree forms for steps of this kind."""
        return self._forms.setdefault((call.forward_only, str(shapes)), Forms(self.varies))


@dataclass
class TreeCompute(StageCompute):
    """Runs the actions of one step on this rank's chunks, with trees and routes."""

    forms: Forms = field(kw_only=True)
    trees: Trees = field(kw_only=True)
    _ends: dict[tuple[int, int], tuple[list[Leaf], Tensors]] = field(
        default_factory=dict, init=False
    )
    """What a forward leaves for its backward: the sent tensors for which a gradient comes back, and
    the gradients of its root, which are None for published tensors."""

    def __post_init__(self) -> None:
        """Precompute what is constant during the step."""
        schedule = self.table.schedule
        self._plan = plan_routes(schedule.routes, schedule.placement)
        self._store = RouteStore(self.trees.declared)
        self._device = device_of(self.call.chunks)
        self._last_stage = schedule.num_stages - 1

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action; its inputs and outputs are uint8 tensors, `[number of bytes]` each."""
        stage, kind, microbatch, _ = action
        if kind == "W":
            self.splits.run(stage, microbatch)
            return []
        # The twin's micro-batches have the same indices.
        batch = microbatch, self.table.schedule.placement.is_crossed(stage)
        run = self._run_forward if kind == "F" else self._run_backward
        return run(action, batch, iter(inputs))

    def release(self, outputs: Tensors) -> None:
        """Do nothing: the outputs were packed bytes; the tree itself is freed with its graph."""

    def _run_forward(
        self, action: Action, batch: Batch, inputs: Iterator[torch.Tensor | None]
    ) -> Tensors:
        stage, _, microbatch, _ = action
        tree = None
        leaves: Tensors = []
        if stage > 0:
            tree, tensors = self._received(("F", stage - 1, stage), microbatch, inputs)
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
        for hop in self._plan.hops_in(action):
            values, _ = self._received(("P", hop.stage, stage), microbatch, inputs)
            self._store.receive(batch, values)
        with self._store.running(stage, batch):
            [made] = self.forward(stage, microbatch, [tree])
        self._store.check_forward(stage)
        outputs: Tensors = []
        sent: list[torch.Tensor] = []
        if stage < self._last_stage:
            outputs, sent = self._bytes_of(made, ("F", stage, stage + 1), microbatch)
        names = self.trees.declared[stage].publishes
        if not self.call.forward_only:
            # With one root of all that the stage's backward starts from, and inputs that are
            # leaves, Megatron's own `forward_step` and `backward_step` run as for a single tensor.
            # What requires no grad gets none, and nothing of it travels back. The gradients of what
            # the stage published come through the sums of their takers (`routes._Publish`).
            found = (self._store[batch, name].origin for name in names)
            origins = [origin for origin in found if origin is not None]
            gradients: Tensors = [None] * len(origins)
            _, root = self._live[stage, microbatch]
            if stage < self._last_stage:
                ends = [*sent, *origins]
                root = [_Join.apply(gradients, *ends) if ends else torch.zeros(())]
            self._live[stage, microbatch] = (leaves, root)
            looks = [Leaf(tuple(tensor.shape), tensor.dtype) for tensor in sent]
            self._ends[stage, microbatch] = looks, gradients
        for hop in self._plan.hops_out(action):
            named = {name: self._store[batch, name].value for name in hop.names}
            outputs += self._bytes_of(named, ("P", stage, hop.taker), microbatch)[0]
        # Other stages of this rank may take what their last taker drops.
        published = set(names).difference(self._plan.dropped.get(("B", stage), ()))
        if self.call.forward_only:
            dropped = published.union(self._plan.dropped.get(("F", stage), ()))
            self._store.forget(batch, sorted(dropped))
        else:
            self._store.release(batch, published)
        return outputs

    def _run_backward(
        self, action: Action, batch: Batch, inputs: Iterator[torch.Tensor | None]
    ) -> Tensors:
        stage, kind, microbatch, _ = action
        sent, gradients = self._ends.pop((stage, microbatch))
        of_root: Tensors = [None]
        if stage < self._last_stage:
            what = f"the gradient of {self._what(stage, microbatch)}"
            gradients[:0] = self._unpacked(inputs, sent, what)
            of_root = [torch.zeros((), device=self._device)]
        for hop in self._plan.hops_in(action):
            routed = self._with_gradient(batch, hop.names)
            looks = [Leaf(*known.look) for known in routed if known.look is not None]
            what = f"the gradient of routes {', '.join(hop.names)} from stage {hop.stage}"
            for known, gradient in zip(routed, self._unpacked(inputs, looks, what), strict=True):
                known.takers.add(gradient)
        with self._store.running(stage, batch):
            found = self.backward(stage, microbatch, of_root, split=kind == "I")
        outputs: Tensors = []
        if stage > 0:
            outputs.append(pack([grad for grad in found if grad is not None], self._device))
        for hop in self._plan.hops_out(action):
            sums = [known.pop_gradient() for known in self._with_gradient(batch, hop.names)]
            outputs.append(pack(sums, self._device))
        dropped = {*self.trees.declared[stage].publishes}
        dropped.update(self._plan.dropped.get(("B", stage), ()))
        self._store.forget(batch, sorted(dropped))
        return outputs

    def _with_gradient(self, batch: Batch, names: Sequence[str]) -> list[Published]:
        """Return the published tensors of these routes whose gradients travel."""
        return [known for name in names if (known := self._store[batch, name]).has_gradient]

    def _received(
        self, key: tuple[str, int, int], microbatch: int, inputs: Iterator[torch.Tensor | None]
    ) -> tuple[Tree, list[torch.Tensor]]:
        form, (kind, stage, taker) = self.forms.read(key, inputs), key
        what = f"what stage {taker} gets" if kind == "F" else f"what stage {stage} published"
        tensors = self._unpacked(inputs, form.leaves, f"{what} for micro-batch {microbatch}")
        for tensor, leaf in zip(tensors, form.leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        return form.tree(tensors), tensors

    @staticmethod
    def _unpacked(
        inputs: Iterator[torch.Tensor | None], leaves: Sequence[Leaf], what: str
    ) -> list[torch.Tensor]:
        packed = next(inputs)
        assert packed is not None
        return unpack(packed, leaves, what)

    def _bytes_of(
        self, tree: object, key: tuple[str, int, int], microbatch: int
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """Return a tree's header, if needed, and bytes; and the tensors that get a gradient."""
        what = self._what(key[1], microbatch)
        tensors, form = flatten(tree, what, trains=not self.call.forward_only)
        leaves = zip(tensors, form.leaves, strict=True)
        packed = pack(tensors, self._device)
        returning = [tensor for tensor, leaf in leaves if leaf.requires_grad]
        return [*self.forms.headers(key, form, what), packed], returning

    @staticmethod
    def _what(stage: int, microbatch: int) -> str:
        return f"what stage {stage} hands on for micro-batch {microbatch}"


def agree_trees(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    shapes_travel: bool,
) -> Trees | None:
    """Gather the declarations of all stages; None without any. Collective over a pipeline's group.

    `shapes_travel` if sequence lengths vary (`--variable-seq-lengths`).

    Raises:
        ScheduleError: The routes contradict each other. Every rank raises it.
    """
    stages = placement.stages_of[group.rank()]
    mine = dict(zip(stages, map(declared, chunks), strict=True))
    everybody: list[dict[int, Declared]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everybody, mine, group=group)
    by_stage = {stage: found for each in everybody for stage, found in sorted(each.items())}
    if all(found == Declared() for found in by_stage.values()):
        return None
    ordered = [by_stage[stage] for stage in range(placement.num_stages)]
    routes = connect([each.publishes for each in ordered], [each.takes for each in ordered])
    varies = shapes_travel or any(each.boundary == "varies" for each in ordered)
    return Trees(routes, by_stage, varies)
