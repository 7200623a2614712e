"""Counts how often the host waits for a device that runs behind it, by the line that made it wait.

Not part of the real package: tests ask it.
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

# Of this package: calls that name a CUDA device go through these.
_TRANSLATIONS = tuple(
    f"/megatron_ext/{part}" for part in ("devices/translate.py", "devices/musa.py", "patches/")
)


def by_line():
    """Return a count for each (what the host waits for, line, name of the thread)."""
    return dict(_counts)


def reset():
    """Count from now on."""
    _counts.clear()


def _line():
    """Return the innermost line that is neither torch's nor of what stands in front of it."""
    frame = sys._getframe(2)
    while frame is not None and _is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "torch's own thread"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} {code.co_name}"


def _is_outside(path):
    return path.startswith(_OUTSIDE_OF) or any(part in path for part in _TRANSLATIONS)


def _count(what):
    _counts[what.decode(), _line(), threading.current_thread().name] += 1


_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_count)


def begin():
    """Have the backend tell of each wait."""
    ctypes.CDLL(os.environ["FAKE_MUSA_LIBRARY"]).fake_musa_on_host_wait(_callback)
