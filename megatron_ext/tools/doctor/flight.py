"""Checks a training run's flags without starting it, for this machine or for other devices.

The report covers flags that `preflight` rejects, known hangs, whether each rank has enough memory,
and how long devices wait. Better flags are found by repeating the planner's forecast with one
setting changed. The check needs neither torch nor Megatron.
"""

from __future__ import annotations

import math
import resource
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.config.batches import Batches, batches_of
from megatron_ext.config.cut import UserCut
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.config.flags import in_flags
from megatron_ext.config.hosting import preflight
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ArgumentsError, ScheduleError, reworded
from megatron_ext.planning.choice import NOT_FORECAST
from megatron_ext.planning.layout_forecast import Layout, forecast
from megatron_ext.planning.layout_search import search
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.question import ParallelSizes, Question, with_graphs
from megatron_ext.planning.techniques import techniques_of_flags
from megatron_ext.rules import read_rules
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, default_schedule
from megatron_ext.schedules.search.policies import arena_slots
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.schedules.table.placement import loop
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.config.feature_rules import MemoryNeeded
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.config.sizes import JobSizes
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.schedules.table.placement import Placement

_MIB = 1 << 20
_MOSTLY_IDLE = 0.5
"""Warn if devices wait for at least this share of the pipeline's time."""
# Forecasts are off by about 5 % on average, so a smaller gain may not be real.
_WORTH = 1.1
"""Minimum speed-up for suggesting different flags when nothing is wrong."""


@dataclass(frozen=True)
class Diagnosis:
    """One line in the report."""

    level: Literal["OK", "WARN", "FAIL"]
    """FAIL: training cannot work. WARN: training works, but with a drawback."""
    check: str
    """The subject of the check, in two or three words."""
    finding: str
    remedy: str = ""
    """How to fix the problem, or empty if nothing is wrong."""

    @classmethod
    def of(cls, level: Literal["WARN", "FAIL"], check: str, line: object) -> Diagnosis:
        """Return the diagnosis for a line `finding; remedy`, the format of all error messages."""
        finding, _, remedy = str(line).partition("; ")
        return cls(level, check, finding, remedy)

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:<4} {self.check}: {self.finding}{remedy}"


_OURS = "--pipeline-schedule"
KNOWN_HANGS = read_rules(f"""
    --variable-seq-lengths: variable_seq_lengths & pipeline_model_parallel_size=2 & num_chunks>1 &
    !shapes_travel
        two ranks exchange shapes in both directions at once and mix them up, which hangs or fails
        (Megatron-LM#1450, docs/hangs.md); add {_OURS} interleaved, which names its messages
    --variable-seq-lengths: variable_seq_lengths & pipeline_model_parallel_size>3 & !shapes_travel
        with four or more stages, ranks exchange shapes in an order that hangs if the calls in a
        batch are started one by one (Megatron-LM#5100, docs/hangs.md); add {_OURS} 1f1b, whose
        messages carry their shape
    --pipeline-model-parallel-layout: ends_without_layers
        the last stage contains only the loss, which was reported to hang (Megatron-LM#1852); give
        the last stage a layer: ...|tL
    CUDA graphs: pipeline_model_parallel_size>1 & enable_cuda_graph | cuda_graph_impl!=none
        were reported to hang with pipeline parallelism (Megatron-LM#3802); remove --cuda-graph-impl
        and --enable-cuda-graph
    --overlap-grad-reduce: overlap_grad_reduce & expert_model_parallel_size>1 & world_size>63
        with expert parallelism on 64 or more devices, all-to-all and reduction can wait for each
        other (Megatron-LM#5749); remove --overlap-grad-reduce if it hangs, and add
        --hang-timeout 300, which names the collectives
""")
"""Known hangs. The last one occurs with any schedule, the others only with Megatron's own."""

_REPLACED = (
    "--enable-bitpipe-schedule --bitpipe-order --bitpipe-routing --pipeline-schedule "
    "--pipeline-costs --use-dpp --dpp-policy --dpp-extra-activations --context-parallel-size "
    "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout --pipeline-layout --decoder-first-pipeline-num-layers "
    "--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --overlap-moe-expert-parallel-comm "
    "--pipeline-waiting-weights --recompute-activations --recompute-granularity "
    "--recompute-method --recompute-num-layers --recompute-modules"
)
"""Flags that another layout's flags replace, because they would contradict it or stay in effect."""


def check_training(
    words: Sequence[str],
    count: int | None = None,
    device: DeviceKind | None = None,
) -> Iterator[Diagnosis]:
    """Check what a schedule accepts, changes, rejects and allocates for a training run.

    Args:
        words: The command line for training, with or without the script, as given after `--`.
        count: Number of devices in the job; None: as many as one replica needs.
        device: Type of device; None: memory and time are not forecast.
    """
    # Report flags that the rules reject or change, and unknown flags.
    answer = preflight(words, world_size=count, device_kind=device)
    for refusal in answer.refusals:
        yield Diagnosis("FAIL", "training", refusal.reason, refusal.remedy)
    for line in (*answer.changes, *answer.notices):
        yield Diagnosis("OK", "training", line)
    for line in answer.unknown_flags():
        yield Diagnosis.of("WARN", "unknown flag", line)
    if not answer.accepted or answer.config is None:
        return
    args = answer.checked_args
    name = "--forward-backward-disaggregating"
    # Our schedules name their messages, so ranks cannot mix them up or wait for the
    # wrong one. Of the known hangs, only the last one remains possible.
    hangs = KNOWN_HANGS[-1:]
    if answer.pipeline is not None:
        name = answer.pipeline.name
    elif answer.config.disaggregation is None:
        name = "Megatron's own schedule"
        hangs = KNOWN_HANGS
        try:
            _set_facts_of_cut(answer)
        except (ArgumentsError, ScheduleError) as error:
            line = reworded(str(error), in_flags)
            yield Diagnosis.of("FAIL", "layout", line)
            return
    for rule in hangs:
        if rule.refuses(args):
            finding = f"{rule.flag}: {rule.reason}"
            yield Diagnosis("WARN", "known hang", finding, rule.remedy)
    yield Diagnosis("OK", "training", f"{name} accepts these flags")
    yield from _arenas(answer, is_here=count is None)
    if device is None:
        line = (
            "memory and time are not forecast: set devices, such as --devices 64xh100"
        )
        yield Diagnosis("OK", "layout", line)
    else:
        yield from _forecast(answer, _flags_in(words), device)


def _set_facts_of_cut(answer: Preflight) -> None:
    """For Megatron's schedules, set the arguments that `KNOWN_HANGS` reads but no flag sets.

    Raises:
        ArgumentsError: The flags for the cut contradict each other or do not divide the model
            evenly.
        ScheduleError: The layout is not in Megatron's notation.
    """
    # `preflight` does not check the cut for Megatron's schedules.
    args = answer.checked_args
    args.num_chunks = UserCut.of(vars(args)).chunks
    layout = parse_layout(args.pipeline_model_parallel_layout or "tL")
    args.ends_without_layers = layout[-1] == "L"
    # This package's transports send shapes with the messages, so Megatron does not
    # exchange any.
    args.shapes_travel = answer.transport_only is not None


def _flags_in(words: Sequence[str]) -> list[str]:
    """Return the flags on a command line, without the separator `--` and the optional script."""
    flags = [word for word in words if word != "--"]
    if flags and flags[0].endswith(".py"):
        del flags[0]
    return flags


def _arenas(answer: Preflight, *, is_here: bool) -> Iterator[Diagnosis]:
    """Compare the shared memory that a native transport needs with the free memory here."""
    pipeline = answer.pipeline or answer.transport_only
    settings = vars(answer.checked_args)
    # A message holds one micro-batch's activation.
    num_values = 1
    for size in ("seq_length", "micro_batch_size", "hidden_size"):
        num_values *= settings.get(size) or 0
    if pipeline is None or pipeline.transport == "torch" or not num_values:
        return
    is_half = settings.get("bf16") or settings.get("fp16")
    bytes_per_value = 2 if is_half else 4
    message_bytes = num_values * bytes_per_value
    rank_bytes = arena_bytes(pipeline, message_bytes)
    pipeline_bytes = rank_bytes * pipeline.pp
    finding = (
        f"at most {rank_bytes / _MIB:.0f} MiB per rank, {pipeline_bytes / _MIB:.0f} MiB for a "
        "pipeline on one machine"
    )
    if not is_here:
        yield Diagnosis("OK", "message buffers", finding)
        return
    # Import here, because with --devices this module needs only the standard library.
    import psutil

    available = psutil.virtual_memory().available
    finding += f", {available / _MIB:.0f} MiB available here"
    remedy = "lower --micro-batch-size, or use --pipeline-transport torch, which needs no buffers"
    if pipeline_bytes > available:
        yield Diagnosis("FAIL", "message buffers", finding, remedy)
    # On the CPU, the model and its activations use the same memory.
    elif pipeline_bytes > available // 2:
        yield Diagnosis("WARN", "message buffers", finding, remedy)
    else:
        yield Diagnosis("OK", "message buffers", finding)


def arena_bytes(pipeline: Pipeline, message_bytes: int) -> int:
    """Return an upper bound on the memory for one rank's arenas, in bytes."""
    table = pipeline.full
    # Rank -> the ranks that it exchanges messages with.
    peers = defaultdict[int, set[int]](set)
    for source, target, _ in validate(table).slots:
        if source != target:
            peers[source].add(target)
            peers[target].add(source)
    # Each slot starts at a page boundary, so its size is rounded up.
    page_bytes = resource.getpagesize()
    slot_bytes = math.ceil(message_bytes / page_bytes) * page_bytes
    margin = None
    if pipeline.dynamic is not None:
        margin = pipeline.dynamic.margin
    slots = arena_slots(table, margin, pipeline.config.stash_ratio)
    # A model may add routes whose messages skip stages. These routes are unknown here, so they are
    # not counted.
    max_peers = 0
    for ranks in peers.values():
        max_peers = max(max_peers, len(ranks))
    return max_peers * slots * slot_bytes


def _unforeseen(answer: Preflight) -> str | None:
    """Return the first reason why the planner cannot forecast these flags, or None."""
    args = answer.checked_args
    config = answer.config
    for rule in NOT_FORECAST:
        if rule.refuses(args):
            return f"with {rule.flag} {rule.reason}"
    vocab_size = getattr(args, "vocab_size", None)
    padded_vocab_size = getattr(args, "padded_vocab_size", None)
    if not padded_vocab_size and not vocab_size:
        return "the tokenizer sets the vocabulary size; add --padded-vocab-size with that size"
    if config is None:
        return None
    for rules in feature_rules():
        if reason := rules.why_no_forecast(config):
            return reason
    dynamic = config.dynamic
    if dynamic is not None and dynamic.policy != DynamicOrder.policy:
        return f"with --dpp-policy {dynamic.policy}, ranks may keep all micro-batches"
    generator = config.generator
    if generator is None:
        return None
    for key, value in config.options.items():
        if value != generator.options[key][0]:
            return f"the planner does not support {generator.flag(key)} {value}"
    return None


def _forecast(
    answer: Preflight,
    flags: Sequence[str],
    device: DeviceKind,
) -> Iterator[Diagnosis]:
    """Compare forecast memory and waiting time with the devices, and suggest better flags."""
    reason = _unforeseen(answer)
    if reason is not None:
        line = f"memory and time are not checked: {reason}"
        finding, _, remedy = line.partition("; ")
        yield Diagnosis("OK", "layout", finding, remedy)
        return
    # Forecast the user's layout and search for a better one.
    try:
        job, plan = planned(answer, flags, device)
    except (ArgumentsError, ScheduleError) as error:
        line = reworded(str(error), in_flags)
        yield Diagnosis.of("FAIL", "layout", line)
        return
    if plan is None:
        reason = "the planner cannot forecast this schedule or cut"
        yield Diagnosis("OK", "layout", f"memory and time are not checked: {reason}")
        return
    if answer.pipeline is not None:
        for rules in feature_rules():
            try:
                needed = rules.memory_needed(answer.pipeline, plan)
            except ScheduleError as error:
                line = reworded(str(error), in_flags)
                yield Diagnosis.of("FAIL", "memory", line)
                return
            if needed is not None:
                yield _memory_of_feature(needed, plan, device)
                return
    differences, better = nearest(job, plan)
    remedy = ""
    if better is not None:
        remedy = _better_flags(differences, better, plan, flags)
    dynamic = None
    if answer.config is not None:
        dynamic = answer.config.dynamic
    yield _memory(plan, device, dynamic, remedy)
    yield _idle_devices(plan, better, device, remedy)


def _better_flags(
    differences: str,
    better: Layout,
    plan: Layout,
    flags: Sequence[str],
) -> str:
    """Return a suggestion: a better layout's flags, the flags that they replace, and the gain."""
    user_flags = {word.partition("=")[0] for word in flags}
    better_flags = set(better.flags.split())
    # If the better layout uses the same flag, only the value changes, so do not list it.
    replaceable = set(_REPLACED.split()) - better_flags
    replaced = sorted(user_flags & replaceable)
    if replaced:
        differences += f" instead of {', '.join(replaced)}"
    needed_gib = max(better.memory_gib)
    return (
        f"try {differences} ({needed_gib:.1f} GiB, {better.step_s:.3g} s per step "
        f"instead of {plan.step_s:.3g}): {better.flags}"
    )


def _memory(
    plan: Layout,
    device: DeviceKind,
    dynamic: DynamicOrder | None,
    remedy: str,
) -> Diagnosis:
    """Return a diagnosis of whether the rank that needs the most memory has enough."""
    needed_gib = max(plan.memory_gib)
    rank = plan.memory_gib.index(needed_gib)
    name = plan.schedule if plan.sizes.pp > 1 else "no pipeline"
    finding = (
        f"rank {rank} needs {needed_gib:.1f} GiB of {device.memory_gib:g} "
        f"({device.name}, {name})"
    )
    if dynamic is not None and dynamic.margin:
        finding += f", plus --dpp-extra-activations {dynamic.margin}"
    if needed_gib <= device.memory_gib - device.reserve_gib:
        return Diagnosis("OK", "memory", finding)
    remedy = remedy or "use more devices"
    if needed_gib > device.memory_gib:
        return Diagnosis("FAIL", "memory", finding, remedy)
    finding += f", and workspaces and fragmentation need another {device.reserve_gib:g}"
    return Diagnosis("WARN", "memory", finding, remedy)


def _memory_of_feature(
    needed: MemoryNeeded, plan: Layout, device: DeviceKind
) -> Diagnosis:
    """Return a diagnosis of whether there is enough memory for what a feature forecasts."""
    finding = (
        f"rank {needed.rank} needs {needed.gib:.1f} GiB of {device.memory_gib:g} "
        f"({device.name}, {plan.schedule}) {needed.assumption}"
    )
    if needed.gib <= device.memory_gib - device.reserve_gib:
        return Diagnosis("OK", "memory", finding)
    level: Literal["WARN", "FAIL"] = "WARN"
    if needed.gib > device.memory_gib:
        level = "FAIL"
    return Diagnosis(level, "memory", finding, needed.remedy)


def _idle_devices(
    plan: Layout,
    better: Layout | None,
    device: DeviceKind,
    remedy: str,
) -> Diagnosis:
    """Return a diagnosis of how long devices wait, with better flags if they gain enough."""
    finding = (
        f"devices wait for {100 * plan.idle:.0f} % of the pipeline's time, at a forecast "
        f"{plan.step_s:.3g} s per step"
    )
    if plan.idle >= _MOSTLY_IDLE:
        remedy = remedy or "use more micro-batches"
        return Diagnosis("WARN", "idle devices", finding, remedy)
    # If the user's layout does not fit, `_memory` has already suggested the flags.
    usable_gib = device.memory_gib - device.reserve_gib
    fits = max(plan.memory_gib) <= usable_gib
    has_gain = better is not None and plan.step_s > _WORTH * better.step_s
    if fits and has_gain:
        return Diagnosis("OK", "idle devices", finding, remedy)
    return Diagnosis("OK", "idle devices", finding)


def planned(
    answer: Preflight,
    flags: Sequence[str],
    device: DeviceKind,
) -> tuple[Question, Layout | None]:
    """Return the forecast for a training run with accepted flags, even if it does not fit.

    The forecast is None if the planner does not support the schedule or the cut.

    Raises:
        ArgumentsError: Sizes are missing, or do not divide evenly.
        ScheduleError: The layers do not divide evenly into the stages.
    """
    args = answer.checked_args
    model = sizes_of_flags(flags, "the model")
    if "cuda_graph_impl" in answer.arguments:
        # The schedule disables CUDA graphs, so assume none in the forecast.
        flags = [*flags, "--cuda-graph-impl", "none"]
    cut = UserCut.of(vars(args))
    pp = cut.sizes.pipeline_model_parallel_size
    twins = answer.config.twins if answer.config else 1
    batches = batches_of(args, pp, twins)
    sizes = _parallel_sizes(cut.sizes, args, batches)
    if model.sequence is None or model.sequence < 1:
        raise ArgumentsError(
            f"--seq-length is {model.sequence or 'missing'}; add, for example, --seq-length 4096"
        )
    job = Question(
        model=model,
        device=device,
        num_devices=cut.sizes.ranks,
        # The last batch is the full one, after any ramp-up.
        global_batch=list(batches.counts)[-1],
        sequence=model.sequence,
        pair_rules=RULES.get("pairs", ()),
        techniques=techniques_of_flags(flags),
        fused_loss=bool(getattr(args, "cross_entropy_loss_fusion", None)),
        overlaps=bool(getattr(args, "overlap_grad_reduce", None)),
        shards_optimizer=bool(getattr(args, "use_distributed_optimizer", None)),
        waiting_weights=answer.config.num_waiting if answer.config else 0,
    )
    if answer.pipeline is not None:
        name = answer.pipeline.name
    else:
        name = default_schedule(cut.chunks)
    # The planner supports neither tables from files nor separate forward and backward ranks.
    has_roles = answer.config is None or answer.config.disaggregation is not None
    if name.startswith(CSV_PREFIX) or has_roles:
        return job, None
    # Forecast without a memory limit, so that layouts that do not fit get a forecast
    # too.
    boundless_device = replace(device, memory_gib=1e9)
    boundless = with_graphs(replace(job, device=boundless_device), sizes)
    if pp == 1:
        plan = forecast(boundless, sizes, "none", 1)
    else:
        if answer.pipeline is not None:
            placement = answer.pipeline.placement
        else:
            placement = loop(pp, cut.chunks)
        layers_by_stage = _layers_by_stage(answer, placement, name, model.num_layers)
        chunks = placement.num_stages * twins // pp
        plan = forecast(boundless, sizes, name, chunks, layers_by_stage)
    if plan is None:
        return job, None
    forecast_job = replace(boundless, device=device)
    return job, replace(plan, job=forecast_job)


def _parallel_sizes(
    sizes: JobSizes,
    args: Namespace,
    batches: Batches,
) -> ParallelSizes:
    """Return a job's parallel sizes in the planner's terms.

    Raises:
        ArgumentsError: The ranks in a stage do not divide evenly into expert-parallel groups.
    """
    tp = sizes.tensor_model_parallel_size
    pp = sizes.pipeline_model_parallel_size
    cp = sizes.context_parallel_size
    experts = sizes.expert_model_parallel_size
    ranks_of_stage = sizes.ranks // pp
    if ranks_of_stage % experts:
        raise ArgumentsError(
            f"--expert-model-parallel-size {experts} does not divide the {ranks_of_stage} ranks of "
            f"a stage; use --expert-model-parallel-size {math.gcd(experts, ranks_of_stage)}"
        )
    recomputed = frozenset[str]()
    granularity = getattr(args, "recompute_granularity", None)
    if granularity == "full":
        recomputed = frozenset({"full"})
    elif granularity == "selective":
        # By default, Megatron recomputes core attention.
        modules = getattr(args, "recompute_modules", None) or ("core_attn",)
        recomputed = frozenset(modules)
    return ParallelSizes(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=experts,
        micro_batch=batches.micro_batch,
        mode=recomputed,
        num_microbatches=batches.twins * batches.num_microbatches,
        replicas=sizes.ranks // (tp * pp * cp),
    )


def _layers_by_stage(
    answer: Preflight,
    placement: Placement,
    name: str,
    num_layers: int,
) -> list[int]:
    """Return the number of layers in each stage, as built by Megatron.

    Raises:
        ScheduleError: The layers do not divide evenly into the stages, or do not match the model.
    """
    hosted = {"num_layers": None, **vars(answer.checked_args), **answer.arguments}
    layers_by_stage = UserCut.of(hosted).layers_by_stage(placement)
    if layers_by_stage is None:
        raise ScheduleError(
            f"{num_layers} layers do not divide evenly into {placement.num_stages} stages of "
            f"{name}, which Megatron rejects; add {_OURS} {name}, which supports uneven stages"
        )
    if sum(layers_by_stage) != num_layers:
        raise ScheduleError(
            f"the cut has {sum(layers_by_stage)} layers, but the model has {num_layers}; use "
            "one t per layer in --pipeline-model-parallel-layout"
        )
    return layers_by_stage


_CHANGES = {
    "recompute": "different recomputation",
    "schedule": "a different schedule",
    "micro_batch": "a different micro-batch size",
    "pp": "a different pipeline size",
    "tp": "a different tensor-parallel size",
    "cp": "a different context-parallel size",
    "ep": "a different expert-parallel size",
    "layout": "a different cut of the layers",
}


@dataclass(frozen=True)
class _Change:
    """A layout that is better than the user's layout."""

    differences: str
    """Description of what differs."""
    layout: Layout


def nearest(job: Question, user_layout: Layout) -> tuple[str, Layout | None]:
    """Return the fastest layout that fits and differs from the user's in only one setting.

    If the user's layout fits, the returned layout is faster. If there is no such layout, or if
    devices mostly wait and the layout gains little, several settings may differ.

    Returns:
        A description of the difference and the layout; None if no layout is better.
    """
    sizes = user_layout.sizes
    fixed: dict[str, Any] = {"recompute": sizes.mode}
    for name in ("tp", "pp", "cp", "ep", "micro_batch"):
        fixed[name] = getattr(sizes, name)
    if sizes.pp > 1:
        fixed |= {"schedule": user_layout.schedule, "vp": user_layout.chunks}
    # Search once per setting, with all other settings fixed.
    changes: list[_Change] = []
    for name, differences in _CHANGES.items():
        free_names = {name}
        # Different pipeline sizes allow different schedules, and the schedule determines the
        # chunks.
        if name in ("schedule", "pp"):
            free_names |= {"schedule", "vp"}
        fixed_settings = {
            key: value for key, value in fixed.items() if key not in free_names
        }
        changes += _better(job, fixed_settings, user_layout, differences)
    # `shards_optimizer` is part of the question, not of the layout, so it needs its own search.
    sharded = replace(job, shards_optimizer=True)
    if not job.shards_optimizer:
        changes += _better(sharded, fixed, user_layout, "a sharded optimizer")
    fastest_s = math.inf
    for change in changes:
        fastest_s = min(fastest_s, change.layout.step_s)
    gain = user_layout.step_s / fastest_s
    is_still_idle = user_layout.idle >= _MOSTLY_IDLE and gain < _WORTH
    # If one change is not enough, let all settings vary.
    if not changes or is_still_idle:
        changes += _better(sharded, {}, user_layout, "a different layout")
    if not changes:
        return "", None
    best = min(changes, key=lambda change: change.layout.step_s)
    return best.differences, best.layout


def _better(
    job: Question,
    fixed: dict[str, Any],
    user_layout: Layout,
    differences: str,
) -> list[_Change]:
    """Return the fastest layout with these settings if it beats the user's, else an empty list."""
    try:
        question = replace(job, fixed=fixed)
        # Search only for the best layout, because the user has to wait for about ten searches.
        answer = search(question, keep=1)
    except ArgumentsError:
        # No sizes divide evenly with these settings.
        return []
    if not answer.is_complete:
        # On Ctrl-C, a search stops early and returns what it has. The user meant to
        # stop all searches.
        raise KeyboardInterrupt
    if not answer.plans:
        return []
    usable_gib = job.device.memory_gib - job.device.reserve_gib
    fits = max(user_layout.memory_gib) <= usable_gib
    fastest = answer.plans[0]
    if fits and fastest.step_s >= user_layout.step_s:
        return []
    return [_Change(differences, fastest)]
