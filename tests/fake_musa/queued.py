"""The environment of a device that runs behind the host."""

from __future__ import annotations


def queued(*, connections: int = 8, stuck_s: float = 10, **costs: float) -> dict[str, str]:
    """Return what to add to the environment of a rank.

    Args:
        connections: Hardware queues of a device.
        stuck_s: How long nothing may move in any rank.
        costs: What things take, by the names of `csrc/mode.h`: `kernel_us`, `copy_us`, ...
    """
    return {
        "FAKE_MUSA_ASYNC": "1",
        "FAKE_MUSA_COST": ",".join(f"{name}={value}" for name, value in costs.items()),
        "FAKE_MUSA_STUCK_S": str(stuck_s),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
    }
