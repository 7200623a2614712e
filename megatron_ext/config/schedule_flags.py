"""The training flags that choose a pipeline schedule."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_ext.config import dynamic_flags, stages, transport_flags
from megatron_ext.config.pipeline_config import BALANCES, PipelineConfig
from megatron_ext.config.sized_pipeline import base_table
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, get, registered
from megatron_ext.schedules.search.length_balance import LengthCost
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.memory import stash_ratio

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option

__all__ = ["add_flags", "schedule_fields", "stash_fields"]


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags that choose a schedule, and one for each option of a registered schedule."""
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        help=f"Pipeline schedule: {', '.join(registered())}, or csv:FILE. `megatron-ext plan` "
        "compares them. Without it Megatron's own 1F1B or interleaved schedule runs.",
    )
    group.add_argument(
        "--enable-bitpipe-schedule",
        action="store_true",
        help="The same as --pipeline-schedule bitpipe.",
    )
    for generator in registered().values():
        for key, values in generator.options.items():
            group.add_argument(
                generator.flag(key),
                choices=values,
                help=f"Option of --pipeline-schedule {generator.name} (default: {values[0]}).",
            )
    transport_flags.add_flags(group)
    group.add_argument(
        "--pipeline-costs",
        metavar="F,I,W[,LATENCY[,LAUNCH]]",
        help="Durations, in any consistent unit, of forward, input gradient and weight gradient on "
        "1/pp of the model, of a message, and of launching an action on a device. The schedule is "
        "generated and simulated for them "
        f"(default: {UNIT}).",
    )
    group.add_argument(
        "--pipeline-slices",
        type=int,
        default=PipelineConfig.slices,
        metavar="K",
        help="Cut the sequence of each micro-batch into K slices of equal cost, which run through "
        "the pipeline one by one: about 1/K of the bubble, and of the activations beyond one "
        "micro-batch (default: 1, whole micro-batches).",
    )
    group.add_argument(
        "--pipeline-balance",
        choices=BALANCES,
        default=PipelineConfig.balance,
        help="For data of variable or packed lengths. order: let the micro-batches of a step enter "
        "the pipeline in an order that follows from their lengths. pack: before that, share out "
        "the micro-batches of all data-parallel replicas by cost. The gradient is the same sum in "
        "another order (default: off).",
    )
    group.add_argument(
        "--pipeline-length-costs",
        metavar="A,B",
        help="With --pipeline-balance or --pipeline-slices: a sample of L tokens costs "
        "A*L + B*L^2, in any unit, for example as `megatron-ext plan --lengths FILE --from-trace "
        "DIR` measures it (default: what "
        "follows from the shape of the model).",
    )
    dynamic_flags.add_flags(group)
    group.add_argument(
        "--variable-seq-lengths",
        action="store_true",
        help="Micro-batches may have sequences of different lengths, up to "
        "--max-position-embeddings: shapes travel with the tensors, under every schedule.",
    )
    group.add_argument(
        "--microbatch-rng",
        action="store_true",
        help="Draw dropout masks by iteration, stage and micro-batch, so that all schedules, "
        "Megatron's own too, draw the same ones. Implied by --use-dpp.",
    )


def schedule_fields(args: Namespace) -> dict[str, Any]:
    """Return the fields of a `PipelineConfig` about the schedule.

    Raises:
        ArgumentsError: The flags contradict each other.
        ScheduleError: The schedule does not exist.
    """
    name = _chosen(args)
    chunks = None if name is None else stages.num_chunks(args, name)
    return {
        "schedule": name,
        "chunks": chunks,
        "options": _options(args, name),
        "slices": getattr(args, "pipeline_slices", None) or PipelineConfig.slices,
        "costs": _costs(args),
        "dynamic": dynamic_flags.dynamic_order(args),
        "balance": getattr(args, "pipeline_balance", None) or PipelineConfig.balance,
        "length_costs": _length_costs(args),
        **stash_fields(args, name, chunks),
    }


def _chosen(args: Namespace) -> str | None:
    """Return the name of the schedule, or None for Megatron's own."""
    name: str | None = getattr(args, "pipeline_schedule", None)
    if getattr(args, "enable_bitpipe_schedule", False):
        if name not in (None, "bitpipe"):
            raise ArgumentsError(
                f"--enable-bitpipe-schedule and --pipeline-schedule {name} name two schedules; "
                "leave one of them out"
            )
        name = "bitpipe"
    if name is None and getattr(args, "use_dpp", False):
        name = base_table(stages.chunks_of_megatron(args))
    return name


def stash_fields(args: Namespace, name: str | None, chunks: int | None) -> dict[str, Any]:
    """Return the fields of a `PipelineConfig` about what layers hold between I and W.

    Args:
        args: Arguments with upstream's names.
        name: The schedule; None: Megatron's own.
        chunks: Stages on each rank; None: the schedule's default.
    """
    if name is None:
        return {}
    granularity = getattr(args, "recompute_granularity", None)
    if getattr(args, "recompute_activations", False):
        granularity = "selective"
    whole, at_a_time = 0.0, 1
    if granularity == "full":
        whole, given = 1.0, getattr(args, "recompute_num_layers", None) or 1
        if getattr(args, "recompute_method", None) == "block":  # so many of each stage
            generator = None if name.startswith(CSV_PREFIX) else get(name)
            each = chunks or (1 if generator is None else generator.num_chunks // generator.twins)
            recomputed = given * each * args.pipeline_model_parallel_size
            whole = min(1.0, recomputed / (getattr(args, "num_layers", None) or recomputed))
        else:
            at_a_time = given
    te = getattr(args, "transformer_impl", None) == "transformer_engine"
    ratio = stash_ratio(
        getattr(args, "tensor_model_parallel_size", 1),
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)),
        # Megatron's own layers keep their part of a sequence and gather it again.
        keeps_gathered=te and find_spec("transformer_engine") is not None,
        recomputed=(getattr(args, "recompute_modules", None) or ())
        if granularity == "selective"
        else (),
        recomputed_layers=whole,
        kept_inputs=1 / at_a_time,
        divides_inputs=bool(getattr(args, "distribute_saved_activations", False)),
    )
    # The order of a file is the user's.
    at_once = whole == 1 and not name.startswith(CSV_PREFIX)
    return {"stash_ratio": ratio, "weights_at_once": at_once}


def _options(args: Namespace, name: str | None) -> dict[str, Option]:
    """Return the given options of the schedule; an option of another schedule is an error."""
    said: dict[str, Option] = {}
    for generator in registered().values():
        for key in generator.options:
            flag = generator.flag(key)
            value = getattr(args, flag[2:].replace("-", "_"), None)
            if value is None:
                continue
            if generator.name != name:
                chosen = "none was chosen" if name is None else f"{name} was chosen"
                raise ArgumentsError(
                    f"{flag} is for {generator.name}, but {chosen}; leave it out, or use "
                    f"--pipeline-schedule {generator.name}"
                )
            said[key] = value
    return said


def _costs(args: Namespace) -> Costs | None:
    text = getattr(args, "pipeline_costs", None)
    if text is None:
        return None
    try:
        return Costs.parse(text)
    except ScheduleError as error:
        raise ArgumentsError(f"--pipeline-costs: {error}") from error


def _length_costs(args: Namespace) -> LengthCost | None:
    text = getattr(args, "pipeline_length_costs", None)
    if text is None:
        return None
    try:
        return LengthCost.parse(text)
    except ScheduleError as error:
        raise ArgumentsError(f"--pipeline-length-costs: {error}") from error
