"""Seeds Python's and NumPy's global generators for the duration of one forward pass.

Megatron draws only from torch's generators, but users' models and loss functions also use `random`
and `numpy.random`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# A spare generator for all forward passes. Swapping NumPy's generator takes less than 1 us; saving
# and restoring its state takes 60 us.
_SPARE = np.random.MT19937()


@contextmanager
def host_generators(seed: int) -> Iterator[None]:
    """Seed `random` and `numpy.random` with 63 bits, and restore their states afterwards.

    NumPy draws normal numbers two at a time. If only the first one has been used, the second one is
    lost.
    """
    python_state = random.getstate()
    numpy_generator = np.random.get_bit_generator()
    random.seed(seed)
    np.random.set_bit_generator(_SPARE)
    np.random.seed(seed % 2**32)  # NumPy accepts at most 32 bits
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_bit_generator(numpy_generator)
