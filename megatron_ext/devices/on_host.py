"""The redirects that make `torch.cuda` and its device names mean the host.

The host answers calls of `torch.cuda` (see `host`), every CUDA device name means the CPU (see
`translate`), and every process group is a gloo group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_ext.devices import host
from megatron_ext.devices.backend import Redirect
from megatron_ext.devices.gloo import gloo_redirects
from megatron_ext.devices.translate import (
    answering,
    calling,
    collective_redirects,
    nvtx_redirects,
    returning,
    spelling_redirects,
    tensor_redirects,
    to,
    translator,
)

if TYPE_CHECKING:
    import torch

__all__ = ["redirects"]

_ANSWERS = "answers for the host in place of a GPU"
_NO_WORK = "has nothing to do on the host"
_NO_ACCELERATOR = "the host is not an accelerator, though a CUDA build of torch reports one"

_SHARED = (
    "current_stream",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_stream",
)
"""Functions of `torch.cuda` that `torch.accelerator` has as well."""


def redirects() -> Iterator[Redirect]:
    """List all redirects of the host."""
    yield from _namespace()
    yield from _accelerator()
    yield from spelling_redirects("cpu")
    yield from tensor_redirects(translator("cpu", indexed=False), pinning=False)
    yield from collective_redirects("gloo")
    yield from gloo_redirects()


def _answers() -> dict[str, Callable[[Any], object]]:
    """Return the host's replacements for functions and classes of `torch.cuda`, by name."""
    import torch

    return {
        # The device. Not an index: without an accelerator torch can place nothing on number 0.
        "is_available": returning(True),
        "is_initialized": returning(True),
        "is_bf16_supported": returning(True),
        "is_current_stream_capturing": returning(False),
        "device_count": to(host.local_world_size),
        "current_device": returning(torch.device("cpu")),
        "device": to(host.DeviceContext),
        "get_device_capability": returning((8, 0)),
        "get_device_name": answering(lambda: host.properties().name),
        "get_device_properties": answering(host.properties),
        # Streams and events.
        "Event": to(host.Event),
        "Stream": to(host.Stream),
        "StreamContext": to(host.StreamContext),
        "current_stream": answering(host.current_stream),
        "default_stream": answering(host.default_stream),
        "set_stream": calling(host.set_stream),
        "stream": calling(host.StreamContext),
        # Random numbers. torch.manual_seed calls manual_seed_all, which must not call it back:
        # the generator's own method does not.
        "default_generators": to(host.Generators()),
        "get_rng_state": answering(torch.default_generator.get_state),
        "get_rng_state_all": answering(lambda: [torch.default_generator.get_state()]),
        "initial_seed": to(torch.default_generator.initial_seed),
        "manual_seed": calling(_manual_seed),
        "manual_seed_all": calling(_manual_seed),
        "seed": to(torch.default_generator.seed),
        "seed_all": returning(None),
        "set_rng_state": calling(_set_rng_state),
        "set_rng_state_all": to(lambda states: _set_rng_state(states[0])),
        # torch queues a call until CUDA is initialised, which never happens here: restored random
        # number states would silently be lost.
        "_lazy_call": to(lambda function, **_kwargs: function()),
        "_lazy_init": returning(None),
        # Memory.
        "device_memory_used": answering(host.rss_bytes),
        "max_memory_allocated": answering(host.peak_rss_bytes),
        "max_memory_reserved": answering(host.peak_rss_bytes),
        "mem_get_info": answering(
            lambda: (host.total_memory_bytes() - host.rss_bytes(), host.total_memory_bytes())
        ),
        "memory_allocated": answering(host.rss_bytes),
        "memory_reserved": answering(host.rss_bytes),
        "memory_stats": answering(host.memory_stats),
        "reset_peak_memory_stats": answering(host.reset_peak_rss),
    }


def _namespace() -> Iterator[Redirect]:
    """List the redirects of functions and classes of `torch.cuda`."""
    import torch

    answers = _answers()
    for kind in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"):
        answers[f"{kind}Tensor"] = to(getattr(torch, f"{kind}Tensor"))
    for name, make in answers.items():
        if not hasattr(torch.cuda, name):  # newer than the oldest supported torch
            continue
        yield Redirect(f"torch.cuda:{name}", make, _ANSWERS)
    for name in ("get_rng_state", "set_rng_state"):
        yield Redirect(f"torch.cuda.random:{name}", answers[name], _ANSWERS)
    for name in ("empty_cache", "init", "ipc_collect", "set_device", "synchronize"):
        yield Redirect(f"torch.cuda:{name}", returning(None), _NO_WORK)
    yield from nvtx_redirects()
    yield Redirect("torch:Tensor.record_stream", returning(None), _NO_WORK)


def _accelerator() -> Iterator[Redirect]:
    """List the redirects of `torch.accelerator`, which torch itself calls."""
    import torch

    # The CUDA build of torch names CUDA there even without a GPU, and trusts
    # `torch.cuda.is_available`, which we have redirected.
    answers = _answers()
    found: dict[str, Callable[[Any], object]] = {
        "is_available": returning(False),
        "current_accelerator": returning(None),
        "device_count": returning(0),
    }
    for name, make in found.items():
        yield Redirect(f"torch.accelerator:{name}", make, _NO_ACCELERATOR)
    host_device = returning(torch.device("cpu"))
    yield Redirect("torch._C:_get_accelerator", host_device, _NO_ACCELERATOR)
    # From torch 2.14 on `torch.get_device_module` calls this one instead.
    yield Redirect("torch._C:_accelerator_getAccelerator", returning(None), _NO_ACCELERATOR)
    # Code that skips the check, because torch.cuda is available, gets the answers of torch.cuda.
    shared = {name: answers[name] for name in _SHARED}
    shared["current_device_index"] = answers["current_device"]
    shared["device_index"] = calling(host.DeviceContext)
    shared |= dict.fromkeys(("empty_cache", "set_device_index", "synchronize"), returning(None))
    for name, make in shared.items():
        if hasattr(torch.accelerator, name):  # some are newer than torch 2.7
            yield Redirect(f"torch.accelerator:{name}", make, _ANSWERS)


def _manual_seed(seed: int) -> None:
    import torch

    torch.default_generator.manual_seed(int(seed))


def _set_rng_state(new_state: torch.Tensor, *_device: Any, **_named: Any) -> None:
    import torch

    torch.default_generator.set_state(new_state)
