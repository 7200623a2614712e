"""Checks of settings for slices, and what slices set for Megatron."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megatron_ext.config.feature_rules import FeatureRules
from megatron_ext.rules import HYBRID_MODELS
from megatron_ext.schedules.table.slices import (
    MAX_SLICES,
    shares_of_equal_cost,
    token_bounds,
)

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.schedules.table.actions import Schedule

_TEXTS = {
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


class SliceRules(FeatureRules):
    """Checks the settings of slices."""

    texts = _TEXTS
    summation_reason = "slices sum over a micro-batch's tokens in a different order"

    def why_no_forecast(self, config: PipelineConfig) -> str | None:
        """Return why the planner cannot forecast slices."""
        if config.slices == 1:
            return None
        return "with --pipeline-slices, the planner would count whole micro-batches"

    def groups(self, config: PipelineConfig) -> list[tuple[str, str]]:
        """Return the group for slices, with the field that asks for them."""
        if config.slices > 1:
            return [("slices", "slices")]
        if config.cuts_sequences:
            return [("slice_tokens", "slices")]
        return []

    def dropped(self, config: PipelineConfig) -> tuple[str, ...]:
        """Drop the flags that request pairs, which slices always rule out."""
        return ("dropped_by_slices",) if config.cuts_sequences else ()

    def imply(self, answer: Preflight, config: PipelineConfig, args: Namespace) -> None:
        """Set what layers need if their gradients arrive slice by slice."""
        if not config.cuts_sequences:
            return
        # Megatron-Bridge does not have this setting and does not create masks.
        makes_mask = getattr(args, "create_attention_mask_in_dataloader", None)
        if makes_mask and not getattr(args, "reset_attention_mask", None):
            # Tensor-parallel ranks receive the mask into a buffer that has the whole mask's shape,
            # so a slice's mask would not fit.
            answer.arguments["create_attention_mask_in_dataloader"] = False
        # Transformer Engine's layers overwrite the gradients from other slices if this cache,
        # which only fp8 uses, is combined with fused gradient accumulation.
        answer.arguments["disable_parameter_transpose_cache"] = True

    def refuse(
        self,
        answer: Preflight,
        config: PipelineConfig,
        table: Schedule | None,
        args: Namespace,
    ) -> None:
        """Refuse sequences that are too short for this many slices."""
        seq_length = getattr(args, "seq_length", None)
        if table is None or table.num_slices == 1 or not seq_length:
            return
        with answer.collecting("slices"):
            # If slices of equal length are too short, so is the last slice of a cut by
            # cost, which is even shorter.
            even = shares_of_equal_cost(table.num_slices)
            divisor = 1
            if getattr(args, "sequence_parallel", False):
                divisor = args.tensor_model_parallel_size
            token_bounds(even, seq_length, divisor)

    def summation(
        self,
        config: PipelineConfig,
        pp: int,
    ) -> dict[str, int | str]:
        """Return the number of slices."""
        return {"slices": config.slices} if config.slices > 1 else {}


def mistake(config: PipelineConfig) -> str | None:
    """Return why micro-batches cannot be cut into these slices."""
    if not 1 <= config.slices <= MAX_SLICES:
        return (
            f"{{slices:{{c.slices}}}}: a micro-batch has 1 to {MAX_SLICES} slices; "
            "use {slices:4} or 8"
        )
    if config.slices == 1:
        return None
    has_roles = config.disaggregation is not None
    unsliced = {"disaggregation": has_roles, "pairs": config.pairs}
    for field, is_set in unsliced.items():
        if is_set:
            return (
                f"{{slices:{{c.slices}}}} cannot run with {{{field}}}: its tables have no "
                "slices; remove one of them"
            )
    of_unequal_lengths = {
        "balance": config.balance != "off",
        "variable_seq_lengths": config.variable_seq_lengths,
    }
    for field, is_set in of_unequal_lengths.items():
        if is_set:
            return (
                f"{{slices:{{c.slices}}}} cannot run with {{{field}}}: it cuts all "
                "micro-batches alike; use {slice_tokens:4096} without {slices}, or remove one "
                "of them"
            )
    if config.runs_no_table:
        return (
            "{slices:{c.slices}} requires one of this package's schedules; add "
            "{schedule:NAME}, such as zb-h1"
        )
    return None
