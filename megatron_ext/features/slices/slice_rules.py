"""Megatron settings that slices reject or drop."""

from __future__ import annotations

from megatron_ext.rules import HYBRID_MODELS

TEXTS = {
    # For micro-batches that run in slices. The rule about the fused softmax applies
    # only to Megatron's local layers, because Transformer Engine uses a different
    # softmax. Megatron's kernel supports only 16-bit types.
    "slices": f"""
        transformer_impl!=local,transformer_engine
            only these two keep keys and values between slices; use --transformer-impl=local or
            transformer_engine
        context_parallel_size>1
            it also divides the sequence; remove it, or remove --pipeline-slices
        moe_router_load_balancing_type!=none,aux_loss,seq_aux_loss
            it would balance tokens per slice instead of per micro-batch; use
            --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        --moe-expert-capacity-factor: moe_expert_capacity_factor!=none
            experts would drop excess tokens per slice instead of per micro-batch
        mlp_chunks_for_training>1 & num_experts
            routers would see only part of a slice, but losses are counted per micro-batch; remove
            it
        --mtp-use-repeated-layer: mtp_num_layers & mtp_use_repeated_layer
            the layer runs twice, which would mix the keys and values of the two runs; remove it
        --mtp-hsm: mtp_num_layers & mtp_hsm
            it mixes hidden states of later tokens, which a different slice computes; remove it
        {HYBRID_MODELS}
            only attention keeps its state between slices; remove --pipeline-slices
        --experimental-attention-variant: experimental_attention_variant | linear_attention_type
            only DotProductAttention keeps keys and values between slices; remove --pipeline-slices
        window_size
            Megatron's sliding-window mask starts at the beginning of the slice, not of the
            sequence; remove --pipeline-slices
        packed sequences (--sft, --dataloader-inter-document-masking) with --micro-batch-size above
        1: sft | dataloader_inter_document_masking & micro_batch_size>1
            Megatron packs the slices of several samples into one; use --micro-batch-size=1
        reset_attention_mask & tensor_model_parallel_size>1
            tensor-parallel ranks receive the mask into a buffer that has the whole mask's shape;
            remove one of them
        fused softmax in 16 bits: masked_softmax_fusion & transformer_impl=local & fp16 | bf16
            its kernel requires as many queries as keys; add --no-masked-softmax-fusion
        fp8 | fp4
            scales are computed from whole micro-batches; use --bf16 instead
        tp_comm_overlap
            its buffers are sized for whole micro-batches; remove one of them
        fine_grained_activation_offloading
            keys and values stay on the device from slice to slice; use
            --recompute-granularity=selective instead
        logits_load_dir | logits_save_dir
            logits are stored per micro-batch, but a slice has only some of them; remove one of them
        save_activations_interval | save_dgrads_interval | save_tokens_per_expert_interval |
        moe_routing_trace_path
            Megatron keeps one call per micro-batch, so the files would have only one slice; remove
            them, or remove --pipeline-slices
        decoder_seq_length
            only the encoder's sequence is cut into slices; remove one of them
        perform_rl_step
            Megatron's RL shifts the tokens inside its forward step, so a slice would lack the
            token that follows it; remove one of them
        moe_enable_routing_replay
            programs replay the routing of whole micro-batches; remove one of them""",
    # Settings that are dropped if the table has slices.
    "dropped_by_slices": """
        overlap_moe_expert_parallel_comm
            only whole micro-batches run as pairs
        ep_overlap_early_attn_memory_release
            it applies only to pairs, and slices do not run as pairs""",
}
"""Rules by group, in the notation of `megatron_ext/rules.py`."""
