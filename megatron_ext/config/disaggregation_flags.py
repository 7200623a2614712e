"""The flags of forward/backward disaggregation, for both ways of starting.

`prepare` runs between parsing and Megatron's own validation. It finds out what this process does
and rewrites the parsed arguments to those of an ordinary job that consists of the processes of one
role: Megatron then derives data-parallel size, micro-batches, sampler and groups as it always does.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from typing import Any

from megatron_ext import devices
from megatron_ext.config.incompatible import ALWAYS, Rule
from megatron_ext.disaggregation.devices import FLAG as FORWARD_FLAG
from megatron_ext.disaggregation.job import Job, current, use
from megatron_ext.disaggregation.ranks import rank_map
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules import comparison
from megatron_ext.schedules.generators.catalog import get
from megatron_ext.schedules.representation.costs import UNIT

__all__ = ["add_flags", "check", "prepare"]

_LOG = logging.getLogger(__name__)
_FLAG = "--forward-backward-disaggregating"
_MERGE = "--ignore-forward-tensor-parallel"
_WORLD = "fbd_world_size"
"""Where `prepare` keeps the number of processes of the job, for the next time."""


def add_flags(group: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags of disaggregation."""
    group.add_argument(
        _FLAG,
        action="store_true",
        help="Run forward passes and backward passes in different processes: 2 x TP x PP processes "
        "for each replica, so the data-parallel size is halved and has to be even.",
    )
    group.add_argument(
        _MERGE,
        action="store_true",
        help=f"With {_FLAG}: one forward process stands in for all tensor-parallel ranks of its "
        "stage, so a replica has (TP + 1) x PP processes.",
    )
    modes = get("fbd").options["activations"]
    group.add_argument(
        "--fbd-activations",
        choices=modes,
        help=f"With {_FLAG}: backward ranks run the forward again, or forward ranks send them the "
        f"input of each layer, which needs full uniform recomputation (default: {modes[0]}).",
    )
    group.add_argument(
        FORWARD_FLAG,
        choices=devices.CHOICES[1:],
        help=f"With {_FLAG}: what forward ranks compute on, if not on the device of the others.",
    )


def prepare(args: Namespace) -> bool:
    """Make the `Job` of this process and turn the arguments into those of its role.

    Calling it again with the same arguments changes nothing.

    Args:
        args: Parsed arguments with upstream's names; changed in place.

    Returns:
        Whether the job is disaggregated.

    Raises:
        ArgumentsError: The number of processes is wrong, or flags exclude each other.
    """
    _restore(args)
    use(None)
    if not getattr(args, "forward_backward_disaggregating", False):
        _refuse_lonely(args)
        return False
    wrong = [rule.message for rule in (*_RULES, *ALWAYS) if rule.refuses(args)]
    if wrong:
        raise ArgumentsError("\n".join(f"{_FLAG} cannot run with {message}" for message in wrong))
    job = Job(
        rank_map(
            args.world_size,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            merged=args.ignore_forward_tensor_parallel,
        ),
        args.rank,
        activations=args.fbd_activations or "recompute",
        timeout_s=60.0 * (getattr(args, "distributed_timeout_minutes", None) or 10),
        sequence_parallel=bool(args.sequence_parallel and args.tensor_model_parallel_size > 1),
        message_bytes=_message_bytes(args),
        wire=getattr(args, "pipeline_transport", None) or "auto",
        node_ips=tuple(getattr(args, "node_ips", None) or ()),
        checksums=bool(getattr(args, "pipeline_checksum", False)),
        gathers_late=_gathers_late(args),
    )
    setattr(args, _WORLD, args.world_size)
    args.rank, args.world_size = job.role_rank, job.ranks.role_size(job.role)
    if getattr(args, "rerun_mode", None) == "validate_results":
        # Backward ranks would run a step with an unexpected loss again, and wait for forwards that
        # never come. Without, such a loss ends the job at once.
        args.rerun_mode = "disabled"
    if _has_dropout(args):
        args.microbatch_rng = True  # both roles have to draw the same masks
    if job.role == "forward":
        _check_device(args)
        vars(args).update(_forward_settings(args, job))
    use(job)
    return True


def check(args: Namespace) -> None:
    """Compare what Megatron made of the arguments with the job; tell what runs.

    Raises:
        ArgumentsError: The flags ask for several chunks on each rank.
    """
    job = current()
    if job is None:
        return
    if getattr(args, "virtual_pipeline_model_parallel_size", None):
        use(None)
        raise ArgumentsError(
            f"{_FLAG} has one stage on each rank, but the flags make "
            f"{args.virtual_pipeline_model_parallel_size}; leave the flags of virtual pipeline "
            "stages out, or give --pipeline-model-parallel-layout one stage for each rank"
        )
    if job.rank == 0:
        _LOG.warning("%s", _running(args, job))


def _running(args: Namespace, job: Job) -> str:
    count = args.global_batch_size // (args.micro_batch_size * job.ranks.dp)
    timeline = comparison.evaluate(job.schedule(count), UNIT)
    forwards, backwards = (job.ranks.role_size(role) for role in ("forward", "backward"))
    return (
        f"pipeline schedule: {timeline.schedule.label} on {job.ranks.num_ranks} processes: "
        f"{forwards} forward and {backwards} backward ranks, {job.ranks.dp} replica(s), {count} "
        f"micro-batches: makespan {timeline.makespan / 2:g} forwards of a stage, bubble "
        f"{100 * timeline.bubble_ratio:.1f} %"
    )


def _restore(args: Namespace) -> None:
    """Undo what an earlier call made of rank and world size."""
    job, world_size = current(), getattr(args, _WORLD, None)
    if job is not None and world_size is not None and args.world_size != world_size:
        args.rank, args.world_size = job.rank, world_size
        args.tensor_model_parallel_size = job.ranks.tp


def _check_device(args: Namespace) -> None:
    asked, name = args.fbd_forward_device, devices.current().name
    if asked not in (None, name):
        raise ArgumentsError(
            f"{FORWARD_FLAG} {asked} came after the {name} backend was armed (Megatron was "
            "imported before the command line was known); start the script with "
            "`python -m megatron_ext`"
        )


def _forward_settings(args: Namespace, job: Job) -> dict[str, Any]:
    """Return what differs for a process that has no gradients and writes nothing."""
    settings: dict[str, Any] = {
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "save": None,
        "load": None,
        "pretrained_checkpoint": None,
        "tensorboard_dir": None,
        "wandb_project": "",
    }
    if job.ranks.merged:
        settings |= {
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            # The vocabulary is padded to the same size as that of the shards.
            "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by * job.ranks.tp,
        }
    return {dest: value for dest, value in settings.items() if hasattr(args, dest)}


def _message_bytes(args: Namespace) -> int:
    """Return the size of what goes from stage to stage, or of a stage's shipped activations."""
    one: int = 4 * args.seq_length * args.micro_batch_size * args.hidden_size
    if args.fbd_activations != "ship":
        return one
    layers: int = args.num_layers // args.pipeline_model_parallel_size
    return one * (layers + 1)


def _gathers_late(args: Namespace) -> bool:
    """Tell whether each replica has updated a share of its weights when a step is over."""
    if (getattr(args, "num_distributed_optimizer_instances", None) or 1) > 1:
        return False  # replicas are shared out in groups; those of a group have gathered then
    if getattr(args, "fp8_param_gather", False) or getattr(args, "fp4_param_gather", False):
        return False  # what is gathered are bytes of another kind
    if _experts_are_apart(args):
        return False  # experts have fewer replicas than the rest, or others
    return bool(args.use_distributed_optimizer and getattr(args, "overlap_param_gather", False))


def _refuse_lonely(args: Namespace) -> None:
    if getattr(args, "pipeline_schedule", None) == "fbd":
        raise ArgumentsError(
            "--pipeline-schedule fbd needs processes of two roles; leave it out and take "
            f"{_FLAG}, which chooses it"
        )
    for dest in ("ignore_forward_tensor_parallel", "fbd_activations", "fbd_forward_device"):
        if getattr(args, dest, None):
            raise ArgumentsError(
                f"--{dest.replace('_', '-')} says how forward ranks work, but there are none; add "
                f"{_FLAG}, or leave it out"
            )


def _given(*dests: str) -> Callable[[Namespace], bool]:
    return lambda args: any(getattr(args, dest, None) for dest in dests)


def _above_one(dest: str) -> Callable[[Namespace], bool]:
    return lambda args: (getattr(args, dest, None) or 1) > 1


def _experts_are_apart(args: Namespace) -> bool:
    """Tell whether the ranks that share a layer have different experts, or cut them otherwise."""
    if not getattr(args, "num_experts", None):
        return False
    size = getattr(args, "expert_tensor_parallel_size", None)
    cut_otherwise = size not in (None, args.tensor_model_parallel_size)
    return cut_otherwise or _above_one("expert_model_parallel_size")(args)


def _has_dropout(args: Namespace) -> bool:
    return bool(args.hidden_dropout or args.attention_dropout)


def _ships_without_recomputation(args: Namespace) -> bool:
    wanted = ("full", "uniform", 1)
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return args.fbd_activations == "ship" and wanted != tuple(getattr(args, n) for n in names)


_RULES = (
    Rule(
        _given("pipeline_schedule", "enable_bitpipe_schedule", "use_dpp", "pipeline_costs"),
        "--pipeline-schedule, --enable-bitpipe-schedule, --use-dpp or --pipeline-costs: it brings "
        "its own schedule; leave one of them out",
    ),
    Rule(
        lambda args: getattr(args, "pipeline_transport", None) == "torch",
        "--pipeline-transport torch: to torch.distributed forward and backward ranks are two jobs; "
        "take auto, or leave it out",
    ),
    Rule(
        lambda args: getattr(args, "pipeline_device_path", None) == "ipc",
        "--pipeline-device-path ipc: what its ranks exchange goes through the host; leave it out",
    ),
    Rule(
        _above_one("context_parallel_size"),
        "--context-parallel-size above 1: tensors are handed over by tensor-parallel ranks only; "
        "take 1, and --sequence-parallel to cut activations",
    ),
    Rule(
        _given("moe_router_enable_expert_bias"),
        "--moe-router-enable-expert-bias: that bias is no weight and would stay behind on forward "
        "ranks; balance experts with --moe-aux-loss-coeff",
    ),
    Rule(
        _given("moe_input_jitter_eps"),
        "--moe-input-jitter-eps: both roles would draw their own noise; leave it out",
    ),
    Rule(
        lambda args: bool(args.ignore_forward_tensor_parallel and _given("num_experts")(args)),
        f"{_MERGE} and --num-experts: shards of experts are not put together; leave one of them "
        "out",
    ),
    Rule(
        lambda args: args.fbd_activations == "ship" and _given("mtp_num_layers")(args),
        "--fbd-activations ship and --mtp-num-layers: what is shipped are the layers of a stage, "
        "not those behind them; take --fbd-activations recompute",
    ),
    Rule(
        _given("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        "virtual pipeline stages (--num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank): each rank has one stage; leave them out",
    ),
    Rule(
        _given("use_tp_pp_dp_mapping"),
        "--use-tp-pp-dp-mapping: the two roles of a stage are neighbours in the default order of "
        "ranks; leave it out",
    ),
    Rule(
        _given("use_mp_args_from_checkpoint_args"),
        "--use-mp-args-from-checkpoint-args: roles follow from the parallel sizes on the command "
        "line; say them with flags",
    ),
    Rule(
        _given("exit_duration_in_mins", "exit_signal_handler"),
        "--exit-duration-in-mins or --exit-signal-handler: forward and backward ranks would decide "
        "to leave at different steps; take --exit-interval or --train-iters",
    ),
    Rule(
        lambda args: getattr(args, "rerun_mode", None) == "report_stats",
        "--rerun-mode report_stats: it runs each step again, and forward ranks do not; leave it "
        "out",
    ),
    Rule(
        _given("full_validation", "multiple_validation_sets"),
        "--full-validation or --multiple-validation-sets: backward ranks do not read that data; "
        "take --eval-iters",
    ),
    Rule(
        _ships_without_recomputation,
        "--fbd-activations ship alone: the inputs of layers are what is sent, so each layer is "
        "recomputed from its own; add --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1, or take --fbd-activations recompute",
    ),
    Rule(
        lambda args: bool(args.fbd_forward_device) and _has_dropout(args),
        f"{FORWARD_FLAG} and dropout: another device draws other masks; add --hidden-dropout 0 "
        "--attention-dropout 0, or leave it out",
    ),
    Rule(
        lambda args: (
            args.fbd_activations == "ship"
            and _given("fp8", "fp4", "distribute_saved_activations")(args)
        ),
        "--fbd-activations ship and --fp8-format, --fp4-format or --distribute-saved-activations: "
        "those recompute layers in another way; take --fbd-activations recompute",
    ),
    Rule(
        lambda args: args.ignore_forward_tensor_parallel and _has_dropout(args),
        f"{_MERGE} and dropout: one process draws other masks than the shards of a stage; add "
        "--hidden-dropout 0 --attention-dropout 0, or leave it out",
    ),
)
