"""Megatron settings that require micro-batches to run in data order."""

from __future__ import annotations

TEXTS = {
    # For micro-batches that do not run in data order.
    "balance": """
        logits_load_dir | logits_save_dir
            logits are stored in the order of the data; leave one of them out
        moe_router_load_balancing_type=global_aux_loss
            it counts the tokens of earlier micro-batches; use
            --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        perform_rl_step
            Megatron's RL distributes its own samples; leave one of them out""",
}
"""Rules by group, in the notation of `megatron_ext/rules.py`."""
