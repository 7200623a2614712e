"""The CPU backend: what upstream's spelling of CUDA means while it is armed.

Each case runs in a rank (a forked process with the backend armed), so nothing leaks into pytest's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
import torch
from torch.jit import _builtins

from megatron_ext.config.flags import MEGATRON_FIELDS
from megatron_ext.devices import translate
from megatron_ext.devices.cpu import CpuDevice
from tests.ranks import run_ranks


def scripted(n: int) -> torch.Tensor:
    return torch.zeros([n])


def factories() -> None:
    cpu = torch.device("cpu")
    for device in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 3), 0):
        assert torch.empty(2, device=device).device == cpu
        assert torch.tensor([1.0], device=device, pin_memory=True).device == cpu
        assert torch.arange(3, device=device).device == cpu
        assert torch.zeros_like(torch.ones(2), device=device).device == cpu
        assert torch.ones(2).new_zeros(3, device=device).device == cpu
        assert torch.fft.fftfreq(4, device=device).device == cpu
        assert torch.ones(2).to(device).device == cpu
        assert (
            torch.ones(2).to(device=device, dtype=torch.bfloat16).dtype
            == torch.bfloat16
        )
    assert torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda").weight.device == cpu
    assert torch.ones(2).cuda(non_blocking=True).pin_memory().device == cpu


def other_devices() -> None:
    """Only CUDA is translated, and nothing claims to be on CUDA."""
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    assert not torch.empty(2, device="cuda").is_cuda
    with pytest.raises(RuntimeError):
        torch.empty(2, device="no such device")


def type_names() -> None:
    """Upstream gets its own spelling; everybody else the truth."""
    half = torch.ones(1, dtype=torch.float16)
    assert half.type() == "torch.HalfTensor"
    asking = {"__name__": "megatron.core.optimizer.optimizer", "tensor": half}
    exec("name = tensor.type()", asking)
    assert asking["name"] == "torch.cuda.HalfTensor"
    assert half.type("torch.cuda.FloatTensor").dtype == torch.float32
    assert half.type(torch.cuda.FloatTensor).dtype == torch.float32
    assert isinstance(half.float(), torch.cuda.FloatTensor)


def namespace() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).major == 8
    assert torch.cuda.get_device_properties(0).total_memory > 1 << 28
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    with (
        torch.cuda.device(0),
        torch.cuda.stream(torch.cuda.Stream()),
        torch.cuda.nvtx.range("a"),
    ):
        torch.ones(1).record_stream(torch.cuda.current_stream())
    _, high = torch.cuda.Stream.priority_range()  # for --high-priority-a2a-comm-stream
    assert torch.cuda.Stream(priority=high) == torch.cuda.current_stream()
    assert (
        torch.cuda.nvtx.range("a {}", 1)(abs)(-1) == 1
    )  # ranges decorate functions too
    with pytest.raises(ZeroDivisionError), torch.cuda.nvtx.range("a"):
        raise ZeroDivisionError
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() + (
        1 << 20
    )


def random_numbers() -> None:
    from megatron.core.tensor_parallel import random

    torch.manual_seed(3)
    expected = torch.rand(4)
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(3)
        assert torch.equal(torch.rand(4), expected)
    state = torch.cuda.get_rng_state(device="cuda")
    drawn = torch.rand(4)
    torch.cuda.set_rng_state(state, device=0)
    assert torch.equal(torch.rand(4), drawn)
    # Upstream's own path goes through torch.cuda._lazy_call, which must not merely queue.
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(4), drawn)
    assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())


def dropout_repeats_under_the_tracker() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    torch.distributed.init_process_group("nccl")
    assert torch.distributed.get_backend() == "gloo"
    parallel_state.initialize_model_parallel()
    draws = []
    for _ in range(2):
        model_parallel_cuda_manual_seed(7)
        with get_cuda_rng_tracker().fork():
            draws.append(torch.rand(3))
        draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2])
    assert torch.equal(draws[1], draws[3])
    assert not torch.equal(draws[0], draws[1])


def groups() -> None:
    """Groups that ask for NCCL are gloo groups, with collectives in all of NCCL's shapes."""
    from torch import distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda:0"))
    assert dist.get_backend() == "gloo"
    group = dist.new_group(backend="nccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    rank = dist.get_rank()
    mine = torch.full((2, 3), float(rank), device="cuda")
    flat = torch.empty(12, device="cuda")
    dist.all_gather_into_tensor(flat, mine, group=group)
    assert flat.tolist() == [0.0] * 6 + [1.0] * 6
    part = torch.empty(6)
    dist.reduce_scatter_tensor(part, flat, group=group)
    assert part.tolist() == [2.0 * rank] * 6


def jit_script_knows_the_factories() -> None:
    assert torch.jit.script(scripted)(3).tolist() == [0.0, 0.0, 0.0]


def jit_script_forgets_a_factory_that_is_gone() -> None:
    made = translate._translated_factory(str, False, torch.zeros.__wrapped__)
    address = id(made)
    assert address in _builtins._get_builtin_table()
    del made
    assert address not in _builtins._get_builtin_table()


@pytest.mark.parametrize(
    "case",
    [
        factories,
        other_devices,
        type_names,
        namespace,
        random_numbers,
        dropout_repeats_under_the_tracker,
        jit_script_knows_the_factories,
        jit_script_forgets_a_factory_that_is_gone,
    ],
)
def test_armed(case: Callable[[], None]) -> None:
    run_ranks(1, case)


def test_process_groups() -> None:
    run_ranks(2, groups)


_REFUSED = {
    "context_parallel_size": 2,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "flex",
    "cuda_graph_impl": "local",
    "record_memory_history": True,
    "log_energy": True,
    "log_straggler": True,
    "overlap_p2p_comm_warmup_flush": True,
    "profile": True,
    "nccl_ub": True,
    "use_sharp": True,
    "high_priority_stream_groups": ["dp"],
    "pipeline_model_parallel_comm_backend": "ucc",
    "use_megatron_fsdp": True,
    "tp_comm_overlap": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "batch_invariant_mode": True,
}
_WORKER = {"async_save": True, "use_persistent_ckpt_worker": True}


@pytest.mark.parametrize("dest", _REFUSED)
def test_argument_rules_refuse(dest: str) -> None:
    (message,) = CpuDevice().argument_errors(Namespace(**{dest: _REFUSED[dest]}))
    assert message.startswith("--") or message.split()[0] in {"CUDA", "FP8", "FP4"}


def test_argument_rules_refuse_the_persistent_checkpoint_worker() -> None:
    (message,) = CpuDevice().argument_errors(Namespace(**_WORKER))
    # Without the worker, Megatron drops --async-save and Megatron-Bridge ends.
    assert message.endswith("; remove --async-save")
    assert (
        CpuDevice().argument_errors(Namespace(**{**_WORKER, "async_save": False})) == []
    )


def test_every_argument_rule_is_tested() -> None:
    assert len(CpuDevice.lacks) == len(_REFUSED) + 1


def upstream_dests() -> set[str]:
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    return {action.dest for action in add_megatron_arguments(ArgumentParser())._actions}


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_rules_and_defaults_name_upstream_arguments() -> None:
    (known,) = run_ranks(1, upstream_dests)
    named = {*_REFUSED, *_WORKER, *CpuDevice.argument_defaults}
    named |= {"use_torch_fsdp2", "use_pytorch_profiler"}
    # Later releases call some arguments as the fields that they set.
    assert {
        name for name in named if not {name, MEGATRON_FIELDS.get(name)} & known
    } == set()


def test_argument_rules_let_the_rest_pass() -> None:
    assert CpuDevice().argument_errors(Namespace()) == []
    fine = Namespace(
        context_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        cuda_graph_impl="none",
        profile=True,
        use_pytorch_profiler=True,
        pipeline_model_parallel_comm_backend=None,
        async_save=True,
    )
    assert CpuDevice().argument_errors(fine) == []
