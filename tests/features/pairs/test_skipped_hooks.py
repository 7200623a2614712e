"""What a program attaches to modules and does not run in pairs is named."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.patches.single import start_parallel
from tests.ranks import require_training, run_ranks
from tests.runtime.capture import GPT, PP2
from tests.runtime.test_equality import EP2, PAIRED, PAIRS
from tests.runtime.test_gradient_ways import Lines

GATHERS = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}


def logged() -> list[str]:
    """Return what is logged before each of several steps, between which a program changes."""
    import functools
    import logging

    import torch

    from megatron_ext.config import active
    from megatron_ext.features.pairs.skipped_hooks import SkippedHooks
    from tests.runtime import small_gpt

    def scale(*_: Any) -> None:
        """Change nothing."""

    start_parallel()
    lines = Lines()
    logging.getLogger(active.__name__).addHandler(lines)
    model = small_gpt.build(ddp=GATHERS)
    decoder = model.module.decoder
    assert decoder.layers[0]._forward_pre_hooks, "of Megatron's DDP"
    skipped_hooks = SkippedHooks()

    def step() -> None:
        skipped_hooks.log([model])

    def around(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapped

    step()
    decoder.register_forward_hook(scale)
    decoder.layers[1].register_full_backward_hook(scale)
    decoder.layers[1].self_attention.register_forward_hook(scale)
    step()
    step()
    decoder.layers[0].register_forward_pre_hook(around(scale), with_kwargs=True)
    decoder.layers[1].register_forward_hook(scale)
    model.register_forward_hook(scale)
    step()
    decoder.layers[0].forward = around(decoder.layers[0].forward)
    step()
    forward = type(decoder).forward
    type(decoder).forward = around(forward)
    step()
    type(decoder).forward = forward
    handle = torch.nn.modules.module.register_module_forward_hook(scale)
    step()
    step()
    handle.remove()
    call = torch.nn.Module.__call__
    torch.nn.Module.__call__ = around(call)  # type: ignore[method-assign]
    step()
    step()
    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    return lines.lines


def test_what_is_attached_to_modules_that_run_in_parts_is_named_once() -> None:
    """Also if a program attaches it after the first step."""
    beginnings = (
        "hooks on decoder, decoder.layers.1 do not run: ",
        "hooks on DistributedDataParallel, decoder.layers.0 do not run: ",
        "the program's own functions do not run (forward of decoder.layers.0 (",
        "the program's own functions do not run (forward of TransformerBlock (",
        "hooks on all modules (logged.<locals>.scale) do not run on ",
        "the program's own functions do not run (__call__ of DistributedDataParallel (",
    )
    [lines] = run_ranks(1, logged)
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)
    if sys.version_info >= (3, 11):
        assert "(logged.<locals>.around.<locals>.wrapped)" in lines[2]


def trained(argv: list[str]) -> list[str]:
    """Return what is logged in a training whose program adds a hook after the first step."""
    import logging

    from megatron.core.utils import unwrap_model

    from megatron_ext.config import active
    from megatron_ext.features.pairs.pair_steps import PairSteps
    from tests.runtime.capture import run_here

    lines = Lines()
    logging.getLogger(active.__name__).addHandler(lines)
    compute = PairSteps.compute
    num_steps = 0

    def compute_and_count(feature: PairSteps, step: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            decoder = unwrap_model(step.call.chunks[0]).decoder
            decoder.layers[0].register_forward_hook(lambda *_: None)
        return compute(feature, step)

    PairSteps.compute = compute_and_count  # type: ignore[method-assign]
    assert run_here("gpt", argv).pairs > 0
    assert num_steps == 3
    return [line for line in lines.lines if line.startswith("hooks on ")]


@pytest.mark.slow
def test_hooks_from_after_the_first_step_are_named_in_a_training() -> None:
    require_training()
    schedule, model = PAIRED["1f1b"]
    flags = f"{GPT}{PP2}{EP2}{model}--global-batch-size 16 {PAIRS}"
    flags += f"--pipeline-schedule {schedule} "
    for lines in run_ranks(4, trained, flags.split(), timeout_s=240):
        [line] = lines
        assert line.startswith("hooks on decoder.layers.0 do not run: ")
