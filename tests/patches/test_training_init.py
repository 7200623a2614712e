"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks


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
    from megatron.legacy import fused_kernels
    from megatron.training import initialize

    fused_kernels.load(None)
    initialize._warmup_jit_function()
    with without("training_init.fused_kernels"), pytest.raises((TypeError, OSError)):
        fused_kernels.load(None)
    with without("training_init.jit_warmup"), pytest.raises(AssertionError, match="args"):
        initialize._warmup_jit_function()  # it would start: no arguments are set here


@pytest.mark.parametrize("case", [dataset_helpers, jit_fuser])
def test_patch(case) -> None:
    run_ranks(1, case)


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_patches_on_the_training_package() -> None:
    run_ranks(1, scripts)
