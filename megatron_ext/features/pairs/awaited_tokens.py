"""Patches that make a host run W until its peers reach a token exchange.

The patches apply only to steps with `HostWeights`. Devices do not need them.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name

HOST_WEIGHTS = "pairs.host_weights"
"""Name of the running step's W (`Runtimes.kept_by_feature`)."""
_MAPPINGS = "megatron.core.tensor_parallel.mappings"


def _host_weights() -> Any:
    """Return the running step's W, or None if they run at their place in the table."""
    configuration = active.active()
    if configuration is None:
        return None
    runtimes: Any = configuration.runtimes
    if runtimes is None:
        return None
    return runtimes.kept_by_feature.get(HOST_WEIGHTS)


PATCHES = PatchTable(feature="schedules", of=_host_weights)


# The dispatcher gathers the token counts first, so that is where a fast rank waits.
@PATCHES.row("pairs.await_tokens", f"{_MAPPINGS}:_AllToAll.forward")
@PATCHES.row("pairs.await_counts", f"{_MAPPINGS}:_gather_along_first_dim")
@PATCHES.row("pairs.await_sums", f"{_MAPPINGS}:_reduce_scatter_along_first_dim")
def _await_peers(
    weights: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """In a token exchange, a host would sleep until all ranks arrive, instead of running W."""
    group = by_name(call, args, kwargs)["group"]
    if group is not None and group.size() > 1:
        weights.await_peers(group)
    return call(*args, **kwargs)
