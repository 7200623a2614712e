"""Megatron settings that conflict with ordering or slicing micro-batches by length."""

from __future__ import annotations

TEXTS = {
    # For micro-batches that do not run in data order.
    "balance": """
        logits_load_dir | logits_save_dir
            logits are stored in data order; remove one of them
        moe_router_load_balancing_type=global_aux_loss
            it counts tokens from earlier micro-batches; use
            --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        perform_rl_step
            Megatron's RL distributes its own samples; remove one of them""",
    # For micro-batches that every replica cuts by its own lengths.
    "slices_by_length": """
        --moe-token-dispatcher-type=allgather with --expert-model-parallel-size above 1:
        moe_token_dispatcher_type=allgather & num_experts & expert_model_parallel_size>1
            it gathers the same number of tokens from every rank, but replicas cut slices of
            different lengths; use --moe-token-dispatcher-type=alltoall""",
}
"""Rules by group, in the notation of `megatron_ext/rules.py`."""
