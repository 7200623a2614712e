"""Dtype codes in messages: DLPack's type code times 256, plus the number of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_ext.errors import MessageMismatch

if TYPE_CHECKING:
    from megatron_ext.transport._C import Message

_CODES = {
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0,
    torch.uint8: 1, torch.uint16: 1, torch.uint32: 1, torch.uint64: 1,
    torch.float16: 2, torch.float32: 2, torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex32: 5, torch.complex64: 5, torch.complex128: 5,
    torch.bool: 6,
    torch.float8_e4m3fn: 10, torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12, torch.float8_e5m2fnuz: 13, torch.float8_e8m0fnu: 14,
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
"""Codes for the dtypes that every supported torch release accepts in a DLPack capsule."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that stores its actual values; the same tensor if possible."""
    # A view such as `x.conj()` or `x.conj().imag` shares the memory of `x`, and only a flag marks
    # the changed sign. That flag would not be sent with the bytes.
    return tensor.contiguous().resolve_conj().resolve_neg()


def tensor_on(message: Message) -> torch.Tensor:
    """Return a CPU tensor that shares a message's memory, with the message's shape and dtype.

    Raises:
        MessageMismatch: This version of torch, or of this package, does not support the dtype.
    """
    dtype = DTYPE_OF.get(message.dtype)
    if dtype is None:
        raise MessageMismatch(
            f"a message of {len(message)} bytes has dtype {message.dtype:#x}, which this rank "
            f"does not support; install the same torch and megatron_ext on all ranks"
        )
    tensor = torch.empty(0, dtype=dtype)
    if len(message) == 0:
        return tensor.reshape(message.shape)
    raw = torch.frombuffer(message, dtype=torch.uint8)
    shape = torch.Size(message.shape)
    # Set the storage instead of returning a view: Megatron rejects views when it frees outputs.
    return tensor.set_(raw.untyped_storage(), 0, shape)  # type: ignore[call-overload, no-any-return]
