"""The environment of a device that runs behind the host."""

from __future__ import annotations


def queued(
    *, connections: int = 8, stuck_s: float = 10, **costs: float
) -> dict[str, str]:
    """Return the variables to add to a rank's environment.

    Args:
        connections: Number of hardware queues per device.
        stuck_s: Time without progress on any rank after which a standstill is reported.
        costs: Costs of operations, by the names in `csrc/mode.h`: `kernel_us`, `copy_us`, ...
    """
    return {
        "FAKE_MUSA_ASYNC": "1",
        "FAKE_MUSA_COST": ",".join(f"{name}={value}" for name, value in costs.items()),
        "FAKE_MUSA_STUCK_S": str(stuck_s),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(connections),
    }
