"""Arming and disarming the device."""

from __future__ import annotations

import os
import warnings

from tests.ranks import run_ranks


def disarm_and_arm_late() -> None:
    import torch
    from megatron.core.tensor_parallel import random as copied

    from megatron_ext import patches
    from megatron_ext.patches import REGISTRY, device

    assert torch.cuda.is_available()
    assert copied._lazy_call is torch.cuda._lazy_call
    redirected = [row for row in REGISTRY.rows() if row.feature == "cpu"]
    assert len(redirected) > 80
    assert all(row.state == "installed" and row.intact for row in redirected)

    armed = torch.empty, torch.Tensor.to, torch.distributed.new_group, copied._lazy_call
    patches.REGISTRY.deactivate()
    assert not torch.cuda.is_available()
    assert "to" not in vars(torch.Tensor)
    assert (
        torch.distributed.new_group.__module__ == "torch.distributed.distributed_c10d"
    )
    assert copied._lazy_call is torch.cuda._lazy_call is not armed[3]
    assert {row.state for row in REGISTRY.rows() if row.feature == "cpu"} == {"off"}

    # Late: megatron.core has copied names of torch.cuda, which have to be found by identity.
    patches.arm()
    assert torch.cuda.is_available()
    assert copied._lazy_call is torch.cuda._lazy_call
    assert torch.empty(1, device="cuda").device.type == "cpu"
    assert device.arm() is device.arm()


def environment() -> None:
    from megatron_ext import patches

    patches.REGISTRY.deactivate()
    shown = warnings.showwarning
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "7"
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    for _ in range(2):
        patches.arm()
        assert (
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "7"
        )  # the user's choice stays
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert warnings.showwarning is not shown
        patches.REGISTRY.deactivate()
        assert warnings.showwarning is shown
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "7"
        assert "TORCHDYNAMO_DISABLE" not in os.environ
    patches.arm()
    os.environ["TORCHDYNAMO_DISABLE"] = "0"  # changed since: no longer ours
    patches.REGISTRY.deactivate()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_disarm_and_arm_late() -> None:
    run_ranks(1, disarm_and_arm_late)


def test_environment() -> None:
    run_ranks(1, environment)
