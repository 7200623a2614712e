"""Forward and backward roles: the role of this process, and the arguments of its job.

Megatron gets the arguments of an ordinary job that consists of the processes of one role. From them
it derives data-parallel size, micro-batches, sampler and groups as usual.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext.disaggregation.job import Job
from megatron_ext.schedules import commands
from megatron_ext.schedules.table.costs import UNIT

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.disaggregation.ranks import RankMap


_ENDS = ("exit_duration_in_mins", "exit_signal_handler")


def job_of(args: Namespace, config: PipelineConfig, ranks: RankMap) -> Job:
    """Return the disaggregated job of some ranks, including the role of this process."""
    wanted = config.disaggregation
    assert wanted is not None
    # Of one activation `[s, b, h]` in fp32, or of a stage's shipped ones; a stage with more layers
    # than the others sends longer messages, in pieces.
    message_bytes = 4 * args.seq_length * args.micro_batch_size * args.hidden_size
    if wanted.activations == "ship":
        message_bytes *= args.num_layers // args.pipeline_model_parallel_size + 1
    return Job(
        ranks,
        args.rank,
        activations=wanted.activations,
        timeout_s=config.message_timeout_s,
        sequence_parallel=bool(args.sequence_parallel and args.tensor_model_parallel_size > 1),
        message_bytes=message_bytes,
        gathers_late=_gathers_late(args),
        ends_by_itself=any(getattr(args, dest, None) for dest in _ENDS),
    )


def role_arguments(args: Namespace, job: Job) -> dict[str, Any]:
    """Return the arguments, by name, that make Megatron treat one role's processes as a job."""
    wanted: dict[str, Any] = {"rank": job.role_rank, "world_size": job.ranks.role_size(job.role)}
    if getattr(args, "rerun_mode", None) == "validate_results":
        # Backward ranks would rerun a step with an unexpected loss and wait for forwards that
        # never come. Disabled, such a loss ends the job at once.
        wanted["rerun_mode"] = "disabled"
    if job.role == "backward":
        return wanted
    # A forward rank has no gradients and writes no files.
    settings: dict[str, Any] = {
        "exit_duration_in_mins": None,  # see `Job.ends_by_itself`
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "distribute_saved_activations": False,  # Megatron requires full recomputation with it
        "save": None,
        "load": None,
        "pretrained_checkpoint": None,
        "tensorboard_dir": None,
        # torch's profiler writes beside the files of TensorBoard, which backward ranks write.
        "profile": getattr(args, "profile", False) and not profiles_with_torch(args),
        "wandb_project": "",
    }
    if job.ranks.merged:
        settings |= {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            "tp_comm_overlap": False,  # Megatron requires sequence parallelism with it
            # Pads the vocabulary to the same size as the shards do.
            "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by * job.ranks.tp,
        }
    return wanted | {dest: value for dest, value in settings.items() if hasattr(args, dest)}


def roles_in_words(args: Namespace, job: Job, count: int) -> str:
    """Return a log line about the disaggregated schedule of some micro-batches, with its bubble."""
    replicas = job.ranks.dp // getattr(args, "context_parallel_size", 1)
    timeline = commands.evaluate(job.schedule(count), UNIT)
    forwards, backwards = (job.ranks.role_size(role) for role in ("forward", "backward"))
    return (
        f"pipeline schedule: {timeline.schedule.label} on {job.ranks.num_ranks} processes: "
        f"{forwards} forward and {backwards} backward ranks, {replicas} replica(s), {count} "
        f"micro-batches: makespan {timeline.makespan / 2:g} forwards of a stage, bubble "
        f"{100 * timeline.bubble_ratio:.1f} %"
    )


def profiles_with_torch(args: Namespace) -> bool:
    """Return whether torch's profiler is on, which writes beside the files of TensorBoard."""
    return all(getattr(args, dest, False) for dest in ("profile", "use_pytorch_profiler"))


def _gathers_late(args: Namespace) -> bool:
    """Return whether replicas still hold only their own updated shard when a step ends."""
    if (getattr(args, "num_distributed_optimizer_instances", None) or 1) > 1:
        return False  # replicas form groups, and each group has gathered by then
    if getattr(args, "fp4_param_gather", False):
        return False  # the gather moves quantised bytes
    if getattr(args, "num_experts", None):
        tensor_parallel = getattr(args, "expert_tensor_parallel_size", None)
        spread = (getattr(args, "expert_model_parallel_size", None) or 1) > 1
        if spread or tensor_parallel not in (None, args.tensor_model_parallel_size):
            return False  # experts have fewer, or other, replicas than the rest
    return bool(args.use_distributed_optimizer and getattr(args, "overlap_param_gather", False))
