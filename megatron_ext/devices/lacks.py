"""Combinations of upstream arguments that need NVIDIA GPUs or Transformer Engine.

All backends other than CUDA reject them. Every message names the flag, the reason and the remedy.
"""

from __future__ import annotations

from megatron_ext.rules import read_rules

CUDA_ONLY = read_rules("""
    moe_token_dispatcher_type!=allgather,alltoall
        --moe-token-dispatcher-type flex needs DeepEP or HybridEP on GPUs; use alltoall
    cuda_graph_impl!=none | enable_cuda_graph | external_cuda_graph
        CUDA graphs record GPU work; leave --cuda-graph-impl at none
    record_memory_history
        --record-memory-history is a feature of the CUDA allocator; use a host profiler
    log_energy
        --log-energy reads GPU sensors; remove it
    log_straggler
        --log-straggler reads GPU sensors; remove it
    profile & !use_pytorch_profiler
        --profile starts Nsight through the CUDA runtime; add --use-pytorch-profiler
    nccl_ub
        --use-nccl-ub registers GPU buffers with NCCL; remove it
    use_sharp
        --use-sharp is a feature of NCCL; remove it
    high_priority_stream_groups
        --high-priority-stream-groups sets NCCL stream priorities; remove it
    pipeline_model_parallel_comm_backend
        --pipeline-model-parallel-comm-backend chooses between NCCL and UCC on GPUs; remove it
    use_megatron_fsdp | use_torch_fsdp2
        --use-megatron-fsdp and --use-torch-fsdp2 build CUDA device meshes; use
        --use-distributed-optimizer to shard optimizer state
""")
"""Features of NVIDIA's GPUs and libraries."""

# Since 0.17, upstream accepts the flag without Triton and replaces the kernels with mocks.
TRITON_ONLY = read_rules("""
    batch_invariant_mode
        --batch-invariant-mode needs Triton and a GPU that its kernels run on; pip install triton
        where there is one, or remove the flag
""")
"""Features that upstream computes with Triton kernels."""

TRANSFORMER_ENGINE_ONLY = read_rules("""
    context_parallel_size>1
        --context-parallel-size > 1 needs Transformer Engine's attention, which is CUDA only; use
        --tensor-model-parallel-size with --sequence-parallel to split long sequences
    moe_grouped_gemm
        --moe-grouped-gemm is a CUDA kernel; remove it: experts then run one by one
    moe_permute_fusion
        --moe-permute-fusion is a Transformer Engine kernel; remove it
    tp_comm_overlap
        --tp-comm-overlap is a Transformer Engine feature; remove it
    fp8
        FP8 needs Transformer Engine and a GPU; use --bf16
    fp4
        FP4 needs Transformer Engine and a GPU; use --bf16
""")
"""Features that upstream offers only with Transformer Engine."""
