"""Computes the arguments that make Megatron cut its model into a schedule's stages."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from megatron_ext.config.cut import EVEN_CUT, LAYOUT, PATTERN, UserCut
from megatron_ext.errors import ArgumentsError, ConfigurationError, ScheduleError
from megatron_ext.schedules.table.cuts import layout_of, parse_layout, spread

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.schedules.table.placement import Placement

# Placements that assign stages round-robin, as Megatron does.
_DEALT = ("linear", "loop")
_PLACED = (*_DEALT, "v", "w")


@dataclass
class StageArguments:
    """Arguments that make Megatron build a schedule's stages."""

    values: dict[str, Any]
    """Values by Megatron's argument names."""
    changes: list[str] = field(default_factory=list)
    """Sentences about the user's settings that these arguments replace."""


def stage_arguments(
    args: Namespace,
    cut: UserCut,
    placement: Placement,
    subject: str,
) -> StageArguments:
    """Return the arguments that make Megatron build a schedule's stages.

    `subject` is the flag that chose the schedule, for messages.

    Raises:
        ArgumentsError: The user's flags contradict each other.
        ScheduleError: The model cannot have these stages.
    """
    num_ranks = placement.num_ranks
    chunks = placement.num_stages // num_ranks
    is_auto = getattr(args, "pipeline_layout", None) == "auto"
    chosen = cut.chosen
    _check_cut(cut, chunks, subject, is_auto=is_auto)
    built = StageArguments({"pipeline_model_parallel_size": num_ranks})
    if chunks > 1 and num_ranks == 2:
        built.values["overlap_p2p_comm"] = True  # see ModelBuild.transformer
    # The table determines the number of stages. If the user's cut has that number, keep
    # it. Otherwise, only use it to derive how much the ends compute besides their
    # layers, and spread the layers evenly.
    is_dealt = placement.name in _DEALT
    makes_stages = is_dealt and cut.layers_by_stage(placement) is not None
    if makes_stages and not is_auto:
        if chosen is None and chunks > 1:
            built.values["num_virtual_stages_per_pipeline_rank"] = chunks
        return built
    # A layout or pattern replaces the user's other flags for the cut.
    replaced = {}
    for dest in EVEN_CUT:
        value = getattr(args, dest, None)
        if value:
            replaced[dest] = value
    if cut.is_hybrid:
        _cut_pattern(built, args, cut, placement, subject, replaced)
    elif is_auto:
        # Imported here because importing the planner takes time and only `auto` needs
        # it.
        from megatron_ext.planning.training_cut import layout_for

        layout = layout_for(args, placement)
        _lay_out(built, cut, placement, subject, replaced, layout, is_auto=True)
    else:
        weights = cut.end_weights(num_ranks)
        layout = layout_string(
            cut.num_layers,
            placement,
            mtp_num_layers=cut.sizes.mtp_num_layers,
            layout=cut.layout,
            first=weights.first,
            last=weights.last,
        )
        _lay_out(built, cut, placement, subject, replaced, layout, is_auto=False)
    return built


def _check_cut(
    cut: UserCut,
    chunks: int,
    subject: str,
    *,
    is_auto: bool,
) -> None:
    """Reject cuts that do not fit this model or the schedule's stages."""
    num_layers = cut.num_layers
    if cut.layout is not None:
        _check_letters(cut.layout, num_layers, cut.sizes.mtp_num_layers)
    # Megatron builds these layers, and computes their offsets, without a chunk number.
    if chunks > 1 and cut.layer_description is not None:
        raise ArgumentsError(
            f"{subject} has {chunks} stages on each rank, but Megatron builds the layers of "
            f"--{cut.layer_description.replace('_', '-')} only for one stage; use "
            "--pipeline-schedule=zb-h1 or 1f1b"
        )
    if is_auto and (cut.layout is not None or cut.is_hybrid):
        user_cut = "the pattern of a hybrid model"
        if cut.layout is not None:
            user_cut = f"{LAYOUT}={cut.layout}"
        raise ArgumentsError(
            f"--pipeline-layout=auto cuts the layers, and so does {user_cut}; remove one of them"
        )


def _cut_pattern(
    built: StageArguments,
    args: Namespace,
    cut: UserCut,
    placement: Placement,
    subject: str,
    replaced: dict[str, Any],
) -> None:
    """Cut a hybrid model's pattern into a placement's stages."""
    num_layers = cut.num_layers
    num_stages = placement.num_stages
    # In 0.16, a hybrid model has no pattern with cuts, so Megatron spreads its layers evenly.
    if cut.pattern is None:
        if placement.name not in _DEALT:
            return  # RULES["folded"] rejects this
        fewer = num_layers // num_stages * num_stages
        fitting = str(fewer + num_stages)
        if fewer:
            fitting = f"{fewer} or {fitting}"
        raise ScheduleError(
            f"{num_layers} layers of a hybrid model do not divide evenly among the {num_stages} "
            f"stages of {subject}; use --num-layers={fitting}"
        )
    if cut.pattern.count("|") + 1 == num_stages:
        return
    letters = iter(cut.pattern.replace("|", ""))
    weights = cut.end_weights(placement.num_ranks)
    counts = spread(
        num_layers,
        num_stages,
        weights.first,
        weights.last,
        placement.rank_of,
    )
    segments = ["".join(islice(letters, count)) for count in counts]
    segments_text = "|".join(segments)
    user_pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    # Keep the multi-token prediction layers, which follow the first "/".
    new_pattern = user_pattern.replace(cut.pattern, segments_text, 1)
    built.values["hybrid_layer_pattern"] = new_pattern
    built.values |= dict.fromkeys(replaced)
    if getattr(args, "hybrid_override_pattern", None):
        # Former name of the same argument.
        built.values["hybrid_override_pattern"] = None
    built.changes.append(f"the stages of {subject}: {PATTERN} '{new_pattern}'")


def _lay_out(
    built: StageArguments,
    cut: UserCut,
    placement: Placement,
    subject: str,
    replaced: dict[str, Any],
    layout: str,
    *,
    is_auto: bool,
) -> None:
    """Replace the user's cut with a layout and record the change."""
    num_layers = cut.num_layers
    num_stages = placement.num_stages
    # Megatron accepts none of these flags together with a layout.
    for dest, value in replaced.items():
        built.values[dest] = False if value is True else None
    built.values["pipeline_model_parallel_layout"] = layout
    # An even cut needs no notice, unless the user chose `auto`.
    has_user_cut = bool(replaced) or cut.layout is not None
    is_even = not has_user_cut and num_layers % num_stages == 0
    if layout != cut.layout and (is_auto or not is_even):
        former = [f"--{dest.replace('_', '-')}" for dest in replaced]
        if cut.layout is not None:
            former.append(f"{LAYOUT}={cut.layout}")
        change = f"the {num_stages} stages of {subject}: {LAYOUT} '{layout}'"
        if former:
            change += f" in place of {', '.join(former)}"
        built.changes.append(change)
    if num_layers < num_stages:
        built.changes.append(
            f"{num_stages - num_layers} of the {num_stages} stages of {subject} have no layers, so "
            f"their ranks idle; use --num-layers={num_stages} or more, or fewer ranks"
        )


def layout_string(
    num_layers: int,
    placement: Placement,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
    first: float = 0,
    last: float | None = None,
) -> str:
    """Return the layout for a model on a placement, in Megatron's notation.

    The user's layout is returned unchanged if its stages match the placement.

    Args:
        num_layers: Number of layers, excluding multi-token prediction.
        placement: The rank of each stage.
        mtp_num_layers: Number of multi-token prediction layers.
        layout: The user's layout, if any.
        first: Work in the first stage besides its layers, in units of one layer.
        last: Work in the last stage besides its layers. Default: the multi-token prediction layers.

    Raises:
        ScheduleError: The layout does not fit this model, or no model can be built on the
            placement.
    """
    if placement.name not in _PLACED:
        raise ScheduleError(
            f"no model can be built with its stages on ranks {placement.rank_of}; place the stages "
            f"of the table as {', '.join(_PLACED)} (see megatron-ext plan)"
        )
    mtp = mtp_num_layers or 0
    num_stages = placement.num_stages
    if layout is not None:
        _check_letters(layout, num_layers, mtp)
        stages = parse_layout(layout)
        # A stage with multi-token prediction before the last stage sends tensors of a
        # different shape, which folded pipelines do not announce.
        has_early_mtp = any("m" in stage for stage in stages[:-1])
        can_send_shapes = placement.name in _DEALT or not has_early_mtp
        if len(stages) == num_stages and can_send_shapes:
            return layout
    if last is None:
        last = mtp
    # Balance ranks as well as stages: otherwise, 40 layers under zb-v on 8 ranks become
    # 4 layers on some ranks and 6 on others, and the forecast step time is 4 % longer.
    counts = spread(num_layers, num_stages, first, last, placement.rank_of)
    per_stage, num_left_over = divmod(num_layers, num_stages)
    # Prefer even stages if this does not lengthen the longest stage.
    longest = max(*counts, counts[0] + first, counts[-1] + last)
    longest_if_even = per_stage + max(first, last)
    if not num_left_over and longest_if_even <= longest:
        counts = [per_stage] * num_stages
    return layout_of(counts, mtp)


def _check_letters(layout: str, num_layers: int, mtp: int) -> None:
    letters = "".join(parse_layout(layout))
    if letters != f"E{'t' * num_layers}{'m' * mtp}L":
        raise ScheduleError(
            f"{LAYOUT}={layout} must have E once, t {num_layers} times (--num-layers), m {mtp} "
            "times (--mtp-num-layers) and L once, in this order; remove it"
        )


def chooser(args: Namespace, config: PipelineConfig) -> str:
    """Return the flag that chose the schedule, with its value, as `errors.reworded` expects."""
    if getattr(args, "pipeline_schedule", None) is None:
        if getattr(args, "enable_bitpipe_schedule", None):
            return "--enable-bitpipe-schedule"
        if getattr(args, "use_dpp", None):
            return "--use-dpp"
    return f"--pipeline-schedule={config.schedule}"


def check_ranks(args: Namespace, config: PipelineConfig) -> None:
    """Reject a number of ranks on which Megatron cannot host the schedule.

    Raises:
        ConfigurationError: There are too few ranks, or an odd number for mirrored pipelines.
    """
    pp = args.pipeline_model_parallel_size
    # Name the schedule the way the user chose it: by --pipeline-schedule or a field, or
    # by a switch such as --use-dpp.
    schedule = "{schedule:{c.schedule}}"
    switch = "{schedule}"
    flag, _, name = chooser(args, config).partition("=")
    if not name:
        schedule = flag
        switch = flag
    if pp < 2:
        raise ConfigurationError(
            f"{schedule} needs a pipeline of at least 2 ranks, not {{pipeline_ranks:{pp}}}; use "
            f"{{pipeline_ranks:{2 * config.twins}}}, or remove {switch}",
            c=config,
        )
    fits_twins = pp % 2 == 0 and pp >= 4
    if config.twins == 2 and not fits_twins:
        fitting = "{pipeline_ranks:4}"
        if pp > 4:
            fitting = f"{{pipeline_ranks:{pp - 1}}} or {pp + 1}"
        raise ConfigurationError(
            f"{schedule} mirrors two pipelines on one set of ranks, so {{pipeline_ranks:{pp}}} "
            f"must be even and at least 4; use {fitting}, or {{schedule:zb-v}}, which accepts any",
            c=config,
        )
