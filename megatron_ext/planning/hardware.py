"""Device and link rates, with the source of each number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ArgumentsError
from megatron_ext.files import read_json

if TYPE_CHECKING:
    from megatron_ext.planning.techniques import Precision

_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device and its node. Rates are per second and per device, in one direction."""

    name: str
    memory_gib: float
    """Memory that a program can allocate."""
    reserve_gib: float = 5.0
    """GiB left free for the context, communicators, workspaces and fragmentation."""
    processors: int = 1
    """Number of processors, each of which computes one tile of a product at a time."""
    node_size: int = 8
    """Number of devices connected by the fast links."""
    flops: float
    """Peak rate of dense products in bf16."""
    flops_8bit: float
    flops_4bit: float = 0.0
    """0 if the device does not support products in 4 bits."""
    memory_bytes: float
    """Peak traffic to the device's memory."""
    link_bytes: float
    """Rate of the link to other devices in the same node."""
    network_bytes: float
    """Rate of the link to other nodes."""
    gemm: float = 0.70
    """Share of the peak that large matrix products reach in training."""
    gemm_8bit: float = 0.50
    """Same as `gemm`, for products in 8 bits that are scaled per tensor."""
    gemm_block: float = 0.50
    """Same as `gemm`, for products in 8 bits that are scaled per block."""
    gemm_4bit: float = 0.40
    attention_forward: float = 0.486
    """Share of the bf16 peak that causal attention reaches, counting half of the square."""
    attention_backward: float = 0.371
    attention_8bit: float = 1.6
    """Speed of attention in 8 bits relative to attention in bf16."""
    memory: float = 0.556
    """Share of the peak traffic that elementwise kernels reach."""
    collective: float = 0.67
    """Share of a link within a node that gathers and scatters reach."""
    network: float = 0.94
    """Share of a link between nodes that gathers, scatters and messages reach."""
    all_to_all: float = 0.908
    kernel_s: float = 4e-6
    """Minimum kernel time."""
    gemm_grouped: float = 0.901
    """Factor on the products' shares, for experts' products."""
    gemm_fused: float = 0.771
    """Factor on the products' shares, for experts' products that are fused into one kernel with
    activation and quantization."""
    activation: float = 5.36
    """Bytes of traffic per input and output element of the experts' activation function, if it
    takes several kernels."""
    scan_bytes: float = 71.9
    """Bytes of traffic per channel in a Mamba-2 layer's forward pass, in addition to its
    products."""
    launch_s: float = 21.7e-6
    """Host time per kernel launch outside graphs."""
    split_launches: float = 1.71
    """Factor on the number of launches if parts of layers alternate with parts from another batch
    and the dispatcher is `alltoall`."""
    biases: float = 51.6
    """Bytes of additional traffic per activation in experts with biases."""
    biases_fused: float = 14.5
    """Same as `biases`, if experts are a single kernel."""
    exposed: float = 0.235
    """Exposed share of the shorter of kernel and launch time if the host waits for token counts."""
    overlap: float = 0.68
    """Share of communication that computation hides if a technique overlaps the two."""
    pair_overlap: float = 0.852
    """Same as `overlap`, for the experts' all-to-all in a pair."""
    gemm_weight: float = 0.945
    """Factor on the products' shares, for weight gradients, which are accumulated in fp32."""
    tile_bytes: float = 256.0
    """Bytes per row of each operand that a product's tile loads before it computes."""
    message_s: float = 23e-6
    """Minimum time for a collective or message."""
    hop_s: float = 8.5e-6
    """Additional time for a collective, per rank after the first."""
    measured: tuple[tuple[str, tuple[float, float, float]], ...] = ()
    """Parts of a model, with factors on the costs of their passes (`calibration.py`)."""
    # Devices are keys of caches. The fields below are not hashable and affect no cost, so they do
    # not count for hashes and equality.
    seconds: dict[str, list[float]] = field(
        default_factory=dict, hash=False, compare=False
    )
    """The measured times from which the factors were computed."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """The source of each number."""

    def peak(self, precision: Precision) -> float:
        """Return the data sheet's peak operations per second for a precision.

        Raises:
            ArgumentsError: The device does not support the precision.
        """
        if precision == "bf16":
            return self.flops
        if precision != "nvfp4":
            return self.flops_8bit
        if not self.flops_4bit:
            raise ArgumentsError(f"{self.name} has no 4-bit matrix products; use fp8")
        return self.flops_4bit

    def product_rate(self, precision: Precision) -> float:
        """Return the operations per second that large products reach in training."""
        share = {
            "bf16": self.gemm,
            "fp8": self.gemm_8bit,
            "mxfp8": self.gemm_block,
            "nvfp4": self.gemm_4bit,
        }[precision]
        return self.peak(precision) * share


_SIMUMAX = (
    "micro-benchmarks of SimuMax v1.2, configs/system/b200_bf16_ceperm.json "
    "(514 products, 32 attentions, collectives in a node); no step of training among them"
)
_HALF = (
    "chosen, with 28 others, for the least error on half of the configurations of "
    "Megatron-Bridge's performance summary; benchmarks/planner.py lists them"
)
_ESTIMATE = "as on B200; not measured on this device"
_MAX_FILE_BYTES = 1 << 20
_MAX_DEVICES = 1_000_000

_MAY_BE_ZERO = (
    *("reserve_gib", "flops_4bit", "kernel_s", "launch_s", "message_s", "hop_s"),
    *("overlap", "pair_overlap", "exposed"),
)
_PEAKS = ("flops", "flops_8bit", "flops_4bit")
_GEMM = ("gemm", "gemm_8bit", "gemm_block", "gemm_4bit")
# Sources for numbers that are the same for several kinds of devices.
_COMMON = dict.fromkeys(
    ("kernel_s", "message_s", "hop_s", "collective", "gemm_weight"), _SIMUMAX
)
_FITTED = (
    *(
        "memory",
        "all_to_all",
        "gemm_grouped",
        "gemm_fused",
        "scan_bytes",
        "activation",
        "network",
    ),
    *("exposed", "split_launches", "biases", "biases_fused", "overlap", "pair_overlap"),
    *("attention_forward", "attention_backward"),
)
_COMMON |= dict.fromkeys(_FITTED, _HALF)
_COMMON |= {
    "launch_s": _HALF + "; for Grace, too, which is slower than a Xeon, not faster "
    "(NVIDIA/TransformerEngine#2053)",
    "attention_8bit": "FlashAttention-3 (2407.08608): forward passes at up to 1.2 PFLOP/s in 8 "
    "bits and 0.74 in 16, on an H100; assumed for backward passes and for other devices",
    "tile_bytes": "assumed: two steps of a loop over 128 bytes",
    "memory_gib": "capacity that torch names when it is out of memory, within half a GiB",
    "reserve_gib": "reserved less allocated memory of SimuMax's B200 runs: 1.0 to 4.3 GiB, "
    "and about 1 GiB for the context and communicators",
    "node_size": "eight in a machine",
}
# Devices without measurements use B200 numbers.
_OTHERS = dict.fromkeys(_COMMON, _ESTIMATE) | {
    **{name: _COMMON[name] for name in ("memory_gib", "reserve_gib", "node_size")},
    "processors": "unknown: products run without waves",
    **dict.fromkeys(("gemm_block", "gemm_4bit"), "assumed"),
}
_HOPPER: dict[str, Any] = {
    "processors": 132,
    "flops": 989e12,
    "flops_8bit": 1979e12,
    "gemm": 0.677,
    "gemm_8bit": 0.664,
    "gemm_block": 0.664,
    "attention_forward": 0.55,
    "attention_backward": 0.42,
    "memory": 0.745,
    "link_bytes": 450 * _GB,
    "network_bytes": 50 * _GB,
    "sources": _COMMON
    | dict.fromkeys(_PEAKS, "NVIDIA, H100 SXM and H200 data sheets, without sparsity")
    | {
        "processors": "multiprocessors of an H100 SXM",
        "memory_bytes": "NVIDIA, H100 SXM and H200 data sheets",
        "link_bytes": "NVLink 4: 900 GB/s in both directions",
        "network_bytes": "one 400 Gb/s adapter for each device (DGX H100)",
        "gemm": _HALF + "; cuBLAS reaches 700 to 750 TFLOP/s for 8192^3",
        "gemm_8bit": _HALF,
        "gemm_block": "as gemm_8bit",
        "gemm_4bit": "not used: it has no such products",
        "attention_forward": "FlashAttention-3 (2407.08608), causal, head 128, 4k to 16k",
        "attention_backward": "assumed: the forward's, in the proportion of B200",
    },
}
_BLACKWELL: dict[str, Any] = {
    "processors": 148,
    "memory_bytes": 8000 * _GB,
    "link_bytes": 900 * _GB,
    "sources": _COMMON
    | dict.fromkeys(
        _GEMM, _HALF + "; shares of a precision differ by one factor for each device"
    )
    | dict.fromkeys(_PEAKS, "NVIDIA, data sheet of DGX or NVL72, without sparsity")
    | {
        "processors": "multiprocessors of a B200",
        "memory_bytes": "NVIDIA, data sheet of DGX or NVL72",
        "link_bytes": "NVLink 5: 1.8 TB/s in both directions",
        "node_size": "eight in a DGX; of the 72 in a rack, 64 used",
        "network_bytes": "one adapter for each device: 400 Gb/s, with B300 and GB300 800 Gb/s",
    },
}
# A rack is one node.
_RACK: dict[str, Any] = {"node_size": 64}
# Exponentials take half as long as on a B200.
_ULTRA: dict[str, Any] = {"attention_forward": 0.70, "attention_backward": 0.537}


def _blackwell(
    name: str,
    memory_gib: float,
    *,
    peak_pflops: tuple[float, float, float],
    network_gb_per_s: float,
    gemm_shares: tuple[float, float, float, float],
    exceptions: Mapping[str, Any] = MappingProxyType({}),
) -> DeviceKind:
    """Return a device in the Blackwell family.

    Args:
        name: The device's name.
        memory_gib: Memory that a program can allocate.
        peak_pflops: Peak operations in 16, 8 and 4 bits, in 10^15 per second.
        network_gb_per_s: Rate of the link to other nodes.
        gemm_shares: Shares of peak that products reach, in the order of `_GEMM`.
        exceptions: Fields that differ from `_BLACKWELL`.
    """
    settings: dict[str, Any] = {**_BLACKWELL, **exceptions}
    for peak, pflops in zip(_PEAKS, peak_pflops, strict=True):
        settings[peak] = 1e15 * pflops
    for share, value in zip(_GEMM, gemm_shares, strict=True):
        settings[share] = value
    return DeviceKind(
        name=name,
        memory_gib=memory_gib,
        network_bytes=network_gb_per_s * _GB,
        **settings,
    )


DEVICES = {
    device.name: device
    for device in (
        DeviceKind(name="h100", memory_gib=79.1, memory_bytes=3350 * _GB, **_HOPPER),
        DeviceKind(name="h200", memory_gib=139.8, memory_bytes=4800 * _GB, **_HOPPER),
        _blackwell(
            "b200",
            178.3,
            peak_pflops=(2.25, 4.5, 9.0),
            network_gb_per_s=50,
            gemm_shares=(0.523, 0.499, 0.458, 0.608),
        ),
        _blackwell(
            "gb200",
            184.0,
            peak_pflops=(2.5, 5.0, 10.0),
            network_gb_per_s=50,
            gemm_shares=(0.587, 0.560, 0.513, 0.683),
            exceptions=_RACK,
        ),
        _blackwell(
            "b300",
            268.0,
            peak_pflops=(2.25, 4.5, 13.5),
            network_gb_per_s=100,
            gemm_shares=(0.546, 0.521, 0.477, 0.423),
            exceptions=_ULTRA,
        ),
        _blackwell(
            "gb300",
            276.0,
            peak_pflops=(2.5, 5.0, 15.0),
            network_gb_per_s=100,
            gemm_shares=(0.718, 0.686, 0.628, 0.557),
            exceptions=_RACK | _ULTRA,
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
            sources=_OTHERS
            | dict.fromkeys(_PEAKS, "AMD, MI300X data sheet, without sparsity")
            | {
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
            sources=_OTHERS
            | dict.fromkeys(
                _PEAKS,
                "Moore Threads' announcement of 1,000 TFLOP/s in 8 bits; bf16 half of it",
            )
            | {
                "memory_gib": "80 GB minus the part that other devices of that size do not report",
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
            launch_s=0.0,
            sources=dict.fromkeys(
                (device_field.name for device_field in fields(DeviceKind)),
                "a stand-in for one core, so that small models can be planned",
            ),
        ),
    )
}


def kind_of(name: str) -> DeviceKind | None:
    """Return the kind of device that drivers report by this name, or None."""
    # Try the longest name first, because a GB200's name contains "b200".
    kinds = sorted(DEVICES.values(), key=lambda kind: len(kind.name), reverse=True)
    return next((kind for kind in kinds if kind.name in name.lower()), None)


def parse_devices(text: str) -> tuple[int, DeviceKind]:
    """Return the number and kind of devices in `2048xh100` or `64xFILE.json`.

    A file contains fields of `DeviceKind`, and `base` may name a kind to modify.

    Raises:
        ArgumentsError: The text is not in this form, or the file does not describe a device.
    """
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if match is None or not 0 < int(match[1]) <= _MAX_DEVICES:
        raise ArgumentsError(
            f"--devices {text!r} is not a number and a kind; use, say, 64xh100"
        )
    num_devices = int(match[1])
    name = match[2]
    if name.lower() in DEVICES:
        return num_devices, DEVICES[name.lower()]
    if not name.endswith(".json"):
        kinds = ", ".join(DEVICES)
        raise ArgumentsError(
            f"--devices: {name} is unknown; use {kinds}, or a file: 64xmine.json"
        )
    return num_devices, _read_device(Path(name))


def _read_device(path: Path) -> DeviceKind:
    """Return the device that a file describes.

    Raises:
        ArgumentsError: The file does not describe a device.
    """
    try:
        content: dict[str, Any] = read_json(path, _MAX_FILE_BYTES)
        base = content.pop("base", None)
        content.setdefault("name", path.stem)
        factors = []
        for part, part_factors in content.get("measured", {}).items():
            forward, input_gradient, weight = map(float, part_factors)
            factors.append((part, (forward, input_gradient, weight)))
        content["measured"] = tuple(factors)  # a hashable field
        # `plan --explain` prints the source of each number.
        sources = dict.fromkeys(content, f"given by {path}")
        content["sources"] = sources | content.get("sources", {})
        # The base provides all fields that the file omits.
        if base is not None:
            inherited = vars(DEVICES[base])
            all_sources = DEVICES[base].sources | content["sources"]
            content = inherited | content | {"sources": all_sources}
        device = DeviceKind(**content)
        _check_numbers(device)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
    ) as error:
        names = ", ".join(device_field.name for device_field in fields(DeviceKind))
        reason = getattr(error, "strerror", None) or error
        raise ArgumentsError(
            f"--devices: {path} does not describe a device ({reason}); give {names}, or base and "
            "changes"
        ) from error
    return device


def _check_numbers(device: DeviceKind) -> None:
    """Check that each rate and size is a number that a device can have.

    Raises:
        ValueError: A number is out of range.
    """
    for device_field in fields(device):
        name = device_field.name
        # The file's value may have any type, so look up in a known device whether the field is a
        # number.
        if not isinstance(getattr(DEVICES["h100"], name), int | float):
            continue
        value = getattr(device, name)
        is_number = isinstance(value, int | float)
        if is_number and value == 0 and name in _MAY_BE_ZERO:
            continue
        if not (is_number and 0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}, not a positive number")
