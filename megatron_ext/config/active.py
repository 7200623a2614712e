"""A job's pipeline, and this process's active configuration.

A `Pipeline` combines a configuration with a job's sizes. `Active` is the configuration in force:
patches and the executor get the user's settings from it. State that outlives a step is kept in
fields of `Active`, so it is released together with the configuration.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import default_schedule, generate
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.table_change import in_use
from megatron_ext.schedules.table.transforms import (
    split_backwards,
    weights_at_once,
    weights_waiting,
)
from megatron_ext.schedules.table.validation import validate
from megatron_ext.upstream import parent

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import (
        DynamicOrder,
        PipelineConfig,
        TransportName,
    )
    from megatron_ext.config.roles import Job, Role
    from megatron_ext.observer import Observer
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pipeline:
    """One job's pipeline under a configuration, for any number of micro-batches."""

    config: PipelineConfig
    pp: int
    """Number of pipeline ranks, as on the command line (for BitPipe, both twins together)."""
    num_microbatches: int
    """Number of micro-batches in a full batch, per Megatron replica (for BitPipe, per twin)."""
    splits: bool = True
    """Whether a dynamic order may split full backward passes; False if the model's layers do not
    support it."""
    over_torch: bool = False
    """Whether transport `auto` selects torch.distributed on this rank."""
    # Caches, keyed by the number of micro-batches. They are excluded from comparison,
    # and from `__init__` so that `replace` starts with empty caches (a different
    # configuration has different tables).
    _tables: dict[int, Schedule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fills: dict[int, bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Number of micro-batches -> whether every W in the table results from splitting a B."""
    _policies: dict[int, Callable[[int], Policy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Number of micro-batches -> a function that creates a rank's policy."""

    @property
    def name(self) -> str:
        """The registered name of the schedule, or `csv:FILE`."""
        return self.config.schedule or default_schedule(self.config.chunks)

    @property
    def costs(self) -> Costs:
        """The durations of actions and messages that the table is generated for."""
        return self.config.costs or UNIT

    @property
    def dynamic(self) -> DynamicOrder | None:
        """Settings for the dynamic order, or None if every rank runs in table order."""
        return self.config.dynamic

    @property
    def margin_by_length(self) -> int:
        """A dynamic order's margin for tables by length, in units of a step's longest micro-batch.

        Other dynamic orders use `dynamic.margin`.
        """
        assert self.dynamic is not None
        # The default is 0: the longest micro-batch alone can take up half of a table's
        # memory or more.
        return self.dynamic.extra_activations or 0

    @property
    def transport(self) -> TransportName:
        """The transport used for tensors between ranks."""
        return "torch" if self.over_torch else self.config.wire

    @property
    def timeout_s(self) -> float:
        """The longest time that a rank waits for one message."""
        return self.config.message_timeout_s

    @cached_property
    def placement(self) -> Placement:
        """The rank of each stage, which does not depend on the number of micro-batches."""
        return self.schedule(self.num_microbatches).placement

    @property
    def full(self) -> Schedule:
        """The table for a full batch."""
        return self.schedule(self.num_microbatches)

    @property
    def is_folded(self) -> bool:
        """Whether the pipeline ends on the rank where it starts (V and W)."""
        return self.placement.name in ("v", "w")

    def static(self) -> Pipeline:
        """Return the same pipeline, running in the table's static order."""
        # Without `dynamic`, schedule and transport would have other defaults, so set
        # both.
        config = replace(
            self.config,
            schedule=self.name,
            dynamic=None,
            transport=self.config.wire,
        )
        return replace(self, config=config)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table for this many micro-batches per replica, which is generated only once.

        This is the generator's table, with one exception: if activations cross over to the twin an
        odd number of times (dualpipe), they stay on one twin instead. Otherwise the last stage
        would be on the first stage's twin. Megatron treats that twin as another replica, which
        reads different samples, so activations would be matched with the wrong labels.

        Raises:
            ScheduleError: The schedule has no table for that number, or its table is invalid or
                would deadlock.
        """
        if num_microbatches not in self._tables:
            table = self.generated(num_microbatches, self.costs)
            # Validate generated tables too: an incorrect table from a plug-in would
            # hang the job in the middle of a step.
            validate(table)
            if self.transport == "torch":
                # torch.distributed may match messages by their order, so check that this order
                # cannot deadlock.
                check_queues(table)
            self._tables[num_microbatches] = table
        return self._tables[num_microbatches]

    def generated(
        self,
        num_microbatches: int,
        costs: Costs,
        **step_options: Any,
    ) -> Schedule:
        """Generate a table, which is neither validated nor cached.

        Args:
            num_microbatches: Number of micro-batches per replica.
            costs: The durations that the table is generated for.
            step_options: Options of features for a single step, passed on to `generate`.

        Raises:
            ScheduleError: The schedule has no table for these arguments.
        """
        config = self.config
        table = generate(
            self.name,
            self.pp,
            # Megatron treats each twin as a replica, but a table contains both twins.
            num_microbatches * config.twins,
            config.chunks,
            costs,
            **in_use(**config.feature_options, **step_options),
            **config.options,
        )
        if not table.is_for_one_step and table.num_slices != config.slices:
            raise ScheduleError(
                f"{self.name} cuts micro-batches into {table.num_slices} slices; add "
                f"--pipeline-slices {table.num_slices}"
            )
        # A table loaded from a file may contain pairs that this job does not use. Run
        # the two actions of such a pair one after the other.
        if table.pairs and not config.pairs:
            options = {**table.options, "pairs": "apart"}
            table = replace(table, pairs=(), options=options)
        # Keep activations on one twin; see `schedule`.
        if len(table.placement.twin_hops) % 2:
            placement = replace(table.placement, twin_hops=frozenset())
            table = replace(table, placement=placement)
        if config.dynamic is not None and self.splits:
            # W may fill any idle time only if it comes from this split. If the table
            # already contains W, the table determines where they run. With recomputed
            # layers, W runs right after I.
            places_weights = table.splits_backward or config.weights_at_once
            self._fills[num_microbatches] = not places_weights
            table = split_backwards(table)
        if config.weights_at_once:
            table = weights_at_once(table)
        if config.num_waiting:
            _check_waiting(table, config)
            table = weights_waiting(table, config.num_waiting)
        return table

    def policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return the policy that chooses a rank's next action within one step."""
        # Choosing a policy simulates several steps, so do it only once per number of
        # micro-batches.
        if num_microbatches not in self._policies:
            table = self.schedule(num_microbatches)
            self._policies[num_microbatches] = self.policies_of(table, self.costs)
        return self._policies[num_microbatches](rank)

    def policies_of(self, table: Schedule, costs: Costs) -> Callable[[int], Policy]:
        """Return a function that creates a rank's policy for a table generated with `costs`."""
        dynamic = self.config.dynamic
        assert dynamic is not None, "a static schedule has no policy"
        extra_activations = dynamic.margin
        if table.is_for_one_step:
            extra_activations = self.margin_by_length
        weights_fill = self._fills.get(table.num_microbatches, False)
        return policies(
            dynamic.policy,
            table,
            extra_activations=extra_activations,
            weights_fill=weights_fill,
            costs=costs,
            stash_ratio=self.config.stash_ratio,
        )


def _check_waiting(table: Schedule, config: PipelineConfig) -> None:
    """Reject a table in which no W can run while its rank waits for tokens."""
    setting = f"--pipeline-waiting-weights {config.waiting_weights}"
    if not config.pairs:
        raise ScheduleError(
            f"{setting}: {table.label} runs no pairs (--overlap-moe-expert-parallel-comm, with "
            "experts on several ranks), and W fills only the idle time within pairs; remove "
            "--pipeline-waiting-weights"
        )
    # A table with few micro-batches, such as at the start of a ramp-up, may have no
    # pairs. In that case, its W run where the table places them.
    if table.pairs and not table.splits_backward:
        raise ScheduleError(
            f"{setting}: {table.label} does not split backward passes, so no weight gradient can "
            "wait; use --pipeline-schedule zb-h1, or remove --pipeline-waiting-weights"
        )


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The place of this process among the processes that the launcher started together."""

    local_rank: int = 0
    """Index of this process on its host."""
    local_world_size: int | None = None
    """Number of processes on this host, or None if all of the job's processes are on this host."""
    run: tuple[str, str] = ("", "")
    """torchrun's run id and restart count; empty strings if torchrun is not used."""
    rendezvous_host: str = "localhost"
    """Host of the store through which the processes find each other: torchrun's MASTER_ADDR."""
    host_address: str | None = None
    """Address at which other hosts reach this one, or None if it is derived from the rank."""

    @classmethod
    def read(cls) -> Environment:
        """Read the variables that torchrun and compatible launchers set."""
        variables = os.environ
        local_world_size = None
        if "LOCAL_WORLD_SIZE" in variables:
            local_world_size = int(variables["LOCAL_WORLD_SIZE"])
        run_id = variables.get("TORCHELASTIC_RUN_ID", "")
        restart_count = variables.get("TORCHELASTIC_RESTART_COUNT", "")
        return cls(
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            local_world_size=local_world_size,
            run=(run_id, restart_count),
            rendezvous_host=variables.get("MASTER_ADDR") or "localhost",
            host_address=variables.get(parent.HOST_ADDRESS),
        )


@dataclass(frozen=True)
class Choice:
    """A setting that `auto` chose in this process."""

    flags: str
    """The flags that select it."""
    basis: str
    """The device, and how the choice was made, as text."""


class Closing(Protocol):
    """State that is closed together with the configuration."""

    def close(self) -> None:
        """Release all resources and restore everything that was changed."""


class Aborting(Closing, Protocol):
    """State that is closed with the configuration. Another thread can make it stop waiting."""

    def abort(self, reason: str) -> None:
        """Stop waiting for other ranks, on this rank and on its peers."""


@dataclass(eq=False)
class Active:
    """A configuration, its consequences for this process, and state that outlives a step."""

    config: PipelineConfig
    pipeline: Pipeline | None = None
    """The pipeline that our runtime executes, or None if Megatron's own schedules run."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if our transport carries its messages, else None."""
    job: Job | None = None
    """This process's disaggregated job, or None if forward and backward passes share ranks."""
    choice: Choice | None = None
    """The schedule that `auto` has chosen, or None if `auto` has not chosen one."""
    seed: int | None = None
    """Base seed for random numbers drawn by micro-batch, or None if Megatron's generators are not
    reseeded."""
    replicas_differ: bool = False
    """Whether each data-parallel replica draws its own numbers (`--data-parallel-random-init`)."""
    requested: PipelineConfig | None = None
    """The argument to `configure`, or None if the configuration comes from flags."""
    is_sized: bool = True
    """Whether the job's sizes are known; False until a host provides them."""
    observers: list[Observer] = field(default_factory=list)
    """Observers of the runtime. The runtime gets them when it is created, so append to this list
    before the first step."""
    departures: list[str] = field(default_factory=list)
    """How this rank's training departs from the settings, as sentences (`report_departure`)."""
    environment: Environment = field(default_factory=Environment.read)
    """The place of this process among the processes that the launcher started together."""
    iteration: int | None = None
    """The training step in progress, counted across resumed runs, or None if unknown."""
    runtimes: Aborting | None = None
    """The runtime's state (`runtime.in_force`); None before the first step."""
    roles: Closing | None = None
    """State of a process in a disaggregated job (`worlds.roles_in_force`); None before it joins."""
    host: Closing | None = None
    """State of a third-party training loop (`hosts/`); None before the loop provides its sizes."""
    checked_steps: WeakKeyDictionary[Any, int] = field(
        default_factory=WeakKeyDictionary
    )
    """First chunk of a model -> number of its training steps whose effects have been checked
    (`patches/effects.py`); 0 if only evaluations were."""
    is_log_checked: bool = False
    """Whether `patches/effects.py` has checked the log's first line."""

    def abort(self, reason: str) -> None:
        """Stop waiting for messages in this process. Not called from the training thread."""
        if self.runtimes is not None:
            self.runtimes.abort(reason)

    def close(self) -> None:
        """Close the observers and the state of the runtime, the roles and the host."""
        for observer in self.observers:
            observer.close()
        self.observers.clear()
        # The order matters: each object may use the objects closed after it.
        for state in (self.runtimes, self.roles, self.host):
            if state is not None:
                state.close()
        self.runtimes = None
        self.roles = None
        self.host = None


@dataclass
class _InForce:
    """State that this process keeps from one configuration to the next."""

    configuration: Active | None = None
    num_transports: Counter[str] = field(default_factory=Counter)
    """Purpose -> number of transports opened so far in this attempt, under any configuration."""
    attempt: int | None = None
    """Number of times the job has restarted in the same processes, or None if it cannot do so."""


# The one active configuration.
_PROCESS = _InForce()


def activate_configuration(configuration: Active | None) -> None:
    """Activate a configuration. With None, training runs as if this package were not installed."""
    _PROCESS.configuration = configuration


def active() -> Active | None:
    """Return the active configuration, or None."""
    return _PROCESS.configuration


def required() -> Active:
    """Return the active configuration, which must exist."""
    in_force = _PROCESS.configuration
    assert in_force is not None, (
        "no active configuration; call prepare or megatron_ext.configure"
    )
    return in_force


def report_departure(sentence: str) -> None:
    """Log how this rank's training departs from the settings, and record it for `compare`."""
    # Use WARNING, because Python hides all lower levels unless logging is configured.
    _LOG.warning("%s", sentence)
    in_force = active()
    if in_force is not None:
        in_force.departures.append(sentence)


def name_transport(purpose: str) -> str:
    """Return the name under which the peers of a new transport find each other in the job's store.

    The names are numbered, so all ranks that open transports for a purpose must call this the same
    number of times. The numbering continues from one configuration to the next and restarts with
    each attempt.
    """
    # The store keeps the addresses of closed transports, so a new transport must not reuse a name.
    _PROCESS.num_transports[purpose] += 1
    name = f"{purpose}/{_PROCESS.num_transports[purpose]}"
    if _PROCESS.attempt:
        name = f"attempt {_PROCESS.attempt}/{name}"
    return name


def begin_attempt(number: int | None) -> None:
    """Set the attempt number in a job that restarts within the same processes.

    The transport count is reset too, because a reserve rank has not opened any transports yet.
    """
    _PROCESS.attempt = number
    _PROCESS.num_transports.clear()


def attempt() -> int | None:
    """Return how often the job has restarted within the same processes; None if it cannot do so."""
    return _PROCESS.attempt


def clear_configuration() -> None:
    """Deactivate the configuration and close all state that belongs to it."""
    # Deactivate it first: code that runs while the state is being closed may look up
    # the active configuration and must not find this one.
    in_force = _PROCESS.configuration
    _PROCESS.configuration = None
    if in_force is not None:
        in_force.close()


def pipeline() -> Pipeline | None:
    """Return the pipeline that our runtime executes, or None if Megatron's own schedules run."""
    in_force = active()
    return None if in_force is None else in_force.pipeline


def choice() -> Choice | None:
    """Return the schedule that `auto` has chosen, or None if `auto` has not chosen one."""
    in_force = active()
    return None if in_force is None else in_force.choice


def transport_only() -> Pipeline | None:
    """Return Megatron's own schedule if our transport carries its messages, else None."""
    in_force = active()
    return None if in_force is None else in_force.transport_only


def job() -> Job | None:
    """Return this process's disaggregated job; None if forward and backward passes share ranks."""
    in_force = active()
    return None if in_force is None else in_force.job


def has_role(role: Role) -> bool:
    """Return whether this process has this role in a disaggregated job."""
    disaggregated_job = job()
    return disaggregated_job is not None and disaggregated_job.role == role


def is_folded() -> bool:
    """Return whether the active pipeline ends on the rank where it starts (V and W)."""
    running = pipeline()
    return running is not None and running.is_folded


# Megatron's generators carry their state from one forward pass to the next, so a
# different order of micro-batches draws different dropout masks. With
# `--microbatch-rng`, each forward pass reseeds every generator from the run's seed, the
# iteration, the stage and the micro-batch. So all schedules with the same stages draw
# the same masks, and so does a resumed run. `runtime/compute.py` sets the generators.


def draws_by_microbatch() -> bool:
    """Return whether random numbers are drawn by micro-batch."""
    in_force = active()
    return in_force is not None and in_force.seed is not None


def begin_iteration(number: int) -> None:
    """Set the number of the training step that is starting, counted across resumed runs.

    Random numbers drawn by micro-batch depend on this number.
    """
    in_force = active()
    if in_force is not None:
        in_force.iteration = number


def iteration() -> int:
    """Return the number of the current training step.

    Raises:
        ScheduleError: `begin_iteration` was never called, so all steps would draw the same masks.
    """
    in_force = active()
    if in_force is None or in_force.iteration is None:
        raise ScheduleError(
            "random numbers are drawn by micro-batch, but the iteration is not known; call "
            "megatron_ext.begin_iteration before each step, as the trainers do"
        )
    return in_force.iteration


def seed_of(*key: int | str) -> int:
    """Return a 63-bit seed derived from a key and the run's seed, which must be set."""
    in_force = active()
    if in_force is None or in_force.seed is None:
        raise ScheduleError(
            "random numbers by micro-batch need a seed; add --microbatch-rng"
        )
    # Do not use `hash()`: Python randomizes string hashes per process, so each rank
    # would get a different seed.
    text = repr((in_force.seed, *key))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
