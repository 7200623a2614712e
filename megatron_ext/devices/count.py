"""Counts the accelerators of this machine without importing torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["VISIBLE_DEVICES", "count_devices"]

_NODE = re.compile(r"nvidia\d+|mtgpu\.\d+")
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")
"""Environment variables that restrict a process to some devices, by number."""


def count_devices(directory: Path = Path("/dev")) -> int:
    """Return the number of accelerators that the drivers show, or that the environment allows.

    Args:
        directory: Directory of device files.
    """
    for name in VISIBLE_DEVICES:
        visible = os.environ.get(name)
        if visible:
            return len(visible.split(","))
    return sum(_NODE.fullmatch(entry.name) is not None for entry in directory.iterdir())
