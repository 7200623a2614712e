"""The pipeline of a job, and what is in force in this process.

A `Pipeline` is a configuration for the sizes of a job. `Active` is the configuration in force:
patches and the executor read the user's settings here. What a feature keeps from step to step is a
field of it, so it ends with the configuration.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.generators.catalog import base_table, generate
from megatron_ext.schedules.search.patience import policies
from megatron_ext.schedules.search.queues import check_queues
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.table_change import in_use
from megatron_ext.schedules.table.transforms import split_backwards, weights_at_once
from megatron_ext.schedules.table.validation import validate

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig, TransportName
    from megatron_ext.config.roles import Job, Role
    from megatron_ext.observer import Observer
    from megatron_ext.schedules.search.policies import Policy
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.schedules.table.placement import Placement


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of one job under a configuration, for any number of micro-batches."""

    config: PipelineConfig
    pp: int
    """Ranks of the whole pipeline world, as on the command line (BitPipe: both twins together)."""
    num_microbatches: int
    """Micro-batches in a full batch for one of Megatron's replicas (BitPipe: for one twin)."""
    splits: bool = True
    """Whether a dynamic order may split full backwards; False if the layers cannot."""
    over_torch: bool = False
    """Whether `auto` selects torch.distributed here."""
    # Caches of a frozen object, by number of micro-batches: `replace` begins them anew, because
    # another configuration has other tables, and two pipelines are equal whatever each has cached.
    _tables: dict[int, Schedule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _fills: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Whether all W of the table come from our splitting."""
    _policies: dict[int, Callable[[int], Policy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The factory of a rank's policy."""

    @property
    def name(self) -> str:
        """The registered name of the schedule, or `csv:FILE`."""
        return self.config.schedule or base_table(self.config.chunks)

    @property
    def costs(self) -> Costs:
        """Durations that the table is generated for."""
        return self.config.costs or UNIT

    @property
    def dynamic(self) -> DynamicOrder | None:
        """Settings of the dynamic order; None: every rank runs the order of the table."""
        return self.config.dynamic

    @property
    def transport(self) -> TransportName:
        """The transport of tensors between ranks."""
        return "torch" if self.over_torch else self.config.wire

    @property
    def timeout_s(self) -> float:
        """Longest time a rank waits for one message."""
        return self.config.message_timeout_s

    @cached_property
    def placement(self) -> Placement:
        """The rank of each stage, the same for every number of micro-batches."""
        return self.schedule(self.num_microbatches).placement

    @property
    def full(self) -> Schedule:
        """The table of a full batch."""
        return self.schedule(self.num_microbatches)

    @property
    def is_folded(self) -> bool:
        """Whether the pipeline ends on the rank where it begins (V and W)."""
        return self.placement.name in ("v", "w")

    def static(self) -> Pipeline:
        """Return the same pipeline in the static order of the table."""
        # Other settings depend on what `dynamic` implies, so make that explicit.
        config = replace(self.config, schedule=self.name, dynamic=None, transport=self.config.wire)
        return replace(self, config=config)

    def with_attention(self, share: float) -> Pipeline:
        """Return the same pipeline, with slices cut for a share of attention in a forward."""
        costs = replace(self.costs, attention=share)
        return replace(self, config=replace(self.config, costs=costs))

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table for a number of micro-batches of one replica, made and validated once.

        It is the generator's table, with one exception: twins whose activations cross over once
        (dualpipe). There the last stage would be on the twin of the first. To Megatron that is
        another replica, which reads other samples, so activations would meet the wrong labels;
        the exception keeps activations on their own twin.

        Raises:
            ScheduleError: The schedule has no table for that number, a wrong one, or one whose
                ranks would deadlock.
        """
        if num_microbatches in self._tables:
            return self._tables[num_microbatches]
        config = self.config
        table = generate(
            self.name,
            self.pp,
            num_microbatches * config.twins,  # one replica here is one twin
            config.chunks,
            self.costs,
            **in_use(pairs=config.pairs, slices=config.slices),
            **config.options,
        )
        if table.num_slices != config.slices:
            raise ScheduleError(
                f"{self.name} cuts micro-batches into {table.num_slices} slices; add "
                f"--pipeline-slices {table.num_slices}"
            )
        if table.pairs and not config.pairs:  # a file's, whose two run one by one
            table = replace(table, pairs=(), options={**table.options, "pairs": "apart"})
        if len(table.placement.twin_hops) % 2:
            table = replace(table, placement=replace(table.placement, twin_hops=frozenset()))
        if config.dynamic is not None and self.splits:
            # Only such W are without a place: those of a table that splits have theirs, and
            # recomputed layers run W at once.
            self._fills[num_microbatches] = not (table.splits_backward or config.weights_at_once)
            table = split_backwards(table)
        if config.weights_at_once:
            table = weights_at_once(table)
        # Registered generators too: a wrong table of a plug-in would hang the job in a step.
        validate(table)
        if self.transport == "torch":
            # It may match messages by their order, so the proof covers that order too.
            check_queues(table)
        self._tables[num_microbatches] = table
        return table

    def policy(self, num_microbatches: int, rank: int) -> Policy:
        """Return the policy that chooses the next action of a rank, for one step."""
        dynamic = self.config.dynamic
        assert dynamic is not None, "a static schedule has no policy"
        if num_microbatches not in self._policies:
            self._policies[num_microbatches] = policies(
                dynamic.policy,
                self.schedule(num_microbatches),
                extra_activations=dynamic.margin,
                weights_fill=self._fills.get(num_microbatches, False),
                costs=self.costs,
                stash_ratio=self.config.stash_ratio,
            )
        return self._policies[num_microbatches](rank)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Place of this process among those that the launcher started together."""

    local_rank: int = 0
    """Number of this process on its host."""
    local_world_size: int | None = None
    """Processes on this host; None: all of the job."""
    run: tuple[str, str] = ("", "")
    """torchrun's run id and restart count; empty without torchrun."""
    rendezvous_host: str = "localhost"
    """Host on which processes find each other: torchrun's MASTER_ADDR."""

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
        )


class Closing(Protocol):
    """Something that ends with the configuration."""

    def close(self) -> None:
        """Restore or release what it holds."""


class Aborting(Closing, Protocol):
    """Something whose waits another thread can end."""

    def abort(self, reason: str) -> None:
        """End the waits for other ranks, here and at the peers."""


@dataclass(eq=False)
class Active:
    """A configuration, its meaning in this process, and the state of features under it."""

    config: PipelineConfig
    pipeline: Pipeline | None = None
    """The pipeline that our runtime executes; None: Megatron's own schedules run."""
    transport_only: Pipeline | None = None
    """Megatron's own schedule if it runs over our transport, else None."""
    job: Job | None = None
    """The disaggregated job of this process; None: forwards and backwards share ranks."""
    seed: int | None = None
    """Base seed of random numbers drawn by micro-batch; None: Megatron's generators run on."""
    requested: PipelineConfig | None = None
    """The argument of `configure`, for hosts that know the sizes of a job; None: flags."""
    is_sized: bool = True
    """Whether the sizes of the job are known; False: a host has yet to give them."""
    observers: list[Observer] = field(default_factory=list)
    """Handed to the runtime when it is made; append before the first step."""
    environment: Environment = field(default_factory=Environment.read)
    """Place of this process among those that the launcher started together."""
    iteration: int | None = None
    """The training step in progress, counted over all resumed runs; None: not known."""
    runtimes: Aborting | None = None
    """What the runtime keeps; None before its first step (`runtime.in_force`)."""
    roles: Closing | None = None
    """What a process of a disaggregated job keeps, once it has joined (`worlds.roles_in_force`)."""
    host: Closing | None = None
    """What a training loop of others (`megatron_ext/hosts/`) keeps, once it gave its sizes."""
    steps: Closing | None = None
    """The file of `megatron-ext compare` that records each step (`tracing/step_records.py`)."""
    checked_steps: int = 0
    """Training steps whose effects were checked (`patches/effects.py`)."""
    is_evaluation_checked: bool = False
    """Whether the model of an evaluation, or of a training step, was checked there."""
    is_log_checked: bool = False
    """Whether the first line of the log was checked there."""

    def abort(self, reason: str) -> None:
        """End this process's waits for messages; called by another thread than the training's."""
        if self.runtimes is not None:
            self.runtimes.abort(reason)

    def close(self) -> None:
        """Close the observers, and what the runtime, the roles and a host keep."""
        for observer in self.observers:
            observer.close()
        self.observers.clear()
        # In this order: each may use what comes after it.
        for state in (self.runtimes, self.roles, self.host, self.steps):
            if state is not None:
                state.close()
        self.runtimes = self.roles = self.host = self.steps = None


@dataclass
class _InForce:
    """The state of this process."""

    configuration: Active | None = None
    num_transports: Counter[str] = field(default_factory=Counter)
    """Transports opened so far in this attempt, by label, under any configuration."""
    attempt: int = 0
    """How often the job has started again in the same processes."""


# The one active configuration.
_PROCESS = _InForce()


def activate_configuration(configuration: Active | None) -> None:
    """Activate a configuration; None: training runs as without this package."""
    _PROCESS.configuration = configuration


def active() -> Active | None:
    """Return the active configuration, or None."""
    return _PROCESS.configuration


def required() -> Active:
    """Return the active configuration; there must be one."""
    in_force = _PROCESS.configuration
    assert in_force is not None, "no active configuration; call prepare or megatron_ext.configure"
    return in_force


def name_transport(purpose: str) -> str:
    """Return the name by which the peers of a new transport find each other in the job's store.

    All ranks that open transports of this purpose call it, for they are numbered: counting
    continues from one configuration to the next, and begins anew with each attempt.
    """
    _PROCESS.num_transports[purpose] += 1
    name = f"{purpose}/{_PROCESS.num_transports[purpose]}"
    return f"attempt {_PROCESS.attempt}/{name}" if _PROCESS.attempt else name


def begin_attempt(number: int) -> None:
    """Set the number of the attempt, where a job starts again in the same processes.

    A rank that was in reserve has opened no transports, so no rank counts those of earlier ones.
    """
    _PROCESS.attempt = number
    _PROCESS.num_transports.clear()


def attempt() -> int:
    """Return how often the job has started again in the same processes."""
    return _PROCESS.attempt


def clear_configuration() -> None:
    """Deactivate the configuration and close the state that features keep under it."""
    # Not in force while it closes: a state may look for the active configuration then.
    in_force = _PROCESS.configuration
    _PROCESS.configuration = None
    if in_force is not None:
        in_force.close()


def pipeline() -> Pipeline | None:
    """Return the pipeline that our runtime executes; None: Megatron's own schedules run."""
    in_force = active()
    return None if in_force is None else in_force.pipeline


def transport_only() -> Pipeline | None:
    """Return Megatron's own schedule if it runs over our transport, else None."""
    in_force = active()
    return None if in_force is None else in_force.transport_only


def job() -> Job | None:
    """Return the disaggregated job of this process; None: forwards and backwards share ranks."""
    in_force = active()
    return None if in_force is None else in_force.job


def has_role(role: Role) -> bool:
    """Return whether this process has a given role in a disaggregated job."""
    disaggregated_job = job()
    return disaggregated_job is not None and disaggregated_job.role == role


def is_folded() -> bool:
    """Return whether the active pipeline ends on the rank where it begins (V and W)."""
    running = pipeline()
    return running is not None and running.is_folded


# Megatron's generators run on from one forward to the next, so another order draws other dropout
# masks. With `--microbatch-rng` each forward reseeds every generator from the run's seed, the
# iteration, the stage and the micro-batch: all schedules with the same stages draw the same masks,
# and so does a resumed run. `runtime/compute.py` sets the generators.


def draws_by_microbatch() -> bool:
    """Return whether random numbers are drawn by micro-batch."""
    in_force = active()
    return in_force is not None and in_force.seed is not None


def begin_iteration(number: int) -> None:
    """Set the number of the training step that begins, counted over all resumed runs.

    Random numbers by micro-batch depend on it.
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
    """Return a 63-bit seed derived from a key and from the run's seed, which must be there."""
    in_force = active()
    if in_force is None or in_force.seed is None:
        raise ScheduleError("random numbers by micro-batch need a seed; give --microbatch-rng")
    # Not `hash`: Python salts that of strings, so ranks would differ.
    digest = hashlib.blake2b(repr((in_force.seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
