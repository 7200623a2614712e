"""Seeds the generators of Python and NumPy that a process shares, for the time of one forward.

Megatron draws from torch's generators only, but models and loss functions of others use `random`
and `numpy.random` as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# A spare generator for all forwards. To exchange NumPy's generator takes less than a microsecond,
# to copy its state and set it again takes 60 of them.
_SPARE = np.random.MT19937()


@contextmanager
def host_generators(seed: int) -> Iterator[None]:
    """Seed `random` and `numpy.random` with 63 bits, and let them go on afterwards where they were.

    NumPy draws normal numbers in pairs; the second number of a pair that is half used is lost.
    """
    python_state, numpys = random.getstate(), np.random.get_bit_generator()
    random.seed(seed)
    np.random.set_bit_generator(_SPARE)
    np.random.seed(seed % 2**32)  # the most that it takes
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_bit_generator(numpys)
