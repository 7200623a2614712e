"""Planner queries and the layout sizes that answer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.planning.layer_costs import mode_name
from megatron_ext.planning.techniques import Techniques

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.model_sizes import ModelSizes
    from megatron_ext.rules import Rule

FIXABLE = (
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "micro_batch",
    "schedule",
    "pairs",
    "recompute",
    "layout",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A planner query: a model, its devices and the batch."""

    model: ModelSizes
    device: DeviceKind
    num_devices: int
    global_batch: int
    sequence: int
    pair_rules: tuple[Rule, ...]
    """Megatron settings that exclude pairs."""
    techniques: Techniques = field(default_factory=Techniques)
    fused_loss: bool = False
    overlaps: bool = True
    """Whether data-parallel communication overlaps with computation."""
    shards_optimizer: bool = True
    """Whether the optimizer states are sharded across replicas."""
    waiting_weights: int = 0
    """Number of weight gradients that a rank may delay until it waits for tokens."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that the user fixed, by the names in `FIXABLE`."""


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """A layout's sizes, without its cut and schedule."""

    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    mode: frozenset[str]
    """Modules that are recomputed."""
    num_microbatches: int
    replicas: int


def runs_pairs(job: Question, sizes: ParallelSizes) -> bool:
    """Return whether micro-batches run in pairs because experts exchange tokens."""
    exchanges_tokens = job.model.num_experts > 0 and sizes.ep > 1
    return exchanges_tokens and job.techniques.overlaps_experts


def with_graphs(job: Question, sizes: ParallelSizes) -> Question:
    """Return the question with CUDA graphs turned on or off if the planner makes that choice."""
    techniques = job.techniques
    if techniques.graphs != "auto":
        return job
    # This package's schedules do not support graphs, and Megatron rejects graphs of
    # recomputed modules.
    if sizes.pp == 1 and sizes.mode.isdisjoint({"full", "moe"}):
        return replace(job, techniques=replace(techniques, graphs="layers"))
    return replace(job, techniques=replace(techniques, graphs="none"))


def fixed_text(fixed: Mapping[str, Any]) -> str:
    """Return fixed values in the notation of `--fix`."""
    return ",".join(
        f"{name}={_fixed_value_text(value)}" for name, value in fixed.items()
    )


def _fixed_value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return mode_name(value)
    if isinstance(value, list):  # a cut
        return "|".join("t" * num_layers for num_layers in value)
    return str(value)
