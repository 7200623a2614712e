"""Forward and backward roles: the role of this process, and the arguments of its job.

Megatron gets the arguments of an ordinary job that consists of the processes of one role. From them
it derives data-parallel size, micro-batches, sampler and groups as usual.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.config.environment import FORWARD_FLAG
from megatron_ext.config.flags import FLAG
from megatron_ext.config.incompatible import Rule
from megatron_ext.disaggregation.job import Job
from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules import commands
from megatron_ext.schedules.table.costs import UNIT

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import Disaggregation, PipelineConfig

__all__ = [
    "FLAG",
    "ROLE_RULES",
    "has_dropout",
    "job_of",
    "profiles_with_torch",
    "role_arguments",
    "roles_in_words",
]


def job_of(args: Namespace, config: PipelineConfig) -> Job:
    """Return the disaggregated job, including the role of this process.

    Raises:
        ArgumentsError: The number of processes is wrong.
    """
    wanted, wire = config.disaggregation, config.wire
    assert wanted is not None
    assert wire != "torch", "the configuration refuses it"
    job = Job(
        rank_map(
            args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            merged=wanted.merged,
            cp=getattr(args, "context_parallel_size", 1),
        ),
        args.rank,
        activations=wanted.activations,
        timeout_s=config.message_timeout_s,
        sequence_parallel=bool(args.sequence_parallel and args.tensor_model_parallel_size > 1),
        message_bytes=_message_bytes(args),
        wire=wire,
        node_ips=config.node_ips,
        checksums=config.checksums,
        gathers_late=_gathers_late(args),
    )
    if job.role == "forward":
        _check_device(wanted)
    return job


def role_arguments(args: Namespace, job: Job) -> dict[str, Any]:
    """Return the arguments, by name, that make Megatron treat one role's processes as a job."""
    wanted: dict[str, Any] = {"rank": job.role_rank, "world_size": job.ranks.role_size(job.role)}
    if getattr(args, "rerun_mode", None) == "validate_results":
        # Backward ranks would rerun a step with an unexpected loss and wait for forwards that
        # never come. Disabled, such a loss ends the job at once.
        wanted["rerun_mode"] = "disabled"
    if job.role == "forward":
        wanted |= _forward_settings(args, job)
    return wanted


def roles_in_words(args: Namespace, job: Job) -> str:
    """Return a log line about the disaggregated schedule and its simulated bubble."""
    replicas = job.ranks.dp // getattr(args, "context_parallel_size", 1)
    count = args.global_batch_size // (args.micro_batch_size * replicas)
    timeline = commands.evaluate(job.schedule(count), UNIT)
    forwards, backwards = (job.ranks.role_size(role) for role in ("forward", "backward"))
    return (
        f"pipeline schedule: {timeline.schedule.label} on {job.ranks.num_ranks} processes: "
        f"{forwards} forward and {backwards} backward ranks, {replicas} replica(s), {count} "
        f"micro-batches: makespan {timeline.makespan / 2:g} forwards of a stage, bubble "
        f"{100 * timeline.bubble_ratio:.1f} %"
    )


def _check_device(wanted: Disaggregation) -> None:
    asked, name = wanted.forward_device, devices.current().name
    if asked not in (None, name):
        raise ArgumentsError(
            f"{FORWARD_FLAG} {asked} came after the {name} backend was armed (Megatron was "
            "imported before the command line was known); start the script with "
            "`python -m megatron_ext`"
        )


def _forward_settings(args: Namespace, job: Job) -> dict[str, Any]:
    """Return the settings of a process that has no gradients and writes no files."""
    settings: dict[str, Any] = {
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
    return {dest: value for dest, value in settings.items() if hasattr(args, dest)}


def profiles_with_torch(args: Namespace) -> bool:
    """Return whether torch's profiler is on, which writes beside the files of TensorBoard."""
    return all(getattr(args, dest, False) for dest in ("profile", "use_pytorch_profiler"))


def _message_bytes(args: Namespace) -> int:
    """Return the bytes of one activation `[s, b, h]` in fp32, or of a stage's shipped ones."""
    one: int = 4 * args.seq_length * args.micro_batch_size * args.hidden_size
    if args.fbd_activations != "ship":
        return one
    layers: int = args.num_layers // args.pipeline_model_parallel_size
    return one * (layers + 1)


def _gathers_late(args: Namespace) -> bool:
    """Return whether replicas still hold only their own updated shard when a step ends."""
    if (getattr(args, "num_distributed_optimizer_instances", None) or 1) > 1:
        return False  # replicas form groups, and each group has gathered by then
    if getattr(args, "fp4_param_gather", False):
        return False  # the gather moves quantised bytes
    if _experts_are_apart(args):
        return False  # experts have fewer, or other, replicas than the rest
    return bool(args.use_distributed_optimizer and getattr(args, "overlap_param_gather", False))


def _experts_are_apart(args: Namespace) -> bool:
    """Return whether experts are placed or split differently from the other layers."""
    if not getattr(args, "num_experts", None):
        return False
    size = getattr(args, "expert_tensor_parallel_size", None)
    cut_otherwise = size not in (None, args.tensor_model_parallel_size)
    return cut_otherwise or _above_one(getattr(args, "expert_model_parallel_size", None))


def has_dropout(args: Namespace) -> bool:
    """Return whether the model uses dropout."""
    return bool(args.hidden_dropout or args.attention_dropout)


def _above_one(size: int | None) -> bool:
    return (size or 1) > 1


_SHIPS = "fbd_activations"
_MERGES = "ignore_forward_tensor_parallel"
_DROPOUT = ("hidden_dropout", "attention_dropout")

ROLE_RULES = (
    Rule(
        ("moe_input_jitter_eps",),
        "--moe-input-jitter-eps",
        "both roles would draw their own noise",
        "leave it out",
    ),
    Rule(
        ("fp8_param_gather",),
        "--fp8-param-gather",
        "Megatron has it with the distributed optimizer only, and forward ranks have no optimizer",
        "leave it out",
    ),
    Rule(
        # Its steps are forward only from 0.20 on, which both roles take for an evaluation.
        ("freeze_all_layers",),
        "--freeze-all-layers",
        "backward ranks have nothing to do",
        "leave one of them out",
    ),
    Rule(
        ("moe_use_upcycling", "ckpt_convert_format"),
        "--moe-use-upcycling or --ckpt-convert-format",
        "forward ranks neither load nor save checkpoints",
        "convert the checkpoint in a run without disaggregation",
    ),
    Rule(
        (_MERGES, "num_experts"),
        "--ignore-forward-tensor-parallel and --num-experts",
        "shards of experts are not merged",
        "leave one of them out",
        lambda merges, experts: merges and experts,
    ),
    Rule(
        (_SHIPS, "mtp_num_layers"),
        "--fbd-activations ship and --mtp-num-layers",
        "forward ranks ship the inputs of a stage's layers, not those of multi-token prediction",
        "use --fbd-activations recompute",
        lambda kind, layers: kind == "ship" and layers,
    ),
    Rule(
        ("use_tp_pp_dp_mapping",),
        "--use-tp-pp-dp-mapping",
        "the two roles of a stage are neighbours in the default order of ranks",
        "leave it out",
    ),
    Rule(
        ("use_mp_args_from_checkpoint_args",),
        "--use-mp-args-from-checkpoint-args",
        "the parallel sizes on the command line determine the roles",
        "give them as flags",
    ),
    Rule(
        ("exit_duration_in_mins", "exit_signal_handler"),
        "--exit-duration-in-mins or --exit-signal-handler",
        "forward and backward ranks would decide to exit at different steps",
        "use --exit-interval or --train-iters",
    ),
    Rule(
        ("rerun_mode",),
        "--rerun-mode report_stats",
        "it reruns each step, and forward ranks do not",
        "leave it out",
        lambda mode: mode == "report_stats",
    ),
    Rule(
        ("error_injection_rate",),
        "--error-injection-rate",
        "injected errors are found by rerunning steps, and forward ranks do not rerun them",
        "leave it out",
    ),
    Rule(
        ("full_validation", "multiple_validation_sets"),
        "--full-validation or --multiple-validation-sets",
        "backward ranks do not read that data",
        "use --eval-iters",
    ),
    Rule(
        (_SHIPS, "recompute_granularity", "recompute_method", "recompute_num_layers"),
        "--fbd-activations ship alone",
        "backward ranks recompute each layer from its shipped input",
        "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or "
        "use --fbd-activations recompute",
        lambda kind, *recomputed: kind == "ship" and recomputed != ("full", "uniform", 1),
    ),
    Rule(
        ("fbd_forward_device", *_DROPOUT),
        "--fbd-forward-device and dropout",
        "another device draws other masks",
        "add --hidden-dropout 0 --attention-dropout 0, or leave it out",
        lambda device, *dropout: device and any(dropout),
    ),
    Rule(
        (_SHIPS, "fp8", "fp4", "distribute_saved_activations"),
        "--fbd-activations ship and --fp8-format, --fp4-format or --distribute-saved-activations",
        "those recompute layers in another way",
        "use --fbd-activations recompute",
        lambda kind, *ways: kind == "ship" and any(ways),
    ),
    Rule(
        (_MERGES, *_DROPOUT),
        "--ignore-forward-tensor-parallel and dropout",
        "one process draws other masks than the shards of a stage",
        "add --hidden-dropout 0 --attention-dropout 0, or leave it out",
        lambda merges, *dropout: merges and any(dropout),
    ),
)
