"""Silent faults of published reports that concern a pipeline, planted and located."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ext.tools.compare.locate import locate
from tests.ranks import run_ranks
from tests.tracing.recorded import Training, train, unchanged


def loaded_by_local_names(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Fill each stage's layers with the weights of the model's first ones (Megatron-LM#7452, 12).

    A sharded checkpoint that numbers layers within their stage, loaded with more stages, does that.
    """
    import torch

    from tests.runtime.capture import named_weights

    with torch.no_grad():
        for name, weight in named_weights(chunks):
            local = re.sub(
                r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) % 2}", name
            )
            if local != name and weight.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(local.encode()))
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return nullcontext()


def gradients_cleared_between_micro_batches(
    chunks: list[Any],
) -> AbstractContextManager[Any]:
    """Drop the gradients so far when the last micro-batch begins (Automodel#3530).

    There, stages were initialized again within the step, which resets gradients.
    """
    for chunk in chunks:
        forwards = 0

        def clear(module: Any, _args: Any) -> None:
            nonlocal forwards
            forwards += 1
            if forwards % 4 == 0:
                module.zero_grad_buffer()

        chunk.register_forward_pre_hook(clear)
    return nullcontext()


def _train_each(
    own: Training,
    faulty: dict[str, Training],
    faults: dict[str, Callable[[list[Any]], Any]],
) -> None:
    train(own)
    for name, training in faulty.items():
        train(training, faults[name])


@pytest.mark.short_s(8)
def test_published_faults_are_located(tmp_path: Path) -> None:
    faults = {
        "names": loaded_by_local_names,
        "cleared": gradients_cleared_between_micro_batches,
    }
    own = Training(str(tmp_path / "own"), num_steps=1)
    faulty = {
        name: Training(str(tmp_path / name), "1f1b", num_steps=1) for name in faults
    }
    run_ranks(2, _train_each, own, faulty, faults, timeout_s=280)
    names = locate(tmp_path / "own", tmp_path / "names")
    assert names is not None
    assert (names.iteration, names.kind, names.layer) == (0, "weights", 2)
    cleared = locate(tmp_path / "own", tmp_path / "cleared")
    assert cleared is not None
    assert (cleared.iteration, cleared.kind) == (1, "weight gradient")
    assert cleared.candidate is not None
    # The first stage begins its last micro-batch before the backward of the one before.
    assert (cleared.candidate.action, cleared.layer) == ("0B2", 1)


# -- faults of Megatron's that need tensor parallelism ---------------------------------------------


def _label_smoothing(_chunks: list[Any]) -> AbstractContextManager[Any]:
    """Smooth labels, with the means and the vocabulary of a shard (Megatron-LM#7452, 1)."""
    from megatron.core import tensor_parallel

    smoothed = partial(
        tensor_parallel.vocab_parallel_cross_entropy, label_smoothing=0.1
    )
    return mock.patch.object(tensor_parallel, "vocab_parallel_cross_entropy", smoothed)


def _gathered_logits(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Gather the logits before a loss that expects shards of them (Megatron-LM#7452, 2)."""
    from megatron.core.utils import unwrap_model

    def copy(_layer: Any, _args: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the output in new memory: the loss changes its input, and here that is a view."""
        logits, bias = output
        return logits.clone(), bias

    for chunk in chunks:
        output_layer = getattr(unwrap_model(chunk), "output_layer", None)
        if output_layer is not None:
            output_layer.gather_output = True
            output_layer.register_forward_hook(copy)
    return nullcontext()


def _load_shards(chunks: list[Any]) -> None:
    """Fill each rank's shards from whole weights, which are drawn by name."""
    import torch
    from megatron.core import parallel_state

    from tests.runtime.capture import named_weights

    num_shards = parallel_state.get_tensor_model_parallel_world_size()
    shard_index = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, weight in named_weights(chunks):
            shape = list(weight.shape)
            is_sharded = getattr(weight, "tensor_model_parallel", False)
            if is_sharded:
                shape[weight.partition_dim] *= num_shards
            seed = zlib.crc32(name.partition("@")[0].encode())
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(shape, generator=generator) * 0.1
            if is_sharded:
                whole = whole.chunk(num_shards, weight.partition_dim)[shard_index]
            weight.copy_(whole)


def _with_cross_attention() -> AbstractContextManager[Any]:
    """Add an attention to its own input to each layer, by Megatron's class for cross-attention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.attention import (
        CrossAttention,
        CrossAttentionSubmodules,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class AttentionToItself(CrossAttention):
        def forward(
            self, hidden_states: Any, attention_mask: Any, **keywords: Any
        ) -> Any:
            keywords["key_value_states"] = hidden_states
            return super().forward(hidden_states, attention_mask, **keywords)

    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.cross_attention = ModuleSpec(
        AttentionToItself,
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    spec.submodules.cross_attn_bda = get_bias_dropout_add
    return mock.patch.object(
        gpt_layer_specs, "get_gpt_layer_local_spec", return_value=spec
    )


def _another_group_of_cross_attention(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Sum the gradients of cross-attention's input over another group (Megatron-LM#7452, 6).

    Megatron builds the projections of queries, keys and values without the model's group. They use
    the default group, here that of a rank without a tensor-parallel peer.
    """
    import torch
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group, _ = torch.distributed.new_subgroups(1)
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if name.endswith(
                    ("cross_attention.linear_q", "cross_attention.linear_kv")
                ):
                    module.tp_group = group
    return nullcontext()


@dataclass(frozen=True)
class _TensorParallelFault:
    plant: Callable[[list[Any]], AbstractContextManager[Any]]
    first_tensor: str
    """The first tensor that differs; empty: none differs."""
    building: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Changes the model that is built."""


_TENSOR_PARALLEL_FAULTS = {
    "none": _TensorParallelFault(unchanged, ""),
    # The means of shards are near the mean of the whole, so the gradient shows it first.
    "label smoothing": _TensorParallelFault(
        _label_smoothing, "the gradient of the input of output_layer"
    ),
    "gathered logits": _TensorParallelFault(_gathered_logits, "the output of model"),
    "no fault of cross-attention": _TensorParallelFault(
        unchanged, "", _with_cross_attention
    ),
    "another group": _TensorParallelFault(
        _another_group_of_cross_attention,
        "the gradient of the input of layer 3, cross_attention",
        _with_cross_attention,
    ),
}


def _train_with_whole_weights(trainings: dict[str, list[Training]]) -> None:
    for name, runs in trainings.items():
        fault = _TENSOR_PARALLEL_FAULTS[name]

        @contextmanager
        def change(
            chunks: list[Any], fault: _TensorParallelFault = fault
        ) -> Iterator[None]:
            _load_shards(chunks)
            with fault.plant(chunks):
                yield

        for run in runs:
            with fault.building():
                train(run, change)


@pytest.mark.short_s(10)
def test_faults_that_both_runs_share_are_located_with_another_size(
    tmp_path: Path,
) -> None:
    """Megatron's own code has the faults: one tensor-parallel rank computes the right loss."""
    trainings = {}
    for name in _TENSOR_PARALLEL_FAULTS:
        whole = Training(
            str(tmp_path / f"{name} whole"), pipeline_ranks=4, world_size=4, num_steps=1
        )
        folder = str(tmp_path / f"{name} sharded")
        sharded = replace(whole, folder=folder, pipeline_ranks=2, tensor_ranks=2)
        trainings[name] = [whole, sharded]
    run_ranks(4, _train_with_whole_weights, trainings, timeout_s=280)
    for name, (whole, sharded) in trainings.items():
        difference = locate(Path(whole.folder), Path(sharded.folder))
        first_tensor = _TENSOR_PARALLEL_FAULTS[name].first_tensor
        if not first_tensor:
            assert difference is None, difference.sentence()
            continue
        assert difference is not None, name
        assert (difference.iteration, difference.tensor) == (1, first_tensor)
