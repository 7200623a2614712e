"""Makes gloo replace NCCL under Megatron."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_ext.devices.backend import Redirect

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo

__all__ = ["gloo_redirects"]


def gloo_redirects() -> Iterator[Redirect]:
    """List the redirects of gloo's groups and collectives."""
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        yield Redirect(
            f"{module}:all_gather_into_tensor",
            _flat_gather,
            "gloo wants input and output with equally many dimensions, NCCL only equal sizes",
        )
    yield Redirect(
        "torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
        _one_worker,
        "two worker threads of a group that end coalesced collectives at the same moment free "
        "the same memory",
    )


def _flat_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if output_tensor.dim() != input_tensor.dim():
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
        return original(output_tensor, input_tensor, *args, **kwargs)

    return all_gather_into_tensor


# torch gives each gloo group two worker threads, and both write the name of the collective that
# they have finished into one string of the group, without a lock (`ProcessGroupGloo::runLoop`,
# torch 2.13). A name of 16 characters or more lives on the heap, as those of coalesced collectives
# do: if two of them end at the same moment, both free the same memory, and the process crashes
# later, somewhere else. The distributed optimizer gathers parameters that way, and models of
# several chunks have several such gathers in flight. One worker runs collectives in the order of
# their calls; that order is the same on all ranks anyway.
def _one_worker(original: Callable[..., None]) -> Callable[..., None]:
    def default_options(timeout: timedelta | None = None, enable_reconfigure: bool = False) -> Any:
        """Return torch's options for its arguments (the last is of torch 2.15), but one thread."""
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        options._devices = (
            [gloo.create_device(interface=name) for name in interfaces.split(",")]
            if interfaces
            else [gloo.create_default_device()]
        )
        options._threads = 1
        if timeout is not None:
            options._timeout = timeout
        if enable_reconfigure:
            options.enable_reconfigure = True
        return options

    def initialize(
        group: ProcessGroupGloo, store: Any, rank: int, size: int, *last: Any, **named: Any
    ) -> None:
        has_options = "options" in named or (last and not isinstance(last[0], timedelta))
        if has_options:
            original(group, store, rank, size, *last, **named)
        else:
            original(group, store, rank, size, default_options(*last, **named))

    return initialize
