"""A kernel that runs until the host sets a flag, as a receive runs until its peer sends."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ext import devices

from . import processes

_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .u64 %address;
    .reg .u32 %word;
    .reg .pred %unset;
    ld.param.u64 %address, [flag];
again:
    ld.volatile.u32 %word, [%address];
    setp.eq.u32 %unset, %word, 0;
    @%unset bra again;
    ret;
}
"""
"""PTX, which the driver compiles, so no compiler is needed."""


@contextmanager
def spinning(at_most_s: float) -> Iterator[Any]:
    """Run a spinning kernel on a separate stream until the end of the context.

    It ends after `at_most_s` in any case, because work inside the context may wait for it.

    Yields:
        An event recorded after the kernel.
    """
    runtime = processes.runtime()
    stream, behind = runtime.Stream(), runtime.Event()
    flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    end = threading.Timer(at_most_s, flag.fill_, (1,))
    end.start()
    try:
        with runtime.stream(stream):
            _launch(flag)
            behind.record()
        yield behind
    finally:
        flag.fill_(1)
        end.cancel()
        stream.synchronize()


def _launch(flag: torch.Tensor) -> None:
    if processes.EMULATED:
        torch.ops.fake_musa.spin(devices.current().torch_device(0).index, flag)
        return
    driver, kernel = _kernel()
    address = ctypes.c_uint64(flag.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))


@functools.cache
def _kernel() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Load the kernel into the context created by torch."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _PTX))
    _check(driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin"))
    return driver, kernel


def _check(code: int) -> None:
    assert code == 0, f"error {code} of the CUDA driver"
