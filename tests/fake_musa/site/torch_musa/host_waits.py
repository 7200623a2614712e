"""Counts, by line of code, how often the host waits for a device that runs behind it.

This is not part of the real package; tests use it.
"""

import collections
import ctypes
import os
import sys
import threading
from pathlib import Path

import torch

__all__ = ["by_line", "reset"]

_counts = collections.Counter()
_OUTSIDE_OF = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parent)
)

# Files of this package through which calls that name a CUDA device go.
_TRANSLATIONS = tuple(
    f"/megatron_ext/{part}"
    for part in ("devices/translate.py", "devices/musa.py", "patches/")
)


def by_line():
    """Return a count per (what the host waits for, line, name of the thread)."""
    return dict(_counts)


def reset():
    """Reset the counts."""
    _counts.clear()


def _line():
    """Return the innermost line outside torch and outside the layers in front of it."""
    frame = sys._getframe(2)
    while frame is not None and _is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "torch's own thread"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"


def _is_outside(path):
    return path.startswith(_OUTSIDE_OF) or any(part in path for part in _TRANSLATIONS)


def _count(call):
    _counts[call.decode(), _line(), threading.current_thread().name] += 1


_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_count)


def begin():
    """Make the backend report each wait."""
    ctypes.CDLL(os.environ["FAKE_MUSA_LIBRARY"]).fake_musa_on_host_wait(_callback)
