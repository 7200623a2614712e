"""The RDMA wire on real verbs: queue pairs of the kernel's software RoCE, in virtual machines."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.trace.aggregate import read_run
from tests.ranks import losses

from . import vm
from .guest_training import RUNS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        vm.missing() is not None,
        reason=f"no virtual machine can be booted: {vm.missing()}",
    ),
]
# Fast enough for a test: a peer that does not answer is given up after half a second.
ENVIRONMENT = {"MEGATRON_EXT_DISABLE": "1", "MEGATRON_EXT_IB_TIMEOUT": "14"}


def boot(tmp_path_factory: pytest.TempPathFactory, script: str, nodes: int) -> Path:
    """Run a script in fresh machines; returns the folder of what it left."""
    if find_spec("megatron_ext.transport._C") is None:
        pytest.skip("the native module is not built")
    folder = tmp_path_factory.mktemp("vm")
    vm.build_initrd(folder / "initrd")
    share = folder / "share"
    share.mkdir()
    command = [sys.executable, str(vm.HERE / script)]
    guests = vm.boot(
        folder / "initrd",
        share,
        command,
        nodes=nodes,
        timeout_s=280,
        environment=ENVIRONMENT,
    )
    for node, guest in enumerate(guests):
        assert guest.status == 0, f"node {node}:\n{guest.console}\n{guest.log}"
    return share


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, Any]:
    return json.loads(
        (boot(tmp_path_factory, "guest_one.py", 1) / "results.json").read_text()
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[str, Any]]:
    share = boot(tmp_path_factory, "guest_two.py", 2)
    return [json.loads((share / f"results{node}.json").read_text()) for node in (0, 1)]


def test_the_probe_finds_the_device_as_pyverbs_does(one):
    usable, reason, differences = one["probe"]
    assert usable
    assert reason == "rxe0 port 1 GID 1 (::ffff:10.77.0.1), MTU 4096"
    assert differences in ([], None)  # None: pyverbs is not installed


def test_the_probe_tells_what_is_missing(one):
    usable, reason, _ = one["probe of another address"]
    assert not usable
    assert "does not have the address 10.99.0.1" in reason
    usable, reason, _ = one["probe without lockable memory"]
    assert not usable
    assert "the limit of locked memory is 65536 bytes" in reason
    assert "ulimit -l unlimited" in reason
    usable, reason, _ = one["probe without a link"]
    assert not usable
    assert "rxe0 port 1 is down" in reason


def test_ten_thousand_messages_of_any_size_and_order_cross_one_device(one):
    """Between two, between four and between eight processes."""
    for result in one["messages"]:
        assert result.get("bad") == [], result
        assert result["flushed"]
        assert all("rxe0 port 1 GID 1" in link for link in result["links"])
    assert [len(result["links"]) for result in one["messages"]] == [1] * 2 + [3] * 4 + [
        7
    ] * 8
    assert sum(result["messages"] for result in one["messages"]) >= 10_000


@pytest.mark.parametrize("who", ["receiver killed", "sender killed"])
def test_a_killed_peer_is_noticed(one, who):
    result = one[who]
    assert result.get("state") == "died", result
    assert result["messages"] >= 5
    assert result["noticed_s"] < 10


def test_messages_cross_two_nodes(two):
    for result in two:
        assert result["messages"].get("bad") == [], result
        assert result["messages"]["flushed"]


def test_lost_packets_are_sent_again(two):
    assert sum(result["packets lost"] for result in two) > 0
    for result in two:
        assert result["loss"].get("bad") == [], result


def test_both_ends_notice_a_cable_that_is_pulled(two):
    for result in two:
        told = result["no cable"]
        assert told.get("state") == "died", told
        assert told["reason"]
        assert told["noticed_s"] < 30


TRAINING = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --log-interval 1 --num-workers 0 --lr 1e-3 "
    "--min-lr 1e-4 --train-iters 3 --lr-warmup-iters 1 --eval-iters 0 --seq-length 16 "
    "--eval-interval 1000 --tokenizer-type NullTokenizer --vocab-size 100 --mock-data "
    "--microbatch-rng"
)


@pytest.mark.timeout(1800)
def test_two_nodes_train_over_rdma(tmp_path):
    """With the losses, digit for digit, that other messages give on the same processor.

    Stages of a pipeline in a fixed order, stages that choose their order by what has arrived, and a
    rank for forwards with one for backwards.
    """
    vm.build_initrd(tmp_path / "initrd")
    share = tmp_path / "share"
    share.mkdir()
    guests = vm.boot(
        tmp_path / "initrd",
        share,
        [sys.executable, str(vm.HERE / "guest_training.py"), *TRAINING.split()],
        nodes=2,
        timeout_s=1700,
        memory_mb=4096,
    )

    def logs(run: str) -> str:
        paths = sorted(share.glob(f"{run}.?.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    described = "\n".join([*(guest.log for guest in guests), *map(logs, RUNS)])
    assert [guest.status for guest in guests] == [0, 0], described
    for run, reference in (
        ("rdma", "torch"),
        ("dynamic", "torch"),
        ("disaggregated-rdma", "disaggregated-tcp"),
    ):
        expected = losses(logs(reference))
        assert len(expected) == 3, described
        assert "of rxe0 port 1 GID 1 (::ffff:10.77.0.1) to" in logs(run)
        assert losses(logs(run)) == expected
    assert "order by hint, measured over 3 steps: " in logs("dynamic")
    assert "order by hint" not in logs("rdma")
    assert [survey.wires for survey in read_run(share / "trace").surveys] == [
        {1: "rdma"}, {0: "rdma"}
    ]  # fmt: skip
