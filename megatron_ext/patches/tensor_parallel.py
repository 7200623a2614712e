"""Patches on the random numbers of tensor parallelism, and on recomputation beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_ext.patches.conditions import on_cpu, without_te
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


def _without_fp8(
    call: Callable[..., None], _instance: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> None:
    """Say that nothing is in FP8; upstream's default says the contrary."""
    call(fp8=None)


PATCHES = (
    Patch(
        id="tensor_parallel.rng_notice",
        target=f"{_MODULE}:CudaRNGStatesTracker.__init__",
        fn=_quieten,
        when=on_cpu,
        reason="each use of the device's generator is reported as a change of the host's, which "
        "on the host are one",
    ),
    Patch(
        id="tensor_parallel.recompute_without_fp8",
        target=f"{_MODULE}:CheckpointWithoutOutput.__init__",
        fn=_without_fp8,
        when=without_te,
        reason="it asks `fp8 is not None` of a default that is False, and then calls Transformer "
        "Engine, installed or not: --recompute-modules layernorm ends in a NameError",
    ),
)
