"""The emulated device is as strict as the real one; a lenient one would prove nothing."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.fake_musa.queued import queued
from tests.ranks import run_ranks

_MODES = {"at once": {}, "in queues": queued(jitter_us=200, kernel_us=1, copy_us=1)}

pytestmark = [
    pytest.mark.usefixtures("emulated_musa"),
    pytest.mark.parametrize("env", _MODES.values(), ids=_MODES),
]


def _error(call):
    try:
        call()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "no error"


def _mixed():
    musa, host = torch.ones(3, 3, device="musa"), torch.ones(3, 3)
    other = torch.ones(3, 3, device="musa:1")
    index = torch.tensor([0, 1], device="musa")
    calls = {
        "add": lambda: musa + host,
        "in place": lambda: host.add_(musa),
        "matmul": lambda: musa @ host,
        "cat": lambda: torch.cat([musa, host]),
        "where": lambda: torch.where(musa > 0, musa, host),
        "mask": lambda: musa.masked_fill_(host > 0, 1.0),
        "embedding": lambda: torch.nn.functional.embedding(torch.tensor([1]), musa),
        "host indexed by device": lambda: host[index],
        "two devices": lambda: musa + other,
        "generator": lambda: musa.normal_(generator=torch.Generator()),
    }
    return {name: _error(call) for name, call in calls.items()}


def test_devices_do_not_mix(env):
    (errors,) = run_ranks(1, _mixed, device="musa", env=env)
    assert {name for name, error in errors.items() if error == "no error"} == set()


def _allowed():
    musa = torch.arange(4.0, device="musa")
    return {
        "number": (musa * torch.tensor(2.0)).tolist(),
        "host indices": musa[torch.tensor([3, 0])].tolist(),
        "copy": torch.zeros(4).copy_(musa).tolist(),
        "view shares": musa.view(2, 2).t()[1].add_(1).tolist() + musa.tolist(),
        "grows": torch.empty(0, device="musa").resize_(2).fill_(1.0).tolist(),
        "out": torch.add(musa, 1, out=torch.empty(0, device="musa")).tolist(),
    }


def test_what_devices_may_do_works(env):
    (found,) = run_ranks(1, _allowed, device="musa", env=env)
    assert found == {
        "number": [0.0, 2.0, 4.0, 6.0],
        "host indices": [3.0, 0.0],
        "copy": [0.0, 1.0, 2.0, 3.0],
        "view shares": [2.0, 4.0, 0.0, 2.0, 2.0, 4.0],
        "grows": [1.0, 1.0],
        "out": [1.0, 3.0, 3.0, 5.0],
    }


def _absent():
    names = (
        "CUDAGraph", "cudart", "nvtx", "random", "utilization", "temperature", "power_draw",
        "clock_rate", "device_memory_used",
    )  # fmt: skip
    return {
        "there": [name for name in names if hasattr(torch.musa, name)],
        "properties": _error(lambda: torch.musa.get_device_properties()),
        "device": _error(lambda: torch.musa.set_device("cuda:0")),
        "pid": os.getpid(),
    }


def test_absent_features_are_absent(env):
    (found,) = run_ranks(1, _absent, device="musa", env=env)
    assert found["there"] == []
    assert "missing 1 required positional argument" in found["properties"]
    assert "Expected a musa device" in found["device"]


def _unwritten():
    torch.musa.empty_cache()
    return torch.empty(100, device="musa").isnan().all().item()


def test_memory_that_nobody_wrote_shows(env):
    assert run_ranks(1, _unwritten, device="musa", env=env) == [True]


def _child():
    torch.ones(1, device="musa")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, _error(torch.musa.current_device).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 1000).decode()


def test_a_fork_cannot_go_on_using_the_device(env):
    (error,) = run_ranks(1, _child, device="musa", env=env)
    assert "Cannot re-initialize MUSA in forked subprocess" in error


def _random():
    torch.manual_seed(5)
    on_device = torch.rand(8, device="musa")
    host = torch.get_rng_state()
    more = torch.nn.functional.dropout(torch.ones(64, device="musa"))
    torch.manual_seed(5)
    return {
        "as on the host": torch.equal(on_device.cpu(), torch.rand(8)),
        "host generator used": not torch.equal(host, torch.manual_seed(5).get_state()),
        "dropped": (more == 0).any().item(),
    }


def test_the_generator_is_separate_from_the_hosts(env):
    (found,) = run_ranks(1, _random, device="musa", env=env)
    assert found == {
        "as on the host": True,
        "host generator used": False,
        "dropped": True,
    }


def _collectives():
    dist.init_process_group("mccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.musa.set_device(rank)

    def ones(*shape):
        return torch.full(shape, float(rank + 1), device="musa")

    found = {}
    for name in ("SUM", "AVG", "MAX"):
        tensor = ones(2)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        found[name] = tensor.tolist()
    low = ones(2).bfloat16()
    dist.all_reduce(low, async_op=True).wait()
    found["bf16"] = low.tolist()
    gathered = torch.empty(size, 2, device="musa")
    dist.all_gather_into_tensor(gathered, ones(2))
    found["gather"] = gathered.tolist()
    scattered = torch.empty(1, device="musa")
    dist.reduce_scatter_tensor(scattered, torch.arange(float(size), device="musa"))
    found["scatter"] = scattered.tolist()
    exchanged = torch.empty(size, device="musa")
    dist.all_to_all_single(
        exchanged, torch.arange(float(size), device="musa") + 10 * rank
    )
    found["exchange"] = exchanged.tolist()
    with dist._coalescing_manager(async_ops=True) as pending:
        parts = [ones(2), ones(3)]
        for part in parts:
            dist.all_reduce(part)
    pending.wait()
    found["coalesced"] = [part.tolist() for part in parts]
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    found["objects"] = objects
    host = dist.new_group(backend="gloo")
    on_host = torch.ones(1)
    dist.all_reduce(on_host, group=host)
    found["gloo group"] = on_host.item()
    return found


def test_collectives(env):
    first, second = run_ranks(2, _collectives, device="musa", env=env)
    for found in (first, second):
        assert found["SUM"] == [3.0, 3.0]
        assert found["AVG"] == [1.5, 1.5]
        assert found["MAX"] == [2.0, 2.0]
        assert found["bf16"] == [3.0, 3.0]
        assert found["gather"] == [[1.0, 1.0], [2.0, 2.0]]
        assert found["coalesced"] == [[3.0] * 2, [3.0] * 3]
        assert found["objects"] == [0, 1]
        assert found["gloo group"] == 2.0
    assert (first["scatter"], second["scatter"]) == ([0.0], [2.0])
    assert (first["exchange"], second["exchange"]) == ([0.0, 10.0], [1.0, 11.0])


def _transfers():
    dist.init_process_group("mccl")
    rank = dist.get_rank()
    torch.musa.set_device(rank)
    refused = {
        "host": _error(lambda: dist.all_reduce(torch.ones(1))),
        "strided": _error(
            lambda: dist.all_reduce(torch.ones(2, 2, device="musa")[:, :1])
        ),
    }
    # A sender may let go of the tensor while the transfer runs, as upstream's schedules do.
    big = torch.full((1 << 20,), float(rank), device="musa")
    received = torch.empty_like(big)
    begin = [lambda: dist.isend(big, 1 - rank), lambda: dist.irecv(received, 1 - rank)]
    works = [
        one() for one in begin[:: 1 if rank else -1]
    ]  # who both send first wait for ever
    big.data = torch.empty(1, device="musa")
    for work in works:
        work.wait()
    return refused, received.unique().tolist()


def test_transfers_keep_their_bytes_and_refuse_what_is_not_on_the_device(env):
    found = run_ranks(2, _transfers, device="musa", env=env)
    assert [values for _, values in found] == [[1.0], [0.0]]
    for refused, _ in found:
        assert "Tensors must be MUSA and dense" in refused["host"]
        assert "contiguous" in refused["strided"]
