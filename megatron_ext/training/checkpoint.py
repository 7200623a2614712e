"""Saves and loads checkpoints in upstream's format.

Format `torch_dist` with upstream's directory layout and state-dict keys (`megatron/training/
checkpointing.py`). Weights load under any parallel sizes, and so does optimizer state; that of the
distributed optimizer only if it was saved with `--dist-ckpt-optim-fully-reshardable`.
"""

from __future__ import annotations

import logging
import os
import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext import files
from megatron_ext.config.active import is_folded
from megatron_ext.errors import DataError, leave_telling_to_another, reason_of, shortened
from megatron_ext.training.initialize import agreed

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = ["check_save_directory", "load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    CheckpointException,
    CheckpointingException,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    UnpicklingError,
    ValueError,
)
"""What unpickling damaged bytes raises: almost anything."""
_TRACKER = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_METADATA = ".metadata"
_OPTIMIZER_TYPE = "distrib_optim_sharding_type"

# What makes another model; a checkpoint of a run with other values does not fit.
_MODEL_ARGUMENTS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
    swiglu normalization add_bias_linear position_embedding_type multi_latent_attention num_experts
    moe_ffn_hidden_size mtp_num_layers untie_embeddings_and_output_weights
""".split()  # noqa: SIM905
# Arguments that determine how gradient buffers, and optimizer state along them, are sharded.
_STAGE_ARGUMENTS = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_layout
""".split()  # noqa: SIM905
_OF_A_RANK = ("rank", "local_rank")
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def check_save_directory(path: str) -> None:
    """Check that checkpoints can be written below `path`, without creating anything.

    All ranks check at the same time, so a trial write would be a race.

    Raises:
        DataError: The directory cannot be created or written.
    """
    target = Path(path).absolute()
    nearest = next(one for one in (target, *target.parents) if one.exists())
    if not nearest.is_dir():
        raise DataError(f"--save {path} cannot be made: {nearest} is not a directory; give another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"--save {path} cannot be written by this user; give another")


def save_checkpoint(
    args: Namespace,
    iteration: int,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Write `args.save/iter_NNNNNNN`, then point the tracker file at it. Collective.

    Raises:
        DataError: It cannot be written; the tracker file still points at the previous checkpoint.
    """
    root = Path(args.save)
    target = root / f"iter_{iteration:07d}"
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        any_sizes = args.dist_ckpt_optim_fully_reshardable
        metadata[_OPTIMIZER_TYPE] = "fully_reshardable" if any_sizes else "dp_reshardable"
    state = {
        **_sharded_state(chunks, optimizer, metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": _rng_state(args),
        # All ranks must agree on what is not sharded.
        "args": Namespace(**{k: v for k, v in vars(args).items() if k not in _OF_A_RANK}),
        "checkpoint_version": 3.0,
        "iteration": iteration,
    }
    strategy = get_default_save_sharded_strategy("torch_dist")
    with agreed(), _writing(target):
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
    with _writing(target):
        dist_checkpointing.save(
            state,
            str(target),
            FullyParallelSaveStrategyWrapper(strategy, _replicas()),
            content_metadata=metadata,
        )
    with agreed(), _writing(target):
        if dist.get_rank() == 0:
            files.write_text(root / _TRACKER, str(iteration))
            logger.info("saved a checkpoint of iteration %d to %s", iteration, target)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn what goes wrong with a checkpoint's files into the user's error.

    When a rank cannot write its part, all ranks raise, and the first knows why.
    """
    remedy = "make room, or give another --save; the previous checkpoint is intact"
    try:
        yield
    except OSError as error:
        raise DataError(files.cannot_write(target, error, remedy)) from error
    except CheckpointException as error:
        if dist.get_rank() != 0:
            leave_telling_to_another()
            raise SystemExit(2) from error
        cause, _ = next(iter(error.failures.values()))
        raise DataError(f"{target} cannot be written: {reason_of(cause)}; {remedy}") from error


def load_checkpoint(
    args: Namespace,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
) -> int:
    """Load the latest checkpoint below `args.load`. Collective.

    Sets the consumed samples of `args`. With `--finetune` it loads only the weights.

    Returns:
        The iteration to continue from: 0 without a checkpoint, or with `--finetune`.

    Raises:
        DataError: The checkpoint is missing (if required), unreadable, of another model, or has
            optimizer state that does not fit these parallel sizes.
    """
    with agreed():
        source = _latest(args)
        if source is None:
            return 0
        _check_metadata(source)
        common = _opening(source / _COMMON, dist_checkpointing.load_common_state_dict, source)
        saved: Namespace = common.get("args") or Namespace()
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        with_optimizer, with_rng = _parts(args, saved, metadata, source)
    wanted = _sharded_state(
        chunks, optimizer if with_optimizer else None, metadata, is_loading=True
    )
    if with_rng:
        wanted["rng_state"] = _rng_state(args)
    with agreed():
        state = _reading(source, dist_checkpointing.load, wanted, str(source))
    for key, chunk in zip(_model_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(state.get(key, {}))  # empty chunks are not in a checkpoint
    if with_optimizer:
        if not optimizer.is_stub_optimizer:
            optimizer.load_state_dict(state["optimizer"])
        with agreed(), _same_plan(source):
            scheduler.load_state_dict(state["opt_param_scheduler"])
    elif args.fp16 or args.bf16:
        optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(state["rng_state"][0])
    iteration = 0
    if not args.finetune:
        iteration = int(state["iteration"])
        vars(args).update({name: getattr(saved, name, 0) for name in _COUNTERS})
    if dist.get_rank() == 0:
        logger.info("loaded %s, going on from iteration %d", source, iteration)
    dist.barrier()
    return iteration


@contextmanager
def _same_plan(source: Path) -> Iterator[None]:
    """Translate megatron.core's refusal of another learning-rate schedule."""
    try:
        yield
    except AssertionError as error:
        raise DataError(
            f"{source}: {reason_of(error)}; give --override-opt-param-scheduler to use the flags, "
            "or --use-checkpoint-opt-param-scheduler to use the saved settings"
        ) from error


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _model_keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _sharded_state(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    metadata: dict[str, Any],
    **optimizer_options: Any,
) -> dict[str, Any]:
    """Collect what this rank saves or loads of the weights and, if given, the optimizer."""
    metadata = {**metadata, "dp_cp_group": _replicas()}
    models = [chunk.sharded_state_dict(metadata=metadata) for chunk in unwrap_model(list(chunks))]
    state: dict[str, Any] = dict(zip(_model_keys(chunks), models, strict=True))
    if optimizer is not None and not optimizer.is_stub_optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(
            state, metadata=metadata, **optimizer_options
        )
    return state


def _latest(args: Namespace) -> Path | None:
    """Find the checkpoint that the tracker file points at."""
    root = Path(args.load)
    tracker = root / _TRACKER
    if not tracker.is_file():
        if args.exit_on_missing_checkpoint:
            raise DataError(f"--load {root}: no {_TRACKER} there; give the directory of --save")
        if dist.get_rank() == 0:
            logger.warning("--load %s: no checkpoint there yet, starting from random weights", root)
        return None
    step = tracker.read_text(encoding="ascii", errors="replace").strip()
    source = root / (f"iter_{int(step):07d}" if step.isdecimal() else shortened(step))
    is_known = dist_checkpointing.check_is_distributed_checkpoint
    if not step.isdecimal() or not _opening(source / CONFIG_FNAME, is_known, str(source)):
        raise DataError(
            f"{source}: no checkpoint of an iteration in format torch_dist; for another kind run "
            "Megatron-LM's own script (`megatron-ext upstream fetch`)"
        )
    return source


def _check_metadata(source: Path) -> None:
    """Read the index once before torch does, which would log a damaged one with a traceback."""
    if dist.get_rank() == 0:
        _opening(source / _METADATA, FileSystemReader(source).read_metadata)


def _opening(path: Path, load: Callable[..., _T], *args: Any) -> _T:
    """Call a function that reads one file of a checkpoint; translate its errors."""
    try:
        return load(*args)
    except _UNREADABLE as error:
        if refused := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise DataError(
                f"{path} contains {refused[1]}, which torch loads only from files that you trust; "
                "if you do, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 (Python 3.11.0 to 3.11.3 write "
                "enums as getattr)"
            ) from error
        raise DataError(
            f"{path} is damaged: {reason_of(error)}; restore it, or write the number of another "
            f"iteration into {path.parent.parent / _TRACKER}"
        ) from error


def _reading(source: Path, load: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Call a function of megatron.core that reads a checkpoint; translate its errors."""
    try:
        return load(*args)
    except _UNREADABLE as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # its text lists the whole checkpoint
            cause, _ = next(iter(error.failures.values()))
        raise DataError(
            f"{source} cannot be read into this model: {reason_of(cause)}; compare the flags with "
            "those of the run that saved it, or give another if it is damaged"
        ) from error


def _parts(
    args: Namespace, saved: Namespace, metadata: dict[str, Any], source: Path
) -> tuple[bool, bool]:
    """Return whether to load optimizer and random numbers, after checking that they fit."""
    if args.finetune:
        return False, False
    _check_same_model(args, saved, source)
    with_optimizer = not (args.no_load_optim or getattr(saved, "no_save_optim", False))
    if with_optimizer and args.use_distributed_optimizer:
        _check_optimizer_fits(args, saved, metadata, source)
    same_grid = all(getattr(saved, size, 1) == getattr(args, size) for size in _STAGE_ARGUMENTS[:2])
    with_rng = not (args.no_load_rng or getattr(saved, "no_save_rng", False))
    return with_optimizer, with_rng and same_grid


def _check_same_model(args: Namespace, saved: Namespace, source: Path) -> None:
    other = [
        f"{name} is {getattr(saved, name)} there and {getattr(args, name)} here"
        for name in _MODEL_ARGUMENTS
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if other:
        raise DataError(
            f"{source} is of another model: {', '.join(other)}; give the flags of the run that "
            "saved it, or another --load"
        )


def _check_optimizer_fits(
    args: Namespace, saved: Namespace, metadata: dict[str, Any], source: Path
) -> None:
    """Check optimizer state sharded along gradient buffers: it fits only identical buffers."""
    kind = metadata.get(_OPTIMIZER_TYPE)
    if kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    there, here = ([getattr(one, n, None) for n in _STAGE_ARGUMENTS] for one in (saved, args))
    # A schedule that folds the pipeline saves it in reshardable form.
    if kind is None or there != here or is_folded():
        raise DataError(
            f"{source}: its optimizer state fits only the stages that it was saved with, (TP, PP, "
            f"VPP, layout) = {there} under Megatron's own schedule, and this run has {here}; save "
            "with --dist-ckpt-optim-fully-reshardable to change them, or load the weights alone "
            "with --no-load-optim"
        )


def _rng_state(args: Namespace) -> ShardedObject:
    """Collect every generator's state under upstream's keys: stage and tensor rank."""
    states = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]
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


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
