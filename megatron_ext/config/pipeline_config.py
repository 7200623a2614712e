"""What a user wants of the pipeline: one frozen object, checked when it is made.

    PipelineConfig(schedule="zb-v", transport="shm", tracing=Tracing(interval=50))

It holds neither sizes of the job nor caches (`sized_pipeline.py`), and importing it is cheap. The
command line is one translation into it (`flags.py`); `megatron_ext.configure` takes it directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.devices import CHOICES as DEVICES
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.generators.catalog import CSV_PREFIX, get

if TYPE_CHECKING:
    from megatron_ext.schedules.representation.actions import Option
    from megatron_ext.schedules.representation.costs import Costs
    from megatron_ext.schedules.search.policies import PolicyName

__all__ = [
    "DEVICE_PATHS",
    "TRANSPORTS",
    "Activations",
    "ConfigurationError",
    "DevicePath",
    "Disaggregation",
    "DynamicOrder",
    "PipelineConfig",
    "Tracing",
    "TransportName",
]

TransportName = Literal["torch", "auto", "shm", "tcp", "rdma"]

TRANSPORTS: tuple[TransportName, ...] = ("torch", "auto", "shm", "tcp", "rdma")
"""torch.distributed, the default; the native core over the best wire of each pair, or over one."""

DevicePath = Literal["staged", "ipc"]

DEVICE_PATHS: tuple[DevicePath, ...] = ("staged", "ipc")
"""How tensors of a device get to the native core's peers: through the host, or past it."""

Activations = Literal["recompute", "ship"]


class ConfigurationError(ArgumentsError):
    """An impossible value of a configuration, or two that exclude each other.

    Args:
        template: The message; settings stand in braces, so that a command line can name its flags
            instead of fields.
        values: What else stands in braces.
    """

    def __init__(self, template: str, **values: object) -> None:
        self._template, self._values = template, values
        super().__init__(self.worded({}))

    def worded(self, names: Mapping[str, str]) -> str:
        """Return the message with other names for the settings; those without keep theirs."""
        return self._template.format_map(_Names({**self._values, **names}))


class _Names(dict[str, Any]):
    def __missing__(self, field: str) -> str:
        return field


@dataclass(frozen=True, kw_only=True)
class DynamicOrder:
    """Each rank chooses the order of its actions at run time.

    Raises:
        ConfigurationError: The values are impossible.
    """

    policy: PolicyName = "hint"
    """What goes first if several actions are ready (`schedules/search/policies.py`)."""
    extra_activations: int | None = None
    """Micro-batches that a rank may keep beyond the table's peak, with `hint`; None: 1."""

    def __post_init__(self) -> None:
        """Check the values."""
        from megatron_ext.schedules.search.policies import POLICIES

        _check_choice("policy", self.policy, tuple(POLICIES))
        extra = self.extra_activations
        if extra is not None and extra < 0:
            raise ConfigurationError(
                "{extra_activations} {value}: a rank cannot keep less than the table's own peak; "
                "take 0 for exactly that, or a schedule that keeps less, such as v-half",
                value=extra,
            )
        if extra is not None and self.policy != "hint":
            raise ConfigurationError(
                "{extra_activations} {value}: {policy} {name} has no bound on memory; leave one of "
                "them out",
                value=extra,
                name=self.policy,
            )

    @property
    def margin(self) -> int:
        """Micro-batches beyond the table's peak."""
        return 1 if self.extra_activations is None else self.extra_activations


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Forward passes and backward passes run in different processes.

    Raises:
        ConfigurationError: The values are impossible.
    """

    activations: Activations = "recompute"
    """Whether backward ranks run the forward again, or get each layer's input."""
    merged: bool = False
    """Whether one forward process stands in for all tensor-parallel ranks of its stage."""
    forward_device: str | None = None
    """Device backend of forward ranks; None: the one of the others."""

    def __post_init__(self) -> None:
        """Check the values."""
        _check_choice("activations", self.activations, ("recompute", "ship"))
        if self.forward_device is not None:
            _check_choice("forward_device", self.forward_device, DEVICES[1:])


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Which iterations are recorded: the first few of each interval.

    Raises:
        ConfigurationError: The numbers are impossible.
    """

    interval: int = 100
    """In iterations."""
    iterations: int | None = None
    """Recorded ones of each interval; None: 10, or all of a shorter interval."""
    directory: Path | None = None
    """The folder of this run; None: by its sizes, in benchmark/."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.interval < 1:
            raise ConfigurationError("{interval} {value} must be at least 1", value=self.interval)
        if not 1 <= self.num_iterations <= self.interval:
            raise ConfigurationError(
                "{iterations} {value} must be between 1 and {interval} {most}",
                value=self.iterations,
                most=self.interval,
            )

    @property
    def num_iterations(self) -> int:
        """Recorded iterations of each interval."""
        return min(10, self.interval) if self.iterations is None else self.iterations


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """What is wanted of the pipeline of a training run.

    Raises:
        ConfigurationError: A value is impossible, or two exclude each other.
        ScheduleError: There is no such schedule, or it has no such option.
    """

    schedule: str | None = None
    """As `megatron-ext plan` lists them, or `csv:FILE`; None: Megatron's own 1F1B or interleaved
    one, or with `dynamic` the same table in another order."""
    chunks: int | None = None
    """Stages on each rank, where the schedule leaves that open; None: its default, and one in
    Megatron's own."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Of the schedule, by name; missing ones get their defaults."""
    costs: Costs | None = None
    """What the table is made for, and simulated for; None: `Costs()`, equal ones."""
    dynamic: DynamicOrder | None = None
    """None: every rank runs the order of the table."""
    transport: TransportName | None = None
    """What carries activations and gradients; None: torch, with `dynamic` or `disaggregation`
    auto."""
    device_path: DevicePath = "staged"
    """How tensors of a device get to other ranks, where the transport is not torch."""
    node_ips: tuple[str, ...] = ()
    """Addresses of the nodes or of the ranks, for wires between hosts; empty: found out."""
    checksums: bool = False
    """Whether the bytes of messages carry a checksum, where the transport is not torch."""
    disaggregation: Disaggregation | None = None
    """None: forwards and backwards of a stage run on one rank."""
    tracing: Tracing | None = None
    """None: nothing is recorded."""
    hang_timeout_s: float | None = None
    """How long a training step may make no progress; None: as long as the process groups wait."""
    message_timeout_s: float = 600.0
    """How long a rank waits for one message."""
    microbatch_rng: bool = False
    """Whether dropout masks follow from iteration, stage and micro-batch. Always so with
    `dynamic`."""
    device: str = "auto"
    """Device backend, of `megatron_ext.devices.CHOICES`. To be known before megatron.core is
    imported."""

    def __post_init__(self) -> None:
        """Check the values, each by itself and together."""
        object.__setattr__(self, "options", dict(self.options))
        object.__setattr__(self, "node_ips", tuple(self.node_ips))
        if self.transport is not None:
            _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("device_path", self.device_path, DEVICE_PATHS)
        _check_choice("device", self.device, DEVICES)
        _check_seconds("message_timeout_s", self.message_timeout_s)
        if self.hang_timeout_s is not None:
            _check_seconds("hang_timeout_s", self.hang_timeout_s)
        if self.disaggregation is not None:
            self._check_disaggregation()
            return
        self._check_schedule()
        self._check_transport()

    def _check_disaggregation(self) -> None:
        if self.schedule is not None or self.dynamic is not None or self.costs is not None:
            raise ConfigurationError(
                "{disaggregation} cannot run with {schedule}, {dynamic} or {costs}: it brings its "
                "own schedule; leave one of them out"
            )
        if self.transport == "torch":
            raise ConfigurationError(
                "{disaggregation} cannot run with {transport} torch: to torch.distributed forward "
                "and backward ranks are two jobs; take auto, or leave it out"
            )
        if self.device_path == "ipc":
            raise ConfigurationError(
                "{disaggregation} cannot run with {device_path} ipc: what its ranks exchange goes "
                "through the host; leave it out"
            )

    def _check_schedule(self) -> None:
        name = self.schedule
        if name is None:
            if self.dynamic is not None:
                return
            for what in ("costs", "options"):
                if getattr(self, what):
                    raise ConfigurationError(
                        f"{{{what}}} is for schedules of this package; add {{schedule}} NAME"
                    )
            return
        if name.startswith(CSV_PREFIX):
            if self.chunks is not None or self.options:
                raise ConfigurationError(
                    "{schedule} {name} is what the file says; leave chunks and options out",
                    name=name,
                )
            return
        generator = get(name)
        if not generator.listed:
            raise ConfigurationError(
                "{schedule} {name} needs processes of two roles; leave it out and take "
                "{disaggregation}, which chooses it",
                name=name,
            )
        generator.complete(self.chunks, self.options)

    def _check_transport(self) -> None:
        name = self.wire
        if self.dynamic is not None and name == "torch":
            raise ConfigurationError(
                "{dynamic} chooses by what has arrived, which torch.distributed cannot tell; leave "
                "{transport} torch out"
            )
        if self.node_ips and name in ("torch", "shm"):
            raise ConfigurationError(
                "{node_ips} is for wires between hosts, {transport} {name} has none; take "
                "{transport} auto, or leave {node_ips} out",
                name=name,
            )
        if self.checksums and name == "torch":
            raise ConfigurationError(
                "{checksums} is for messages of this package, {transport} is torch; add "
                "{transport} shm, tcp or rdma, or leave {checksums} out"
            )
        if self.checksums and self.device_path == "ipc":
            raise ConfigurationError(
                "{checksums} covers what goes through the host, {device_path} ipc goes past it; "
                "leave one of them out"
            )
        if self.device_path == "ipc" and name not in ("shm", "auto"):
            raise ConfigurationError(
                "{device_path} ipc goes with shared memory, {transport} is {name}; add {transport} "
                "shm, or leave {device_path} out",
                name=name,
            )

    @property
    def wire(self) -> TransportName:
        """The transport, with its default filled in."""
        if self.transport is not None:
            return self.transport
        return TRANSPORTS[0] if self.dynamic is None and self.disaggregation is None else "auto"

    @property
    def draws_by_microbatch(self) -> bool:
        """Whether random numbers are drawn by micro-batch."""
        return self.microbatch_rng or self.dynamic is not None


def _check_choice(setting: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{{{setting}}} {{value!r}} is none of {{choices}}; take one of them",
            value=value,
            choices=", ".join(choices),
        )


def _check_seconds(setting: str, value: float) -> None:
    if not 0 < value < inf:
        raise ConfigurationError(
            f"{{{setting}}} {{value:g}} must be a positive number of seconds", value=value
        )
