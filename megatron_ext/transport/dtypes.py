"""Names of dtypes in messages: DLPack's type code, times 256, and number of bits."""

from __future__ import annotations

import torch

__all__ = ["CAPSULE_CODE_OF", "CODE_OF", "DTYPE_OF"]

_CODES = {
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0,
    torch.uint8: 1, torch.uint16: 1, torch.uint32: 1, torch.uint64: 1,
    torch.float16: 2, torch.float32: 2, torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5, torch.complex128: 5,
    torch.bool: 6,
    torch.float8_e4m3fn: 10, torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12, torch.float8_e5m2fnuz: 13,
}  # fmt: skip

CODE_OF = {dtype: code << 8 | dtype.itemsize * 8 for dtype, code in _CODES.items()}
DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}

CAPSULE_CODE_OF = {
    dtype: CODE_OF[dtype]
    for dtype in (
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
        torch.float16, torch.float32, torch.float64, torch.bfloat16,
    )
}  # fmt: skip
"""Those that every supported torch takes from a DLPack capsule."""
