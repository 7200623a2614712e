"""The schedule that a training run was asked for, and the tables that follow from it.

The arguments are read once into a `Choice` (`schedule_flags.py`), which is put here with `use`.
Everything behind that, patches and executor alike, asks `current`: None means that Megatron's own
schedules run and that nothing of ours takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from megatron_ext.schedules.generators.catalog import CSV_PREFIX, generate, get
from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.representation.split_backwards import split_backwards
from megatron_ext.schedules.search.patience import policies

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Option, Schedule
    from megatron_ext.schedules.representation.placement import Placement
    from megatron_ext.schedules.search.policies import Policy, PolicyName

__all__ = [
    "DEVICE_PATHS",
    "TRANSPORTS",
    "Choice",
    "DevicePath",
    "Dynamic",
    "TransportName",
    "current",
    "folded",
    "for_messages",
    "use",
    "use_for_messages",
]

TransportName = Literal["torch", "auto", "shm", "tcp", "rdma"]

TRANSPORTS: tuple[TransportName, ...] = ("torch", "auto", "shm", "tcp", "rdma")
"""torch.distributed, the default; the native core over the best wire of each pair, or over one."""

DevicePath = Literal["staged", "ipc"]

DEVICE_PATHS: tuple[DevicePath, ...] = ("staged", "ipc")
"""How tensors of a device get to the native core's peers: through the host, or past it."""


@dataclass(frozen=True)
class Dynamic:
    """How ranks choose the order of their actions at run time (`schedules/search/policies.py`)."""

    policy: PolicyName = "hint"
    extra_activations: int = 1
    """Micro-batches that a rank may keep beyond the table's peak, with `hint`."""
    splits: bool = True
    """Whether full backwards of the table are split; False where the layers cannot do it."""


@dataclass(frozen=True)
class Choice:
    """A schedule by name, for any number of micro-batches."""

    name: str
    """As registered, or `csv:FILE`."""
    pp: int
    """Ranks of the whole pipeline world, as the user says it (BitPipe: both twins together)."""
    num_microbatches: int
    """Micro-batches of one model replica of Megatron's (BitPipe: of one twin) in a full batch."""
    chunks: int | None = None
    """Stages on each rank, where the schedule leaves that open."""
    options: Mapping[str, Option] = field(default_factory=dict)
    costs: Costs = UNIT
    timeout_s: float = 600.0
    """How long a rank waits for one message before it gives up."""
    transport: TransportName = "torch"
    """What carries tensors between ranks."""
    dynamic: Dynamic | None = None
    """None: every rank runs the order of the table."""
    node_ips: tuple[str, ...] = ()
    """Addresses of the nodes or of the ranks, for wires between hosts; empty: found out."""
    device_path: DevicePath = "staged"
    """How tensors of a device get to other ranks, where the transport is the native one."""
    checksums: bool = False
    """Whether the bytes of messages carry a checksum, where the transport is the native one."""
    _fills: dict[int, bool] = field(default_factory=dict, init=False, repr=False)
    """By number of micro-batches: whether all W of the table are ours, made by splitting."""
    _policies: dict[int, Callable[[int], Policy]] = field(
        default_factory=dict, init=False, repr=False
    )
    """By number of micro-batches: what makes the policy of a rank."""
    _tables: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def placement(self) -> Placement:
        """Which rank holds which stage; the same for every number of micro-batches."""
        return self.schedule(self.num_microbatches).placement

    @property
    def twins(self) -> int:
        """Mirrored pipelines, each of which is a data-parallel replica in Megatron's eyes."""
        return 1 if self.name.startswith(CSV_PREFIX) else get(self.name).twins

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table for a number of micro-batches of one replica; made once for each.

        It is what the generator makes, but for twins that are crossed once (dualpipe): the last
        stage would be on the twin of the first, which is another replica to Megatron and reads
        other samples, so activations would meet foreign labels. There they stay where they are.

        Raises:
            ScheduleError: If there is none for that number.
        """
        if num_microbatches not in self._tables:
            table = generate(
                self.name,
                self.pp,
                num_microbatches * self.twins,
                self.chunks,
                self.costs,
                **self.options,
            )
            if len(table.placement.twin_hops) % 2:
                table = replace(table, placement=replace(table.placement, twin_hops=frozenset()))
            splits = self.dynamic is not None and self.dynamic.splits
            self._fills[num_microbatches] = splits and not table.splits_backward
            self._tables[num_microbatches] = split_backwards(table) if splits else table
        return self._tables[num_microbatches]

    def policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return what chooses the next action of a rank of a dynamic schedule, for one step."""
        assert self.dynamic is not None, "a static schedule has no policy"
        if num_microbatches not in self._policies:
            table = self.schedule(num_microbatches)
            self._policies[num_microbatches] = policies(
                self.dynamic.policy,
                table,
                extra_activations=self.dynamic.extra_activations,
                weights_fill=self._fills[num_microbatches],
                costs=self.costs,
            )
        return self._policies[num_microbatches](rank)


_current: Choice | None = None
_for_messages: Choice | None = None


def use(choice: Choice | None) -> None:
    """Make a choice the one of this process; None: back to Megatron's own schedules."""
    global _current, _for_messages
    _current, _for_messages = choice, None


def use_for_messages(choice: Choice) -> None:
    """Let Megatron's own schedule run, which the choice names, with messages over its transport."""
    global _current, _for_messages
    _current, _for_messages = None, choice


def for_messages() -> Choice | None:
    """Return the choice whose transport serves Megatron's own schedule, or None."""
    return _for_messages


def current() -> Choice | None:
    """Return the choice in force, or None."""
    return _current


def folded() -> bool:
    """Tell whether the choice in force brings the pipeline back to its first rank (V and W)."""
    return _current is not None and _current.placement.name in ("v", "w")
