"""Support for third-party training loops ("hosts") that call Megatron's schedules.

Each host has a module with a table `PATCHES` and a function `check_installed`. The module is
imported just before its host, so an unused host costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from megatron_ext.config import active
from megatron_ext.patches import hooks
from megatron_ext.patches.registry import REGISTRY

__all__ = ["HOSTS", "arm", "check_some_host"]

HOSTS = {"megatron.bridge": "megatron_ext.hosts.bridge"}
"""The module that supports a host, by the host's package."""


def arm() -> None:
    """Register the patches of each host just before it is imported. Idempotent."""
    for package, module in HOSTS.items():
        begin: Callable[[], None] = partial(_begin, module)
        if package in sys.modules:
            begin()
        else:
            hooks.before(package, begin)


def _begin(name: str) -> None:
    from megatron_ext.config.flags import requested_flags

    module = import_module(name)
    REGISTRY.register(module.PATCHES)
    found = active.active()
    if requested_flags() or (found is not None and not found.is_sized):
        module.check_installed()


def check_some_host() -> None:
    """Check that at least one host is installed, and that every installed one can run.

    Raises:
        UserError: No host is installed, or a host lacks a requirement; names what to install.
    """
    from megatron_ext.errors import ArgumentsError

    here = [module for package, module in HOSTS.items() if find_spec(package) is not None]
    if not here:
        raise ArgumentsError(
            "configure was given no sizes, and no training loop that knows them is installed; "
            "give pipeline_ranks, num_microbatches and num_layers, or pip install "
            "'megatron-bridge>=0.6,<0.7' and train with its pretrain or finetune"
        )
    for module in here:
        import_module(module).check_installed()
