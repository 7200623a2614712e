"""Patches on the random numbers of tensor parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_ext.patches.conditions import on_cpu
from megatron_ext.patches.registry import REGISTRY, Patch

__all__ = ["PATCHES"]

_MODULE = "megatron.core.tensor_parallel.random"
_NOTICE = "CPU RNG state changed"


class _WithoutNotice(logging.Filter):
    """Drops the notice while the patches are active; everything else passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is wanted."""
        return not (REGISTRY.active and on_cpu() and str(record.msg).startswith(_NOTICE))


_FILTER = _WithoutNotice()


def _quieten(
    call: Callable[..., None], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Filter the notice out from the first tracker on."""
    logging.getLogger(_MODULE).addFilter(_FILTER)  # adds it once
    call(*args, **kwargs)


PATCHES = (
    Patch(
        id="tensor_parallel.rng_notice",
        target=f"{_MODULE}:CudaRNGStatesTracker.__init__",
        fn=_quieten,
        when=on_cpu,
        reason="each use of the device's generator is reported as a change of the host's, which "
        "on the host are one",
    ),
)
