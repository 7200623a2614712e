"""Patches on checkpoints: of the distributed optimizer, with torch's Adam in it, and of enums."""

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


# torch's Adam, the fallback without TE and Apex, keeps a `step` tensor for each parameter, TE's and
# Apex's one for each group. Upstream handles that in `state_dict` and `load_state_dict`, but no
# checkpoint survives the round trip: saving asserts, loading raises, or all parameters share one
# `step` tensor, which each of them increments. Resuming needs all rows with this condition.
def _torch_adam() -> bool:
    return not getattr(sys.modules.get(_MODULE), "HAVE_APEX_OR_TE", True)


@PATCHES.row(
    "optimizer.padding_of_reshardable",
    f"{_MODULE}:DistributedOptimizer.sharded_param_state_fully_reshardable",
    until=(0, 20),
)
def _keep_padding_of_buckets(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron gathers states without the padding between buckets but reads them at offsets
    that include it: behind a padded bucket (tied embeddings have their own) it saves parameters
    with parts of their neighbours.
    """
    # Only within this call: the other formats store sizes without the padding.
    buckets = [bucket for buffer in instance.buffers for bucket in buffer.buckets]
    sized = [(buffer, buffer.numel) for buffer in instance.buffers]
    sized += [(bucket, bucket.grad_data.numel()) for bucket in buckets]
    before = [owner.numel_unpadded for owner, _ in sized]
    for owner, padded in sized:
        owner.numel_unpadded = padded
    try:
        return call(*args, **kwargs)
    finally:
        for (owner, _), unpadded in zip(sized, before, strict=True):
            owner.numel_unpadded = unpadded


@PATCHES.row(
    "optimizer.state_before_first_step",
    f"{_MODULE}:DistributedOptimizer.state_dict",
    when=_torch_adam,
)
def _initialize_state(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron asserts one common step; torch's Adam has no state yet when the loader asks."""
    import torch

    optimizer = instance.optimizer
    if not instance.is_stub_optimizer:
        if len(optimizer.state) == 0 and instance.init_state_fn:
            instance.init_state_fn(optimizer, instance.config)
        # Upstream creates only the moments, as for TE's Adam.
        for state in optimizer.state.values():
            if "exp_avg" in state:
                state.setdefault("step", torch.tensor(0.0))
    return call(*args, **kwargs)


@PATCHES.row(
    "optimizer.load_own_steps", f"{_MODULE}:DistributedOptimizer.load_state_dict", when=_torch_adam
)
def _load_with_own_steps(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Megatron copies into leaves that require gradients (RuntimeError) and puts one step
    tensor into all states, which every parameter then increments (wrong bias correction).
    """
    import torch

    # fp32 parameters are leaves that require gradients, and upstream copies into views of them.
    with torch.no_grad():
        result = call(*args, **kwargs)
    # The groups hold the number of steps; in the default format (`dp_reshardable`) the tensors of
    # each parameter are only those of the loader's template.
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
def _keep_step(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reshardable checkpoints, and --ckpt-format torch, hold no step by parameter: KeyError."""
    import torch

    given = by_name(call, args, kwargs)
    if "step" in given["tensors"]:
        return call(**given)
    group, order = instance.model_param_group_index_map[given["model_param"]]
    main_param = instance.optimizer.param_groups[group]["params"][order]
    own = instance.optimizer.state[main_param].get("step")
    if own is not None:
        given["tensors"] = {**given["tensors"], "step": own}
    with torch.no_grad():  # as above: those of --ckpt-format torch load after the rest
        return call(**given)


# Both functions below were methods in 0.16.
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
def _start_without_main(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The process behind the queue imports the training script, which takes seconds, and fails if
    the script needs `python -m megatron_ext` to find Megatron.
    """
    # A spawned process first imports its parent's main script if that is a file.
    names = vars(sys.modules["__main__"])
    path = names.pop("__file__", None)
    try:
        return call(*args, **kwargs)
    finally:
        if path is not None:
            names["__file__"] = path


@cache
def _enums_are_written_as_getattr() -> bool:
    """Return whether this Python pickles a member of an enum as a call of `getattr`."""

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
@PATCHES.row(  # later releases name Python 3.12, but the examples put them on 3.11 as well
    "dist_checkpointing.enums_by_value",
    f"{_COMMON}:save_common",
    when=_enums_are_written_as_getattr,
    since=(0, 17),
    required=False,
)
def _with_enums_by_value(call: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python 3.11.0 to 3.11.3 pickle enums in a way that torch's loader refuses, so no run goes on
    from a checkpoint that was saved there.
    """
    # As later Pythons do: the class, called with the value.
    from megatron.core.safe_globals import SAFE_GLOBALS

    classes = [each for each in SAFE_GLOBALS if isinstance(each, type)]
    enums = [each for each in classes if issubclass(each, enum.Enum)]
    new = [each for each in enums if each not in copyreg.dispatch_table]
    for each in new:
        copyreg.pickle(each, lambda member: (type(member), (member.value,)))
    try:
        return call(*args, **kwargs)
    finally:
        for each in new:
            del copyreg.dispatch_table[each]
