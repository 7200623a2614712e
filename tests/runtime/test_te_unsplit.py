"""Transformer Engine's layers, built for split backward passes, under schedules that do not split.

The layers are the stand-ins of `test_te_layers`, in the place of Transformer Engine's classes.
"""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.runtime import toy
from tests.runtime.test_te_layers import _Layer

_MODULE = "transformer_engine.pytorch.module"
_MICROBATCHES = 4


class Linear(_Layer):
    """`transformer_engine.pytorch.Linear`."""

    def __init__(self, delay_wgrad_compute: bool) -> None:
        super().__init__(delay_wgrad_compute)


LAYERS: dict[str, type[_Layer]] = {
    f"{_MODULE}.linear": Linear,
    f"{_MODULE}.layernorm_linear": type("LayerNormLinear", (_Layer,), {}),
    f"{_MODULE}.layernorm_mlp": type("LayerNormMLP", (_Layer,), {}),
    f"{_MODULE}.grouped_linear": type("GroupedLinear", (_Layer,), {}),
}
"""Module -> its layer."""


class _OfMegatron(Linear):
    """`TELinear` of Megatron."""

    def __init__(self, config: Any) -> None:
        self.config = (
            config  # before the constructor of torch's modules, as in Megatron
        )
        super().__init__(delay_wgrad_compute=config.delay_wgrad_compute)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()


def _of_program(config: Any) -> Linear:
    """Build a layer as a program's own module does."""
    return Linear(delay_wgrad_compute=config.delay_wgrad_compute)


class _TransformerEngine:
    """Finds Transformer Engine; only the modules of layers contain anything."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_package = name == _MODULE or _MODULE.startswith(f"{name}.")
        if is_package or name in LAYERS:
            return ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]
        return None

    def create_module(self, _spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: Any) -> None:
        module.__version__ = "2.9.0"
        layer = LAYERS.get(module.__name__)
        if layer is not None:
            setattr(module, layer.__name__, layer)


def install_layers() -> None:
    """Install the stand-ins in this process, which is a rank and ends."""
    from megatron.core import utils
    from packaging.version import Version

    # Last, so that the hooks that patch modules still see the import.
    sys.meta_path.append(_TransformerEngine())  # type: ignore[arg-type]
    utils._te_version = Version("2.9.0")
    for name in LAYERS:
        import_module(name)


class _Stage(toy.Stage):
    """A stage with one of Transformer Engine's layers."""

    def __init__(self, config: Any, number: int, make_layer: Any) -> None:
        super().__init__(config, number, None)
        torch.manual_seed(number)
        self.layer = make_layer(config)

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        x = data if self.input is None else self.input
        rows = torch.tanh(x).flatten(0, 1)
        return super().forward(data) + self.layer(rows).view_as(x)


def _gradients(stage: _Stage) -> list[torch.Tensor]:
    """Run a step; return the gradients of the stage's own weight and of its layer's."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    stage.weight.grad = None
    stage.layer.weight.main_grad.zero_()
    get_forward_backward_func()(
        forward_step_func=toy.forward_step,
        data_iterator=toy.samples(_MICROBATCHES),
        model=stage,
        num_microbatches=_MICROBATCHES,
        seq_length=toy.LENGTH,
        micro_batch_size=toy.BATCH,
    )
    return [stage.weight.grad.clone(), stage.layer.weight.main_grad.clone()]


def _has_split() -> bool:
    from megatron_ext.config import active

    in_force = active.active()
    return in_force is not None and in_force.runtimes.splits.has_te_layers


def _configure(schedule: str) -> None:
    from megatron_ext import PipelineConfig, configure

    configure(
        PipelineConfig(schedule=schedule),
        pipeline_ranks=2,
        num_microbatches=_MICROBATCHES,
        num_layers=8,
    )


def steps_are_equal(order: str, make_layer: Any) -> list[bool]:
    """Run the words of an order; return for each of its steps whether its layer was split."""
    import torch.distributed as dist

    import megatron_ext

    install_layers()
    toy.start(2)
    number = dist.get_rank()
    expected = _gradients(_Stage(toy.config(), number, make_layer))
    assert all(gradient.any() for gradient in expected)
    config: Any = None
    stage: Any = None
    have_split = []
    for word in order.split():
        if word == "config":
            config = toy.config()
        elif word == "copy":
            config = copy.deepcopy(config)
        elif word == "build":
            stage = _Stage(config or toy.config(), number, make_layer)
        elif word in ("deconfigure", "deactivate", "activate"):
            getattr(megatron_ext, word)()
        elif word == "step":
            for gradient, whole in zip(_gradients(stage), expected, strict=True):
                assert torch.equal(gradient, whole), (word, have_split)
            have_split.append(_has_split())
        else:
            _configure(word)
    return have_split


_ORDERS = {
    "zb-h1 build deconfigure step zb-h1 step deconfigure step": [False, True, False],
    "zb-h1 build 1f1b step zb-h1 step 1f1b step": [False, True, False],
}
"""Words -> for each step, whether Transformer Engine's layer was split."""
_ORDERS_OF_MEGATRON = {
    "zb-h1 config copy deconfigure build step zb-h1 step": [False, True],
    "zb-h1 config 1f1b build step zb-h1 step": [False, True],
    "zb-h1 config deactivate build activate step": [False],
    # The settings that are restored also apply to the model that was built with them.
    "zb-h1 config build deactivate activate step zb-h1 step": [False, False],
}
"""The same for layers whose configuration says who made them defer."""


@pytest.mark.parametrize("order", [*_ORDERS, *_ORDERS_OF_MEGATRON])
def test_no_order_of_configurations_loses_weight_gradients(order: str) -> None:
    expected = (_ORDERS | _ORDERS_OF_MEGATRON)[order]
    assert run_ranks(2, steps_are_equal, order, _OfMegatron) == [expected] * 2


@pytest.mark.parametrize("order", list(_ORDERS))
def test_nor_does_it_lose_those_of_a_programs_own_layers(order: str) -> None:
    assert run_ranks(2, steps_are_equal, order, _of_program) == [_ORDERS[order]] * 2


def the_users_layers_keep_deferring() -> None:
    import torch.distributed as dist

    import megatron_ext

    install_layers()
    toy.start(2)
    config = toy.config()
    config.delay_wgrad_compute = True  # as with Megatron's expert communication overlap
    stage = _Stage(config, dist.get_rank(), _OfMegatron)
    store = stage.layer.wgrad_store
    queue, put = store.context, store.put

    def defers() -> bool:
        """Return whether the user's schedule finds each micro-batch in the layer's queue."""
        _, in_backward = _gradients(stage)
        assert not in_backward.any()
        assert store.context is queue
        for _ in range(_MICROBATCHES):
            stage.layer.backward_dw()
        assert queue.empty()
        return bool(stage.layer.weight.main_grad.any())

    assert defers()
    expected = stage.layer.weight.main_grad.clone()
    _configure("1f1b")
    assert defers()
    _configure("zb-h1")
    _, gradient = _gradients(stage)
    assert _has_split()
    assert torch.equal(gradient, expected)
    megatron_ext.deconfigure()
    assert store.put == put
    assert defers()
    assert torch.equal(stage.layer.weight.main_grad, expected)


def test_a_layer_that_the_user_made_defer_keeps_deferring() -> None:
    run_ranks(2, the_users_layers_keep_deferring)
