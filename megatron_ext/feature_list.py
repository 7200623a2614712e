"""The features beside the core, and where each joins it: a table of contents.

The core (`schedules/`, `runtime/`, `config/`) imports no feature. It reads this file, which imports
nothing, and imports what an entry names at first use. To remove a feature, delete its folder and
its entries.
"""

from __future__ import annotations

STEPS = (
    # Stages that exchange trees of tensors, and routes that take a tensor past stages.
    "megatron_ext.features.trees.tree_steps:TreeSteps",
)
"""Subclasses of `runtime.feature.Feature`, which compute the actions of a step and check its model.
The first one that has a part in a step computes it."""
