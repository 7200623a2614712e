"""Megatron settings that exclude pairs, or that are dropped if pairs are not possible."""

from __future__ import annotations

from megatron_ext.rules import HYBRID_MODELS

TEXTS = {
    # For forwards and backwards that run as pairs, with Megatron's schedule plans.
    "pairs": f"""
        recompute_granularity=full & fp8 | distribute_saved_activations
            those recompute layers in another way than a plan; use --recompute-granularity=selective
            without --recompute-method and --recompute-num-layers
        recompute_modules=moe
            a plan cuts a layer behind the router, and would keep there, copied for each expert,
            what this drops; use --recompute-modules=core_attn, layernorm, mla_up_proj, mlp or
            moe_act
        moe_layer_recompute
            it means --recompute-modules=moe, behind whose router a plan cuts a layer; leave it out
        moe_shared_expert_overlap
            the shared expert hides the communication that a partner would hide; leave one of them
            out
        --mtp-use-repeated-layer, --mtp-detach-heads or --mtp-hsm: mtp_num_layers &
        mtp_use_repeated_layer | mtp_detach_heads | mtp_hsm
            plans of multi-token prediction know none of them and would train another model
        {HYBRID_MODELS}
            they have no plans in every release; leave SUBJECT out
        variable_seq_lengths
            Megatron's forward step gives plans no lengths; leave one of them out
        mlp_chunks_for_training>1 & num_experts
            plans route all tokens of a micro-batch at once; leave it out
        perform_rl_step
            Megatron's RL makes no plans; leave one of them out
        fine_grained_activation_offloading
            activations return from the host by the backwards that run alone; use
            --recompute-granularity=selective instead
        overlap_dispatch_backward_with_experts_wgrad
            Megatron takes one of the two only; leave one of them out""",
    # For W that run while a rank waits for tokens.
    "waiting_weights": """
        sequence_parallel
            W gathers its operands from the tensor-parallel ranks, which may wait at different
            times; leave --pipeline-waiting-weights out
        transformer_impl=transformer_engine
            its products of all streams share one workspace, so a W beside an action could change
            the results; add --transformer-impl=local, or leave --pipeline-waiting-weights out""",
    # Settings with which pairs would train a different model; `completion.completed` turns pairs
    # off.
    "unpaired": """
        --overlap-moe-expert-parallel-comm beside --fp4-format: overlap_moe_expert_parallel_comm &
        fp4
            Megatron's plans of pairs run layers in FP8 or in 16 bits
        --overlap-moe-expert-parallel-comm beside packed sequences (--sft,
        --dataloader-inter-document-masking): overlap_moe_expert_parallel_comm & sft |
        dataloader_inter_document_masking
            Megatron's forward step gives plans of pairs no bounds, and tokens would attend across
            sequences
        ep_overlap_early_attn_memory_release & fp4 | sft | dataloader_inter_document_masking
            there are no pairs""",
}
"""By group, in the notation of `megatron_ext/rules.py`."""
