"""The features outside the core, and the entry points through which the core uses them.

    trees     stages exchange trees of tensors, and routes carry tensors past stages
    slices    a micro-batch's sequence is run in several slices
    pairs     the forward and backward passes of two micro-batches run as one action
    lengths   micro-batches of different lengths are ordered by cost and distributed over replicas

The core (`schedules/`, `runtime/`, `config/`) imports no feature. It reads this file, which imports
nothing, and imports an entry's module on first use. To remove a feature, delete its folder and its
entries: everything else still works. Its settings stay in `config/`, and a table that needs them is
refused.
"""

from __future__ import annotations

MISTAKES = (
    "megatron_ext.features.slices.slice_rules:mistake",
    "megatron_ext.features.pairs.pair_rules:mistake",
    "megatron_ext.features.lengths.length_rules:mistake",
)
"""Functions that return what is wrong with a `PipelineConfig`'s settings of a feature, or None. The
text is a template for a `ConfigurationError`, in which {field} and {field:value} are settings."""

RULES = (
    "megatron_ext.features.slices.slice_rules:SliceRules",
    "megatron_ext.features.pairs.pair_rules:PairRules",
    "megatron_ext.features.lengths.length_rules:LengthRules",
)
"""Subclasses of `config.feature_rules.FeatureRules`, which check and complete a configuration."""

STEPS = (
    "megatron_ext.features.trees.tree_steps:TreeSteps",
    "megatron_ext.features.slices.slice_steps:SliceSteps",
    "megatron_ext.features.pairs.pair_steps:PairSteps",
    "megatron_ext.features.lengths.length_steps:LengthSteps",
)
"""Subclasses of `runtime.feature.Feature`, which check a model and compute its steps. The first one
that applies to a step computes it."""

TABLES = {
    "slices": "megatron_ext.features.slices.slicing:SliceChange",
    "slice_sizes": "megatron_ext.features.slices.slicing:LengthChange",
    "pairs": "megatron_ext.features.pairs.pairing:PairChange",
}
"""Option of `schedules.generate` -> subclass of `schedules.table.table_change.TableChange`."""

COMMANDS = {
    "lengths": "megatron_ext.features.lengths.plan_lengths:run",
}
"""Flag of `megatron-ext plan` -> the function that runs the command with this flag."""

PATCHES = (
    # Layers that keep keys and values from earlier slices.
    "megatron_ext.features.slices.sliced_layers",
    # Megatron's check of overlapped token exchanges.
    "megatron_ext.features.pairs.overlap_check",
    # Token exchanges that make the host wait: weight gradients run during the wait.
    "megatron_ext.features.pairs.awaited_tokens",
)
"""Modules with a `PATCHES` table of changes to Megatron, like those in `megatron_ext/patches/`."""
