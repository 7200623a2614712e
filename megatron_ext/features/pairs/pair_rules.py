"""Megatron settings that pairs reject, or that are dropped if pairs are not possible."""

from __future__ import annotations

from megatron_ext.rules import HYBRID_MODELS

TEXTS = {
    # For forward and backward passes that run as pairs, with Megatron's schedule plans.
    "pairs": f"""
        recompute_granularity=full & fp8 | distribute_saved_activations
            with these settings, Megatron recomputes layers differently than in its schedule
            plans; use --recompute-granularity=selective without --recompute-method and
            --recompute-num-layers
        recompute_modules=moe
            Megatron's schedule plans cut a layer after the router and would keep one copy per
            expert of what this setting frees; use --recompute-modules=core_attn, layernorm,
            mla_up_proj, mlp or moe_act
        moe_layer_recompute
            it implies --recompute-modules=moe, but Megatron's schedule plans cut a layer after the
            router; remove it
        moe_shared_expert_overlap
            the shared expert hides the communication that a partner would hide; remove one of them
        --mtp-use-repeated-layer, --mtp-detach-heads or --mtp-hsm: mtp_num_layers &
        mtp_use_repeated_layer | mtp_detach_heads | mtp_hsm
            Megatron's schedule plans for multi-token prediction ignore these settings and would
            train a different model
        {HYBRID_MODELS}
            some releases of Megatron have no schedule plans for them; remove SUBJECT
        variable_seq_lengths
            Megatron's forward step does not pass lengths to schedule plans; remove one of them
        mlp_chunks_for_training>1 & num_experts
            schedule plans route all tokens of a micro-batch at once; remove it
        perform_rl_step
            Megatron's RL builds no schedule plans; remove one of them
        fine_grained_activation_offloading
            only backward passes outside pairs fetch the activations from the host; use
            --recompute-granularity=selective instead
        overlap_dispatch_backward_with_experts_wgrad
            Megatron supports only one of the two; remove one of them""",
    # For W actions that run while a rank waits for tokens.
    "waiting_weights": """
        sequence_parallel
            W gathers its operands from the tensor-parallel ranks, which may wait at different
            times; remove --pipeline-waiting-weights
        transformer_impl=transformer_engine
            its matrix products share one workspace across streams, so a W in parallel with an
            action could change the results; add --transformer-impl=local, or remove
            --pipeline-waiting-weights""",
    # Settings with which pairs would train a different model. `completion.completed` turns pairs
    # off for these.
    "unpaired": """
        --overlap-moe-expert-parallel-comm with --fp4-format: overlap_moe_expert_parallel_comm &
        fp4
            Megatron's schedule plans support only FP8 and 16-bit layers
        --overlap-moe-expert-parallel-comm with packed sequences (--sft,
        --dataloader-inter-document-masking): overlap_moe_expert_parallel_comm & sft |
        dataloader_inter_document_masking
            Megatron's forward step does not pass sequence bounds to schedule plans, so tokens would
            attend across sequences
        ep_overlap_early_attn_memory_release & fp4 | sft | dataloader_inter_document_masking
            it applies only to pairs, which these settings exclude""",
}
"""Rules by group, in the notation of `megatron_ext/rules.py`."""
