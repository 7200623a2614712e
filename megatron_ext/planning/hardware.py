"""Rates of devices and links, with the source of every number."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import ArgumentsError

__all__ = ["DEVICES", "DeviceKind", "parse_devices"]

_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device in its node. Rates are per second and device, of one direction."""

    name: str
    memory_gib: float
    """What a program can allocate."""
    reserve_gib: float = 5.0
    """Left free: the context, communicators, workspaces, and what the allocator fragments."""
    node_size: int = 8
    """Devices that the fast links join."""
    flops: float
    """Dense bf16."""
    flops_8bit: float
    memory_bytes: float
    """Peak traffic of its memory."""
    link_bytes: float
    """To its node."""
    network_bytes: float
    """To other nodes."""
    gemm: float = 0.70
    """Share of the peak that large matrix products reach in training."""
    gemm_8bit: float = 0.50
    attention_forward: float = 0.55
    """Share of the bf16 peak that causal attention reaches, counting half of the square."""
    attention_backward: float = 0.42
    attention_latent: float = 0.76
    """Of these shares, what is reached where values are narrower than queries."""
    memory: float = 0.67
    """Share of the peak traffic that elementwise kernels reach."""
    collective: float = 0.67
    """Share of a link that gathers and scatters reach."""
    all_to_all: float = 0.60
    kernel_s: float = 4e-6
    """Least time of a kernel."""
    gemm_grouped: float = 0.74
    """Of these shares, what products of experts in one kernel reach."""
    gemm_weight: float = 0.945
    """Of these shares, what weight gradients reach, which add to fp32."""
    message_s: float = 23e-6
    """Least time of a collective or message."""
    hop_s: float = 8.5e-6
    """Further time of a collective for each rank but the first."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Where each number is from."""


_SIMUMAX = (
    "micro-benchmarks of SimuMax v1.2, configs/system/b200_bf16_ceperm.json "
    "(514 products, 32 attentions, collectives in a node); no step of training among them"
)
_ESTIMATE = "as on B200 by SimuMax's micro-benchmarks; not measured on this device"
_COMMON = dict.fromkeys(
    (
        "memory",
        "collective",
        "all_to_all",
        "kernel_s",
        "message_s",
        "hop_s",
        "gemm_weight",
        "gemm_grouped",
        "attention_backward",
        "attention_latent",
    ),
    _ESTIMATE,
) | {
    "reserve_gib": "reserved less allocated memory of SimuMax's B200 runs: 1.0 to 4.3 GiB, "
    "and about 1 GiB for the context and communicators",
}
_HOPPER = {
    "flops": "NVIDIA, H100 SXM and H200 data sheets, without sparsity",
    "memory_bytes": "NVIDIA, H100 SXM and H200 data sheets",
    "link_bytes": "NVLink 4: 900 GB/s in both directions",
    "network_bytes": "one 400 Gb/s adapter for each device (DGX H100)",
    "gemm": "cuBLAS on H100: 700 to 750 TFLOP/s for 8192^3",
    "gemm_8bit": "fitted to one row: Llama 3 70B on 64 H100 in FP8, 731 TFLOP/s "
    "(Megatron-Bridge, performance summary, 26.06)",
    "attention_forward": "FlashAttention-3 (2407.08608), causal, head 128, 4k to 16k",
}

DEVICES = {
    device.name: device
    for device in (
        DeviceKind(
            name="h100",
            memory_gib=79.1,
            flops=989e12,
            flops_8bit=1979e12,
            gemm_8bit=0.74,
            memory_bytes=3350 * _GB,
            link_bytes=450 * _GB,
            network_bytes=50 * _GB,
            sources=_COMMON | _HOPPER,
        ),
        DeviceKind(
            name="h200",
            memory_gib=139.8,
            flops=989e12,
            flops_8bit=1979e12,
            gemm_8bit=0.74,
            memory_bytes=4800 * _GB,
            link_bytes=450 * _GB,
            network_bytes=50 * _GB,
            sources=_COMMON | _HOPPER,
        ),
        DeviceKind(
            name="b200",
            memory_gib=178.3,
            flops=2250e12,
            flops_8bit=4500e12,
            memory_bytes=8000 * _GB,
            link_bytes=900 * _GB,
            network_bytes=50 * _GB,
            gemm=0.455,
            gemm_8bit=0.455,
            sources=_COMMON
            | {
                "flops": "NVIDIA, DGX B200 data sheet, without sparsity",
                "memory_bytes": "NVIDIA, DGX B200 data sheet",
                "link_bytes": "NVLink 5: 1.8 TB/s in both directions",
                "network_bytes": "one 400 Gb/s adapter for each device",
                "gemm": "0.485 less 6 %, fitted to one row, Llama 70B, PP 2, 32 micro-batches; "
                + _SIMUMAX,
                **dict.fromkeys(
                    ("attention_forward", "attention_backward", "memory", "collective"),
                    _SIMUMAX,
                ),
                "all_to_all": _SIMUMAX,
                "gemm_8bit": "as in bf16; not measured",
            },
        ),
        DeviceKind(
            name="gb200",
            memory_gib=184.0,
            node_size=64,
            flops=2500e12,
            flops_8bit=5000e12,
            memory_bytes=8000 * _GB,
            link_bytes=900 * _GB,
            network_bytes=50 * _GB,
            gemm=0.60,
            gemm_8bit=0.50,
            sources=_COMMON
            | {
                "flops": "NVIDIA, GB200 NVL72 data sheet, without sparsity",
                "memory_bytes": "NVIDIA, GB200 NVL72 data sheet",
                "link_bytes": "NVLink 5: 1.8 TB/s in both directions, 72 devices, 64 used",
                "network_bytes": "one 400 Gb/s adapter for each device",
                "gemm": "assumed: above B200's of SimuMax, whose power limit is lower",
                "gemm_8bit": "assumed",
                "attention_forward": _ESTIMATE,
            },
        ),
        DeviceKind(
            name="mi300x",
            memory_gib=191.5,
            flops=1307e12,
            flops_8bit=2615e12,
            memory_bytes=5300 * _GB,
            link_bytes=448 * _GB,
            network_bytes=50 * _GB,
            gemm=0.50,
            gemm_8bit=0.40,
            attention_forward=0.35,
            attention_backward=0.25,
            sources=_COMMON
            | {
                "flops": "AMD, MI300X data sheet, without sparsity",
                "memory_bytes": "AMD, MI300X data sheet",
                "link_bytes": "7 Infinity Fabric links of 64 GB/s",
                "network_bytes": "one 400 Gb/s adapter for each device",
                "gemm": "assumed; hipBLASLt reaches 500 to 700 TFLOP/s",
                "gemm_8bit": "assumed",
                "attention_forward": "assumed",
                "attention_backward": "assumed",
            },
        ),
        DeviceKind(
            name="s5000",
            memory_gib=79.0,
            flops=500e12,
            flops_8bit=1000e12,
            memory_bytes=1600 * _GB,
            link_bytes=392 * _GB,
            network_bytes=50 * _GB,
            gemm=0.60,
            sources=_COMMON
            | {
                "flops": "Moore Threads' announcement of 1,000 TFLOP/s in 8 bits; bf16 half of it",
                "memory_bytes": "Moore Threads' announcement",
                "link_bytes": "MTLink 4: 784 GB/s in both directions",
                "network_bytes": "one 400 Gb/s adapter for each device",
                "gemm": "assumed",
                "gemm_8bit": "assumed",
                "attention_forward": "assumed",
            },
        ),
        DeviceKind(
            name="cpu",
            memory_gib=4.0,
            reserve_gib=0.5,
            flops=20e9,
            flops_8bit=20e9,
            memory_bytes=10 * _GB,
            link_bytes=1 * _GB,
            network_bytes=1 * _GB,
            message_s=200e-6,
            sources=_COMMON
            | {"flops": "one core; a stand-in, so that small models can be planned"},
        ),
    )
}


def parse_devices(text: str) -> tuple[int, DeviceKind]:
    """Return number and kind of `2048xh100` or `64xFILE.json`.

    A file has the fields of `DeviceKind`, and may name the one that it changes as `base`.

    Raises:
        ArgumentsError: The text is not of this form.
    """
    found = re.fullmatch(r"(\d+)x(.+)", text)
    if found is None or not 0 < int(found[1]) <= 1_000_000:
        raise ArgumentsError(f"--devices {text!r} is no number and kind; use, say, 64xh100")
    name = found[2]
    if name.lower() in DEVICES:
        return int(found[1]), DEVICES[name.lower()]
    if not name.endswith(".json"):
        known = ", ".join(DEVICES)
        raise ArgumentsError(f"--devices: {name} is unknown; use {known}, or a file: 64xmine.json")
    try:
        given: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))
        base = given.pop("base", None)
        given.setdefault("name", Path(name).stem)
        own = dict.fromkeys(given, f"given by {name}")
        given["sources"] = own | given.get("sources", {})
        if base is None:
            return int(found[1]), DeviceKind(**given)
        given["sources"] = DEVICES[base].sources | given["sources"]
        return int(found[1]), replace(DEVICES[base], **given)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(each.name for each in fields(DeviceKind))
        raise ArgumentsError(
            f"--devices: {name} describes no device ({error}); give {names}, or base and changes"
        ) from error
