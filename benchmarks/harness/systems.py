"""The systems to measure, one per table row."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import (
    DynamicOrder,
    PipelineConfig,
    TransportName,
)
from megatron_ext.schedules import (
    UNIT,
    Costs,
    Placement,
    Schedule,
    generate,
    registered,
)
from megatron_ext.schedules.table.length_cost import LengthCost
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
        """Number of copies of each weight."""
        return 1

    def check(self, pp: int, num_microbatches: int) -> None:  # noqa: B027 - peers accept any size
        """Raise ScheduleError, stating the rule, if the schedule does not exist for these sizes."""

    @abstractmethod
    def placement(self, pp: int) -> Placement:
        """Return the placement of the stages."""

    @abstractmethod
    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Run:
        """Return a function that runs one step on this rank. The world is already initialised."""

    def join(self, pp: int, backend: str, timeout_s: float) -> None:
        """Join the other ranks."""
        from torch import distributed

        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def probe(self, times: OpTimes, device: torch.device) -> Probe:
        """Return this rank's probe, for stages that sleep or for a device that spends the time."""
        if device.type == "cpu":
            from .stage import Probe

            return Probe(times)
        if isinstance(times, ExpertTimes):
            from .experts import ExpertProbe

            return ExpertProbe(times, device)
        from .device_probe import DeviceProbe

        return DeviceProbe(times, device)

    def share(self, pp: int) -> float:
        """Return a stage's size as a fraction of 1/pp of the model."""
        return pp / self.placement(pp).num_stages

    def times(self, sizes: Sizes) -> OpTimes:
        """Return the nominal times of the system's ops."""
        return OpTimes(sizes.forward_s, self.share(sizes.pp))


@dataclass(frozen=True)
class Peer(System):
    """A runtime other than this package's."""

    module: str
    """Module of this package with a `prepare` function that runs the steps."""
    schedule: str
    """The schedule's name in that module."""
    placement_of: Callable[[int], Placement]

    def placement(self, pp: int) -> Placement:
        return self.placement_of(pp)

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Run:
        module = importlib.import_module(f"{__package__}.{self.module}")
        run: Run = module.prepare(
            self.schedule, self.placement(pp), num_microbatches, probe
        )
        return run


@dataclass(frozen=True)
class Own(System):
    """This package's executor with one of the registered schedules."""

    config: PipelineConfig
    splits: bool = False
    """Whether a static table's backwards are split, as with --use-dpp."""
    attention: float = 0.0
    """Attention's share of a forward, which determines how slices are cut."""

    @property
    def weight_copies(self) -> int:
        return self.config.twins

    def pipeline(self, pp: int, num_microbatches: int) -> Pipeline:
        """Return the pipeline as training would create it."""
        per_replica = num_microbatches // self.weight_copies  # each twin runs half
        pipeline_class = _SplitPipeline if self.splits else Pipeline
        return pipeline_class(self.config, pp, per_replica)

    def times(self, sizes: Sizes) -> OpTimes:
        shares = shares_of_equal_cost(self.config.slices, self.attention)
        slices = Costs(attention=self.attention).slice_factors(shares)
        return replace(super().times(sizes), slices=slices)

    def check(self, pp: int, num_microbatches: int) -> None:
        config = self.config
        assert config.schedule is not None
        generate(config.schedule, pp, num_microbatches, config.chunks, config.costs or UNIT,
                 slices=config.slices, **config.options)  # fmt: skip

    def placement(self, pp: int) -> Placement:
        return self.pipeline(
            pp, 4 * pp
        ).placement  # the same for any number of micro-batches

    def prepare(
        self, pp: int, num_microbatches: int, probe: Probe, timeout_s: float
    ) -> Run:
        from . import own

        patient = replace(
            self, config=replace(self.config, message_timeout_s=timeout_s)
        )
        return own.prepare(patient.pipeline(pp, num_microbatches), probe)


class _SplitPipeline(Pipeline):
    """A static table with split backwards, as the baseline for a dynamic order."""

    def schedule(self, num_microbatches: int) -> Schedule:
        return split_backwards(super().schedule(num_microbatches))


def _variants() -> dict[str, tuple[str, Mapping[str, Any]]]:
    variants: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, generator in registered().items():
        for options in generator.variants:
            words = [f"{key}={value}" for key, value in options.items()]
            variants[" ".join([name, *words])] = (name, options)
    return variants


VARIANTS = _variants()
"""Label in the table -> name and options, for every variant of the registered schedules."""
ORDERS: dict[str, DynamicOrder | None] = {
    "static": None,
    "static, split": None,
    **{
        f"hint +{extra}": DynamicOrder(policy="hint", extra_activations=extra)
        for extra in (0, 1)
    },
    "breadth-first": DynamicOrder(policy="breadth-first"),
    "depth-first": DynamicOrder(policy="depth-first"),
}
"""Orders to compare in scenarios: the table's own, or one chosen by a policy."""


def own(name: str, variant: str, *, attention: float = 0.0, **settings: Any) -> Own:
    """Return our schedule with a label from VARIANTS.

    Args:
        name: Row of the table.
        variant: The label in VARIANTS.
        attention: Attention's share of a forward.
        settings: Additional configuration settings.
    """
    schedule, options = VARIANTS[variant]
    settings = {
        "transport": "shm",
        "device_path": "staged",
        "chunks": options.get("chunks"),
        "options": {key: value for key, value in options.items() if key != "chunks"},
        **settings,
    }
    if settings.get("slices", 1) > 1:
        settings["length_costs"] = LengthCost(
            1 - attention, attention / SEQUENCE_LENGTH
        )
    return Own(name, PipelineConfig(schedule=schedule, **settings), attention=attention)


def ordered(name: str, **settings: Any) -> Own:
    """Return our schedule in one of ORDERS. The name has the form `VARIANT, ORDER`."""
    variant, _, order = name.rpartition(": ")[2].partition(", ")
    system = own(name, variant, dynamic=ORDERS[order], **settings)
    return replace(system, splits=order == "static, split")


loop2 = partial(loop, num_chunks=2)
"""Two chunks per rank, round-robin. Ranks look this up by name, so it cannot be a lambda."""
OVERLAPPED = "megatron-core interleaved, overlapped P2P"
"""Megatron's fastest schedule."""
PEERS = {
    name: Peer(name, module, schedule, placement)
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
}  # fmt: skip


def all_systems() -> list[System]:
    """Return all systems, in table order."""
    systems: list[System] = list(PEERS.values())
    # Each wire has its message latency, in forwards of 40 ms: from the end of an op to
    # the start of the op that waits for it in another process.
    wires: tuple[tuple[str, TransportName, float], ...] = (
        ("gloo", "torch", 0.025),
        ("shm", "shm", 0.01),
    )
    for shown, transport, latency in wires:
        prefix = f"megatron_ext, {shown}: "
        systems += [
            own(prefix + label, label, transport=transport) for label in VARIANTS
        ]
        name = f"{prefix}bitpipe order=zb for latency {latency:g}"
        costs = Costs(latency=latency)
        systems.append(own(name, "bitpipe order=zb", transport=transport, costs=costs))
    return systems


def device_systems() -> list[System]:
    """Return the systems to compare on a device.

    These are Megatron's own schedules over the device's communicators, our tables over both paths
    between devices, and one table with split backwards as the baseline for its dynamic orders.
    """
    orders = ("static, split", "hint +0", "hint +1")
    return [
        *(peer for peer in PEERS.values() if peer.module == "megatron_core"),
        *(
            own(f"communicator: {label}", label, transport="torch")
            for label in VARIANTS
        ),
        *(own(f"ipc: {label}", label, device_path="ipc") for label in VARIANTS),
        *(
            ordered(f"ipc: interleaved chunks=2, {order}", device_path="ipc")
            for order in orders
        ),
    ]
