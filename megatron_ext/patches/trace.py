"""Patches that report to observers: what belongs to a training step but not to its table.

A training step begins with the call of the schedule and ends after the optimizer. The executor
reports the actions of our tables itself; the actions of Megatron's own schedules are reported here.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.schedules import is_chosen, stage_of_chunk
from megatron_ext.schedules.table.actions import Action, Kind

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# Attribute of an output: (chunk, micro-batch) of its forward, for the backward.
_ACTION = "_megatron_ext_action"

PATCHES = PatchTable(feature="trace")


def _may_be_observed() -> bool:
    found = active.active()
    if found is None:
        return False
    from megatron_ext.tracing import telemetry

    config = found.config
    wanted = config.tracing is not None or config.hang_timeout_s is not None
    return bool(found.observers) or wanted or telemetry.is_on()


def _observed() -> active.Active | None:
    found = active.active()
    return found if found is not None and found.observers else None


def _observed_stock() -> active.Active | None:
    found = _observed()  # called for each action
    # For tables and roles the executor reports.
    return None if found is None or found.pipeline or found.job else found


@PATCHES.row(
    "trace.steps", f"{_SCHEDULES}:get_forward_backward_func", when=_may_be_observed, order=-10
)
def _in_steps(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not report the begin of training steps to --trace and --hang-timeout."""
    from megatron_ext.tracing.session import subscribe

    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = active.active()
        if found is None:
            return schedule(*args, **kwargs)
        subscribe(found)  # here, because the groups exist and the runtime does not yet
        observers = found.observers
        if kwargs.get("forward_only"):
            # Only Megatron's optimizers report the end of a step; an evaluation is no part of one.
            for observer in observers:
                observer.end_iteration()
            observers = []
        for observer in observers:
            observer.begin_iteration(kwargs["num_microbatches"])
        try:
            result = schedule(*args, **kwargs)
        # A complete step ends with the optimizer, whose rows report it.
        except BaseException:
            for observer in observers:
                # A device that has failed fails here once more, and then knows less of the reason.
                with suppress(RuntimeError):
                    observer.end_iteration()
            raise
        for observer in observers:
            observer.end_schedule()
        return result

    return run


def _observe_collective(name: str, patch: str, target: str, reason: str) -> None:
    """Add a row that reports the calls of a target as a collective of a name."""

    @PATCHES.row(patch, target, reason, of=_observed)
    def run(found: active.Active, call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
        for observer in found.observers:
            observer.begin_collective(name)
        try:
            return call(*args, **kwargs)
        finally:
            for observer in found.observers:
                observer.end_collective(name)


_observe_collective(
    "reduce",
    "trace.reduction",
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    "Megatron does not record the reduction of gradients at the end of a step for --trace.",
)
for _optimizer in ("ChainedOptimizer", "FP32Optimizer", "MixedPrecisionOptimizer"):
    _observe_collective(
        "optimizer",
        f"trace.optimizer.{_optimizer}",
        f"megatron.core.optimizer.optimizer:{_optimizer}.step",
        "Megatron does not record the optimizer's part of a step for --trace.",
    )


@PATCHES.row("trace.forward", f"{_SCHEDULES}:forward_step", of=_observed_stock)
def _forward(found: active.Active, call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not record the forwards of its own schedules for --trace."""
    key = kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0
    action = _action("F", *key)
    result = _reported(found, call, action, args, kwargs)
    outputs = result[0] if isinstance(result[0], list) else [result[0]]
    if outputs[0] is not None:
        setattr(outputs[0], _ACTION, key)
        for observer in found.observers:
            observer.made(action.stage, outputs, args[2])
    return result


@PATCHES.row("trace.backward", f"{_SCHEDULES}:backward_step", of=_observed_stock)
def _backward(found: active.Active, call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not record the backwards of its own schedules for --trace."""
    # Megatron gives it nothing but the output that it starts from; `_forward` has marked that.
    output = args[1] if len(args) > 1 else kwargs["output_tensor"]
    first = output[0] if isinstance(output, list) else output
    return _reported(found, call, _action("B", *getattr(first, _ACTION, (0, 0))), args, kwargs)


def _action(kind: Kind, chunk: int, microbatch: int) -> Action:
    return Action(stage_of_chunk(chunk), kind, microbatch)


def _reported(found: active.Active, call: Call, action: Action, args: Args, kwargs: Kwargs) -> Any:
    """Run an action before observers."""
    for observer in found.observers:
        observer.begin_action(action)
    result = call(*args, **kwargs)
    for observer in found.observers:
        observer.end_action(-1, action)  # no position in a table
    return result


@PATCHES.row("trace.scalars", "megatron.training.training:training_log", when=is_chosen)
def _scalars(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron does not write bubble, traffic and order to its TensorBoard and W&B writers."""
    # Megatron's own writers, so that ours stand beside the loss in one run.
    from megatron.training import global_vars

    from megatron_ext.tracing import scalars

    iteration = args[3] if len(args) > 3 else kwargs["iteration"]
    settings = global_vars.get_args()
    if iteration % settings.log_interval == 0 and scalars.are_asked_for(vars(settings)):
        writers = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        scalars.report(iteration, *writers)  # before the line of the step, which it belongs to
    return call(*args, **kwargs)
