"""Hooks of a program that do not run in pairs are named."""

from __future__ import annotations

from typing import Any

from tests.patches.single import start_parallel
from tests.ranks import run_ranks
from tests.runtime.test_gradient_ways import Lines


def logged() -> list[str]:
    """Return what is logged before a program registers hooks, and after that."""
    import logging

    from megatron_ext.config import active
    from megatron_ext.features.pairs import skipped_hooks
    from tests.runtime import small_gpt

    def scale(*_: Any) -> None:
        """Change nothing."""

    start_parallel()
    lines = Lines()
    logging.getLogger(active.__name__).addHandler(lines)
    gathers = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }
    model = small_gpt.build(ddp=gathers)
    assert model.module.decoder.layers[0]._forward_pre_hooks, "of Megatron's DDP"
    skipped_hooks.log_skipped_hooks([model])
    decoder = model.module.decoder
    decoder.register_forward_hook(scale)
    decoder.layers[1].register_full_backward_hook(scale)
    decoder.layers[1].self_attention.register_forward_hook(scale)
    skipped_hooks.log_skipped_hooks([model])
    return lines.lines


def test_hooks_on_modules_that_run_in_parts_are_named() -> None:
    [[line]] = run_ranks(1, logged)
    assert line.startswith("hooks on decoder, decoder.layers.1 do not run: ")
