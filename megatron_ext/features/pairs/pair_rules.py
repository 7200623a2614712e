"""Checks of settings for pairs, and whether a job runs them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config.active import Choice
from megatron_ext.config.feature_rules import FeatureRules
from megatron_ext.config.flags import in_flags
from megatron_ext.errors import ArgumentsError, ScheduleError, reworded
from megatron_ext.rules import HYBRID_MODELS
from megatron_ext.upstream.signatures import parameters

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.schedules.table.actions import Schedule

# Settings under which pairs would train a different model; see the group "unpaired".
_UNPAIRED = ("fp4", "sft", "dataloader_inter_document_masking")

_TEXTS = {
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
    # Settings with which pairs would train a different model. `PairRules.completed` turns pairs
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


class PairRules(FeatureRules):
    """Checks the settings of `pairs` and `waiting_weights`."""

    texts = _TEXTS

    def completed(
        self, config: PipelineConfig, settings: Mapping[str, Any]
    ) -> PipelineConfig:
        """Run pairs if Megatron overlaps the communication between experts."""
        return replace(config, pairs=_has_pairs(config, settings))

    def decided(
        self,
        answer: Preflight,
        config: PipelineConfig,
        args: Namespace,
        device: DeviceKind | None,
        *,
        in_job: bool,
    ) -> PipelineConfig:
        """Return the configuration with the number of waiting W that `auto` chooses, and log it."""
        if config.waiting_weights != "auto":
            return config
        # Imported only for `auto`, because it imports the planner.
        from megatron_ext.config.automatic import memory_here
        from megatron_ext.features.pairs.waiting_choice import (
            WaitingChoice,
            waiting_choice,
        )

        if in_job:
            device = memory_here()
        waiting = waiting_choice(args, config, device)
        number = waiting.number
        resolved = replace(config, waiting_weights=number)
        # With `auto`, a device or release that cannot run W in parallel results in 0
        # instead of an error.
        if in_job and number:
            try:
                self.refuse_device(resolved)
            except ScheduleError as error:
                reason, _, _remedy = str(error).partition("; ")
                waiting = WaitingChoice(0, reason)
                resolved = replace(config, waiting_weights=0)
        line = f"--pipeline-waiting-weights=auto: {resolved.num_waiting}, because {waiting.reason}"
        answer.changes.append(reworded(line, in_flags))
        if in_job and waiting.basis:
            # Ranks with different amounts of memory would run different tables, so all
            # ranks compare their choices.
            setting = f"--pipeline-waiting-weights {number}"
            answer.choice = Choice(setting, waiting.basis)
        return resolved

    def groups(self, config: PipelineConfig) -> list[tuple[str, str]]:
        """Return the groups for the settings in use."""
        groups = []
        if config.pairs:
            groups.append(("pairs", "pairs"))
        if config.num_waiting > 0:
            groups.append(("waiting_weights", "waiting_weights"))
        return groups

    def dropped(self, config: PipelineConfig) -> tuple[str, ...]:
        """Drop the flag for pairs where they would train a different model."""
        return () if config.cuts_sequences else ("unpaired",)

    def imply(self, answer: Preflight, config: PipelineConfig, args: Namespace) -> None:
        """Make Megatron build its layers for pairs if, and only if, the table has pairs."""
        requests_pairs = getattr(args, "overlap_moe_expert_parallel_comm", None)
        if config.pairs:
            answer.arguments["overlap_moe_expert_parallel_comm"] = True
        elif config.schedule is not None and requests_pairs:
            answer.arguments["overlap_moe_expert_parallel_comm"] = False
            answer.notices.append(
                "--overlap-moe-expert-parallel-comm has no effect without experts on several "
                "ranks (--num-experts, --expert-model-parallel-size)"
            )
            if getattr(args, "ep_overlap_early_attn_memory_release", None):
                answer.arguments["ep_overlap_early_attn_memory_release"] = False

    def refuse_device(self, config: PipelineConfig) -> None:
        """Check that this device and this release of Megatron can run W in parallel with actions.

        Raises:
            ScheduleError: They cannot.
        """
        if not config.num_waiting or devices.current().is_host:
            return
        # In 0.16, plans compute on the stream that the process chose first, DDP's reductions may
        # wait only for the default stream, and grouped_gemm products run on the action stream.
        parameter_names = parameters(
            "megatron.core.pipeline_parallel.utils:set_streams"
        )
        if "comp_stream" in parameter_names:
            raise ScheduleError(
                f"--pipeline-waiting-weights={config.waiting_weights} needs megatron-core 0.17 or "
                "later on a device: 0.16 computes and reduces on streams that do not wait for a W "
                "on another stream; remove --pipeline-waiting-weights"
            )

    def refuse_built(self, pipeline: Pipeline, fields: Mapping[str, Any]) -> None:
        """Check that the table and the layers agree on whether there are pairs.

        Raises:
            ArgumentsError: They do not.
        """
        overlaps = fields.get("overlap_moe_expert_parallel_comm")
        pairs = pipeline.config.pairs
        if overlaps not in (None, pairs):
            raise ArgumentsError(
                f"schedule {pipeline.name} has pairs={pairs}, but the model has "
                f"overlap_moe_expert_parallel_comm={overlaps}; set both to the same value"
            )

    def recorded(self, config: PipelineConfig) -> dict[str, Any]:
        """Return whether the job runs pairs, and how many W may wait."""
        settings: dict[str, Any] = {"pairs": config.pairs}
        if config.num_waiting:
            settings["waiting_weights"] = config.num_waiting
        return settings

    def remarks(self, pipeline: Pipeline, table: Schedule) -> Iterator[str]:
        """Say how many W wait for idle time."""
        num_waiting = pipeline.config.num_waiting
        if num_waiting and not any(table.pairs):
            yield "there are too few micro-batches to form pairs, so no W waits for idle time"
        elif num_waiting:
            yield (
                f"each rank lets up to {num_waiting} more W wait for idle time, at most "
                "until their place in the simulated table"
            )


def mistake(config: PipelineConfig) -> str | None:
    """Return why actions cannot run as pairs, or why W cannot wait for idle time."""
    if config.pairs and config.disaggregation is not None:
        return (
            "{disaggregation} cannot run with {pairs}: forward and backward passes run on "
            "different ranks; remove one of them"
        )
    if config.pairs and config.runs_no_table:
        return "{pairs} requires one of this package's schedules; add {schedule:NAME}"
    return _mistake_of_waiting(config)


def _mistake_of_waiting(config: PipelineConfig) -> str | None:
    """Return why W cannot wait for idle time."""
    if config.num_waiting < 0:
        return (
            "{waiting_weights:{c.waiting_weights}} must be at least 0; use {waiting_weights:0}, "
            "which runs W where the table places it"
        )
    if not config.waiting_weights:
        return None
    if config.disaggregation is not None:
        return (
            "{waiting_weights:{c.waiting_weights}} cannot run with {disaggregation}, which has no "
            "pairs; remove {waiting_weights}"
        )
    if config.runs_no_table:
        return (
            "{waiting_weights:{c.waiting_weights}} requires one of this package's schedules with "
            "pairs; add {schedule:NAME}, such as zb-h1, or remove it"
        )
    if config.dynamic is not None:
        return (
            "{waiting_weights:{c.waiting_weights}} cannot run with {dynamic}, which places W "
            "itself; remove one of them"
        )
    if config.is_automatic:
        return (
            "{waiting_weights:{c.waiting_weights}} cannot run with {schedule:{c.schedule}}, which "
            "compares tables without it; name the schedule, such as {schedule:zb-h1}"
        )
    return None


def _has_pairs(config: PipelineConfig, settings: Mapping[str, Any]) -> bool:
    """Return whether forward and backward passes run as pairs."""
    # The sizes passed to `configure` do not include experts, so trust the program's setting.
    if "num_experts" not in settings and config.pairs:
        return True
    # Pairs hide the communication between experts, and there is none on a single rank.
    expert_ranks = settings.get("expert_model_parallel_size") or 1
    if not settings.get("num_experts") or expert_ranks == 1:
        return False
    if config.pairs:
        return True
    # In these cases the rules drop the flag, with a notice (`PairRules.dropped`).
    is_unpaired = any(settings.get(dest) for dest in _UNPAIRED)
    if config.cuts_sequences or is_unpaired:
        return False
    return bool(settings.get("overlap_moe_expert_parallel_comm"))
