"""A pipeline schedule: one ordered list of actions for each rank.

Nothing here depends on how an action is executed. Generators build schedules, passes and renderers
read them, with the standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement
    from megatron_ext.schedules.table.route_plan import Route

__all__ = ["KINDS", "Action", "Kind", "Option", "Row", "Schedule"]

Kind = Literal["F", "B", "I", "W", "R"]
"""F: forward. B: full backward. I: gradient of the input. W: gradient of the weights (B = I + W).
R: recomputation (or receipt) of activations on a backward rank (see `Schedule.disaggregated`)."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "R")

Option = str | int | bool

_ACTION = re.compile(r"([0-9]{1,9})([FBIWR])([0-9]{1,9})")


class Action(NamedTuple):
    """One piece of computation: a kind of pass over one stage for one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """Return the text form of torch.distributed.pipelining, for example `2F0`."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form of an action, such as `2F0` or `1I3`.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text[:40]!r} is not an action; write stage, kind (F, B, I, W or R) and "
                f"micro-batch, as in 2F0"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


Row = tuple[Action, ...]
"""The actions of one rank, in execution order."""


@dataclass(frozen=True)
class Schedule:
    """A static pipeline schedule: the computation of each rank, in order. Messages are derived.

    A schedule whose placement has twins (BitPipe) is the table of one of two mirrored pipelines.
    Each runs half of the micro-batches; `unfold.py` gives the literal table of all ranks.
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
    routes: tuple[Route, ...] = ()
    """Tensors of the model that skip stages (`route_plan.py`)."""

    @property
    def pp(self) -> int:
        """Ranks of the whole pipeline world, both twins together."""
        return self.placement.num_ranks * self.placement.twins

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of the pipeline world in one step, both twins together."""
        return self.num_microbatches * self.placement.twins

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

    @property
    def label(self) -> str:
        """Name and options for display, for example `bitpipe order=zb`."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table; ranks compare it at start-up to verify that their tables agree."""
        sha = hashlib.sha256(repr((self.placement, self.num_microbatches)).encode())
        if self.routes:
            sha.update(repr(self.routes).encode())
        for row in self.rows:
            sha.update(",".join(map(str, row)).encode() + b"\n")
        return sha.hexdigest()
