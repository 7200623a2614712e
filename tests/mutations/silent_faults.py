"""Faults that change numbers without an error, each with the place where it must be located.

Some are from `mutants.py`; the others represent bugs reported in pipelines. All run in the
trainings of `tests/tracing/recorded.py`, several in one world of ranks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

from megatron_ext.config.pipeline_config import DynamicOrder
from tests.mutations.mutants import MUTANTS
from tests.tracing import recorded
from tests.tracing.recorded import Change, unchanged

_COMPUTE = "megatron_ext.runtime.compute"
_EXECUTOR = "megatron_ext.runtime.executor.Executor"
_RECORDED = "tests.tracing.recorded"


@dataclass(frozen=True)
class Setting:
    """A training in which a fault is planted."""

    schedule: str
    world_size: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    reduction: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    num_layers: int = 4
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Training` that only the candidate has."""


_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_RECOMPUTE = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
SETTINGS = {
    "1f1b": Setting("1f1b"),
    "zb-h1": Setting("zb-h1"),
    "zb-v": Setting("zb-v"),
    "dropout": Setting(
        "zb-h1", settings={"microbatch_rng": True}, model=_DROPOUT, seed=7
    ),
    "recompute": Setting(
        "zb-h1",
        settings={"microbatch_rng": True},
        model={**_DROPOUT, **_RECOMPUTE},
        seed=7,
    ),
    "replicas": Setting("zb-h1", world_size=4),
    "overlap": Setting("zb-h1", world_size=4, reduction={"overlap_grad_reduce": True}),
    "dynamic": Setting("zb-v", settings={"dynamic": DynamicOrder()}, seed=7),
    "bitpipe": Setting(
        "bitpipe",
        world_size=4,
        num_layers=8,
        shape={"pipeline_ranks": 4, "num_microbatches": 8},
    ),
    "fewer replicas": Setting(
        "1f1b", world_size=4, shape={"pipeline_ranks": 4, "num_microbatches": 8}
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault, with the place where it must be located."""

    name: str
    setting: str
    plant: Change
    kind: str
    layer: int | None = None
    module: str = ""
    """Start of the module's or parameter's name."""
    action: str = ""
    """Action of the candidate; empty between actions."""
    iteration: int = 1
    reference: Change = unchanged
    """Change to plant in the reference run."""


# -- how faults are planted ------------------------------------------------------------------------


def layer_of(chunks: list[Any], number: int) -> Any:
    """Return a layer by its number in the model; None: another rank has it."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for chunk in chunks:
        for module in chunk.modules():
            if (
                isinstance(module, TransformerLayer)
                and module.layer_number == number + 1
            ):
                return module
    return None


def at_output(
    number: int, path: str, change: Callable[[Any], Any], microbatch: int | None = None
) -> Change:
    """Change the output of a layer or a part of it, for one micro-batch or all."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()

        def hook(_module: Any, _args: Any, output: Any) -> Any:
            if microbatch not in (None, layer.current_microbatch):
                return None
            if isinstance(output, tuple):
                return change(output[0]), *output[1:]
            return change(output)

        (layer.get_submodule(path) if path else layer).register_forward_hook(hook)
        return nullcontext()

    return plant


def at_gradient(number: int, path: str, microbatch: int) -> Change:
    """Change the last bit of the input gradient of a layer or a part of it."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()

        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            tensor = kwargs.get("hidden_states", args[0] if args else None)
            if layer.current_microbatch == microbatch:
                tensor.register_hook(last_bit)

        module = layer.get_submodule(path) if path else layer
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return nullcontext()

    return plant


def last_bit(tensor: Any) -> Any:
    """Change one element by about one unit in the last place."""
    import torch

    factors = torch.ones_like(tensor)
    factors.reshape(-1)[7] += 2.0**-22
    return tensor * factors


def replaced(target: str, make: Callable[[Any], Any]) -> Change:
    """Replace an attribute of a module or class with the result of `make`."""

    def plant(_chunks: list[Any]) -> AbstractContextManager[Any]:
        path, _, name = target.rpartition(".")
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError:
            module, _, class_name = path.rpartition(".")
            owner = getattr(importlib.import_module(module), class_name)
        return patch.object(owner, name, make(getattr(owner, name)))

    return plant


def together(*changes: Change) -> Change:
    """Apply several changes."""

    @contextmanager
    def plant(chunks: list[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change(chunks))
            yield

    return plant


def text(name: str) -> Change:
    """Change the package as a mutant of `mutants.py` does."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]

    @contextmanager
    def plant(_chunks: list[Any]) -> Iterator[None]:
        module = importlib.import_module(mutant.module)
        source = inspect.getsource(module)
        assert source.count(mutant.text) == 1
        codes = _functions(
            compile(source.replace(mutant.text, mutant.instead), "mutant", "exec")
        )
        functions = [(function, function.__code__) for function in _live(module)]
        for function, code in functions:
            function.__code__ = codes.get(function.__qualname__, code)
        try:
            yield
        finally:
            for function, code in functions:
                function.__code__ = code

    return plant


def _functions(code: CodeType, prefix: str = "") -> dict[str, CodeType]:
    """Return the functions of a module and its classes, by qualified name."""
    functions = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = prefix + constant.co_name
            functions[name] = constant
            is_class = not constant.co_flags & inspect.CO_OPTIMIZED
            if is_class:
                functions |= _functions(constant, f"{name}.")
    return functions


def _live(module: Any) -> list[FunctionType]:
    """Return the functions of a module and the methods of its classes."""
    values = list(vars(module).values())
    for value in list(values):
        if isinstance(value, type) and value.__module__ == module.__name__:
            values += vars(value).values()
    functions = [
        inspect.unwrap(value) for value in values if isinstance(value, FunctionType)
    ]
    return [
        function for function in functions if function.__module__ == module.__name__
    ]


# -- messages --------------------------------------------------------------------------------------


def swapped(kind: str, stage: int) -> Change:
    """Send two micro-batches' messages to a stage under each other's names."""

    def make(deliver: Any) -> Any:
        def delivering(executor: Any, exchange: Any, tensors: Any) -> None:
            outputs = []
            for transfer in exchange.outputs:
                message = transfer.message
                if (message.kind, message.stage) == (
                    kind,
                    stage,
                ) and message.microbatch < 2:
                    message = message._replace(microbatch=1 - message.microbatch)
                outputs.append(transfer._replace(message=message))
            deliver(executor, exchange._replace(outputs=outputs), tensors)

        return delivering

    return replaced(f"{_EXECUTOR}._deliver", make)


def sent(
    kind: str, stage: int, change: Callable[[Any, list[Any]], Any], *numbers: int
) -> Change:
    """Change a message to a stage; the function also gets the earlier messages to it."""

    def make(deliver: Any) -> Any:
        before: list[Any] = []

        def delivering(executor: Any, exchange: Any, tensors: Any) -> None:
            changed = list(tensors)
            for index, transfer in enumerate(exchange.outputs):
                message = transfer.message
                if (message.kind, message.stage) != (kind, stage):
                    continue
                original = tensors[index].detach().clone()
                if message.microbatch in numbers:
                    changed[index] = change(original, before)
                before.append(original)
            deliver(executor, exchange, changed)

        return delivering

    return replaced(f"{_EXECUTOR}._deliver", make)


def _previous(_tensor: Any, before: list[Any]) -> Any:
    return before[-1]


def _in_half_precision(tensor: Any, _before: list[Any]) -> Any:
    return tensor.bfloat16().float()


def _zero(tensor: Any, _before: list[Any]) -> Any:
    return tensor * 0


# -- weights and their gradients -------------------------------------------------------------------


def parameter_of(chunks: list[Any], number: int | None, name: str) -> Any:
    """Return a parameter of a layer, or of the model by the end of its name; None: not here."""
    if number is not None:
        layer = layer_of(chunks, number)
        return None if layer is None else layer.get_parameter(name)
    for chunk in chunks:
        for path, parameter in chunk.named_parameters():
            if path.endswith(name):
                return parameter
    return None


def not_updated(number: int | None, name: str, factor: float) -> Change:
    """Update a weight with only a fraction of its gradient, in the first step."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        stale = parameter_of(chunks, number, name)
        update = recorded.update

        def updating(weight: Any, step: int) -> None:
            if weight is stale and step == 0:
                weight.data -= factor * weight.main_grad
            else:
                update(weight, step)

        return patch.object(recorded, "update", updating)

    return plant


def begun_with(number: int, name: str) -> Change:
    """Start with a different weight."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        parameter = parameter_of(chunks, number, name)
        if parameter is not None:
            parameter.data.view(-1)[3] += 1e-6
        return nullcontext()

    return plant


def stale_in_forward(number: int, name: str) -> Change:
    """Compute the second step's forwards with the first step's weight."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()
        parameter = layer.get_parameter(name)
        stale = parameter.data.clone()

        def hook(module: Any, _args: Any) -> None:
            module.current = parameter.data
            parameter.data = stale

        layer.register_forward_pre_hook(hook)
        layer.register_forward_hook(
            lambda module, _args, _output: setattr(parameter, "data", module.current)
        )
        return nullcontext()

    return plant


def with_hook(number: int, name: str, hook: Callable[[Any], Any]) -> Change:
    """Give a weight a hook on its gradient."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        parameter = parameter_of(chunks, number, name)
        if parameter is not None:
            parameter.register_hook(hook)
        return nullcontext()

    return plant


def with_other_use(number: int, name: str) -> Change:
    """Make the output of a layer depend on one of its weights a second time."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()
        weight = layer.get_parameter(name)
        return at_output(number, "", lambda output: output + weight.sum(0))(chunks)

    return plant


def with_saliency(number: int) -> Change:
    """Make a layer differentiate its MLP inside of each forward, which adds to no gradient."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        import torch

        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()

        def hook(mlp: Any, args: Any) -> Any:
            probe = args[0].detach().requires_grad_()
            with torch.enable_grad():  # the first forward of a checkpoint runs without
                output, _bias = mlp.linear_fc1(probe)
                [gradient] = torch.autograd.grad(output.sum(), probe)
            return (args[0] + 1e-3 * gradient, *args[1:])

        layer.mlp.register_forward_pre_hook(hook)
        return nullcontext()

    return plant


def at_w(stage: int, microbatch: int, change: Callable[[Any, Any], Any]) -> Change:
    """Change a W: the function gets the waiting gradients, by weight, and what computes them."""

    def make(run: Any) -> Any:
        def running(splits: Any, *key: int) -> None:
            if key == (stage, microbatch):
                waiting = splits._waiting.pop(key)
                change(waiting, splits._compute)
            else:
                run(splits, *key)

        return running

    return replaced("megatron_ext.runtime.split.SplitBackward.run", make)


def _skipped(_waiting: Any, _compute: Any) -> None:
    pass


def _twice(waiting: Any, compute: Any) -> None:
    compute({key: list(gradients) for key, gradients in waiting.items()})
    compute(waiting)


def _without_the_last(waiting: Any, compute: Any) -> None:
    *all_but_last, _last = waiting
    compute({key: waiting[key] for key in all_but_last})


def _overwrites(waiting: Any, compute: Any) -> None:
    for gradients in waiting.values():
        gradients[0].weights[0].main_grad.zero_()
    compute(waiting)


def before_reduction(
    number: int | None, name: str, factor: float, replica: int | None = None
) -> Change:
    """Scale a gradient just before the reduction, on one replica or on all."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        config = get_model_config(chunks[0])
        finalize = config.finalize_model_grads_func
        parameter = parameter_of(chunks, number, name)

        def finalizing(*args: Any, **kwargs: Any) -> None:
            is_here = replica in (None, parallel_state.get_data_parallel_rank())
            if parameter is not None and is_here:
                parameter.main_grad.mul_(factor)
            finalize(*args, **kwargs)

        config.finalize_model_grads_func = finalizing
        return nullcontext()

    return plant


# -- data, the loss, random numbers ----------------------------------------------------------------


def on_replica(number: int, change: Change) -> Change:
    """Plant a fault in one replica."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        from megatron.core import parallel_state

        is_here = parallel_state.get_data_parallel_rank() == number
        return change(chunks) if is_here else nullcontext()

    return plant


def _reading_twice(sample: Any) -> Any:
    return lambda number: sample(3 if number == 5 else number)


def with_loss(term: float, lost_of: int | None = None, factor: float = 1.0) -> Change:
    """Add a term to the loss, except for one micro-batch."""

    def make(_loss: Any) -> Any:
        count = 0

        def loss(losses: Any) -> tuple[Any, float]:
            nonlocal count
            share = 0.0 if count == lost_of else term
            count += 1
            return factor * losses.mean() + share * (
                losses**2
            ).mean(), losses.mean().item()

        return loss

    return replaced(f"{_RECORDED}.loss", make)


def _with_other_labels(model: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is not None:
            kwargs["labels"] = kwargs["labels"].roll(1, 1)
        return model(self, *args, **kwargs)

    return forward


def _with_other_positions(model: Any) -> Any:
    def forward(
        self: Any, tokens: Any, positions: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return model(self, tokens, positions.flip(-1), *args, **kwargs)

    return forward


def unmasked(number: int, microbatch: int | None = None) -> Change:
    """Make a layer attend to later tokens."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is None:
            return nullcontext()

        def hook(_module: Any, args: Any, kwargs: Any) -> Any:
            if microbatch not in (None, layer.current_microbatch):
                return None
            kwargs["attention_mask"] = kwargs["attention_mask"] & False
            return args, kwargs

        layer.register_forward_pre_hook(hook, with_kwargs=True)
        return nullcontext()

    return plant


def drawing_for(stage: int, microbatch: int, instead: int) -> Change:
    """Draw another micro-batch's random numbers."""

    def make(rng: Any) -> Any:
        def drawing(of_stage: int, number: int) -> Any:
            is_other = (of_stage, number) == (stage, microbatch)
            return rng(of_stage, instead if is_other else number)

        return drawing

    return replaced(f"{_COMPUTE}.rng_of_this_step", make)


def _recomputing_with_other_numbers(set_states: Any) -> Any:
    import torch

    def setting(*states: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            set_states(*states)

    return setting


def norm_with(number: int, eps: float) -> Change:
    """Give the first norm of a layer a different epsilon."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        if layer is not None:
            layer.input_layernorm.eps = eps
        return nullcontext()

    return plant


def overwritten_input(number: int, microbatch: int, stage: int) -> Change:
    """Overwrite the saved input of a layer's MLP after the forward."""

    def plant(chunks: list[Any]) -> AbstractContextManager[Any]:
        layer = layer_of(chunks, number)
        saved_inputs: list[Any] = []
        if layer is not None:
            layer.mlp.register_forward_pre_hook(
                lambda _module, args: (
                    saved_inputs.append(args[0])
                    if layer.current_microbatch == microbatch
                    else None
                )
            )

        def make(backward: Any) -> Any:
            def running(
                compute: Any, of_stage: int, number: int, *args: Any, **kw: Any
            ) -> Any:
                if (of_stage, number) == (stage, microbatch) and saved_inputs:
                    saved_inputs.pop().data.mul_(2)
                return backward(compute, of_stage, number, *args, **kw)

            return running

        return replaced(f"{_COMPUTE}.StageCompute.backward", make)(chunks)

    return plant


_FC1, _FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
_QKV = "self_attention.linear_qkv.weight"
_GPT = "megatron.core.models.gpt.GPTModel"


def _double(gradient: Any) -> Any:
    return 2 * gradient


def _ignored(_gradient: Any) -> None:
    return None


FAULTS = (
    # An element of an output, by a last bit.
    Fault("output of layer 0", "zb-h1", at_output(0, "", last_bit, 2), "forward", 0, "", "0F2"),
    Fault("output of MLP 3", "zb-h1", at_output(3, "mlp", last_bit, 0), "forward", 3, "mlp", "1F0"),
    Fault("output of attention 2", "zb-h1", at_output(2, "self_attention", last_bit, 3),
          "forward", 2, "self_attention", "1F3"),
    Fault("output of layer 1", "zb-v", at_output(1, "", last_bit, 1), "forward", 1, "", "1F1"),
    Fault("output of MLP 2", "zb-v", at_output(2, "mlp", last_bit, 2), "forward", 2, "mlp", "2F2"),
    # An element of a gradient, by a last bit.
    Fault("gradient of layer 3", "zb-h1", at_gradient(3, "", 0), "backward", 3, "", "1I0"),
    Fault("gradient of MLP 2", "zb-h1", at_gradient(2, "mlp", 1), "backward", 2, "mlp", "1I1"),
    Fault("gradient of attention 0", "1f1b", at_gradient(0, "self_attention", 3),
          "backward", 0, "self_attention", "0B3"),
    Fault("gradient of layer 1", "zb-v", at_gradient(1, "", 2), "backward", 1, "", "1I2"),
    Fault("gradient of MLP 3", "zb-v", at_gradient(3, "mlp", 1), "backward", 3, "mlp", "3I1"),
    # Messages.
    Fault("swapped activations", "zb-h1", swapped("F", 1), "forward", 2, "", "1F0"),
    Fault("swapped gradients", "zb-h1", swapped("B", 0), "backward", 1, "", "0I0"),
    Fault("swapped activations of 1f1b", "1f1b", swapped("F", 1), "forward", 2, "", "1F0"),
    Fault("swapped gradients of 1f1b", "1f1b", swapped("B", 0), "backward", 1, "", "0B0"),
    Fault("an activation sent twice", "zb-v", sent("F", 1, _previous, 2), "forward", 1, "", "1F2"),
    Fault("a gradient sent twice", "zb-v", sent("B", 0, _previous, 2), "backward", 0, "", "0I2"),
    Fault("activations in half precision", "zb-h1", sent("F", 1, _in_half_precision, 0, 1, 2, 3),
          "forward", 2, "", "1F0"),
    Fault("gradients in half precision", "1f1b", sent("B", 0, _in_half_precision, 0, 1, 2, 3),
          "backward", 1, "", "0B0"),
    Fault("a gradient of zeros", "zb-h1", sent("B", 0, _zero, 3), "backward", 1, "", "0I3"),
    # Layers.
    Fault("no mask in layer 1", "zb-h1", unmasked(1), "forward", 1, "self_attention", "0F0"),
    Fault("no mask in layer 3", "zb-v", unmasked(3, 2), "forward", 3, "self_attention", "3F2"),
    Fault("a layer that does nothing", "zb-h1", at_output(1, "", lambda output: output * 0),
          "forward", 1, "", "0F0"),
    Fault("rolled attention", "zb-v", at_output(0, "self_attention", lambda out: out.roll(1, 0)),
          "forward", 0, "self_attention", "0F0"),
    Fault("another epsilon", "zb-h1", norm_with(2, 1e-2), "forward", 2, "self_attention", "1F0"),
    Fault("an input overwritten before W", "zb-h1", overwritten_input(1, 1, 0),
          "weight gradient", 1, _FC1, "0W1"),
    # Weights.
    Fault("a stale weight", "zb-h1", not_updated(2, _FC1, 0.0), "weights", 2, _FC1),
    Fault("another learning rate", "zb-v", not_updated(0, _QKV, 0.11), "weights", 0, _QKV),
    Fault("a stale embedding", "1f1b", not_updated(None, "word_embeddings.weight", 0.0),
          "weights", None, "embedding.word_embeddings"),
    Fault("another weight to begin with", "zb-h1", begun_with(3, _FC2), "weights", 3, _FC2,
          iteration=0),
    Fault("another weight to begin with, folded", "zb-v", begun_with(1, _QKV), "weights", 1, _QKV,
          iteration=0),
    Fault("forwards with a stale weight", "zb-h1", stale_in_forward(1, _QKV),
          "forward", 1, "self_attention", "0F0", iteration=2),
    # Gradients of weights.
    Fault("a hook that does nothing", "zb-h1", with_hook(1, _FC1, _ignored),
          "weight gradient", 1, _FC1, "0I0", reference=with_hook(1, _FC1, _double)),
    Fault("a W that is skipped", "zb-h1", at_w(0, 1, _skipped), "weight gradient", 1, _FC2, "0W1"),
    Fault("a W that runs twice", "zb-h1", at_w(0, 2, _twice), "weight gradient", 1, _FC2, "0W2"),
    Fault("a W without its last weight", "zb-v", at_w(2, 1, _without_the_last),
          "weight gradient", 2, _QKV, "2W1"),
    Fault("a W that overwrites", "zb-v", at_w(1, 3, _overwrites),
          "weight gradient", 1, _FC2, "1W3"),
    Fault("a reduced gradient that is scaled", "zb-h1", before_reduction(3, _QKV, 0.5),
          "reduced gradient", 3, _QKV),
    Fault("the gradient of the embedding is lost", "zb-v",
          before_reduction(None, "word_embeddings.weight", 0.0),
          "reduced gradient", None, "embedding.word_embeddings"),
    # Data and the loss.
    Fault("other labels", "zb-h1", replaced(f"{_GPT}.forward", _with_other_labels),
          "forward", None, "model", "1F0"),
    Fault("other positions", "zb-v", replaced(f"{_GPT}.forward", _with_other_positions),
          "forward", None, "embedding", "0F0"),
    Fault("a term of the loss is lost", "zb-h1", with_loss(0.0), "backward", None, "model", "1I0",
          reference=with_loss(1e-3)),
    Fault("a term of one loss is lost", "zb-v", with_loss(1e-3, lost_of=2),
          "backward", None, "model", "3I2", reference=with_loss(1e-3)),
    Fault("a scaled loss", "1f1b", with_loss(0.0, factor=0.25), "backward", None, "model", "1B0"),
    # Random numbers.
    Fault("dropout of another micro-batch", "dropout", drawing_for(1, 2, 3),
          "forward", 2, "self_attention", "1F2"),
    Fault("dropout of another micro-batch, first stage", "dropout", drawing_for(0, 1, 0),
          "forward", None, "embedding", "0F1"),
    Fault("recomputation with other random numbers", "recompute",
          replaced("megatron.core.tensor_parallel.random._set_all_rng_states",
                   _recomputing_with_other_numbers), "backward", 3, "", "1I0"),
    # Replicas.
    Fault("a micro-batch read twice on one replica", "replicas",
          on_replica(1, replaced(f"{_RECORDED}.sample", _reading_twice)),
          "forward", None, "embedding", "0F2"),
    Fault("a micro-batch lost on one replica", "replicas",
          on_replica(1, with_loss(0.0, factor=0.0)), "backward", None, "model", "1I0"),
    Fault("a gradient that one replica lacks", "replicas", before_reduction(2, _FC1, 0.0, 1),
          "reduced gradient", 2, _FC1),
    Fault("a gradient reduced twice", "replicas", before_reduction(1, _FC2, 2.0),
          "reduced gradient", 1, _FC2),
    Fault("a gradient divided by another number of micro-batches", "fewer replicas",
          with_loss(0.0, factor=2.0), "backward", None, "model", "3B0"),
    # Mutants of the package.
    Fault("gradients are reduced one action too early", "overlap",
          text("gradients are reduced one action too early"),
          "weight gradient", None, "output_layer", "1W2"),
    Fault("an inner backward leaves gradients to W", "recompute",
          together(with_saliency(1), text("any backward inside of I leaves gradients to W")),
          "weight gradient", 1, _FC1, "0W0", reference=with_saliency(1)),
    Fault("a gradient of another use is lost", "zb-h1",
          together(with_other_use(1, _FC1), text("a gradient of another use is lost")),
          "weight gradient", 1, _FC1, "0W0", reference=with_other_use(1, _FC1)),
)  # fmt: skip
