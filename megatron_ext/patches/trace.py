"""Patches that tell observers about the parts of a training step outside its table.

A training step begins when the schedule is called and ends after the optimizer. The executor itself
reports the actions in our tables; these patches report the actions in Megatron's own schedules.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from megatron_ext.config import active
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable
from megatron_ext.patches.schedules import is_chosen, stage_of_chunk
from megatron_ext.schedules.table.actions import Action, Kind
from megatron_ext.tracing import digest_files

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# Attribute on an output tensor: its forward pass's (chunk, micro-batch), for the
# backward pass.
_ACTION = "_megatron_ext_action"

PATCHES = PatchTable(feature="trace")


def _records_digests() -> bool:
    return digest_files.folder_asked_for() is not None


def _may_be_observed() -> bool:
    if _records_digests():
        return True
    in_force = active.active()
    if in_force is None:
        return False
    from megatron_ext.tracing import telemetry

    if in_force.observers or telemetry.is_on():
        return True
    config = in_force.config
    return config.tracing is not None or config.hang_timeout_s is not None


def _observed() -> active.Active | None:
    """Return the active configuration if it has observers."""
    in_force = active.active()
    if in_force is None or not in_force.observers:
        return None
    return in_force


def _observed_stock() -> active.Active | None:
    """Return the active configuration if it has observers and Megatron's schedule is running."""
    in_force = _observed()
    # The executor reports actions for tables and roles.
    if in_force is None or in_force.pipeline or in_force.job:
        return None
    return in_force


@PATCHES.row(
    "trace.steps",
    f"{_SCHEDULES}:get_forward_backward_func",
    when=_may_be_observed,
    order=-10,
)
def _in_steps(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not report when training steps start, which --trace and --hang-timeout need."""
    from megatron_ext.tracing.session import subscribe

    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        in_force = active.active()
        if in_force is None:
            return schedule(*args, **kwargs)
        # Subscribe here: the process groups exist by now, but the runtime does not.
        subscribe(in_force)
        observers = in_force.observers
        if kwargs.get("forward_only"):
            # An evaluation is not part of a step. Report it here, because nothing else
            # does if the program has its own optimizer.
            for observer in observers:
                observer.end_iteration()
            observers = []
        for observer in observers:
            observer.begin_iteration(kwargs["num_microbatches"])
        try:
            result = schedule(*args, **kwargs)
        # A successful step ends with the optimizer, so report only a failed step's end.
        except BaseException:
            for observer in observers:
                # If the device has failed, this call fails too; do not let it hide the
                # first error.
                with suppress(RuntimeError):
                    observer.end_iteration()
            raise
        for observer in observers:
            observer.end_schedule()
        return result

    return run


@PATCHES.row(
    "trace.digests",
    f"{_SCHEDULES}:get_forward_backward_func",
    when=_records_digests,
    order=-11,  # outside trace.steps, which reports to the recorder
)
def _record_digests(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not record tensor digests, which show where two runs first differ."""
    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        # An evaluation is not recorded, and may run another model while weights are awaited.
        if _records_digests() and not kwargs.get("forward_only"):
            from megatron_ext.tracing import digests

            in_force = active.active()
            # Programs that never call `configure` are recorded too.
            if in_force is None:
                in_force = active.Active(PipelineConfig())
                active.activate_configuration(in_force)
            model = kwargs["model"]
            chunks = model if isinstance(model, list | tuple) else [model]
            digests.subscribe(in_force, chunks).watch(chunks)
        return schedule(*args, **kwargs)

    return run


def _observe_collective(
    name: str,
    patch: str,
    target: str,
    reason: str,
) -> None:
    """Add a row that reports a target's calls to observers as a collective with this name."""

    @PATCHES.row(patch, target, reason, of=_observed)
    def run(
        in_force: active.Active,
        call: Call,
        _instance: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        for observer in in_force.observers:
            observer.begin_collective(name)
        try:
            return call(*args, **kwargs)
        finally:
            for observer in in_force.observers:
                observer.end_collective(name)


_observe_collective(
    "reduce",
    "trace.reduction",
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
    "Megatron does not record a step's gradient reduction, which --trace needs.",
)
# A chained optimizer calls the others, so observers count nested calls.
for _optimizer in ("ChainedOptimizer", "FP32Optimizer", "MixedPrecisionOptimizer"):
    _observe_collective(
        "optimizer",
        f"trace.optimizer.{_optimizer}",
        f"megatron.core.optimizer.optimizer:{_optimizer}.step",
        "Megatron does not record the optimizer's part of a step, which --trace needs.",
    )


@PATCHES.row("trace.forward", f"{_SCHEDULES}:forward_step", of=_observed_stock)
def _forward(
    in_force: active.Active,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not record its own schedules' forward passes, which --trace needs."""
    chunk = kwargs.get("vp_stage") or 0
    microbatch = kwargs.get("current_microbatch") or 0
    action = _action("F", chunk, microbatch)
    result = _reported(in_force, call, action, args, kwargs)
    outputs = result[0]
    if not isinstance(outputs, list):
        outputs = [outputs]
    if outputs[0] is not None:
        setattr(outputs[0], _ACTION, (chunk, microbatch))
        for observer in in_force.observers:
            observer.made(action.stage, outputs, args[2])
    return result


@PATCHES.row("trace.backward", f"{_SCHEDULES}:backward_step", of=_observed_stock)
def _backward(
    in_force: active.Active,
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not record its own schedules' backward passes, which --trace needs."""
    # Megatron passes only the output that the backward pass starts from, which
    # `_forward` marked.
    output = args[1] if len(args) > 1 else kwargs["output_tensor"]
    if isinstance(output, list):
        output = output[0]
    chunk, microbatch = getattr(output, _ACTION, (0, 0))
    action = _action("B", chunk, microbatch)
    return _reported(in_force, call, action, args, kwargs)


def _action(kind: Kind, chunk: int, microbatch: int) -> Action:
    return Action(stage_of_chunk(chunk), kind, microbatch)


def _reported(
    in_force: active.Active,
    call: Call,
    action: Action,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Run an action and report its start and end to observers."""
    for observer in in_force.observers:
        observer.begin_action(action)
    # If the action fails, `end_iteration` closes whatever the observers have opened.
    result = call(*args, **kwargs)
    for observer in in_force.observers:
        observer.end_action(-1, action)  # no position in a table
    return result


@PATCHES.row("trace.scalars", "megatron.training.training:training_log", when=is_chosen)
def _scalars(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron does not write the bubble, traffic or order to its TensorBoard and W&B writers."""
    # Use Megatron's own writers to put our values in the same run as the loss.
    from megatron.training import global_vars

    from megatron_ext.tracing import scalars

    iteration = args[3] if len(args) > 3 else kwargs["iteration"]
    settings = global_vars.get_args()
    if iteration % settings.log_interval == 0 and scalars.are_asked_for(vars(settings)):
        writers = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        # The progress line must precede Megatron's log line for the same step.
        scalars.report(iteration, *writers)
    return call(*args, **kwargs)
