"""Megatron settings that exclude slices, or that are dropped under slices."""

from __future__ import annotations

from megatron_ext.rules import HYBRID_MODELS

TEXTS = {
    # For micro-batches that run in slices. The rule about the fused softmax is for Megatron's local
    # layers only, because Transformer Engine uses a different softmax. Megatron's kernel only
    # supports 16-bit types.
    "slices": f"""
        transformer_impl!=local,transformer_engine
            only their attention keeps keys and values between slices; use --transformer-impl=local
            or transformer_engine
        context_parallel_size>1
            it divides the sequence too; leave it out, or leave --pipeline-slices out
        moe_router_load_balancing_type!=none,aux_loss,seq_aux_loss
            it would balance the tokens of a slice instead of a micro-batch; use
            --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        --moe-expert-capacity-factor: moe_expert_capacity_factor!=none
            experts would drop the excess tokens of a slice instead of a micro-batch
        mlp_chunks_for_training>1 & num_experts
            routers would see a part of a slice, but losses are counted by micro-batch; leave it out
        --mtp-use-repeated-layer: mtp_num_layers & mtp_use_repeated_layer
            a layer that runs twice would mix the keys and values of both runs; leave it out
        --mtp-hsm: mtp_num_layers & mtp_hsm
            it mixes hidden states of later tokens, which another slice computes; leave it out
        {HYBRID_MODELS}
            only attention keeps its state between slices; leave --pipeline-slices out
        --experimental-attention-variant: experimental_attention_variant | linear_attention_type
            only DotProductAttention keeps keys and values between slices; leave --pipeline-slices
            out
        window_size
            Megatron's sliding-window mask starts at the slice, not at the sequence; leave
            --pipeline-slices out
        packed sequences (--sft, --dataloader-inter-document-masking) with --micro-batch-size above
        1: sft | dataloader_inter_document_masking & micro_batch_size>1
            Megatron packs the slices of several samples into one; use --micro-batch-size=1
        reset_attention_mask & tensor_model_parallel_size>1
            tensor-parallel ranks receive the mask into a buffer with the shape of the whole mask;
            leave one of them out
        fused softmax in 16 bits: masked_softmax_fusion & transformer_impl=local & fp16 | bf16
            its kernel requires as many queries as keys; add --no-masked-softmax-fusion
        fp8 | fp4
            scales are computed from whole micro-batches; use --bf16 instead
        tp_comm_overlap
            its buffers have the size of whole micro-batches; leave one of them out
        fine_grained_activation_offloading
            keys and values stay on the device from slice to slice; use
            --recompute-granularity=selective instead
        logits_load_dir | logits_save_dir
            logits are stored by micro-batch, but a slice has only a part of them; leave one of them
            out
        decoder_seq_length
            slices cut only the encoder's sequence; leave one of them out
        perform_rl_step
            Megatron's RL shifts the tokens inside its forward step, so a slice would lack the
            token that follows it; leave one of them out
        moe_enable_routing_replay
            programs replay the experts of whole micro-batches; leave one of them out""",
    # Settings that tables with slices drop.
    "dropped_by_slices": """
        overlap_moe_expert_parallel_comm
            only whole micro-batches run as pairs
        ep_overlap_early_attn_memory_release
            it applies only to pairs, and slices run without pairs""",
}
"""Rules by group, in the notation of `megatron_ext/rules.py`."""
