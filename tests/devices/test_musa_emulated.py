"""The musa backend on the emulated device: selection, redirects, random numbers, time, memory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.fake_musa import build
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("emulated_musa")

_MEBI = 1 << 20


def _python(code, env=None, *, devices=2):
    """Run code in a process of its own that sees emulated devices; return what it printed."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **build.environment(devices=devices), **(env or {})},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.split()


# -- selection -------------------------------------------------------------------------------------


def test_auto_finds_the_software_stack_even_without_a_device():
    code = "from megatron_ext import devices; print(devices.select('auto').name)"
    assert _python(code, devices=0) == ["musa"]


def test_node_defaults_give_way_to_the_users_environment():
    code = (
        "import os; from megatron_ext.patches import device; device.arm();"
        "print(os.environ['MCCL_PROTOS'], os.environ['MUSA_KERNEL_TIMEOUT'])"
    )
    assert _python(code, {"MEGATRON_EXT_DEVICE": "musa", "MCCL_PROTOS": "1"}) == [
        "1",
        "3200000",
    ]


_TORCHADA = """
import sys, types
import torch
__version__ = "0.1.93"

class Wrapper(types.ModuleType):
    def __init__(self, cuda):
        super().__init__("torch.cuda")
        self.original = cuda

    def __getattr__(self, name):
        if name == "is_available":
            return self.original.is_available
        return getattr(torch.musa, name)

sys.modules["torch.cuda"] = torch.cuda = Wrapper(torch.cuda)
"""


def test_torchada_keeps_torch_cuda(tmp_path):
    (tmp_path / "torchada.py").write_text(_TORCHADA)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch\n"
        "from megatron_ext import devices\n"
        "device = devices.select('musa')\n"
        "targets = {r.target for r in device.redirects()}\n"
        "assert 'torch.cuda:is_available' in targets\n"
        "assert not any(t.startswith(('torch:empty', 'torch.distributed')) for t in targets)\n"
        "assert 'torch.cuda:current_device' not in targets\n"
        "print(type(torch.cuda).__name__, device.environment['TORCHADA_FORCE_CUDA_AVAILABLE'][0])"
    )
    assert _python(code) == ["Wrapper", "1"]


# -- what upstream asks for ------------------------------------------------------------------------


def _spelled():
    """Where the devices that upstream spells are; rank 1 of two, so that an index shows."""
    index = torch.cuda.current_device()
    torch.cuda.set_device(1)
    with torch.device("cpu"):
        on_host = torch.ones(1).device
    devices = {
        "before": index,
        "factory": torch.zeros(1, device="cuda").device,
        "index": torch.zeros(1, device=torch.cuda.current_device()).device,
        "other": torch.zeros(1, device=torch.device("cuda", 0)).device,
        "string": torch.zeros(1, device="cuda:0").device,
        "like": torch.zeros_like(torch.ones(1), device="cuda").device,
        "new": torch.ones(1).new_zeros(1, device="cuda").device,
        "cuda()": torch.ones(1).cuda().device,
        "to": torch.ones(1).to("cuda").device,
        "to index": torch.ones(1).to(0).device,
        "to dtype": torch.ones(1).to(torch.float64).device,
        "module": torch.nn.Linear(1, 1).cuda().weight.device,
        "typed": torch.cuda.FloatTensor([1.0]).device,
        "host": on_host,
        "untouched": torch.ones(1).device,
    }
    return {name: str(device) for name, device in devices.items()}


def test_every_spelling_of_a_device_is_translated():
    (found,) = run_ranks(1, _spelled, device="musa")
    first, second, host = "musa:0", "musa:1", "cpu"
    assert found == {
        "before": "0",
        "factory": second,
        "index": second,
        "other": first,
        "string": first,
        "like": second,
        "new": second,
        "cuda()": second,
        "to": second,
        "to index": first,
        "to dtype": host,
        "module": second,
        "typed": second,
        "host": host,
        "untouched": host,
    }


def _current_in(device):
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def _answers():
    # Answers in upstream's spelling are for upstream's own modules only.
    upstream = {"__name__": "megatron.core.example", "torch": torch}
    tensor = torch.ones(1, device="cuda", dtype=torch.half)
    names = ("tensor.type()", "tensor.is_cuda", "torch.ones(1).is_cuda")
    return {
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(),
        "properties": torch.cuda.get_device_properties().major,
        "of a device": torch.cuda.get_device_properties(torch.device("cuda:0")).major,
        "state of a device": len(torch.cuda.get_rng_state(torch.device("cuda"))) > 0,
        "in a context": _current_in(torch.device("cuda", 1)),
        "upstream": [eval(name, upstream, {"tensor": tensor}) for name in names],
        "others": [tensor.type(), tensor.is_cuda, torch.ones(1).is_cuda],
        "nvtx": torch.cuda.nvtx.range_push("name"),
        "used": torch.cuda.device_memory_used() == torch.cuda.memory_allocated(),
    }


def test_questions_about_the_device():
    (found,) = run_ranks(1, _answers, device="musa")
    assert found == {
        "available": True,
        "count": 8,
        "capability": (3, 1),
        "properties": 3,
        "of a device": 3,
        "state of a device": True,
        "in a context": 1,
        "upstream": ["torch.cuda.HalfTensor", True, False],
        "others": ["torch.musa.HalfTensor", False, False],
        "nvtx": 0,
        "used": True,
    }


def _at_start():
    return torch.musa.is_initialized(), torch.cuda.is_initialized()


def test_arming_leaves_the_device_alone():
    # Ranks are forked from a process that armed the device and imported Megatron. A runtime that
    # had been started there could not be used in them.
    assert run_ranks(1, _at_start, device="musa") == [(False, False)]


def _random_numbers():
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    torch.distributed.init_process_group("nccl")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(2)
    host = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        forked = torch.rand(4, device="cuda")
    outside = torch.rand(4, device="cuda")
    state = torch.cuda.get_rng_state()
    drawn = torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5)
    torch.cuda.set_rng_state(state)
    again = torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5)
    by_generator = torch.rand(
        4, generator=torch.cuda.default_generators[0], device="cuda"
    )
    return {
        "host undisturbed": torch.equal(host, torch.get_rng_state()),
        "fork differs": not torch.equal(forked, outside),
        "restored": torch.equal(drawn, again),
        "dropped": 0 < (drawn == 0).sum().item() < 64,
        "generator": by_generator.device.type,
    }


def test_random_numbers_are_the_devices_own():
    (found,) = run_ranks(1, _random_numbers, device="musa")
    assert found == {
        "host undisturbed": True,
        "fork differs": True,
        "restored": True,
        "dropped": True,
        "generator": "musa",
    }


def _streams():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream(device="cuda")
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    start.record()
    with torch.cuda.stream(side):
        tensor = torch.ones(4, device="cuda")
        time.sleep(0.02)
        tensor.record_stream(torch.cuda.current_stream())
    side.wait_stream(torch.cuda.current_stream())
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_events_measure_time():
    (milliseconds,) = run_ranks(1, _streams, device="musa")
    assert milliseconds >= 20


def _memory():
    import gc

    from megatron_ext import devices

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block = torch.zeros(_MEBI, device="cuda")
    held = torch.cuda.memory_allocated() - before
    del block
    gc.collect()
    return {
        "held": held,
        "left": torch.cuda.memory_allocated() - before,
        "peak": torch.cuda.max_memory_allocated() - before,
        "stats": torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before,
        "device": devices.current().peak_memory_bytes() - before,
    }


def test_memory_counters_are_the_allocators():
    (found,) = run_ranks(1, _memory, device="musa")
    size = 4 * _MEBI
    assert found == {
        "held": size,
        "left": 0,
        "peak": size,
        "stats": size,
        "device": size,
    }


class _Matmul(torch.autograd.Function):
    """As upstream's linear layers are: decorated for the device type that upstream spells."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


def _autocast():
    forward = torch.amp.custom_fwd(_Matmul.forward, device_type="cuda")
    backward = torch.amp.custom_bwd(_Matmul.backward, device_type="cuda")
    function = type(
        "Matmul",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    a, b = (torch.ones(2, 2, device="cuda", requires_grad=True) for _ in range(2))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = function.apply(a, b)
    out.sum().backward()
    return out.dtype, a.grad.dtype


def test_autocast_reaches_the_device_forward_and_backward():
    (found,) = run_ranks(1, _autocast, device="musa")
    assert found == (torch.bfloat16, torch.float32)


def _moved():
    module = torch.nn.LayerNorm(4)
    module.weight.sequence_parallel = True
    weight = module.weight
    module.cuda()
    return (
        module.weight is weight,
        module.weight.sequence_parallel,
        module.weight.device.type,
    )


def test_parameters_keep_their_marks_when_moved():
    (found,) = run_ranks(1, _moved, device="musa")
    assert found == (False, True, "musa")


def _loaded():
    torch.save({"w": torch.ones(2, device="cuda")}, "saved.pt")
    stored = torch.load("saved.pt")["w"].device.type
    return stored, torch.load("saved.pt", map_location="cuda:1")["w"].device.index


def test_saved_tensors_come_back_to_the_device():
    (found,) = run_ranks(1, _loaded, device="musa")
    assert found == ("musa", 1)


def _undone():
    import megatron_ext

    megatron_ext.deactivate()
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, NotImplementedError, AssertionError):
        refused = True
    else:
        refused = False
    return refused, torch.cuda.is_available(), torch.ones(1, device="musa").type()


def test_deactivating_gives_torch_cuda_back():
    (found,) = run_ranks(1, _undone, device="musa")
    assert found == (True, False, "torch.musa.FloatTensor")
