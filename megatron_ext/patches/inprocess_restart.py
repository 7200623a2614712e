"""Patches for `--inprocess-restart` in nvidia-resiliency-ext (NVRx) and in Megatron's use of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from inspect import signature
from threading import Thread
from typing import Any

from megatron_ext.config import active
from megatron_ext.devices import on_cpu
from megatron_ext.errors import ArgumentsError
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name
from megatron_ext.upstream.parent import stores_are_hosted

_NVRX = "nvidia_resiliency_ext.inprocess"
_MEGATRON = "megatron.training.inprocess_restart"

PATCHES = PatchTable(feature="inprocess_restart")


# Rows with targets in NVRx are not required, because a release without these names may
# be installed for other uses. `megatron_ext/config/restarts.py` then rejects the flag.
@PATCHES.row(
    "inprocess_restart.our_part", f"{_NVRX}.wrap:Wrapper.__init__", required=False
)
def _add_our_part(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """NVRx cannot unblock ranks waiting for our messages, and transport names would not match."""
    from megatron_ext.training.survival import with_our_part

    settings = dict(kwargs)
    # Our part is added to NVRx's defaults; without its `abort`, ranks would stay in NCCL.
    parameters = signature(call).parameters
    for name in ("initialize", "abort", "finalize"):
        settings.setdefault(name, parameters[name].default)
    call(*args, **with_our_part(settings))


@PATCHES.row("inprocess_restart.unread_flags", f"{_MEGATRON}:inprocess_restart")
def _pass_unread_flags(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron parses --inprocess-progress-watchdog-interval and --inprocess-max-iterations but
    does not pass them to NVRx.
    """
    settings = by_name(call, args, kwargs)["args"]
    try:
        nvrx = import_module(_NVRX)
    except ImportError:  # Megatron warns and trains without restarts
        return call(*args, **kwargs)
    interval = timedelta(seconds=settings.inprocess_progress_watchdog_interval)
    max_iterations = settings.inprocess_max_iterations
    wrapper = partial(nvrx.Wrapper, progress_watchdog_interval=interval)
    controller = partial(nvrx.initialize.RetryController, max_iterations=max_iterations)
    with (
        _replaced(nvrx, "Wrapper", wrapper),
        _replaced(nvrx.initialize, "RetryController", controller),
    ):
        return call(*args, **kwargs)


@PATCHES.row(
    "inprocess_restart.hosted_store",
    f"{_MEGATRON}:maybe_wrap_for_inprocess_restart",
    when=stores_are_hosted,
)
def _join_hosted_store(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Rank 0 hosts the restart store, so the job would not survive losing rank 0."""
    distributed = import_module("torch.distributed")
    with suppress(ImportError):
        # NVRx subclasses TCPStore, so import NVRx before replacing the name.
        import_module(_NVRX)
    make_store = distributed.TCPStore

    def client(**settings: Any) -> Any:
        return make_store(**{**settings, "is_master": False})

    with _replaced(distributed, "TCPStore", client):
        return call(*args, **kwargs)


@PATCHES.row(
    "inprocess_restart.store_of_attempt",
    "megatron.training.initialize:_initialize_distributed",
    when=lambda: active.attempt() is not None,
)
def _connect_to_store(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron uses one store for all attempts, so waiting on it for a lost rank never ends."""
    from megatron_ext.training.survival import store_connection

    parameters = by_name(call, args, kwargs)
    store = store_connection.open(parameters["store"])
    return call(**{**parameters, "store": store})


@PATCHES.row(
    "inprocess_restart.flags_of_attempts",
    f"{_MEGATRON}:maybe_wrap_for_inprocess_restart",
    since=(0, 18),
    order=-1,
)
def _refuse_scripts(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron's scripts parse flags outside the restarted function, so a restart has no flags."""
    (function,) = by_name(call, args, kwargs).values()
    # Our loop for the installed wheel restarts as a whole and parses its flags again.
    if getattr(function, "__module__", "").startswith("megatron_ext."):
        return call(*args, **kwargs)
    from megatron.training.arguments import parse_args

    if parse_args(ignore_unknown_args=True).inprocess_restart:
        raise ArgumentsError(
            "--inprocess-restart: since 0.18, Megatron's own scripts parse flags only once, so a "
            "restarted run has no flags; unset MEGATRON_LM_PATH to run the installed "
            "megatron-core's training loop, or remove --inprocess-restart"
        )
    return call(*args, **kwargs)


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Replace a module's attribute while the body runs."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@PATCHES.row(
    "inprocess_restart.finalize",
    f"{_NVRX}.finalize:ThreadedFinalize.__call__",
    kind="replace",
    when=on_cpu,
    required=False,
)
def _finalize(
    _call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """NVRx selects a CUDA device in the thread that resets Megatron, but the host has none."""
    from nvidia_resiliency_ext.inprocess.exception import (
        TimeoutError as FinalizeTimeout,
    )

    (state,) = by_name(_call, args, kwargs).values()
    thread = Thread(
        target=instance.fn, args=instance.args, kwargs=instance.kwargs, daemon=True
    )
    thread.start()
    thread.join(instance.timeout.total_seconds())
    if thread.is_alive():
        raise FinalizeTimeout
    return state


@PATCHES.row(
    "inprocess_restart.health",
    f"{_NVRX}.health_check:CudaHealthCheck.__call__",
    kind="replace",
    when=on_cpu,
    required=False,
)
def _is_healthy(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """NVRx synchronises a CUDA device to check that it works, but the host has none."""
    (state,) = by_name(call, args, kwargs).values()
    return state


@PATCHES.row(
    "inprocess_restart.restart_health",
    f"{_NVRX}.wrap:Wrapper._construct_restart_health_check",
    kind="replace",
    when=on_cpu,
    required=False,  # since NVRx 0.5
)
def _check_no_gpu(
    _call: Call,
    instance: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> None:
    """NVRx queries NVIDIA's driver for GPUs, links and adapters, but the host has none."""
    instance.restart_health_check = instance.health_check


@PATCHES.row(
    "inprocess_restart.half_written",
    "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager:"
    "LocalCheckpointManager._ensure_dir",
    required=False,
)
def _remove_half_written(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """NVRx refuses to save a local checkpoint if a killed rank left an unfinished one."""
    is_first = not instance._dir_created
    call(*args, **kwargs)
    if is_first:
        # NVRx calls this before its first save, so earlier attempts left these files.
        for path in instance.local_ckpt_dir.glob("*.dirty.pt"):
            path.unlink(missing_ok=True)


@PATCHES.row(
    "inprocess_restart.silent_ranks",
    f"{_NVRX}.store:StoreMixin.get_initial_ranks",
    required=False,
)
def _as_numbers(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> list[int]:
    """If a host stops responding, NVRx records its ranks as bytes but cannot read them when the job
    ends.
    """
    return [int(rank) for rank in call(*args, **kwargs)]
