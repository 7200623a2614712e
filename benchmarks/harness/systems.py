"""The systems to be measured, one for each row of the table."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import (
    DevicePath,
    DynamicOrder,
    PipelineConfig,
    Tracing,
    TransportName,
)
from megatron_ext.schedules import UNIT, Costs, Placement, Schedule, generate, registered
from megatron_ext.schedules.search.length_balance import LengthCost
from megatron_ext.schedules.table.placement import linear, loop, v
from megatron_ext.schedules.table.slices import shares_of_equal_cost
from megatron_ext.schedules.table.transforms import split_backwards

from .ops import SEQUENCE_LENGTH, ExpertTimes, OpTimes, Sizes

if TYPE_CHECKING:
    import torch

    from .stage import Probe


Run = Callable[[], object]
"""Runs one step on this rank."""


@dataclass(frozen=True)
class System(ABC):
    """A runtime with one of its schedules."""

    name: str
    """Row of the table."""

    @property
    def weight_copies(self) -> int:
        """How often each weight is stored."""
        return 1

    def check(self, pp: int, num_microbatches: int) -> None:  # noqa: B027 - peers take any size
        """Raise ScheduleError, with the rule, if there is no such schedule of these sizes."""

    @abstractmethod
    def placement(self, pp: int) -> Placement:
        """Return where the stages are."""

    @abstractmethod
    def prepare(self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float) -> Run:
        """Return the function that runs one step on this rank, of an initialised world."""

    def join(self, pp: int, backend: str, timeout_s: float) -> None:
        """Join the other ranks."""
        from torch import distributed

        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def probe(self, times: OpTimes, device: torch.device) -> Probe:
        """Return what records this rank, where stages sleep, or a device takes the time."""
        if device.type == "cpu":
            from .stage import Probe

            return Probe(times)
        if isinstance(times, ExpertTimes):
            from .experts import ExpertProbe

            return ExpertProbe(times, device)
        from .device_probe import DeviceProbe

        return DeviceProbe(times, device)

    def share(self, pp: int) -> float:
        """Return which part of 1/pp of the model one stage is."""
        return pp / self.placement(pp).num_stages

    def times(self, sizes: Sizes) -> OpTimes:
        """Return how long its ops have to take."""
        return OpTimes(sizes.forward_s, self.share(sizes.pp))


@dataclass(frozen=True)
class Peer(System):
    """Somebody else's runtime."""

    module: str
    """Of this package; its `prepare` runs the steps."""
    schedule: str
    """As that module names it."""
    placement_of: Callable[[int], Placement]

    def placement(self, pp: int) -> Placement:
        return self.placement_of(pp)

    def prepare(self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float) -> Run:
        module = importlib.import_module(f"{__package__}.{self.module}")
        made: Run = module.prepare(self.schedule, self.placement(pp), num_microbatches, probe)
        return made


@dataclass(frozen=True)
class Own(System):
    """The executor of this package with one of the registered schedules."""

    schedule: str
    options: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs = UNIT
    """Costs for which a table is searched, as --pipeline-costs gives them."""
    transport: TransportName = "torch"
    """As --pipeline-transport has it."""
    device_path: DevicePath = "staged"
    """As --pipeline-device-path has it."""
    dynamic: DynamicOrder | None = None
    """As --use-dpp and its options have it."""
    splits: bool = False
    """True if the backwards of a static table are split, as --use-dpp splits them."""
    slices: int = 1
    """As --pipeline-slices has it."""
    attention: float = 0.0
    """Share of attention in a forward, by which slices are cut."""
    pairs: bool = False
    """Whether forwards run with the backwards of other micro-batches."""
    tracing: Tracing | None = None
    """As --trace and its options have it."""

    @property
    def weight_copies(self) -> int:
        return registered()[self.schedule].twins

    def pipeline(self, pp: int, num_microbatches: int, timeout_s: float = 60.0) -> Pipeline:
        """Return the pipeline as training would have it."""
        options = dict(self.options)
        chunks = options.pop("chunks", None)
        per_replica = num_microbatches // self.weight_copies  # each of two twins runs half
        config = PipelineConfig(
            schedule=self.schedule,
            chunks=chunks,
            options=options,
            costs=self.costs,
            message_timeout_s=timeout_s,
            transport=self.transport,
            device_path=self.device_path,
            dynamic=self.dynamic,
            slices=self.slices,
            pairs=self.pairs,
            tracing=self.tracing,
            length_costs=None
            if self.slices == 1
            else LengthCost(1 - self.attention, self.attention / SEQUENCE_LENGTH),
        )
        made = _SplitPipeline if self.splits else Pipeline
        return made(config, pp, per_replica)

    def times(self, sizes: Sizes) -> OpTimes:
        shares = shares_of_equal_cost(self.slices, self.attention)
        slices = Costs(attention=self.attention).slice_factors(shares)
        return replace(super().times(sizes), slices=slices)

    def check(self, pp: int, num_microbatches: int) -> None:
        generate(self.schedule, pp, num_microbatches, slices=self.slices, **self.options)

    def placement(self, pp: int) -> Placement:
        return self.pipeline(pp, 4 * pp).placement  # the same for every number of micro-batches

    def prepare(self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float) -> Run:
        from . import own

        return own.prepare(self.pipeline(pp, num_microbatches, timeout_s), probe)


class _SplitPipeline(Pipeline):
    """A static table with split backwards: what a dynamic order has to be compared with."""

    def schedule(self, num_microbatches: int) -> Schedule:
        return split_backwards(super().schedule(num_microbatches))


loop2 = partial(loop, num_chunks=2)
"""Two chunks on each rank, round-robin; ranks find it by name, as they would no lambda."""
OVERLAPPED = "megatron-core interleaved, overlapped P2P"
"""The fastest schedule of Megatron's own."""
_PEERS = tuple(
    Peer(name, module, schedule, placement)
    for name, module, schedule, placement in (
        ("megatron-core 1F1B", "megatron_core", "1f1b", linear),
        ("megatron-core interleaved, batched P2P", "megatron_core", "interleaved-batched", loop2),
        (OVERLAPPED, "megatron_core", "interleaved-overlap", loop2),
        ("torch 1F1B", "torch_pipelining", "Schedule1F1B", linear),
        ("torch Interleaved1F1B", "torch_pipelining", "ScheduleInterleaved1F1B", loop2),
        ("torch InterleavedZeroBubble", "torch_pipelining", "ScheduleInterleavedZeroBubble",
         loop2),
        ("torch ZBVZeroBubble", "torch_pipelining", "ScheduleZBVZeroBubble", v),
        ("torch DualPipeV", "torch_pipelining", "ScheduleDualPipeV", v),
    )
)  # fmt: skip
_TRANSPORTS: dict[TransportName, tuple[str, float]] = {
    "torch": ("gloo", 0.025),
    "shm": ("shm", 0.01),
}
"""Name in the table, and latency of a message in forwards of 40 ms: from the end of an op to the
start of the one that waits for it in another process."""


def all_systems() -> list[System]:
    """Return every system, in the order of the table."""
    return [*_PEERS, *own_systems("torch"), *own_systems("shm")]


def own_systems(transport: TransportName) -> list[Own]:
    """Return our schedules over one transport."""
    shown, latency = _TRANSPORTS[transport]
    systems = [
        Own(f"megatron_ext, {shown}: {label}", name, options, transport=transport)
        for label, name, options in variants()
    ]
    label = f"megatron_ext, {shown}: bitpipe order=zb for latency {latency:g}"
    return [*systems, Own(label, "bitpipe", {"order": "zb"}, Costs(latency=latency), transport)]


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield label, name and options of each variant of the registered schedules."""
    for name, generator in registered().items():
        for options in generator.variants:
            label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            yield label, name, dict(options)


def disturbed_systems() -> list[System]:
    """Return what is compared in scenarios: orders that are fixed, and orders chosen by a policy.

    The first is what the others are related to: split backwards in the order of the table.
    """
    static: dict[str, DynamicOrder | None] = {"static, split": None, "static": None}
    hints = {
        f"hint +{extra}": DynamicOrder(policy="hint", extra_activations=extra) for extra in (0, 1)
    }
    greedy = {
        "breadth-first": DynamicOrder(policy="breadth-first"),
        "depth-first": DynamicOrder(policy="depth-first"),
    }

    def shm(label: str, kinds: Mapping[str, DynamicOrder | None], **options: Any) -> list[Own]:
        name = label.partition(" ")[0]
        return [
            Own(f"{label}, {kind}", name, options, transport="shm", dynamic=dynamic,
                splits=kind == "static, split")
            for kind, dynamic in kinds.items()
        ]  # fmt: skip

    compared = (OVERLAPPED, "torch Interleaved1F1B", "torch InterleavedZeroBubble",
                "torch ZBVZeroBubble")  # fmt: skip
    return [
        *shm("interleaved chunks=2", {**static, **hints, **greedy}, chunks=2),
        *(peer for peer in _PEERS if peer.name in compared),
        *shm("bitpipe order=paper", {**static, **hints}, order="paper"),
        *shm("zb-v", {"static": None, **hints}),  # its backwards are split anyway
    ]


def device_systems() -> list[System]:
    """Return what is compared on a device.

    These are Megatron's own schedules over the device's communicators, our tables over both paths
    between devices, and one of them with split backwards beside the dynamic orders over it.
    """
    disturbed = [
        system
        for system in disturbed_systems()
        if isinstance(system, Own)
        and system.schedule == "interleaved"
        and (system.splits or (system.dynamic and system.dynamic.policy == "hint"))
    ]
    return [
        *(peer for peer in _PEERS if peer.module == "megatron_core"),
        *(
            Own(f"communicator: {label}", name, options, transport="torch")
            for label, name, options in variants()
        ),
        *(
            Own(f"ipc: {label}", name, options, transport="shm", device_path="ipc")
            for label, name, options in variants()
        ),
        *(replace(each, name=f"ipc: {each.name}", device_path="ipc") for each in disturbed),
    ]
