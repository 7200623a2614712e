"""Patches for jobs whose forward and backward passes run in different processes.

Each role is an ordinary Megatron job (`disaggregation/worlds.py`), so few patches remain: how
processes find each other, the training step of each role, evaluation and logging. All of them act
only with --forward-backward-disaggregating.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ext.disaggregation.job import current, has_role
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch, by_name

_TRAINING = "megatron.training.training"
_UTILS = (
    ("megatron.training.utils", {"until": "0.18"}),
    ("megatron.training.utils.common_utils", {"since": "0.18"}),
)
_PROVIDERS = ("model_provider_func", "build_model_func")


_on_forward_rank, _on_backward_rank = partial(has_role, "forward"), partial(has_role, "backward")


def _join(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Start torch.distributed among the processes of one role, before upstream would."""
    # Upstream then finds it initialised, and goes on with the processes that it has.
    from megatron_ext import devices
    from megatron_ext.disaggregation import worlds

    arguments = sys.modules["megatron.training"].get_args()
    devices.current().bind(arguments.local_rank)
    worlds.join(arguments.distributed_backend)
    return call(*args, **kwargs)


def _roles(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.step import forward_backward

    return partial(forward_backward, call(*args, **kwargs))


def _without_gradients(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build the model of a forward rank, without trainable parameters."""
    # In the provider: what wraps the model afterwards makes room for a gradient of each trained
    # one.
    given = by_name(call, args, kwargs)
    [provider] = [name for name in _PROVIDERS if name in given]
    provide = given[provider]

    def frozen(*provider_args: Any, **provider_kwargs: Any) -> Any:
        return provide(*provider_args, **provider_kwargs).requires_grad_(False)

    return call(**{**given, provider: frozen})


def _share_progress(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.step import shared_progress

    made = call(*args, **kwargs)
    # The counters are arguments: Megatron's own loading writes them there.
    progress = vars(sys.modules["megatron.training"].get_args())
    progress.update(shared_progress(progress))
    return made


def _forward_step(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a step without an optimizer; backward ranks know whether the step was skipped."""
    # Losses stay on the backward ranks, which log; the results have the form of upstream's.
    from megatron_ext.disaggregation.step import step_done

    given = by_name(call, args, kwargs)
    arguments = sys.modules["megatron.training"].get_args()
    given["forward_backward_func"](
        forward_step_func=given["forward_step_func"],
        data_iterator=given["data_iterator"],
        model=given["model"],
        num_microbatches=sys.modules[_TRAINING].get_num_microbatches(),
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        decoder_seq_length=arguments.decoder_seq_length,
    )
    step_done(given["model"], updated=False)
    # Losses; steps that were skipped; whether to save and to exit, with which code; the norm of the
    # gradients and how many are zero; the largest attention logit.
    return {}, 0, False, False, 0, None, None, 0


def _send_weights(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.step import step_done

    results = call(*args, **kwargs)
    step_done(by_name(call, args, kwargs)["model"], updated=not results[1])
    return results


def _send_losses(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.step import share_evaluation

    losses, *others = call(*args, **kwargs)
    share_evaluation(by_name(call, args, kwargs)["model"], losses or {})
    return losses, *others


def _receive_losses(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Receive the losses of the evaluation that forward ranks run, for the log."""
    from megatron_ext.disaggregation.step import share_evaluation

    given = by_name(call, args, kwargs)
    arguments = sys.modules["megatron.training"].get_args()
    rounds = given.get("eval_iters") or arguments.eval_iters
    # Since 0.18 evaluations may have a separate batch size.
    batch = getattr(arguments, "eval_global_batch_size", None) or arguments.global_batch_size
    arguments.consumed_valid_samples += rounds * batch
    return share_evaluation(given["model"], {}), None, False


def _end_together(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> bool:
    """Let backward ranks, which save checkpoints, decide when a job ends that may end any time."""
    from megatron_ext.disaggregation.step import share_exit

    is_over = has_role("backward") and call(*args, **kwargs)
    return share_exit(by_name(call, args, kwargs)["model"], is_over=is_over)


def _replays() -> bool:
    # Called at each layer: without an import, for where nothing is shipped.
    ship = sys.modules.get("megatron_ext.disaggregation.ship")
    return ship is not None and ship.current_replay() is not None


def _replay_layer(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.ship import current_replay

    function, distribute, hidden_states, *others = args
    replay = current_replay()
    assert replay is not None
    later = replay.instead_of(function, hidden_states)
    return call(later, distribute, hidden_states, *others, **kwargs)


def _leave(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.disaggregation.worlds import leave

    result = call(*args, **kwargs)
    leave()
    return result


def _silent(_call: Call, _instance: Any, _args: Args, _kwargs: Kwargs) -> None:
    """Print nothing: the backward ranks print it."""


def _patch(name: str, target: str, fn: Callable[..., Any], reason: str, **options: Any) -> Patch:
    return Patch(
        id=f"disaggregation.{name}",
        target=target,
        fn=fn,
        reason=reason,
        feature="disaggregation",
        **{"when": lambda: current() is not None, **options},
    )


PATCHES = (
    _patch(
        "processes",
        "megatron.training.initialize:_initialize_distributed",
        _join,
        "treats all processes as one job; forward and backward ranks are two jobs",
    ),
    _patch(
        "schedule",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        _roles,
        "runs forwards and backwards of a stage on one rank",
    ),
    _patch(
        "model",
        f"{_TRAINING}:get_model",
        _without_gradients,
        "keeps gradients of every weight; forward ranks have none",
        when=_on_forward_rank,
    ),
    _patch(
        "model_of_builders",
        "megatron.training.models.dist_utils:unimodal_build_distributed_models",
        _without_gradients,
        "as disaggregation.model, for models made by a builder",
        when=_on_forward_rank,
        since="0.19",
    ),
    _patch(
        "progress",
        f"{_TRAINING}:setup_model_and_optimizer",
        _share_progress,
        "reads a checkpoint on every rank; forward ranks get its counters from backward ranks",
    ),
    _patch(
        "forward_step",
        f"{_TRAINING}:train_step",
        _forward_step,
        "updates weights and averages losses, which forward ranks do not have",
        kind="replace",
        when=_on_forward_rank,
    ),
    _patch(
        "weights",
        f"{_TRAINING}:train_step",
        _send_weights,
        "does not send new weights; forward ranks need them",
        when=_on_backward_rank,
    ),
    _patch(
        "evaluate",
        f"{_TRAINING}:evaluate",
        _send_losses,
        "returns the losses of an evaluation on forward ranks; backward ranks log them",
        when=_on_forward_rank,
    ),
    _patch(
        "evaluation",
        f"{_TRAINING}:evaluate",
        _receive_losses,
        "evaluates on every rank; forward ranks alone are enough",
        kind="replace",
        when=_on_backward_rank,
    ),
    _patch(
        "exit",
        f"{_TRAINING}:checkpoint_and_decide_exit",
        _end_together,
        "decides among the processes of one role whether time is up or a signal has come",
        when=lambda: (job := current()) is not None and job.ends_by_itself,
    ),
    _patch(
        "log",
        f"{_TRAINING}:training_log",
        lambda call, _instance, args, kwargs: by_name(call, args, kwargs)["report_memory_flag"],
        "logs each step; forward ranks know neither losses nor norms",
        kind="replace",
        when=_on_forward_rank,
    ),
    *(
        _patch(
            name,
            f"{module}:{name}",
            _silent,
            "prints once for each job, and the forward ranks are a second one",
            kind="replace",
            when=_on_forward_rank,
            **releases,
        )
        for name in ("print_rank_0", "print_rank_last")
        for module, releases in _UTILS
    ),
    _patch(
        "timers",
        "megatron.core.timers:Timers.log",
        _silent,
        "prints times for each job, and the forward ranks are a second one",
        kind="replace",
        when=_on_forward_rank,
    ),
    _patch(
        "layers",
        "megatron.core.tensor_parallel.random:checkpoint",
        _replay_layer,
        "runs a layer for its output, which --fbd-activations ship has already delivered",
        when=_replays,
    ),
    _patch(
        "end",
        "megatron.training.one_logger_utils:finish",
        _leave,
        "is the last call before exit, at --exit-interval too; both roles shut down here",
    ),
)
