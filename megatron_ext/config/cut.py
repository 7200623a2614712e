"""How the user's flags cut a model into stages, as Megatron interprets them.

Five groups of Megatron's flags cut a model into stages: the number of virtual stages, the number of
layers per virtual stage, a layout, the segments of a hybrid pattern, and different numbers of
layers on the first and the last rank. Flags from different groups are mutually exclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.config.sizes import JobSizes
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.table.cuts import parse_layout, spread

if TYPE_CHECKING:
    from megatron_ext.schedules.table.placement import Placement

LAYOUT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYERS = "--num-layers-per-virtual-pipeline-stage"

# 0.16 marks hybrid models with the first two of these arguments, later releases with
# the last two.
_HYBRID = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
# Arguments that describe each layer, in a file or as text.
_HETEROGENEOUS = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)

EVEN_CUT = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip
"""Arguments for cutting the model. A layout replaces them."""


class CutFlag(NamedTuple):
    """A flag that sets the number of stages on each rank, with its value."""

    flag: str
    value: Any


class EndWeights(NamedTuple):
    """Work that the first and last stages do besides their layers, in units of one layer."""

    first: float
    last: float


class EndLayers(NamedTuple):
    """Layers on the first and last ranks; None means as many as on the ranks in between."""

    first: int | None
    last: int | None


@dataclass(frozen=True, kw_only=True)
class UserCut:
    """How the user's flags cut a model into stages."""

    sizes: JobSizes
    pattern: str | None
    """The layers of a hybrid model, one letter per layer, with `|` between stages. None for other
    models, and for hybrid models in 0.16, which set their number of layers with `--num-layers`."""
    is_hybrid: bool
    counts_embedding: bool
    """Whether Megatron counts the embedding as a layer in the first stage."""
    counts_loss: bool
    """Whether Megatron counts the loss as a layer in the last stage."""
    layer_description: str | None
    """The argument that describes each layer individually, or None if no such argument is set."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> UserCut:
        """Return the cut described by settings, which use Megatron's argument names.

        Raises:
            ArgumentsError: A size has the wrong type or is too small.
        """
        # From 0.17 on, the pattern replaces --num-layers, and the override pattern is its former
        # name. Releases without `hybrid_layer_pattern` use --num-layers with the override pattern.
        all_layers = None
        if "hybrid_layer_pattern" in settings:
            former_pattern = settings.get("hybrid_override_pattern")
            all_layers = settings["hybrid_layer_pattern"] or former_pattern
        pattern = None
        # The multi-token prediction layers follow the first "/".
        if all_layers:
            pattern, _, _mtp_layers = all_layers.partition("/")
        layer_description = None
        for dest in _HETEROGENEOUS:
            if settings.get(dest) is not None:
                layer_description = dest
                break
        return cls(
            sizes=JobSizes.of(settings),
            pattern=pattern,
            is_hybrid=any(settings.get(dest) for dest in _HYBRID),
            counts_embedding=bool(
                settings.get("account_for_embedding_in_pipeline_split")
            ),
            counts_loss=bool(settings.get("account_for_loss_in_pipeline_split")),
            layer_description=layer_description,
        )

    @property
    def chosen(self) -> CutFlag | None:
        """The user's flag that sets the number of stages on each rank, if any.

        Raises:
            ArgumentsError: The user set several such flags.
        """
        sizes = self.sizes
        # A pattern without "|" does not set the stages.
        segments = None
        if self.pattern and "|" in self.pattern:
            segments = self.pattern
        values = {
            LAYOUT: sizes.pipeline_model_parallel_layout,
            _CHUNKS: sizes.num_virtual_stages_per_pipeline_rank,
            _LAYERS: sizes.num_layers_per_virtual_pipeline_stage,
            PATTERN: segments,
        }
        chosen = []
        for flag, value in values.items():
            if value is not None:
                chosen.append(CutFlag(flag, value))
        if len(chosen) > 1:
            raise ArgumentsError(
                f"{chosen[0].flag} and {chosen[1].flag} are mutually exclusive; remove one of them"
            )
        return chosen[0] if chosen else None

    @property
    def layout(self) -> str | None:
        """The user's layout."""
        return self.sizes.pipeline_model_parallel_layout

    @property
    def num_layers(self) -> int:
        """Number of layers in the model, excluding multi-token prediction.

        Raises:
            ArgumentsError: The number is missing.
        """
        if self.pattern is None:
            count = self.sizes.num_layers
        else:
            count = len(self.pattern.replace("|", ""))
        if count is None:
            # Megatron's validation, which runs later, uses this value if --num-layers is missing.
            count = self.sizes.encoder_num_layers
        if not count:
            if self.pattern is not None:
                raise ArgumentsError(
                    f"{PATTERN} has no layers; write one letter per layer, such as M*M-"
                )
            raise ArgumentsError(
                "--num-layers is missing; give it a value of at least 1"
            )
        return count

    @property
    def num_split(self) -> int:
        """Number of layers that Megatron splits evenly, with embedding and loss if counted."""
        return self.num_layers + self.counts_embedding + self.counts_loss

    @property
    def chunks(self) -> int:
        """Number of stages per rank under Megatron's own schedule.

        Raises:
            ArgumentsError: The flags contradict each other, or the sizes do not divide evenly.
        """
        chosen = self.chosen
        if chosen is None:
            return 1
        flag, value = chosen
        if flag == _CHUNKS:
            return int(value)
        # `count`, a number of stages, segments or layers, must be a multiple of `divisor`.
        pp = self.sizes.pipeline_model_parallel_size
        divisor = pp
        if flag == LAYOUT:
            unit = "stages"
            count = len(parse_layout(value))
        elif flag == PATTERN:
            unit = "segments"
            count = value.count("|") + 1
        else:
            unit = "layers"
            count = self.num_split
            divisor = pp * value
        if count % divisor:
            raise ArgumentsError(
                f"{flag}={value} does not spread {count} {unit} evenly over "
                f"--pipeline-model-parallel-size={pp}; remove {flag}"
            )
        return count // divisor

    @property
    def chunks_if_even(self) -> int | None:
        """Number of stages per rank from the user's flag; None if the layers do not divide evenly.

        Raises:
            ArgumentsError: The flags contradict each other.
        """
        # Contradictory flags raise here, outside `suppress`.
        _ = self.chosen
        with suppress(ArgumentsError):
            return self.chunks
        return None

    @property
    def end_layers(self) -> EndLayers:
        """Layers on the first and last ranks; None means as many as on the ranks in between."""
        sizes = self.sizes
        return EndLayers(
            sizes.decoder_first_pipeline_num_layers,
            sizes.decoder_last_pipeline_num_layers,
        )

    def layers_by_stage(self, placement: Placement) -> list[int] | None:
        """Return the number of layers in each stage if Megatron would build this many stages.

        Returns None if the user's flags would make Megatron build different stages or fail.

        Raises:
            ArgumentsError: The flags contradict each other, or the number of layers is missing.
        """
        chosen = self.chosen
        num_layers = self.num_layers
        chunks = placement.num_stages // placement.num_ranks
        # Without a flag, Megatron builds one stage per rank, but `stage_arguments` may
        # set a different number.
        has_fixed_chunks = chosen is not None or chunks == 1
        if has_fixed_chunks and self.chunks_if_even != chunks:
            return None
        if chosen is not None and chosen.flag == LAYOUT:
            return [stage.count("t") for stage in parse_layout(chosen.value)]
        if chosen is not None and chosen.flag == PATTERN:
            return [len(segment) for segment in chosen.value.split("|")]
        if self.layer_description is not None:
            return spread(num_layers, placement.num_stages)
        if self.end_layers != EndLayers(None, None):
            return self._layers_between_ends(placement)
        per_stage, num_left_over = divmod(self.num_split, placement.num_stages)
        # Megatron can cut a pattern without "|" only into one stage per rank.
        if num_left_over or (self.pattern and chunks > 1):
            return None
        layers_by_stage = [per_stage] * placement.num_stages
        # The embedding and the loss each take the place of a layer if Megatron counts
        # them.
        layers_by_stage[0] -= self.counts_embedding
        layers_by_stage[-1] -= self.counts_loss
        return layers_by_stage

    def _layers_between_ends(self, placement: Placement) -> list[int] | None:
        """Return the layers in each stage if the first or last rank has more or fewer layers.

        A rank's layers are spread evenly over its chunks. Returns None if they do not divide
        evenly.
        """
        chunks = placement.num_stages // placement.num_ranks
        end_counts = [count for count in self.end_layers if count is not None]
        # Megatron asserts that a rank's layers divide evenly among its chunks.
        if any(count < 1 or count % chunks for count in end_counts):
            return None
        # Spread the remaining layers evenly over the ranks in between.
        num_between = placement.num_ranks - len(end_counts)
        layers_between = self.num_layers - sum(end_counts)
        if num_between:
            per_stage, num_left_over = divmod(layers_between, num_between * chunks)
        else:
            per_stage = 0
            num_left_over = layers_between
        if layers_between < num_between or num_left_over:
            return None
        per_stage_of_rank = [per_stage] * placement.num_ranks
        ends = self.end_layers
        if ends.last is not None:
            per_stage_of_rank[-1] = ends.last // chunks
        if ends.first is not None:
            per_stage_of_rank[0] = ends.first // chunks
        return [per_stage_of_rank[rank] for rank in placement.rank_of]

    def end_weights(self, num_ranks: int) -> EndWeights:
        """Return the work that the first and last stages do besides their layers."""
        if self.layout is not None:
            return ends_of_layout(self.layout)
        end_counts = [count for count in self.end_layers if count]
        if not end_counts:
            last = float(self.counts_loss) + self.sizes.mtp_num_layers
            return EndWeights(float(self.counts_embedding), last)
        # If an end has fewer layers than the ranks in between, assume that its other work takes as
        # long as the missing layers.
        num_between = num_ranks - len(end_counts)
        layers_between: float = max(end_counts)
        if num_between:
            layers_between = (self.num_layers - sum(end_counts)) / num_between
        weights = []
        for count in self.end_layers:
            missing_layers = 0.0
            if count is not None:
                missing_layers = max(0.0, layers_between - count)
            weights.append(missing_layers)
        return EndWeights(*weights)


def ends_of_layout(layout: str) -> EndWeights:
    """Return the work that the first and last stages do besides their layers.

    If a layout gives an end fewer layers than the stages in between, the function assumes that the
    end's other work takes as long as the missing layers.
    """
    stages = parse_layout(layout)
    counts = [stage.count("t") for stage in stages]
    # Multi-token prediction may have a separate stage before the loss. In that case,
    # both stages together form the end.
    tail: list[int] = []
    between: list[int] = []
    for index, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        if "m" in stage or "L" in stage:
            tail.append(count)
        elif index > 0:
            between.append(count)
    mean_between: float = max(counts)
    if between:
        mean_between = sum(between) / len(between)
    missing_in_tail = len(tail) * mean_between - sum(tail)
    return EndWeights(
        first=max(0.0, mean_between - counts[0]),
        last=max(0.0, missing_in_tail),
    )
