"""Each row for machines without a CUDA device, and what upstream does without it."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_LOGGER = "megatron.core.tensor_parallel.random"


def tensor_to_host() -> None:
    import numpy as np
    import torch
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    splits = torch.tensor([2, 3])
    for move in (
        moe_utils.maybe_move_tensor_to_cpu,
        token_dispatcher.maybe_move_tensor_to_cpu,
    ):
        moved = move(splits, as_numpy=True)
        assert isinstance(moved, np.ndarray)
        assert moved.tolist() == [2, 3]
        assert isinstance(
            move(splits.float().requires_grad_(), as_numpy=True), np.ndarray
        )
        assert torch.equal(move(splits, record_stream=True), splits)
        assert move(None, as_numpy=True) is None
    with without("moe.tensor_to_host"):
        assert moe_utils.maybe_move_tensor_to_cpu(splits, as_numpy=True) is splits


def test_tensors_go_to_the_host() -> None:
    run_ranks(1, tensor_to_host)


def destroy_groups() -> None:
    from megatron.core import parallel_state
    from torch import distributed as dist

    dist.init_process_group("nccl")
    known = dist.distributed_c10d._world.pg_map
    have_einops = parallel_state.HAVE_EINOPS

    def once() -> int:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        opened = len(known)
        assert opened > 10
        parallel_state.destroy_model_parallel()
        return len(known)

    assert once() == 1  # the default group
    assert once() == 1
    left = [
        name
        for name, value in vars(parallel_state).items()
        if name.endswith(("_GROUP", "_GROUPS", "_RANKS", "_RANKS_WITH_CP", "_WITH_CP"))
        and value
    ]
    assert left == []
    assert parallel_state.HAVE_EINOPS is have_einops, "what is installed is no group"
    with without("parallel_state.destroy_groups"):
        assert once() > 10


def test_destroy_groups() -> None:
    run_ranks(2, destroy_groups)


def notices(patched: bool) -> list[str]:
    """Draw under a forked state; return what the tracker logs."""
    if not patched:
        with without("tensor_parallel.rng_notice"):
            return _draw()
    return _draw()


def _draw() -> list[str]:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger(_LOGGER).addHandler(Listener())
    start_parallel()
    with get_cuda_rng_tracker().fork():
        torch.rand(2)
    logging.getLogger(_LOGGER).warning("something else")
    return said


@pytest.mark.parametrize(("patched", "count"), [(True, 1), (False, 2)])
def test_only_the_notice_is_dropped(patched: bool, count: int) -> None:
    (said,) = run_ranks(1, notices, patched)
    assert said[-1] == "something else"
    assert len(said) == count


def dataset_helpers() -> None:
    from megatron.core.datasets import utils

    commands: list[object] = []

    def make(command: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess([], 2)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(subprocess, "run", make)
        utils.compile_helpers()
        assert commands == []
        with without("training_init.dataset_helpers"), pytest.raises(SystemExit):
            utils.compile_helpers()
        # Without the compiled module there is nothing to skip to.
        patching.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
        with pytest.raises(SystemExit):
            utils.compile_helpers()
    assert len(commands) == 2


def jit_fuser() -> None:
    from megatron.core import jit
    from megatron.core.fusions import fused_bias_gelu

    def function() -> None: ...

    ours = jit.jit_fuser
    assert ours(function) is function
    assert type(fused_bias_gelu.bias_gelu).__name__ == "function"
    with without("training_init.jit_fuser"):
        assert jit.jit_fuser not in (ours, jit.noop_decorator)


def scripts() -> None:
    from importlib.util import find_spec

    from megatron.training import initialize

    initialize._warmup_jit_function()
    with (
        without("training_init.jit_warmup"),
        pytest.raises(AssertionError, match="args"),
    ):
        initialize._warmup_jit_function()  # it would start: no arguments are set here
    if find_spec("megatron.legacy") is None:
        return  # from 0.17 on
    from megatron.legacy import fused_kernels

    fused_kernels.load(None)
    with without("training_init.fused_kernels"), pytest.raises((TypeError, OSError)):
        fused_kernels.load(None)


@pytest.mark.parametrize("case", [dataset_helpers, jit_fuser])
def test_what_is_compiled_before_training(case) -> None:
    run_ranks(1, case)


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_patches_on_the_training_package() -> None:
    run_ranks(1, scripts)
