"""Patches for jobs whose forward and backward passes run in different processes.

Each role is an ordinary Megatron job (`disaggregation/worlds.py`), so only a few things need
patches: torch.distributed initialisation and each role's training step, evaluation and logging. The
patches act only with --forward-backward-disaggregating.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name

_TRAINING = "megatron.training.training"
_PROVIDERS = ("model_provider_func", "build_model_func")

PATCHES = PatchTable(feature="disaggregation", when=lambda: active.job() is not None)

_on_forward_rank = partial(active.has_role, "forward")
_on_backward_rank = partial(active.has_role, "backward")


@PATCHES.row(
    "disaggregation.processes", "megatron.training.initialize:_initialize_distributed"
)
def _join(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron treats all processes as one job, but forward and backward ranks form two jobs."""
    # Initialise torch.distributed before upstream does; upstream then uses it as is.
    from megatron_ext import devices
    from megatron_ext.disaggregation import worlds

    arguments = sys.modules["megatron.training"].get_args()
    devices.current().bind(arguments.local_rank)
    worlds.join(arguments.distributed_backend)
    return call(*args, **kwargs)


@PATCHES.row(
    "disaggregation.schedule",
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
)
def _roles(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron runs a stage's forward and backward passes on the same rank."""
    from megatron_ext.disaggregation.step import forward_backward

    return partial(forward_backward, call(*args, **kwargs))


@PATCHES.row("disaggregation.model", f"{_TRAINING}:get_model", when=_on_forward_rank)
@PATCHES.row(
    "disaggregation.model_of_builders",
    "megatron.training.models.dist_utils:unimodal_build_distributed_models",
    when=_on_forward_rank,
    since=(0, 19),
)
def _without_gradients(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron allocates gradients for every weight, but forward ranks compute none."""
    # Freeze the model in its provider, because Megatron's wrapper allocates a gradient
    # for every weight that requires one.
    arguments = by_name(call, args, kwargs)
    # The parameter has a different name in the builders' function.
    [provider] = [name for name in _PROVIDERS if name in arguments]
    provide = arguments[provider]

    def frozen(*provider_args: Any, **provider_kwargs: Any) -> Any:
        return provide(*provider_args, **provider_kwargs).requires_grad_(False)

    return call(**{**arguments, provider: frozen})


@PATCHES.row(
    "disaggregation.throughput", f"{_TRAINING}:training_log", when=_on_backward_rank
)
def _log_all_ranks(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron divides the throughput by one role's process count, but both roles' devices do the
    work.
    """
    job = active.job()
    assert job is not None
    arguments = sys.modules["megatron.training"].get_args()
    # `training_log` divides by `world_size`, so change it for the duration of the call.
    arguments.world_size = job.ranks.num_ranks
    try:
        return call(*args, **kwargs)
    finally:
        arguments.world_size = job.ranks.role_size(job.role)


@PATCHES.row("disaggregation.progress", f"{_TRAINING}:setup_model_and_optimizer")
def _share_progress(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron takes the counters from the checkpoint that each rank reads, but forward ranks need
    the backward ranks' counters.
    """
    from megatron_ext.disaggregation.step import shared_progress
    from megatron_ext.disaggregation.worlds import ending_both_roles

    with ending_both_roles():
        model_and_optimizer = call(*args, **kwargs)
    # The counters belong in the arguments, which is where Megatron loads them.
    progress = vars(sys.modules["megatron.training"].get_args())
    progress.update(shared_progress(progress))
    return model_and_optimizer


@PATCHES.row(
    "disaggregation.forward_step",
    f"{_TRAINING}:train_step",
    kind="replace",
    when=_on_forward_rank,
)
def _forward_step(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron updates weights and averages losses, but forward ranks have neither gradients nor
    losses.
    """
    # The losses stay on the backward ranks, which log them. The result has the same structure as
    # upstream's.
    arguments = by_name(call, args, kwargs)
    settings = sys.modules["megatron.training"].get_args()
    arguments["forward_backward_func"](
        forward_step_func=arguments["forward_step_func"],
        data_iterator=arguments["data_iterator"],
        model=arguments["model"],
        num_microbatches=sys.modules[_TRAINING].get_num_microbatches(),
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        decoder_seq_length=settings.decoder_seq_length,
    )
    # Forward ranks run no optimizer; on backward ranks, the optimizer's patches report
    # the end of the step.
    for observer in active.required().observers:
        observer.end_iteration()
    # Losses; skipped steps; whether to save, whether to exit, and the exit code; gradient norm and
    # number of zero gradients; largest attention logit.
    return {}, 0, False, False, 0, None, None, 0


@PATCHES.row("disaggregation.evaluate", f"{_TRAINING}:evaluate", when=_on_forward_rank)
def _send_losses(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron computes evaluation losses on forward ranks, but backward ranks log them."""
    from megatron_ext.disaggregation.step import evaluation, send_evaluation

    model = by_name(call, args, kwargs)["model"]
    # All batches in an evaluation use the same weights: either the last training
    # step's, or ones that the training loop has substituted.
    with evaluation(model):
        losses, *further_results = call(*args, **kwargs)
    send_evaluation(model, losses or {})
    return losses, *further_results


@PATCHES.row(
    "disaggregation.evaluation",
    f"{_TRAINING}:evaluate",
    kind="replace",
    when=_on_backward_rank,
)
def _receive_losses(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron evaluates on every rank, but only forward ranks can evaluate."""
    from megatron_ext.disaggregation.step import receive_evaluation

    arguments = by_name(call, args, kwargs)
    settings = sys.modules["megatron.training"].get_args()
    # Count samples as Megatron's evaluation does, because the next checkpoint stores
    # the count.
    rounds = arguments.get("eval_iters") or settings.eval_iters
    # Since 0.18, evaluations may have a separate batch size.
    batch = (
        getattr(settings, "eval_global_batch_size", None) or settings.global_batch_size
    )
    settings.consumed_valid_samples += rounds * batch
    return receive_evaluation(arguments["model"]), None, False


def _ends_by_itself() -> bool:
    job = active.job()
    return job is not None and job.ends_by_itself


@PATCHES.row(
    "disaggregation.exit",
    f"{_TRAINING}:checkpoint_and_decide_exit",
    when=_ends_by_itself,
)
def _end_together(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> bool:
    """Megatron checks the time limit and exit signals within one role, but both roles must stop
    together.
    """
    from megatron_ext.disaggregation.step import share_exit

    is_over = active.has_role("backward") and call(*args, **kwargs)
    arguments = by_name(call, args, kwargs)
    return share_exit(arguments["model"], is_over=is_over)


def _roles_here() -> Any:
    """Return the state for this process's role, or None."""
    configuration = active.active()
    if configuration is None:
        return None
    return configuration.roles


def _replay_here() -> Any:
    roles = _roles_here()
    if roles is None:
        return None
    return roles.replay


def _sorts_experts() -> bool:
    roles = _roles_here()
    return roles is not None and bool(roles.sorts_experts)


@PATCHES.row(
    "disaggregation.layers",
    "megatron.core.tensor_parallel.random:checkpoint",
    of=_replay_here,
)
def _replay_layer(
    replay: Any,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron runs a layer even if --fbd-activations ship has already delivered its output."""
    function, distribute, hidden_states, *further_inputs = args
    computed_later = replay.instead_of(function, hidden_states)
    return call(computed_later, distribute, hidden_states, *further_inputs, **kwargs)


@PATCHES.row(
    "disaggregation.router",
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
    when=_sorts_experts,
    since=(0, 18),
)
def _sort_experts(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron sorts a token's experts only if gradients are enabled, so score sums on forward
    ranks would differ in the low-order bits.
    """
    import torch

    with torch.enable_grad():  # weights are frozen, so this builds no graph
        return call(*args, **kwargs)


@PATCHES.row("disaggregation.end", "megatron.training.one_logger_utils:finish")
def _leave(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron shuts down each job separately, but both roles must shut down together."""
    # Megatron calls the target last before it exits, including with --exit-interval.
    from megatron_ext.disaggregation.worlds import leave

    result = call(*args, **kwargs)
    leave()
    return result


_silence = partial(PATCHES.row, kind="replace", when=_on_forward_rank)


@_silence("disaggregation.timers", "megatron.core.timers:Timers.log")
def _silent(
    _call: Call,
    _instance: Any,
    _args: Args,
    _kwargs: Kwargs,
) -> None:
    """Megatron prints once per job, and the forward ranks form a second job, so every line would
    appear twice.
    """


for _name in ("print_rank_0", "print_rank_last"):
    _id = f"disaggregation.{_name}"
    _silence(_id, f"megatron.training.utils:{_name}", until=(0, 18))(_silent)
    _silence(_id, f"megatron.training.utils.common_utils:{_name}", since=(0, 18))(
        _silent
    )


@_silence("disaggregation.log", f"{_TRAINING}:training_log")
def _without_log(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron logs every step, but forward ranks have neither losses nor gradient norms."""
    return by_name(call, args, kwargs)["report_memory_flag"]
