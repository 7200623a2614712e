"""The training flags that choose a pipeline schedule, for both ways of starting.

`prepare` runs between parsing and Megatron's own validation. It makes the `Choice` of the run,
proves that its tables exist for every batch size, and rewrites the parsed arguments so that
Megatron builds the stages where the table wants them. `check` runs after the validation: what
Megatron computed has to be what the table was made for.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config import (
    batches,
    dynamic_flags,
    megatron_tables,
    randomness,
    stages,
    transport_flags,
)
from megatron_ext.config.choice import (
    TRANSPORTS,
    Choice,
    current,
    for_messages,
    use,
    use_for_messages,
)
from megatron_ext.config.incompatible import (
    refuse_flags,
    refuse_flags_of_dynamic_order,
    refuse_flags_of_table,
    refuse_flags_with_microbatch_rng,
)
from megatron_ext.config.proof import prove
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules import comparison
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, get, registered
from megatron_ext.schedules.representation.costs import UNIT, Costs

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Option

__all__ = ["add_flags", "check", "prepare"]

_LOG = logging.getLogger(__name__)
_REWRITTEN = "pipeline_flags_rewritten"
"""Where `prepare` keeps (old, new) of the arguments that it changed, for the next time."""


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags that choose a schedule; those of options come from the registered schedules."""
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
                help=f"Of --pipeline-schedule {generator.name} (default: {values[0]}).",
            )
    transport_flags.add_flags(group)
    group.add_argument(
        "--pipeline-costs",
        metavar="F,I,W[,LATENCY]",
        help="Times of forward, input gradient and weight gradient on 1/pp of the model, and of a "
        f"message, that the schedule is made and simulated for (default: {UNIT}).",
    )
    dynamic_flags.add_flags(group)
    group.add_argument(
        "--microbatch-rng",
        action="store_true",
        help="Draw dropout masks by iteration, stage and micro-batch, so that all schedules, "
        "Megatron's own too, draw the same ones. Always so with --use-dpp.",
    )


def prepare(args: Namespace, *, tables: bool = True) -> None:
    """Turn the flags into the `Choice` of this process, and the arguments into what Megatron needs.

    A schedule of two mirrored pipelines on D ranks is hosted as a pipeline of D/2 ranks with twice
    as many data-parallel replicas. Where stages are placed as a V or W, Megatron is given a layout.
    Calling it again with the same arguments, which upstream's tools may do, changes nothing.

    Args:
        args: Parsed arguments with upstream's names; changed in place.
        tables: Whether a schedule may be chosen here; else something else has chosen already, and
            this only sees to random numbers.

    Raises:
        ArgumentsError: The flags contradict each other or the schedule.
        ScheduleError: There is no such schedule, or none for these sizes.
    """
    use(None)
    randomness.use(None)
    _restore(args)
    dynamic = dynamic_flags.dynamic(args)
    if dynamic is not None or getattr(args, "microbatch_rng", False):
        refuse_flags_with_microbatch_rng(args)
        randomness.use(args.seed)
    if not tables:
        return
    name = _chosen(args)
    options = _options(args, name)
    if name is None:
        _prepare_messages(args)
        return
    refuse_flags(name, args)
    twins = 1 if name.startswith(CSV_PREFIX) else get(name).twins
    pp = _pipeline_ranks(args, name, twins)
    sizes = batches.sizes(args, pp, twins)
    transport = transport_flags.transport(args)
    choice = Choice(
        name,
        pp,
        sizes.num_microbatches,
        stages.num_chunks(args, name),
        options,
        _costs(args),
        transport_flags.timeout_s(args),
        transport,
        dynamic,
        transport_flags.node_ips(args),
        transport_flags.device_path(args, transport),
        transport_flags.checksums(args, transport),
    )
    prove(args, choice, sizes)
    refuse_flags_of_table(name, args, choice.schedule(choice.num_microbatches))
    if dynamic is not None:
        refuse_flags_of_dynamic_order(args, choice.placement)
    wanted = stages.flags_for(args, choice)
    if getattr(args, "use_distributed_optimizer", False):
        wanted["dist_ckpt_optim_fully_reshardable"] = True
        if not args.dist_ckpt_optim_fully_reshardable and (args.save or args.load):
            _tell(
                args,
                "--dist-ckpt-optim-fully-reshardable is set: optimizer state that is saved in "
                "another form cannot be loaded under another schedule",
            )
    _rewrite(args, wanted)
    use(choice)


def _chosen(args: Namespace) -> str | None:
    """Return the name of the schedule, or None where nothing of ours was asked for."""
    name: str | None = getattr(args, "pipeline_schedule", None)
    if getattr(args, "enable_bitpipe_schedule", False):
        if name not in (None, "bitpipe"):
            raise ArgumentsError(
                f"--enable-bitpipe-schedule and --pipeline-schedule {name} name two schedules; "
                "leave one of them out"
            )
        name = "bitpipe"
    if name is None and getattr(args, "use_dpp", False):
        name = dynamic_flags.base_table(args)
    if name is None and getattr(args, "pipeline_costs", None) is not None:
        raise ArgumentsError(
            "--pipeline-costs is for schedules of this package; add --pipeline-schedule NAME"
        )
    return name


def _prepare_messages(args: Namespace) -> None:
    """Let Megatron's own schedule send over `--pipeline-transport`, where that was asked for."""
    transport = transport_flags.transport(args)
    path = transport_flags.device_path(args, transport)
    checksums = transport_flags.checksums(args, transport)
    if transport != TRANSPORTS[0]:
        choice = megatron_tables.choice(args, transport, transport_flags.timeout_s(args))
        ips = transport_flags.node_ips(args)
        use_for_messages(replace(choice, node_ips=ips, device_path=path, checksums=checksums))


def _options(args: Namespace, name: str | None) -> dict[str, Option]:
    """Return what was said about the schedule; what was said about another one is an error."""
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
                    f"{flag} is for {generator.name}, and {chosen}; leave it out, or take "
                    f"--pipeline-schedule {generator.name}"
                )
            said[key] = value
    return said


def _costs(args: Namespace) -> Costs:
    text = getattr(args, "pipeline_costs", None)
    if text is None:
        return UNIT
    try:
        return Costs.parse(text)
    except ScheduleError as error:
        raise ArgumentsError(f"--pipeline-costs: {error}") from error


def _given_by(args: Namespace, name: str) -> tuple[str, str]:
    """Return the flag that chose a schedule, with and without its value."""
    if getattr(args, "pipeline_schedule", None) is not None:
        return f"--pipeline-schedule {name}", "--pipeline-schedule"
    flag = "--enable-bitpipe-schedule" if name == "bitpipe" else "--use-dpp"
    return flag, flag


def _pipeline_ranks(args: Namespace, name: str, twins: int) -> int:
    """Return `--pipeline-model-parallel-size`, D, after checking that Megatron can host it."""
    pp: int = args.pipeline_model_parallel_size
    flag = f"--pipeline-model-parallel-size {pp}"
    if pp < 2:
        given, remedy = _given_by(args, name)
        raise ArgumentsError(
            f"{given} needs a pipeline, {flag} is none; take at least {2 * twins}, or leave "
            f"{remedy} out"
        )
    if twins == 2 and (pp % 2 or pp < 4):
        near = f"{pp - 1} or {pp + 1}" if pp > 4 else "4"
        raise ArgumentsError(
            f"{_given_by(args, name)[0]} mirrors two pipelines on one set of ranks, so {flag} must "
            f"be even and at least 4; take {near}, or --pipeline-schedule zb-v, which takes any"
        )
    return pp


def _rewrite(args: Namespace, wanted: dict[str, Any]) -> None:
    """Set arguments, and remember on the namespace what they were."""
    setattr(args, _REWRITTEN, {k: (getattr(args, k, None), new) for k, new in wanted.items()})
    for dest, value in wanted.items():
        setattr(args, dest, value)


def _restore(args: Namespace) -> None:
    """Undo `_rewrite`, but for what was changed again since."""
    for dest, (old, new) in getattr(args, _REWRITTEN, {}).items():
        if getattr(args, dest, None) == new:
            setattr(args, dest, old)
    if hasattr(args, _REWRITTEN):
        delattr(args, _REWRITTEN)


def check(args: Namespace) -> None:
    """Compare the arguments as Megatron completed them with the schedule; tell which one runs.

    Raises:
        ArgumentsError: Megatron computed another size than the tables were made for, or builds
            layers that the schedule cannot use.
    """
    served = for_messages()
    if served is not None:
        _tell(args, f"pipeline schedule: Megatron's own; messages over {served.transport}")
    choice = current()
    if choice is None:
        return
    placement = choice.placement
    found = {
        "pipeline ranks": (args.pipeline_model_parallel_size, placement.num_ranks),
        "chunks": (
            getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            placement.num_stages // placement.num_ranks,
        ),
        "micro-batches": (
            args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
            choice.num_microbatches,
        ),
    }
    for what, (megatrons, ours) in found.items():
        if megatrons != ours:
            use(None)
            raise ArgumentsError(
                f"--pipeline-schedule {choice.name} was prepared for {ours} {what}, but Megatron "
                f"made {megatrons} of the flags; leave out what changes it"
            )
    choice = _with_splittable_layers(args, choice)
    use(choice)
    if getattr(args, "rank", 0) == 0:
        _tell(args, "%s", _running(choice))
        slower = dynamic_flags.warning(choice) if choice.dynamic is not None else None
        if slower is not None:
            _tell(args, "%s", slower)


def _with_splittable_layers(args: Namespace, choice: Choice) -> Choice:
    """Return the choice that the layers of Transformer Engine can run.

    Raises:
        ArgumentsError: They cannot do what a split backward asks of them, and the table has some.
    """
    if not choice.schedule(choice.num_microbatches).splits_backward:
        return choice
    from megatron_ext.schedules.runtime.te_layers import left_whole, why_not

    reason = why_not(Namespace(**{"tp_comm_overlap": False, **vars(args)}))
    if reason is None:
        notice = left_whole(args)
        if notice is not None:
            _tell(args, "--pipeline-schedule %s: %s", choice.name, notice)
        return choice
    if choice.dynamic is not None:
        whole = replace(choice, dynamic=replace(choice.dynamic, splits=False))
        if not whole.schedule(choice.num_microbatches).splits_backward:
            _tell(args, "--use-dpp leaves backwards whole: %s", reason)
            return whole
    other = "--bitpipe-order paper" if choice.name == "bitpipe" else "1f1b or interleaved"
    raise ArgumentsError(
        f"--pipeline-schedule {choice.name} splits backwards, but {reason}; or take {other}, "
        "which does not split them"
    )


def _running(choice: Choice) -> str:
    """Say what runs, as simulated."""
    if choice.dynamic is None:
        timeline = comparison.evaluate(choice.schedule(choice.num_microbatches), choice.costs)
        order = ""
    else:
        timeline = dynamic_flags.timeline(choice, choice.costs)
        order = f"{dynamic_flags.running(choice)}; "
    schedule = timeline.schedule
    hosted = f" (two mirrored pipelines of {choice.pp // 2})" if choice.twins == 2 else ""
    return (
        f"pipeline schedule: {schedule.label} on {choice.pp} ranks{hosted}, "
        f"{schedule.total_microbatches} micro-batches: {order}bubble {timeline.bubble:g} "
        f"({100 * timeline.bubble_ratio:.1f} %), peak {timeline.peak_activations:g} activations, "
        f"simulated for costs {choice.costs}; messages over {choice.transport}"
    )


def _tell(args: Namespace, message: str, *values: object) -> None:
    """Tell the user once. As a warning: a script that sets up no logging shows nothing below it."""
    if getattr(args, "rank", 0) == 0:
        _LOG.warning(message, *values)
