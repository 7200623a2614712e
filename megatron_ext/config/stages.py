"""The stages of a job: how its sizes complete a configuration and cut the model.

Five groups of Megatron's flags, which exclude each other, split a model into stages: the number of
virtual stages, their number of layers, a layout, the segments of a hybrid pattern, and uneven first
and last ranks.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ArgumentsError, ConfigurationError, ScheduleError
from megatron_ext.schedules.generators.catalog import base_table
from megatron_ext.schedules.table.cuts import layout_of, parse_layout, spread
from megatron_ext.schedules.table.memory import stash_ratio

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.schedules.table.placement import Placement

_LAYOUT = "--pipeline-model-parallel-layout"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_PATTERN = "--hybrid-layer-pattern"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_HYBRID = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
# Arguments with a file or text that describes each layer.
_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")

# Placements that deal stages out round-robin, as Megatron does.
_DEALT = ("linear", "loop")
_PLACED = (*_DEALT, "v", "w")


def _cut_flag(args: Namespace) -> tuple[str, Any]:
    """Return the user's one flag about the stages of each rank and its value, or two empty ones."""
    values = {flag: vars(args).get(_dest(flag)) for flag in (_LAYOUT, _CHUNKS, _LAYERS)}
    pattern = _pattern(args) or ""
    found = {**values, _PATTERN: pattern if "|" in pattern else None}.items()
    first, *others = [(flag, value) for flag, value in found if value is not None] or [("", None)]
    if others:
        raise ArgumentsError(
            f"{first[0]} and {others[0][0]} exclude each other; leave one of them out"
        )
    return first


def _dest(flag: str) -> str:
    return flag[2:].replace("-", "_")


def chunks_of_megatron(args: Namespace) -> int:
    """Return the stages of each rank under Megatron's own schedule, as Megatron counts them.

    Raises:
        ArgumentsError: The flags contradict each other, or do not divide.
    """
    (flag, value), pp = _cut_flag(args), args.pipeline_model_parallel_size
    if not flag:
        return 1
    if flag == _CHUNKS:
        return int(value)
    if flag == _LAYOUT:
        what, count, by = "stages", len(parse_layout(value)), pp
    elif flag == _PATTERN:
        what, count, by = "segments", value.count("|") + 1, pp
    else:
        what, count, by = "layers", _num_split(args), pp * value
    if by < 1 or count % by:
        raise ArgumentsError(
            f"{flag} {value} does not spread {count} {what} evenly over "
            f"--pipeline-model-parallel-size {pp}; leave {flag} out"
        )
    return int(count // by)


def _makes(args: Namespace) -> int | None:
    """Return the stages of each rank under the user's flag; None: it does not divide."""
    _cut_flag(args)
    with suppress(ArgumentsError):
        return chunks_of_megatron(args)
    return None


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
    given = getattr(args, "num_layers", None)
    count = given if pattern is None else len(pattern.replace("|", ""))
    if count is None:
        # Megatron's validation, which comes later, takes it where --num-layers is missing.
        count = getattr(args, "encoder_num_layers", None)
    if not count or count < 1:
        missing = "--num-layers is missing" if pattern is None else f"{_PATTERN} has no layers"
        raise ArgumentsError(f"{missing}: give it a value of at least 1")
    return int(count)


def _num_split(args: Namespace) -> int:
    """Return the number of layers that Megatron splits evenly, with embedding and loss if set."""
    return _num_layers(args) + sum(bool(getattr(args, dest, False)) for dest in _COUNTED)


def completed(args: Namespace, config: PipelineConfig) -> PipelineConfig:
    """Return a configuration with what it leaves to the model and the sizes of a job.

    Raises:
        ArgumentsError: What the sizes say about the stages of each rank does not go together.
    """
    # Roles bring their schedule along, whose stages Megatron makes of its own flags.
    if config.disaggregation is not None:
        # Both roles must draw the same numbers, and flags do not tell all that a model draws.
        return replace(config, microbatch_rng=True)
    if config.schedule is None and config.dynamic is not None:
        config = replace(config, schedule=base_table(chunks_of_megatron(args)))
    if config.schedule is None:
        return config
    generator, chunks = config.generator, config.chunks
    if chunks is None and generator is not None and generator.free_chunks:
        # One stage on each rank, or a cut that does not divide, is no number of chunks: the
        # schedule has its own, and `flags_for` cuts the model by it.
        made = _makes(args)
        chunks = made if made is not None and made > 1 else generator.num_chunks
    pairs, given = config.pairs, vars(args).get
    # The sizes that `configure` is given say nothing of experts: then the program's word counts.
    if "num_experts" in args or not pairs:
        # Pairs hide the communication of experts, which one rank alone does not have.
        is_spread = given("num_experts") and (given("expert_model_parallel_size") or 1) > 1
        # Rules drop the flag there, with a line (`incompatible.dropped`).
        unpaired = config.slices > 1 or any(
            map(given, ("fp4", "sft", "dataloader_inter_document_masking"))
        )
        wanted = given("overlap_moe_expert_parallel_comm") and not unpaired
        pairs = bool(is_spread and (pairs or wanted))
    return with_stash(replace(config, chunks=chunks, pairs=pairs), args)


def with_stash(config: PipelineConfig, args: Namespace) -> PipelineConfig:
    """Return a configuration that counts what layers hold between I and W, if it does not yet.

    It follows from Megatron's arguments or a `TransformerConfig`.
    """
    if config.stash_ratio > 1:
        return config
    generator, given = config.generator, vars(args).get
    granularity = "selective" if given("recompute_activations") else given("recompute_granularity")
    whole, at_a_time = 0.0, 1
    if granularity == "full":
        whole, count = 1.0, given("recompute_num_layers") or 1
        if given("recompute_method") == "block":  # so many of each stage
            usual = 1 if generator is None else generator.num_chunks // generator.twins
            recomputed = count * (config.chunks or usual) * args.pipeline_model_parallel_size
            whole = min(1.0, recomputed / (given("num_layers") or recomputed))
        else:
            at_a_time = count
    is_te = given("transformer_impl") == "transformer_engine"
    ratio = stash_ratio(
        given("tensor_model_parallel_size", 1),
        sequence_parallel=bool(given("sequence_parallel")),
        # Megatron's own layers keep their part of a sequence and gather it again.
        keeps_gathered=is_te and find_spec("transformer_engine") is not None,
        recomputed=(granularity == "selective" and given("recompute_modules")) or (),
        offloaded=(given("fine_grained_activation_offloading") and given("offload_modules")) or (),
        recomputed_layers=whole,
        kept_inputs=1 / at_a_time,
        divides_inputs=bool(given("distribute_saved_activations")),
    )
    # The order of a file is the user's.
    at_once = config.weights_at_once or (whole == 1 and generator is not None)
    return replace(config, stash_ratio=ratio, weights_at_once=at_once)


def flags_for(
    args: Namespace, placement: Placement, subject: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that make Megatron build the stages of a schedule, and changed cuts.

    The subject is the flag that chose them.

    Raises:
        ArgumentsError: The user's flags contradict each other.
        ScheduleError: The model cannot have these stages.
    """
    (cut_flag, value), given = _cut_flag(args), vars(args).get
    layers, stages, ranks = _num_layers(args), placement.num_stages, placement.num_ranks
    chunks, mtp = stages // ranks, given("mtp_num_layers") or 0
    wanted: dict[str, Any] = {"pipeline_model_parallel_size": ranks}
    if chunks > 1 and ranks == 2:
        wanted["overlap_p2p_comm"] = True  # see ModelBuild.transformer
    layout = value if cut_flag == _LAYOUT else None
    auto, is_hybrid = given("pipeline_layout") == "auto", any(map(given, _HYBRID))
    if layout is not None:
        _check_letters(layout, layers, mtp)
    # Megatron's builders give these layers no chunk, and their offsets none either.
    if chunks > 1 and (different := [dest for dest in _HETEROGENEOUS if given(dest) is not None]):
        raise ArgumentsError(
            f"{subject} has {chunks} stages on each rank, and Megatron builds the layers of "
            f"--{different[0].replace('_', '-')} for one; use --pipeline-schedule zb-h1 or 1f1b"
        )
    if auto and (layout is not None or is_hybrid):
        what = f"{_LAYOUT} {layout}" if layout is not None else "the pattern of a hybrid model"
        raise ArgumentsError(
            f"--pipeline-layout auto cuts the layers, and so does {what}; leave one of them out"
        )
    # A table fixes the number of stages. The user's cut stays where it makes that many; else it
    # says what the ends compute besides their layers, and the layers are spread evenly by it.
    makes = placement.name in _DEALT and layers_of_flags(args, placement) is not None
    if makes and not auto:
        if not cut_flag and chunks > 1:
            wanted["num_virtual_stages_per_pipeline_rank"] = chunks
        return wanted, []
    dests = (*_ENDS, *_COUNTED, _dest(_CHUNKS), _dest(_LAYERS))
    replaced = {dest: given(dest) for dest in dests if given(dest)}
    first, last = _ends(args, layout, ranks)
    if is_hybrid:
        pattern = _pattern(args)
        if pattern is None:
            if placement.name not in _DEALT:
                return wanted, []  # refused, see RULES["folded"]
            fitting = [n * stages for n in (layers // stages, layers // stages + 1) if n]
            raise ScheduleError(
                f"{layers} layers of a hybrid model do not divide into the {stages} stages of "
                f"{subject}; use --num-layers {' or '.join(map(str, fitting))}"
            )
        if pattern.count("|") + 1 == stages:
            return wanted, []
        letters = iter(pattern.replace("|", ""))
        counts = spread(layers, stages, first, last, placement.rank_of)
        cut = "|".join("".join(islice(letters, count)) for count in counts)
        former = args.hybrid_layer_pattern or args.hybrid_override_pattern
        # Behind the first / stands multi-token prediction, which stays.
        wanted |= {"hybrid_layer_pattern": former.replace(pattern, cut, 1)}
        wanted |= dict.fromkeys(replaced)
        if given("hybrid_override_pattern"):
            wanted["hybrid_override_pattern"] = None  # the other's former name
        return wanted, [f"the stages of {subject}: {_PATTERN} '{wanted['hybrid_layer_pattern']}'"]
    if auto:
        from megatron_ext.planning.training_cut import layout_for

        cut = layout_for(args, placement)
    else:
        cut = layout_string(
            layers, placement, mtp_num_layers=mtp, layout=layout, first=first, last=last
        )
    wanted |= {dest: False if old is True else None for dest, old in replaced.items()}
    wanted["pipeline_model_parallel_layout"] = cut
    lines = []
    if layers < stages:
        lines.append(
            f"{stages - layers} of the {stages} stages of {subject} have no layer, so their ranks "
            f"wait; use --num-layers {stages} or more, or fewer ranks"
        )
    is_even = not replaced and layout is None and layers % stages == 0
    if layout == cut or (is_even and not auto):
        return wanted, lines
    instead = [f"--{dest.replace('_', '-')}" for dest in replaced]
    instead += [f"{_LAYOUT} {layout}"] if layout is not None else []
    line = f"the {stages} stages of {subject}: {_LAYOUT} '{cut}'"
    return wanted, [line + (f" in place of {', '.join(instead)}" if instead else ""), *lines]


def layers_of_flags(args: Namespace, placement: Placement) -> list[int] | None:
    """Return the layers of each stage if the user's flags make Megatron build these stages."""
    (cut_flag, value), given = _cut_flag(args), vars(args).get
    layers, stages, ranks = _num_layers(args), placement.num_stages, placement.num_ranks
    chunks, pattern = stages // ranks, _pattern(args)
    if (cut_flag or chunks == 1) and _makes(args) != chunks:
        return None
    if cut_flag == _LAYOUT:
        return [stage.count("t") for stage in parse_layout(value)]
    if cut_flag == _PATTERN:
        return [len(segment) for segment in value.split("|")]
    if any(given(dest) is not None for dest in _HETEROGENEOUS):
        return spread(layers, stages)
    ends = [given(dest) for dest in _ENDS]
    if counts := [int(count) for count in ends if count is not None]:
        # Layers of the first and the last rank, which spread over the chunks of each.
        middle, between = layers - sum(counts), ranks - len(counts)
        each, rest = divmod(middle, between * chunks) if between else (0, middle)
        if any(count < 1 or count % chunks for count in counts) or middle < between or rest:
            return None
        first, last = (each if count is None else count // chunks for count in ends)
        of_rank = [first, *[each] * (ranks - 2), last]
        return [of_rank[rank] for rank in placement.rank_of]
    each, rest = divmod(_num_split(args), stages)
    # Megatron cuts a pattern for one stage on each rank only.
    if rest or (pattern and chunks > 1):
        return None
    found = [each] * stages
    for stage, dest in zip((0, -1), _COUNTED, strict=True):
        found[stage] -= bool(given(dest))
    return found


def _ends(args: Namespace, layout: str | None, ranks: int) -> tuple[float, float]:
    """Return what the first and the last stage compute besides their layers, in layers."""
    if layout is not None:
        return ends_of_layout(layout)
    given = vars(args).get
    ends = [given(dest) for dest in _ENDS]
    if counts := [count for count in ends if count]:
        between = ranks - len(counts)
        usual = (_num_layers(args) - sum(counts)) / between if between else max(counts)
        first, last = (0.0 if count is None else max(0.0, usual - count) for count in ends)
        return first, last
    first, last = (float(bool(given(dest))) for dest in _COUNTED)
    return first, last + (given("mtp_num_layers") or 0)


def ends_of_layout(layout: str) -> tuple[float, float]:
    """Return what the first and the last stage compute besides their layers, in layers.

    Where a layout gives an end fewer layers than the stages between, the rest of that end weighs
    the difference.
    """
    # Multi-token prediction may stand in a stage of its own before the loss: both are the end.
    stages = [(stage.count("t"), bool(set(stage) & set("mL"))) for stage in parse_layout(layout)]
    tail = [count for count, is_tail in stages if is_tail]
    between = [count for count, is_tail in stages[1:] if not is_tail]
    usual = sum(between) / len(between) if between else max(count for count, _ in stages)
    return max(0.0, usual - stages[0][0]), max(0.0, len(tail) * usual - sum(tail))


@dataclass(frozen=True, kw_only=True)
class ModelBuild:
    """Settings with which Megatron hosts a pipeline."""

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
        # Our messages bypass it, but Megatron accepts several chunks on two ranks only with it.
        overlaps = self.num_chunks > 1 and self.pipeline_model_parallel_size == 2
        return {
            **self.groups,
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout,
            "overlap_p2p_comm": overlaps,
            "batch_p2p_comm": not overlaps,
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


def chooser(args: Namespace, config: PipelineConfig) -> str:
    """Return the flag that chose the schedule, with its value if it has one."""
    given = vars(args).get
    if given("pipeline_schedule") is None:
        for flag in ("--enable-bitpipe-schedule", "--use-dpp"):
            if given(_dest(flag)):
                return flag
    return f"--pipeline-schedule {config.schedule}"


def check_ranks(args: Namespace, config: PipelineConfig) -> None:
    """Refuse a number of ranks on which Megatron cannot host the schedule; name one that works."""
    pp = args.pipeline_model_parallel_size
    chosen, switch = "{schedule:{c.schedule}}", "{schedule}"
    if chooser(args, config).partition(" ")[0] != "--pipeline-schedule":
        chosen = switch = chooser(args, config)
    if pp < 2:
        raise ConfigurationError(
            f"{chosen} needs a pipeline, {{pipeline_ranks:{pp}}} makes none; use "
            f"{{pipeline_ranks:{2 * config.twins}}}, or leave {switch} out",
            c=config,
        )
    if config.twins == 2 and (pp % 2 or pp < 4):
        near = f"{pp - 1}}} or {pp + 1}" if pp > 4 else "4}"
        raise ConfigurationError(
            f"{chosen} mirrors two pipelines on one set of ranks, so {{pipeline_ranks:{pp}}} must "
            f"be even and at least 4; use {{pipeline_ranks:{near}, or {{schedule:zb-v}}, which "
            "accepts any",
            c=config,
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

    The user's is returned unchanged where it has these stages. `first` and `last` are what the ends
    compute besides their layers, in layers; None: the layers of multi-token prediction.

    Raises:
        ScheduleError: The layout is not of this model, or no model can be built on the placement.
    """
    if placement.name not in _PLACED:
        raise ScheduleError(
            f"no model can have its stages on ranks {placement.rank_of}; place the stages of the "
            f"table as {', '.join(_PLACED)} (see megatron-ext plan)"
        )
    mtp, stages = mtp_num_layers or 0, placement.num_stages
    if layout is not None:
        _check_letters(layout, num_layers, mtp)
        given = parse_layout(layout)
        # MTP before the last stage sends tensors of another shape, which a fold does not announce.
        ends_late = placement.name in _DEALT or not any("m" in stage for stage in given[:-1])
        if len(given) == stages and ends_late:
            return layout
    last = mtp if last is None else last
    counts = spread(num_layers, stages, first, last, placement.rank_of)
    each, rest = divmod(num_layers, stages)
    if not rest and each + max(first, last) <= max(*counts, counts[0] + first, counts[-1] + last):
        counts = [each] * stages
    return layout_of(counts, mtp)


def _check_letters(layout: str, num_layers: int, mtp: int) -> None:
    if "".join(parse_layout(layout)) != f"E{'t' * num_layers}{'m' * mtp}L":
        raise ScheduleError(
            f"{_LAYOUT} {layout} must have E once, t {num_layers} times (--num-layers), m {mtp} "
            "times (--mtp-num-layers) and L once, in this order; leave it out"
        )
