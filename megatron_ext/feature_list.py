"""The features beside the core, and where each joins it: a table of contents.

    trees     stages that exchange trees of tensors, and routes that take a tensor past stages
    slices    micro-batches that run part by part of their sequence
    pairs     a forward and a backward of two micro-batches as one action
    lengths   micro-batches of unequal lengths, ordered by cost and dealt out to replicas

The core (`schedules/`, `runtime/`, `config/`) imports no feature. It reads this file, which imports
nothing, and imports what an entry names at first use. To remove a feature, delete its folder and
its entries.
"""

from __future__ import annotations

RULES = (
    "megatron_ext.features.slices.slice_rules",
    "megatron_ext.features.pairs.pair_rules",
    "megatron_ext.features.lengths.length_rules",
)
"""Modules with `TEXTS`, the settings of Megatron's to refuse, as in `config/incompatible.py`."""

STEPS = (
    "megatron_ext.features.trees.tree_steps:TreeSteps",
    "megatron_ext.features.slices.slice_steps:SliceSteps",
    "megatron_ext.features.pairs.pair_steps:PairSteps",
    "megatron_ext.features.lengths.length_steps:LengthSteps",
)
"""Subclasses of `runtime.feature.Feature`, which check a model and compute its steps. The first one
that has a part in a step computes it."""

TABLES = {
    "slices": "megatron_ext.features.slices.slicing:SliceChange",
    "slice_sizes": "megatron_ext.features.slices.slicing:LengthChange",
    "pairs": "megatron_ext.features.pairs.pairing:PairChange",
}
"""By option of `schedules.generate`: subclasses of `schedules.table.table_change.TableChange`."""

PATCHES = (
    # Layers that keep keys and values from slice to slice.
    "megatron_ext.features.slices.sliced_layers",
    # Exchanges of tokens that a host waits for, with weight gradients at hand.
    "megatron_ext.features.pairs.awaited_tokens",
)
"""Modules with a table `PATCHES` of changes to Megatron, as those of `megatron_ext/patches/`."""
