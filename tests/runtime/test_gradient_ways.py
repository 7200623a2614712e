"""Each way for a gradient to reach a weight: a split backward gives the bits of a whole one.

One process with one stage of two of Megatron's linear layers. A reference runs each backward whole,
as Megatron's own schedule does; its copy runs I, and W after the I of the next micro-batch. Both do
the same to their weights, their forwards and their losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch

# Here, though only ranks run them: mutants are of modules that this process imports.
from megatron_ext.runtime import split, split_linear  # noqa: F401
from tests.patches.single import start_parallel
from tests.ranks import run_ranks

_WIDTH = 8
_NUM_MICROBATCHES = 4
_NUM_STEPS = 3
_Forward = Callable[["Stage", torch.Tensor, int, int], torch.Tensor]


class Stage(torch.nn.Module):
    """Two of Megatron's linear layers, and one of torch's that holds a weight for some ways."""

    def __init__(
        self, dtype: torch.dtype, *, overrides: dict[str, Any] | None = None
    ) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=_WIDTH,
            num_attention_heads=1,
            use_cpu_initialization=True,
            params_dtype=dtype,
            **(overrides or {}),
        )
        torch.manual_seed(3)
        options = {"config": self.config, "init_method": torch.nn.init.normal_}
        self.first = ColumnParallelLinear(
            _WIDTH, _WIDTH, gather_output=False, **options
        )
        self.second = ColumnParallelLinear(
            _WIDTH, _WIDTH, gather_output=False, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)[0]))[0]


def _plain(stage: Stage, x: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
    return stage(x).float().square().mean()


class Way(NamedTuple):
    """What a user does to a stage."""

    forward: _Forward = _plain
    """Returns the loss of a micro-batch."""
    around_step: Callable[[Stage, int], Any] | None = None
    """Runs before each step; a generator goes on behind it."""
    prepare: Callable[[Stage], None] | None = None
    """Runs once, before DDP wraps the stage."""
    left_whole: frozenset[str] = frozenset()
    """The weights that the log names."""
    keeps_order: bool = True
    """Whether gradients are summed in the same order."""


_WAYS: dict[str, Way] = {}
_FIRST, _SECOND = "first.weight", "second.weight"


def _way(
    name: str, *left_whole: str, forward: bool = False, prepare: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        field = "around_step"
        if forward:
            field = "forward"
        if prepare:
            field = "prepare"
        _WAYS[name] = Way(**{field: function, "left_whole": frozenset(left_whole)})
        return function

    return add


_WAYS["plain"] = Way()


@_way("hook on a weight", _FIRST)
def _hook(stage: Stage, step: int) -> None:
    if step == 0:
        rows = torch.arange(_WIDTH)[:, None] >= 3
        stage.first.weight.register_hook(lambda gradient: gradient * rows)


@_way("hook after accumulation", _SECOND)
def _post_accumulate_hook(stage: Stage, step: int) -> None:
    if step == 0:

        def halve(weight: torch.Tensor) -> None:
            weight.grad.mul_(0.5)

        stage.second.weight.register_post_accumulate_grad_hook(halve)


@_way("hook for one step", _FIRST)
def _hook_for_one_step(stage: Stage, step: int) -> Iterator[None]:
    handle = None
    if step == 1:
        handle = stage.first.weight.register_hook(lambda gradient: gradient * 0.3)
    yield
    if handle is not None:
        handle.remove()


@_way("hook in a forward", _SECOND, forward=True)
def _hook_in_a_forward(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    if step == 1 and microbatch == 2:
        stage.second.weight.register_hook(lambda gradient: gradient * 0.3)
    return _plain(stage, x, step, microbatch)


@_way("hook on several weights", _FIRST, _SECOND)
def _multi_grad_hook(stage: Stage, step: int) -> None:
    if step:
        return
    seen: list[float] = []
    stage.seen = seen
    weights = [stage.first.weight, stage.second.weight]
    torch.autograd.graph.register_multi_grad_hook(
        weights,
        lambda gradients: seen.extend(g.float().norm().item() for g in gradients),
    )


@_way("functional.linear", _FIRST, forward=True)
def _functional_linear(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    hidden = stage.first(x)[0]
    again = torch.nn.functional.linear(torch.tanh(hidden), stage.first.weight)
    return stage.second(again)[0].float().square().mean()


@_way("matrix product before the layer", _FIRST, forward=True)
def _matmul(stage: Stage, x: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
    return _plain(stage, torch.tanh(x @ stage.first.weight), step, microbatch)


@_way("penalty in the loss", _SECOND, forward=True)
def _penalty(stage: Stage, x: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
    loss = _plain(stage, x, step, microbatch)
    return loss + 0.1 * stage.second.weight.float().square().sum()


@_way("penalty from one micro-batch on", _SECOND, forward=True)
def _late_penalty(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    run = _plain if (step, microbatch) < (1, 2) else _penalty
    return run(stage, x, step, microbatch)


@_way("layer used twice", forward=True)
def _twice(stage: Stage, x: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
    return _plain(stage, torch.tanh(stage.first(x)[0]), step, microbatch)


@_way("parametrization", prepare=True)
def _parametrize(stage: Stage) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 0.7

    torch.nn.utils.parametrize.register_parametrization(stage.first, "weight", Scaled())


@_way("one weight in two of Megatron's layers", prepare=True)
def _shared(stage: Stage) -> None:
    stage.second.weight = stage.first.weight


class _WithTorchsLayer(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.layer.weight = weight


def _share_with_torchs_layer(stage: Stage) -> None:
    stage.other = _WithTorchsLayer(stage.second.weight)


def _through_torchs_layer(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    return stage.other.layer(stage(x)).float().square().mean()


_WAYS["one weight in a layer of Megatron's and one of torch's"] = Way(
    forward=_through_torchs_layer,
    prepare=_share_with_torchs_layer,
    left_whole=frozenset({_SECOND}),
)


def _tie_embedding(stage: Stage) -> None:
    stage.embedding = torch.nn.Embedding(_WIDTH, _WIDTH)
    stage.embedding.weight = stage.second.weight


def _through_embedding(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    tokens = torch.arange(x.size(0) * x.size(1)).view(x.shape[:2]) % _WIDTH
    hidden = stage.embedding(tokens) + stage.embedding(tokens.flip(0))
    return stage.second(stage(x + hidden))[0].float().square().mean()


_WAYS["tied embedding, several uses"] = Way(
    forward=_through_embedding, prepare=_tie_embedding
)


@_way("functional_call with other weights", forward=True)
def _functional_call(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    weights = {name: 0.9 * weight for name, weight in stage.named_parameters()}
    return torch.func.functional_call(stage, weights, (x,)).float().square().mean()


@_way("inner gradient of an input", forward=True)
def _saliency(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    probe = x.detach().requires_grad_()
    (noise,) = torch.autograd.grad(stage(probe).float().sum(), probe)
    return _plain(stage, x + noise.sign(), step, microbatch)


@_way("inner gradient of a weight", forward=True)
def _adaptive_weight(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    output = stage(x).float()
    losses = output.square().mean(), output.abs().mean()
    norms = [
        torch.autograd.grad(loss, stage.second.weight, retain_graph=True)[0]
        .float()
        .norm()
        for loss in losses
    ]
    return losses[0] + (norms[0] / norms[1]).detach() * losses[1]


@_way("inner gradient through a retained graph", forward=True)
def _retained(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    hidden = stage.first(x)[0]
    loss = stage.second(torch.tanh(hidden))[0].float().square().mean()
    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    return loss * (1 + gradient.float().norm().detach())


@_way("gradient penalty", _FIRST, _SECOND, forward=True)
def _gradient_penalty(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    probe = x.detach().requires_grad_()
    output = stage(probe).float()
    (gradient,) = torch.autograd.grad(output.sum(), probe, create_graph=True)
    return output.square().mean() + gradient.float().square().sum()


def _inner_backward(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    (0.1 * stage(x).float().abs().mean()).backward()
    return _plain(stage, x, step, microbatch)


# It runs before the W of the micro-batches before.
_WAYS["inner backward"] = Way(_inner_backward, keeps_order=False)


class _Halved:
    """What hooks on saved tensors do to compress them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype = tensor.to(torch.float16), tensor.dtype

    def whole(self) -> torch.Tensor:
        return self.tensor.to(self.dtype)


@_way("hooks on saved tensors", forward=True)
def _compressed(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(_Halved, _Halved.whole):
        return _plain(stage, x, step, microbatch)


@_way("saved tensors on the host", forward=True)
def _save_on_cpu(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return _plain(stage, x, step, microbatch)


def _checkpointed(use_reentrant: bool, forward: _Forward) -> _Forward:
    def run(stage: Stage, x: torch.Tensor, step: int, microbatch: int) -> torch.Tensor:
        def recomputed(x: torch.Tensor) -> torch.Tensor:
            return forward(stage, x, step, microbatch)

        x = x.detach().requires_grad_()
        return torch.utils.checkpoint.checkpoint(
            recomputed, x, use_reentrant=use_reentrant
        )

    return run


for _use_reentrant in (False, True):
    _kind = "reentrant" if _use_reentrant else "non-reentrant"
    _WAYS[f"{_kind} checkpoint"] = Way(_checkpointed(_use_reentrant, _plain))


def _saliency_while_recomputing(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    with (
        torch.enable_grad()
    ):  # the first forward of a reentrant checkpoint runs without
        return _saliency(stage, x, step, microbatch)


_WAYS["inner gradient in a recomputed forward"] = Way(
    _checkpointed(True, _saliency_while_recomputing)
)


@_way("frozen for one step")
def _frozen(stage: Stage, step: int) -> Iterator[None]:
    # With its bias: Megatron's layer computes none for a frozen weight.
    stage.first.requires_grad_(step != 1)
    yield
    stage.first.requires_grad_(True)


@_way("frozen after the forward", forward=True)
def _frozen_after_forward(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    stage.first.requires_grad_(True)
    loss = _plain(stage, x, step, microbatch)
    # DDP's hook raises an error for such a weight.
    if microbatch % 2 and not hasattr(stage.first.weight, "main_grad"):
        stage.first.requires_grad_(False)
    return loss


class _Recomputed(torch.autograd.Function):
    """Runs a stage again in its backward and returns the gradients of weights, too."""

    @staticmethod
    def forward(
        ctx: Any, stage: Stage, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.stage = stage
        ctx.save_for_backward(x, *weights)
        return stage(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.stage(leaf)
        return (None, *torch.autograd.grad(output, (leaf, *weights), gradient))


@_way("function that returns gradients of weights", _FIRST, _SECOND, forward=True)
def _reversible(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    x = x.detach().requires_grad_()
    recomputed = _Recomputed.apply(stage, x, stage.first.weight, stage.second.weight)
    return (recomputed + stage(x)).float().square().mean()


@_way("sparse lookup", _FIRST, forward=True)
def _sparse_lookup(
    stage: Stage, x: torch.Tensor, step: int, microbatch: int
) -> torch.Tensor:
    tokens = (
        torch.arange(x.size(0) * x.size(1)).view(x.shape[:2]) + microbatch
    ) % _WIDTH
    rows = torch.nn.functional.embedding(tokens, stage.first.weight, sparse=True)
    return _plain(stage, x + rows, step, microbatch)


@_way("pruned", prepare=True)
def _prune(stage: Stage) -> None:
    from torch.nn.utils import prune

    mask = torch.arange(_WIDTH * _WIDTH).view(_WIDTH, _WIDTH) % 3 != 0
    prune.custom_from_mask(stage.first, "weight", mask)


# -- the steps -------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """How gradients are kept."""

    uses_ddp: bool
    overlaps: bool = False
    dtype: torch.dtype = torch.float32


_SETTINGS = {
    "no DDP": Setting(uses_ddp=False),
    "DDP": Setting(uses_ddp=True),
    "overlap": Setting(uses_ddp=True, overlaps=True),
    "no DDP, bf16": Setting(uses_ddp=False, dtype=torch.bfloat16),
    "overlap, bf16": Setting(uses_ddp=True, overlaps=True, dtype=torch.bfloat16),
}


class Trained:
    """A stage, wrapped if so, that one way is done to."""

    def __init__(self, way: Way, setting: Setting) -> None:
        self.way, self.setting = way, setting
        self.stage = Stage(setting.dtype)
        if way.prepare is not None:
            way.prepare(self.stage)
        self.wrapped: Any = self.stage
        if setting.uses_ddp:
            from megatron.core.distributed import (
                DistributedDataParallel,
                DistributedDataParallelConfig,
            )

            config = DistributedDataParallelConfig(overlap_grad_reduce=setting.overlaps)
            self.wrapped = DistributedDataParallel(
                self.stage.config, config, self.stage
            )

    def loss(self, step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + microbatch)
        x = torch.randn(5, 2, _WIDTH, generator=generator).to(self.setting.dtype)
        return self.way.forward(self.stage, x, step, microbatch)

    def begin_step(self) -> None:
        if self.setting.uses_ddp:
            self.wrapped.zero_grad_buffer()
        else:
            self.stage.zero_grad()

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Do the way's part; with DDP, in `no_sync`, as the runtime does."""
        with ExitStack() as stack:
            if self.setting.uses_ddp:
                stack.enter_context(self.wrapped.no_sync())
            behind = None
            if self.way.around_step is not None:
                behind = self.way.around_step(self.stage, step)
            if behind is not None:
                next(behind)
            yield
            if behind is not None:
                next(behind, None)

    def gradients(self) -> dict[str, torch.Tensor]:
        kept = "main_grad" if self.setting.uses_ddp else "grad"
        return {
            name: getattr(parameter, kept).clone()
            for name, parameter in self.stage.named_parameters()
            if getattr(parameter, kept) is not None
        }


def _whole_step(trained: Trained, step: int) -> list[float]:
    losses = []
    trained.begin_step()
    with trained.around_step(step):
        for microbatch in range(_NUM_MICROBATCHES):
            loss = trained.loss(step, microbatch)
            losses.append(loss.item())
            loss.backward()
    return losses


def _split_step(trained: Trained, step: int) -> list[float]:
    from tests.pipelines import splits

    losses = []
    trained.begin_step()
    splits().register_modules(0, trained.wrapped)
    with trained.around_step(step):
        for microbatch in range(_NUM_MICROBATCHES):
            loss = trained.loss(step, microbatch)
            losses.append(loss.item())
            with splits().defer(0, microbatch):
                loss.backward()
            if microbatch:
                splits().run(0, microbatch - 1)
        splits().run(0, _NUM_MICROBATCHES - 1)
    return losses


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _check(way: Way, setting: Setting) -> None:
    from tests.pipelines import use

    use(None)  # a fresh split
    log, handler = logging.getLogger("megatron_ext.config.active"), Lines()
    log.addHandler(handler)
    reference, deferring = Trained(way, setting), Trained(way, setting)
    for step in range(_NUM_STEPS):
        assert _split_step(deferring, step) == _whole_step(reference, step), (
            f"losses of step {step}"
        )
        expected, gradients = reference.gradients(), deferring.gradients()
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            if way.keeps_order:  # by bytes: zeros of both signs are equal otherwise
                same = (
                    gradients[name].view(torch.uint8).equal(gradient.view(torch.uint8))
                )
            else:
                same = torch.allclose(gradients[name], gradient, rtol=1e-2, atol=1e-2)
            assert same, f"{name} in step {step}"
    assert getattr(deferring.stage, "seen", None) == getattr(
        reference.stage, "seen", None
    )
    log.removeHandler(handler)
    named = [word.rstrip(",:") for line in handler.lines for word in line.split()]
    for name in (_FIRST, _SECOND):
        assert named.count(name) == (name in way.left_whole), handler.lines


def _failure(way: Way, setting: Setting) -> str | None:
    try:
        _check(way, setting)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def failures(setting: Setting) -> dict[str, str | None]:
    """Return what fails, by the name of the way."""
    start_parallel()
    by_name = {name: _failure(way, setting) for name, way in _WAYS.items()}
    return {name: failure for name, failure in by_name.items() if failure is not None}


@pytest.mark.parametrize("setting", _SETTINGS.values(), ids=_SETTINGS)
def test_every_way_gives_the_bits_of_a_whole_backward(setting: Setting) -> None:
    assert run_ranks(1, failures, setting) == [{}]


def freed_inputs() -> list[bool]:
    """Return for each layer whether the input has been freed after a forward that recomputes."""
    from torch.multiprocessing.reductions import StorageWeakRef

    from tests.pipelines import splits, use

    start_parallel()
    use(None)
    stage = Stage(torch.float32)
    splits().register_modules(0, stage)
    storages: list[StorageWeakRef] = []

    def remember(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        storages.append(StorageWeakRef(inputs[0].untyped_storage()))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return stage(2 * x)

    for layer in (stage.first, stage.second):
        layer.register_forward_pre_hook(remember)
    x = torch.ones(5, 2, _WIDTH, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    freed = [storage.expired() for storage in storages]
    with splits().defer(0, 0):
        output.sum().backward()
    splits().run(0, 0)
    return freed


def test_a_checkpoint_frees_the_inputs_of_split_layers() -> None:
    assert run_ranks(1, freed_inputs) == [[True, True]]
