"""Trees of tensors between stages: their wire format and the actions of models that use them.

A tree is a tensor, None, or a tuple, list or dict (with string keys) of trees. Its tensors are sent
as one message of bytes. A `TreeForm` describes structure, shapes and dtypes, and is sent once if
all micro-batches have the same form, otherwise as a header before each tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.devices import device_of
from megatron_ext.errors import MessageMismatch, ScheduleError
from megatron_ext.features.trees.route_plan import connect, plan_routes
from megatron_ext.features.trees.routes import Declared, RouteStore, declared
from megatron_ext.runtime.compute import StageCompute
from megatron_ext.runtime.program import Form
from megatron_ext.transport.dtypes import plain

if TYPE_CHECKING:
    from megatron_ext.features.trees.route_plan import Route, RoutePlan
    from megatron_ext.features.trees.routes import Batch, Published
    from megatron_ext.runtime.compute import Call, Tensors
    from megatron_ext.runtime.program import Shapes
    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.schedules.table.placement import Placement

Tree = Any
"""A tensor, None, or a tuple, list or dict of trees."""

# The receiver uses the tensors in place, so align them to a multiple of every dtype's
# size and to the size of a cache line.
_ALIGNMENT = 64


class Leaf(NamedTuple):
    """Shape, dtype and requires_grad of one tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{_name_of(self.dtype)} {shape}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TreeForm:
    """The form of a tree: everything except the data of its tensors."""

    text: str
    """Skeleton and leaves as JSON. Two forms are equal if their texts are."""
    skeleton: Any = field(compare=False)
    """The tree with 0 in place of each tensor: null, 0, ["tuple", ...], ["list", ...], or
    ["dict", keys, ...]."""
    leaves: tuple[Leaf, ...] = field(compare=False)
    """One leaf per tensor, in order."""

    def header(self) -> torch.Tensor:
        """Return the header to send: `[number of bytes]`, uint8 on the CPU."""
        text = bytearray(self.text.encode())
        return torch.frombuffer(text, dtype=torch.uint8)

    def tree(self, tensors: Sequence[torch.Tensor]) -> Tree:
        """Rebuild the tree from its tensors, given in order."""
        return _grown(self.skeleton, iter(tensors))

    def __str__(self) -> str:
        leaves = ", ".join(map(str, self.leaves))
        return f"[{leaves}]"


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
            # A corrupt header may name any attribute of torch.
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"torch.{name} is not a dtype")
            leaf = Leaf(tuple(shape), dtype, requires_grad)
            leaves.append(leaf)
        return TreeForm(text.decode(), skeleton, tuple(leaves))
    except (ValueError, TypeError, AttributeError) as error:
        raise MessageMismatch(
            f"cannot read a header of {len(text)} bytes: {error}; install the same version of "
            f"megatron_ext on all ranks"
        ) from error


def flatten(
    tree: Tree,
    subject: str,
    *,
    trains: bool,
) -> tuple[list[torch.Tensor], TreeForm]:
    """Return a tree's tensors, in order, and its form.

    Args:
        tree: The tree.
        subject: Name of the tree for the error message.
        trains: Whether gradients are needed. If not, no leaf requires grad.

    Raises:
        ScheduleError: The tree contains an object of an unsupported type.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _cut(tree, tensors, subject)
    leaves = []
    for tensor in tensors:
        shape = list(tensor.shape)
        requires_grad = tensor.requires_grad and trains
        leaves.append((shape, _name_of(tensor.dtype), requires_grad))
    # No spaces: the text is sent as the header.
    described = [skeleton, leaves]
    text = json.dumps(described, separators=(",", ":"))
    return tensors, parsed(text.encode())


def _cut(
    tree: Tree,
    tensors: list[torch.Tensor],
    subject: str,
) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return 0
    if tree is None:
        return None
    # Accept only exact types: a named tuple, for example, would arrive as a plain
    # tuple.
    kind = type(tree)
    skeleton: list[Any]
    if kind in (tuple, list):
        skeleton = [kind.__name__]
        subtrees = tree
    elif kind is dict and all(isinstance(key, str) for key in tree):
        skeleton = ["dict", list(tree)]
        subtrees = tree.values()
    else:
        raise _unsupported(subject, kind)
    for subtree in subtrees:
        skeleton.append(_cut(subtree, tensors, subject))
    return skeleton


def _unsupported(subject: str, kind: type) -> ScheduleError:
    return ScheduleError(
        f"{subject} contains a {kind.__name__}; return a tensor, None, or a tuple, list or dict "
        f"(with string keys) of them"
    )


def _grown(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Tree:
    if skeleton is None:
        return None
    if skeleton == 0:
        return next(tensors)
    kind, *parts = skeleton
    if kind == "dict":
        keys, *values = parts
        subtree_of = {}
        for key, value in zip(keys, values, strict=True):
            subtree_of[key] = _grown(value, tensors)
        return subtree_of
    subtrees = [_grown(part, tensors) for part in parts]
    if kind == "tuple":
        return tuple(subtrees)
    return subtrees


def pack(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Concatenate the bytes of tensors of any dtype and shape.

    Each tensor is aligned to 64 bytes. A single tensor is not copied.

    Returns:
        `[number of bytes]`, uint8.
    """
    parts = []
    for tensor in tensors:
        elements = plain(tensor.detach()).reshape(-1)
        parts.append(elements.view(torch.uint8))
    if len(parts) == 1:
        return parts[0]
    sizes = [part.numel() for part in parts]
    ranges, end = _placed(sizes)
    packed = torch.empty(end, dtype=torch.uint8, device=device)
    for place, part in zip(ranges, parts, strict=True):
        packed[place].copy_(part)
    return packed


def unpack(
    packed: torch.Tensor,
    leaves: Sequence[Leaf],
    subject: str,
) -> list[torch.Tensor]:
    """Return the tensors in bytes from `pack`, as views with the leaves' shapes and dtypes.

    Raises:
        MessageMismatch: The byte count does not match the leaves. The message names `subject`.
    """
    sizes = []
    for leaf in leaves:
        num_elements = torch.Size(leaf.shape).numel()
        sizes.append(num_elements * leaf.dtype.itemsize)
    ranges, end = _placed(sizes)
    if packed.dtype != torch.uint8 or packed.numel() != end:
        raise MessageMismatch(
            f"{subject} has {packed.nbytes} bytes, but its tensors need {end}; declare "
            f'boundary="varies" if shapes change between micro-batches'
        )
    tensors = []
    for place, leaf in zip(ranges, leaves, strict=True):
        elements = packed[place].view(leaf.dtype)
        tensors.append(elements.view(leaf.shape))
    return tensors


def _placed(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Return each part's byte range, and the end of the last range."""
    # Align each part so that the receiver can view its bytes as any dtype in place.
    ranges: list[slice] = []
    begin = 0
    end = 0
    for size in sizes:
        end = begin + size
        ranges.append(slice(begin, end))
        num_blocks = -(-end // _ALIGNMENT)  # rounded up
        begin = num_blocks * _ALIGNMENT
    return ranges, end


# Needed because upstream's `backward_step` starts from a single tensor.
class _Join(torch.autograd.Function):
    """Joins tensors into one root, a float32 scalar. The tensors' data may be freed.

    When the backward pass runs, `gradients` has one entry per tensor. A tensor whose entry is None
    gets no gradient, but its autograd node still runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradients: list[torch.Tensor | None],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        return (None, *gradients)


# -- actions ---------------------------------------------------------------------------------------


class Channel(NamedTuple):
    """The trees of one kind that one stage sends to another."""

    kind: str
    """F for the stage's output, P for the tensors that it publishes."""
    stage: int
    """The sending stage."""
    taker: int
    """The receiving stage."""


@dataclass
class Forms:
    """The known forms of the trees that this rank sends and receives."""

    varies: bool
    """Whether forms may change between micro-batches."""
    agreed: bool = False
    """Whether sender and receiver know all forms, so that messages need no headers."""
    _sent: dict[Channel, TreeForm] = field(default_factory=dict)
    _received: dict[Channel, TreeForm] = field(default_factory=dict)

    @property
    def of_messages(self) -> dict[str, list[Form]]:
        """Message kind -> a message's tensors: the bytes, plus a header until forms are agreed."""
        tree = Form(None, torch.uint8)
        with_header = [tree]
        if not self.agreed:
            with_header = [tree._replace(header=True), tree]
        # Gradients need no header, because they have their tensors' form.
        return {
            "F": with_header,
            "P": with_header,
            "B": [tree],
            "G": [tree],
        }

    def step_done(self) -> None:
        """Record that a step is complete, so this rank has sent and received every form."""
        # Sender and receiver saw the same headers in the same step, so they agree
        # without a handshake.
        self.agreed = not self.varies

    def headers(
        self,
        channel: Channel,
        form: TreeForm,
        subject: str,
    ) -> list[torch.Tensor]:
        """Return the header to send with a tree of this form, or nothing once forms are agreed.

        Raises:
            ScheduleError: A fixed form has changed.
        """
        if not self.varies:
            first_form = self._sent.setdefault(channel, form)
            if first_form != form:
                raise ScheduleError(
                    f"{subject} is {form}, but was {first_form} in an earlier micro-batch; declare "
                    f'boundary="varies" where the model is built (routes.declare)'
                )
        if self.agreed:
            return []
        return [form.header()]

    def read(
        self,
        channel: Channel,
        inputs: Iterator[torch.Tensor | None],
    ) -> TreeForm:
        """Return the next tree's form, and consume its header from `inputs`, if any."""
        if self.agreed:
            return self._received[channel]
        header = next(inputs)
        assert header is not None
        # Reading a header blocks until the device catches up. This happens only in the first
        # step, or in every step if the tensors' shapes vary.
        text = bytes(header.cpu().numpy())
        form = parsed(text)
        self._received[channel] = form
        return form


@dataclass
class Trees:
    """The declarations of a model's stages, and the forms of the trees that they exchange."""

    routes: tuple[Route, ...]
    declared: Mapping[int, Declared]
    """Stage -> its declarations."""
    varies: bool
    """Whether a tree's form may change between micro-batches."""
    _forms: dict[tuple[bool, str], Forms] = field(default_factory=dict)
    """(forward only, shapes) -> forms. Training and evaluation have different forms, and so do
    micro-batches of different sizes."""

    def forms(self, call: Call, shapes: Shapes) -> Forms:
        """Return the tree forms for this kind of step."""
        # Shapes are dicts, which cannot be keys, so use their text.
        key = (call.forward_only, str(shapes))
        return self._forms.setdefault(key, Forms(self.varies))


class _Root(NamedTuple):
    """State that a forward pass keeps for its backward pass."""

    sent: list[Leaf]
    """The sent tensors whose gradients come back."""
    gradients: Tensors
    """The gradients of everything that the root joins (`_Join`): the sent tensors, then the
    published tensors, for which they are None."""


@dataclass
class TreeCompute(StageCompute):
    """Runs the actions of one step on this rank's chunks, with trees and routes."""

    forms: Forms = field(kw_only=True)
    trees: Trees = field(kw_only=True)
    _roots: dict[tuple[int, int], _Root] = field(default_factory=dict, init=False)
    """(stage, micro-batch) -> state that a forward pass keeps for its backward pass."""

    def __post_init__(self) -> None:
        """Precompute what is constant during the step."""
        schedule = self.table.schedule
        self._plan: RoutePlan = plan_routes(self.trees.routes, schedule.placement)
        self._store = RouteStore(self.trees.declared)
        self._device = device_of(self.call.chunks)
        self._last_stage = schedule.num_stages - 1

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action. Its inputs and outputs are uint8 tensors, `[number of bytes]` each."""
        stage, kind, microbatch, _ = action
        if kind == "W":
            self.splits.run(stage, microbatch)
            return []
        # The twin's micro-batches have the same indices.
        placement = self.table.schedule.placement
        batch = (microbatch, placement.is_crossed(stage))
        if kind == "F":
            return self._run_forward(action, batch, iter(inputs))
        return self._run_backward(action, batch, iter(inputs))

    def release(self, outputs: Tensors) -> None:
        """Do nothing: the outputs are packed bytes, and the tree is freed along with its graph."""

    def end_step(self) -> None:
        """Record that every message's sender and receiver now know its tree's form."""
        self.forms.step_done()

    def _run_forward(
        self,
        action: Action,
        batch: Batch,
        inputs: Iterator[torch.Tensor | None],
    ) -> Tensors:
        stage, _, microbatch, _ = action
        # Receive the previous stage's output and the tensors on routes.
        tree = None
        leaves: Tensors = []
        if stage > 0:
            channel = Channel("F", stage - 1, stage)
            tree, tensors = self._received(channel, microbatch, inputs)
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
        bypasses_received = self._plan.received.get(("P", stage), ())
        for bypass in bypasses_received:
            channel = Channel("P", bypass.stage, stage)
            values, _ = self._received(channel, microbatch, inputs)
            self._store.receive(batch, values)
        with self._store.running(stage, batch):
            [output] = self.forward(stage, microbatch, [tree])
        self._store.check_forward(stage)
        # Send the stage's output first, to match the order of messages in `exchanges`.
        outputs: Tensors = []
        sent: list[torch.Tensor] = []
        if stage < self._last_stage:
            channel = Channel("F", stage, stage + 1)
            outputs, sent = self._bytes_of(output, channel, microbatch)
        if not self.call.forward_only:
            self._keep_root(action, batch, leaves, sent)
        bypasses_sent = self._plan.sent.get(("P", stage), ())
        for bypass in bypasses_sent:
            tensor_of_route = {}
            for name in bypass.names:
                tensor_of_route[name] = self._store[batch, name].value
            channel = Channel("P", stage, bypass.taker)
            messages, _ = self._bytes_of(tensor_of_route, channel, microbatch)
            outputs += messages
        # Keep published tensors that other stages on this rank have yet to take. The
        # last taker drops them.
        names = self.trees.declared[stage].publishes
        dropped_in_backward = self._plan.dropped.get(("B", stage), ())
        published = set(names).difference(dropped_in_backward)
        if self.call.forward_only:
            dropped_in_forward = self._plan.dropped.get(("F", stage), ())
            dropped = published.union(dropped_in_forward)
            self._store.forget(batch, sorted(dropped))
        else:
            self._store.release(batch, published)
        return outputs

    def _keep_root(
        self,
        action: Action,
        batch: Batch,
        leaves: Tensors,
        sent: list[torch.Tensor],
    ) -> None:
        """Keep the stage's leaves and a single root, from which its backward pass starts.

        Megatron's `forward_step` and `backward_step` can then run as with a single tensor. `sent`
        holds the stage's output tensors whose gradients come back.
        """
        stage, _, microbatch, _ = action
        # Published tensors get their gradients from their takers' sums
        # (`routes._Publish`), so their entries stay None.
        origins = []
        for name in self.trees.declared[stage].publishes:
            origin = self._store[batch, name].origin
            if origin is not None:
                origins.append(origin)
        gradients: Tensors = [None] * len(origins)
        _, root = self._live[stage, microbatch]
        if stage < self._last_stage:
            # If nothing that was sent needs a gradient, the root has no graph and
            # Megatron's `backward_step` skips the backward pass.
            root = [torch.zeros(())]
            if sent or origins:
                root = [_Join.apply(gradients, *sent, *origins)]
        self._live[stage, microbatch] = (leaves, root)
        leaves_of_sent = []
        for tensor in sent:
            leaf = Leaf(tuple(tensor.shape), tensor.dtype)
            leaves_of_sent.append(leaf)
        self._roots[stage, microbatch] = _Root(leaves_of_sent, gradients)

    def _run_backward(
        self,
        action: Action,
        batch: Batch,
        inputs: Iterator[torch.Tensor | None],
    ) -> Tensors:
        stage, kind, microbatch, _ = action
        root = self._roots.pop((stage, microbatch))
        of_root: Tensors = [None]
        if stage < self._last_stage:
            subject = f"the gradient of {self._subject(stage, microbatch)}"
            # Insert the gradients in place, before those of published tensors, because
            # the root has referred to this list since the forward pass.
            root.gradients[:0] = self._unpacked(inputs, root.sent, subject)
            # `_Join` ignores this gradient and returns those in its list.
            of_root = [torch.zeros((), device=self._device)]
        bypasses_received = self._plan.received.get(("G", stage), ())
        for bypass in bypasses_received:
            routed = self._with_gradient(batch, bypass.names)
            looks = []
            for published in routed:
                if published.look is not None:
                    looks.append(Leaf(*published.look))
            names = ", ".join(bypass.names)
            subject = f"the gradient of routes {names} from stage {bypass.stage}"
            route_gradients = self._unpacked(inputs, looks, subject)
            for published, gradient in zip(routed, route_gradients, strict=True):
                published.takers.add(gradient)
        # The sums of the takers' gradients are now complete. The backward pass reads
        # them for the tensors that this stage has published.
        splits = kind == "I"
        with self._store.running(stage, batch):
            input_gradients = self.backward(stage, microbatch, of_root, split=splits)
        outputs: Tensors = []
        if stage > 0:
            returned = [
                gradient for gradient in input_gradients if gradient is not None
            ]
            outputs.append(pack(returned, self._device))
        bypasses_sent = self._plan.sent.get(("G", stage), ())
        for bypass in bypasses_sent:
            routed = self._with_gradient(batch, bypass.names)
            sums = [published.pop_gradient() for published in routed]
            outputs.append(pack(sums, self._device))
        dropped = set(self.trees.declared[stage].publishes)
        dropped_in_backward = self._plan.dropped.get(("B", stage), ())
        dropped.update(dropped_in_backward)
        self._store.forget(batch, sorted(dropped))
        return outputs

    def _with_gradient(
        self,
        batch: Batch,
        names: Sequence[str],
    ) -> list[Published]:
        """Return these routes' published tensors whose gradients are sent."""
        with_gradient = []
        for name in names:
            published = self._store[batch, name]
            if published.has_gradient:
                with_gradient.append(published)
        return with_gradient

    def _received(
        self,
        channel: Channel,
        microbatch: int,
        inputs: Iterator[torch.Tensor | None],
    ) -> tuple[Tree, list[torch.Tensor]]:
        form = self.forms.read(channel, inputs)
        subject = f"the message with routes of stage {channel.stage}"
        if channel.kind == "F":
            subject = f"the input of stage {channel.taker}"
        tensors = self._unpacked(
            inputs, form.leaves, f"{subject} for micro-batch {microbatch}"
        )
        for tensor, leaf in zip(tensors, form.leaves, strict=True):
            tensor.requires_grad_(leaf.requires_grad)
        return form.tree(tensors), tensors

    @staticmethod
    def _unpacked(
        inputs: Iterator[torch.Tensor | None],
        leaves: Sequence[Leaf],
        subject: str,
    ) -> list[torch.Tensor]:
        packed = next(inputs)
        assert packed is not None
        return unpack(packed, leaves, subject)

    def _bytes_of(
        self,
        tree: object,
        channel: Channel,
        microbatch: int,
    ) -> tuple[Tensors, list[torch.Tensor]]:
        """Return a tree's bytes and those of its tensors whose gradients come back.

        The bytes include a header if the receiver does not know the tree's form.
        """
        subject = self._subject(channel.stage, microbatch)
        trains = not self.call.forward_only
        tensors, form = flatten(tree, subject, trains=trains)
        packed = pack(tensors, self._device)
        returning = []
        for tensor, leaf in zip(tensors, form.leaves, strict=True):
            if leaf.requires_grad:
                returning.append(tensor)
        headers = self.forms.headers(channel, form, subject)
        return [*headers, packed], returning

    @staticmethod
    def _subject(stage: int, microbatch: int) -> str:
        return f"the output of stage {stage} for micro-batch {microbatch}"


def agree_trees(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    group: dist.ProcessGroup,
    *,
    shapes_travel: bool,
) -> Trees | None:
    """Gather the declarations of all stages. Collective over a pipeline's group.

    `shapes_travel` is set if sequence lengths vary (`--variable-seq-lengths`).

    Returns:
        The declarations, or None if no stage has any.

    Raises:
        ScheduleError: The routes contradict each other. Every rank raises this error.
    """
    own_stages = placement.stages_of[group.rank()]
    own_declarations: dict[int, Declared] = {}
    for stage, chunk in zip(own_stages, chunks, strict=True):
        own_declarations[stage] = declared(chunk)
    num_ranks = group.size()
    by_rank: list[dict[int, Declared]] = [{} for _ in range(num_ranks)]
    dist.all_gather_object(by_rank, own_declarations, group=group)
    # A pipeline's ranks have different stages, so no entry is overwritten.
    by_stage: dict[int, Declared] = {}
    for declarations in by_rank:
        by_stage.update(declarations)
    nothing = Declared()
    if all(declaration == nothing for declaration in by_stage.values()):
        return None
    publishes = []
    takes = []
    varies = shapes_travel
    for stage in range(placement.num_stages):
        declaration = by_stage[stage]
        publishes.append(declaration.publishes)
        takes.append(declaration.takes)
        varies = varies or declaration.boundary == "varies"
    return Trees(connect(publishes, takes), by_stage, varies)
