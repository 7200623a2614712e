"""Trees of tensors between stages: their wire format, and the actions of models that use them.

A tree is a tensor, None, or a tuple, list or dict with string keys of trees. Its tensors travel as
one message of bytes. A `TreeForm` describes structure, shapes and dtypes. It is sent once if all
micro-batches share it; otherwise it travels as a header before each tree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.devices import device_of
from megatron_ext.errors import MessageMismatch, ScheduleError
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.runtime.program import Form, PeerEnds
from megatron_ext.runtime.routes import Declared, RouteStore, declared
from megatron_ext.schedules.table.route_plan import connect, plan_routes
from megatron_ext.transport.dtypes import plain
from megatron_ext.transport.torch_dist import Channel

if TYPE_CHECKING:
    from megatron_ext.message import Message, MessageKind
    from megatron_ext.runtime.compute import Call, Tensors
    from megatron_ext.runtime.program import Peers, Shapes, Table
    from megatron_ext.runtime.routes import Batch
    from megatron_ext.runtime.split import SplitBackward
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.schedules.table.communication import Transfer
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route

Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""

# As wide as any dtype, and as a line of a CPU's cache: the receiver uses the tensors in place.
_ALIGNMENT = 64


class Leaf(NamedTuple):
    """Shape, dtype and requires_grad of a tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Size of its data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

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

    @staticmethod
    def of_header(header: torch.Tensor) -> TreeForm:
        """Parse a header.

        Raises:
            MessageMismatch: The header is corrupt, or another version of this package sent it.
        """
        return _parsed(bytes(header.cpu().numpy()))

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """Rebuild the tree from its tensors, given in order."""
        return _grown(self.skeleton, iter(tensors))

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.leaves)) + "]"


@lru_cache(maxsize=1024)  # most micro-batches have the same form
def _parsed(text: bytes) -> TreeForm:
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


def flatten(
    tree: Tree, what: str, needs_gradient: Callable[[torch.Tensor], bool]
) -> tuple[list[torch.Tensor], TreeForm]:
    """Return a tree's tensors, in order, and its form.

    Args:
        tree: The output of a stage.
        what: Names the tree in error messages.
        needs_gradient: Whether a gradient comes back for a tensor: its leaf requires grad.

    Raises:
        ScheduleError: The tree contains an object of an unsupported type.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _cut(tree, tensors, what)
    leaves = [
        (list(x.shape), str(x.dtype).removeprefix("torch."), needs_gradient(x)) for x in tensors
    ]
    return tensors, _parsed(json.dumps([skeleton, leaves], separators=(",", ":")).encode())


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
    """Concatenate the bytes of tensors, each aligned to 64 bytes. A single tensor is not copied.

    Args:
        tensors: Of any dtype and shape.
        device: Where to allocate the result.

    Returns:
        uint8, `[number of bytes]`.
    """
    parts = [plain(tensor.detach()).reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(parts) == 1:
        return parts[0]
    # Aligned, so that the receiver can view the bytes as any dtype, in place.
    packed = torch.empty(_end([part.numel() for part in parts]), dtype=torch.uint8, device=device)
    begin = 0
    for part in parts:
        packed[begin : begin + part.numel()].copy_(part)
        begin += _padded(part.numel())
    return packed


def unpack(packed: torch.Tensor, leaves: Sequence[Leaf], what: str) -> list[torch.Tensor]:
    """Return the packed tensors as views into `packed`.

    Args:
        packed: The result of `pack`: uint8, `[number of bytes]`.
        leaves: Shapes and dtypes of the tensors.
        what: Names the tensors in error messages.

    Raises:
        MessageMismatch: The number of bytes does not match the leaves.
    """
    sizes = [leaf.num_bytes for leaf in leaves]
    if packed.dtype != torch.uint8 or packed.numel() != _end(sizes):
        raise MessageMismatch(
            f"{what} has {packed.nbytes} bytes, but its tensors need {_end(sizes)}; declare "
            f'boundary="varies" where shapes change from micro-batch to micro-batch'
        )
    tensors, begin = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        tensors.append(packed[begin : begin + size].view(leaf.dtype).view(leaf.shape))
        begin += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _end(sizes: Sequence[int]) -> int:
    """Return the offset in bytes at which the last part ends."""
    return sum(map(_padded, sizes[:-1])) + sizes[-1] if sizes else 0


# Upstream's `backward_step` starts from one tensor only.
class _Join(torch.autograd.Function):
    """Joins several tensors into one root; their gradients are supplied when the backward runs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


def joined(tensors: Sequence[torch.Tensor], gradients: list[Any]) -> torch.Tensor:
    """Return a float32 scalar whose backward runs that of several tensors, whose data may be freed.

    Args:
        tensors: At least one tensor; each requires grad.
        gradients: The caller fills it before the backward, one gradient per tensor. None adds no
            gradient, but the tensor's autograd node still runs.
    """
    root: torch.Tensor = _Join.apply(gradients, *tensors)
    return root


# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trees:
    """The declarations of all stages of a model."""

    routes: tuple[Route, ...]
    declared: Mapping[int, Declared]
    """By stage."""
    varies: bool
    """Whether a tree's form may change between micro-batches."""


@dataclass
class Forms:
    """The forms of the trees that this rank sends and receives, once they are known."""

    varies: bool
    agreed: bool = False
    _sent: dict[tuple[str, int, int], TreeForm] = field(default_factory=dict)
    """By (message kind, sending stage, receiving stage)."""
    _received: dict[tuple[str, int], TreeForm] = field(default_factory=dict)
    """By message kind and the message's stage."""

    @property
    def num_parts(self) -> dict[str, int]:
        """Tensors per message, by kind of message: bytes, and a header until forms are agreed."""
        with_header = 1 if self.agreed else 2
        return {"F": with_header, "P": with_header, "B": 1, "G": 1}

    def step_done(self) -> None:
        """Record that this rank completed a step, so it has sent and received every form."""
        # Both ends have seen the same headers in the same step, so this needs no handshake.
        self.agreed = not self.varies

    def headers(self, key: tuple[str, int, int], form: TreeForm, what: str) -> list[torch.Tensor]:
        """Return the header to send with a tree of this form; empty once forms are agreed.

        Args:
            key: (message kind, sending stage, receiving stage).
            form: The tree's form.
            what: Names the tree in error messages.

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

    def read(self, key: tuple[str, int], inputs: Iterator[torch.Tensor | None]) -> TreeForm:
        """Return the form of the next tree; consume its header from `inputs` if there is one."""
        if self.agreed:
            return self._received[key]
        header = next(inputs)
        assert header is not None
        form = self._received[key] = TreeForm.of_header(header)
        return form


@dataclass(frozen=True)
class TreeEnds(PeerEnds):
    """The ends of a model with trees or routes (`program.Ends`)."""

    forms_agreed: bool
    peers: Peers
    rank: int
    """Pipeline rank of this process."""

    def forms(self, kind: MessageKind) -> Sequence[Form]:
        """Return the tensors of one message: uint8 bytes, after a header until forms are agreed."""
        tree = Form(None, torch.uint8)
        # Gradients need no header: they have the form of what they belong to.
        if kind in ("F", "P") and not self.forms_agreed:
            return [tree._replace(header=True), tree]
        return [tree]

    def tensors(self, transfer: Transfer) -> Sequence[Message]:
        """Return the names of the same tensors where they are sent."""
        return [form.named(transfer.message) for form in self.forms(transfer.message.kind)]


class _End(NamedTuple):
    """State that a forward leaves for its backward."""

    leaves: tuple[Leaf, ...]
    """The sent tensors for which a gradient comes back."""
    gradients: list[torch.Tensor | None]
    """Filled before the backward: gradients of the leaves, then None for each published tensor."""
    num_published: int
    """Published tensors from which the backward starts."""


@dataclass
class TreeCompute(StageCompute):
    """Runs the actions of one step on this rank's chunks, with trees and routes."""

    forms: Forms = field(kw_only=True)
    store: RouteStore = field(kw_only=True)
    trees: Trees = field(kw_only=True)
    _ends: dict[tuple[int, int], _End] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Precompute what is constant during the step."""
        schedule = self.table.schedule
        self._plan = plan_routes(schedule.routes, schedule.placement)
        self._device = device_of(self.call.chunks)
        self._last_stage = schedule.num_stages - 1

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action for the executor (`executor.Compute`).

        `inputs` and the result are uint8 tensors, `[number of bytes]` each.
        """
        stage, kind, microbatch, _ = action
        if kind == "W":
            self.splits.run(stage, microbatch)
            return []
        if kind == "F":
            return self._run_forward(action, iter(inputs))
        return self._run_backward(action, iter(inputs))

    def release(self, outputs: Tensors) -> None:
        """Do nothing: the outputs were packed bytes; the tree itself is freed with its graph."""

    def _run_forward(self, action: Action, inputs: Iterator[torch.Tensor | None]) -> Tensors:
        stage, _, microbatch, _ = action
        batch = self._batch(stage, microbatch)
        tree = None
        leaves: list[torch.Tensor] = []
        if stage > 0:
            form, tensors = self._received("F", stage, microbatch, inputs)
            leaves = [t for t, leaf in zip(tensors, form.leaves, strict=True) if leaf.requires_grad]
            tree = form.tree(tensors)
        for hop in self._plan.hops_in(action):
            form, tensors = self._received("P", hop.stage, microbatch, inputs)
            self.store.receive(batch, form.tree(tensors))
        with self.store.running(stage, batch):
            [made] = self.forward(stage, microbatch, [tree])
        self.store.check_forward(stage)
        if not self.call.forward_only:
            self._keep(stage, microbatch, leaves, made)
        outputs: Tensors = []
        if stage < self._last_stage:
            outputs = self._bytes_of(made, ("F", stage, stage + 1), microbatch)
        for hop in self._plan.hops_out(action):
            values = self.store.values(batch, hop.names)
            outputs += self._bytes_of(values, ("P", stage, hop.taker), microbatch)
        if self.call.forward_only:
            self._forget(stage, microbatch, "F")
        else:
            kept = self._plan.dropped.get(("B", stage), ())
            names = [name for name in self._published(stage) if name not in kept]
            self.store.release(batch, names)
        return outputs

    def _keep(self, stage: int, microbatch: int, leaves: list[torch.Tensor], made: object) -> None:
        """Replace the stage's saved output with one root of all that its backward starts from."""
        # With one root, and inputs that are leaves, Megatron's own `forward_step` and
        # `backward_step` run as for a single tensor. What requires no grad gets none, and nothing
        # of it travels back.
        origins = self.store.origins(self._batch(stage, microbatch), self._published(stage))
        _, outputs = self._live[stage, microbatch]
        gradients: list[torch.Tensor | None] = []
        sent: tuple[Leaf, ...] = ()
        if stage < self._last_stage:
            flat, form = flatten(made, self._what(stage, microbatch), self._needs_gradient)
            sent = tuple(leaf for leaf in form.leaves if leaf.requires_grad)
            tensors = [t for t, leaf in zip(flat, form.leaves, strict=True) if leaf.requires_grad]
            roots = [*tensors, *origins]
            outputs = [joined(roots, gradients) if roots else torch.zeros(())]
        self._live[stage, microbatch] = (list(leaves), outputs)
        self._ends[stage, microbatch] = _End(sent, gradients, len(origins))

    def _needs_gradient(self, tensor: torch.Tensor) -> bool:
        """Return whether a gradient comes back for a tensor of a sent tree."""
        return tensor.requires_grad and not self.call.forward_only

    def _run_backward(self, action: Action, inputs: Iterator[torch.Tensor | None]) -> Tensors:
        stage, kind, microbatch, _ = action
        batch = self._batch(stage, microbatch)
        end = self._ends.pop((stage, microbatch))
        of_root: Tensors = [None]
        if stage < self._last_stage:
            what = self._what(stage, microbatch)
            end.gradients.extend(self._gradients(inputs, end.leaves, what))
            # Their gradients come through the sums of their takers (`routes._Publish`).
            end.gradients.extend([None] * end.num_published)
            of_root = [torch.zeros((), device=self._device)]
        for hop in self._plan.hops_in(action):
            names = self.store.with_gradient(batch, hop.names)
            looks = [self.store.look(batch, name) for name in names]
            routed = [Leaf(tuple(shape), dtype, requires_grad=True) for shape, dtype in looks]
            what = f"routes {', '.join(names)} from stage {hop.stage}"
            arrived = self._gradients(inputs, routed, what)
            self.store.put_gradients(batch, dict(zip(names, arrived, strict=True)))
        with self.store.running(stage, batch):
            found = self.backward(stage, microbatch, of_root, split=kind == "I")
        outputs: Tensors = []
        if stage > 0:
            outputs.append(pack([grad for grad in found if grad is not None], self._device))
        for hop in self._plan.hops_out(action):
            names = self.store.with_gradient(batch, hop.names)
            outputs.append(pack(self.store.pop_gradients(batch, names), self._device))
        self._forget(stage, microbatch, "B")
        return outputs

    def _received(
        self, kind: str, stage: int, microbatch: int, inputs: Iterator[torch.Tensor | None]
    ) -> tuple[TreeForm, list[torch.Tensor]]:
        form = self.forms.read((kind, stage), inputs)
        what = f"what stage {stage} gets" if kind == "F" else f"what stage {stage} published"
        packed = next(inputs)
        assert packed is not None
        tensors = unpack(packed, form.leaves, f"{what} for micro-batch {microbatch}")
        for tensor, leaf in zip(tensors, form.leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        return form, tensors

    @staticmethod
    def _gradients(
        inputs: Iterator[torch.Tensor | None], leaves: Sequence[Leaf], what: str
    ) -> list[torch.Tensor]:
        packed = next(inputs)
        assert packed is not None
        return unpack(packed, leaves, f"the gradient of {what}")

    def _bytes_of(
        self, tree: object, key: tuple[str, int, int], microbatch: int
    ) -> list[torch.Tensor | None]:
        """Return a tree's tensors to send: a header until its form is agreed, then the bytes."""
        what = self._what(key[1], microbatch)
        tensors, form = flatten(tree, what, self._needs_gradient)
        return [*self.forms.headers(key, form, what), pack(tensors, self._device)]

    def _forget(self, stage: int, microbatch: int, kind: str) -> None:
        """Drop route tensors that this rank no longer needs after an evaluation's F, or after B."""
        names = set(self._published(stage))
        if kind == "F":  # other stages of this rank may take some
            names.difference_update(self._plan.dropped.get(("B", stage), ()))
        names.update(self._plan.dropped.get((kind, stage), ()))
        self.store.forget(self._batch(stage, microbatch), sorted(names))

    def _batch(self, stage: int, microbatch: int) -> Batch:
        """Return the key of a micro-batch; the twin's micro-batches have the same indices."""
        return microbatch, self.table.schedule.placement.is_crossed(stage)

    def _published(self, stage: int) -> tuple[str, ...]:
        return self.trees.declared[stage].publishes

    @staticmethod
    def _what(stage: int, microbatch: int) -> str:
        return f"what stage {stage} hands on for micro-batch {microbatch}"


@dataclass
class TreeSteps:
    """Builds the steps of a model whose stages exchange trees."""

    declared: Trees
    _forms: dict[tuple[bool, str], Forms] = field(default_factory=dict)
    """By (forward only, shapes): training and evaluation differ, and so do micro-batch sizes."""

    def forms(self, call: Call, shapes: Shapes) -> Forms:
        """Return the tree forms for steps of this kind."""
        return self._forms.setdefault((call.forward_only, str(shapes)), Forms(self.declared.varies))

    def compute(self, call: Call, table: Table, forms: Forms, splits: SplitBackward) -> TreeCompute:
        """Return the `TreeCompute` of one step."""
        store = RouteStore(dict(self.declared.declared))
        return TreeCompute(
            call, table, splits=splits, forms=forms, store=store, trees=self.declared
        )


def agree_trees(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    shapes_travel: bool,
) -> TreeSteps | None:
    """Gather the declarations of all stages; None without any. Collective over a pipeline.

    Args:
        chunks: The model chunks of this rank.
        placement: The placement of all stages.
        group: The pipeline-parallel group.
        shapes_travel: Whether sequence lengths vary (`--variable-seq-lengths`).

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
    return TreeSteps(Trees(routes, by_stage, varies))


def channels_of_routes(
    routes: tuple[Route, ...], placement: Placement, rank: int, peers: Peers
) -> list[Channel]:
    """Return the channels on which this rank sends or receives route tensors."""
    me, channels = peers.pipeline[rank], set()
    for hops in plan_routes(routes, placement).sent.values():
        for hop in hops:
            source, target = placement.rank_of[hop.stage], placement.rank_of[hop.taker]
            there = peers.mirrored if hop.to_twin else peers.pipeline
            if source == rank:
                channels.add(Channel(me, there[target], hop.kind))
            if target == rank:
                channels.add(Channel(there[source], me, hop.kind))
    return sorted(channels)
