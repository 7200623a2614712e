"""The constraints of the device in use on Megatron's arguments."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.errors import ArgumentsError

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig

__all__ = ["device_arguments"]

_LOG = logging.getLogger(__name__)


def device_arguments(args: Namespace, config: PipelineConfig) -> dict[str, Any]:
    """Return the arguments, by name, that the device corrects; refuse the others it cannot accept.

    Only `--distributed-backend` is corrected, with a notice: scripts written for GPUs always name
    NCCL, and each device has only one possible backend.

    Raises:
        ArgumentsError: One line for each mistake.
    """
    device, roles = devices.current(), config.disaggregation
    is_of_forward_ranks = roles is not None and roles.forward_device == device.name
    if config.device not in {"auto", device.name} and not is_of_forward_ranks:
        raise ArgumentsError(
            f"--device-backend {config.device} came after the {device.name} backend was armed "
            "(Megatron was imported before the arguments were known); set "
            f"MEGATRON_EXT_DEVICE={config.device} too"
        )
    wanted, errors = {}, []
    for dest, (value, reason) in device.argument_defaults.items():
        found = getattr(args, dest, value)
        if found == value:
            continue
        if dest == "distributed_backend":
            _LOG.warning("--distributed-backend %s: %s is used, %s", found, value, reason)
            wanted[dest] = value
            continue
        flag = f"--{dest.replace('_', '-')}"
        errors.append(f"{flag} is {found!r}, {device.name} needs {value!r}: {reason}")
    errors.extend(device.argument_errors(args))
    if errors:
        raise ArgumentsError("\n".join(errors))
    return wanted
