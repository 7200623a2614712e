"""Patches for checkpoints: distributed optimizer state, writer processes, pickled enums."""

from __future__ import annotations

import copyreg
import enum
import sys
from functools import cache
from typing import Any

from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_COMMON = "megatron.core.dist_checkpointing.strategies.common"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"

PATCHES = PatchTable()


# torch's Adam, the fallback if neither TE nor Apex is installed, keeps one `step`
# tensor per parameter; Adam in TE and Apex keeps one per group. Upstream's `state_dict`
# and `load_state_dict` handle torch's Adam, but no checkpoint survives the round trip:
# saving fails an assertion, loading raises an error, or all parameters share one `step`
# tensor, which every parameter increments. Resuming needs all rows with this condition.
def _torch_adam() -> bool:
    return not getattr(sys.modules.get(_MODULE), "HAVE_APEX_OR_TE", True)


@PATCHES.row(
    "optimizer.padding_of_reshardable",
    f"{_MODULE}:DistributedOptimizer.sharded_param_state_fully_reshardable",
    until=(0, 20),
)
def _keep_padding_of_buckets(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron gathers optimizer state without the padding between buckets but reads it at offsets
    that include the padding, so parameters after a padded bucket (tied embeddings have a separate
    bucket) are saved mixed with parts of their neighbours.
    """
    # Change the sizes only during this call: the other checkpoint formats store
    # unpadded sizes.
    unpadded_sizes = []
    for buffer in instance.buffers:
        unpadded_sizes.append((buffer, buffer.numel_unpadded))
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            unpadded_sizes.append((bucket, bucket.numel_unpadded))
            bucket.numel_unpadded = bucket.grad_data.numel()
    try:
        return call(*args, **kwargs)
    finally:
        for buffer_or_bucket, num_elements in unpadded_sizes:
            buffer_or_bucket.numel_unpadded = num_elements


@PATCHES.row(
    "optimizer.state_before_first_step",
    f"{_MODULE}:DistributedOptimizer.state_dict",
    when=_torch_adam,
)
def _initialize_state(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron asserts that all parameters have the same step, but torch's Adam has no steps yet
    when the loader requests the state before the first step.
    """
    import torch

    optimizer = instance.optimizer
    if not instance.is_stub_optimizer:
        if len(optimizer.state) == 0 and instance.init_state_fn:
            instance.init_state_fn(optimizer, instance.config)
        # Upstream creates only the moments, which is enough for TE's Adam.
        for state in optimizer.state.values():
            if "exp_avg" in state:
                state.setdefault("step", torch.tensor(0.0))
    return call(*args, **kwargs)


@PATCHES.row(
    "optimizer.load_own_steps",
    f"{_MODULE}:DistributedOptimizer.load_state_dict",
    when=_torch_adam,
)
def _load_with_own_steps(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron copies into leaves that require gradients (RuntimeError) and puts the same step
    tensor in every state, so every parameter increments it (wrong bias correction).
    """
    import torch

    # fp32 parameters are leaves that require gradients, and upstream copies into views of them.
    with torch.no_grad():
        result = call(*args, **kwargs)
    # Take the step from the groups: in the default format (`dp_reshardable`), a parameter's `step`
    # tensor comes from the loader's template, not from the checkpoint.
    for group in instance.optimizer.param_groups:
        for parameter in group["params"]:
            state = instance.optimizer.state.get(parameter)
            if state and "step" in group:
                state["step"] = torch.tensor(float(group["step"]))
    return result


@PATCHES.row(
    "optimizer.step_of_reshardable",
    f"{_MODULE}:DistributedOptimizer._set_main_param_and_optimizer_states",
    when=_torch_adam,
)
def _keep_step(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Megatron raises KeyError because it looks up every parameter's step, which reshardable
    checkpoints and --ckpt-format torch do not store.
    """
    import torch

    arguments = by_name(call, args, kwargs)
    tensors = arguments["tensors"]
    if "step" in tensors:
        return call(**arguments)
    group_index, index = instance.model_param_group_index_map[arguments["model_param"]]
    group = instance.optimizer.param_groups[group_index]
    main_param = group["params"][index]
    step = instance.optimizer.state[main_param].get("step")
    if step is not None:
        arguments["tensors"] = {**tensors, "step": step}
    # As in `load_state_dict`, the call copies into leaves that require gradients.
    with torch.no_grad():
        return call(**arguments)


# Both functions below go by different names in 0.16.
@PATCHES.row(
    "dist_checkpointing.queue_process",
    f"{_WRITER}:_get_write_results_queue",
    until=(0, 17),
    required=False,
)
@PATCHES.row(
    "dist_checkpointing.queue_process",
    f"{_WRITER}:get_write_results_queue",
    since=(0, 17),
    required=False,
)
def _start_without_main(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """The process behind the queue imports the training script, which takes seconds and fails if
    the script needs `python -m megatron_ext` to find Megatron.
    """
    # A spawned process starts by importing its parent's main script if that is a file.
    main_names = vars(sys.modules["__main__"])
    script_path = main_names.pop("__file__", None)
    try:
        return call(*args, **kwargs)
    finally:
        if script_path is not None:
            main_names["__file__"] = script_path


@cache
def _enums_are_written_as_getattr() -> bool:
    """Return whether this Python pickles an enum member as a call to `getattr`."""

    class Probe(enum.Enum):
        MEMBER = 0

    return Probe.MEMBER.__reduce_ex__(2)[0] is getattr


@PATCHES.row(
    "dist_checkpointing.enums_by_value",
    f"{_COMMON}:TorchCommonSaveStrategy.save_common",
    when=_enums_are_written_as_getattr,
    until=(0, 17),
    required=False,
)
@PATCHES.row(
    "dist_checkpointing.enums_by_value",
    f"{_COMMON}:save_common",
    when=_enums_are_written_as_getattr,
    since=(0, 17),
    required=False,
)
def _with_enums_by_value(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Python 3.11.0 to 3.11.3 pickle enums in a form that torch's loader rejects, so no run can
    resume from such a checkpoint.
    """
    # Newer Python versions pickle a member as a call to its class with the value, which
    # the loader accepts.
    from megatron.core.safe_globals import SAFE_GLOBALS

    enum_classes = []
    for safe_global in SAFE_GLOBALS:
        is_enum = isinstance(safe_global, type) and issubclass(safe_global, enum.Enum)
        if is_enum and safe_global not in copyreg.dispatch_table:
            enum_classes.append(safe_global)
    for enum_class in enum_classes:
        copyreg.pickle(enum_class, _reduce_to_value)
    try:
        return call(*args, **kwargs)
    finally:
        for enum_class in enum_classes:
            del copyreg.dispatch_table[enum_class]


def _reduce_to_value(member: enum.Enum) -> tuple[type[enum.Enum], tuple[Any]]:
    return type(member), (member.value,)
