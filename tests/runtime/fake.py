"""A computation without a model, and a transport in memory, for the real executor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.errors import TransportTimeout
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.ordering import Order
from megatron_ext.runtime.program import (
    Peers,
    PipelineEnds,
    Program,
    Table,
    make_program,
)
from megatron_ext.transport.base import Expected, Stats

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.observer import Observer
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action, Schedule

DTYPE = torch.float64


class Compute:
    """Gives each action a number that depends only on its inputs and its name."""

    def __init__(
        self,
        log: list[str] | None = None,
        fail_at: Action | None = None,
        num_parts: int = 1,
        start: float = 0.0,
    ) -> None:
        self.log: list[str] = [] if log is None else log
        self.start = start
        """Data for the first stage."""
        self.num_parts = num_parts
        self.fail_at = fail_at
        self.inputs: dict[Action, list[float]] = {}
        self.kept: dict[tuple[int, int], list[float]] = {}
        self.stashed: dict[tuple[int, int], list[float]] = {}
        self.gradients: dict[int, list[tuple[int, float]]] = {}
        """By stage: micro-batch and number of each weight gradient, in the order of summation."""

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        stage, kind, microbatch, _ = action
        self.log.append(str(action))
        if action == self.fail_at:
            raise RuntimeError(f"{action} fails")
        values = [0.0 if tensor is None else tensor.item() for tensor in inputs]
        self.inputs[action] = values
        place = stage, microbatch
        if kind == "F":
            self.kept[place] = values
            return self._parts(result(action, values[0] if values else self.start))
        values = (
            self.stashed.pop(place) if kind == "W" else [*values, *self.kept.pop(place)]
        )
        if kind == "I":
            self.stashed[place] = values
        else:
            self.gradients.setdefault(stage, []).append((microbatch, sum(values)))
        return [] if kind == "W" else self._parts(result(action, values[0]))

    def run_pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        return self.run(forward, inputs), self.run(backward, gradients)

    def _parts(self, value: float) -> Tensors:
        """Return the tensors of a hand-over, which differ by 1 each; a backward uses the first."""
        return [
            torch.tensor([value + part], dtype=DTYPE) for part in range(self.num_parts)
        ]

    def saved_tensors(self, action: Action) -> object:
        stage, _, microbatch, _ = action
        return (
            _Saved(self.log, f"{stage}.{microbatch}")
            if (stage, microbatch) in self.kept
            else None
        )

    def ended(self, action: Action) -> None:
        pass

    def release(self, outputs: Tensors) -> None:
        self.log.append("release")
        for tensor in outputs:
            assert tensor is not None
            tensor.data = torch.zeros(1, dtype=DTYPE)

    def unfinished(self) -> list[str]:
        backwards = [f"{stage}B{microbatch}" for stage, microbatch in self.kept]
        return backwards + [
            f"{stage}W{microbatch}" for stage, microbatch in self.stashed
        ]


class _Saved:
    """State for a backward, which records when it is freed."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def __del__(self) -> None:
        self._log.append(f"free {self._name}")


def result(action: Action, value: float) -> float:
    """Return an action's result for an input."""
    kind = "F" if action.kind == "F" else "B"
    return (
        value / 2
        + 1
        + 10 * action.stage
        + 100 * action.microbatch
        + 5000 * (kind == "B")
    )


class Wire:
    """The transport of one rank; `mail` holds arrived messages, by sender and message."""

    def __init__(
        self, rank: int, log: list[str] | None = None, *, absent: bool = True
    ) -> None:
        self.rank = rank
        self.peers: list[Wire] = [self]
        self.log: list[str] = [] if log is None else log
        self.mail: dict[tuple[int, Message], torch.Tensor] = {}
        self.expected: dict[tuple[int, Message], Expected] = {}
        self.absent = absent
        """Whether missing messages are made up, because there are no other ranks."""

    def begin(self, expected: Sequence[Expected], slots: int) -> None:
        self.expected = {(item.source, item.message): item for item in expected}
        assert len(self.expected) == len(expected), "a name is unique in a step"
        self.log.append("begin")

    def isend(self, tensor: torch.Tensor, target: int, message: Message) -> None:
        self.log.append(f"send {_named(message)} to {target}")
        if not self.absent:
            assert (self.rank, message) not in self.peers[target].mail, (
                f"{message} was sent twice"
            )
            self.peers[target].mail[self.rank, message] = tensor.detach().clone()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        assert (source, message) in self.expected, (
            f"{message} from {source} was not announced"
        )
        self.log.append(f"receive {_named(message)} from {source}")
        if self.absent:
            return torch.zeros(1, dtype=DTYPE)
        if (source, message) not in self.mail:
            raise TransportTimeout(f"{message} did not come from rank {source}")
        del self.expected[source, message]
        return self.mail.pop((source, message))

    def poll(self, timeout_s: float) -> Sequence[Message]:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def flush(self, timeout_s: float) -> None:
        self.log.append("flush")

    def abort(self, reason: str) -> None:
        self.log.append("abort")

    def close(self) -> None:
        self.log.append("close")

    def stats(self) -> Stats:
        return Stats()


def _named(message: Message) -> str:
    kind, stage, microbatch, part = message[:4]
    return f"{kind}{stage}.{microbatch}.{part}"


class Sync:
    """Records where gathers and reductions may start."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def before(self, stage: int) -> None:
        self.log.append(f"gather {stage}")

    def around_last(self, action: Action) -> AbstractContextManager[None]:
        self.log.append(f"last {action}")
        return nullcontext()

    def after(self, stage: int) -> None:
        self.log.append(f"reduce {stage}")


def table_of(schedule: Schedule, rank: int) -> Table:
    return Table(schedule, rank, slots=schedule.num_microbatches)


def program_of(table: Table, peers: Peers | None = None, num_parts: int = 1) -> Program:
    """Return the program of a rank; by default global ranks equal pipeline ranks."""
    if peers is None:
        num_ranks = len(table.schedule.rows)
        peers = Peers(range(num_ranks), range(num_ranks, 2 * num_ranks))
    shapes = {kind: [(1,)] * num_parts for kind in ("F", "B")}
    ends = PipelineEnds.of_shapes(peers, shapes, DTYPE)
    return make_program(table, ends, leads=peers.leads(table.rank))


def executor(
    table: Table,
    compute: Any,
    wire: Any,
    sync: Any = None,
    order: Order | None = None,
    observers: Sequence[Observer] = (),
    peers: Peers | None = None,
    num_parts: int = 1,
) -> Executor:
    """Return the executor of one rank; by default global ranks equal pipeline ranks."""
    return Executor(
        table=table,
        program=program_of(table, peers, num_parts),
        order=Order(table) if order is None else order,
        compute=compute,
        sync=Sync([]) if sync is None else sync,
        transport=wire,
        timeout_s=1.0,
        name_of=lambda rank: f"rank {table.rank if rank is None else rank}",
        observers=observers,
    )
