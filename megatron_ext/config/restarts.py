"""Checks the requirements of `--inprocess-restart` and the state that it cannot restore."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from megatron_ext.config.refusals import Preflight, Refusal

_NEEDED = (
    ("wrap", "Wrapper"),
    ("finalize", "ThreadedFinalize"),
    ("health_check", "CudaHealthCheck"),
)
"""NVRx modules and the classes in them that `megatron_ext/patches/inprocess_restart.py` changes."""


def place_local_checkpoints(answer: Preflight, args: Namespace) -> None:
    """Save a folded pipeline's local checkpoints in a folder that other placements do not use.

    Megatron names tensors in local checkpoints by rank and chunk, so a pipeline with a different
    placement would load the wrong layers.
    """
    directory = getattr(args, "non_persistent_local_ckpt_dir", None)
    is_local = getattr(args, "non_persistent_ckpt_type", None) == "local"
    if not is_local or directory is None:
        return
    if answer.pipeline is None or not answer.pipeline.is_folded:
        return
    placement = answer.pipeline.placement
    name = f"{placement.name}-of-{placement.num_stages}-stages"
    # The changed setting may be checked again, for example by a host, so do not nest
    # the folder twice.
    if Path(directory).name == name:
        return
    folder = Path(directory) / name
    answer.arguments["non_persistent_local_ckpt_dir"] = str(folder)
    answer.changes.append(
        f"local checkpoints are saved in {directory}/{name}, because Megatron would load the wrong "
        "layers from them under another placement"
    )


def check_restart(answer: Preflight, args: Namespace, *, in_job: bool) -> None:
    """Add refusals and notices about `--inprocess-restart` under our pipelines and transports.

    `in_job` means that this is a process in the job, with the job's software.
    """
    is_ours = answer.pipeline is not None or answer.transport_only is not None
    if not is_ours or not getattr(args, "inprocess_restart", False):
        return
    # Only a process in the job knows the job's software.
    if in_job and find_spec("nvidia_resiliency_ext") is None:
        refusal = Refusal(
            "inprocess_restart",
            "--inprocess-restart: Megatron restarts with NVIDIA's nvidia-resiliency-ext, which is "
            "not installed, so the first lost rank would end the job",
            "pip install 'megatron-ext[resilience]', or remove it",
        )
        answer.refusals.append(refusal)
    elif in_job and (missing_name := _missing_name()):
        refusal = Refusal(
            "inprocess_restart",
            f"--inprocess-restart: the installed nvidia-resiliency-ext has no {missing_name}, "
            "without which ranks would wait for a lost rank",
            "pip install 'megatron-ext[resilience]', or remove it",
        )
        answer.refusals.append(refusal)
    if getattr(args, "load", None) is None:
        answer.notices.append(
            "--inprocess-restart without --load: after a rank is lost, training starts again "
            "from the first step; add --save DIR --load DIR"
        )
    if getattr(args, "inprocess_granularity", "node") == "node":
        answer.notices.append(
            "--inprocess-restart: after a rank is lost, all ranks on its host are given up; "
            "add --inprocess-granularity rank to keep them"
        )


def _missing_name() -> str:
    """Return the first missing NVRx class that a patch needs, or an empty string."""
    for module, name in _NEEDED:
        full_name = f"nvidia_resiliency_ext.inprocess.{module}"
        try:
            has_class = hasattr(import_module(full_name), name)
        except ImportError:
            # Some installations of NVRx lack the modules that only restarts need.
            has_class = False
        if not has_class:
            return f"{full_name}.{name}"
    return ""
