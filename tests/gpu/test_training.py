"""Small models on pipeline ranks that share one GPU, bit for bit those of one process on it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from megatron_ext import devices
from tests.runtime.capture import GPT, PP2, PP4, Captured, run_here
from tests.runtime.test_equality import EP2, PAIRS, RECOMPUTE, UNCLIPPED, VPP2
from tests.training.helpers import LLAMA, MOE

from . import processes

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="needs megatron-core"
)

pytestmark = [pytest.mark.gpu, needs_megatron]

# What needs neither Transformer Engine nor Apex.
PLAIN = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-bias-swiglu-fusion "
)
_BASE = f"{GPT}{UNCLIPPED}--num-layers 8 "
_TE = (
    f"{_BASE}{LLAMA}--bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion "
    "--hidden-size 128 --seq-length 64 --max-position-embeddings 64 "
)
_LEARNED = _TE.replace(
    LLAMA, ""
)  # as many query groups as heads, positions in the embedding
_FULL = (
    "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --microbatch-rng " + RECOMPUTE
)
_OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules "

MODELS = {
    "tied": GPT + PLAIN,
    "llama": _BASE + PLAIN + LLAMA,
    "bf16": _BASE + PLAIN + LLAMA + "--bf16 ",
    "dropout, recomputed": _BASE + PLAIN + LLAMA + _FULL,
    "experts": _BASE + PLAIN + LLAMA + MOE + "--bf16 ",
    "TE": _TE,
    "TE, learned positions": _LEARNED,
    "TE, fp8": _TE + "--fp8-format hybrid --fp8-recipe tensorwise ",
    "TE, experts": _TE + MOE + "--moe-grouped-gemm ",
}
MODELS |= {
    f"{name}, fused": MODELS[name].replace("--no-gradient-accumulation-fusion ", "")
    for name in ("llama", "TE", "TE, experts")
}


class Case(NamedTuple):
    """A training, and the one that has its bits: one process, or Megatron's own schedule."""

    model: str
    flags: str
    opened: str = "Staged"
    """The transport."""
    queues: int = 1
    """Of the hardware."""
    reference: str = ""
    """Flags of four ranks; without any, one process."""
    same_bits: bool = True


_SHM = "--pipeline-transport shm "
_IPC = _SHM + "--pipeline-device-path ipc "
_TABLE = PP4 + _SHM + "--pipeline-schedule "
_OWN = PP4 + _SHM
_REPLICAS = PP2 + _SHM
_EXPERTS = PP2 + EP2 + _SHM
CASES = {
    # Both ends add to the gradient of the tied weight, in another order than one process.
    "Megatron's own schedule": Case("tied", _OWN, same_bits=False),
    "1f1b": Case("tied", _TABLE + "1f1b", reference=_OWN),
    "zb-h1": Case("llama", _TABLE + "zb-h1"),
    "zb-h1 by ipc": Case("llama", PP4 + _IPC + "--pipeline-schedule zb-h1", "Direct"),
    "zb-v": Case("llama", _TABLE + "zb-v"),
    "zb-v by ipc, eight queues": Case(
        "bf16", PP4 + _IPC + "--pipeline-schedule zb-v", "Direct", queues=8
    ),
    "interleaved, eight queues": Case(
        "llama", _TABLE + "interleaved " + VPP2, queues=8
    ),
    "dualpipe-v": Case("bf16", _TABLE + "dualpipe-v"),
    "bitpipe": Case("llama", _TABLE + "bitpipe", reference=_REPLICAS),
    "dpp": Case("llama", PP4 + "--pipeline-schedule 1f1b --use-dpp", "Direct"),
    "dpp staged, eight queues": Case(
        "bf16",
        PP4 + "--pipeline-schedule zb-h1 --use-dpp --pipeline-device-path staged",
        queues=8,
    ),
    "slices": Case("bf16", _TABLE + "zb-h1 --pipeline-slices 2", same_bits=False),
    "accumulation fused": Case("llama, fused", _TABLE + "zb-h1"),
    # Random numbers are drawn by stage.
    "dropout": Case("dropout, recomputed", _TABLE + "zb-h1", reference=_OWN),
    "pairs": Case(
        "experts", f"{_EXPERTS}{PAIRS}--pipeline-schedule zb-v", reference=_EXPERTS
    ),
    "pairs, eight queues": Case(
        "experts",
        f"{_EXPERTS}{PAIRS}--pipeline-schedule 1f1b",
        queues=8,
        reference=_EXPERTS,
    ),
}
if processes.TRANSFORMER_ENGINE:
    CASES |= {
        "TE, zb-h1": Case("TE", _TABLE + "zb-h1"),
        "TE, zb-v by ipc, eight queues": Case(
            "TE", PP4 + _IPC + "--pipeline-schedule zb-v", "Direct", queues=8
        ),
        "TE, dpp": Case("TE", PP4 + "--pipeline-schedule 1f1b --use-dpp", "Direct"),
        "TE, slices": Case("TE", _TABLE + "zb-h1 --pipeline-slices 2", same_bits=False),
        "TE, slices, learned positions": Case(
            "TE, learned positions",
            _TABLE + "zb-h1 --pipeline-slices 2",
            same_bits=False,
        ),
        "TE, offloading": Case("TE", _TABLE + f"zb-v {_OFFLOAD}attn_norm mlp_norm"),
        "TE, offloading, eight queues": Case(
            "TE", _TABLE + f"zb-h1 {_OFFLOAD}qkv_linear core_attn attn_proj", queues=8
        ),
        "TE, fp8": Case("TE, fp8", _TABLE + "zb-h1"),
        "TE, fp8, zb-v": Case("TE, fp8", _TABLE + "zb-v"),
        "TE, fused": Case("TE, fused", _TABLE + "zb-v"),
        "TE, experts": Case("TE, experts", _TABLE + "zb-v"),
        "TE, experts, fused": Case("TE, experts, fused", _TABLE + "zb-h1"),
        "TE, pairs": Case(
            "TE, experts",
            f"{_EXPERTS}{PAIRS}--pipeline-schedule zb-v",
            reference=_EXPERTS,
        ),
        "TE, pairs, fused": Case(
            "TE, experts, fused",
            f"{_EXPERTS}{PAIRS}--pipeline-schedule zb-v",
            reference=_EXPERTS,
        ),
    }


def _wgrad_gemm_accum(
    tokens: torch.Tensor, grad_outputs: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Do as Apex's kernel, which adds the gradient of a weight, of `[tokens, width]`."""
    gradient.add_(grad_outputs.t() @ tokens)


def _stand_in_for_apex() -> None:
    """Let Megatron find its kernel; Transformer Engine's layers have theirs."""
    name = "fused_weight_gradient_mlp_cuda"
    if find_spec(name) is None:
        kernels = ModuleType(name)
        vars(kernels).update(
            wgrad_gemm_accum_fp32=_wgrad_gemm_accum,
            wgrad_gemm_accum_fp16=_wgrad_gemm_accum,
        )
        sys.modules[name] = kernels


def train(flags: str) -> Captured:
    """Train as one rank."""
    _stand_in_for_apex()
    devices.current().bind(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    processes.join()
    captured = run_here("gpt", flags.split())
    torch.distributed.destroy_process_group()
    return captured


class Result(NamedTuple):
    """Of all ranks together."""

    losses: list[dict[str, float]]
    gradients: dict[str, str]
    """Digests of those of the first step, by parameter."""
    transports: set[str]


def trained(flags: str, ranks: int, directory: Path, queues: int = 1) -> Result:
    """Train on ranks that share the GPU."""
    found = processes.run(
        ranks,
        train,
        flags,
        directory=directory,
        CUDA_DEVICE_MAX_CONNECTIONS=str(queues),
    )
    return Result(
        next(rank.losses for rank in found if any(rank.losses)),
        {name: digest for rank in found for name, digest in rank.gradients[0].items()},
        {transport for rank in found for transport in rank.transports},
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Result]:
    """Results of a model under other flags, each computed once."""
    return functools.cache(
        lambda model, flags: trained(
            MODELS[model] + flags,
            4 if flags else 1,
            tmp_path_factory.mktemp("reference") / "run",
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_one_process_does(
    name: str,
    reference: Callable[[str, str], Result],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    case = CASES[name]
    expected = reference(case.model, case.reference)
    found = trained(MODELS[case.model] + case.flags, 4, tmp_path / "run", case.queues)
    assert found.transports == {case.opened + "Transport"}
    same = sum(
        found.gradients[key] == digest for key, digest in expected.gradients.items()
    )
    record_property(
        "gradients of the first step equal in all bits",
        f"{same} of {len(expected.gradients)}",
    )
    worst = max(
        abs(step[key] - value) / abs(value)
        for step, other in zip(found.losses, expected.losses, strict=True)
        for key, value in other.items()
    )
    record_property("losses off by", f"{worst:.1e}")
    assert worst <= (1e-3 if "--bf16" in MODELS[case.model] else 1e-6)
    if case.same_bits:
        assert found.losses == expected.losses
        assert same == len(expected.gradients)
