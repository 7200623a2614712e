"""Training flags that exclude our schedules, each with the reason and a remedy.

Some features of Megatron reorder computation, or assume where the first and the last stage are. A
table does both, so they exclude each other.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.disaggregation.role_settings import profiles_with_torch
from megatron_ext.errors import ArgumentsError, ScheduleError

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.schedules.table.actions import Schedule


MEGATRON_FIELDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "enable_gloo_process_groups": "use_gloo_process_groups",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
"""Field of Megatron's and Megatron-Bridge's configuration objects, by argument, where they differ.
Rules know the arguments."""


class Rule(NamedTuple):
    """A setting of Megatron's to refuse."""

    reads: tuple[str, ...]
    """The arguments that decide; the first one names the rule."""
    flag: str
    reason: str
    remedy: str
    """Flags to leave out, use or add in place of those; `{subject}` is the feature's own flag."""
    when: Callable[..., Any] = lambda *values: any(values)
    """Whether their values, None for missing ones, are refused; by default if any is set."""

    def refuses(self, args: Namespace) -> bool:
        """Return whether the settings are refused."""
        return bool(self.when(*(getattr(args, dest, None) for dest in self.reads)))


class Refusal(NamedTuple):
    """A reason why a configuration cannot run, and the nearest thing that works."""

    rule: str
    """The setting or the check that refuses."""
    reason: str
    remedy: str
    error: type[ArgumentsError | ScheduleError] = ArgumentsError
    """The error that it is where training starts."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

    @classmethod
    def of(cls, rule: str, message: str, error: type[ArgumentsError | ScheduleError]) -> Refusal:
        """Return a message as a refusal; it ends with the remedy, after a semicolon."""
        reason, _, remedy = message.rpartition("; ")
        return cls(rule, reason, remedy, error) if reason else cls(rule, remedy, "", error)


def _several(value: Any) -> list[Any]:
    """Return a setting as a list, whether it holds one value or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _replicas(args: Namespace) -> int:
    """Return the data-parallel size, which Megatron has not computed yet."""
    sizes = (
        getattr(args, f"{kind}_parallel_size", None) or 1
        for kind in ("tensor_model", "pipeline_model", "context")
    )
    return int((getattr(args, "world_size", None) or 1) // math.prod(sizes))


def _global_aux_loss(types: Any) -> bool:
    return "global_aux_loss" in _several(types)


def _graphs(reason: str, remedy: str) -> Rule:
    return Rule(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph)",
        reason,
        remedy,
        # The switches are deprecated; Megatron turns them into the setting, but only after us.
        lambda implementation, *older: implementation not in (None, "none") or any(older),
    )


def _offloads(reason: str) -> Rule:
    return Rule(
        ("fine_grained_activation_offloading",),
        "--fine-grained-activation-offloading",
        reason,
        "use --recompute-granularity selective instead",
    )


def _hybrid(
    reason: str, remedy: str, when: Callable[..., Any] = lambda *hybrid: any(hybrid)
) -> Rule:
    return Rule(
        ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
        "hybrid models (--hybrid-override-pattern, --hybrid-layer-pattern)",
        reason,
        remedy,
        when,
    )


_ENCODER_DECODER = Rule(
    ("decoder_num_layers", "decoder_seq_length"),
    "encoder-decoder models (--decoder-num-layers, --decoder-seq-length)",
    "Megatron has no pipeline for them either",
    "leave {subject} and --pipeline-model-parallel-size out",
)
_SHIPS = "fbd_activations"
_MERGES = "ignore_forward_tensor_parallel"
_DROPOUT = ("hidden_dropout", "attention_dropout")

RULES: dict[str, tuple[Rule, ...]] = {
    # For every schedule.
    "schedule": (
        _graphs("they are recorded in the order of Megatron's own schedules", "leave them out"),
        Rule(
            ("cpu_offloading", "cpu_offloading_num_layers"),
            "--cpu-offloading-num-layers",
            "Megatron takes it without a pipeline only",
            "use --recompute-granularity selective instead",
        ),
        Rule(
            ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
            "--use-megatron-fsdp or --use-torch-fsdp2",
            "they gather and free weights by the order of Megatron's own schedules",
            "use --use-distributed-optimizer instead",
        ),
        _ENCODER_DECODER,
        Rule(
            ("use_legacy_models",),
            "--use-legacy-models",
            "legacy models do not know their stage",
            "leave it out",
        ),
        Rule(
            ("ckpt_format",),
            "--ckpt-format torch_dcp or fsdp_dtensor",
            "Megatron takes them with FSDP only",
            "use --ckpt-format torch_dist",
            lambda kind: kind in ("torch_dcp", "fsdp_dtensor"),
        ),
        Rule(
            ("moe_paged_stash", "moe_expert_rank_capacity_factor"),
            "--moe-paged-stash or --moe-expert-rank-capacity-factor",
            "activations are stashed in the order of Megatron's own schedules, and steps that "
            "overflow are repeated",
            "leave them out, or use Megatron's own schedule",
        ),
        Rule(
            (
                "tensor_parallel_num_weight_shards",
                "expert_tensor_parallel_num_weight_shards",
                "tensor_model_parallel_size",
                "expert_tensor_parallel_size",
            ),
            "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards "
            "above the tensor-parallel size",
            "weights are gathered in the order of Megatron's own schedules",
            "leave them out, or use Megatron's own schedule",
            # Weight rematerialisation, 0.19 and later: more shards than tensor-parallel ranks.
            lambda shards, expert_shards, tp, experts_tp: (
                (shards or 0) > (tp or 1) or (expert_shards or 0) > (experts_tp or tp or 1)
            ),
        ),
    ),
    # What a schedule of ours does itself, or does without: dropped where flags are read, refused
    # where a program has already built its configuration.
    "dropped": (
        Rule(
            ("delay_wgrad_compute",),
            "--delay-wgrad-compute",
            "weight gradients run where the table says",
            "leave it out",
        ),
        Rule(
            ("defer_embedding_wgrad_compute",),
            "--defer-embedding-wgrad-compute",
            "weight gradients run where the table says, that of the output layer too",
            "leave it out",
        ),
    ),
    # The same of schedules that split backwards.
    "dropped_by_split": (
        Rule(
            ("overlap_dispatch_backward_with_experts_wgrad",),
            "--overlap-dispatch-backward-with-experts-wgrad",
            "the table postpones the weight gradients of experts already",
            "leave it out",
        ),
    ),
    # The same of schedules with one stage on each rank.
    "dropped_by_line": (
        Rule(
            ("overlap_param_gather_with_optimizer_step",),
            "--overlap-param-gather-with-optimizer-step",
            "it gathers the first of several chunks while the others take their step, and each "
            "rank has one chunk",
            "leave it out",
        ),
    ),
    # The same of forward and backward ranks.
    "dropped_by_roles": (
        Rule(
            ("overlap_moe_expert_parallel_comm",),
            "--overlap-moe-expert-parallel-comm",
            "forwards and backwards are on different ranks",
            "leave it out",
        ),
        Rule(
            (
                "fp8_param_gather",
                "fp4_param_gather",
                "fp4_param",  # 0.16's name of the same
                "reuse_grad_buf_for_mxfp8_param_ag",
            ),
            "--fp8-param-gather or --fp4-param-gather",
            "new weights travel to forward ranks, which cast them, in the precision of the model",
            "leave it out",
        ),
    ),
    # For schedules that split backwards.
    "split": (
        Rule(
            ("num_distributed_optimizer_instances", "overlap_grad_reduce"),
            "--num-distributed-optimizer-instances > 1 together with --overlap-grad-reduce",
            "gradients of weights and of the rest are complete at different times",
            "leave one of them out, or use --pipeline-schedule 1f1b or interleaved",
            lambda instances, overlaps: (instances or 1) > 1 and overlaps,
        ),
        Rule(
            ("use_transformer_engine_op_fuser", "num_experts"),
            "--use-transformer-engine-op-fuser with experts",
            "Megatron keeps the fused experts outside the module tree, so W would not reach their "
            "weight gradients",
            "leave it out, or use --pipeline-schedule 1f1b or interleaved",
            lambda fuses, experts: fuses and experts,
        ),
    ),
    # For schedules that put the first and the last stage on one rank.
    "folded": (
        _hybrid(
            "only --hybrid-layer-pattern, from 0.17 on, says which layers a stage has",
            "use --pipeline-schedule 1f1b or zb-h1",
            # The first two are 0.16's; from 0.17 on the pattern itself has the cuts.
            lambda *hybrid: any(hybrid[:2]) and not hybrid[2],
        ),
        Rule(
            ("non_persistent_ckpt_type",),
            "--non-persistent-ckpt-type local",
            "those files identify layers by rank and chunk",
            "use --non-persistent-ckpt-type global",
            lambda kind: kind == "local",
        ),
    ),
    # For models that a program builds for such a schedule.
    "placed": (
        Rule(
            (
                "decoder_first_pipeline_num_layers",
                "decoder_last_pipeline_num_layers",
                "account_for_embedding_in_pipeline_split",
                "account_for_loss_in_pipeline_split",
            ),
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, "
            "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split",
            "the layout that configure returns cuts the model",
            "leave them out",
        ),
    ),
    # For schedules of two mirrored pipelines.
    "twins": (
        Rule(
            ("use_mp_args_from_checkpoint_args",),
            "--use-mp-args-from-checkpoint-args",
            "a checkpoint holds the sizes of one of the two mirrored pipelines",
            "leave it out",
        ),
    ),
    # For forwards and backwards that run as pairs, through Megatron's schedule plans.
    "pairs": (
        Rule(
            ("recompute_granularity", "fp8", "fp4", "distribute_saved_activations"),
            "--recompute-granularity full with --fp8-format, --fp4-format or "
            "--distribute-saved-activations",
            "those recompute layers in another way than a plan",
            "use --recompute-granularity selective without --recompute-method and "
            "--recompute-num-layers",
            lambda granularity, *ways: granularity == "full" and any(ways),
        ),
        Rule(
            ("recompute_modules",),
            "--recompute-modules moe",
            "a plan cuts a layer behind the router, and would keep there, copied for each expert, "
            "what this drops",
            "use --recompute-modules core_attn, layernorm, mla_up_proj, mlp or moe_act",
            lambda modules: "moe" in _several(modules),
        ),
        Rule(
            ("moe_shared_expert_overlap",),
            "--moe-shared-expert-overlap",
            "the shared expert hides the communication that a partner would hide",
            "leave one of them out",
        ),
        Rule(
            ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_detach_heads", "mtp_hsm"),
            "--mtp-use-repeated-layer, --mtp-detach-heads or --mtp-hsm",
            "plans of multi-token prediction know none of them and would train another model",
            "leave them out",
            lambda layers, *ways: layers and any(ways),
        ),
        _hybrid("they have no plans in every release", "leave {subject} out"),
        Rule(
            ("variable_seq_lengths",),
            "--variable-seq-lengths",
            "Megatron's forward step gives plans no lengths",
            "leave one of them out",
        ),
        _offloads("activations return from the host by the backwards that run alone"),
    ),
    # For random numbers by micro-batch.
    "microbatch_rng": (
        _graphs("they replay the recorded random numbers", "leave one of them out"),
    ),
    # The same under Megatron's own schedules.
    "stock_microbatch_rng": (
        Rule(
            ("overlap_moe_expert_parallel_comm",),
            "--overlap-moe-expert-parallel-comm",
            "it interleaves two micro-batches, and each has its own random numbers",
            "add --pipeline-schedule interleaved, or leave one of them out",
        ),
    ),
    # For ranks that choose their order.
    "chosen": (_offloads("activations return from the host in the order of a table"),),
    # For data-parallel replicas that choose their order independently.
    "dynamic": (
        Rule(
            ("moe_router_load_balancing_type",),
            "--moe-router-load-balancing-type global_aux_loss",
            "it reduces over data-parallel replicas inside each layer, and they run their layers "
            "in different orders",
            "use --moe-router-load-balancing-type aux_loss or seq_aux_loss",
            _global_aux_loss,
        ),
        Rule(
            ("fp8_recipe", "fp8", "tp_only_amax_red"),
            "--fp8-recipe delayed",
            "scales are reduced over data-parallel replicas inside each layer, and they run their "
            "layers in different orders",
            "use --fp8-recipe tensorwise",
            # With --tp-only-amax-red the reduction stays among tensor-parallel ranks, which share
            # one order.
            lambda recipe, fp8, tp_only: recipe == "delayed" and fp8 and not tp_only,
        ),
    ),
    # For ranks that choose their order and get activations from their twin.
    "crossed": (
        Rule(
            ("overlap_param_gather",),
            "--overlap-param-gather with --bitpipe-routing twin",
            "twins gather parameters for each other, and start their chunks in different orders",
            "use --bitpipe-routing local, or leave it out",
        ),
    ),
    # For micro-batches that data-parallel replicas share out.
    "pack": (
        Rule(
            ("moe_router_load_balancing_type",),
            "--moe-router-load-balancing-type global_aux_loss",
            "it depends on which micro-batches the replicas run at the same time",
            "use --moe-router-load-balancing-type aux_loss or seq_aux_loss, or --pipeline-balance "
            "order",
            _global_aux_loss,
        ),
    ),
    # For micro-batches of different lengths.
    "lengths": (
        Rule(
            ("moe_token_dispatcher_type", "num_experts"),
            "--moe-token-dispatcher-type allgather",
            "it gathers tokens in buffers of one size",
            "use --moe-token-dispatcher-type alltoall",
            lambda dispatcher, experts: dispatcher == "allgather" and experts,
        ),
        _graphs("they replay tensors of one shape", "leave one of them out"),
    ),
    # For micro-batches in slices of their sequence.
    "slices": (
        Rule(
            ("transformer_impl",),
            "--transformer-impl other than local and transformer_engine",
            "only their attention keeps keys and values between slices",
            "use --transformer-impl local or transformer_engine",
            lambda name: name not in (None, "local", "transformer_engine"),
        ),
        Rule(
            ("context_parallel_size",),
            "--context-parallel-size above 1",
            "it divides the sequence too",
            "leave it out, or leave --pipeline-slices out",
            lambda ranks: (ranks or 1) > 1,
        ),
        Rule(
            ("moe_router_load_balancing_type",),
            "--moe-router-load-balancing-type other than none, aux_loss and seq_aux_loss",
            "it balances the tokens of a slice, not of a micro-batch",
            "use --moe-router-load-balancing-type aux_loss or seq_aux_loss",
            lambda types: (
                not {None, "none", "aux_loss", "seq_aux_loss"}.issuperset(_several(types))
            ),
        ),
        Rule(
            ("moe_expert_capacity_factor",),
            "--moe-expert-capacity-factor",
            "an expert drops the tokens of a slice that are too many for it, not of a micro-batch",
            "leave it out",
            lambda factor: factor is not None,
        ),
        Rule(
            ("mtp_num_layers", "mtp_use_repeated_layer"),
            "--mtp-use-repeated-layer",
            "a layer that runs twice would keep keys and values of two kinds",
            "leave it out",
            lambda layers, repeats: layers and repeats,
        ),
        _hybrid("only attention keeps its state between slices", "leave --pipeline-slices out"),
        Rule(
            ("experimental_attention_variant", "linear_attention_type"),
            "--experimental-attention-variant",
            "only DotProductAttention keeps keys and values between slices",
            "leave --pipeline-slices out",
        ),
        Rule(
            ("window_size",),
            "--window-size",
            "Megatron's mask of a window begins with the slice",
            "leave --pipeline-slices out",
        ),
        Rule(
            ("sft", "dataloader_inter_document_masking", "micro_batch_size"),
            "packed sequences (--sft, --dataloader-inter-document-masking) with "
            "--micro-batch-size above 1",
            "Megatron packs the slices of several samples into one",
            "use --micro-batch-size 1",
            lambda sft, masks, size: (sft or masks) and (size or 1) > 1,
        ),
        Rule(
            ("reset_attention_mask", "tensor_model_parallel_size"),
            "--reset-attention-mask with --tensor-model-parallel-size above 1",
            "tensor-parallel ranks receive the mask in a buffer of the whole one's form",
            "leave one of them out",
            lambda resets, ranks: resets and (ranks or 1) > 1,
        ),
        Rule(
            ("masked_softmax_fusion", "transformer_impl", "fp16", "bf16"),
            "fused softmax in 16 bits",
            "its kernel takes as many queries as keys",
            "add --no-masked-softmax-fusion",
            # Transformer Engine has a softmax of its own, and Megatron's kernel exists in 16 bits
            # only.
            lambda fuses, layers, *half: fuses and layers != "transformer_engine" and any(half),
        ),
        Rule(
            ("fp8", "fp4"),
            "--fp8-format or --fp4-format",
            "scales follow from whole micro-batches",
            "use --bf16 instead",
        ),
        Rule(
            ("multi_latent_attention", "apply_rope_fusion"),
            "fused rotary positions with --multi-latent-attention",
            "its tables of rotary positions begin with the slice",
            "add --no-rope-fusion",
            lambda latent, fuses: latent and fuses,
        ),
        _offloads("keys and values stay on the device from slice to slice"),
    ),
    # For forward and backward ranks.
    "roles": (
        _offloads("activations return from the host by the backwards of the same rank"),
        Rule(
            ("moe_input_jitter_eps",),
            "--moe-input-jitter-eps",
            "both roles would draw their own noise",
            "leave it out",
        ),
        Rule(
            # Its steps are forward only from 0.20 on, which both roles take for an evaluation.
            ("freeze_all_layers",),
            "--freeze-all-layers",
            "backward ranks have nothing to do",
            "leave one of them out",
        ),
        Rule(
            ("moe_use_upcycling", "ckpt_convert_format"),
            "--moe-use-upcycling or --ckpt-convert-format",
            "forward ranks neither load nor save checkpoints, so another run has to convert them",
            "leave one of them out",
        ),
        Rule(
            (_MERGES, "num_experts"),
            "--ignore-forward-tensor-parallel and --num-experts",
            "shards of experts are not merged",
            "leave --ignore-forward-tensor-parallel out",
            lambda merges, experts: merges and experts,
        ),
        Rule(
            (_SHIPS, "mtp_num_layers"),
            "--fbd-activations ship and --mtp-num-layers",
            "forward ranks ship the inputs of a stage's layers, not those of multi-token "
            "prediction",
            "use --fbd-activations recompute",
            lambda kind, layers: kind == "ship" and layers,
        ),
        Rule(
            (_SHIPS, "is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
            "--fbd-activations ship and hybrid models (--hybrid-override-pattern, "
            "--hybrid-layer-pattern)",
            "forward ranks ship the inputs of a block of transformer layers",
            "use --fbd-activations recompute",
            lambda kind, *hybrid: kind == "ship" and any(hybrid),
        ),
        Rule(
            ("use_tp_pp_dp_mapping",),
            "--use-tp-pp-dp-mapping",
            "the two roles of a stage are neighbours in the default order of ranks",
            "leave it out",
        ),
        Rule(
            ("use_mp_args_from_checkpoint_args",),
            "--use-mp-args-from-checkpoint-args",
            "the parallel sizes on the command line determine the roles",
            "leave it out",
        ),
        Rule(
            ("rerun_mode",),
            "--rerun-mode report_stats",
            "it reruns each step, and forward ranks do not",
            "leave it out",
            lambda mode: mode == "report_stats",
        ),
        Rule(
            ("error_injection_rate",),
            "--error-injection-rate",
            "injected errors are found by rerunning steps, and forward ranks do not rerun them",
            "leave it out",
        ),
        Rule(
            ("full_validation", "multiple_validation_sets"),
            "--full-validation or --multiple-validation-sets",
            "backward ranks do not read that data",
            "leave them out",
        ),
        Rule(
            (_SHIPS, "recompute_granularity", "recompute_method", "recompute_num_layers"),
            "--fbd-activations ship alone",
            "backward ranks recompute each layer from its shipped input",
            "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, "
            "or use --fbd-activations recompute",
            lambda kind, *recomputed: kind == "ship" and recomputed != ("full", "uniform", 1),
        ),
        Rule(
            (_SHIPS, "fp8", "fp4", "distribute_saved_activations"),
            "--fbd-activations ship and --fp8-format, --fp4-format or "
            "--distribute-saved-activations",
            "those recompute layers in another way",
            "use --fbd-activations recompute",
            lambda kind, *ways: kind == "ship" and any(ways),
        ),
        Rule(
            (_MERGES, *_DROPOUT),
            "--ignore-forward-tensor-parallel and dropout",
            "one process draws other masks than the shards of a stage",
            "add --hidden-dropout 0 --attention-dropout 0, or leave it out",
            lambda merges, *dropout: merges and any(dropout),
        ),
    ),
    # For a transport of ours under Megatron's own schedules.
    "transport": (
        Rule(
            ("use_ring_exchange_p2p",),
            "--use-ring-exchange-p2p",
            "it replaces the transport too",
            "leave one of them out",
        ),
        _ENCODER_DECODER,
        Rule(
            ("microbatch_group_size_per_vp_stage",),
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "Megatron's usual order identifies the messages",
            "leave it out",
        ),
        Rule(
            ("cuda_graph_scope", "cuda_graph_impl"),
            "CUDA graphs of a whole step (--cuda-graph-impl or --cuda-graph-scope full_iteration)",
            "a graph cannot record transfers by the host",
            "leave them out, or use --pipeline-transport torch",
            # A scope may be an enumeration's member, and from 0.18 on it is the implementation.
            lambda scopes, implementation: any(
                str(name).rpartition(".")[2] == "full_iteration"
                for name in (*_several(scopes), implementation)
            ),
        ),
    ),
}


DROPPED_BY_ROLES = RULES["dropped_by_roles"] + RULES["dropped"] + RULES["dropped_by_line"]
"""What forward and backward ranks do themselves, or do without."""


def refusals(subject: str, args: Namespace, rules: Iterable[Rule]) -> list[Refusal]:
    """Return the settings that exclude a feature.

    Args:
        subject: The feature, as the user chose it.
        args: Settings by Megatron's argument names; missing ones are off.
        rules: One group of `RULES`, or several together.
    """
    return [
        Refusal(
            rule.reads[0],
            f"{subject} cannot run with {rule.flag}: {rule.reason}",
            rule.remedy.replace("{subject}", subject),
        )
        for rule in rules
        if rule.refuses(args)
    ]


def rules_of(
    config: PipelineConfig, table: Schedule | None, args: Namespace
) -> list[tuple[str, tuple[Rule, ...]]]:
    """Return the rules of a configuration and of its table, each group by the field that brings it.

    Args:
        config: The pipeline.
        table: That of the schedule; without a schedule that of Megatron's own, where our transport
            carries its messages. None: there is none, so its rules stay out.
        args: Settings by Megatron's argument names.
    """
    is_stock = config.schedule is None and config.dynamic is None
    stock = RULES["stock_microbatch_rng"] if is_stock else ()
    found = [
        ("microbatch_rng", RULES["microbatch_rng"] + stock if config.draws_by_microbatch else ()),
        ("balance", RULES["pack"] if config.balance == "pack" else ()),
        ("slices", RULES["slices"] if config.slices > 1 else ()),
        ("variable_seq_lengths", RULES["lengths"] if config.variable_seq_lengths else ()),
    ]
    if config.disaggregation is not None:
        found.append(("disaggregation", RULES["roles"] + RULES["schedule"]))
    elif not is_stock:
        found.append(("schedule", RULES["schedule"]))
        found.append(("pairs", RULES["pairs"] if config.pairs else ()))
    if table is None:
        return found
    if is_stock:
        return [*found, ("transport", RULES["transport"])]
    placement = table.placement
    # Not the name of the schedule decides, but the table: a file may have any of these.
    found += [
        ("schedule", RULES["split"] if table.splits_backward else ()),
        ("schedule", RULES["folded"] if placement.name in ("v", "w") else ()),
        ("schedule", RULES["twins"] if placement.twins == 2 else ()),
    ]
    if config.dynamic is not None:
        # Tensor-, context- and expert-parallel ranks follow one leader; replicas do not.
        has_replicas = _replicas(args) * placement.twins > 1
        found.append(("dynamic", RULES["chosen"]))
        found.append(("dynamic", RULES["dynamic"] if has_replicas else ()))
        found.append(("dynamic", RULES["crossed"] if placement.twin_hops else ()))
    return found


def dropped(table: Schedule) -> tuple[Rule, ...]:
    """Return the rules of settings that a table does itself, or does without."""
    placement = table.placement
    rules = RULES["dropped"] + (RULES["dropped_by_split"] if table.splits_backward else ())
    one_chunk = placement.num_stages == placement.num_ranks
    return rules + RULES["dropped_by_line"] if one_chunk else rules


def implied(config: PipelineConfig, args: Namespace) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the arguments that a configuration sets for Megatron, changes and notices."""
    arguments: dict[str, Any] = {}
    changes, notices = [], []
    if config.pairs:
        arguments["overlap_moe_expert_parallel_comm"] = True
    elif config.schedule is not None and getattr(args, "overlap_moe_expert_parallel_comm", False):
        arguments["overlap_moe_expert_parallel_comm"] = False
        notices.append(
            "--overlap-moe-expert-parallel-comm has no effect without experts on several ranks "
            "(--num-experts, --expert-model-parallel-size)"
        )
    if config.slices > 1 and not getattr(args, "reset_attention_mask", False):
        # Tensor-parallel ranks receive a mask in a buffer of the whole one's form.
        arguments["create_attention_mask_in_dataloader"] = False
    if config.variable_seq_lengths and not getattr(args, "num_experts", None):
        # Megatron refuses them with allgather, its default, in models without experts too.
        arguments |= {"moe_token_dispatcher_type": "alltoall"}
    if getattr(args, "use_distributed_optimizer", False):
        if getattr(args, "ckpt_format", None) == "torch":
            # Left out by a device, or by the user, for whom Megatron would end in an assertion.
            groups = ("enable_gloo_process_groups", "use_gloo_process_groups")
            if off := [dest for dest in groups if getattr(args, dest, None) is False]:
                arguments |= dict.fromkeys(off, True)
                changes.append(
                    "Gloo process groups are made: over them Megatron collects the state of "
                    "--use-distributed-optimizer for --ckpt-format torch"
                )
        elif config.schedule is not None:
            arguments["dist_ckpt_optim_fully_reshardable"] = True
            if not args.dist_ckpt_optim_fully_reshardable and (args.save or args.load):
                changes.append(
                    "--dist-ckpt-optim-fully-reshardable is set: in any other form, optimizer "
                    "state cannot be loaded under another schedule"
                )
    if config.schedule is not None and getattr(args, "microbatch_group_size_per_vp_stage", None):
        notices.append(
            "--microbatch-group-size-per-virtual-pipeline-stage has no effect: the order of "
            "micro-batches is part of the schedule"
        )
    if config.disaggregation is not None and profiles_with_torch(args):
        notices.append("--use-pytorch-profiler profiles backward ranks only")
    return arguments, changes, notices


def drops(args: Namespace, rules: Iterable[Rule]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that switch settings off, and a line for each."""
    arguments: dict[str, Any] = {}
    lines = []
    for rule in rules:
        if rule.refuses(args):
            arguments |= {dest: False for dest in rule.reads if getattr(args, dest, None)}
            lines.append(f"{rule.flag} is dropped: {rule.reason}")
    return arguments, lines


def with_splittable_layers(
    pipeline: Pipeline, args: Namespace, *, here: bool
) -> tuple[Pipeline, list[str]]:
    """Return the pipeline in a form that the layers of Transformer Engine can run, and notices.

    Args:
        pipeline: The pipeline.
        args: Arguments with upstream's names.
        here: Whether this is a process of the job, with its Transformer Engine.

    Raises:
        ArgumentsError: The table splits backwards, but these layers cannot.
    """
    if not pipeline.full.splits_backward or not hasattr(args, "transformer_impl"):
        return pipeline, []
    reason = why_te_cannot_split(args, here=here)
    if reason is None:
        notices = []
        notice = te_leaves_whole(args, here=here)
        if notice is not None:
            notices.append(f"--pipeline-schedule {pipeline.name}: {notice}")
        if getattr(args, "tp_comm_overlap", False) and args.transformer_impl != "local":
            notices.append(
                f"--pipeline-schedule {pipeline.name}: --tp-comm-overlap hides no reduce-scatter "
                "under weight gradients, which run later, and their gathered operands are copied"
            )
        return pipeline, notices
    if pipeline.dynamic is not None:
        # Its table may be whole without our splitting, as those of 1f1b and interleaved are.
        whole = replace(pipeline, splits=False)
        if not whole.full.splits_backward:
            return whole, [f"--use-dpp leaves backwards whole: {reason}"]
    other = "--bitpipe-order paper" if pipeline.name == "bitpipe" else "1f1b or interleaved"
    raise ArgumentsError(
        f"--pipeline-schedule {pipeline.name} splits backwards, but {reason}; or use {other}, "
        "which does not split them"
    )


def refuse_built(built: Any, config: PipelineConfig, pipeline: Pipeline, world_size: int) -> None:
    """Refuse settings of a configuration object that a model is built from.

    Programs that call `configure` show Megatron their settings in no other place.

    Args:
        built: A `TransformerConfig` or `DistributedDataParallelConfig` of Megatron.
        config: The configuration in force.
        pipeline: Its pipeline, or Megatron's own schedule whose messages we carry.
        world_size: Ranks of the job.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    fields = vars(built)
    renamed = {dest: fields[name] for dest, name in MEGATRON_FIELDS.items() if name in fields}
    args = Namespace(**{**fields, **renamed, "world_size": world_size})
    # The pattern is an argument of the model, not of its configuration.
    args.hybrid_layer_pattern = getattr(args, "is_hybrid_model", None)
    # A spec chooses the layers, not `transformer_impl`; slices check them at the first step.
    args.transformer_impl = None
    is_stock = config.schedule is None and config.dynamic is None
    if is_stock:
        # Megatron fills its own group size in; another one is refused when flags are parsed.
        args.microbatch_group_size_per_vp_stage = None
    # The table has pairs or not, and Megatron builds its layers for them or not: never one alone.
    overlaps = getattr(args, "overlap_moe_expert_parallel_comm", None)
    if not is_stock and overlaps not in (None, config.pairs):
        raise ArgumentsError(
            f"schedule {pipeline.name} has pairs={config.pairs}, but the model "
            f"overlap_moe_expert_parallel_comm={overlaps}; give both the same value"
        )
    groups = rules_of(config, pipeline.full, args)
    if not is_stock:
        placed = RULES["placed"] if pipeline.is_folded else ()
        groups.append(("schedule", dropped(pipeline.full) + placed))
    valued = {
        "balance": f"balance {config.balance}",
        "slices": f"slices {config.slices}",
        "schedule": f"schedule {pipeline.name}",
        "transport": f"transport {config.wire}",
    }
    wrong = [
        str(refusal)
        for name, rules in groups
        # Megatron's other objects know nothing of experts.
        if name != "pairs" or overlaps is not None
        for refusal in refusals(valued.get(name, name), args, rules)
    ]
    if wrong:
        raise ArgumentsError("\n".join(wrong))


def why_not_split(config: Any) -> str | None:
    """Return why this `TransformerConfig` rules out split backwards, with the remedy, or None.

    Refused are upstream features that split, reorder or capture backwards themselves.
    """
    if config.cuda_graph_impl != "none":
        return (
            f"the backward cannot be split with --cuda-graph-impl {config.cuda_graph_impl}, which "
            f"replays it whole; use none"
        )
    if config.defer_embedding_wgrad_compute:
        return (
            "--defer-embedding-wgrad-compute moves the weight gradient of the output layer "
            "itself; leave it out where the backward is split"
        )
    if config.enable_autocast:
        return "the backward cannot be split under torch's autocast; use --bf16 or --fp16 instead"
    return why_te_cannot_split(config)


def uses_te(config: Any, *, here: bool = True) -> bool:
    """Return whether layers of Transformer Engine are built, here or where it is installed."""
    chosen = config.transformer_impl == "transformer_engine"
    return chosen and (not here or find_spec("transformer_engine") is not None)


def why_te_cannot_split(config: Any, *, here: bool = True) -> str | None:
    """Return why Transformer Engine's layers cannot be split as configured, or None.

    Args:
        config: A `TransformerConfig`, or arguments with the same names.
        here: Whether the layers are built in this process, with what is installed.
    """
    # On another machine nobody knows the version that will be installed.
    if not uses_te(config, here=here) or not here:
        return None
    from megatron.core.utils import get_te_version, is_te_min_version

    if is_te_min_version("2.3.0"):
        return None
    return (
        f"Transformer Engine {get_te_version()} cannot postpone weight gradients; use 2.3 "
        "or later, or --transformer-impl local"
    )


def te_leaves_whole(config: Any, *, here: bool = True) -> str | None:
    """Return which weight gradients of Transformer Engine's layers stay in I, and why, or None.

    Args:
        config: See `why_te_cannot_split`.
        here: See `why_te_cannot_split`.
    """
    if not uses_te(config, here=here) or config.multi_latent_attention:
        return None
    if not config.add_bias_linear and not config.add_qkv_bias:
        return None
    return (
        "weight gradients of the projections to queries, keys and values are computed in I, "
        "because Transformer Engine computes them together with those of the biases; "
        "--disable-bias-linear without --add-qkv-bias moves them to W"
    )
