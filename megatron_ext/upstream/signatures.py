"""Adapts calls to the signatures of Megatron's functions in the installed release.

Releases differ in the keywords, names and modules of the functions that we call. This module
inspects the functions themselves instead of the version, so it also handles a patched release, or a
release that reverts a change. Megatron is imported only on first use.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@cache
def parameters(place: str) -> tuple[str, ...]:
    """Return the parameter names of `module:function`, in order."""
    module_name, _, name = place.partition(":")
    module = import_module(module_name)
    function = getattr(module, name)
    return tuple(inspect.signature(function).parameters)


def megatron_arguments() -> Any:
    """Return the result of Megatron's `get_args`, or None in programs that parse no arguments."""
    # Read the variable: `get_args` raises if nothing was parsed, and importing it loads Megatron.
    variables = sys.modules.get("megatron.training.global_vars")
    return None if variables is None else variables._GLOBAL_ARGS


def backward_step_of(model: Any, config: Any) -> Callable[[Any, Any, Any], Any]:
    """Return Megatron's `backward_step`, bound to one model and its configuration.

    The function takes the inputs of the stage, `[s, b, h]`, its outputs and their gradients.
    """
    step = import_module(_SCHEDULES).backward_step
    if not _takes_model_type():
        return lambda inputs, outputs, gradients: step(
            inputs,
            outputs,
            gradients,
            config,
        )
    # 0.16 also takes the model type, which is stored below the model's wrappers. Look
    # it up once per model, because a step can have thousands of backward passes.
    model_type = import_module("megatron.core.utils").get_model_type(model)
    return lambda inputs, outputs, gradients: step(
        inputs,
        outputs,
        gradients,
        model_type,
        config,
    )


@cache
def _takes_model_type() -> bool:
    return "model_type" in parameters(f"{_SCHEDULES}:backward_step")


def needed_of_models() -> tuple[str, ...]:
    """Return the attributes of a model that Megatron's forward and backward steps read."""
    needed = "config", "set_input_tensor"
    if _takes_model_type():
        return (*needed, "model_type")
    return needed


def default_groups() -> Any:
    """Return the process groups that Megatron's schedules use if the caller passes none."""
    # This function was added in 0.19. Before that, each of Megatron's schedules
    # contained the code below.
    schedules = import_module(_SCHEDULES)
    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    state = import_module("megatron.core.parallel_state")
    groups_module = import_module("megatron.core.process_groups_config")
    groups = groups_module.ProcessGroupCollection()
    groups.tp = state.get_tensor_model_parallel_group()
    groups.cp = state.get_context_parallel_group()
    groups.pp = state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = state.get_data_parallel_group(
        with_context_parallel=True,
        partial_data_parallel=False,
    )
    # If the router has a bias per expert, Megatron sums the tokens per expert over this group.
    groups.tp_dp_cp = state.get_tensor_and_data_parallel_group(
        with_context_parallel=True
    )
    return groups


def is_multi_module(groups: Any) -> bool:
    """Return whether the groups belong to several models in one job, each with its own pipeline."""
    module = import_module("megatron.core.process_groups_config")
    kind = getattr(module, "MultiModuleProcessGroupCollection", None)
    return kind is not None and isinstance(groups, kind)


def mtp_on_this_rank(config: Any, *, vp_stage: int | None) -> bool:
    """Return whether a chunk on this rank contains multi-token prediction layers.

    `vp_stage` is the index of the chunk; None if the rank has only one.
    """
    module = "megatron.core.transformer.multi_token_prediction"
    decide = import_module(module).mtp_on_this_rank
    settings = {"config": config}
    if "config" not in parameters(f"{module}:mtp_on_this_rank"):
        settings = {
            "layout": config.pipeline_model_parallel_layout,
            "mtp_num_layers": config.mtp_num_layers,
        }
    return bool(decide(**settings, ignore_virtual=False, vp_stage=vp_stage))
