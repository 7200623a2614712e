"""Runs steps with one long kernel per action, from device to device, on an emulated device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from megatron_ext import devices
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.program import Peers, PipelineEnds, make_program
from megatron_ext.transport.direct import NOTE_BYTES, DirectTransport
from megatron_ext.transport.native_transport import NativeTransport
from tests.transport.native_ranks import store

from . import fake

if TYPE_CHECKING:
    from megatron_ext.devices.backend import Device
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.runtime.ordering import Order, RunAhead
    from megatron_ext.runtime.program import Table
    from megatron_ext.schedules import Action


LONG_S = 60.0
SHAPE = (64, 32)


class OneKernel:
    """A computation with one long kernel per action; keeps the input until the backward."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.ones(SHAPE, device=device)
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        place = action.stage, action.microbatch
        tensor = inputs[0] if inputs else self._data
        assert tensor is not None
        if action.kind == "F":
            self._kept[place] = tensor
            return [tensor + 1]
        if action.kind == "B":
            return [tensor + self._kept.pop(place)]
        if action.kind == "I":
            return [tensor + self._kept[place]]
        self._data = self._data + self._kept.pop(place)
        return []

    def saved_tensors(self, action: Action) -> object:
        return None

    def ended(self, action: Action) -> None:
        pass

    def release(self, outputs: Tensors) -> None:
        for tensor in outputs:
            assert tensor is not None
            tensor.data = torch.empty(0, device=tensor.device)

    def unfinished(self) -> list[str]:
        return []


def this_rank() -> tuple[int, Device, torch.device]:
    """Return this rank, the backend bound to its device, and the device."""
    me = int(os.environ["RANK"])
    backend = devices.current()
    backend.bind(me)
    return me, backend, backend.torch_device(me)


def notes_to_neighbours(me: int, num_ranks: int, slots: int) -> NativeTransport:
    """Open the host's transport, which carries notes about tensors in device memory."""
    neighbours = [rank for rank in (me - 1, me + 1) if 0 <= rank < num_ranks]
    return NativeTransport(
        store(), me, neighbours, run_id="ahead", wire="shm",
        slots=slots, slot_bytes=NOTE_BYTES,
    )  # fmt: skip


def run_step(
    table: Table,
    order: Order,
    transport: DirectTransport,
    run_ahead: RunAhead,
    device: torch.device,
) -> None:
    """Run one step of a chain of stages."""
    shapes = {kind: [SHAPE] for kind in "FB"}
    peers = Peers(range(len(table.schedule.rows)))
    ends = PipelineEnds.of_shapes(peers, shapes, torch.float32)
    Executor(
        table=table,
        program=make_program(table, ends),
        order=order,
        compute=OneKernel(device),
        sync=fake.Sync([]),
        transport=transport,
        timeout_s=LONG_S,
        name_of=str,
        run_ahead=run_ahead,
    ).run()
