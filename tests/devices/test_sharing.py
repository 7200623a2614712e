"""Refusals for a device that cannot share its memory; sharing itself: test_direct.py."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.devices.cpu import CpuDevice
from megatron_ext.devices.sharing import Sharing
from megatron_ext.errors import DeviceError


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("libnothing.so.1", "libnothing.so.1: cannot open"),
        ("libc.so.6", "symbol: cudaMalloc"),
    ],
)
def test_a_library_that_cannot_share_is_named(library: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason) as refused:
        Sharing(torch.cuda, torch.device("cuda", 0), library)
    assert "use --pipeline-device-path staged" in str(refused.value)


def test_the_host_needs_no_sharing() -> None:
    with pytest.raises(
        DeviceError, match="--pipeline-device-path ipc bypasses host memory"
    ):
        CpuDevice().sharing(torch.device("cpu"))
