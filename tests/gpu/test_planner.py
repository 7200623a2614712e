"""Memory and time of a step on this GPU, beside what `megatron-ext plan` forecasts for its kind."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_ext import devices

from . import processes
from .test_training import needs_megatron

pytestmark = [pytest.mark.gpu, needs_megatron]

_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
)
_WIDE = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
_EXPERTS = "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --num-experts "
_BALANCED = "--moe-router-load-balancing-type none --moe-router-force-load-balancing "
_LATENT = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --hidden-size 5120 "
    "--ffn-hidden-size 12288 --num-attention-heads 128 --kv-channels 128 --q-lora-rank 1536 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
)
_SMALL = (
    f"{_LLAMA}--hidden-size 2048 --ffn-hidden-size 7168 --num-attention-heads 16 --num-layers 16 "
    "--vocab-size 31999 "
)
# Apex, which the fusion needs, is not everywhere.
_UNFUSED = "--no-gradient-accumulation-fusion "
_TRAINING = (
    f"{_UNFUSED}--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 "
    "--num-workers 0 --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --min-lr 1e-5 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 "
    "--train-iters 7 --log-interval 1 --transformer-impl transformer_engine "
    "--attention-backend fused "
)


class Case(NamedTuple):
    """A training, and what the planner is asked for it."""

    model: str
    fix: str = "pp=1,recompute=none"
    flags: str = ""
    """Further ones of the training."""
    options: str = ""
    """Further ones of `plan`."""
    ranks: int = 1


def _pipeline(schedule: str, layout: str) -> Case:
    flags = (
        "--pipeline-model-parallel-size 4 --pipeline-transport shm "
        f"--pipeline-schedule {schedule}"
    )
    return Case(
        _SMALL,
        f"pp=4,recompute=none,schedule={schedule},layout={layout}",
        flags,
        ranks=4,
    )


_LLAMA_8B = f"{_LLAMA}{_WIDE}--num-layers 4 --vocab-size 128255 "
_FULL = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
CASES = {
    "Llama 3 8B, 4 layers": Case(_LLAMA_8B),
    "the same, recomputed": Case(_LLAMA_8B, "pp=1,recompute=full", _FULL),
    "the same, fp8": Case(
        _LLAMA_8B,
        flags="--fp8-format hybrid --fp8-recipe tensorwise",
        options="--precision fp8",
    ),
    "Mixtral 8x7B, 2 layers": Case(
        f"{_LLAMA}{_WIDE}--num-layers 2 --vocab-size 31999 {_EXPERTS}8 --moe-router-topk 2 ",
        flags=_BALANCED,
    ),
    "DeepSeek-V2, 4 layers, 16 experts": Case(
        f"{_LATENT}--num-layers 4 --vocab-size 102399 {_EXPERTS}16 --moe-router-topk 6 "
        "--moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 3072 "
        "--moe-layer-freq ([0]+[1]*3) ",
        flags=_BALANCED,
    ),
    "1f1b": _pipeline("1f1b", "Etttt|tttt|tttt|ttttL"),
    "zb-h1": _pipeline("zb-h1", "Etttt|tttt|tttt|ttttL"),
    "zb-v": _pipeline("zb-v", "Ett|tt|tt|tt|tt|tt|tt|ttL"),
}


def train(flags: str) -> float:
    """Train as one rank; return the most memory that torch had allocated, in GiB."""
    devices.current().bind(0)
    if os.environ["WORLD_SIZE"] == "1":
        torch.distributed.init_process_group(
            "nccl", store=processes.store(), rank=0, world_size=1
        )
    else:
        processes.join()
    from tests.ranks import train_here

    train_here("gpt", flags.split())
    found = torch.cuda.max_memory_allocated() / 2**30
    torch.distributed.destroy_process_group()
    return found


def forecast(case: Case, batch: int) -> dict[str, Any]:
    """Return the plan of a case for this machine's kind of GPU."""
    from megatron_ext.planning.hardware import kind_of

    kind = kind_of(torch.cuda.get_device_name(0))
    assert kind is not None, "the planner does not know this GPU"
    command = [
        sys.executable, "-m", "megatron_ext", "plan", "--devices", f"{case.ranks}x{kind.name}",
        "--global-batch-size", str(batch), "--seq-length", "4096", "--json",
        "--fix", f"tp=1,micro_batch=1,{case.fix}", *case.options.split(),
        "--", *case.model.split(), *_UNFUSED.split(), "--cuda-graph-impl", "none",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)["plans"][0]
    return plan


@pytest.mark.alone
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_is_forecast(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Memory of each rank; time is shown, and means something only with one rank."""
    case = CASES[name]
    batch = 8 if case.ranks == 1 else 12
    plan = forecast(case, batch)
    flags = f"{case.model}{_TRAINING}--global-batch-size {batch} {case.flags}"
    found = processes.run(
        case.ranks, train, flags, directory=tmp_path / "run",
        NVTE_ALLOW_NONDETERMINISTIC_ALGO="1", CUDA_DEVICE_MAX_CONNECTIONS="8",
    )  # fmt: skip
    errors = [own / of - 1 for own, of in zip(plan["memory_gib"], found, strict=True)]
    record_property("GiB", " ".join(f"{size:.2f}" for size in found))
    record_property(
        "forecast off by", " ".join(f"{100 * error:+.1f} %" for error in errors)
    )
    if case.ranks == 1:
        logs = (tmp_path / "run/0.log").read_text(errors="replace")
        steps = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", logs)
        step_s = statistics.median(map(float, steps[2:])) / 1e3
        record_property(
            "step",
            f"{step_s:.3f} s, forecast {100 * (plan['step_s'] / step_s - 1):+.1f} %",
        )
    assert max(map(abs, errors)) < 0.03
