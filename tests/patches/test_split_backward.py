"""Each patch of the table: it acts inside of `defer` only, and what upstream does without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_STAND_IN = """
class ops:
    def gmm(a, b, batch_sizes, trans_b=False):
        return "product"

    def permute(tokens):
        return "permuted"
"""

_ASK = """
import json
import megatron_ext
from megatron.core.transformer.moe import experts
from tests.pipelines import splits
rows = {row.id: row.state for row in megatron_ext.report()}
ops = experts.gg.ops
found = [rows["split_backward.grouped_experts"], ops.gmm(1, 2, 3), ops.permute(1)]
megatron_ext.deactivate()
import grouped_gemm
print(json.dumps([*found, experts.gg.ops is grouped_gemm.ops]))
"""


def outside_nothing_is_touched() -> None:
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import layers

    start_parallel()
    seen: list[Any] = []

    def apply(*args: Any) -> torch.Tensor:
        seen.append(args)
        return args[0]

    layers.LinearWithGradAccumulationAndAsyncCommunication.apply = apply
    x, weight, bias, buffer = torch.ones(2, 3), torch.ones(3, 3), torch.ones(3), []
    function = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce
    assert function is layers.linear_with_grad_accumulation_and_async_allreduce
    assert function(x, weight, bias, False, True, False, buffer, 5) is x
    assert all(a is b for a, b in zip(seen[0][:3], (x, weight, bias), strict=True))
    assert seen[0][3:6] == (False, True, False)
    assert seen[0][6] is buffer
    assert seen[0][7] == 5
    assert function.warned in {False, True}


def _leaves_weight(layer: Any) -> bool:
    import torch

    from tests.pipelines import splits

    layer.weight.grad = None
    with splits().defer(0, 0):
        layer(torch.ones(2, 1, 4, requires_grad=True))[0].sum().backward()
    splits().clear()
    return layer.weight.grad is None


def linear() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from torch.nn.init import ones_

    start_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    layer = ColumnParallelLinear(4, 4, config=config, init_method=ones_)
    assert _leaves_weight(layer)
    with without("split_backward.linear"):
        assert not _leaves_weight(layer)


def config() -> None:
    from importlib.machinery import ModuleSpec

    from megatron.core import utils
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.config import incompatible
    from megatron_ext.errors import ScheduleError
    from tests.pipelines import make_pipeline, use

    def make(**settings: Any) -> TransformerConfig:
        return TransformerConfig(
            num_layers=2, hidden_size=4, num_attention_heads=1, **settings
        )

    autocast = {"enable_autocast": True, "autocast_dtype": None}
    fused = {"gradient_accumulation_fusion": True, "add_bias_linear": False}
    incompatible.find_spec = lambda name: ModuleSpec(name, None)
    utils.is_te_min_version = lambda _version: True
    for name in (None, "1f1b"):
        use(None if name is None else make_pipeline(name, 2, 4))
        assert make(**autocast).enable_autocast
        assert not make(**fused).delay_wgrad_compute
    use(make_pipeline("zb-h1", 2, 4))
    with pytest.raises(ScheduleError, match="autocast"):
        make(**autocast)
    assert make(**fused).delay_wgrad_compute
    assert not make(**fused, transformer_impl="local").delay_wgrad_compute
    with without("split_backward.config"):
        assert not make(**fused).delay_wgrad_compute


def te_layers() -> None:
    from tests.pipelines import make_pipeline, use
    from tests.runtime.test_te_unsplit import LAYERS, install_layers

    install_layers()

    def are_on() -> list[bool]:
        return [layer(True).wgrad_store.enabled for layer in LAYERS.values()]

    for name in (None, "1f1b"):
        use(None if name is None else make_pipeline(name, 2, 4))
        assert are_on() == [True] * 4
    use(make_pipeline("zb-h1", 2, 4))
    assert are_on() == [False] * 4
    kinds = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
    for number, kind in enumerate(kinds):
        with without(f"split_backward.te_{kind}"):
            assert are_on() == [other == number for other in range(4)]


@pytest.mark.parametrize(
    "case", [outside_nothing_is_touched, linear, config, te_layers]
)
def test_patch(case) -> None:
    run_ranks(1, case)


def test_grouped_experts_where_the_library_is_installed(tmp_path: Path) -> None:
    if find_spec("megatron.core.transformer.moe.grouped_gemm_util") is None:
        pytest.skip("this release has no experts that use the library grouped_gemm")
    (tmp_path / "grouped_gemm.py").write_text(_STAND_IN)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "MEGATRON_EXT_DEVICE": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", _ASK],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [
        "installed",
        "product",
        "permuted",
        True,
    ]
