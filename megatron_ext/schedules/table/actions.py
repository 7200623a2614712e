"""A pipeline schedule: one ordered list of actions for each rank.

Nothing here depends on how an action is executed. Generators build schedules, passes and renderers
read them, with the standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import ScheduleError
from megatron_ext.message import Message

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

Kind = Literal["F", "B", "I", "W", "R"]
"""F: forward. B: full backward. I: gradient of the input. W: gradient of the weights (B = I + W).
R: recomputation (or receipt) of activations on a backward rank (see `Schedule.disaggregated`)."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "R")

Option = str | int | bool

Link = tuple[int, int]
"""(sending rank, receiving rank); equal ranks: to the twin."""

_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
# At most nine digits: no table has more, and `int` refuses thousands of them with another error.
_ACTION = re.compile(r"([0-9]{1,9})([FBIWR])([0-9]{1,9})(?:\.([0-9]{1,9}))?")


class Action(NamedTuple):
    """One piece of computation: a kind of pass over one stage for one micro-batch, or its slice."""

    stage: int
    kind: Kind
    microbatch: int
    slice: int = 0
    """Position in the micro-batch of the part of the sequence that it computes."""

    def __str__(self) -> str:
        """Return the text form of torch.distributed.pipelining, such as `2F0`, or `2F0.3`."""
        text = f"{self.stage}{self.kind}{self.microbatch}"
        return f"{text}.{self.slice}" if self.slice else text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form of an action, such as `2F0` or `1I3`, or `2F0.3` for its slice 3.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text[:40]!r} is not an action; write stage, kind (F, B, I, W or R) and "
                f"micro-batch, as in 2F0"
            )
        stage, kind, microbatch, slice_index = match.groups(default="0")
        return cls(int(stage), kind, int(microbatch), int(slice_index))  # type: ignore[arg-type]


Row = tuple[Action, ...]
"""The actions of one rank, in execution order."""


def parse_row(cells: Iterable[str]) -> tuple[Row, frozenset[int]]:
    """Return the actions of a row of texts, and where pairs begin (`Schedule.pairs`).

    A cell is an action such as `2F0`, a pair as torch.distributed.pipelining writes it, such as
    `(0F4;7B1)OVERLAP_F_B`, or empty.

    Raises:
        ScheduleError: A text is none of these; the message has its number.
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
    """A result of an action of micro-batch 0 that leaves its stage or its rank."""

    target: Action
    """The action that needs it."""
    link: Link | None
    """The link that its tensor takes; None: it stays on its rank."""


class Bypass(NamedTuple):
    """A message past the stages between two ranks, which a model sends for each micro-batch.

    A bypass adds no constraint to a table: the forward that receives it already follows the one
    that sends it through the stages between, and backwards run in the opposite order.
    """

    kind: Literal["P", "G"]
    """P: tensors, from a forward to a later stage's. G: their gradients, in the opposite way."""
    stage: int
    """The sending stage."""
    taker: int
    """The receiving stage."""
    names: tuple[str, ...]
    """The tensors that it carries."""
    to_twin: bool
    """Whether the receiver belongs to the mirrored pipeline."""

    def message(self, action: Action) -> Message:
        """Return the message for the micro-batch and slice of an action."""
        return Message(self.kind, self.stage, action.microbatch, action.slice, int(self.to_twin))


@dataclass(frozen=True)
class Schedule:
    """A static pipeline schedule: the computation of each rank, in order. Messages are derived.

    A schedule whose placement has twins (BitPipe) is the table of one of two mirrored pipelines.
    Each runs half of the micro-batches; `transforms.literal_rows` gives the table of all ranks.
    """

    name: str
    """Registered name, for example `zb-v`; `csv:FILE` for a loaded table."""
    placement: Placement
    num_microbatches: int
    """Micro-batches of one pipeline in one step, numbered from 0."""
    rows: tuple[Row, ...]
    """One row for each pipeline rank."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Options that distinguish tables of one name, for example `{"chunks": 2}`."""
    bypasses: tuple[Bypass, ...] = ()
    """Messages of the model past stages, in the order in which an action sends or takes them."""
    slices: tuple[float, ...] = (1.0,)
    """Share of a micro-batch's tokens in each of its slices (`slices.py`). Each stage runs the
    forwards of a micro-batch's slices in order, because attention reads the keys and values of
    earlier slices, and their backwards in reverse, because those add gradients to them."""
    pairs: tuple[frozenset[int], ...] = ()
    """By rank: positions of the forwards that run as one action with the backward behind them, each
    with its communication behind the other's computation. Both wait for the inputs of both, and
    send their results when both have ended. Empty: the table has no pairs. Code that reads only the
    rows sees the two in sequence, which is right for counting: activations, gradients, the order of
    sums."""

    @property
    def pp(self) -> int:
        """Ranks of the whole pipeline world, both twins together."""
        return self.placement.num_ranks * self.placement.twins

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of the pipeline world in one step, both twins together."""
        return self.num_microbatches * self.placement.twins

    @property
    def num_slices(self) -> int:
        """Slices that each micro-batch is cut into; 1: micro-batches are whole."""
        return len(self.slices)

    @property
    def slices_in_step(self) -> int:
        """Slices of all micro-batches of one pipeline in one step: times that a stage runs F."""
        return self.num_microbatches * len(self.slices)

    @property
    def num_stages(self) -> int:
        """Stages that the model is split into."""
        return self.placement.num_stages

    @property
    def disaggregated(self) -> bool:
        """Whether forwards and backwards of a stage run on different ranks, which both hold it.

        Then an R precedes each backward: it runs the forward again, or receives saved activations.
        """
        return self.placement.backward_rank_of is not None

    @property
    def ships_activations(self) -> bool:
        """Whether forward ranks send layer inputs, from which backwards recompute each layer."""
        return self.disaggregated and self.options.get("activations") == "ship"

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the weights of one stage."""
        return 2 if self.disaggregated else self.placement.twins

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W."""
        return any(action.kind == "I" for row in self.rows for action in row)

    def pairs_of(self, rank: int) -> frozenset[int]:
        """Return the positions of a rank at which a pair begins."""
        return self.pairs[rank] if self.pairs else frozenset()

    def begins(self, rank: int) -> list[int]:
        """Return the positions of a rank at which it begins an action or a pair."""
        pairs = self.pairs_of(rank)
        return [index for index in range(len(self.rows[rank])) if index - 1 not in pairs]

    def cells(self, rank: int) -> Iterator[str]:
        """Yield the text of each action or pair of a rank; `parse_row` reads them."""
        row = self.rows[rank]
        pairs = self.pairs_of(rank)
        for index in self.begins(rank):
            if index in pairs:
                yield f"({row[index]};{row[index + 1]})OVERLAP_F_B"
            else:
                yield str(row[index])

    @cached_property
    def split(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, micro-batch, slice) of each backward that is split into I and W."""
        return frozenset(
            (action.stage, action.microbatch, action.slice)
            for row in self.rows
            for action in row
            if action.kind == "I"
        )

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results an action needs: the one rule of dependencies.

        F needs the F of the stage before. B and I need the forward of their own stage, and the
        backward of the stage after. W needs its own I. R needs what F needs, or, if activations are
        shipped, the F of its own stage, which is on another rank. On its own stage a slice also
        needs the F of the slice before it, and the backward of the slice after it.
        """
        stage, kind, _, slice_index = action
        if kind == "W":
            return (action._replace(kind="I"),)
        if kind == "R" and self.ships_activations:
            return (action._replace(kind="F"),)
        source = self.placement.source(stage, kind)
        needed: list[Action] = []
        # A recomputation needs what the forward of its stage needed: the input, not the result.
        if kind in ("F", "R"):
            if source is not None:
                needed.append(action._replace(stage=source, kind="F"))
            if slice_index:
                needed.append(action._replace(slice=slice_index - 1))
            return tuple(needed)
        # The backward reads what was kept on its rank: by F, or with two roles by R.
        needed.append(action._replace(kind="R" if self.disaggregated else "F"))
        if source is not None:
            needed.append(self._backward(action, source))
        if slice_index + 1 < self.num_slices:
            needed.append(self._backward(action._replace(slice=slice_index + 1), stage))
        return tuple(needed)

    def feeds(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that need the result of an action: `needs`, the other way round."""
        stage, kind, _, slice_index = action
        target = self.placement.target(stage, kind)
        fed: list[Action] = []
        if kind == "F":
            # Where backward ranks recompute, no rank runs F of the last stage: its R takes this.
            if target is not None and self.runs_forward(target):
                fed.append(action._replace(stage=target))
            if slice_index + 1 < self.num_slices:
                fed.append(action._replace(slice=slice_index + 1))
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
                fed.append(self._backward(action._replace(slice=slice_index - 1), stage))
        return tuple(fed)

    def travels(self, source: Action, target: Action) -> bool:
        """Return whether a result that `target` needs leaves the stage or the rank of `source`."""
        rank_for = self.placement.rank_for
        return source.stage != target.stage or rank_for(*source[:2]) != rank_for(*target[:2])

    @cached_property
    def links(self) -> Mapping[Kind, Sequence[Sequence[Output]]]:
        """By kind and stage: the outputs of its action of micro-batch 0 for other stages or ranks.

        Other micro-batches have the same ones, so tables with millions of actions need no more.
        """
        rank_for = self.placement.rank_for
        links: dict[Kind, list[list[Output]]] = {kind: [] for kind in KINDS}
        for kind, stage in product(KINDS, range(self.num_stages)):
            action = Action(stage, kind, 0)
            outputs = []
            for fed in self.feeds(action):
                if not self.travels(action, fed):
                    continue
                link: Link | None = (rank_for(stage, kind), rank_for(fed.stage, fed.kind))
                # Both roles of one stage are on two ranks, with no hop between them.
                if fed.stage != stage and self.placement.hops[min(fed.stage, stage)] == "local":
                    link = None
                outputs.append(Output(fed, link))
            links[kind].append(outputs)
        return links

    def _backward(self, action: Action, stage: int) -> Action:
        """Return the backward of a stage for the micro-batch and slice of an action."""
        kind: Kind = "I" if (stage, *action[2:]) in self.split else "B"
        return action._replace(stage=stage, kind=kind)

    def runs_forward(self, stage: int) -> bool:
        """Return whether some rank runs the F of a stage.

        If backward ranks recompute forwards, nobody needs the output of the last stage's F.
        """
        is_last = stage == self.num_stages - 1
        return not (self.disaggregated and is_last) or self.ships_activations

    def marked(self, rank: int, index: int, context: int = 5) -> str:
        """Return the actions around one action of a rank for an error, with that one in `>> <<`.

        An index past the last action marks the end of the row.
        """
        texts = [str(action) for action in self.rows[rank]]
        if index == len(texts):
            texts.append("end")
        texts[index] = f">>{texts[index]}<<"
        first, last = max(0, index - context), index + context
        cells = texts[first : last + 1]
        if first > 0:
            cells.insert(0, "...")
        if last < len(self.rows[rank]):
            cells.append("...")
        return f"rank {rank}, action {index}: {' '.join(cells)}"

    @property
    def label(self) -> str:
        """Name and options for display, for example `bitpipe order=zb`."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table; ranks compare it at start-up to verify that their tables agree."""
        sha = hashlib.sha256(repr((self.placement, self.num_microbatches)).encode())
        if self.bypasses:
            sha.update(repr(self.bypasses).encode())
        if self.num_slices > 1:
            sha.update(repr(self.slices).encode())
        for rank in range(len(self.rows)):
            sha.update(",".join(self.cells(rank)).encode() + b"\n")
        return sha.hexdigest()
