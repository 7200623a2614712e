"""The transport between any two ranks on emulated devices, and what training yields."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_ext import PipelineConfig, configure, devices
from megatron_ext.config import active
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.runtime.connect import open_transport
from megatron_ext.transport import address
from megatron_ext.transport.address import Address
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks
from tests.runtime.capture import GPT, PP4, Captured, run_here
from tests.runtime.test_equality import UNCLIPPED, stock

pytestmark = pytest.mark.usefixtures("emulated_musa", "a_training_loop")

_FLAGS = GPT + UNCLIPPED + "--num-layers 8 --global-batch-size 16 --train-iters 2 "
_AUTO = "--pipeline-transport auto "
_TABLE = "--pipeline-schedule zb-v " + _AUTO
_DYNAMIC = "--pipeline-schedule zb-h1 --use-dpp "


def _on_hosts(
    hosts: str, words: list[str], cut: int = -1
) -> tuple[Captured, list[str]]:
    """Train as a rank of the host that `hosts` has for it; return what is logged about links.

    The ranks only believe that they run on several hosts: their addresses say so.
    """
    rank = int(os.environ["RANK"])
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    new = Address.new
    Address.new = lambda *given, **named: replace(  # type: ignore[method-assign,assignment]
        new(*given, **named), boot_id=hosts[rank], host=hosts[rank]
    )
    address._require_reachable = lambda *_of: None  # all are on the loopback interface
    if rank == cut:
        torch.musa.can_device_access_peer = lambda *_devices: False  # type: ignore[attr-defined]
    captured = run_here("gpt", words)
    return captured, [line for line in told if line.startswith("rank ")]


def _trained(
    flags: str, hosts: str = "aaaa", cut: int = -1, connections: int = 8
) -> tuple[list[str], list[str]]:
    """Train on 4 ranks; return the classes of their transports and what they tell of links."""
    env = queued(connections=connections, jitter_us=100, seed=connections)
    words = f"{_FLAGS}{PP4}{flags}".split()
    by_rank = run_ranks(4, _on_hosts, hosts, words, cut, device="musa", env=env)
    expected = stock(4, _FLAGS + PP4)
    for captured, _ in by_rank:
        assert captured.gradients == [
            {name: digest for name, digest in whole.items() if name in mine}
            for whole, mine in zip(expected.gradients, captured.gradients, strict=True)
        ]
        assert captured.parameters.items() <= expected.parameters.items()
    assert (
        by_rank[-1][0].losses == expected.losses
        or by_rank[0][0].losses == expected.losses
    )
    classes = [captured.transports[0] for captured, _ in by_rank]
    return classes, sorted(line for _, told in by_rank for line in told)


@pytest.mark.parametrize("flags", [_TABLE, _DYNAMIC], ids=["table", "dynamic"])
def test_ranks_of_one_host_exchange_tensors_directly(flags: str) -> None:
    classes, told = _trained(flags)
    assert classes == ["DirectTransport"] * 4
    assert [line for line in told if "ipc" in line] == [
        f"rank {low} and rank {low + 1}: ipc (from device to device)"
        for low in range(3)
    ]


@pytest.mark.parametrize("connections", [1, 8])
def test_a_table_takes_the_communicator_between_hosts(connections: int) -> None:
    classes, told = _trained(_TABLE, "aabb", connections=connections)
    assert classes == ["DirectTransport"] * 4
    assert [line for line in told if "ipc" in line] == [
        "rank 0 and rank 1: ipc (from device to device)",
        "rank 1 and rank 2: torch.distributed, mccl, not ipc: it runs on host b, this one on a",
        "rank 2 and rank 3: ipc (from device to device)",
    ]


@pytest.mark.parametrize("connections", [1, 8])
def test_a_dynamic_order_takes_tcp_between_hosts(connections: int) -> None:
    classes, told = _trained(_DYNAMIC, "aabb", connections=connections)
    assert classes == ["DirectTransport"] * 4
    assert [line for line in told if "ipc" in line] == [
        "rank 0 and rank 1: ipc (from device to device)",
        "rank 1 and rank 2: tcp, not ipc: it runs on host b, this one on a",
        "rank 2 and rank 3: ipc (from device to device)",
    ]


@pytest.mark.parametrize(
    ("flags", "wire"),
    [(_TABLE, "torch.distributed, mccl"), (_DYNAMIC, "shm")],
    ids=["table", "dynamic"],
)
def test_a_device_that_reaches_no_other_is_told(flags: str, wire: str) -> None:
    _, told = _trained(flags, cut=3)
    why = "the driver says that device 0000:04:00.0 cannot access device 0000:03:00.0"
    assert [line for line in told if "ipc" in line] == [
        "rank 0 and rank 1: ipc (from device to device)",
        "rank 1 and rank 2: ipc (from device to device)",
        f"rank 2 and rank 3: {wire}, not ipc: {why}",
    ]


def _opened_under_two_configurations() -> list[str]:
    """Return the classes of a table's transport and a dynamic order's; rank 2 reaches no device."""
    me = int(os.environ["RANK"])
    if me == 2:
        torch.musa.can_device_access_peer = lambda *_devices: False  # type: ignore[attr-defined]
    devices.current().bind(me)
    dist.init_process_group("nccl")
    classes = []
    for dynamic in (None, DynamicOrder()):
        configure(
            PipelineConfig(schedule="1f1b", dynamic=dynamic, transport="auto"),
            pipeline_ranks=3, num_microbatches=4, num_layers=3, seed=1,
        )  # fmt: skip
        pipeline = active.pipeline()
        assert pipeline is not None
        links = {
            link for low in (me - 1, me) for link in ((low, low + 1), (low + 1, low))
        }
        links = {link for link in links if {*link} <= {0, 1, 2}}
        shapes = {"F": [(4, 1, 8)], "B": [(4, 1, 8)]}
        device = devices.current().torch_device(me)
        transport = open_transport(pipeline, device, links, shapes, torch.float32)
        classes.append(type(transport).__name__)
        transport.close()
    return classes


def test_ranks_without_a_direct_peer_count_transports_too() -> None:
    assert run_ranks(3, _opened_under_two_configurations, device="musa") == [
        ["DirectTransport", "DirectTransport"],
        ["DirectTransport", "DirectTransport"],
        ["TorchTransport", "StagedTransport"],
    ]
