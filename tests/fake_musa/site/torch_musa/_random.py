"""Random numbers: one generator for each device, separate from the CPU's."""

import contextlib

import torch

import torch_musa

from ._device import _lazy_call, _lazy_init, current_device, device_count

__all__ = [
    "fork_rng",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _index(device):
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def get_rng_state(device="musa"):
    _lazy_init()
    return torch_musa.default_generators[_index(device)].get_state()


def get_rng_state_all():
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state, device="musa"):
    state = new_state.clone(memory_format=torch.contiguous_format)
    _lazy_call(lambda: torch_musa.default_generators[_index(device)].set_state(state))


def set_rng_state_all(new_states):
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed):
    _lazy_call(
        lambda: torch_musa.default_generators[current_device()].manual_seed(int(seed))
    )


def manual_seed_all(seed):
    def seed_each():
        for generator in torch_musa.default_generators:
            generator.manual_seed(int(seed))

    _lazy_call(seed_each)


def seed():
    _lazy_call(lambda: torch_musa.default_generators[current_device()].seed())


def seed_all():
    def seed_each():
        for generator in torch_musa.default_generators:
            generator.seed()

    _lazy_call(seed_each)


def initial_seed():
    _lazy_init()
    return torch_musa.default_generators[current_device()].initial_seed()


@contextlib.contextmanager
def fork_rng(
    devices=None,
    enabled=True,
    _caller="fork_rng",
    _devices_kw="devices",
    device_type="musa",
):
    """Like torch's `fork_rng`, but for `musa` by default."""
    if not enabled:
        yield
        return
    module = getattr(torch, torch.device(device_type).type)
    devices = list(range(module.device_count()) if devices is None else devices)
    cpu_state = torch.get_rng_state()
    states = [module.get_rng_state(device) for device in devices]
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        for device, state in zip(devices, states, strict=True):
            module.set_rng_state(state, device)
