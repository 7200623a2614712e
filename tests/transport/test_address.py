"""The wire between two ranks, and the address of a host that is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.address import (
    Address,
    choose_wire,
    own_address,
)

HERE = replace(Address.new("auto"), no_rdma="no libibverbs")
ABLE = replace(HERE, no_rdma="")
ELSEWHERE = replace(ABLE, host="other", boot_id="other")


def _told(address: Address, wire: str) -> Address:
    return replace(address, wire=wire)


@pytest.mark.parametrize(
    ("mine", "theirs", "wire", "why"),
    [
        (HERE, HERE, "shm", "they are on the same host"),
        (ABLE, ABLE, "shm", "they are on the same host"),
        (ABLE, ELSEWHERE, "rdma", "it runs on host other"),
        (HERE, ELSEWHERE, "tcp", "has no RDMA: no libibverbs"),
        (ABLE, replace(ABLE, network=1), "rdma", "network namespace"),
        (_told(ABLE, "tcp"), _told(ABLE, "tcp"), "tcp", "as configured"),
        (_told(ABLE, "rdma"), _told(ELSEWHERE, "rdma"), "rdma", "as configured"),
    ],
)
def test_both_sides_choose_the_same(mine, theirs, wire, why) -> None:
    chosen, reason = choose_wire(0, mine, 1, theirs)
    assert chosen == wire == choose_wire(1, theirs, 0, mine)[0]
    assert why in reason


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (
            _told(ABLE, "shm"),
            _told(ELSEWHERE, "shm"),
            "it runs on host other, .*transport auto",
        ),
        (
            _told(HERE, "rdma"),
            _told(ELSEWHERE, "rdma"),
            "has no RDMA: no libibverbs; use",
        ),
        (
            _told(ELSEWHERE, "rdma"),
            _told(HERE, "rdma"),
            "has no RDMA: no libibverbs; use",
        ),
        (HERE, _told(HERE, "tcp"), "rank 1 uses transport tcp, but rank 0 uses auto"),
        (HERE, replace(HERE, version="0.0"), "runs megatron_ext 0.0"),
        (HERE, replace(HERE, byte_order="other"), "other endian"),
        (
            replace(HERE, ip="127.0.0.1"),
            ELSEWHERE,
            r"rank 0 listens on 127\.0\.0\.1, .*--node-ips",
        ),
        (
            HERE,
            replace(ELSEWHERE, ip="::1"),
            "rank 1 listens on ::1, which only its own host other",
        ),
    ],
)
def test_a_wire_that_is_not_there_is_refused(mine, theirs, reason) -> None:
    with pytest.raises(TransportError, match=reason):
        choose_wire(0, mine, 1, theirs)


def test_node_ips_are_those_of_nodes_or_of_ranks() -> None:
    def own(
        node_ips: list[str], rank: int, world_size: int, ranks_per_node: int | None
    ) -> str:
        return own_address(node_ips, rank, world_size, ranks_per_node, "127.0.0.5")

    nodes, ranks = ["10.0.0.1", "10.0.0.2"], [f"10.0.1.{rank}" for rank in range(8)]
    assert [own(nodes, rank, 8, 4) for rank in (0, 3, 4, 7)] == [
        nodes[0], nodes[0], nodes[1], nodes[1],
    ]  # fmt: skip
    assert [own(ranks, rank, 8, 4) for rank in range(8)] == ranks
    assert own(["localhost"], 0, 2, None) in {"127.0.0.1", "::1"}
    with pytest.raises(
        TransportError, match="has 3 addresses; give one for each of the 2 nodes"
    ):
        own(ranks[:3], 0, 8, 4)
    with pytest.raises(
        TransportError, match=r"127\.0\.0\.1 on this host, which the other 1"
    ):
        own(["127.0.0.1", "10.0.0.2"], 0, 8, 4)
    with pytest.raises(TransportError, match=r"0\.0\.0\.0 means every address"):
        own(["0.0.0.0"], 0, 2, 2)
    with pytest.raises(TransportError, match=r"no\.host\.invalid is not an address"):
        own(["no.host.invalid"], 0, 8, None)


def test_the_way_to_the_rendezvous_gives_the_address() -> None:
    assert own_address([], 0, 8, 4, "127.0.0.5") == "127.0.0.1"
    with pytest.raises(
        TransportError, match=r"no route to no\.host\.invalid .* --node-ips"
    ):
        own_address([], 0, 8, 4, "no.host.invalid")
