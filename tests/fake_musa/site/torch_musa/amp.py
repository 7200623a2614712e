"""Automatic mixed precision: torch's own parts with `musa` filled in."""

import torch

from ._device import is_bf16_supported


def custom_fwd(fwd=None, *, cast_inputs=None):  # no device_type, unlike torch.amp's
    return torch.amp.custom_fwd(fwd, device_type="musa", cast_inputs=cast_inputs)


def custom_bwd(bwd):
    return torch.amp.custom_bwd(bwd, device_type="musa")


class autocast(torch.amp.autocast):
    """`torch.autocast` for this device."""

    def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
        super().__init__(
            "musa", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled
        )


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for this device."""

    def __init__(self, **kwargs):
        super().__init__("musa", **kwargs)


def get_amp_supported_dtype():
    return [torch.float16, *([torch.bfloat16] if is_bf16_supported() else [])]


# Without arguments these query and switch this device, not CUDA.
_is_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled


def _is_autocast_enabled(*args):
    return _is_enabled(*(args or ("musa",)))


def _set_autocast_enabled(*args):
    return _set_enabled(*(args if len(args) == 2 else ("musa", *args)))


torch.is_autocast_enabled = _is_autocast_enabled
torch.set_autocast_enabled = _set_autocast_enabled
