"""Additions of the package to torch's tensors, modules and storages."""

import torch

from ._device import device_index

_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class _TypedTensor(type):
    """Type of `torch.musa.FloatTensor` and similar: callable, and supports isinstance()."""

    def __instancecheck__(cls, value):
        return (
            isinstance(value, torch.Tensor)
            and value.is_musa
            and value.dtype == cls.dtype
        )

    def __call__(cls, *args):
        if len(args) == 1 and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=cls.dtype, device="musa")
        return torch.empty(args, dtype=cls.dtype, device="musa")


def typed_constructors():
    return {
        name: _TypedTensor(name, (), {"dtype": dtype, "__module__": "torch.musa"})
        for name, dtype in _TYPES.items()
    }


def _to_musa(self, device=None, non_blocking=False, **kwargs):
    device = torch.device("musa", device_index(device, optional=True))
    return self.to(device, non_blocking=non_blocking, **kwargs)


def _with_int_device(method):
    """Make an int as device mean this kind of device."""

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("musa", args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("musa", kwargs["device"])
        return method(self, *args, **kwargs)

    return to


def extend_torch():
    torch.Tensor.is_musa = property(lambda self: self.device.type == "musa")
    torch.Tensor.musa = _to_musa
    torch.Tensor.to = _with_int_device(torch.Tensor.to)
    torch.nn.Module.musa = lambda self, device=None: self._apply(
        lambda t: t.musa(device)
    )
    is_musa_storage = property(lambda self: self.device.type == "musa")
    torch.UntypedStorage.is_musa = is_musa_storage
    torch.UntypedStorage.is_cuda = is_musa_storage  # as in the real package
    _extend_serialization()


def _tag(storage):
    return f"musa:{storage.device.index}" if storage.device.type == "musa" else None


def _restore(storage, location):
    if not location.startswith("musa"):
        return None
    index = torch.device(location).index or 0
    if index >= torch.musa.device_count():
        raise RuntimeError(
            f"Attempting to deserialize object on MUSA device {index} but "
            f"torch.musa.device_count() is {torch.musa.device_count()}."
        )
    with torch.musa.device(index):
        restored = torch.UntypedStorage(storage.nbytes(), device=torch.device(location))
    if not getattr(storage, "_torch_load_uninitialized", False):
        restored.copy_(storage, False)
    return restored


def _extend_serialization():
    torch.serialization.register_package(999, _tag, _restore)
