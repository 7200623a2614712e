"""Training flags that exclude our schedules, each with the reason and a remedy.

Some features of Megatron reorder computation, or assume where the first and the last stage are. A
table does both, so they exclude each other.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.errors import ArgumentsError

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement

__all__ = [
    "Rule",
    "refuse_flags",
    "refuse_flags_of_dynamic_order",
    "refuse_flags_of_table",
    "refuse_flags_with_microbatch_rng",
    "refuse_flags_with_pack",
    "refuse_flags_with_transport",
    "refuse_flags_with_varying_lengths",
]


class Rule(NamedTuple):
    """A combination of arguments to refuse."""

    refuses: Callable[[Namespace], bool]
    message: str
    """Flag, reason and remedy; follows `FLAG cannot run with`."""


def _given(*dests: str) -> Callable[[Namespace], bool]:
    """Return a rule's condition: any of these settings is on, or has a value."""
    return lambda args: any(_value(args, dest) for dest in dests)


def _value(args: Namespace, dest: str) -> Any:
    return getattr(args, dest, None)


def _several(args: Namespace, dest: str) -> list[Any]:
    """Return a setting as a list, whether it holds one value or several."""
    value = _value(args, dest)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _replicas(args: Namespace) -> int:
    """Return the data-parallel size, which Megatron has not computed yet."""
    sizes = (
        _value(args, f"{kind}_parallel_size") or 1
        for kind in ("tensor_model", "pipeline_model", "context")
    )
    return int((_value(args, "world_size") or 1) // math.prod(sizes))


def _records_graphs(args: Namespace) -> bool:
    return _value(args, "cuda_graph_impl") not in (None, "none") or _given(
        "enable_cuda_graph", "external_cuda_graph"
    )(args)


def _whole_step_graphs(args: Namespace) -> bool:
    """Return whether one graph holds a whole step, by the flags of any release."""
    scopes = (*_several(args, "cuda_graph_scope"), _value(args, "cuda_graph_impl"))
    return any(str(scope).rpartition(".")[2] == "full_iteration" for scope in scopes)


def _weight_rematerialisation(args: Namespace) -> bool:
    """Return whether weights have more shards than tensor-parallel ranks (0.19 and later)."""
    shards = {
        "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
        "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
    }
    tp = _value(args, "tensor_model_parallel_size") or 1
    return any((_value(args, s) or 0) > (_value(args, size) or tp) for s, size in shards.items())


ALWAYS = (
    Rule(
        _records_graphs,
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph): they are recorded in the order of "
        "Megatron's own schedules; leave them out",
    ),
    Rule(
        _given("overlap_moe_expert_parallel_comm"),
        "--overlap-moe-expert-parallel-comm: it interleaves two micro-batches in its own order; "
        "leave it out, or use Megatron's own schedule",
    ),
    Rule(
        _given("delay_wgrad_compute"),
        "--delay-wgrad-compute: weight gradients run where the table says; leave it out and use "
        "a schedule that splits backwards, such as zb-h1 or zb-v",
    ),
    Rule(
        _given("defer_embedding_wgrad_compute"),
        "--defer-embedding-wgrad-compute: weight gradients run where the table says; leave it "
        "out, or use Megatron's own schedule",
    ),
    Rule(
        _given("fine_grained_activation_offloading", "cpu_offloading", "cpu_offloading_num_layers"),
        "activation offloading (--fine-grained-activation-offloading, --cpu-offloading-num-layers):"
        " it follows the order of Megatron's own schedules; use --recompute-granularity instead, "
        "or v-half, which keeps half of the activations",
    ),
    Rule(
        _given("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"),
        "--use-megatron-fsdp or --use-torch-fsdp2: they gather and free weights by the order of "
        "Megatron's own schedules; use --use-distributed-optimizer to shard optimizer state",
    ),
    Rule(
        _given("decoder_num_layers", "decoder_seq_length"),
        "encoder-decoder models (--decoder-num-layers, --decoder-seq-length): two different "
        "tensors travel between their stages; use Megatron's own schedule",
    ),
    Rule(
        _given("use_legacy_models"),
        "--use-legacy-models: legacy models do not know their stage; leave it out",
    ),
    Rule(
        _given("overlap_param_gather_with_optimizer_step"),
        "--overlap-param-gather-with-optimizer-step: it relies on the order of Megatron's "
        "interleaved schedule; use --overlap-param-gather alone",
    ),
    Rule(
        _given("microbatch_group_size_per_vp_stage"),
        "--microbatch-group-size-per-virtual-pipeline-stage: the order of micro-batches is part of "
        "the schedule; leave it out",
    ),
    Rule(
        _given("moe_paged_stash", "moe_expert_rank_capacity_factor"),
        "--moe-paged-stash or --moe-expert-rank-capacity-factor: activations are stashed in the "
        "order of Megatron's own schedules, and steps that overflow are repeated; leave them out, "
        "or use Megatron's own schedule",
    ),
    Rule(
        _weight_rematerialisation,
        "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above "
        "the tensor-parallel size: weights are gathered in the order of Megatron's own schedules; "
        "leave them out, or use Megatron's own schedule",
    ),
    Rule(
        _given("step_batch_size_schedule"),
        "--step-batch-size-schedule: the proof of the schedule needs all batch sizes in advance; "
        "use --global-batch-size",
    ),
)
"""For every schedule."""

SPLIT = (
    Rule(
        lambda args: (
            (_value(args, "num_distributed_optimizer_instances") or 1) > 1
            and _given("overlap_grad_reduce")(args)
        ),
        "--num-distributed-optimizer-instances > 1 together with --overlap-grad-reduce: gradients "
        "of weights and of the rest are complete at different times; leave one of them out, or "
        "use 1f1b or interleaved",
    ),
    Rule(
        _given("overlap_dispatch_backward_with_experts_wgrad"),
        "--overlap-dispatch-backward-with-experts-wgrad: it postpones the weight gradients of "
        "experts, which the table does already; leave it out, or use 1f1b or interleaved",
    ),
    Rule(
        _given("moe_shared_expert_overlap"),
        "--moe-shared-expert-overlap: the shared expert computes in a stream of its own, which "
        "may use the memory of its weight gradients again before W has read it; leave it out, or "
        "use 1f1b or interleaved",
    ),
)
"""For schedules that split backwards."""

FOLDED = (
    Rule(
        _given("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers: first and last "
        "stage share a rank; leave them out, or describe all stages with "
        "--pipeline-model-parallel-layout",
    ),
    Rule(
        _given("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split: first "
        "and last stage share a rank; leave them out, or describe all stages with "
        "--pipeline-model-parallel-layout",
    ),
    Rule(
        _given("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"),
        "hybrid models (--hybrid-override-pattern, --hybrid-layer-pattern): their layers cannot be "
        "placed freely; use 1f1b or zb-h1",
    ),
    Rule(
        lambda args: (
            _value(args, "ckpt_format") not in (None, "torch_dist")
            and _given("save", "load", "pretrained_checkpoint")(args)
        ),
        "--ckpt-format other than torch_dist: those files identify layers by rank and chunk; use "
        "--ckpt-format torch_dist",
    ),
    Rule(
        lambda args: _value(args, "non_persistent_ckpt_type") == "local",
        "--non-persistent-ckpt-type local: those files identify layers by rank and chunk; use "
        "global",
    ),
)
"""For schedules that put the first and the last stage on one rank."""

TWINS = (
    Rule(
        _given("use_mp_args_from_checkpoint_args"),
        "--use-mp-args-from-checkpoint-args: a checkpoint holds the sizes of one of the two "
        "mirrored pipelines; give the sizes as flags",
    ),
)
"""For schedules of two mirrored pipelines."""

MICROBATCH_RNG = (
    Rule(
        _records_graphs,
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph): they replay the recorded random "
        "numbers; leave one of them out",
    ),
    Rule(
        _given("overlap_moe_expert_parallel_comm"),
        "--overlap-moe-expert-parallel-comm: it interleaves two micro-batches, and each has its "
        "own random numbers; leave one of them out",
    ),
)
"""For random numbers by micro-batch."""

DYNAMIC = (
    Rule(
        lambda args: "global_aux_loss" in _several(args, "moe_router_load_balancing_type"),
        "--moe-router-load-balancing-type global_aux_loss: it reduces over data-parallel replicas "
        "inside each layer, and they run their layers in different orders; use aux_loss or "
        "seq_aux_loss",
    ),
    Rule(
        lambda args: (
            _given("fp8")(args)
            and _value(args, "fp8_recipe") == "delayed"
            and not _value(args, "tp_only_amax_red")
        ),
        "--fp8-recipe delayed: scales are reduced over data-parallel replicas inside each layer, "
        "and they run their layers in different orders; add --tp-only-amax-red, or use another "
        "recipe",
    ),
)
"""For data-parallel replicas that choose their order independently. (Tensor-, context- and
expert-parallel ranks follow one leader.)"""

CROSSED_DYNAMIC = (
    Rule(
        _given("overlap_param_gather"),
        "--overlap-param-gather with --bitpipe-routing twin: twins gather parameters for each "
        "other, and start their chunks in different orders; use --bitpipe-routing local, or leave "
        "it out",
    ),
)
"""For ranks that choose their order and get activations from their twin."""


PACK = (
    Rule(
        lambda args: "global_aux_loss" in _several(args, "moe_router_load_balancing_type"),
        "--moe-router-load-balancing-type global_aux_loss: it depends on which micro-batches the "
        "replicas run at the same time; use aux_loss or seq_aux_loss, or --pipeline-balance order",
    ),
)
"""For micro-batches that data-parallel replicas share out."""

VARYING_LENGTHS = (
    Rule(
        lambda args: (
            _given("num_experts")(args) and _value(args, "moe_token_dispatcher_type") == "allgather"
        ),
        "--moe-token-dispatcher-type allgather: it gathers tokens in buffers of one size; use "
        "alltoall",
    ),
    Rule(
        _records_graphs,
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph): they replay tensors of one shape; "
        "leave one of them out",
    ),
)
"""For micro-batches of different lengths."""

STOCK = (
    Rule(
        _given("use_ring_exchange_p2p"),
        "--use-ring-exchange-p2p: it replaces the transport too; leave one of them out",
    ),
    Rule(
        _given("decoder_num_layers", "decoder_seq_length"),
        "encoder-decoder models (--decoder-num-layers, --decoder-seq-length): two different "
        "tensors travel between their stages; use --pipeline-transport torch",
    ),
    Rule(
        _given("microbatch_group_size_per_vp_stage"),
        "--microbatch-group-size-per-virtual-pipeline-stage: Megatron's usual order identifies "
        "the messages; leave it out",
    ),
    Rule(
        _whole_step_graphs,
        "CUDA graphs of a whole step (full_iteration): a graph cannot record transfers by the "
        "host; use another --cuda-graph-impl, or --pipeline-transport torch",
    ),
)
"""For a transport of ours under Megatron's own schedules."""


def refuse_flags(name: str, args: Namespace) -> None:
    """Refuse flags that exclude all our schedules.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    _refuse(f"--pipeline-schedule {name}", args, ALWAYS)


def refuse_flags_of_table(name: str, args: Namespace, table: Schedule) -> None:
    """Refuse flags that exclude one table: its split backwards, its placement or its twins.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    rules: list[Rule] = []
    if table.splits_backward:
        rules += SPLIT
    if table.placement.name in ("v", "w"):
        rules += FOLDED
    if table.placement.twins == 2:
        rules += TWINS
    _refuse(f"--pipeline-schedule {name}", args, rules)


def refuse_flags_of_dynamic_order(args: Namespace, placement: Placement) -> None:
    """Refuse flags that need the same order on all ranks, where each rank chooses its own.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    rules: list[Rule] = []
    if _replicas(args) * placement.twins > 1:
        rules += DYNAMIC
    if placement.twin_hops:
        rules += CROSSED_DYNAMIC
    _refuse("--use-dpp", args, rules)


def refuse_flags_with_microbatch_rng(args: Namespace) -> None:
    """Refuse flags that exclude random numbers by micro-batch.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    _refuse("--microbatch-rng", args, MICROBATCH_RNG)


def refuse_flags_with_pack(args: Namespace) -> None:
    """Refuse flags whose gradient is another where replicas share out their micro-batches.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    _refuse("--pipeline-balance pack", args, PACK)


def refuse_flags_with_transport(transport: str, args: Namespace) -> None:
    """Refuse flags that exclude our transport under Megatron's own schedules.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    _refuse(f"--pipeline-transport {transport}", args, STOCK)


def refuse_flags_with_varying_lengths(args: Namespace) -> None:
    """Refuse flags that need sequences of one length.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    _refuse("--variable-seq-lengths", args, VARYING_LENGTHS)


def _refuse(flag: str, args: Namespace, rules: Iterable[Rule]) -> None:
    wrong = [rule.message for rule in rules if rule.refuses(args)]
    if wrong:
        raise ArgumentsError("\n".join(f"{flag} cannot run with {message}" for message in wrong))
