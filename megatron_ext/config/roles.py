"""Forward and backward roles in a disaggregated job: each role's ranks and arguments.

In rank order, tensor-parallel ranks are innermost, followed by the two roles, context-parallel
ranks, data-parallel replicas, and pipeline stages. For TP 2, PP 2 and one replica:

    plain   0 1 forward, 2 3 backward of stage 0; 4 5 forward, 6 7 backward of stage 1
    merged  0 forward, 1 2 backward of stage 0; 3 forward, 4 5 backward of stage 1

Megatron gets the arguments for an ordinary job that consists of one role's processes. From these
arguments, it derives the data-parallel size, micro-batches, sampler and groups as usual.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules.comparison import evaluate
from megatron_ext.schedules.generators.catalog import generate
from megatron_ext.schedules.table.costs import UNIT

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import Activations, PipelineConfig
    from megatron_ext.schedules.table.actions import Schedule

Role = Literal["forward", "backward"]


class Place(NamedTuple):
    """Role and position of one process."""

    role: Role
    dp: int
    """Index of the data-parallel replica, combined with the context-parallel rank if there is one.
    """
    pp: int
    """Pipeline stage."""
    tp: int
    """Tensor-parallel rank; always 0 on merged forward ranks."""


@dataclass(frozen=True)
class RankMap:
    """Maps global ranks to roles and positions, and numbers the processes within each role."""

    tp: int
    """Tensor-parallel size on the backward ranks."""
    pp: int
    """Number of pipeline stages."""
    dp: int
    """Number of copies of the model in each role: data-parallel replicas times context-parallel
    ranks, which hold the same weights."""
    merged: bool = False
    """Whether one forward rank replaces all tensor-parallel ranks of its stage."""

    @property
    def num_ranks(self) -> int:
        """Number of processes in the whole job."""
        return self.role_size("forward") + self.role_size("backward")

    def role_tp(self, role: Role) -> int:
        """Return the tensor-parallel size of a role."""
        if self.merged and role == "forward":
            return 1
        return self.tp

    def role_size(self, role: Role) -> int:
        """Return the number of processes with a role."""
        return self.role_tp(role) * self.pp * self.dp

    def place(self, rank: int) -> Place:
        """Return the role and position of a global rank."""
        # The two roles for one part of the model are neighbours, because they exchange the most
        # data. The last process is a backward rank in the last stage, because Megatron logs there.
        # Within each role, ranks are in Megatron's order.
        num_forward = self.role_tp("forward")
        block, offset = divmod(rank, num_forward + self.tp)
        pp, dp = divmod(block, self.dp)
        if offset < num_forward:
            return Place("forward", dp, pp, offset)
        return Place("backward", dp, pp, offset - num_forward)

    def rank(self, place: Place) -> int:
        """Return the global rank with a role and position."""
        num_forward = self.role_tp("forward")
        block = place.pp * self.dp + place.dp
        rank = block * (num_forward + self.tp) + place.tp
        if place.role == "backward":
            rank += num_forward
        return rank

    def role_rank(self, place: Place) -> int:
        """Return the rank of a process within its role, in Megatron's order."""
        block = place.pp * self.dp + place.dp
        return block * self.role_tp(place.role) + place.tp

    def twins(self, place: Place) -> list[Place]:
        """Return the processes in the other role that hold the same weights, or shards of them."""
        if self.merged and place.role == "backward":
            return [Place("forward", place.dp, place.pp, 0)]
        if self.merged:
            return [Place("backward", place.dp, place.pp, tp) for tp in range(self.tp)]
        role: Role = "forward" if place.role == "backward" else "backward"
        return [place._replace(role=role)]


def rank_map(
    world_size: int,
    *,
    tp: int,
    pp: int,
    merged: bool,
    cp: int = 1,
) -> RankMap:
    """Return the rank map of a job with `world_size` processes and these parallel sizes.

    Raises:
        ArgumentsError: The processes do not divide evenly into replicas. The message suggests
            numbers of processes that do.
    """
    ranks_of_stage = 2 * tp
    if merged:
        ranks_of_stage = tp + 1
    ranks_of_replica = ranks_of_stage * pp * cp
    replicas, num_left_over = divmod(world_size, ranks_of_replica)
    if replicas and not num_left_over:
        return RankMap(tp, pp, replicas * cp, merged)
    # Show the rule with this job's sizes, and suggest the nearest numbers of processes.
    rule = f"2 x TP x PP = 2 x {tp} x {pp}"
    note = " (an even data-parallel size, which it halves)"
    if merged:
        rule = f"(TP + 1) x PP = ({tp} + 1) x {pp}"
        note = ""
    if cp > 1:
        rule = rule.replace(" = ", " x CP = ") + f" x {cp}"
    fitting = [str((replicas + 1) * ranks_of_replica)]
    if replicas:
        fitting.insert(0, str(replicas * ranks_of_replica))
    raise ArgumentsError(
        f"the job has {world_size} processes, but --forward-backward-disaggregating needs "
        f"{rule} = {ranks_of_replica} for each replica of the model{note}; start "
        f"{' or '.join(fitting)} processes, or change a parallel size"
    )


@dataclass(frozen=True)
class Job:
    """A disaggregated job, and this process's place in it."""

    ranks: RankMap
    rank: int
    """Global rank of this process."""
    activations: Activations
    timeout_s: float
    """The longest time that one process waits for another."""
    sequence_parallel: bool = False
    """Whether activations are split along the sequence across tensor-parallel ranks."""
    message_bytes: int = 1 << 20
    """Size of the largest message between stages."""
    gathers_late: bool = False
    """Whether each replica updates a shard of the weights and gathers the rest in the next forward
    pass."""
    ends_by_itself: bool = False
    """Whether backward ranks may decide after any step to stop training."""
    recomputes_routers: bool = False
    """Whether the expert routers run twice: first without and then with gradients."""

    @property
    def place(self) -> Place:
        """This process's role and position."""
        return self.ranks.place(self.rank)

    @property
    def role(self) -> Role:
        """Whether this process runs forward or backward passes."""
        return self.place.role

    @property
    def role_rank(self) -> int:
        """This process's rank within its role."""
        return self.ranks.role_rank(self.place)

    def name_of(self, rank: int | None) -> str:
        """Return a global rank's name for error messages; the default is this process's rank."""
        if rank is None:
            rank = self.rank
        role, dp, pp, tp = self.ranks.place(rank)
        return f"{role} rank {rank} (stage {pp}, replica {dp}, shard {tp})"

    @property
    def shares_weights(self) -> bool:
        """Whether each replica sends its shard of weights to the forward ranks in all replicas."""
        return self.gathers_late and self.ranks.dp > 1

    @property
    def weight_partners(self) -> list[Place]:
        """Processes in the other role that exchange weights with this process, in replica order."""
        if not self.shares_weights:
            return self.ranks.twins(self.place)
        partners = []
        for replica in range(self.ranks.dp):
            same_place = self.place._replace(dp=replica)
            partners += self.ranks.twins(same_place)
        return partners

    @property
    def window(self) -> int:
        """Number of micro-batches that a forward rank may be ahead of its stage's backward rank."""
        # A backward rank grants one more credit with each micro-batch that it starts.
        # - This limits the messages that wait on any process, because backward passes
        #   of neighbouring stages are one micro-batch apart and cannot overtake the
        #   forward passes.
        # - It cannot deadlock, because the credit for a micro-batch depends only on earlier
        #   micro-batches, whose messages wait in memory.
        # - It costs no time: with equal stages, fewer than two credits per stage are
        #   enough, in either mode and for any number of tensor-parallel ranks that one
        #   forward rank replaces.
        return 2 * self.ranks.pp

    @property
    def position(self) -> int:
        """The table row that this process runs."""
        # Rows follow the data: forward stages in ascending order, then backward stages in
        # descending order.
        stage = self.place.pp
        pp = self.ranks.pp
        if self.role == "forward":
            return stage
        return 2 * pp - 1 - stage

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the table for one replica, with both roles, for this many micro-batches."""
        num_rows = 2 * self.ranks.pp
        return generate("fbd", num_rows, num_microbatches, activations=self.activations)

    def peers(self, position: int) -> list[int]:
        """Return the global ranks in a table row that this process exchanges tensors with.

        This is one rank of this replica. A merged forward rank exchanges tensors with all
        tensor-parallel ranks that it replaces.
        """
        pp = self.ranks.pp
        merged = self.ranks.merged
        role: Role = "forward"
        stage = position
        if position >= pp:
            role = "backward"
            stage = 2 * pp - 1 - position
        shards = [self.place.tp]
        if merged and role == "forward":
            shards = [0]
        elif merged and self.role == "forward":
            shards = list(range(self.ranks.tp))
        replica = self.place.dp
        places = [Place(role, replica, stage, tp) for tp in shards]
        return [self.ranks.rank(place) for place in places]


def job_of(args: Namespace, config: PipelineConfig, ranks: RankMap) -> Job:
    """Return the disaggregated job on these ranks, including this process's role."""
    disaggregation = config.disaggregation
    assert disaggregation is not None
    # One activation `[s, b, h]` in fp32, or all activations that a stage ships. A stage with more
    # layers than this average sends its messages in pieces.
    message_bytes = 4 * args.seq_length * args.micro_batch_size * args.hidden_size
    if disaggregation.activations == "ship":
        message_bytes *= args.num_layers // args.pipeline_model_parallel_size + 1
    # With one of these settings, Megatron checks the time or signals after each step
    # and may stop training.
    exit_settings = []
    for dest in ("exit_duration_in_mins", "exit_signal_handler"):
        if getattr(args, dest, None):
            exit_settings.append(dest)
    # Without tensor parallelism, Megatron turns this off, but only after this check.
    sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    return Job(
        ranks,
        args.rank,
        activations=disaggregation.activations,
        timeout_s=config.message_timeout_s,
        sequence_parallel=bool(sequence_parallel),
        message_bytes=message_bytes,
        gathers_late=_gathers_late(args),
        ends_by_itself=bool(exit_settings),
        recomputes_routers=_recomputes_routers(args),
    )


def _recomputes_routers(args: Namespace) -> bool:
    granularity = getattr(args, "recompute_granularity", None)
    # These two flags are deprecated. Megatron translates them into recomputation
    # settings, but only after this check.
    if getattr(args, "moe_layer_recompute", False):
        return True
    if getattr(args, "recompute_activations", False):
        granularity = "selective"
    if granularity == "selective":
        return "moe" in (args.recompute_modules or ())
    return granularity == "full"


def role_arguments(args: Namespace, job: Job) -> dict[str, Any]:
    """Return the arguments, by name, that make Megatron treat one role's processes as a job."""
    arguments: dict[str, Any] = {
        "rank": job.role_rank,
        "world_size": job.ranks.role_size(job.role),
    }
    if getattr(args, "rerun_mode", None) == "validate_results":
        # Backward ranks would rerun a step with an unexpected loss and wait for forward
        # passes that never run. With reruns disabled, such a loss stops the job
        # immediately.
        arguments["rerun_mode"] = "disabled"
    if job.role == "backward":
        return arguments
    # A forward rank computes no gradients and writes no files, and it gains nothing from
    # recomputation.
    settings: dict[str, Any] = {
        # Backward ranks decide when to stop; see `Job.ends_by_itself`.
        "exit_duration_in_mins": None,
        "use_distributed_optimizer": False,
        # Megatron accepts these only with the distributed optimizer.
        "num_distributed_optimizer_instances": 1,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "main_grads_dtype": "fp32",
        "main_params_dtype": "fp32",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        # Megatron accepts this only with full recomputation.
        "distribute_saved_activations": False,
        "save": None,
        "load": None,
        "pretrained_checkpoint": None,
        "tensorboard_dir": None,
        # Logits are kept in memory until a checkpoint is saved, which forward ranks never do.
        "logits_save_dir": None,
        # The files are named by rank, and backward ranks write them.
        "moe_routing_trace_path": None,
        # torch's profiler writes next to TensorBoard's files, which only backward ranks write.
        "profile": getattr(args, "profile", False) and not profiles_with_torch(args),
        "wandb_project": "",
    }
    if job.ranks.merged:
        divisor = args.make_vocab_size_divisible_by * job.ranks.tp
        settings |= {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            # Megatron accepts this only with sequence parallelism.
            "tp_comm_overlap": False,
            # Pad the vocabulary to the same size as on the backward ranks, which hold shards of it.
            "make_vocab_size_divisible_by": divisor,
        }
    for dest, value in settings.items():
        # Not every release has all of these arguments.
        if hasattr(args, dest):
            arguments[dest] = value
    return arguments


def roles_in_words(args: Namespace, job: Job, count: int) -> str:
    """Return a log line about the disaggregated schedule for `count` micro-batches."""
    replicas = job.ranks.dp // getattr(args, "context_parallel_size", 1)
    # The table has two rows per stage, so a stage's forward pass takes two units of time.
    timeline = evaluate(job.schedule(count), UNIT)
    num_forward = job.ranks.role_size("forward")
    num_backward = job.ranks.role_size("backward")
    return (
        f"pipeline schedule: {timeline.schedule.label} on {job.ranks.num_ranks} processes: "
        f"{num_forward} forward and {num_backward} backward ranks, {replicas} replica(s), {count} "
        f"micro-batches: makespan {timeline.makespan / 2:g} forward passes of one stage, bubble "
        f"{100 * timeline.bubble_ratio:.1f} %"
    )


def profiles_with_torch(args: Namespace) -> bool:
    """Return whether torch's profiler is enabled, which writes next to TensorBoard's files."""
    settings = ("profile", "use_pytorch_profiler")
    return all(getattr(args, dest, False) for dest in settings)


def _gathers_late(args: Namespace) -> bool:
    """Return whether a replica still holds only its updated shard of the weights after a step."""
    # Replicas form groups, and each group has gathered its weights by the time the step
    # ends.
    num_groups = getattr(args, "num_distributed_optimizer_instances", None) or 1
    if num_groups > 1:
        return False
    # The gather moves quantised bytes.
    if getattr(args, "fp4_param_gather", False):
        return False
    # With other optimizers, replicas own whole weights, and their shards differ in
    # size.
    if getattr(args, "optimizer", "adam") not in ("adam", "sgd"):
        return False
    if getattr(args, "num_experts", None):
        # With either of these sizes, experts have different replicas than the rest of the model.
        expert_ranks = getattr(args, "expert_model_parallel_size", None) or 1
        if expert_ranks > 1:
            return False
        expert_tp = getattr(args, "expert_tensor_parallel_size", None)
        if expert_tp not in (None, args.tensor_model_parallel_size):
            return False
    overlaps_gather = getattr(args, "overlap_param_gather", False)
    return bool(args.use_distributed_optimizer and overlaps_gather)
