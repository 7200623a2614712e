"""The user's pipeline configuration: one frozen object, validated by its constructor.

    PipelineConfig(schedule="zb-v", transport="shm", tracing=Tracing(interval=50))

The object contains neither job sizes nor caches, which belong to `active.Pipeline`. The module is
cheap to import. `flags.py` translates the command line into this object, and
`megatron_ext.configure` accepts it directly.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_origin, get_type_hints

from megatron_ext.devices import CHOICES as DEVICES
from megatron_ext.errors import ConfigurationError
from megatron_ext.feature_list import MISTAKES
from megatron_ext.schedules.generators.catalog import (
    CSV_PREFIX,
    Generator,
    get,
)
from megatron_ext.schedules.search.policies import PolicyName  # noqa: TC001 - check_types
from megatron_ext.schedules.table.actions import Option  # noqa: TC001 - check_types
from megatron_ext.schedules.table.costs import Costs  # noqa: TC001 - check_types
from megatron_ext.schedules.table.length_cost import LengthCost  # noqa: TC001 - check_types

TransportName = Literal["torch", "auto", "shm", "tcp", "rdma"]
"""torch: torch.distributed, the default. auto: our native core over the best wire between any two
ranks. shm, tcp, rdma: the native core over this wire only."""

DevicePath = Literal["auto", "staged", "ipc"]
"""How device tensors reach other ranks. staged: through pinned host memory. ipc: directly through
CUDA IPC."""

AUTO = "auto"
"""The schedule name that lets the planner choose (`automatic.py`). With `auto:FOLDER`, the planner
uses the costs from a traced run."""

Activations = Literal["recompute", "ship"]
"""How backward ranks get activations: they recompute the forward pass, or forward ranks send
them."""

Balance = Literal["off", "order", "pack"]
"""The effect of micro-batch lengths: none, on the order in which micro-batches enter the pipeline,
or on both this order and the data-parallel replica that runs them."""


@dataclass(frozen=True, kw_only=True)
class DynamicOrder:
    """Each rank chooses the order of its actions at run time."""

    policy: PolicyName = "hint"
    """The rule that chooses among ready actions (`schedules/search/policies.py`)."""
    extra_activations: int | None = None
    """With `hint`: micro-batches that a rank may keep beyond the table's peak. Default: 1."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_types(self)
        extra = self.extra_activations
        if extra is not None and extra < 0:
            raise ConfigurationError(
                "{extra_activations:{c.extra_activations}}: a rank cannot keep less than the "
                "table's own peak; use {extra_activations:0}",
                c=self,
            )
        if extra is not None and self.policy != "hint":
            raise ConfigurationError(
                "{extra_activations:{c.extra_activations}}: {policy:{c.policy}} has no memory "
                "bound; remove one of them",
                c=self,
            )

    @property
    def margin(self) -> int:
        """Micro-batches that a rank may keep beyond the table's peak."""
        # The default is 1: with late messages, one more micro-batch increases the gain
        # from 11 % to 14 % (interleaved) or from 16 % to 28 % (BitPipe's published
        # table); see docs/results-dynamic-orders.md.
        return 1 if self.extra_activations is None else self.extra_activations


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Forward and backward passes run in separate processes."""

    activations: Activations = "recompute"
    """`recompute`: backward ranks run the forward pass again. `ship`: they receive each layer's
    input, `[s, b, h]`."""
    merged: bool = False
    """Whether one forward process replaces all tensor-parallel ranks of its stage."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """The iterations to record: the first few in each interval."""

    interval: int = 100
    """Length of an interval, in iterations."""
    iterations: int | None = None
    """Number of iterations to record in each interval. Default: 10, or the whole interval if it is
    shorter."""
    directory: Path | None = None
    """Output folder for this run. Default: a folder in benchmark/, named after the run's sizes."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if isinstance(self.directory, str | os.PathLike):
            object.__setattr__(self, "directory", Path(self.directory))
        check_types(self)
        if self.interval < 1:
            raise ConfigurationError(
                "{interval:{c.interval}} must be at least 1", c=self
            )
        if not 1 <= self.num_iterations <= self.interval:
            raise ConfigurationError(
                "{iterations:{c.iterations}} must be between 1 and {interval:{c.interval}}",
                c=self,
            )

    @property
    def num_iterations(self) -> int:
        """Number of iterations that are recorded in each interval."""
        if self.iterations is None:
            return min(10, self.interval)
        return self.iterations


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The user's settings for a training run's pipeline.

    Raises:
        ConfigurationError: A value is invalid, or two values are mutually exclusive.
        ScheduleError: The schedule does not exist or does not have a given option.
    """

    schedule: str | None = None
    """A name listed by `megatron-ext plan`, or `csv:FILE`. `auto`: the schedule with the fastest
    forecast that fits into memory. `auto:FOLDER`: the fastest schedule according to the costs from
    a traced run. None: Megatron's own 1F1B or interleaved schedule; with `dynamic`, its table in
    dynamic order."""
    chunks: int | None = None
    """Number of stages on each rank, if the schedule supports different numbers. If None, the
    schedule determines the number, which is 1 for Megatron's own schedules."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """The schedule's options by name. Missing options get their defaults."""
    slices: int = 1
    """Number of slices of equal cost that each micro-batch is cut into (`docs/lengths.md`)."""
    slice_tokens: int | Literal["auto"] | None = None
    """Number of tokens T: a micro-batch of L tokens is cut into L / T slices of equal cost, rounded
    up. `auto`: T is derived from the lengths in each step. If None, every micro-batch has `slices`
    slices."""
    costs: Costs | None = None
    """Durations used to generate and simulate the table. Default: `Costs()`, all equal."""
    pairs: bool = False
    """Whether a forward pass and another micro-batch's backward pass run as one action, so that
    each hides the other's expert communication. For models with experts on several ranks. Flags set
    this if Megatron overlaps that communication."""
    waiting_weights: int | Literal["auto"] = 0
    """With `pairs`: how many more W may wait on a rank than in the table, to run while the rank
    waits for tokens. Each waiting W keeps the operands for one stage and micro-batch in memory.
    `auto`: as many as fit into the memory that the planner's forecast leaves free."""
    dynamic: DynamicOrder | None = None
    """Settings for the dynamic order. If None, every rank runs in table order."""
    balance: Balance = "off"
    """`off`: each replica runs its micro-batches in data order. `order`: their lengths determine
    the order in which they enter the pipeline. `pack`: in addition, all micro-batches are first
    distributed over the data-parallel replicas by cost."""
    length_costs: LengthCost | None = None
    """Cost as a function of length, for `balance`, `slices` and `slice_tokens`. If None, it is
    derived from the model's shape."""
    stash_ratio: float = 1.0
    """Memory that a micro-batch holds between I and W, divided by the memory that it holds between
    F and I; at least 1. Memory bounds take this ratio into account. With flags, it is derived from
    recomputation and from Transformer Engine's layers."""
    weights_at_once: bool = False
    """Whether W runs right after I, so that a rank holds the operands for one W at a time. With
    flags, this is set if every layer is recomputed."""
    transport: TransportName | None = None
    """Transport for tensors. Default: torch, or auto with `dynamic` or `disaggregation`."""
    device_path: DevicePath = "auto"
    """How device tensors reach other ranks if the transport is not torch. auto: with the transport
    `auto`, directly between the devices of any two ranks that support it; otherwise staged."""
    node_ips: tuple[str, ...] = ()
    """Addresses of nodes or ranks, for connections between hosts. Empty: detected automatically."""
    checksums: bool = False
    """Whether to checksum the bytes of messages if the transport is not torch."""
    disaggregation: Disaggregation | None = None
    """Settings for disaggregation. If None, a stage's forward and backward passes share a rank."""
    tracing: Tracing | None = None
    """Settings for traces. If None, nothing is recorded."""
    hang_timeout_s: float | None = None
    """The longest time that a training step may go without progress. If None, the process groups'
    time-out applies."""
    message_timeout_s: float = 600.0
    """The longest time that a rank waits for one message."""
    variable_seq_lengths: bool = False
    """Whether micro-batches may have sequences of different lengths. Messages then include their
    tensors' shapes."""
    microbatch_rng: bool = False
    """Whether iteration, stage and micro-batch determine dropout masks; implied by `dynamic`."""
    device: str = "auto"
    """Device backend, one of `megatron_ext.devices.CHOICES`. Takes effect only if it is set before
    megatron.core is imported."""

    def __post_init__(self) -> None:
        """Check all values and their combinations."""
        # argparse and YAML produce lists, but a frozen object should not hold mutable values.
        node_ips: object = self.node_ips
        if isinstance(node_ips, list):
            object.__setattr__(self, "node_ips", tuple(node_ips))
        check_types(self)
        # Copy the options: cached tables would become wrong if the caller changed the
        # dictionary.
        object.__setattr__(self, "options", dict(self.options))
        # Disaggregation implies the schedule and the transport, so these need no check.
        has_roles = self.disaggregation is not None
        mistakes = [
            _mistake_of_values(self),
        ]
        # Import on first use, because features import this module.
        for entry in MISTAKES:
            module, _, name = entry.partition(":")
            mistake = getattr(import_module(module), name)
            mistakes.append(mistake(self))
        if has_roles:
            mistakes.append(_mistake_of_roles(self))
        else:
            mistakes.append(_mistake_of_schedules(self))
            mistakes.append(_mistake_of_transports(self))
        for template in mistakes:
            if template is not None:
                raise ConfigurationError(template, c=self)
        # Reject chunks and options that the schedule does not support.
        if not has_roles and self.generator is not None:
            self.generator.complete(self.chunks, self.options)

    @property
    def generator(self) -> Generator | None:
        """The table's generator; None if the table is in a file or no schedule is chosen yet."""
        name = self.schedule
        if name is None or name.startswith(CSV_PREFIX) or self.is_automatic:
            return None
        return get(name)

    @property
    def is_automatic(self) -> bool:
        """Whether the planner chooses the schedule once the job's sizes are known."""
        if self.schedule is None:
            return False
        name, _, _folder = self.schedule.partition(":")
        return name == AUTO

    @property
    def trace_folder(self) -> Path | None:
        """The folder of the traced run whose costs the planner uses; None if it uses a forecast."""
        if self.schedule is None or not self.schedule.startswith(f"{AUTO}:"):
            return None
        return Path(self.schedule.removeprefix(f"{AUTO}:"))

    @property
    def runs_no_table(self) -> bool:
        """Whether Megatron's own schedules or disaggregated roles run instead of our tables."""
        return self.schedule is None and self.dynamic is None

    @property
    def twins(self) -> int:
        """Number of mirrored pipelines. Megatron treats each of them as a data-parallel replica."""
        return 1 if self.generator is None else self.generator.twins

    @property
    def tries_ipc(self) -> bool:
        """Whether ranks whose devices can reach each other send tensors directly between them."""
        return self.wire == "auto" and self.device_path == "auto" and not self.checksums

    @property
    def wire(self) -> TransportName:
        """The transport, with the default filled in."""
        if self.transport is not None:
            return self.transport
        if self.dynamic is None and self.disaggregation is None:
            return "torch"
        return "auto"

    @property
    def cuts_sequences(self) -> bool:
        """Whether micro-batches may run in slices."""
        return self.slices > 1 or self.slice_tokens is not None

    @property
    def has_table_per_step(self) -> bool:
        """Whether each step's table is generated from the lengths in the step's data."""
        return self.slice_tokens is not None

    @property
    def feature_options(self) -> dict[str, Any]:
        """The features' options for `schedules.generate`."""
        return {"pairs": self.pairs, "slices": self.slices}

    @property
    def num_waiting(self) -> int:
        """How many W may wait; 0 for `auto`, until a job's settings have been checked."""
        return 0 if self.waiting_weights == "auto" else self.waiting_weights

    @property
    def draws_by_microbatch(self) -> bool:
        """Whether random numbers are drawn by micro-batch."""
        return self.microbatch_rng or self.dynamic is not None


# Each of these functions returns a template for a `ConfigurationError` about the first mistake that
# it finds, or None. In a template, {field} and {field:value} are settings.


def _mistake_of_values(c: PipelineConfig) -> str | None:
    """Return what is wrong with a single value, or with a value and the transport."""
    if c.device not in DEVICES:
        return f"{{device:{{c.device}}}} must be one of {', '.join(DEVICES)}; use one of them"
    # This comparison and those of seconds below also reject NaN.
    if not 1 <= c.stash_ratio < inf:
        return (
            "{stash_ratio:{c.stash_ratio}} must be at least 1 (1 means that activations are "
            "counted until W); use 1"
        )
    if c.node_ips and c.wire in ("torch", "shm"):
        return (
            "{node_ips} is for connections between hosts, but {transport:{c.wire}} has none; use "
            "{transport:auto}, or remove {node_ips}"
        )
    if not 0 < c.message_timeout_s < inf:
        return "{message_timeout_s:{c.message_timeout_s}} must be a positive number of seconds"
    if c.hang_timeout_s is not None and not 0 < c.hang_timeout_s < inf:
        return (
            "{hang_timeout_s:{c.hang_timeout_s}} must be a positive number of seconds"
        )
    return None


def _mistake_of_roles(c: PipelineConfig) -> str | None:
    """Return which setting is incompatible with separate forward and backward ranks."""
    if not c.runs_no_table or c.costs is not None:
        return (
            "{disaggregation} cannot run with {schedule}, {dynamic} or {costs}: it has its own "
            "schedule; remove one of them"
        )
    if c.transport == "torch":
        return (
            "{disaggregation} cannot run with {transport:torch}: for torch.distributed, forward "
            "and backward ranks are two jobs; use {transport:auto}, or remove it"
        )
    if c.device_path == "ipc":
        return (
            "{disaggregation} cannot run with {device_path:ipc}: its messages go through the host; "
            "remove it"
        )
    return None


def _mistake_of_schedules(c: PipelineConfig) -> str | None:
    """Return which setting the schedule rules out, or which setting needs one of our schedules."""
    if c.chunks is not None and c.chunks < 1:
        return "{chunks:{c.chunks}} must be at least 1"
    # Settings that only our tables use.
    of_tables = {
        "costs": c.costs is not None,
        "options": bool(c.options),
        "weights_at_once": c.weights_at_once,
        "stash_ratio": c.stash_ratio != 1,
    }
    for field_name, is_set in of_tables.items():
        if c.runs_no_table and is_set:
            return (
                f"{{{field_name}}} requires one of this package's schedules; add "
                "{schedule:NAME}"
            )
    if c.is_automatic:
        return _mistake_of_auto(c)
    sets_parameters = c.chunks is not None or bool(c.options)
    if c.schedule and c.generator is None and sets_parameters:
        return "{schedule:{c.schedule}}: the file fixes chunks and options; remove them"
    if c.generator is not None and not c.generator.listed:
        return (
            "{schedule:{c.schedule}} needs forward and backward ranks; use {disaggregation} "
            "instead, which selects this schedule"
        )
    return None


def _mistake_of_auto(c: PipelineConfig) -> str | None:
    """Return which setting cannot be combined with a schedule that the planner chooses."""
    if c.schedule == f"{AUTO}:":
        return "{schedule:auto:} names no folder; use {schedule:auto}, or {schedule:auto:FOLDER}"
    if c.chunks is not None or c.options:
        return (
            "{schedule:{c.schedule}} chooses chunks and options itself; remove them, "
            "or use {schedule:interleaved}"
        )
    if c.dynamic is not None:
        return (
            "{schedule:{c.schedule}} compares the orders of tables, which {dynamic} changes; use "
            "{schedule:zb-h1} or another schedule, or remove {dynamic}"
        )
    return None


def _mistake_of_transports(c: PipelineConfig) -> str | None:
    """Return which setting the transport does not support."""
    if c.dynamic is not None and c.wire == "torch":
        return (
            "{dynamic} needs to know which messages have arrived, which torch.distributed does not "
            "report; remove {transport:torch}"
        )
    if c.checksums and c.wire == "torch":
        return (
            "{checksums} is for this package's transports, but {transport} is torch; add "
            "{transport:shm}, tcp or rdma, or remove {checksums}"
        )
    if c.checksums and c.device_path == "ipc":
        return (
            "{checksums} covers messages through host memory, which {device_path:ipc} bypasses; "
            "remove one of them"
        )
    if c.device_path == "ipc" and c.wire not in ("shm", "auto"):
        return (
            "{device_path:ipc} needs shared memory, but {transport} is {c.wire}; add "
            "{transport:shm}, or remove {device_path}"
        )
    return None


def check_types(settings: object) -> None:
    """Check the value of every field in a dataclass against its annotation.

    Raises:
        ConfigurationError: A value has the wrong type, or is not one of the choices.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if is_of_type(value, hint):
            continue
        # Describe the accepted types for the error message.
        fitting: list[str] = []
        kinds = kinds_of(hint)
        for kind in kinds:
            origin = get_origin(kind) or kind
            # Words such as `auto` are alternatives to a number, so the message lists both.
            if origin is Literal and int in kinds:
                fitting += typing.get_args(kind)
                continue
            if origin is Literal:
                choices = typing.get_args(kind)
                alike = get_close_matches(str(value), choices, 1)
                remedy = f"did you mean {alike[0]}?" if alike else "use one of them"
                raise ConfigurationError(
                    "{value} must be one of {choices}; {remedy}",
                    value=f"{name} {value!r}",
                    choices=", ".join(choices),
                    remedy=remedy,
                )
            fitting.append(_WORDS.get(origin) or f"a {kind.__name__} object")
        raise ConfigurationError(
            "{value} must be {kinds}",
            value=f"{name} {value!r}",
            kinds=" or ".join(fitting),
        )


_WORDS = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "a string",
    tuple: "a tuple of strings",
    Mapping: "a dict with values by name",
    type(None): "None",
}


def is_of_type(value: object, hint: Any) -> bool:
    """Return whether a value fits an annotation. An int fits float, but a bool fits no number."""
    kinds = kinds_of(hint)
    if len(kinds) > 1:
        return any(is_of_type(value, kind) for kind in kinds)
    origin = get_origin(hint)
    parts = typing.get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is tuple:  # annotated as `tuple[X, ...]`
        return isinstance(value, tuple) and all(
            is_of_type(item, parts[0]) for item in value
        )
    if origin is Mapping:
        key_hint, value_hint = parts
        if not isinstance(value, Mapping):
            return False
        are_keys = all(is_of_type(key, key_hint) for key in value)
        are_values = all(is_of_type(item, value_hint) for item in value.values())
        return are_keys and are_values
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return an annotation's alternatives."""
    if get_origin(hint) in (Union, UnionType):
        return typing.get_args(hint)
    return (hint,)
