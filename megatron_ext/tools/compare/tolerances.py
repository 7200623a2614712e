"""How closely the numbers of two runs of a recipe must match, as stated in docs/schedules.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.config.cut import UserCut
from megatron_ext.config.feature_rules import feature_rules
from megatron_ext.schedules.table.placement import loop
from megatron_ext.tools.compare.locate import LEARNED_MARGIN, ORDER_OF_REPLICAS

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron_ext.config.refusals import Preflight
    from megatron_ext.tools.compare.run_records import Deviations

_RESOLUTION = 1e-6
"""Smallest learned tolerance: a few rounding errors in single precision."""


@dataclass(frozen=True)
class Promise:
    """How closely a run's numbers must match the reference's."""

    loss: float | None
    """Largest relative difference in a loss; 0: bit-identical; None: losses are not judged."""
    norm: float | None
    """Largest relative difference in a gradient norm; 0: bit-identical; None: not judged."""
    reason: str = ""
    """Why the numbers are not bit-identical."""
    is_learned: bool = False
    """Whether the tolerances were learned from a run of the reference, instead of being the fixed
    tolerances for all models."""

    @property
    def allowance(self) -> str:
        """Describes the allowed differences and where the limits come from."""
        source = "stated for all models"
        if self.is_learned:
            source = "learned by --calibrate"
        losses = "bit-equal losses"
        if self.loss:
            losses = f"{self.loss:.2g} of a loss"
        return f"{losses} and {self.norm:.2g} of a norm, {source}"

    @property
    def has_tolerance(self) -> bool:
        """Whether losses are judged but need not be bit-identical."""
        return self.loss is not None and self.loss > 0

    def learned(self, rounded: Deviations) -> Promise:
        """Return the same promise with tolerances learned from a run with different rounding.

        Args:
            rounded: How that run differs from the reference.
        """
        loss = _RESOLUTION
        norm = _RESOLUTION
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
    "merged": "merged forward ranks sum over a layer's width in a different order",
    "twins": "mirrored pipelines split the micro-batches, so sums use a different order",
    "clip": "the norm that clips gradients is summed over different ranks; losses are exact with "
    "--clip-grad 0",
    "replicas": ORDER_OF_REPLICAS,
    "norm": "the reported gradient norm is summed over different ranks",
}
"""What differs between two runs, in the order of the checks -> why their numbers may differ. For
`tokens`, checked after `flags`, a feature knows the reason (`FeatureRules.summation_reason`)."""


class Tolerance(NamedTuple):
    """The largest allowed relative differences."""

    loss: float
    norm: float


# Rounding errors grow from step to step, so these tolerances hold
# for a few tens of steps.
TOLERANCES = {
    "single": Tolerance(loss=1e-4, norm=1e-3),
    "half": Tolerance(loss=2e-2, norm=1e-1),
}
"""Precision -> the largest allowed relative differences in a loss and in a gradient norm."""

# Measured: 8.8e-8 for zb-v, in the first step.
NORM_ROUNDING = 1e-5
"""Largest allowed relative difference in a gradient norm that sums bit-identical gradients in a
different order."""


def are_rounding(differences: Deviations) -> bool:
    """Return whether rounding could explain all differences between two runs of one recipe.

    With tolerances wider than the ones for half precision, any two runs would count as equal.
    """
    if differences.skipped is not None:
        return False
    deviations = differences.loss, differences.norm
    for deviation, limit in zip(deviations, TOLERANCES["half"], strict=True):
        # Written this way, the condition also holds for infinity.
        if deviation is not None and not deviation.relative <= limit:
            return False
    return True


def promise(reference: Preflight, candidate: Preflight, *, same_flags: bool) -> Promise:
    """Return how closely a candidate's numbers must match the reference's.

    Args:
        reference: The reference's preflight result.
        candidate: The candidate's preflight result.
        same_flags: Whether both runs have the same Megatron flags.
    """
    kind = _difference(reference, candidate, same_flags=same_flags)
    if kind is None:
        return Promise(0.0, 0.0)
    if kind == "tokens":
        reason = _token_order_reason(reference, candidate)
    else:
        reason = REASONS[kind]
    if kind == "dropout":
        return Promise(None, None, reason)
    if kind == "norm":
        return Promise(0.0, NORM_ROUNDING, reason)
    settings = reference.checked_args
    half_flags = ("bf16", "fp16", "fp8", "fp4")
    is_half = any(getattr(settings, name, None) for name in half_flags)
    tolerance = TOLERANCES["half"] if is_half else TOLERANCES["single"]
    return Promise(tolerance.loss, tolerance.norm, reason)


def _difference(
    reference: Preflight, candidate: Preflight, *, same_flags: bool
) -> str | None:
    """Return why two runs' numbers may differ: `tokens`, a key in `REASONS`, or None."""
    settings = candidate.checked_args
    config = candidate.config
    reference_config = reference.config
    assert config is not None
    assert reference_config is not None
    stages = _placement(candidate)
    has_same_stages = stages == _placement(reference) and (
        _layers(candidate) == _layers(reference)
    )
    # The reasons with the widest effect come first: different masks change every
    # number, but the last reason changes only the norm.
    rates = (
        getattr(settings, name, None)
        for name in ("hidden_dropout", "attention_dropout")
    )
    draws_by_microbatch = (
        config.draws_by_microbatch and reference_config.draws_by_microbatch
    )
    # The masks are identical if both runs draw them per micro-batch, on the same
    # stages.
    if any(rates) and not (draws_by_microbatch and has_same_stages):
        return "dropout"
    if not same_flags:
        return "flags"
    if _token_order_reason(reference, candidate):
        return "tokens"
    if config.disaggregation is not None and config.disaggregation.merged:
        return "merged"
    if config.twins != reference_config.twins:
        return "twins"
    # Megatron sums squared gradients over ranks even if the norm
    # is not used for clipping.
    if not has_same_stages:
        if getattr(settings, "clip_grad", None) != 0:
            return "clip"
        # The order does not matter when there are only two summands.
        return "replicas" if _num_summed_ranks(settings) > 2 else "norm"
    return None


def _token_order_reason(reference: Preflight, candidate: Preflight) -> str:
    """Return why two runs sum over tokens in different orders, or an empty string."""
    for rules in feature_rules():
        summations = []
        for answer in (reference, candidate):
            assert answer.config is not None
            pp = answer.checked_args.pipeline_model_parallel_size
            summations.append(rules.summation(answer.config, pp))
        if summations[0] != summations[1]:
            return rules.summation_reason
    return ""


def _num_summed_ranks(settings: Namespace) -> int:
    """Return how many data- and context-parallel ranks a gradient is summed over."""
    tensor = getattr(settings, "tensor_model_parallel_size", None) or 1
    pipeline = settings.pipeline_model_parallel_size or 1
    num_ranks = getattr(settings, "world_size", None) or 0
    num_model_ranks: int = tensor * pipeline
    return num_ranks // num_model_ranks


def _layers(answer: Preflight) -> tuple[str, ...] | None:
    """Return each stage's layers as text, or None if all stages have the same number of layers."""
    name = "pipeline_model_parallel_layout"
    layout = answer.arguments.get(name) or getattr(answer.checked_args, name, None)
    if not layout:
        return None
    stages = str(layout).split("|")
    # Drop the embedding and the loss from the stages they are on by default.
    stages[0] = stages[0].removeprefix("E")
    stages[-1] = stages[-1].removesuffix("L")
    if len(set(stages)) == 1:
        return None
    return tuple(stages)


def _placement(answer: Preflight) -> tuple[tuple[int, ...], ...]:
    """Return the stages on each rank."""
    if answer.pipeline is not None:
        return answer.pipeline.placement.stages_of
    # Megatron's own schedules use this placement. With disaggregation, the forward
    # ranks and the backward ranks each hold the weights this way.
    num_ranks = answer.checked_args.pipeline_model_parallel_size
    cut = UserCut.of(vars(answer.checked_args))
    return loop(num_ranks, cut.chunks).stages_of
