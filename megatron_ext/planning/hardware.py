"""Device and link rates, with a source for every number."""

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
    """A kind of device and its node. Rates are per second, per device and in one direction."""

    name: str
    memory_gib: float
    """Memory that a program can allocate."""
    reserve_gib: float = 5.0
    """GiB left free for the context, communicators, workspaces and fragmentation."""
    processors: int = 1
    """Number of processors, each of which computes one GEMM tile at a time."""
    node_size: int = 8
    """Number of devices that the fast links connect."""
    flops: float
    """Peak rate of dense bf16 GEMMs."""
    flops_8bit: float
    flops_4bit: float = 0.0
    """0 if the device does not support 4-bit GEMMs."""
    memory_bytes: float
    """Peak memory bandwidth."""
    link_bytes: float
    """Bandwidth to other devices in the same node."""
    network_bytes: float
    """Bandwidth to other nodes."""
    gemm: float = 0.70
    """Fraction of the peak that large GEMMs achieve in training."""
    gemm_8bit: float = 0.50
    """Same as `gemm`, for 8-bit GEMMs that are scaled per tensor."""
    gemm_block: float = 0.50
    """Same as `gemm`, for 8-bit GEMMs that are scaled per block."""
    gemm_4bit: float = 0.40
    attention_forward: float = 0.486
    """Fraction of the bf16 peak that causal attention achieves, counting half of the square."""
    attention_backward: float = 0.371
    attention_8bit: float = 1.6
    """Speedup of 8-bit attention over bf16 attention."""
    memory: float = 0.556
    """Fraction of the peak memory bandwidth that elementwise kernels achieve."""
    collective: float = 0.67
    """Fraction of a link's bandwidth that gathers and scatters within a node achieve."""
    network: float = 0.94
    """Fraction of a link's bandwidth that gathers, scatters and messages between nodes achieve."""
    all_to_all: float = 0.908
    kernel_s: float = 4e-6
    """Minimum kernel time."""
    gemm_grouped: float = 0.901
    """Additional factor for the experts' GEMMs."""
    gemm_fused: float = 0.771
    """Additional factor for the experts' GEMMs if a single kernel fuses them with the activation
    and quantization."""
    activation: float = 5.36
    """Bytes of traffic per input and output element of the experts' activation function, if it
    takes several kernels."""
    scan_bytes: float = 71.9
    """Bytes of traffic per channel in a Mamba-2 layer's forward pass, in addition to its GEMMs."""
    launch_s: float = 21.7e-6
    """Host time per kernel launch outside graphs."""
    split_launches: float = 1.71
    """Factor on the number of launches if parts of layers alternate with parts from another batch
    and the dispatcher is `alltoall`."""
    biases: float = 51.6
    """Bytes of additional traffic per activation in experts with biases."""
    biases_fused: float = 14.5
    """Same as `biases`, if experts run in a single kernel."""
    exposed: float = 0.235
    """If the host waits for token counts, exposed share of the kernel or launch time, whichever is
    shorter."""
    overlap: float = 0.68
    """Share of communication that computation hides if a technique overlaps the two."""
    pair_overlap: float = 0.852
    """Same as `overlap`, for the experts' all-to-all in a pair."""
    gemm_weight: float = 0.945
    """Additional factor for weight-gradient GEMMs, which accumulate in fp32."""
    tile_bytes: float = 256.0
    """Bytes that a GEMM tile loads from every operand row before it computes."""
    message_s: float = 23e-6
    """Minimum time for a collective or message."""
    hop_s: float = 8.5e-6
    """Additional time that a collective takes for every rank after the first."""
    measured: tuple[tuple[str, tuple[float, float, float]], ...] = ()
    """Model parts with correction factors for the costs of their passes (`calibration.py`)."""
    # Devices are cache keys. The fields below are not hashable and do not affect costs,
    # so they are excluded from hashing and comparison.
    seconds: dict[str, list[float]] = field(
        default_factory=dict, hash=False, compare=False
    )
    """The measured times that the factors were computed from."""
    sources: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """The source of every number."""

    def peak(self, precision: Precision) -> float:
        """Return the peak operations per second for a precision, according to the data sheet.

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
        """Return the operations per second that large GEMMs achieve in training."""
        share = {
            "bf16": self.gemm,
            "fp8": self.gemm_8bit,
            "mxfp8": self.gemm_block,
            "nvfp4": self.gemm_4bit,
        }[precision]
        return self.peak(precision) * share


_SIMUMAX = (
    "SimuMax v1.2 micro-benchmarks, configs/system/b200_bf16_ceperm.json (514 GEMMs, 32 "
    "attentions, collectives within a node), which include no training steps"
)
_HALF = (
    "fitted, with 28 others, for the smallest error on half of the configurations in "
    "Megatron-Bridge's performance summary; benchmarks/planner.py lists them"
)
_ESTIMATE = "same as B200; not measured on this device"
_MAX_FILE_BYTES = 1 << 20
_MAX_DEVICES = 1_000_000

_MAY_BE_ZERO = (
    *("reserve_gib", "flops_4bit", "kernel_s", "launch_s", "message_s", "hop_s"),
    *("overlap", "pair_overlap", "exposed"),
)
_PEAKS = ("flops", "flops_8bit", "flops_4bit")
_GEMM = ("gemm", "gemm_8bit", "gemm_block", "gemm_4bit")
# Sources of numbers that several kinds of devices share.
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
    "launch_s": _HALF + "; for Grace as well, which is slower than a Xeon, not faster "
    "(NVIDIA/TransformerEngine#2053)",
    "attention_8bit": "FlashAttention-3 (2407.08608): forward passes at up to 1.2 PFLOP/s in 8 "
    "bits and 0.74 PFLOP/s in 16 bits, on an H100; assumed for backward passes and other devices",
    "tile_bytes": "assumed: two iterations of a loop that loads 128 bytes",
    "memory_gib": "capacity in torch's out-of-memory errors, within half a GiB",
    "reserve_gib": "reserved minus allocated memory in SimuMax's B200 runs (1.0 to 4.3 GiB), "
    "plus about 1 GiB for the context and communicators",
    "node_size": "eight per machine",
}
# Devices without measurements use B200 numbers.
_OTHERS = dict.fromkeys(_COMMON, _ESTIMATE) | {
    **{name: _COMMON[name] for name in ("memory_gib", "reserve_gib", "node_size")},
    "processors": "unknown: GEMMs run without waves",
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
        "processors": "multiprocessors on an H100 SXM",
        "memory_bytes": "NVIDIA, H100 SXM and H200 data sheets",
        "link_bytes": "NVLink 4: 900 GB/s in both directions",
        "network_bytes": "one 400 Gb/s adapter per device (DGX H100)",
        "gemm": _HALF + "; cuBLAS achieves 700 to 750 TFLOP/s for 8192^3",
        "gemm_8bit": _HALF,
        "gemm_block": "same as gemm_8bit",
        "gemm_4bit": "unused: there are no 4-bit GEMMs",
        "attention_forward": "FlashAttention-3 (2407.08608), causal, head size 128, 4k to 16k",
        "attention_backward": "assumed: attention_forward, scaled by the ratio on B200",
    },
}
_BLACKWELL: dict[str, Any] = {
    "processors": 148,
    "memory_bytes": 8000 * _GB,
    "link_bytes": 900 * _GB,
    "sources": _COMMON
    | dict.fromkeys(
        _GEMM, _HALF + "; the precisions' fractions differ by one factor per device"
    )
    | dict.fromkeys(_PEAKS, "NVIDIA, DGX or NVL72 data sheet, without sparsity")
    | {
        "processors": "multiprocessors on a B200",
        "memory_bytes": "NVIDIA, DGX or NVL72 data sheet",
        "link_bytes": "NVLink 5: 1.8 TB/s in both directions",
        "node_size": "eight in a DGX; 64 of the 72 in a rack are used",
        "network_bytes": "one adapter per device: 400 Gb/s, or 800 Gb/s for B300 and GB300",
    },
}
# A rack counts as one node.
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
    """Return a device of the Blackwell family.

    Args:
        name: The device's name.
        memory_gib: Memory that a program can allocate.
        peak_pflops: Peak PFLOP/s in 16, 8 and 4 bits.
        network_gb_per_s: Bandwidth to other nodes.
        gemm_shares: Fractions of the peak that GEMMs achieve, in the order of `_GEMM`.
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
                "link_bytes": "seven Infinity Fabric links at 64 GB/s each",
                "network_bytes": "one 400 Gb/s adapter per device",
                "gemm": "assumed; hipBLASLt achieves 500 to 700 TFLOP/s",
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
                "Moore Threads' announcement of 1,000 TFLOP/s in 8 bits; half of that in bf16",
            )
            | {
                "memory_gib": "80 GB minus what other devices of that size do not report",
                "memory_bytes": "Moore Threads' announcement",
                "link_bytes": "MTLink 4: 784 GB/s in both directions",
                "network_bytes": "one 400 Gb/s adapter per device",
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
                "a placeholder for one core, so that small models can be planned",
            ),
        ),
    )
}


def kind_of(name: str) -> DeviceKind | None:
    """Return the kind of device that drivers report under this name, or None if it is unknown."""
    # Try the longest names first, because a GB200's name contains "b200".
    kinds = sorted(DEVICES.values(), key=lambda kind: len(kind.name), reverse=True)
    return next((kind for kind in kinds if kind.name in name.lower()), None)


def parse_devices(text: str) -> tuple[int, DeviceKind]:
    """Parse a number and kind of devices, such as `2048xh100` or `64xFILE.json`.

    The file contains fields of `DeviceKind`. Its `base` may name a kind to modify.

    Raises:
        ArgumentsError: The text does not have this form, or the file does not describe a device.
    """
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if match is None or not 0 < int(match[1]) <= _MAX_DEVICES:
        raise ArgumentsError(
            f"--devices {text!r} is not a number and a kind; use, for example, 64xh100"
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
        # `plan --explain` prints the source of every number.
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
    """Check that every rate and size is a valid number.

    Raises:
        ValueError: A number is out of range.
    """
    for device_field in fields(device):
        name = device_field.name
        # The value from the file may have any type, so use a known device to find out
        # whether the field is a number.
        if not isinstance(getattr(DEVICES["h100"], name), int | float):
            continue
        value = getattr(device, name)
        is_number = isinstance(value, int | float)
        if is_number and value == 0 and name in _MAY_BE_ZERO:
            continue
        if not (is_number and 0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}, not a positive number")
