"""Translates a schedule's placement of stages into Megatron's flags, and checks the user's own.

Five groups of Megatron's flags, which exclude each other, split a model into stages: the number of
virtual stages, their number of layers, a layout, the segments of a hybrid pattern, and uneven first
and last ranks. A table fixes the number of stages; the user's flags must not contradict it.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.config.build import build_of
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, get

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline

__all__ = ["chunks_of_megatron", "flags_for", "num_chunks"]

_LAYOUT = "--pipeline-model-parallel-layout"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_PATTERN = "--hybrid-layer-pattern"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
"""Arguments that allow stages with different numbers of layers."""


class _Said(NamedTuple):
    """A flag about the stages of each rank."""

    flag: str
    value: Any

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"


def _said(args: Namespace) -> _Said | None:
    found = []
    for flag in (_LAYOUT, _CHUNKS, _LAYERS):
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value is not None:
            found.append(_Said(flag, value))
    pattern = _pattern(args)
    if pattern is not None and "|" in pattern:
        found.append(_Said(_PATTERN, pattern))
    if len(found) > 1:
        raise ArgumentsError(f"{found[0].flag} and {found[1].flag} exclude each other: give one")
    return found[0] if found else None


def _chunks_of(said: _Said, args: Namespace) -> int:
    """Return the stages of each rank under the user's flag, as Megatron counts them."""
    pp = args.pipeline_model_parallel_size
    if said.flag == _CHUNKS:
        return int(said.value)
    if said.flag == _LAYOUT:
        what, count, by = "stages", _stages_in(said.value), pp
    elif said.flag == _PATTERN:
        what, count, by = "segments", said.value.count("|") + 1, pp
    else:
        what, count, by = "layers", _num_split(args), pp * said.value
    if by < 1 or count % by:
        raise ArgumentsError(
            f"{said} does not spread {count} {what} evenly over "
            f"--pipeline-model-parallel-size {pp}; change one of them"
        )
    return int(count // by)


def _stages_in(layout: str) -> int:
    """Count the stages of a layout string; `(...)*n` and `x*n` are repetitions."""
    unrolled = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repeated, lambda match: match[1] * int(match[2]), unrolled)
    return unrolled.count("|") + 1


def _pattern(args: Namespace) -> str | None:
    """Return the layers of a hybrid model, one letter each, with `|` between stages; else None.

    From 0.17 on they replace `--num-layers`. In 0.16 `--hybrid-override-pattern` stands beside it.
    """
    if not hasattr(args, "hybrid_layer_pattern"):
        return None
    pattern = args.hybrid_layer_pattern or getattr(args, "hybrid_override_pattern", None)
    return pattern.split("/")[0] if pattern else None  # after it: multi-token prediction


def _num_layers(args: Namespace) -> int:
    pattern = _pattern(args)
    count = args.num_layers if pattern is None else len(pattern.replace("|", ""))
    if count is None:
        count = getattr(args, "encoder_num_layers", None)
    if not count or count < 1:
        missing = "--num-layers is missing" if pattern is None else f"{_PATTERN} has no layers"
        raise ArgumentsError(f"{missing}: give it a value of at least 1")
    return int(count)


def _num_split(args: Namespace) -> int:
    """Return the number of layers that Megatron splits evenly, with embedding and loss if set."""
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return _num_layers(args) + sum(bool(getattr(args, dest, False)) for dest in extra)


def chunks_of_megatron(args: Namespace) -> int:
    """Return the stages of each rank under Megatron's own schedule.

    Raises:
        ArgumentsError: The flags contradict each other, or do not divide.
    """
    said = _said(args)
    return 1 if said is None else _chunks_of(said, args)


def num_chunks(args: Namespace, name: str) -> int | None:
    """Return the stages of each rank if the schedule leaves them to the user, else None.

    Raises:
        ArgumentsError: The flags contradict each other, or do not divide.
    """
    if name.startswith(CSV_PREFIX) or not get(name).free_chunks:
        return None
    said = _said(args)
    if said is None:
        return get(name).num_chunks
    chunks = _chunks_of(said, args)
    if chunks < 2:
        raise ArgumentsError(
            f"--pipeline-schedule {name} needs several stages on each rank, but {said} makes "
            f"{chunks}; use --pipeline-schedule 1f1b, or {_CHUNKS} 2"
        )
    return chunks


def flags_for(args: Namespace, pipeline: Pipeline) -> dict[str, Any]:
    """Return the arguments, by name, that make Megatron build the stages of a schedule.

    Raises:
        ArgumentsError: The user's flags contradict the schedule.
        ScheduleError: The layers of the model do not fit its stages.
    """
    said = _said(args)
    deals_out = pipeline.placement.name in ("linear", "loop")
    _check_said(args, said, pipeline, deals_out=deals_out)
    build = build_of(
        pipeline,
        _num_layers(args),
        mtp_num_layers=getattr(args, "mtp_num_layers", None),
        layout=said.value if said is not None and said.flag == _LAYOUT else None,
    )
    wanted: dict[str, Any] = {"pipeline_model_parallel_size": build.pipeline_model_parallel_size}
    if build.overlaps_p2p:
        wanted["overlap_p2p_comm"] = True
    if not deals_out:
        wanted["pipeline_model_parallel_layout"] = build.pipeline_model_parallel_layout
    elif said is None and build.num_chunks > 1:
        wanted["num_virtual_stages_per_pipeline_rank"] = build.num_chunks
    return wanted


def _check_said(
    args: Namespace, said: _Said | None, pipeline: Pipeline, *, deals_out: bool
) -> None:
    """Refuse flags about stages that contradict the schedule.

    Args:
        args: Parsed arguments.
        said: The flag among them about the stages of each rank, if any.
        pipeline: The pipeline that they must fit.
        deals_out: Whether stages are placed round-robin, Megatron's default.
    """
    chunks = pipeline.placement.num_stages // pipeline.placement.num_ranks
    if not deals_out:
        if said is not None and said.flag != _LAYOUT:
            raise ArgumentsError(
                f"--pipeline-schedule {pipeline.name} places {chunks} stages on each rank, "
                f"which excludes {said}; leave it out, or use --pipeline-schedule interleaved"
            )
        return
    if said is not None and _chunks_of(said, args) != chunks:
        number = "one stage" if chunks == 1 else f"{chunks} stages"
        remedy = "leave it out"
        if said.flag == _PATTERN:
            remedy = f"give it {pipeline.placement.num_stages} segments"
        raise ArgumentsError(
            f"--pipeline-schedule {pipeline.name} has {number} on each rank, {said} makes "
            f"{_chunks_of(said, args)}; {remedy}, or use --pipeline-schedule interleaved"
        )
    _check_layers(args, pipeline)


def _check_layers(args: Namespace, pipeline: Pipeline) -> None:
    """Check the number of layers early; Megatron would fail while it builds the model."""
    pattern = _pattern(args) or ""
    if "|" in pattern or any(getattr(args, dest, None) is not None for dest in _UNEVEN):
        return
    if any(getattr(args, dest, None) is not None for dest in _ENDS):
        _check_ends(args, pipeline)
        return
    layers, stages = _num_split(args), pipeline.placement.num_stages
    if pattern and stages > pipeline.placement.num_ranks and layers % stages == 0:
        each = layers // stages
        cut = "|".join(pattern[start : start + each] for start in range(0, layers, each))
        raise ArgumentsError(
            f"{_PATTERN} {pattern} has one segment, but --pipeline-schedule {pipeline.name} needs "
            f"one for each of {stages} stages; use {_PATTERN} '{cut}'"
        )
    if layers % stages:
        extra = layers - _num_layers(args)
        fitting = [n * stages - extra for n in (layers // stages, layers // stages + 1)]
        counted = ", embedding and loss included," if extra else ""
        raise ScheduleError(
            f"{layers} layers{counted} do not divide into the {stages} stages of "
            f"--pipeline-schedule {pipeline.name}; use --num-layers "
            f"{' or '.join(str(n) for n in fitting if n > 0)}, or give each stage its layers "
            f"with {_LAYOUT}"
        )


def _check_ends(args: Namespace, pipeline: Pipeline) -> None:
    """Check layers of the first and the last rank, which each rank spreads over its chunks."""
    ranks = pipeline.placement.num_ranks
    chunks = pipeline.placement.num_stages // ranks
    ends = {f"--{dest.replace('_', '-')}": getattr(args, dest, None) for dest in _ENDS}
    given = {flag: int(count) for flag, count in ends.items() if count is not None}
    middle, between = _num_layers(args) - sum(given.values()), ranks - len(given)
    wrong = [f"{flag} {count}" for flag, count in given.items() if count < 1 or count % chunks]
    if middle < between or (middle % (between * chunks) if between else middle):
        wrong.append(f"the {middle} layers between them on {between} ranks")
    if not wrong:
        return
    if chunks > 1:
        remedy = f"use multiples of {chunks}, zb-h1, which has one stage on each rank,"
    else:
        remedy = f"use another number, such as one that leaves a multiple of {between},"
    raise ScheduleError(
        f"{' and '.join(wrong)} do not fit --pipeline-schedule {pipeline.name}, which has "
        f"{'one stage' if chunks == 1 else f'{chunks} stages'} on each rank; {remedy} or give each "
        f"stage its layers with {_LAYOUT}"
    )
