"""Translates a schedule's placement of stages into Megatron's flags, and checks the user's own.

Five groups of Megatron's flags, which exclude each other, split a model into stages: the number of
virtual stages, their number of layers, a layout, the segments of a hybrid pattern, and uneven first
and last ranks. A table fixes the number of stages; the user's flags must not contradict it.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.config.pipeline_config import ConfigurationError
from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, get

if TYPE_CHECKING:
    from megatron_ext.config.sized_pipeline import Pipeline
    from megatron_ext.schedules.table.placement import Placement

__all__ = [
    "ModelBuild",
    "build_of",
    "check_ranks",
    "chunks_of_megatron",
    "flags_for",
    "layout_string",
    "layout_text",
    "num_chunks",
    "parse_layout",
]

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


_PLACED = ("linear", "loop", "v", "w")
_LETTERS = {"embedding": "E", "encoder": "e", "decoder": "t", "mtp": "m", "loss": "L"}
"""Letters of Megatron's layout notation, by layer name."""


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
        what, count, by = "stages", len(parse_layout(said.value)), pp
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


@dataclass(frozen=True, kw_only=True)
class ModelBuild:
    """How Megatron hosts a pipeline."""

    pipeline_model_parallel_size: int
    """Pipeline ranks that Megatron sees: half of the real ones if two pipelines are mirrored."""
    virtual_pipeline_model_parallel_size: int | None
    """Model chunks on each rank; None: one."""
    pipeline_model_parallel_layout: str | None
    """The layers of each stage, in Megatron's notation; None: Megatron splits them evenly."""
    replicas: int
    """Data-parallel replicas that Megatron sees on the pipeline ranks: 1, or 2 if mirrored."""
    num_microbatches: int
    """Micro-batches of one such replica in one step."""
    variable_seq_lengths: bool
    """Whether micro-batches may have sequences of different lengths."""
    stages_of: tuple[tuple[int, ...], ...]
    """By pipeline rank in Megatron's eyes: the stages that its chunks are."""

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return sum(map(len, self.stages_of))

    @property
    def num_chunks(self) -> int:
        """Model chunks on each rank."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def overlaps_p2p(self) -> bool:
        """Whether to set Megatron's `overlap_p2p_comm`.

        Our messages bypass it, but Megatron accepts several chunks on two ranks only with it.
        """
        return self.num_chunks > 1 and self.pipeline_model_parallel_size == 2

    @property
    def groups(self) -> dict[str, int | None]:
        """Keywords for `megatron.core.parallel_state.initialize_model_parallel`."""
        return {
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline_model_parallel_size,
        }

    @property
    def transformer(self) -> dict[str, Any]:
        """Keywords for `megatron.core.transformer.TransformerConfig`."""
        varying = {"variable_seq_lengths": True} if self.variable_seq_lengths else {}
        return {
            **self.groups,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
            "overlap_p2p_comm": self.overlaps_p2p,
            "batch_p2p_comm": not self.overlaps_p2p,
            **varying,
        }

    def chunks(self, rank: int) -> list[dict[str, Any]]:
        """Return the keywords to build each of a rank's model chunks with, say a `GPTModel`.

        Args:
            rank: The pipeline rank, `parallel_state.get_pipeline_model_parallel_rank()`.
        """
        return [
            {
                "vp_stage": index if self.num_chunks > 1 else None,
                "pre_process": stage == 0,
                "post_process": stage == self.num_stages - 1,
            }
            for index, stage in enumerate(self.stages_of[rank])
        ]


def build_of(
    pipeline: Pipeline,
    num_layers: int,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
) -> ModelBuild:
    """Return the settings to build the model with.

    Args:
        pipeline: The pipeline to run.
        num_layers: Transformer layers of the model, without those of multi-token prediction.
        mtp_num_layers: Layers of multi-token prediction; None: none.
        layout: The layers of each stage, in Megatron's notation; None: an even split.

    Raises:
        ScheduleError: The layers do not fit the stages of a V or W.
    """
    placement = pipeline.placement
    chunks = placement.num_stages // placement.num_ranks
    if placement.name not in ("linear", "loop"):
        layout = layout_string(num_layers, placement, mtp_num_layers=mtp_num_layers, layout=layout)
    return ModelBuild(
        pipeline_model_parallel_size=placement.num_ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
        replicas=pipeline.twins,
        num_microbatches=pipeline.num_microbatches,
        variable_seq_lengths=pipeline.config.variable_seq_lengths,
        stages_of=placement.stages_of,
    )


def check_ranks(name: str, pp: int, twins: int) -> None:
    """Check that Megatron can host a schedule on a number of pipeline ranks.

    Args:
        name: The schedule.
        pp: Ranks of the whole pipeline world.
        twins: 2 if two mirrored pipelines share them, else 1.

    Raises:
        ConfigurationError: It cannot; the message names numbers that work.
    """
    if pp < 2:
        raise ConfigurationError(
            "{chosen} needs a pipeline, {pipeline_ranks} {pp} makes none; use at least {least}, or "
            "leave {chooser} out",
            chosen=f"schedule {name}",
            chooser="schedule",
            pp=pp,
            least=2 * twins,
        )
    if twins == 2 and (pp % 2 or pp < 4):
        raise ConfigurationError(
            "{chosen} mirrors two pipelines on one set of ranks, so {pipeline_ranks} {pp} must be "
            "even and at least 4; use {near}, or {schedule} zb-v, which accepts any",
            chosen=f"schedule {name}",
            pp=pp,
            near=f"{pp - 1} or {pp + 1}" if pp > 4 else "4",
        )


def parse_layout(text: str) -> list[str]:
    """Return the layers of each stage, a letter each, of a layout in Megatron's notation.

    `(...)*n` and `x*n` are repetitions; commas only structure the text.

    Raises:
        ScheduleError: A letter is no layer.
    """
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        unrolled = re.sub(repeated, lambda match: match[1] * int(match[2]), unrolled)
    unknown = set(unrolled) - set("EtmL|")
    if unknown:
        raise ScheduleError(
            f"{_LAYOUT} {text} has {' and '.join(sorted(unknown))}, but layers are E, t, m and L; "
            "use these"
        )
    return unrolled.split("|")


def layout_text(layout: Any) -> str | None:
    """Return a layout in Megatron's notation; configuration objects may name the layers."""
    given = getattr(layout, "input_data", layout)
    if given is None or isinstance(given, str):
        return given
    names = [[getattr(layer, "name", layer) for layer in stage] for stage in given]
    return "|".join("".join(_LETTERS[name] for name in stage) for stage in names)


def layout_string(
    num_layers: int,
    placement: Placement,
    *,
    mtp_num_layers: int | None = None,
    layout: str | None = None,
) -> str:
    """Return the layout string for a model on a placement, in upstream's notation.

    Args:
        num_layers: Transformer layers, not counting MTP layers.
        placement: Maps stages to ranks.
        mtp_num_layers: Multi-token prediction layers; placed before the loss in the last stage.
        layout: The user's `--pipeline-model-parallel-layout`. Checked and returned unchanged.

    Raises:
        ScheduleError: The layers do not divide evenly, the user's layout does not fit, or no model
            can be built on the placement.
    """
    if placement.name not in _PLACED:
        raise ScheduleError(
            f"no model can have its stages on ranks {placement.rank_of}; place the stages of the "
            f"table as {', '.join(_PLACED)} (see megatron-ext plan)"
        )
    mtp = mtp_num_layers or 0
    if layout is not None:
        _check_layout(layout, num_layers, placement, mtp)
        return layout
    each, rest = divmod(num_layers, placement.num_stages)
    if rest:
        raise ScheduleError(_uneven(num_layers, placement, mtp))
    return _spelled([each] * placement.num_stages, mtp)


def _spelled(layers: list[int], mtp: int) -> str:
    return "E" + "|".join("t" * count for count in layers) + "m" * mtp + "L"


def _check_layout(layout: str, num_layers: int, placement: Placement, mtp: int) -> None:
    stages = parse_layout(layout)
    if len(stages) != placement.num_stages:
        raise ScheduleError(_wrong_number(layout, len(stages), placement))
    if "".join(stages) != f"E{'t' * num_layers}{'m' * mtp}L":
        raise ScheduleError(
            f"{_LAYOUT} {layout}: give E once, t {num_layers} times (--num-layers), m {mtp} times "
            "(--mtp-num-layers) and L once, in this order"
        )
    if any("m" in stage for stage in stages[:-1]):
        raise ScheduleError(
            f"{_LAYOUT} {layout} has m before the last stage, but all stages of this schedule "
            "exchange tensors of one shape; put m and L into the last stage"
        )


def _wrong_number(layout: str, found: int, placement: Placement) -> str:
    ranks = placement.num_ranks
    return (
        f"{_LAYOUT} {layout} has {found} stages, but the schedule has {placement.num_stages} "
        f"({ranks} ranks with {placement.num_stages // ranks} each); separate that many with |"
    )


def _uneven(num_layers: int, placement: Placement, mtp: int) -> str:
    stages = placement.num_stages
    fewer, rest = divmod(num_layers, stages)
    fitting = [str(count * stages) for count in (fewer, fewer + 1) if count]
    # Give the remainder to the middle stages: the ends also compute embedding and loss.
    start = (stages - rest) // 2
    spread = [fewer + (start <= stage < start + rest) for stage in range(stages)]
    return (
        f"--num-layers {num_layers} does not divide into the schedule's {stages} stages "
        f"({placement.num_ranks} ranks with {stages // placement.num_ranks} each); "
        f"take {' or '.join(fitting)}, or assign layers to stages yourself, for example "
        f"{_LAYOUT} '{_spelled(spread, mtp)}'"
    )
