"""A pipeline schedule: one ordered list of actions per rank.

Nothing here depends on how an action is executed. Generators build schedules, and passes and
renderers read them. All of this depends only on the standard library.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

Kind = Literal["F", "B", "I", "W", "R"]
"""F: forward pass. B: full backward pass. I: input gradient. W: weight gradient (B = I + W). R:
recomputation or receipt of activations on a backward rank (see `Schedule.disaggregated`)."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "R")

Option = str | int | bool

SliceSizes = tuple[tuple[float, ...], ...]
"""By micro-batch: the number of tokens in each slice, as a fraction of the longest micro-batch."""

Link = tuple[int, int]
"""(sending rank, receiving rank). If both are the same, the receiver is the rank's twin."""

_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
# At most nine digits, because no table needs more, and for thousands of digits `int`
# raises a different error.
_ACTION = re.compile(r"([0-9]{1,9})([FBIWR])([0-9]{1,9})(?:\.([0-9]{1,9}))?")


class Action(NamedTuple):
    """A pass over one stage, for a micro-batch or one of its slices."""

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0
    """Index of the sequence slice that this action processes."""

    @property
    def turn(self) -> tuple[int, int]:
        """Place among a stage's actions of this kind, in the order of micro-batches.

        Within a micro-batch, slices run their backward passes in reverse order.
        """
        if self.kind == "F":
            return self.microbatch, self.slice
        return self.microbatch, -self.slice

    def __str__(self) -> str:
        """Return the text form used by torch.distributed.pipelining, such as `2F0` or `2F0.3`."""
        text = f"{self.stage}{self.kind}{self.microbatch}"
        return f"{text}.{self.slice}" if self.slice else text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form of an action, such as `2F0` or `1I3`, or `2F0.3` for slice 3.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text[:40]!r} is not an action; write the stage, kind (F, B, I, W or R) and "
                f"micro-batch, as in 2F0"
            )
        stage, kind, microbatch, slice_index = match.groups(default="0")
        return cls(
            int(stage),
            kind,  # type: ignore[arg-type]
            int(microbatch),
            int(slice_index),
        )


Row = tuple[Action, ...]
"""The actions on one rank, in execution order."""


def parse_row(cells: Iterable[str]) -> tuple[Row, frozenset[int]]:
    """Return the actions in a row of cells and the positions where pairs start (`Schedule.pairs`).

    A cell is an action such as `2F0`, a pair in torch.distributed.pipelining's notation, such as
    `(0F4;7B1)OVERLAP_F_B`, or empty.

    Raises:
        ScheduleError: A cell is anything else; the message gives its number.
    """
    row: list[Action] = []
    pairs: set[int] = set()
    for number, cell in enumerate(cells, start=1):
        pair = _PAIR.fullmatch(cell.strip())
        try:
            if pair:
                pairs.add(len(row))
                row += map(Action.parse, pair.groups())
            elif cell.strip():
                row.append(Action.parse(cell))
        except ScheduleError as error:
            raise ScheduleError(f"cell {number}: {error}") from error
    return tuple(row), frozenset(pairs)


class Output(NamedTuple):
    """A result that a micro-batch 0 action sends to another stage or rank."""

    target: Action
    """The action that needs the result."""
    link: Link | None
    """The link that carries the tensor, or None if the tensor stays on its rank."""


class Bypass(NamedTuple):
    """A message that skips the stages between two ranks, sent by the model once per micro-batch.

    A bypass does not constrain a table further: the receiving forward pass already depends on the
    sending one, through the stages in between. Backward passes run in the opposite order.
    """

    kind: Literal["P", "G"]
    """P: tensors, sent from a forward pass to a later stage's forward pass. G: their gradients,
    sent in the opposite direction."""
    stage: int
    """The sending stage."""
    taker: int
    """The receiving stage."""
    names: tuple[str, ...]
    """Names of the tensors in the message."""
    to_twin: bool
    """Whether the receiver belongs to the mirrored pipeline."""

    def message(self, action: Action) -> Message:
        """Return the message for an action's micro-batch and slice."""
        return Message(
            self.kind,
            self.stage,
            action.microbatch,
            action.slice,
            int(self.to_twin),
        )


@dataclass(frozen=True)
class Schedule:
    """A static pipeline schedule: every rank's actions, in order. Messages are derived from them.

    If the placement has twins (BitPipe), the schedule is the table for one of two mirrored
    pipelines, each of which runs half of the micro-batches. `transforms.literal_rows` returns the
    table for all ranks.
    """

    name: str
    """Registered name, for example `zb-v`, or `csv:FILE` for a loaded table."""
    placement: Placement
    num_microbatches: int
    """Number of micro-batches that one pipeline runs per step, numbered from 0."""
    rows: tuple[Row, ...]
    """One row per pipeline rank."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options that distinguish tables with the same name, for example `{"chunks": 2}`."""
    bypasses: tuple[Bypass, ...] = ()
    """Messages that skip stages, in the order in which an action sends or receives them."""
    slices: tuple[float, ...] = (1.0,)
    """Each slice's share of a micro-batch's tokens (`slices.py`). Every stage runs the forward
    passes for a micro-batch's slices in order, because attention reads keys and values from earlier
    slices. Their backward passes run in reverse, because a backward pass adds to the gradients of
    the keys and values that it reads."""
    slice_sizes: SliceSizes = ()
    """Slice sizes by micro-batch, if lengths differ, in which case `slices` is unused. If empty,
    all micro-batches are cut into `slices`."""
    pairs: tuple[frozenset[int], ...] = ()
    """By rank: positions of forward passes that run together with the following backward pass as
    one action, so that one pass's computation hides the other's communication. A pair starts when
    the inputs of both actions have arrived and sends its results when both have finished. Empty if
    the table has no pairs. Code that reads only the rows sees the two actions in sequence, which is
    correct for counting activations and gradients and for the order in which gradients are
    summed."""

    @property
    def pp(self) -> int:
        """Number of pipeline ranks, counting both twins."""
        return self.placement.num_ranks * self.placement.twins

    @property
    def total_microbatches(self) -> int:
        """Number of micro-batches per step, counting both twins."""
        return self.num_microbatches * self.placement.twins

    @cached_property
    def num_slices(self) -> int:
        """Maximum number of slices per micro-batch, or 1 if no micro-batch is cut."""
        if self.slice_sizes:
            return max(map(len, self.slice_sizes))
        return len(self.slices)

    def num_slices_of(self, microbatch: int) -> int:
        """Return the number of slices in a micro-batch."""
        return len(self.sizes_of(microbatch))

    def sizes_of(self, microbatch: int) -> tuple[float, ...]:
        """Return the sizes of a micro-batch's slices, relative to the longest micro-batch."""
        if self.slice_sizes:
            return self.slice_sizes[microbatch]
        return self.slices

    @property
    def is_for_one_step(self) -> bool:
        """Whether the table was made for the lengths in one step's data."""
        return bool(self.slice_sizes)

    @property
    def places_per_stage(self) -> int:
        """Number of places for slices in a step. A stage runs at most one F per place.

        Slice s of micro-batch i has place `i * num_slices + s`. If micro-batches have different
        numbers of slices, the positions after a micro-batch's last slice are left empty.
        """
        return self.num_microbatches * self.num_slices

    def place(self, action: Action) -> int:
        """Return the place of an action's slice in the step; see `places_per_stage`."""
        return action.microbatch * self.num_slices + action.slice

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is split into."""
        return self.placement.num_stages

    @property
    def disaggregated(self) -> bool:
        """Whether a stage's forward and backward passes run on separate ranks.

        If so, every backward pass is preceded by an R, which reruns the forward pass or receives
        saved activations.
        """
        return self.placement.backward_rank_of is not None

    @property
    def ships_activations(self) -> bool:
        """Whether forward ranks send layer inputs and backward ranks recompute layer by layer."""
        return self.disaggregated and self.options.get("activations") == "ship"

    @property
    def weight_copies(self) -> int:
        """Number of ranks that hold a stage's weights."""
        return 2 if self.disaggregated else self.placement.twins

    @property
    def splits_backward(self) -> bool:
        """Whether any backward pass is split into I and W."""
        return bool(self.split)

    def pairs_of(self, rank: int) -> frozenset[int]:
        """Return the positions in a rank's row where a pair starts."""
        return self.pairs[rank] if self.pairs else frozenset()

    def begins(self, rank: int) -> list[int]:
        """Return the positions in a rank's row where a single action or a pair starts."""
        pairs = self.pairs_of(rank)
        num_actions = len(self.rows[rank])
        return [index for index in range(num_actions) if index - 1 not in pairs]

    def cells(self, rank: int) -> Iterator[str]:
        """Yield every action or pair on a rank as text, in the format that `parse_row` reads."""
        row = self.rows[rank]
        pairs = self.pairs_of(rank)
        for index in self.begins(rank):
            action = row[index]
            if index in pairs:
                partner = row[index + 1]
                yield f"({action};{partner})OVERLAP_F_B"
            else:
                yield str(action)

    # Cached, because `needs` and `feeds` use it for every action.
    @cached_property
    def split(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, micro-batch, slice) of every backward pass that is split into I and W."""
        split: set[tuple[int, int, int]] = set()
        for row in self.rows:
            for stage, kind, microbatch, slice_index in row:
                if kind == "I":
                    split.add((stage, microbatch, slice_index))
        return frozenset(split)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results an action needs. All dependencies are derived from this.

        F needs the previous stage's F. B and I need the forward pass on their own stage and the
        backward pass on the next stage. W needs its stage's I. R needs the same inputs as F or, if
        activations are shipped, its stage's F, which runs on another rank. On the same stage, a
        slice's F also needs the previous slice's F, and its backward pass needs the next slice's
        backward pass.
        """
        stage, kind, _, slice_index = action
        if kind == "W":
            return (action._replace(kind="I"),)
        if kind == "R" and self.ships_activations:
            return (action._replace(kind="F"),)
        source = self.placement.source(stage, kind)
        needed: list[Action] = []
        # Recomputation needs the same input as the stage's forward pass, but not that
        # pass's result.
        if kind in ("F", "R"):
            if source is not None:
                needed.append(action._replace(stage=source, kind="F"))
            if slice_index:
                needed.append(action._replace(slice=slice_index - 1))
            return tuple(needed)
        # The backward pass reads the activations that F keeps or, if the roles are
        # separate, R.
        keeper_kind: Kind = "R" if self.disaggregated else "F"
        needed.append(action._replace(kind=keeper_kind))
        if source is not None:
            needed.append(self._backward(action, source))
        if slice_index + 1 < self.num_slices_of(action.microbatch):
            next_slice = action._replace(slice=slice_index + 1)
            needed.append(self._backward(next_slice, stage))
        return tuple(needed)

    def feeds(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that need an action's result. This is the inverse of `needs`."""
        stage, kind, _, slice_index = action
        target = self.placement.target(stage, kind)
        fed: list[Action] = []
        if kind == "F":
            # If backward ranks recompute, no rank runs the last stage's F, and the last
            # stage's R takes the input instead.
            if target is not None and self.runs_forward(target):
                fed.append(action._replace(stage=target))
            if slice_index + 1 < self.num_slices_of(action.microbatch):
                fed.append(action._replace(slice=slice_index + 1))
            # The activations go to this stage's backward pass or R. If backward ranks
            # recompute instead, the next stage's R starts from this output.
            if not self.disaggregated:
                fed.append(self._backward(action, stage))
            elif self.ships_activations:
                fed.append(action._replace(kind="R"))
            elif target is not None:
                fed.append(action._replace(stage=target, kind="R"))
        elif kind == "R":
            fed.append(self._backward(action, stage))
        elif kind in ("B", "I"):
            if target is not None:
                fed.append(self._backward(action, target))
            if kind == "I":
                fed.append(action._replace(kind="W"))
            if slice_index:
                previous_slice = action._replace(slice=slice_index - 1)
                fed.append(self._backward(previous_slice, stage))
        return tuple(fed)

    def travels(self, source: Action, target: Action) -> bool:
        """Return whether the result that `target` needs leaves the stage or rank of `source`."""
        if source.stage != target.stage:
            return True
        source_rank = self.placement.rank_for(source.stage, source.kind)
        target_rank = self.placement.rank_for(target.stage, target.kind)
        return source_rank != target_rank

    @cached_property
    def links(self) -> Mapping[Kind, Sequence[Sequence[Output]]]:
        """By kind and stage: what micro-batch 0's action sends to other stages or ranks.

        All micro-batches have the same outputs, so this stays small for tables with millions of
        actions.
        """
        links: dict[Kind, list[list[Output]]] = {}
        for kind in KINDS:
            links[kind] = []
            for stage in range(self.num_stages):
                action = Action(stage, kind, 0)
                links[kind].append(self._outputs(action))
        return links

    def _outputs(self, action: Action) -> list[Output]:
        """Return what an action sends to other stages or ranks."""
        placement = self.placement
        rank = placement.rank_for(action.stage, action.kind)
        outputs = []
        for target in self.feeds(action):
            if not self.travels(action, target):
                continue
            target_rank = placement.rank_for(target.stage, target.kind)
            link: Link | None = (rank, target_rank)
            # `hops` does not cover a stage's two roles, which are on different
            # ranks.
            if target.stage != action.stage:
                lower_stage = min(target.stage, action.stage)
                if placement.hops[lower_stage] == "local":
                    link = None
            outputs.append(Output(target, link))
        return outputs

    def _backward(self, action: Action, stage: int) -> Action:
        """Return a stage's backward pass for an action's micro-batch and slice."""
        kind: Kind = "B"
        if (stage, action.microbatch, action.slice) in self.split:
            kind = "I"
        return action._replace(stage=stage, kind=kind)

    def runs_forward(self, stage: int) -> bool:
        """Return whether any rank runs a stage's F.

        If backward ranks recompute forward passes, no rank needs the last stage's output.
        """
        is_last = stage == self.num_stages - 1
        return not (self.disaggregated and is_last) or self.ships_activations

    def marked(self, rank: int, index: int, context: int = 5) -> str:
        """Return an action, marked with `>> <<`, and its neighbours, for an error message.

        An index after the last action marks the end of the row.
        """
        row = self.rows[rank]
        texts = [str(action) for action in row]
        if index == len(texts):
            texts.append("end")
        texts[index] = f">>{texts[index]}<<"
        first = max(0, index - context)
        last = index + context
        cells = texts[first : last + 1]
        if first > 0:
            cells.insert(0, "...")
        if last < len(row):
            cells.append("...")
        return f"rank {rank}, action {index}: {' '.join(cells)}"

    @property
    def label(self) -> str:
        """The name and options to display, for example `bitpipe order=zb`."""
        words = [self.name]
        for key, value in self.options.items():
            words.append(f"{key}={value}")
        return " ".join(words)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table. At start-up, ranks compare digests to verify that tables match."""
        shape = (self.placement, self.num_microbatches)
        sha = hashlib.sha256(repr(shape).encode())
        if self.bypasses:
            sha.update(repr(self.bypasses).encode())
        if self.slice_sizes:
            sha.update(repr(self.slice_sizes).encode())
        elif self.num_slices > 1:
            sha.update(repr(self.slices).encode())
        for rank in range(len(self.rows)):
            row_text = ",".join(self.cells(rank)) + "\n"
            sha.update(row_text.encode())
        return sha.hexdigest()
