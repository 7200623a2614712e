"""How close the numbers in two runs of a recipe must be, as stated in docs/schedules.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.config.cut import UserCut
from megatron_ext.config.pipeline_config import AUTO
from megatron_ext.schedules.table.placement import loop
from megatron_ext.tools.compare.locate import LEARNED_MARGIN, ORDER_OF_REPLICAS

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron_ext.config.refusals import Preflight
    from megatron_ext.tools.compare.run_records import Deviations

_RESOLUTION = 1e-6
"""Smallest learned tolerance: a few roundings in single precision."""


@dataclass(frozen=True)
class Promise:
    """How close a run's numbers must be to the reference's numbers."""

    loss: float | None
    """Largest relative difference in a loss; 0: bit-identical; None: losses are not judged."""
    norm: float | None
    """Largest relative difference in a gradient norm; 0: bit-identical; None: not judged."""
    reason: str = ""
    """Why the numbers are not bit-identical."""
    is_learned: bool = False
    """Whether the tolerances were learned from a run of the reference. If not, they are the fixed
    tolerances for all models."""

    @property
    def allowance(self) -> str:
        """A description of the allowed differences, and where the limits come from."""
        source = (
            "learned by --calibrate" if self.is_learned else "stated for all models"
        )
        losses = f"{self.loss:.2g} of a loss" if self.loss else "bit-equal losses"
        return f"{losses} and {self.norm:.2g} of a norm, {source}"

    @property
    def has_tolerance(self) -> bool:
        """Whether losses are judged but need not be bit-identical."""
        return self.loss is not None and self.loss > 0

    def learned(self, rounded: Deviations) -> Promise:
        """Return the same promise with tolerances learned from a run with different rounding.

        Args:
            rounded: The differences between that run and the reference.
        """
        loss = norm = _RESOLUTION
        if rounded.loss is not None:
            loss = max(LEARNED_MARGIN * rounded.loss.relative, _RESOLUTION)
        if rounded.norm is not None:
            norm = max(LEARNED_MARGIN * rounded.norm.relative, _RESOLUTION)
        return replace(self, loss=loss, norm=norm, is_learned=True)

    @property
    def is_exact(self) -> bool:
        """Whether all numbers must be bit-identical."""
        return self.loss == 0 and self.norm == 0


REASONS = {
    "dropout": "dropout draws different masks; add --hidden-dropout 0 --attention-dropout 0 to "
    "judge",
    "flags": "Megatron's flags differ, so sums may be accumulated in a different order",
    "lengths": "--pipeline-balance sums over micro-batches in another order",
    "slices": "slices sum over the tokens of a micro-batch in another order",
    "merged": "merged forward ranks sum over the width of a layer in another order",
    "twins": "mirrored pipelines split the micro-batches, which are summed in another order",
    "clip": "the norm that clips gradients is summed over other ranks; losses are exact with "
    "--clip-grad 0",
    "replicas": ORDER_OF_REPLICAS,
    "norm": "the reported gradient norm is summed over other ranks",
}
"""What differs between two runs, in the order in which it is checked -> why their numbers may
differ."""

# Rounding errors grow from step to step, so these tolerances are valid for a few tens of steps.
TOLERANCES = {"single": (1e-4, 1e-3), "half": (2e-2, 1e-1)}
"""Precision -> the largest relative differences in a loss and in a gradient norm."""

# Measured: 8.8e-8 for zb-v, in the first step.
NORM_ROUNDING = 1e-5
"""Largest relative difference in a gradient norm that is summed in a different order over
bit-identical gradients."""


def are_rounding(differences: Deviations) -> bool:
    """Return whether rounding may explain all differences between two runs of one recipe.

    With tolerances wider than those for half precision, any two runs would count as equal.
    """
    if differences.skipped is not None:
        return False
    deviations = differences.loss, differences.norm
    for deviation, limit in zip(deviations, TOLERANCES["half"], strict=True):
        # Written like this, the condition is also true for an infinity.
        if deviation is not None and not deviation.relative <= limit:
            return False
    return True


def promise(reference: Preflight, candidate: Preflight, *, same_flags: bool) -> Promise:
    """Return how close a candidate's numbers must be to a reference's numbers.

    Args:
        reference: The preflight result for the reference.
        candidate: The preflight result for the candidate.
        same_flags: Whether both runs have the same Megatron flags.
    """
    kind = _difference(reference, candidate, same_flags=same_flags)
    if kind is None:
        return Promise(0.0, 0.0)
    if kind == "dropout":
        return Promise(None, None, REASONS[kind])
    if kind == "norm":
        return Promise(0.0, NORM_ROUNDING, REASONS[kind])
    settings = reference.checked_args
    is_half = any(
        getattr(settings, name, None) for name in ("bf16", "fp16", "fp8", "fp4")
    )
    loss, norm = TOLERANCES["half" if is_half else "single"]
    return Promise(loss, norm, REASONS[kind])


def _difference(
    reference: Preflight, candidate: Preflight, *, same_flags: bool
) -> str | None:
    """Return the key in `REASONS` for why the numbers in two runs may differ, or None."""
    settings = candidate.checked_args
    config = candidate.config
    reference_config = reference.config
    assert config is not None
    assert reference_config is not None
    stages = _placement(candidate)
    has_same_stages = stages == _placement(reference) and (
        _layers(candidate) == _layers(reference)
    )
    # The reasons with the widest effect come first: other masks change every number, and the last
    # reason changes only the norm.
    rates = (
        getattr(settings, name, None)
        for name in ("hidden_dropout", "attention_dropout")
    )
    draws_by_microbatch = (
        config.draws_by_microbatch and reference_config.draws_by_microbatch
    )
    # The masks are equal if both runs draw them separately for each micro-batch, on the same
    # stages.
    if any(rates) and not (draws_by_microbatch and has_same_stages):
        return "dropout"
    if not same_flags:
        return "flags"
    if config.balance != reference_config.balance:
        return "lengths"
    slices = (config.slices, config.slice_tokens)
    if slices != (reference_config.slices, reference_config.slice_tokens):
        return "slices"
    num_ranks = settings.pipeline_model_parallel_size
    if (
        config.slice_tokens == AUTO  # chosen for this number of ranks
        and num_ranks != reference.checked_args.pipeline_model_parallel_size
    ):
        return "slices"
    if config.disaggregation is not None and config.disaggregation.merged:
        return "merged"
    if config.twins != reference_config.twins:
        return "twins"
    # Megatron sums the squares of gradients over ranks, even if the norm is not used for clipping.
    if not has_same_stages:
        if getattr(settings, "clip_grad", None) != 0:
            return "clip"
        # The order of a sum of two does not matter.
        return "replicas" if _num_summed_ranks(settings) > 2 else "norm"
    return None


def _num_summed_ranks(settings: Namespace) -> int:
    """Return over how many ranks a gradient is summed: data- and context-parallel ones."""
    tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
    pipeline = settings.pipeline_model_parallel_size or 1
    return (getattr(settings, "world_size", None) or 0) // (tensor * pipeline)


def _layers(answer: Preflight) -> tuple[str, ...] | None:
    """Return the layers of each stage as text; None if all stages have equally many."""
    layout = answer.arguments.get("pipeline_model_parallel_layout") or getattr(
        answer.checked_args, "pipeline_model_parallel_layout", None
    )
    if not layout:
        return None
    stages = str(layout).split("|")
    # The embedding and the loss, where they are without a layout.
    stages[0] = stages[0].removeprefix("E")
    stages[-1] = stages[-1].removesuffix("L")
    return None if len(set(stages)) == 1 else tuple(stages)


def _placement(answer: Preflight) -> tuple[tuple[int, ...], ...]:
    """Return the stages on each rank."""
    if answer.pipeline is not None:
        return answer.pipeline.placement.stages_of
    # Megatron's own schedules use this placement. With disaggregation, the forward ranks and the
    # backward ranks each hold the weights in this way.
    ranks = answer.checked_args.pipeline_model_parallel_size
    return loop(ranks, UserCut.of(vars(answer.checked_args)).chunks).stages_of
