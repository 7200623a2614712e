"""A job's sizes, read once from any description of the job and type-checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.errors import ArgumentsError

# Letters in Megatron's layout notation, by layer name.
_LETTERS = {
    "embedding": "E",
    "encoder": "e",
    "decoder": "t",
    "mtp": "m",
    "loss": "L",
}

# Sizes that count ranks, stages or layers per stage, which cannot be 0.
_AT_LEAST_ONE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobSizes:
    """A job's sizes, by Megatron's argument names. None means that a size is not given.

    Sizes are integers of at least 0. Numbers of ranks and stages are at least 1.
    """

    world_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False

    num_layers: int | None = None
    encoder_num_layers: int | None = None
    """Megatron uses this number if `num_layers` is missing."""
    mtp_num_layers: int = 0
    num_experts: int | None = None
    seq_length: int | None = None

    num_virtual_stages_per_pipeline_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    """The layers of each stage, in Megatron's notation."""
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None

    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    eval_global_batch_size: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> JobSizes:
        """Return the sizes among settings, which use Megatron's argument names.

        Raises:
            ArgumentsError: Sizes have the wrong type or are too small. The message has one line per
                size.
        """
        sizes: dict[str, Any] = {}
        mistakes: list[str] = []
        for size in fields(cls):
            value = settings.get(size.name)
            # Configuration objects may contain a layout as lists of names.
            if size.name == "pipeline_model_parallel_layout":
                value = layout_text(value)
            if value is None:
                continue
            rule = _rule_of(size.name, str(size.type))
            if rule.accepts(value):
                sizes[size.name] = value
            else:
                flag = f"--{size.name.replace('_', '-')}"
                mistakes.append(f"{flag}={value!r} must be {rule.words}; {rule.remedy}")
        if mistakes:
            raise ArgumentsError("\n".join(mistakes))
        return cls(**sizes)

    @property
    def ranks(self) -> int:
        """Number of ranks in the job, or in one replica if the job's size is unknown."""
        if self.world_size:
            return self.world_size
        return math.prod(
            (
                self.tensor_model_parallel_size,
                self.pipeline_model_parallel_size,
                self.context_parallel_size,
            )
        )


@dataclass(frozen=True)
class _Rule:
    """The values that a size may have."""

    words: str
    """Description of these values, for an error message."""
    remedy: str
    kind: type
    minimum: int = 0
    """The smallest value, for integers."""

    def accepts(self, value: object) -> bool:
        """Return whether a size may have this value."""
        if self.kind is not int:
            return isinstance(value, self.kind)
        # bool is a subclass of int.
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value >= self.minimum


def _rule_of(name: str, annotation: str) -> _Rule:
    # Annotations are strings because this file postpones their evaluation.
    if annotation.startswith("str"):
        return _Rule("text in Megatron's notation", "write it like Et|t|t|tL", str)
    if annotation.startswith("bool"):
        return _Rule("True or False", "use one of them", bool)
    if name in _AT_LEAST_ONE:
        return _Rule("a whole number of at least 1", "remove it", int, 1)
    return _Rule("a whole number of at least 0", "give one", int)


def layout_text(layout: Any) -> Any:
    """Return a layout in Megatron's notation, such as `Et|t|t|tL`.

    In configuration objects, a layout may also be a list of layer names per stage. Values of other
    types are returned unchanged, for the caller to check.
    """
    # Megatron's layout object keeps its argument in `input_data`.
    stages = getattr(layout, "input_data", layout)
    if not isinstance(stages, list | tuple):
        return stages
    letters = []
    for stage in stages:
        letters.append("".join(_letter(layer) for layer in stage))
    return "|".join(letters)


def _letter(layer: Any) -> str:
    name = getattr(layer, "name", layer)
    if name not in _LETTERS:
        raise ArgumentsError(
            f"pipeline_model_parallel_layout has a layer {name!r}; use {', '.join(_LETTERS)}"
        )
    return _LETTERS[name]
