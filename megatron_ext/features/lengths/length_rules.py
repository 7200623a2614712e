"""Megatron settings that exclude running micro-batches in a different order than the data's."""

from __future__ import annotations

TEXTS = {
    # For micro-batches in a different order than the data's.
    "balance": """
        logits_load_dir | logits_save_dir
            logits lie in their files in the order of the data; leave one of them out
        moe_router_load_balancing_type=global_aux_loss
            it counts the tokens of the micro-batches before; use
            --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        perform_rl_step
            Megatron's RL deals out its own samples; leave one of them out""",
}
"""By group, in the notation of `megatron_ext/rules.py`."""
