"""Checks the flags of a training without starting anything, for the machine at hand or any other.

What `preflight` refuses, hangs that were published, whether each rank's memory fits, how long
devices wait, and the flags nearest to these that are better: the planner's forecast with one thing
changed. Needs neither torch nor Megatron.
"""

from __future__ import annotations

import math
import resource
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.config import stages
from megatron_ext.config.batches import batches_of
from megatron_ext.config.hosting import preflight
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.config.sizes import JobSizes
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.planning.layout_forecast import Layout, forecast
from megatron_ext.planning.layout_search import search
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.question import ParallelSizes, Question, with_graphs
from megatron_ext.planning.techniques import techniques_of_flags
from megatron_ext.rules import read_rules
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, base_table
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.schedules.table.placement import loop
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.planning.hardware import DeviceKind

_MIB = 1 << 20
_MOSTLY_IDLE = 0.5
"""Share of the pipeline's time in which devices wait, from which it is a warning."""
_WORTH = 1.1
"""Times as fast, from which other flags are named though nothing is wrong."""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report."""

    level: Literal["OK", "WARN", "FAIL"]
    """FAIL: the requested training cannot work. WARN: it works, with a disadvantage."""
    check: str
    """The subject of the check, in two or three words."""
    found: str
    remedy: str = ""
    """Remedy; empty if nothing is wrong."""

    @classmethod
    def of(cls, level: Literal["WARN", "FAIL"], check: str, line: object) -> Diagnosis:
        """Return the finding of a line `found; remedy`, as all our errors are."""
        found, _, remedy = str(line).partition("; ")
        return cls(level, check, found, remedy)

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<4} {self.check}: {self.found}{remedy}"


_OURS = "--pipeline-schedule"
KNOWN_HANGS = read_rules(f"""
    --variable-seq-lengths: variable_seq_lengths & pipeline_model_parallel_size=2 & num_chunks>1 &
    !shapes_travel
        two ranks exchange shapes in both directions at once, and swap them: hangs or fails
        (Megatron-LM#1450, docs/hangs.md); add {_OURS} interleaved, whose messages have names
    --variable-seq-lengths: variable_seq_lengths & pipeline_model_parallel_size>3 & !shapes_travel
        with four or more stages, ranks exchange shapes in an order that hangs where the calls of a
        batch are started one by one (Megatron-LM#5100, docs/hangs.md); add {_OURS} 1f1b, whose
        messages carry their shape
    --pipeline-model-parallel-layout: ends_without_layers
        the last stage has nothing but the loss, which was reported to hang (Megatron-LM#1852); give
        the last stage a layer: ...|tL
    CUDA graphs: pipeline_model_parallel_size>1 & enable_cuda_graph | cuda_graph_impl!=none
        with pipeline parallelism were reported to hang (Megatron-LM#3802); leave --cuda-graph-impl
        and --enable-cuda-graph out
    --overlap-grad-reduce: overlap_grad_reduce & expert_model_parallel_size>1 & world_size>63
        with experts on several ranks of 64 or more devices, all-to-all and reduction can wait for
        each other (Megatron-LM#5749); leave --overlap-grad-reduce out if it hangs, and add
        --hang-timeout 300, which names the collectives
""")
"""Of Megatron's own schedules, except the last, which no schedule causes."""

_NOT_PLANNED = read_rules("""
    --recompute-method block, or --recompute-num-layers above 1: recompute_granularity=full &
    recompute_method=block | recompute_num_layers>1
        the planner would recompute each layer by itself
    use_megatron_fsdp | use_custom_fsdp | use_torch_fsdp2
        the planner would not shard the weights
    cpu_offloading | fine_grained_activation_offloading | optimizer_cpu_offload
        the planner would keep all on the device
    the types of --use-precision-aware-optimizer: use_precision_aware_optimizer &
    main_grads_dtype!=fp32 | main_params_dtype!=fp32 | exp_avg_dtype!=fp32 | exp_avg_sq_dtype!=fp32
        the planner would count fp32
""")
"""What is no part of a forecast."""

_REPLACED = (
    "--enable-bitpipe-schedule --bitpipe-order --bitpipe-routing --pipeline-schedule "
    "--pipeline-costs --use-dpp --dpp-policy --dpp-extra-activations --context-parallel-size "
    "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout --pipeline-layout --decoder-first-pipeline-num-layers "
    "--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --overlap-moe-expert-parallel-comm "
    "--recompute-activations --recompute-granularity --recompute-method --recompute-num-layers "
    "--recompute-modules"
)
"""Flags that contradict those of another layout, or would go on beside them."""


def check_training(
    words: Sequence[str], count: int | None = None, device: DeviceKind | None = None
) -> Iterator[Diagnosis]:
    """Check the flags of a training: what its schedule takes, changes, refuses and allocates.

    Args:
        words: Its command line, with or without the script, after `--`.
        count: Devices of the job; None: those of one replica.
        device: What they are; None: memory and time are not forecast.
    """
    found = preflight(words, world_size=count)
    for refusal in found.refusals:
        yield Diagnosis("FAIL", "training", refusal.reason, refusal.remedy)
    for line in (*found.changes, *found.notices):
        yield Diagnosis("OK", "training", line)
    for line in found.unknown_flags():
        yield Diagnosis.of("WARN", "unknown flag", line)
    if not found.accepted or found.config is None:
        return
    # Our messages have names, so that the order in which ranks send cannot swap them.
    args, hangs, name = found.given, KNOWN_HANGS[-1:], "--forward-backward-disaggregating"
    if found.pipeline is not None:
        name = found.pipeline.name
    elif found.config.disaggregation is None:
        hangs, name = KNOWN_HANGS, "Megatron's own schedule"
        try:  # the cut, which `preflight` leaves to Megatron where its own schedule runs
            args.num_chunks = stages.chunks_of_megatron(args)
            layout = parse_layout(args.pipeline_model_parallel_layout or "tL")
        except (ArgumentsError, ScheduleError) as error:
            yield Diagnosis.of("FAIL", "layout", error)
            return
        args.ends_without_layers = layout[-1] == "L"
        args.shapes_travel = found.transport_only is not None
    for rule in hangs:
        if rule.refuses(args):
            yield Diagnosis("WARN", "known hang", f"{rule.flag}: {rule.reason}", rule.remedy)
    yield Diagnosis("OK", "training", f"{name} takes these flags")
    yield from _arenas(found, is_here=count is None)
    if device is None:
        line = "memory and time are not forecast: say for which devices, as --devices 64xh100"
        yield Diagnosis("OK", "layout", line)
    else:
        # argparse leaves the separator in, and the script may be named or not.
        flags = [word for word in words if word != "--"]
        flags = flags[1:] if flags and flags[0].endswith(".py") else flags
        yield from _forecast(found, flags, device)


def _arenas(found: Preflight, *, is_here: bool) -> Iterator[Diagnosis]:
    """Yield the shared memory of a native transport, beside what is free if it runs here."""
    pipeline, given = found.pipeline or found.transport_only, vars(found.given).get
    # A message is the activation of one micro-batch.
    values = math.prod(
        given(size) or 0 for size in ("seq_length", "micro_batch_size", "hidden_size")
    )
    if pipeline is None or pipeline.transport == "torch" or not values:
        return
    each = arena_bytes(pipeline, values * (2 if given("bf16") or given("fp16") else 4))
    whole = each * pipeline.pp
    shown = f"{each / _MIB:.0f} MiB for each rank at most, {whole / _MIB:.0f} MiB for a pipeline "
    shown += "on one machine"
    level: Literal["OK", "FAIL", "WARN"] = "OK"
    if is_here:
        import psutil

        available = psutil.virtual_memory().available
        shown += f", {available / _MIB:.0f} MiB available here"
        level = "FAIL" if whole > available else "WARN" if whole > available // 2 else "OK"
    remedy = "lower the micro-batch size, or use --pipeline-transport torch, which has no arenas"
    yield Diagnosis(level, "transport arenas", shown, remedy if level != "OK" else "")


def arena_bytes(pipeline: Pipeline, message_bytes: int) -> int:
    """Return the upper bound on the memory of one rank's arenas, in bytes."""
    table, peers = pipeline.full, defaultdict[int, set[int]](set)
    for source, target, _ in validate(table).slots:
        if source != target:
            peers[source].add(target)
            peers[target].add(source)
    page_bytes = resource.getpagesize()
    slots = arena_slots(
        table, pipeline.dynamic.margin if pipeline.dynamic else None, pipeline.config.stash_ratio
    )
    # Without the model's routes, which are not known here; each adds messages that skip a stage.
    most = max(map(len, peers.values()), default=0)
    return most * slots * math.ceil(message_bytes / page_bytes) * page_bytes


def _forecast(found: Preflight, flags: Sequence[str], device: DeviceKind) -> Iterator[Diagnosis]:
    """Compare memory and waiting with what the devices have, and name better flags."""
    reasons = [f"with {r.flag} {r.reason}" for r in _NOT_PLANNED if r.refuses(found.given)]
    given, config = vars(found.given).get, found.config
    dynamic = None if config is None else config.dynamic
    if not given("padded_vocab_size") and not given("vocab_size"):
        reasons.append("the vocabulary is the tokenizer's; add --padded-vocab-size with its size")
    if config is not None and config.slices > 1:
        reasons.append("with --pipeline-slices the planner would count whole micro-batches")
    if dynamic is not None and dynamic.policy != DynamicOrder.policy:
        reasons.append(f"with --dpp-policy {dynamic.policy} ranks may keep all micro-batches")
    if config is not None and (generator := config.generator) is not None:
        for key, value in config.options.items():
            if value != generator.options[key][0]:
                reasons.append(f"the planner knows no {generator.flag(key)} {value}")
    if reasons:
        line, _, remedy = f"memory and time are not checked: {reasons[0]}".partition("; ")
        yield Diagnosis("OK", "layout", line, remedy)
        return
    try:
        job, plan = planned(found, flags, device)
    except (ArgumentsError, ScheduleError) as error:
        yield Diagnosis.of("FAIL", "layout", error)
        return
    if plan is None:
        reason = "the planner has no forecast for this schedule or cut"
        yield Diagnosis("OK", "layout", f"memory and time are not checked: {reason}")
        return
    most, limit = max(plan.memory_gib), device.memory_gib - device.reserve_gib
    rank = plan.memory_gib.index(most)
    name = plan.schedule if plan.sizes.pp > 1 else "no pipeline"
    shown = f"rank {rank} needs {most:.1f} GiB of {device.memory_gib:g} ({device.name}, {name})"
    if dynamic is not None and dynamic.margin:
        shown += f", plus --dpp-extra-activations {dynamic.margin}"
    words, better = nearest(job, plan)
    remedy = ""
    if better is not None:
        given_flags = {word.partition("=")[0] for word in flags}
        gone = given_flags & {*_REPLACED.split()} - {*better.flags.split()}
        words += f" in place of {', '.join(sorted(gone))}" if gone else ""
        remedy = f"try {words} ({max(better.memory_gib):.1f} GiB, {better.step_s:.3g} s a step "
        remedy += f"against {plan.step_s:.3g}): {better.flags}"
    if most <= limit:
        yield Diagnosis("OK", "memory", shown)
    elif most > device.memory_gib:
        yield Diagnosis("FAIL", "memory", shown, remedy or "use more devices")
    else:
        shown += f", of which {device.reserve_gib:g} are for workspaces and fragments"
        yield Diagnosis("WARN", "memory", shown, remedy or "use more devices")
    shown = f"devices wait {100 * plan.idle:.0f} % of the pipeline's time, {plan.step_s:.3g} s a "
    shown += "step by forecast"
    if plan.idle >= _MOSTLY_IDLE:
        yield Diagnosis("WARN", "idle devices", shown, remedy or "give more micro-batches")
    else:
        gains = better is not None and most <= limit and plan.step_s > _WORTH * better.step_s
        yield Diagnosis("OK", "idle devices", shown, remedy if gains else "")


def planned(
    found: Preflight, flags: Sequence[str], device: DeviceKind
) -> tuple[Question, Layout | None]:
    """Return the forecast of a training whose flags were accepted, whether or not it fits.

    Raises:
        ArgumentsError: Sizes are missing, or do not divide.
        ScheduleError: The layers do not divide into the stages.
    """
    model, args = sizes_of_flags(flags, "the model"), found.given
    pp, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    cp, given = args.context_parallel_size, vars(args).get
    if "cuda_graph_impl" in found.arguments:
        flags = [*flags, "--cuda-graph-impl", "none"]  # the schedule drops them
    name = found.pipeline.name if found.pipeline else base_table(stages.chunks_of_megatron(args))
    if name.startswith(CSV_PREFIX) or found.config is None or found.config.disaggregation:
        name = ""  # the planner knows neither tables of the user's own nor roles
    twins = found.config.twins if found.config else 1
    batches = batches_of(args, pp, twins)
    count, experts = JobSizes.of(vars(args)).ranks, given("expert_model_parallel_size") or 1
    if (ranks := count // pp) % experts:
        raise ArgumentsError(
            f"--expert-model-parallel-size {experts} does not divide the {ranks} ranks of a stage; "
            f"use --expert-model-parallel-size {math.gcd(experts, ranks)}"
        )
    sequence = model.sequence
    if sequence is None or sequence < 1:
        raise ArgumentsError(
            f"--seq-length is {sequence or 'missing'}; give the tokens, say --seq-length 4096"
        )
    mode = frozenset[str]()
    if given("recompute_granularity") == "full":
        mode = frozenset({"full"})
    elif given("recompute_granularity") == "selective":
        mode = frozenset(given("recompute_modules") or ("core_attn",))
    sizes = ParallelSizes(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=experts,
        micro_batch=batches.micro_batch,
        mode=mode,
        num_microbatches=batches.twins * batches.num_microbatches,
        replicas=count // (tp * pp * cp),
    )
    job = Question(
        model=model,
        device=device,
        num_devices=count,
        global_batch=list(batches.counts)[-1],
        sequence=sequence,
        pair_rules=RULES["pairs"],
        techniques=techniques_of_flags(flags),
        fused_loss=bool(given("cross_entropy_loss_fusion")),
        overlaps=bool(given("overlap_grad_reduce")),
        shards_optimizer=bool(given("use_distributed_optimizer")),
    )
    if not name:
        return job, None
    # A layout that does not fit still has a forecast, which the report compares with the limit.
    free = with_graphs(replace(job, device=replace(device, memory_gib=1e9)), sizes)
    if pp == 1:
        plan = forecast(free, sizes, "none", 1)
    else:
        hosted = Namespace(**{"num_layers": None, **vars(args), **found.arguments})
        if found.pipeline is None:
            placement = loop(pp, stages.chunks_of_megatron(args))
        else:
            placement = found.pipeline.placement
        counts = stages.layers_of_flags(hosted, placement)
        if counts is None:
            raise ScheduleError(
                f"{model.num_layers} layers do not divide into {placement.num_stages} stages of "
                f"{name}, which Megatron refuses; add {_OURS} {name}, which cuts them unevenly"
            )
        if sum(counts) != model.num_layers:
            raise ScheduleError(
                f"the cut has {sum(counts)} layers, the model {model.num_layers}; give t as often "
                "in --pipeline-model-parallel-layout as --num-layers says"
            )
        plan = forecast(free, sizes, name, placement.num_stages * twins // pp, counts)
    return job, None if plan is None else replace(plan, job=replace(free, device=device))


_CHANGES = {
    "recompute": "another recomputation",
    "schedule": "another schedule",
    "micro_batch": "another micro-batch",
    "pp": "another pipeline",
    "tp": "another tensor parallelism",
    "cp": "another context parallelism",
    "ep": "another expert parallelism",
    "layout": "another cut of the layers",
}


def nearest(job: Question, own: Layout) -> tuple[str, Layout | None]:
    """Return the fastest layout that fits, is faster than a fitting one, and differs in one thing.

    If there is none, or it gains little where devices mostly wait, several things may differ. The
    difference comes first, in words; the layout is None if nothing is better.
    """
    sizes, limit = own.sizes, job.device.memory_gib - job.device.reserve_gib
    fixed: dict[str, Any] = {
        name: getattr(sizes, name) for name in ("tp", "pp", "cp", "ep", "micro_batch")
    }
    fixed["recompute"] = sizes.mode
    if sizes.pp > 1:
        fixed |= {"schedule": own.schedule, "vp": own.chunks}
    sharded = replace(job, shards_optimizer=True)
    found = list[tuple[str, Layout]]()

    def try_out(words: str, other: Question, kept: dict[str, Any]) -> None:
        with suppress(ArgumentsError):  # nothing divides
            # The best alone: each change is a search of its own, and the user waits for eight.
            best = search(replace(other, fixed=kept), keep=1)
            if not best.is_complete:
                raise KeyboardInterrupt  # it stops a search, and is for all
            plans = best.plans
            if plans and (max(own.memory_gib) > limit or plans[0].step_s < own.step_s):
                found.append((words, plans[0]))

    for name, words in _CHANGES.items():
        free = ("schedule", "vp") if name in ("schedule", "pp") else ()
        try_out(words, job, {key: fixed[key] for key in fixed if key not in (name, *free)})
    if not job.shards_optimizer:
        try_out("a sharded optimizer", sharded, fixed)
    gain = own.step_s / min((plan.step_s for _, plan in found), default=math.inf)
    if not found or (own.idle >= _MOSTLY_IDLE and gain < _WORTH):
        try_out("another layout", sharded, {})
    return min(found, key=lambda each: each[1].step_s, default=("", None))
