r"""Transformer Engine's Python layers on a machine without a GPU: what `split` relies on.

Only their kernels need a GPU. The layers are built on the CPU, and their autograd functions and
`backward_dw` run with torch's matrix products and norm instead of the kernels. Without the library,
these tests are skipped. To build its torch extension without a GPU (half an hour on two cores),
install `nvcc`, the cuDNN wheel and the wheels of the other two parts, then run this in the unpacked
source:

    export NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=2
    CPATH=$CUDA_HOME/include python setup.py build_ext -i

Copy `transformer_engine_torch*.so` to `site-packages`, and add the `lib` folders of torch and of
the `nvidia` wheels to `LD_LIBRARY_PATH`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.patches.split_backward import prepare_config
from megatron_ext.runtime.split import SplitBackward
from megatron_ext.runtime.split_te import PostponingLayers, overwrites_first
from tests.features.slices.test_sliced_compute import worst_by
from tests.pipelines import make_pipeline, use

te = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)

_BUILT = {
    "delay_wgrad_compute": True,
    "fuse_wgrad_accumulation": True,
    "device": "cpu",
    "params_dtype": torch.float32,
}


@pytest.fixture(autouse=True)
def cuda_seems_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let constructors, which refuse machines without a GPU, build layers on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    *_: Any,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    grad: bool = False,
    **_settings: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Compute what `general_gemm` would: of matrices in columns, so the second one is the left."""
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    found = {
        "TN": lambda: left @ right.t(),
        "NN": lambda: left @ right,
        "NT": lambda: left.t() @ right,
    }
    result = found[layout]()
    if bias is not None and not grad:
        result = result + bias
    if layout != "NT":
        result = result.view(*b.shape[:-1], result.shape[-1])
    if out is not None:
        result = out.add_(result) if accumulate else out.copy_(result)
    return result, left.sum(0) if grad and bias is not None else None, None, None


def _matrices(operand: Any) -> list[torch.Tensor]:
    """Return the matrices of a list, or of a grouped tensor of the library's."""
    if isinstance(operand, list | tuple):
        return [*operand]
    rows = operand.rowwise_data.view(-1, operand.logical_shape[-1])
    whole = [len(rows) // operand.num_tensors] * operand.num_tensors
    return [
        *rows.split(
            whole if operand.first_dims is None else operand.first_dims.tolist()
        )
    ]


def _grouped_product(
    a: Any, b: Any, out: Any, *_: Any, **settings: Any
) -> tuple[Any, ...]:
    """Compute what `general_grouped_gemm`, or the one for grouped tensors, would."""
    outputs = _matrices(out)
    if settings.get("single_output"):
        outputs = [*outputs[0].split(settings["m_splits"])]
    kept = {
        name: settings[name] for name in ("layout", "accumulate") if name in settings
    }
    for left, right, into in zip(_matrices(a), _matrices(b), outputs, strict=True):
        _product(left, right, out=into, **kept)
    return out, [None] * len(outputs), None


class _OnGpu(torch.Tensor):
    """Counts of tokens that seem to lie on a GPU."""

    device = torch.device("cuda")


def _offsets(
    counts: torch.Tensor, _device: Any, strides: list[int], **_: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    counts = counts.as_subclass(torch.Tensor)
    sums = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return counts, tuple(sums * stride for stride in strides)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)


def _norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    wanted, shape = [True, True, True], [x.shape[-1]]
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, shape, mean, deviation, weight, weight, wanted
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put torch's products and norm in place of the library's kernels."""
    from transformer_engine.pytorch.module import (
        _common,
        grouped_linear,
        layernorm_linear,
        linear,
    )

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor"):
        monkeypatch.setattr(grouped_linear, name, _grouped_product)
    monkeypatch.setattr(
        grouped_linear, "is_module_grouped_tensor_path_supported", lambda *_: True
    )
    monkeypatch.setattr(grouped_linear.tex, "splits_to_offsets_multi", _offsets)
    for module in (linear, layernorm_linear):
        monkeypatch.setattr(module, "general_gemm", _product)
    monkeypatch.setattr(_common.tex, "layernorm_fwd", _norm)
    monkeypatch.setattr(layernorm_linear.tex, "layernorm_bwd", _norm_backward)


def _layers(**settings: Any) -> dict[str, Any]:
    """Build one layer of each kind, eight wide."""
    given = {**_BUILT, "bias": False, **settings}
    return {
        "Linear": te.Linear(8, 8, **given),
        "LayerNormLinear": te.LayerNormLinear(8, 8, **given),
        "LayerNormMLP": te.LayerNormMLP(8, 8, **given),
        "GroupedLinear": te.GroupedLinear(2, 8, 8, **given),
    }


def _queue(name: str, layer: Any, done: list[str], microbatch: int) -> None:
    """Queue what a backward of this layer would: its operands, and the product of them."""

    def product(*_: Any) -> tuple[Any, ...]:
        done.append(f"{name} {microbatch}")
        return (None, [None] * 2, None) if name == "GroupedLinear" else (None, None)

    for _ in range(2 if name == "LayerNormMLP" else 1):
        layer.wgrad_store.put([torch.ones(1)] * 3, product)


def _registered(model: torch.nn.Module) -> SplitBackward:
    split = SplitBackward()
    split.register_modules(0, model)
    return split


def test_they_postpone_only_where_told() -> None:
    layers = _layers()
    split = _registered(torch.nn.ModuleDict(layers))
    stores = [layer.wgrad_store for layer in layers.values()]
    assert not any(store.delay_wgrad_compute() for store in stores)
    with split.defer(0, 0):
        assert all(store.delay_wgrad_compute() for store in stores)
    assert not any(store.delay_wgrad_compute() for store in stores)


def test_under_a_schedule_that_splits_they_are_built_switched_off() -> None:
    use(make_pipeline("zb-h1", 2, 4))
    for name, layer in _layers().items():
        assert layer.wgrad_store.context is not None, name
        assert not layer.wgrad_store.delay_wgrad_compute(), name


def test_their_backward_dw_computes_a_micro_batch_in_the_order_of_its_backward() -> (
    None
):
    layers, done = _layers(), []
    split = _registered(torch.nn.ModuleDict(layers))
    for microbatch in range(2):
        with split.defer(0, microbatch):
            for name, layer in layers.items():
                _queue(name, layer, done, microbatch)
    assert split.pending() == [(0, 0), (0, 1)]
    remaining: list[int] = []
    for microbatch in (1, 0):
        done.clear()
        with split.reporting(lambda weights: remaining.append(len(weights))):
            split.run(0, microbatch)
        assert list(dict.fromkeys(done)) == [f"{name} {microbatch}" for name in layers]
        assert len(done) == 5, "the network has two weights"
    assert remaining == [6, 5, 4, 2, 0] * 2
    assert not split.pending()


@pytest.mark.parametrize(
    ("settings", "postpone"),
    [
        (
            {"bias": True, "return_bias": True},
            {"Linear", "LayerNormLinear", "GroupedLinear"},
        ),
        ({"bias": True}, set()),
        (
            {"bias": False},
            {"Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"},
        ),
    ],
    ids=["bias by Megatron", "bias of its own", "no bias"],
)
def test_layers_that_add_their_bias_stay_whole(
    settings: dict[str, Any], postpone: set[str]
) -> None:
    layers = _layers(**settings)
    with _registered(torch.nn.ModuleDict(layers)).defer(0, 0):
        found = {
            n for n, layer in layers.items() if layer.wgrad_store.delay_wgrad_compute()
        }
    assert found == postpone


def test_a_bias_that_megatron_adds_keeps_its_gradient() -> None:
    layer = te.Linear(8, 8, **_BUILT, bias=True, return_bias=True)
    split = _registered(torch.nn.ModuleDict({"one": layer}))
    with split.defer(0, 0):
        layer.wgrad_store.put([torch.ones(1)], lambda _: (None, torch.ones(8)))
    split.run(0, 0)
    assert layer.bias.grad is None


def test_no_layer_overwrites_first_before_megatron_says_which_micro_batch_is() -> None:
    assert not overwrites_first(torch.nn.ModuleDict(_layers()))


class _Experts(torch.nn.Module):
    """Two layers of grouped experts, as Megatron calls them; the second expert gets no tokens."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            te.GroupedLinear(3, 8, 8, **given) for _ in range(2)
        )
        self.is_grouped = given.get("use_grouped_tensor", False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts: Any = torch.tensor([4, 0, 6])
        counts = counts.as_subclass(_OnGpu) if self.is_grouped else counts
        first, second = self.experts
        return second(first(x.view(10, 8), counts), counts).view(x.shape)


# With or without accumulation fusion, and how the library multiplies and holds experts.
_KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "unfused": {"fuse_wgrad_accumulation": False},
    "grouped": {"use_grouped_tensor": True},
    "grouped, unfused": {"use_grouped_tensor": True, "fuse_wgrad_accumulation": False},
    "one parameter": {"use_grouped_tensor": True, "single_grouped_weight": True},
    "one parameter, unfused": {
        "use_grouped_tensor": True,
        "single_grouped_weight": True,
        "fuse_wgrad_accumulation": False,
    },
}


def _stage(kind: str, *, delay: bool, by_ddp: bool = True) -> torch.nn.Sequential:
    """Build a stage whose gradients go to `main_grad`, as Megatron's DDP keeps them, or `grad`."""
    of_experts = {"delay_wgrad_compute": delay, "bias": False, **_KINDS[kind]}
    given = {**_BUILT, "fuse_wgrad_accumulation": True, **of_experts}
    of_experts = dict(given)
    for name in ("use_grouped_tensor", "single_grouped_weight"):
        given.pop(name, None)
    torch.manual_seed(1)
    stage = torch.nn.Sequential(
        te.LayerNormLinear(8, 16, **given),
        te.Linear(16, 8, **given),
        _Experts(**of_experts),
    )
    for parameter in stage.parameters() if by_ddp else ():
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
        # As DDP: it hooks the node that autograd reaches without a gradient, too.
        expanded = parameter.expand_as(parameter)
        parameter.node = expanded.grad_fn.next_functions[0][0]
        parameter.node.register_hook(lambda *_, parameter=parameter: _hook(parameter))
    return stage


def _hook(parameter: torch.nn.Parameter) -> None:
    """Do as DDP's hook."""
    assert parameter.grad is not None
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def _loss(stage: torch.nn.Module, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return stage(torch.randn(5, 2, 8, generator=generator)).square().sum()


def _gradients(stage: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    found = {n: getattr(p, "main_grad", p.grad) for n, p in stage.named_parameters()}
    return {
        name: None if grad is None else grad.clone() for name, grad in found.items()
    }


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kind", "by_ddp"),
    [
        (kind, by_ddp)
        for kind in _KINDS
        for by_ddp in (True, False)
        if by_ddp or "un" in kind
    ],
)
def test_each_w_adds_what_the_backward_of_its_micro_batch_left(
    kind: str, by_ddp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    whole, stage = (_stage(kind, delay=delay, by_ddp=by_ddp) for delay in (False, True))
    split = _registered(stage)
    for microbatch in range(3):
        with split.defer(0, microbatch):
            loss = _loss(stage, microbatch)
        with split.defer(0, microbatch):
            loss.backward()
    assert split.pending() == [(0, 0), (0, 1), (0, 2)]
    in_i = {
        name
        for name, grad in _gradients(stage).items()
        if grad is not None and grad.any()
    }
    is_whole = kind == "one parameter, unfused"
    experts = {f"2.experts.{layer}.weight" for layer in range(2)} if is_whole else set()
    assert in_i == {"0.layer_norm_weight", "0.layer_norm_bias", *experts}
    for microbatch in range(3):
        split.run(0, microbatch)
        _loss(whole, microbatch).backward()
        expected = _gradients(whole)
        for name, found in _gradients(stage).items():
            assert name in in_i or torch.equal(found, expected[name]), name
    assert all(
        torch.equal(*both)
        for both in zip(
            _gradients(stage).values(), _gradients(whole).values(), strict=True
        )
    )


class _FromPacked:
    """Fills up sequences, `[t, ...]` to `[b, s, ...]`: a kernel of the library."""

    @staticmethod
    def apply(packed: torch.Tensor, sums: torch.Tensor, longest: int) -> torch.Tensor:
        parts = packed.split(sums.diff().tolist())
        edges = [0] * (2 * packed.dim() - 1)
        return torch.stack(
            [
                torch.nn.functional.pad(part, (*edges, longest - len(part)))
                for part in parts
            ]
        )


class _ToPacked:
    """The way back."""

    @staticmethod
    def apply(filled: torch.Tensor, sums: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.cat(
            [row[:n] for row, n in zip(filled, sums.diff().tolist(), strict=True)]
        )


def worst_of_slices(name: str) -> float:
    """Return the worst difference of gradients of slices under the attention that needs no kernel.

    In a process of its own, which it changes.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import (
        backends,
        utils,
    )

    from tests.features.slices.test_sliced_compute import MODELS, worst_difference
    from tests.runtime import te_stand_in

    for norm in ("LayerNorm", "RMSNorm"):
        setattr(te, norm, te_stand_in._norm(getattr(torch.nn, norm)))
    torch.Tensor.is_cuda = True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: torch.device("cpu")
    backends.ConvertTHDtoBSHD, backends.ConvertBSHDtoTHD = _FromPacked, _ToPacked
    utils.get_attention_backend = lambda _: (
        False,
        None,
        False,
        None,
        True,
        [False, False, True],
    )
    return worst_difference(MODELS[name] | {"te": True, "rotary": "packed" in name})


_SLICES = """
import sys
import megatron_ext
from tests.runtime.test_real_te_layers import worst_of_slices
print("worst", worst_of_slices(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["tied", "latent", "packed"])
def test_their_attention_takes_slices(name: str) -> None:
    assert worst_by(_SLICES, name) < 2e-6


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make this process Megatron's only rank."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_all_weights_of_megatrons_layer_postpone() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
        add_bias_linear=False,
        transformer_impl="transformer_engine",
    )
    prepare_config(config)
    layer = build_module(get_gpt_layer_with_transformer_engine_spec(), config=config)
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    postponing = PostponingLayers(
        layer, lambda *_: None, may_wait=lambda _weights: True
    ).layers
    found = {
        names[id(p)] for each in postponing for p in each.parameters(recurse=False)
    }
    assert found >= {name for name in names.values() if name.endswith(".weight")}
    assert overwrites_first(layer)
