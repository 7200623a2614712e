"""Stand-in for torch_musa 2.7.1 on the emulated device. Only tests put this on `sys.path`.

It has the names and behaviour of the real package that a user of torch can notice, and lacks what
the real one lacks (`nvtx`, `CUDAGraph`, `cudart`, `random`, `utilization`, ...), so that code that
would fail on Moore Threads hardware fails here. Like the real one, it is loaded by `import torch`,
through the entry point group `torch.backends`.

Environment: FAKE_MUSA_LIBRARY is the compiled backend, FAKE_MUSA_DEVICES the number of devices.
With FAKE_MUSA_ASYNC=1 the devices run behind the host (see ../../README.md).
"""

import torch

from . import _backend, _mccl, _tensor, amp, host_waits, memory  # noqa: F401
from ._device import *  # noqa: F403
from ._random import *  # noqa: F403
from ._random import fork_rng
from ._stream import *  # noqa: F403
from .amp import get_amp_supported_dtype  # noqa: F401
from .memory import *  # noqa: F403

__version__ = "2.7.1"
OutOfMemoryError = torch.OutOfMemoryError

globals().update(_tensor.typed_constructors())
_tensor.extend_torch()
_mccl.register()
host_waits.begin()
torch.random.fork_rng = fork_rng
torch.cuda._lazy_init = _lazy_init  # noqa: F405
torch.cuda._lazy_call = _lazy_call  # noqa: F405


def _autoload():
    """Entry point for `import torch`; importing this module is all that is needed."""
