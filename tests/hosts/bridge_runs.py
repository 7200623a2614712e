"""Trains ranks with Megatron-Bridge, using variations of the example's recipe."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from wrapt import FunctionWrapper, resolve_path

import megatron_ext
from megatron_ext.config import active
from megatron_ext.errors import EffectMissing, UserError
from tests.hosts import stand_ins

EXAMPLE = Path(__file__).parents[2] / "examples" / "bridge" / "tiny_gpt.py"


@dataclass
class Trained:
    """Observations of one rank."""

    losses: list[str] = field(default_factory=list)
    """Of each step, as hexadecimal numbers; where Bridge has none, `none`."""
    evaluated: list[str] = field(default_factory=list)
    schedule: str | None = None
    """Schedule in force in the last step; None: Bridge's own."""
    transport: str | None = None
    reordered: int = 0
    steps: int = 0
    """Number of steps run by our runtime."""


def example() -> ModuleType:
    """Import the example."""
    spec = importlib.util.spec_from_file_location("tiny_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _value_of(name: str, shape: torch.Size) -> torch.Tensor:
    seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def _same_embedding(weight: torch.Tensor) -> None:
    weight.data.copy_(_value_of("embedding", weight.shape))


def _fill(chunks: list[Any]) -> list[Any]:
    """Set each weight to values that depend on its place in the model, not on its rank.

    A tied copy of the embedding is left unchanged, because the code under test must fill it.
    """
    for chunk in chunks:
        for prefix, module in chunk.named_modules():
            number = getattr(module, "layer_number", None)
            if type(module).__name__ == "TransformerLayer":
                for name, weight in module.named_parameters():
                    if weight.dim() > 1:
                        weight.data.copy_(_value_of(f"{number} {name}", weight.shape))
            elif (
                prefix == "output_layer"
                and not chunk.share_embeddings_and_output_weights
            ):
                module.weight.data.copy_(_value_of("output", module.weight.shape))
    return chunks


def short_data() -> None:
    """Make Megatron's mock data small enough for a test."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000


def recipe(changes: Mapping[str, Any], *, builder: bool = False) -> Any:
    """Return the example's configuration with changes, and with weights equal on all ranks.

    Args:
        changes: Changed settings, by dotted name.
        builder: Whether the model is a `GPTModelConfig`, the newer form, with the same settings.
    """
    short_data()
    config = example().recipe()
    for name, value in changes.items():
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    config.model.embedding_init_method = _same_embedding
    if builder:
        config.model = _as_builder(config.model)
        config.model.pre_wrap_hooks.append(_fill)
    else:
        config.model.register_pre_wrap_hook(_fill)
    return config


def _as_builder(provider: Any) -> Any:
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig, local_layer_spec
    from megatron.bridge.models.transformer_config import TransformerConfig

    field_names = {f.name for f in fields(GPTModelConfig)} - {
        "transformer",
        "transformer_layer_spec",
    }
    inner = {
        f.name: getattr(provider, f.name) for f in fields(TransformerConfig) if f.init
    }
    outer = {
        name: getattr(provider, name) for name in field_names if hasattr(provider, name)
    }
    spec = local_layer_spec(provider)
    model_config = GPTModelConfig(
        transformer=TransformerConfig(**inner), transformer_layer_spec=spec, **outer
    )
    # 0.6.2 warms up with it and does not set it.
    model_config.transformer.seq_length = model_config.seq_length
    return model_config


def pretrain(config: Any, *callbacks: Any) -> Trained:
    """Train on this rank, and return the observations."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    trained = Trained()

    class Watch(Callback):
        def on_train_step_end(self, context: Any) -> None:
            trained.losses.append(_hex(context.loss_dict))
            _note(trained)

        def on_eval_end(self, context: Any) -> None:
            trained.evaluated.append(_hex(context.total_loss_dict))

    pretrain(config, forward_step, callbacks=[Watch(), *callbacks])
    return trained


def _hex(losses: Mapping[str, Any]) -> str:
    return float(losses["lm loss"]).hex() if "lm loss" in losses else "none"


def _note(trained: Trained) -> None:
    from megatron_ext.runtime import runtime

    configuration = active.active()
    if configuration is None:
        return
    chosen = configuration.pipeline or configuration.transport_only
    if chosen is not None:
        trained.transport = chosen.transport
    if configuration.pipeline is not None:
        measured, _ = runtime.totals()
        trained.schedule = configuration.pipeline.name
        trained.steps, trained.reordered = measured.steps, measured.out_of_order


Sizes = tuple[int, int, int] | None
"""Pipeline ranks, micro-batches and layers for `configure`; None: not passed."""


def configure(settings: Mapping[str, Any] | None, sizes: Sizes = None) -> None:
    """Call `megatron_ext.configure` with settings of a `PipelineConfig`; None: do not call it."""
    if settings is None:
        return
    names = ("pipeline_ranks", "num_microbatches", "num_layers")
    sizes_by_name = dict(zip(names, sizes or (), strict=False))
    megatron_ext.configure(megatron_ext.PipelineConfig(**settings), **sizes_by_name)


def train(
    changes: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    builder: bool = False,
    sizes: Sizes = None,
) -> Trained:
    """Train the example's recipe on this rank.

    Args:
        changes: Changes to the recipe, by dotted name.
        settings: Settings of a `PipelineConfig` for `configure`; None: it is not called.
        builder: See `recipe`.
        sizes: Sizes passed to `configure`.
    """
    stand_ins.install()
    config = recipe(changes, builder=builder)
    configure(settings, sizes)
    return pretrain(config)


def filled_from_hugging_face() -> list[str | None]:
    """Train as zb-v; return how the tied copies on this rank differ before Bridge fills them from
    weights of Hugging Face, and after that.
    """
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.training.callbacks import Callback

    from megatron_ext.runtime.folded import differing_copies

    told = []

    class OfNoModel(MegatronModelBridge):
        provider_bridge = mapping_registry = None

    class Import(Callback):
        def on_train_start(self, context: Any) -> None:
            with torch.no_grad():
                for weight in (
                    w for chunk in context.model for w in chunk.parameters()
                ):
                    if weight.shape[0] == 512:  # weights with the vocabulary's size
                        weight.random_()
            told.append(differing_copies(context.model))
            OfNoModel()._broadcast_shared_embeddings(context.model)
            told.append(differing_copies(context.model))

    stand_ins.install()
    configure({"schedule": "zb-v"})
    pretrain(recipe({}), Import())
    return told


def refused(
    changes: Mapping[str, Any], settings: Mapping[str, Any] | None, sizes: Sizes = None
) -> str:
    """Return why a training is rejected, after checking that it can be tried again."""
    stand_ins.install()
    config = recipe(changes)
    model = config.model
    before = {f.name: getattr(model, f.name) for f in fields(model)}
    configure(settings, sizes)
    with pytest.raises(UserError) as caught:
        pretrain(config)
    after = {f.name: getattr(model, f.name) for f in fields(model)}
    assert {name for name in before if before[name] is not after[name]} <= {
        "params_dtype"
    }
    assert (active.active() is None) == (
        settings is None
    )  # the request must still be in force
    return str(caught.value)


def failed(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the error that a training ends with."""
    with pytest.raises(UserError) as caught:
        train(changes, settings)
    return str(caught.value)


def train_twice() -> list[Trained]:
    """Train one configuration under zb-v, and again after `deconfigure` and `deactivate`."""
    stand_ins.install()
    config = recipe({})
    layout = config.model.pipeline_model_parallel_layout
    megatron_ext.configure(megatron_ext.PipelineConfig(schedule="zb-v"))
    trained = pretrain(config)
    megatron_ext.deconfigure()
    assert config.model.pipeline_model_parallel_layout is layout
    assert config.model.virtual_pipeline_model_parallel_size is None
    assert config.model._post_wrap_hooks == []
    trained_again = pretrain(config)
    return [trained, trained_again]


def undone() -> list[str]:
    """Return the patch targets that differ from before this package was active."""
    stand_ins.install()
    import megatron.bridge.training.pretrain  # noqa: F401

    from megatron_ext.hosts import bridge, bridge_weights

    patches = [*bridge.PATCHES, *bridge_weights.PATCHES]

    def found() -> dict[str, Any]:
        return {
            p.target: resolve_path(sys.modules[p.module], p.path)[2] for p in patches
        }

    patched = found()
    megatron_ext.deactivate()
    originals = found()
    megatron_ext.activate()
    again = found()
    megatron_ext.deactivate()
    wrong = [t for t in originals if isinstance(originals[t], FunctionWrapper)]
    wrong += [t for t in patched if not isinstance(patched[t], FunctionWrapper)]
    wrong += [t for t in again if not isinstance(again[t], FunctionWrapper)]
    return wrong + [t for t in originals if found()[t] is not originals[t]]


def train_without_hook() -> str:
    """Train under zb-v without filling the copy of the tied embedding; return the error."""
    stand_ins.install()
    import megatron.bridge.training.pretrain  # noqa: F401

    from megatron_ext.hosts import bridge

    bridge._tie = lambda chunks: chunks
    megatron_ext.configure(megatron_ext.PipelineConfig(schedule="zb-v"))
    config = recipe({})
    try:
        pretrain(config)
    except EffectMissing as error:
        return str(error)
    return "trained"


def run_example(*words: str) -> None:
    """Run the example's file as its documented command does."""
    stand_ins.install()
    short_data()
    sys.argv = ["tiny_gpt.py", *words]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
