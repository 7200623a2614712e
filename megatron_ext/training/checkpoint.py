"""Checkpoints that upstream's script loads, and loading those that it wrote.

Format `torch_dist` with upstream's directory layout and state-dict keys (`megatron/training/
checkpointing.py`). Weights load under any parallel sizes, and so does optimizer state; that of the
distributed optimizer only if it was saved with `--dist-ckpt-optim-fully-reshardable`.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.errors import DataError
from megatron_ext.schedules.choice import folded
from megatron_ext.training.initialize import agreed

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = ["check_save_directory", "load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)

_UNREADABLE = (CheckpointingException, OSError, RuntimeError, LookupError, ValueError)
_TRACKER = "latest_checkpointed_iteration.txt"
_OPERATIONS = "num_floating_point_operations_so_far"
_OPTIMIZER_TYPE = "distrib_optim_sharding_type"

# What makes another model; a checkpoint of a run with other values does not fit.
_MODEL_ARGUMENTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
    swiglu normalization add_bias_linear position_embedding_type multi_latent_attention num_experts
    moe_ffn_hidden_size mtp_num_layers untie_embeddings_and_output_weights
"""


def check_save_directory(path: str) -> None:
    """Check that checkpoints can be written below `path`, without making anything.

    Every rank asks at the same time, so trying it out would be a race.

    Raises:
        DataError: It cannot be made or written.
    """
    target = Path(path).absolute()
    nearest = next(one for one in (target, *target.parents) if one.exists())
    if not nearest.is_dir():
        raise DataError(f"--save {path} cannot be made: {nearest} is no directory; give another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"--save {path} cannot be written by this user; give another")


def save_checkpoint(
    args: Namespace,
    iteration: int,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Write `args.save/iter_NNNNNNN`, then point the tracker file at it. Collective."""
    root = Path(args.save)
    target = root / f"iter_{iteration:07d}"
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if args.use_distributed_optimizer:
        metadata[_OPTIMIZER_TYPE] = "dp_reshardable"
        if args.dist_ckpt_optim_fully_reshardable:
            metadata[_OPTIMIZER_TYPE] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = (
                args.distrib_optim_fully_reshardable_mem_efficient
            )
    state = _state_dict(
        args,
        chunks,
        None if args.no_save_optim else optimizer,
        None if args.no_save_optim else scheduler,
        None if args.no_save_rng else _rng_state(args),
        metadata,
    )
    state["iteration"] = iteration
    state[_OPERATIONS] = getattr(args, _OPERATIONS, 0)  # upstream's count, carried along
    strategy = get_default_save_sharded_strategy("torch_dist")
    if args.ckpt_fully_parallel_save:
        strategy = FullyParallelSaveStrategyWrapper(strategy, _replicas())
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(
        state,
        str(target),
        strategy,
        preprocess_common_before_consistancy_check=_comparable,
        content_metadata=metadata,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        _retire(args, root, iteration)
        (root / _TRACKER).write_text(str(iteration), encoding="utf-8")
        logger.info("saved a checkpoint of iteration %d to %s", iteration, target)
    dist.barrier()


def load_checkpoint(
    args: Namespace,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> int:
    """Load the latest checkpoint below `args.load` (or that of `--ckpt-step`). Collective.

    Sets the consumed samples of `args`.

    Returns:
        The iteration to go on from: 0 if there is no checkpoint yet, or with `--finetune`.

    Raises:
        DataError: The checkpoint is missing (where it was required), unreadable, of another model,
            or has optimizer state that these parallel sizes cannot take.
    """
    with agreed():
        source, common = _open(args)
        if source is None:
            return 0
        plan = _plan(args, common, source)
    wanted = _state_dict(
        args,
        chunks,
        optimizer if plan.optimizer else None,
        scheduler if plan.optimizer else None,
        _rng_state(args) if plan.rng else None,
        plan.metadata,
        is_loading=True,
    )
    with agreed():
        state = _read(args, wanted, source)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{number}"])
    if plan.optimizer:
        if not optimizer.is_stub_optimizer:
            optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["opt_param_scheduler"])
    elif args.fp16 or args.bf16:
        optimizer.reload_model_params()
    if plan.rng:
        _set_rng_state(args, state["rng_state"])
    setattr(args, _OPERATIONS, state.get(_OPERATIONS, 0))
    for counter, count in plan.counters.items():
        setattr(args, counter, count)
    update_num_microbatches(args.consumed_train_samples)
    iteration = int(state["iteration"]) if plan.iteration else 0
    if dist.get_rank() == 0:
        logger.info("loaded %s, going on from iteration %d", source, iteration)
    dist.barrier()
    return iteration


@dataclass(frozen=True)
class _Plan:
    """Which parts of a checkpoint a run takes over, besides the weights."""

    iteration: bool
    optimizer: bool
    rng: bool
    counters: dict[str, int]
    metadata: dict[str, Any]


def _plan(args: Namespace, common: dict[str, Any], source: Path) -> _Plan:
    saved: Namespace = common.get("args") or Namespace()
    fresh = args.finetune or source.name == "release"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    same_sizes = all(getattr(saved, size, 1) == getattr(args, size) for size in sizes)
    counters = {}
    if not args.finetune:
        _check_same_model(args, saved, source)
        names = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
        counters = {name: getattr(saved, name, 0) for name in names}
    plan = _Plan(
        iteration=not fresh,
        optimizer=not (fresh or args.no_load_optim or getattr(saved, "no_save_optim", False)),
        rng=not (fresh or args.no_load_rng or getattr(saved, "no_save_rng", False)) and same_sizes,
        counters=counters,
        metadata=dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {},
    )
    if plan.optimizer and args.use_distributed_optimizer:
        _check_optimizer_fits(args, saved, plan.metadata, source)
    return plan


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _state_dict(
    args: Namespace,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    rng_state: ShardedObject | None,
    metadata: dict[str, Any],
    **optimizer_options: Any,
) -> dict[str, Any]:
    metadata = {**metadata, "dp_cp_group": _replicas()}
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0}
    for number, chunk in enumerate(unwrap_model(list(chunks))):
        key = "model" if len(chunks) == 1 else f"model{number}"
        state[key] = chunk.sharded_state_dict(metadata=metadata)
    if optimizer is not None and not optimizer.is_stub_optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(
            state, metadata=metadata, **optimizer_options
        )
    if scheduler is not None:
        state["opt_param_scheduler"] = scheduler.state_dict()
    if rng_state is not None:
        state["rng_state"] = rng_state
    return state


def _comparable(common: dict[str, Any]) -> dict[str, Any]:
    """Strip from the part that all ranks must agree on what is each rank's own."""
    comparable = copy.deepcopy(common)
    comparable["args"] = dict(vars(comparable["args"]))
    for name in ("rank", "local_rank"):
        comparable["args"].pop(name, None)
    return comparable


def _retire(args: Namespace, root: Path, iteration: int) -> None:
    """Remove the previous checkpoint unless `--save-retain-interval` keeps it."""
    tracker = root / _TRACKER
    if args.save_retain_interval is None or not tracker.is_file():
        return
    previous = tracker.read_text(encoding="utf-8").strip()
    if previous.isdigit() and int(previous) not in {0, iteration}:
        outdated = root / f"iter_{int(previous):07d}"
        if int(previous) % args.save_retain_interval and not outdated.is_symlink():
            shutil.rmtree(outdated, ignore_errors=True)


def _open(args: Namespace) -> tuple[Path | None, dict[str, Any]]:
    """Find the checkpoint and read the part of it that is not sharded."""
    root = Path(args.load)
    name = f"iter_{args.ckpt_step:07d}" if args.ckpt_step else ""
    if not name and (root / _TRACKER).is_file():
        step = (root / _TRACKER).read_text(encoding="utf-8").strip()
        if not step.isdigit() and step != "release":
            raise DataError(
                f"{root / _TRACKER} holds {step!r}: an iteration or 'release' is needed"
            )
        name = step if step == "release" else f"iter_{int(step):07d}"
    if not name:
        if args.exit_on_missing_checkpoint:
            raise DataError(
                f"--load {root}: no {_TRACKER} there; give the directory that --save had"
            )
        if dist.get_rank() == 0:
            logger.warning("--load %s: no checkpoint there yet, starting from random weights", root)
        return None, {}
    source = root / name
    if not dist_checkpointing.check_is_distributed_checkpoint(str(source)):
        raise DataError(
            f"{source}: no checkpoint of format torch_dist; for one of another format run "
            "Megatron-LM's own script (`megatron-ext upstream fetch`)"
        )
    try:
        return source, dist_checkpointing.load_common_state_dict(str(source))
    except (*_UNREADABLE, EOFError, UnpicklingError) as error:
        raise DataError(f"{source} cannot be read: {_brief(error)}; give another") from error


def _check_same_model(args: Namespace, saved: Namespace, source: Path) -> None:
    other = [
        f"{name} is {getattr(saved, name)} there and {getattr(args, name)} here"
        for name in _MODEL_ARGUMENTS.split()
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if other:
        raise DataError(
            f"{source} is of another model: {', '.join(other)}; give the flags that it was "
            "trained with, or another --load"
        )


def _check_optimizer_fits(
    args: Namespace, saved: Namespace, metadata: dict[str, Any], source: Path
) -> None:
    """Optimizer state that is cut along gradient buffers fits where the buffers are cut alike."""
    if metadata.get(_OPTIMIZER_TYPE) in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    where = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
    )
    there, here = ([getattr(one, name, None) for name in where] for one in (saved, args))
    if folded():  # saved under such a schedule it would be reshardable
        raise DataError(
            f"{source}: its optimizer state fits only the stages that it was saved with; save with "
            "--dist-ckpt-optim-fully-reshardable to change the schedule, or load the weights "
            "alone with --no-load-optim"
        )
    if there != here or _OPTIMIZER_TYPE not in metadata:
        raise DataError(
            f"{source}: its optimizer state was saved for (TP, PP, VPP, layout) = {there}, this "
            f"run has {here}; save with --dist-ckpt-optim-fully-reshardable to change them, or "
            "load the weights alone with --no-load-optim"
        )


def _read(args: Namespace, wanted: dict[str, Any], source: Path) -> dict[str, Any]:
    strategy = get_default_load_sharded_strategy(str(source))
    if args.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, _replicas())
    try:
        loaded = dist_checkpointing.load(
            wanted, str(source), strategy, strict=args.dist_ckpt_strictness
        )
    except (*_UNREADABLE, CheckpointException) as error:
        raise DataError(
            f"{source} does not fit this model, or is damaged: {_brief(error)}; compare the flags "
            "with those that it was trained with"
        ) from error
    state: dict[str, Any] = loaded[0] if isinstance(loaded, tuple) else loaded
    return state


def _brief(error: BaseException) -> str:
    """Reduce an error to its cause's first words: some list the whole checkpoint."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return f"{str(error).splitlines()[0]:.200}"


def _rng_state(args: Namespace) -> ShardedObject:
    """Collect every generator's state, keyed as upstream keys it: by stage and tensor rank."""
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states = [own]
    if args.data_parallel_random_init and args.data_parallel_size > 1:
        states = [{} for _ in range(args.data_parallel_size)]
        dist.all_gather_object(states, own, group=parallel_state.get_data_parallel_group())
    grid = [
        (parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size),
        (parallel_state.get_tensor_model_parallel_rank(), args.tensor_model_parallel_size),
    ]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if args.expert_model_parallel_size > 1:  # then replicas draw differently
        grid.append((replica, _replicas().size()))
        replica = 0
    ranks, sizes = zip(*grid, strict=True)
    return ShardedObject("rng_state", states, sizes, ranks, replica_id=replica)


def _set_rng_state(args: Namespace, states: list[dict[str, Any]]) -> None:
    replica = parallel_state.get_data_parallel_rank() if args.data_parallel_random_init else 0
    state = states[replica]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
