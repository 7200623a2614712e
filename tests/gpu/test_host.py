"""Stops of the host or the device: a kernel that waits for a peer, and waits of the host."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import devices
from tests.runtime.capture import GPT, PP4, run_here

from . import processes
from .spinning import spinning
from .test_training import PLAIN, needs_megatron

pytestmark = pytest.mark.gpu

_LONG_S = 3.0
"""A spinning kernel ends after that."""


def _kernel() -> None:
    """Run a kernel that has run before."""
    side = processes.runtime().Stream()
    with processes.runtime().stream(side):
        torch.ones(8, device=devices.current().torch_device(0)).mul_(2)
    side.synchronize()


def _new_kernel() -> None:
    """Run a kernel for the first time, which the driver may have to load."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.ones(8, device="cuda").erfinv_()
    side.synchronize()


def _free() -> None:
    """Give memory back to the driver, as the allocator does before it says that memory is full."""
    torch.cuda.empty_cache()


def _register() -> None:
    """Register host memory with the driver."""
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    runtime.cudaHostUnregister(memory.data_ptr())


def _pin() -> None:
    """Take pinned memory of a size that was not used before."""
    torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)


_ACTS = {"a kernel": _kernel}
_LOADING = ["EAGER"]
if (
    not processes.EMULATED
):  # which has no lazy loading, no full memory and no driver to ask
    _ACTS |= {
        "a new kernel": _new_kernel,
        "memory is freed": _free,
        "memory is registered": _register,
        "memory is pinned": _pin,
    }
    _LOADING.append("LAZY")


def beside_a_spinning_kernel(what: str) -> tuple[bool, float]:
    """Do something while a kernel of another stream spins.

    Returns:
        Whether the kernel was still spinning when it was done, and how long it took, in seconds.
    """
    devices.current().bind(0)
    _kernel()
    devices.current().synchronize()
    block = torch.ones(
        64 << 20, dtype=torch.uint8, device=devices.current().torch_device(0)
    )
    del block  # something to free
    with spinning(_LONG_S) as behind:
        begin_s = time.perf_counter()
        _ACTS[what]()
        took_s = time.perf_counter() - begin_s
        return not behind.query(), took_s


@pytest.mark.parametrize("loading", _LOADING)
@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("what", _ACTS)
def test_what_a_spinning_kernel_blocks(
    what: str,
    connections: int,
    loading: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """With several connections a kernel of another stream goes on; the rest is only shown."""
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
        "CUDA_MODULE_LOADING": loading,
    }
    ((went_on, took_s),) = processes.run(
        1, beside_a_spinning_kernel, what, directory=tmp_path / "run", **environment
    )
    record_property(
        what, f"{'goes on' if went_on else 'is blocked'}, {1e3 * took_s:.1f} ms"
    )
    if what == "a kernel" and connections > 1:
        assert went_on
    if processes.EMULATED and connections == 1:
        assert not went_on


@contextmanager
def _no_waits() -> Iterator[None]:
    """Raise at the end if the host waited for the device, in this thread; it says where."""
    if processes.EMULATED:
        from torch_musa import host_waits

        host_waits.reset()
        yield
        waits = [str(key) for key in host_waits.by_line() if key[-1] == "MainThread"]
    else:
        waits = []
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: waits.append(_where(message))
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in waits if each.startswith("called a synchronizing")]
    if waits:
        lines = "\n".join(
            f"{number} x {line}" for line, number in Counter(waits).items()
        )
        raise RuntimeError(f"the host waits for the device:\n{lines}")


def _where(message: object) -> str:
    """Return a warning with the innermost lines that led to it."""
    stack = traceback.extract_stack()[:-2]
    lines = [
        f"{Path(each.filename).name}:{each.lineno}" for each in reversed(stack[-8:])
    ]
    return f"{message} <- {' <- '.join(lines)}"


def waits_are_seen() -> str:
    """Wait for the device where that is forbidden."""
    devices.current().bind(0)
    number = torch.ones(1, device=devices.current().torch_device(0))
    with pytest.raises(RuntimeError) as raised, _no_waits():
        number.item()
    return str(raised.value)


def test_a_wait_of_the_host_is_an_error(tmp_path: Path) -> None:
    (message,) = processes.run(1, waits_are_seen, directory=tmp_path / "run")
    assert "waits for the device" in message
    assert "test_host.py" in message


def train_without_waits(flags: str) -> int:
    """Train as one rank; return the steps whose actions the host launched without a wait."""
    from megatron_ext.runtime import runtime

    steps: list[None] = []

    class StrictExecutor(runtime.Executor):
        def run(self) -> None:
            with _no_waits():
                super().run()
            steps.append(None)

    runtime.Executor = StrictExecutor  # type: ignore[misc]  # this process is a rank and ends
    devices.current().bind(0)
    processes.join()
    run_here("gpt", flags.split())
    torch.distributed.destroy_process_group()
    return len(steps)


_TABLES = {
    "1f1b by ipc": "--pipeline-schedule 1f1b --pipeline-device-path ipc ",
    "zb-h1 by ipc": "--pipeline-schedule zb-h1 --pipeline-device-path ipc ",
    "zb-h1 staged": "--pipeline-schedule zb-h1 --pipeline-device-path staged ",
}


@needs_megatron
@pytest.mark.parametrize("table", _TABLES)
def test_the_host_does_not_wait_in_a_step(table: str, tmp_path: Path) -> None:
    flags = GPT + PP4 + PLAIN + _TABLES[table] + "--pipeline-transport shm "
    flags += "--no-check-for-nan-in-loss-and-grad "
    found = processes.run(4, train_without_waits, flags, directory=tmp_path / "run")
    assert found == [3] * 4
