"""A slot of shared memory is free when the copy out of it has ended, and not before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from megatron_ext.message import Message
from megatron_ext.transport.staging import StagedTransport

_LONG_S = 30.0


class Slots:
    """A host transport that gives out one tensor, which stands for the slot that it lies in."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def fixed_memory(self) -> Sequence[tuple[int, int]]:
        return ()

    def recv(self, source: int, message: Message, timeout_s: float) -> torch.Tensor:
        slot = torch.ones(3)
        weakref.finalize(slot, self.freed.set)
        return slot

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        """Do nothing."""


class Copies:
    """Copies that end when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Copies]:
        return tensor.clone(), self

    def wait(self) -> None:
        assert self.ended.wait(_LONG_S)


@pytest.fixture
def staged() -> Iterator[tuple[StagedTransport, Slots, Copies]]:
    host: Any = Slots()
    copies: Any = Copies()
    transport = StagedTransport(host, copies, timeout_s=_LONG_S)
    yield transport, host, copies
    copies.ended.set()
    transport.close()


def test_a_slot_is_kept_until_it_was_copied(
    staged: tuple[StagedTransport, Slots, Copies],
) -> None:
    transport, host, copies = staged
    received = transport.recv(0, Message("F", 1, 0), _LONG_S)
    assert not host.freed.is_set()
    copies.ended.set()
    assert host.freed.wait(_LONG_S)
    assert received.tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", ["C", "D"])
def test_what_the_host_acts_on_is_not_copied(
    staged: tuple[StagedTransport, Slots, Copies], kind: Any
) -> None:
    transport, host, _ = staged
    received = transport.recv(0, Message(kind, 1, 0), _LONG_S)
    assert not host.freed.is_set()
    del received
    assert host.freed.wait(_LONG_S)
