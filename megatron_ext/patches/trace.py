"""Patches that report Megatron's actions to the recorder and the watchdog.

A step begins with the call of the schedule and ends after the optimizer. Our own schedules report
their actions themselves (`megatron_ext/tools/trace/session_observer.py`); these patches observe
Megatron's.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_ext.config import active
from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZERS = ("ChainedOptimizer", "FP32Optimizer", "MixedPrecisionOptimizer")


def _is_observing() -> bool:
    from megatron_ext.tools.trace import session

    return session.is_observing()


def _sees_megatrons_steps() -> bool:
    found = active.active()
    if found is None or found.pipeline is not None or found.job is not None:
        return False  # asked for each action, so our own schedules look no further
    return _is_observing()


def _in_steps(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the schedule with each training call recorded as a step."""
    from megatron_ext.tools.trace import session

    schedule = call(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        observer = session.current()
        if observer is None or kwargs.get("forward_only"):
            return schedule(*args, **kwargs)
        observer.begin_step()
        try:
            result = schedule(*args, **kwargs)
        except BaseException:
            observer.end_step()
            raise
        observer.activity.now("has run its part of the pipeline")
        return result

    return run


def _reduction(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.tools.trace import session

    observer = session.current()
    assert observer is not None
    name = "the reduction of gradients"
    return observer.run("reduce", name, lambda: call(*args, **kwargs))


def _update(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The outermost optimizer's step is the end of the training step."""
    from megatron_ext.disaggregation import job as disaggregation
    from megatron_ext.tools.trace import session

    observer = session.current()
    assert observer is not None
    if observer.in_optimizer:
        return call(*args, **kwargs)
    observer.in_optimizer = True
    try:
        result = observer.run("optimizer", "the optimizer step", lambda: call(*args, **kwargs))
    finally:
        observer.in_optimizer = False
    if disaggregation.current() is None:  # with roles, the transfer of weights is part of it
        observer.end_step()
    return result


def _has_table() -> bool:
    from megatron_ext.config import active

    return active.pipeline() is not None


def _scalars(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Write our scalars when Megatron logs, with its writers."""
    from megatron.training import global_vars

    from megatron_ext.tools.trace import scalars

    iteration = args[3] if len(args) > 3 else kwargs["iteration"]
    settings = global_vars.get_args()
    if iteration % settings.log_interval == 0 and scalars.are_asked_for(vars(settings)):
        writers = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        scalars.report(iteration, *writers)  # before the line of the step, which it belongs to
    return call(*args, **kwargs)


def _forward(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.tools.trace import megatron_spans

    return megatron_spans.forward(call, args, kwargs)


def _backward(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    from megatron_ext.tools.trace import megatron_spans

    return megatron_spans.backward(call, args, kwargs)


PATCHES = (
    Patch(
        id="trace.steps",
        target=f"{_SCHEDULES}:get_forward_backward_func",
        fn=_in_steps,
        when=_is_observing,
        order=-10,
        feature="trace",
        reason="does not report the begin of training steps to --trace and --hang-timeout",
    ),
    Patch(
        id="trace.forward",
        target=f"{_SCHEDULES}:forward_step",
        fn=_forward,
        when=_sees_megatrons_steps,
        feature="trace",
        reason="does not record the forwards of Megatron's own schedules for --trace",
    ),
    Patch(
        id="trace.backward",
        target=f"{_SCHEDULES}:backward_step",
        fn=_backward,
        when=_sees_megatrons_steps,
        feature="trace",
        reason="does not record the backwards of Megatron's own schedules for --trace",
    ),
    Patch(
        id="trace.reduction",
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        fn=_reduction,
        when=_is_observing,
        feature="trace",
        reason="does not record the reduction of gradients at the end of a step for --trace",
    ),
    Patch(
        id="trace.scalars",
        target="megatron.training.training:training_log",
        fn=_scalars,
        when=_has_table,
        feature="trace",
        reason="does not write bubble, traffic and order to its TensorBoard and W&B writers",
    ),
    *(
        Patch(
            id=f"trace.optimizer.{name}",
            target=f"megatron.core.optimizer.optimizer:{name}.step",
            fn=_update,
            when=_is_observing,
            feature="trace",
            reason="does not record the optimizer's part of a step for --trace",
        )
        for name in _OPTIMIZERS
    ),
)
