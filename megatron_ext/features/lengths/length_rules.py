"""Checks of settings for micro-batches that are ordered or sliced by length."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

from megatron_ext.config.feature_rules import FeatureRules, MemoryNeeded
from megatron_ext.config.flags import with_flags
from megatron_ext.config.pipeline_config import AUTO
from megatron_ext.config.refusals import Refusal
from megatron_ext.errors import ScheduleError
from megatron_ext.features.lengths.length_memory import memory_by_length
from megatron_ext.features.lengths.length_slices import SLICED_BY_LENGTH
from megatron_ext.schedules.table.slices import MAX_SLICES

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.planning.layout_forecast import Layout
    from megatron_ext.schedules.table.actions import Schedule

_TEXTS = {
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


class LengthRules(FeatureRules):
    """Checks the settings of `balance`, `slice_tokens` and `length_costs`."""

    texts = _TEXTS
    summation_reason = (
        "micro-batches ordered or cut by length are summed in a different order"
    )

    def memory_needed(self, pipeline: Pipeline, plan: Layout) -> MemoryNeeded | None:
        """Return the memory for slices of the longest micro-batches."""
        if pipeline.config.slice_tokens is None:
            return None
        return memory_by_length(pipeline, plan)

    def groups(self, config: PipelineConfig) -> list[tuple[str, str]]:
        """Return the groups for the settings in use."""
        groups = []
        if config.balance != "off":
            groups.append(("balance", "balance"))
        if config.slice_tokens is not None:
            groups.append(("slice_tokens", "slices_by_length"))
        return groups

    def refuse(
        self,
        answer: Preflight,
        config: PipelineConfig,
        table: Schedule | None,
        args: Namespace,
    ) -> None:
        """Refuse slices that would have too few tokens."""
        num_tokens = config.slice_tokens
        if not isinstance(num_tokens, int):  # None or auto
            return
        subject = with_flags("slice_tokens", str(num_tokens))
        # [reason] -> the least number of tokens
        least_by_reason: dict[str, int] = {}
        if getattr(args, "sequence_parallel", False):
            num_ranks = args.tensor_model_parallel_size
            reason = f"{num_ranks} tensor-parallel ranks divide each slice (--sequence-parallel)"
            least_by_reason[reason] = num_ranks
        seq_length = getattr(args, "seq_length", None)
        if seq_length:
            num_slices = ceil(seq_length / num_tokens)
            reason = (
                f"--seq-length={seq_length} would have {num_slices} slices, but a micro-batch can "
                f"have only {MAX_SLICES}"
            )
            least_by_reason[reason] = ceil(seq_length / MAX_SLICES)
        for reason, least_tokens in least_by_reason.items():
            if num_tokens < least_tokens:
                answer.refusals.append(
                    Refusal(
                        "slice_tokens",
                        f"{subject}: {reason}",
                        f"use --pipeline-slice-tokens={least_tokens} or more",
                        ScheduleError,
                    )
                )

    def summation(
        self,
        config: PipelineConfig,
        pp: int,
    ) -> dict[str, int | str]:
        """Return the order of the micro-batches and the number of tokens per slice."""
        settings: dict[str, int | str] = {}
        if config.balance != "off":
            settings["balance"] = config.balance
        if config.slice_tokens == AUTO:
            # The choice depends on the number of ranks.
            settings["tokens per slice"] = f"{AUTO} on {pp} ranks"
        elif config.slice_tokens is not None:
            settings["tokens per slice"] = config.slice_tokens
        return settings

    def recorded(self, config: PipelineConfig) -> dict[str, Any]:
        """Return the number of tokens per slice."""
        if config.slice_tokens is None:
            return {}
        return {"slice_tokens": config.slice_tokens}

    def remarks(self, pipeline: Pipeline, table: Schedule) -> Iterator[str]:
        """Say that the figures in the log are for whole micro-batches."""
        slice_tokens = pipeline.config.slice_tokens
        if slice_tokens is None:
            return
        long_ones = f"micro-batches of more than {slice_tokens} tokens"
        if slice_tokens == "auto":
            long_ones = "the longest ones"
        yield (
            "bubble and peak are for whole micro-batches, and each step cuts "
            f"{long_ones} into slices"
        )


def mistake(config: PipelineConfig) -> str | None:
    """Return why lengths can determine neither the order nor the slices of micro-batches."""
    uses_lengths = config.balance != "off" or config.cuts_sequences
    if config.length_costs is not None and not uses_lengths:
        return (
            "{length_costs} requires {balance}, {slices} or {slice_tokens}; add "
            "{balance:order}, or remove it"
        )
    return _mistake_of_balance(config) or _mistake_of_slice_tokens(config)


def _mistake_of_balance(config: PipelineConfig) -> str | None:
    """Return why lengths cannot determine the order of micro-batches."""
    if config.balance == "off":
        return None
    if config.disaggregation is not None:
        return (
            "{disaggregation} cannot run with {balance:{c.balance}}: its forward and backward "
            "ranks read the data in file order; remove {balance}"
        )
    if config.runs_no_table:
        return (
            "{balance:{c.balance}} requires one of this package's schedules; add {schedule:NAME}, "
            "such as 1f1b or interleaved, or remove it"
        )
    return None


def _mistake_of_slice_tokens(config: PipelineConfig) -> str | None:
    """Return why micro-batches cannot be cut by their lengths."""
    if config.slice_tokens is None:
        return None
    if isinstance(config.slice_tokens, int) and config.slice_tokens < 1:
        return "{slice_tokens:{c.slice_tokens}} must be at least 1; use {slice_tokens:4096}"
    if config.slices > 1:
        return (
            "{slice_tokens:{c.slice_tokens}} cuts each micro-batch by its length, but "
            "{slices:{c.slices}} cuts all micro-batches alike; remove one of them"
        )
    has_roles = config.disaggregation is not None
    excluded = {"disaggregation": has_roles, "pairs": config.pairs}
    for field, is_set in excluded.items():
        if is_set:
            return (
                f"{{slice_tokens:{{c.slice_tokens}}}} cannot run with {{{field}}}: its tables "
                "have no slices; remove one of them"
            )
    if config.runs_no_table or config.is_automatic:
        return (
            "{slice_tokens:{c.slice_tokens}} generates a table for each step's lengths; add "
            "{schedule:NAME}, such as zb-h1"
        )
    if config.schedule is not None and config.schedule not in SLICED_BY_LENGTH:
        return (
            "{slice_tokens:{c.slice_tokens}} needs a table for each step's lengths, which "
            "{schedule:{c.schedule}} cannot generate; use {schedule:zb-h1}, or one of "
            f"{', '.join(SLICED_BY_LENGTH)}"
        )
    return None
