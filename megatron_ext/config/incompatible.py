"""Training flags that our schedules do not support, each with a reason and a remedy.

Some Megatron features reorder the computation or make assumptions about which ranks have the first
and last stages. A table determines both, so it is incompatible with such features.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.flags import (
    FLAG_OF,
    MEGATRON_FIELDS,
    in_flags,
    in_objects,
    with_flags,
)
from megatron_ext.config.refusals import Preflight, Refusal
from megatron_ext.config.roles import profiles_with_torch
from megatron_ext.config.stages import chooser
from megatron_ext.errors import ArgumentsError, reworded
from megatron_ext.rules import Rule, read_rules

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.schedules.table.actions import Schedule


# Rules in the notation of `megatron_ext/rules.py`, grouped by the setting that they belong to. In a
# remedy, `SUBJECT` is replaced by the feature's flag. Features add their own rules
# (`feature_list.RULES`).

# CUDA graphs for a whole step. Since 0.18, they are a value of --cuda-graph-impl.
# Before that, they were a scope, which Megatron still accepts under three names.
_WHOLE_STEP = (
    "cuda_graph_scope=full_iteration | cuda_graph_scope_deprecated=full_iteration | "
    "cuda_graph_modules=full_iteration"
)
_GRAPHS = (
    "--cuda-graph-impl, --enable-cuda-graph or --external-cuda-graph: "
    # The two switches are deprecated. Megatron translates them, but only after this check.
    f"cuda_graph_impl!=none | enable_cuda_graph | external_cuda_graph | {_WHOLE_STEP}"
)
_ENCODER_DECODER = "encoder-decoder models (--decoder-num-layers): decoder_num_layers"
_TEXTS = {
    # For all schedules. From 0.19 on, weights may have more shards than tensor-parallel ranks.
    # `moe_dispatch_fwd_dtype` exists from 0.20 on, so its absence identifies earlier releases.
    "schedule": f"""
        --cpu-offloading-num-layers: cpu_offloading | cpu_offloading_num_layers
            Megatron supports it only without a pipeline; use --recompute-granularity=selective
            instead
        --use-megatron-fsdp or --use-torch-fsdp2: use_megatron_fsdp | use_custom_fsdp |
        use_torch_fsdp2
            they gather and free weights in the order of Megatron's own schedules; use
            --use-distributed-optimizer instead
        {_ENCODER_DECODER}
            Megatron cannot pipeline them either; remove SUBJECT and --pipeline-model-parallel-size
        use_legacy_models
            Megatron builds legacy models without passing them their stage
        ckpt_format=torch_dcp,fsdp_dtensor
            Megatron supports them only with FSDP; use --ckpt-format=torch_dist
        --tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above the
        tensor-parallel size: tensor_parallel_num_weight_shards>tensor_model_parallel_size |
        expert_tensor_parallel_num_weight_shards>expert_tensor_parallel_size,tensor_model_parallel_size
            weights are gathered in the order of Megatron's own schedules; remove them, or use
            Megatron's own schedule
        --moe-flex-dispatcher-backend=ncclep before 0.20: moe_flex_dispatcher_backend=ncclep &
        moe_token_dispatcher_type=flex & num_experts & !moe_dispatch_fwd_dtype
            in these releases it needs --moe-expert-rank-capacity-factor, and Megatron repeats a
            step that exceeds this factor only under its own schedules; use
            --moe-flex-dispatcher-backend=deepep""",
    # Settings that our schedules replace or ignore. They are dropped when flags are read, and
    # rejected when a program has already built its configuration.
    "dropped": f"""
        {_GRAPHS} | inference_cuda_graph_scope!=none
            CUDA graphs are recorded in the order of Megatron's own schedules, so each kernel is
            launched individually
        rl_persist_cuda_graphs | rl_training_cuda_graphs
            kernels are launched individually, without CUDA graphs
        moe_paged_stash | moe_expert_rank_capacity_factor
            Megatron stashes activations in the order of its own schedules, so experts allocate
            memory for all their tokens instead, and no step has to be repeated for lack of memory
        delay_wgrad_compute
            the table determines when weight gradients run
        defer_embedding_wgrad_compute
            the table determines when weight gradients run, including those of the output layer""",
    # Settings that split backward passes replace.
    "dropped_by_split": """
        overlap_dispatch_backward_with_experts_wgrad
            the table already postpones the weight gradients of experts""",
    # Settings that rule out split backward passes. A dynamic order then leaves backward
    # passes whole.
    "whole": """
        --use-transformer-engine-op-fuser with experts: use_transformer_engine_op_fuser &
        num_experts
            Megatron keeps fused experts outside the module tree, so W would not compute their
            weight gradients; remove it""",
    # For split backward passes: settings that depend on a setting that is dropped.
    "unfused": """
        --offload-modules=fused_group_mlp, --moe-single-grouped-weight or
        --moe-ncclep-static-shape: use_transformer_engine_op_fuser & num_experts &
        offload_modules=fused_group_mlp | moe_single_grouped_weight | moe_ncclep_static_shape
            it may need --use-transformer-engine-op-fuser, which is dropped, because W would not
            compute weight gradients of fused experts; use --pipeline-schedule=1f1b or
            interleaved""",
    # Settings without effect if each rank has one stage.
    "dropped_by_line": """
        overlap_param_gather_with_optimizer_step
            it gathers the parameters of the first chunk during the optimizer step for the other
            chunks, but each rank has only one chunk
        overlap_p2p_comm_warmup_flush
            it applies to messages between virtual stages, but each rank has only one stage""",
    # Settings that disaggregation replaces or ignores.
    # fp4_param is the name of --fp4-param-gather in 0.16.
    "dropped_by_roles": """
        overlap_moe_expert_parallel_comm
            forward and backward passes run on different ranks
        ep_overlap_early_attn_memory_release
            it applies only with --overlap-moe-expert-parallel-comm, which these ranks drop
        --fp8-param-gather or --fp4-param-gather: fp8_param_gather | fp4_param_gather | fp4_param |
        reuse_grad_buf_for_mxfp8_param_ag
            forward ranks receive new weights in the model's precision and cast them; remove it""",
    # For schedules that put the first and the last stage on one rank. The two conditions are for
    # hybrid models in 0.16. From 0.17 on, the pattern itself contains the cuts.
    "folded": """
        hybrid models (--hybrid-override-pattern, --hybrid-layer-pattern): is_hybrid_model |
        hybrid_override_pattern & !hybrid_layer_pattern
            only --hybrid-layer-pattern (since 0.17) sets the layers of each stage; use
            --pipeline-schedule=1f1b or zb-h1""",
    # For several chunks on each rank.
    "chunks": """
        --multiple-validation-sets, or --full-validation without --sft: full_validation |
        multiple_validation_sets & multiple_validation_sets | !sft
            Megatron treats a rank's chunks as validation sets; use --pipeline-schedule=zb-h1 or
            1f1b, or remove them
        perform_rl_step
            Megatron's RL supports only one chunk per rank; use --pipeline-schedule=zb-h1 or 1f1b
        moe_routing_trace_path | save_tokens_per_expert_interval
            its records identify layers by their position in a chunk; use --pipeline-schedule=zb-h1
            or 1f1b, or remove it""",
    # For models that a program builds for such a schedule.
    "placed": """
        decoder_first_pipeline_num_layers | decoder_last_pipeline_num_layers |
        account_for_embedding_in_pipeline_split | account_for_loss_in_pipeline_split
            the layout that configure returns already cuts the model""",
    # For schedules of two mirrored pipelines.
    "twins": """
        use_mp_args_from_checkpoint_args
            a checkpoint contains the sizes of one of the two mirrored pipelines""",
    # For random numbers by micro-batch under Megatron's own schedules. Our schedules drop graphs.
    "microbatch_rng": f"""
        {_GRAPHS}
            they replay the recorded random numbers; remove one of them
        overlap_moe_expert_parallel_comm
            it interleaves two micro-batches, which need different random numbers; add
            --pipeline-schedule=interleaved, or remove one of them""",
    # For ranks that choose the order of their actions.
    "chosen": """
        fine_grained_activation_offloading
            activations return from the host in the order of a table; use
            --recompute-granularity=selective instead
        fp8_recipe=delayed & fp8
            scales depend on the earlier micro-batches, whose order changes, and recomputed layers
            look up the scales of their forward pass by that order; use --fp8-recipe=tensorwise
        moe_router_load_balancing_type=global_aux_loss
            it counts the tokens of earlier micro-batches over all replicas, which run them in
            different orders; use --moe-router-load-balancing-type=aux_loss or seq_aux_loss
        moe_enable_routing_replay & recompute_granularity
            recomputed routers replay their forward passes in the order of a table; remove one of
            them""",
    # For ranks that choose the order of their actions and receive activations from their twin.
    "crossed": """
        --overlap-param-gather with --bitpipe-routing=twin: overlap_param_gather
            twins gather parameters for each other and start their chunks in different orders; use
            --bitpipe-routing=local, or remove it""",
    # For micro-batches of different lengths.
    "lengths": """
        moe_token_dispatcher_type=allgather & num_experts
            it gathers tokens in fixed-size buffers; use --moe-token-dispatcher-type=alltoall
        tp_comm_overlap
            its buffers are for one fixed length; remove one of them""",
    # For micro-batches of different lengths under Megatron's own schedules.
    "lengths_without_table": f"""
        {_GRAPHS}
            they replay tensors of fixed shapes; remove one of them""",
    # For forward and backward ranks. From 0.20 on, a --freeze-all-layers step is forward-only, so
    # both roles would mistake it for an evaluation.
    "roles": """
        fine_grained_activation_offloading
            only backward passes on the same rank fetch the activations from the host; use
            --recompute-granularity=selective instead
        fp8_recipe=delayed & fp8
            forward ranks run without gradients, so Transformer Engine does not update the scales;
            use --fp8-recipe=tensorwise
        hybrid_context_parallel | dynamic_context_parallel
            Megatron runs its own schedule for it; remove one of them
        freeze_all_layers
            backward ranks have nothing to do; remove one of them
        perform_rl_step
            each role would train on different samples; remove one of them
        inprocess_restart
            a reserve rank cannot take over a role; remove one of them
        log_energy
            Megatron would only count the energy of backward ranks; remove one of them
        moe_use_upcycling | ckpt_convert_format
            forward ranks neither load nor save checkpoints, so another run has to convert them;
            remove one of them
        ignore_forward_tensor_parallel & num_experts
            expert shards are not merged; remove --ignore-forward-tensor-parallel
        fbd_activations=ship & mtp_num_layers
            forward ranks ship the inputs of a stage's layers, but not those of multi-token
            prediction; use --fbd-activations=recompute
        --fbd-activations=ship and hybrid models (--hybrid-override-pattern,
        --hybrid-layer-pattern): fbd_activations=ship & is_hybrid_model | hybrid_override_pattern |
        hybrid_layer_pattern
            forward ranks ship the inputs of a block of transformer layers; use
            --fbd-activations=recompute
        use_tp_pp_dp_mapping
            the two roles of a stage must be neighbours, as in the default rank order
        use_mp_args_from_checkpoint_args
            the parallel sizes on the command line determine the roles
        rerun_mode=report_stats
            it reruns each step, but forward ranks run each step only once
        error_injection_rate
            injected errors are found by rerunning steps, which forward ranks do not do
        full_validation | multiple_validation_sets
            backward ranks do not read the validation data
        --fbd-activations=ship alone: fbd_activations=ship & !recompute_granularity=full |
        !recompute_method=uniform | !recompute_num_layers=1
            backward ranks recompute each layer from its shipped input; add
            --recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1, or use
            --fbd-activations=recompute
        --recompute-method=block with more than two experts for a token: recompute_method=block &
        recompute_granularity=full & num_experts & moe_router_topk>2
            layers with gradients and recomputed layers order experts differently, and forward ranks
            can follow only one of the orders; use --recompute-method=uniform
        fbd_activations=ship & fp8 | fp4 | distribute_saved_activations
            with these settings, Megatron recomputes layers differently; use
            --fbd-activations=recompute
        --ignore-forward-tensor-parallel and dropout: ignore_forward_tensor_parallel &
        hidden_dropout | attention_dropout
            the merged process draws different masks than a stage's shards; add --hidden-dropout=0
            --attention-dropout=0, or remove it""",
    # For our transports under Megatron's own schedules.
    "transport": f"""
        use_ring_exchange_p2p
            it replaces the transport too; remove one of them
        {_ENCODER_DECODER}
            Megatron cannot pipeline them either; remove SUBJECT and --pipeline-model-parallel-size
        microbatch_group_size_per_vp_stage
            messages are identified by Megatron's default order
        CUDA graphs of a whole step (--cuda-graph-impl or --cuda-graph-scope=full_iteration):
        cuda_graph_impl=full_iteration | {_WHOLE_STEP}
            a CUDA graph cannot record transfers that the host performs; remove them, or use
            --pipeline-transport=torch""",
}


def _all_texts() -> dict[str, str]:
    """Return the texts above and the features' texts, by group."""
    texts = dict(_TEXTS)
    for rules in feature_rules():
        texts |= rules.texts
    return texts


RULES = {group: read_rules(text) for group, text in _all_texts().items()}
"""Rules about Megatron's settings, by feature, field or kind of table."""

# Each rank with a role has one stage, so settings for several stages have no effect either.
DROPPED_BY_ROLES = (
    RULES["dropped_by_roles"] + RULES["dropped"] + RULES["dropped_by_line"]
)
"""Settings that disaggregation replaces or ignores."""


def refusals(subject: str, args: Namespace, rules: Iterable[Rule]) -> list[Refusal]:
    """Return a refusal for each setting that is incompatible with a feature.

    `subject` is the flag that enabled the feature, such as `--pipeline-schedule=zb-v`.
    """
    refused = []
    for rule in rules:
        if rule.refuses(args):
            cause = f"{subject} cannot run with {rule.flag}: {rule.reason}"
            remedy = rule.remedy.replace("SUBJECT", subject)
            refused.append(Refusal(rule.reads[0], cause, remedy))
    return refused


def rules_of(
    config: PipelineConfig, table: Schedule | None, args: Namespace
) -> list[tuple[str, tuple[Rule, ...]]]:
    """Return the rules for a configuration and its table, with the flag that each group concerns.

    `table` is the schedule's table, or the table for Megatron's own schedule if our transport
    carries its messages. If None, rules about tables do not apply.
    """
    runs_no_table = config.runs_no_table
    has_roles = config.disaggregation is not None
    # (field of the configuration, group of rules, whether the group applies)
    groups = [
        ("microbatch_rng", "microbatch_rng", config.microbatch_rng and runs_no_table),
        ("variable_seq_lengths", "lengths", config.variable_seq_lengths),
        (
            "variable_seq_lengths",
            "lengths_without_table",
            config.variable_seq_lengths and runs_no_table,
        ),
        ("disaggregation", "roles", has_roles),
        ("disaggregation", "schedule", has_roles),
        ("schedule", "schedule", not runs_no_table),
        ("transport", "transport", runs_no_table and table is not None),
    ]
    for feature in feature_rules():
        groups += [(field, group, True) for field, group in feature.groups(config)]
    if table is not None and not runs_no_table:
        placement = table.placement
        chooses = config.dynamic is not None
        # Check the table rather than the schedule's name, because a table loaded from a
        # file can have any of these properties.
        groups += [
            ("schedule", "folded", placement.name in ("v", "w")),
            ("schedule", "chunks", placement.num_stages > placement.num_ranks),
            ("schedule", "twins", placement.twins == 2),
            ("dynamic", "chosen", chooses),
            ("dynamic", "crossed", chooses and bool(placement.twin_hops)),
        ]
    rules_by_flag = []
    for field, group, applies in groups:
        if applies:
            flag = flag_of(args, config, field)
            rules_by_flag.append((flag, _for_flag(field, group)))
    return rules_by_flag


def _for_flag(field: str, group: str) -> tuple[Rule, ...]:
    """Return a group's rules, with remedies that name the flag of `field`."""
    rules = RULES[group]
    if group == field or group not in FLAG_OF:
        return rules
    # Two fields share a group that is named for one of them, so its remedies name that one's flag.
    reworded_rules = []
    for rule in rules:
        remedy = rule.remedy.replace(FLAG_OF[group], FLAG_OF[field])
        reworded_rules.append(rule._replace(remedy=remedy))
    return tuple(reworded_rules)


def flag_of(args: Namespace, config: PipelineConfig, field: str) -> str:
    """Return a flag as the user wrote it, with its value if it accepts several, for `reworded`."""
    if field == "schedule":
        return chooser(args, config)
    value = getattr(config, field)
    if field == "transport":
        value = config.wire
    # A switch has no value, and the value of an object takes several flags.
    has_value = isinstance(value, (int, str)) and not isinstance(value, bool)
    return with_flags(field, str(value) if has_value else "")


def dropped(pipeline: Pipeline) -> tuple[Rule, ...]:
    """Return the rules for settings that a pipeline's tables replace or ignore."""
    table = pipeline.full
    placement = table.placement
    rules = RULES["dropped"]
    if table.splits_backward:
        rules += RULES["dropped_by_split"] + RULES["whole"]
    for feature in feature_rules():
        for group in feature.dropped(pipeline.config):
            rules += RULES[group]
    if placement.num_stages == placement.num_ranks:
        rules += RULES["dropped_by_line"]
    return rules


def imply(answer: Preflight, config: PipelineConfig, args: Namespace) -> None:
    """Add the arguments that a configuration sets for Megatron, along with changes and notices."""
    for feature in feature_rules():
        feature.imply(answer, config, args)
    if config.variable_seq_lengths:
        _imply_lengths(answer, args)
    if getattr(args, "use_distributed_optimizer", None):
        _imply_optimizer_format(answer, config, args)
    group_size = getattr(args, "microbatch_group_size_per_vp_stage", None)
    if config.schedule is not None and group_size:
        answer.notices.append(
            "--microbatch-group-size-per-virtual-pipeline-stage has no effect: the order of "
            "micro-batches is part of the schedule"
        )
    answer.notices += _unlogged(config, args)


def _imply_lengths(answer: Preflight, args: Namespace) -> None:
    """Make Megatron accept micro-batches of different lengths."""
    answer.arguments["variable_seq_lengths"] = True
    if not getattr(args, "num_experts", None):
        # Megatron rejects variable lengths with its default dispatcher, allgather, even if the
        # model has no experts.
        answer.arguments |= {"moe_token_dispatcher_type": "alltoall"}


def _imply_optimizer_format(
    answer: Preflight, config: PipelineConfig, args: Namespace
) -> None:
    """Save the distributed optimizer's state in a format that other schedules can load."""
    has_schedule = config.schedule is not None
    if getattr(args, "ckpt_format", None) == "torch":
        # The device or the user may have turned off Gloo groups. Megatron would then
        # fail an assertion when saving.
        needed = []
        for dest in ("enable_gloo_process_groups", "use_gloo_process_groups"):
            if getattr(args, dest, None) is False:
                needed.append(dest)
        if needed:
            answer.arguments |= dict.fromkeys(needed, True)
            answer.changes.append(
                "Gloo process groups are created: Megatron collects the state of "
                "--use-distributed-optimizer over them for --ckpt-format torch"
            )
        # The converted checkpoint is in torch_dist's format, which other schedules may load.
        if has_schedule and getattr(args, "ckpt_convert_format", None) == "torch_dist":
            answer.arguments["dist_ckpt_optim_fully_reshardable"] = True
        return
    # Local checkpoints do not support this format: Megatron would fail when saving the first one.
    if not has_schedule or getattr(args, "non_persistent_ckpt_type", None) == "local":
        return
    answer.arguments["dist_ckpt_optim_fully_reshardable"] = True
    has_checkpoints = getattr(args, "save", None) or getattr(args, "load", None)
    if has_checkpoints and not getattr(args, "dist_ckpt_optim_fully_reshardable", None):
        answer.changes.append(
            "--dist-ckpt-optim-fully-reshardable is set: without it, optimizer state cannot be "
            "loaded under another schedule"
        )


def _unlogged(config: PipelineConfig, args: Namespace) -> Iterator[str]:
    """Yield notices about figures missing from logs and profiles under a configuration."""
    has_roles = config.disaggregation is not None
    if has_roles and profiles_with_torch(args):
        yield "--use-pytorch-profiler profiles backward ranks only"
    if has_roles and getattr(args, "log_progress", None):
        yield "--log-progress counts the devices of backward ranks only"
    times_messages = getattr(args, "timing_log_level", None) in (2, "2")
    if times_messages and (has_roles or not config.runs_no_table):
        yield (
            "--timing-log-level 2: no times are logged for forward-recv, forward-send and other "
            "messages, because this package's schedules do not wait for each message; --trace "
            "records them"
        )


def drop(answer: Preflight, args: Namespace, rules: Iterable[Rule]) -> dict[str, Any]:
    """Switch off the settings that match the rules and return the changed arguments."""
    off: dict[str, Any] = {}
    for rule in rules:
        if rule.refuses(args):
            off |= rule.without(args)
            change = f"{rule.flag} is dropped: {rule.reason}"
            answer.changes.append(reworded(change, in_flags))
    answer.arguments |= off
    return off


def suit_layers(
    answer: Preflight,
    pipeline: Pipeline,
    args: Namespace,
    *,
    in_job: bool,
) -> None:
    """Adapt the pipeline to what Transformer Engine's layers can run, or reject it.

    Raises:
        ArgumentsError: The schedule splits backward passes, but the layers do not support this.
    """
    # After `configure`, the layers are checked when the program creates its TransformerConfig
    # (`why_not_split`).
    if not pipeline.full.splits_backward or "transformer_impl" not in args:
        return
    subject = f"--pipeline-schedule {pipeline.name}"
    reason = why_te_cannot_split(args, in_job=in_job)
    if reason is None:
        for notice in te_leaves_whole(args, in_job=in_job):
            answer.notices.append(f"{subject}: {notice}")
        if getattr(args, "tp_comm_overlap", False) and args.transformer_impl != "local":
            answer.notices.append(
                f"{subject}: --tp-comm-overlap cannot hide the reduce-scatter behind weight "
                "gradients, which run later, and the gathered operands of weight gradients are "
                "copied"
            )
        return
    # A dynamic order can leave backward passes whole if its table does not split them itself.
    unsplit = replace(pipeline, splits=False)
    if pipeline.dynamic is not None and not unsplit.full.splits_backward:
        answer.pipeline = unsplit
        answer.notices.append(f"--use-dpp does not split backward passes: {reason}")
        return
    alternative = "1f1b or interleaved"
    if pipeline.name == "bitpipe":
        alternative = "--bitpipe-order=paper"
    raise ArgumentsError(
        f"--pipeline-schedule={pipeline.name} splits backward passes, but {reason}; or use "
        f"{alternative}, which does not split them"
    )


SET_FOR_TE = ("delay_wgrad_compute", "tp_comm_bulk_wgrad")
"""Fields of a `TransformerConfig` that a schedule sets for Transformer Engine's layers
(`patches/split_backward.py`)."""


def refuse_built(
    built: Any,
    config: PipelineConfig,
    pipeline: Pipeline,
    ignored: Collection[str] = (),
) -> None:
    """Reject settings in a configuration object that a model is built from.

    Programs that call `configure` pass their settings to Megatron only through such objects.

    Args:
        built: Megatron's `TransformerConfig` or `DistributedDataParallelConfig`.
        config: The active configuration.
        pipeline: The active pipeline, or Megatron's own schedule if our transport carries its
            messages.
        ignored: Fields that are not checked.

    Raises:
        ArgumentsError: The message has one line per mistake.
    """
    fields = {name: value for name, value in vars(built).items() if name not in ignored}
    args = Namespace(**fields)
    # Rules use argument names, some of which differ from the field names.
    for dest, name in MEGATRON_FIELDS.items():
        if name in fields:
            setattr(args, dest, fields[name])
    # The pattern is an argument of the model. The configuration object only says whether the model
    # is hybrid.
    args.hybrid_layer_pattern = fields.get("is_hybrid_model")
    # A spec, not `transformer_impl`, chooses the layers. Features that depend on it check the
    # layers in the first step.
    args.transformer_impl = None
    groups = rules_of(config, pipeline.full, args)
    if config.runs_no_table:
        # Megatron sets a default group size here. Other values are rejected when flags are parsed.
        args.microbatch_group_size_per_vp_stage = None
    else:
        for feature in feature_rules():
            feature.refuse_built(pipeline, fields)
        # With flags, these settings would be dropped, but a program has already built
        # its model with them.
        rules_of_table = dropped(pipeline)
        if pipeline.is_folded:
            rules_of_table += RULES["placed"]
        groups.append((flag_of(args, config, "schedule"), rules_of_table))
    lines: list[str] = []
    for subject, rules in groups:
        for refusal in refusals(subject, args, rules):
            lines.append(refusal.worded(in_objects))
    answer = Preflight()
    for feature in feature_rules():
        feature.refuse(answer, config, pipeline.full, args)
    for refusal in answer.refusals:
        lines.append(refusal.worded(in_objects))
    if lines:
        raise ArgumentsError("\n".join(lines))


def why_not_split(config: Any) -> str | None:
    """Return why this `TransformerConfig` cannot split backward passes, and the remedy, or None.

    These checks apply in addition to `RULES`.
    """
    if config.enable_autocast:
        return "torch's autocast cannot split backward passes; use --bf16 or --fp16 instead"
    return why_te_cannot_split(config)


def uses_te(config: Any, *, in_job: bool = True) -> bool:
    """Return whether Megatron builds Transformer Engine's layers.

    In a job, Transformer Engine must also be installed. `config` is a `TransformerConfig`, or
    arguments with the same names.
    """
    chosen = config.transformer_impl == "transformer_engine"
    return chosen and (not in_job or find_spec("transformer_engine") is not None)


def why_te_cannot_split(config: Any, *, in_job: bool = True) -> str | None:
    """Return why the configured Transformer Engine layers cannot split backward passes, or None."""
    # Outside the job, the version that the job will use is unknown.
    if not in_job or not uses_te(config):
        return None
    from megatron.core.utils import get_te_version, is_te_min_version

    if is_te_min_version("2.3.0"):
        return None
    return (
        f"Transformer Engine {get_te_version()} cannot postpone weight gradients; use 2.3 "
        "or later, or --transformer-impl local"
    )


def te_leaves_whole(config: Any, *, in_job: bool = True) -> Iterator[str]:
    """Yield a sentence for each kind of Transformer Engine layer that computes W within I."""
    if not uses_te(config, in_job=in_job):
        return
    settings = vars(config)
    biased_layers = _layers_that_add_bias(config)
    if biased_layers:
        yield (
            f"weight gradients of {' and of '.join(biased_layers)} are "
            "computed in I, because Transformer Engine computes them together with the gradients "
            "of the biases; --disable-bias-linear without --add-qkv-bias moves them to W"
        )
    has_single_weight = settings.get("moe_single_grouped_weight")
    if has_single_weight and not config.gradient_accumulation_fusion:
        yield (
            "weight gradients of grouped experts are computed in I, because Transformer Engine "
            "returns them before W could compute them; remove --moe-single-grouped-weight or "
            "--no-gradient-accumulation-fusion"
        )
    if settings.get("use_grouped_gemm_for_shared_expert"):
        yield (
            "weight gradients of shared experts are computed in I, because Megatron fuses their "
            "layers; remove --use-grouped-gemm-for-shared-expert"
        )
    if settings.get("use_transformer_engine_op_fuser"):
        yield (
            "weight gradients of MLPs are computed in I, because fused operations of Transformer "
            "Engine replace their layers; remove --use-transformer-engine-op-fuser"
        )
    is_mxfp8 = settings.get("fp8") and settings.get("fp8_recipe") == "mxfp8"
    if is_mxfp8 and settings.get("fp8_output_proj"):
        yield (
            "weight gradients of the output layer are computed in I, because Megatron builds it to "
            "do so; remove --fp8-output-proj"
        )


def _layers_that_add_bias(config: Any) -> list[str]:
    """Return the layers to which Transformer Engine adds a bias. Megatron adds all other biases."""
    settings = vars(config)
    has_bias = config.add_bias_linear
    if not has_bias and not settings.get("add_qkv_bias"):
        return []
    layers = []
    # Megatron builds the projections of multi-latent attention without biases.
    if not settings.get("multi_latent_attention"):
        layers.append("the projections to queries, keys and values")
    if has_bias and settings.get("moe_grouped_gemm"):
        layers.append("the first layer of grouped experts")
    if has_bias and settings.get("moe_latent_size"):
        layers.append("the projections of latent experts")
    return layers
