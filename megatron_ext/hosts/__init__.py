"""Support for third-party training loops ("hosts") that call Megatron's schedules: Megatron-Bridge.

A host's module has a table `PATCHES` and is imported just before the host, so an unused host costs
nothing. `own_program.py` is the entrance for programs with their own training loop.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from megatron_ext.config import active
from megatron_ext.patches import hooks
from megatron_ext.patches.registry import REGISTRY

__all__ = ["arm", "check_some_host"]

_BRIDGE = "megatron.bridge"


def arm() -> None:
    """Register the patches of a host just before it is imported. Idempotent."""
    if _BRIDGE in sys.modules:
        _begin()
    else:
        hooks.before(_BRIDGE, _begin)


def _begin() -> None:
    from megatron_ext.config.flags import requested_flags
    from megatron_ext.hosts import bridge, bridge_weights
    from megatron_ext.hosts.bridge_requirements import check_installed

    REGISTRY.register(bridge.PATCHES)
    REGISTRY.register(bridge_weights.PATCHES)
    in_force = active.active()
    awaits_host = in_force is not None and not in_force.is_sized
    if awaits_host or requested_flags():
        check_installed()


def check_some_host() -> None:
    """Check that a host is installed and can run.

    Raises:
        UserError: No host is installed, or it lacks a requirement; names the package to install.
    """
    from megatron_ext.errors import ArgumentsError
    from megatron_ext.hosts.bridge_requirements import SUPPORTED, check_installed

    if find_spec(_BRIDGE) is None:
        raise ArgumentsError(
            "configure was given no sizes, and no training loop that knows them is installed; "
            "give pipeline_ranks, num_microbatches and num_layers, or pip install "
            f"'megatron-bridge{SUPPORTED}' and train with its pretrain or finetune"
        )
    check_installed()
