"""Combinations of upstream's arguments that only NVIDIA GPUs, or only Transformer Engine, can run.

Shared by the backends other than CUDA. Every message names the flag, the reason and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Lack(NamedTuple):
    """A combination of upstream arguments that the backend cannot run."""

    refuses: Callable[[Any], bool]
    """Whether parsed arguments request the combination."""
    message: str


def flag(*dests: str) -> Callable[[Any], bool]:
    """Return a `Lack.refuses` that tests whether any of some switches is on."""
    # Not `args.dest`, here and below: a YAML configuration may lack any argument.
    return lambda args: any(getattr(args, dest, False) for dest in dests)


def _not_in(dest: str, *allowed: object) -> Callable[[Any], bool]:
    return lambda args: getattr(args, dest, allowed[0]) not in allowed


CUDA_ONLY = (
    Lack(
        _not_in("moe_token_dispatcher_type", "allgather", "alltoall", None),
        "--moe-token-dispatcher-type flex needs DeepEP or HybridEP on GPUs; use alltoall",
    ),
    Lack(
        lambda args: (
            _not_in("cuda_graph_impl", "none", None)(args)
            or flag("enable_cuda_graph", "external_cuda_graph")(args)
        ),
        "CUDA graphs record GPU work; leave --cuda-graph-impl at none",
    ),
    Lack(
        flag("record_memory_history"),
        "--record-memory-history is a feature of the CUDA allocator; use a host profiler",
    ),
    Lack(flag("log_energy"), "--log-energy reads GPU sensors; leave it out"),
    Lack(
        flag("inprocess_restart"),
        "--inprocess-restart aborts and rebuilds NCCL communicators; leave it out",
    ),
    Lack(
        lambda args: flag("profile")(args) and not flag("use_pytorch_profiler")(args),
        "--profile starts Nsight through the CUDA runtime; add --use-pytorch-profiler",
    ),
    Lack(flag("nccl_ub"), "--use-nccl-ub registers GPU buffers with NCCL; leave it out"),
    Lack(flag("use_sharp"), "--use-sharp is a feature of NCCL; leave it out"),
    Lack(
        flag("high_priority_stream_groups"),
        "--high-priority-stream-groups sets NCCL stream priorities; leave it out",
    ),
    Lack(
        _not_in("pipeline_model_parallel_comm_backend", None),
        "--pipeline-model-parallel-comm-backend chooses between NCCL and UCC on GPUs; leave it out",
    ),
    Lack(
        flag("use_megatron_fsdp", "use_torch_fsdp2"),
        "--use-megatron-fsdp and --use-torch-fsdp2 build CUDA device meshes; use "
        "--use-distributed-optimizer to shard optimizer state",
    ),
)
"""Features of NVIDIA's GPUs and libraries."""

TRANSFORMER_ENGINE_ONLY = (
    Lack(
        lambda args: getattr(args, "context_parallel_size", 1) > 1,
        "--context-parallel-size > 1 needs Transformer Engine's attention, which is CUDA only; "
        "use --tensor-model-parallel-size with --sequence-parallel to split long sequences",
    ),
    Lack(
        flag("moe_grouped_gemm"),
        "--moe-grouped-gemm is a CUDA kernel; leave it out: experts then run one by one",
    ),
    Lack(
        flag("moe_permute_fusion"),
        "--moe-permute-fusion is a Transformer Engine kernel; leave it out",
    ),
    Lack(
        flag("tp_comm_overlap"), "--tp-comm-overlap is a Transformer Engine feature; leave it out"
    ),
    Lack(flag("fp8"), "FP8 needs Transformer Engine and a GPU; use --bf16"),
    Lack(flag("fp4"), "FP4 needs Transformer Engine and a GPU; use --bf16"),
)
"""Features that upstream offers only with Transformer Engine."""
