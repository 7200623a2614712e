"""Support for third-party training loops ("hosts") that call Megatron's schedules.

The only host so far is Megatron-Bridge. A host's module has a `PATCHES` table and is imported just
before the host itself, so an unused host costs nothing. Programs with their own training loop use
`own_program.py` instead.
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
    """Arrange for a host's patches to be registered just before its import. Idempotent."""
    # A hook on the import would come too late if Bridge is already imported.
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
    # A program may import Bridge without using this package's schedules, so check Bridge's
    # requirements only if a configuration or the environment requests one.
    in_force = active.active()
    awaits_host = in_force is not None and not in_force.is_sized
    if awaits_host or requested_flags():
        check_installed()


def check_some_host() -> None:
    """Check that a host is installed and can run.

    Raises:
        UserError: No host is installed, or a requirement of the host is missing. The message names
            the package to install.
    """
    from megatron_ext.errors import ArgumentsError
    from megatron_ext.hosts.bridge_requirements import SUPPORTED, check_installed

    if find_spec(_BRIDGE) is None:
        raise ArgumentsError(
            "configure was given no sizes, and no training loop that provides them is installed; "
            "pass pipeline_ranks, num_microbatches and num_layers, or pip install "
            f"'megatron-bridge{SUPPORTED}' and train with its pretrain or finetune"
        )
    check_installed()
