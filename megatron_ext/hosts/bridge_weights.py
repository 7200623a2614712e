"""Moves weights between Hugging Face and folded pipelines through Megatron-Bridge.

Bridge identifies a weight by its name in the whole model and converts only one weight per name on
each rank. In a folded pipeline, the first and the last stage share a rank, which then holds two
copies of the word embedding. With multi-token prediction, both copies have the same name.

One rule applies to all copies on a rank: the first stage's copy is authoritative. An import writes
to it and then copies it to the later chunks. An export reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.config import active
from megatron_ext.patches.point import Args, Call, Kwargs, PatchTable, by_name

if TYPE_CHECKING:
    import torch

_MODEL_BRIDGE = "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge"

PATCHES = PatchTable(feature="Megatron-Bridge", when=active.is_folded)


@dataclass(frozen=True)
class _LaterCopy:
    """A weight that is a copy of a weight in an earlier chunk on the same rank."""

    name: str
    """Name of the parameter in both chunks, without the names of wrappers."""
    chunk_index: int
    weight: torch.nn.Parameter
    first_chunk_index: int
    """Index of the earlier chunk."""
    first_module: torch.nn.Module
    """Module in the earlier chunk that owns the weight."""
    first_weight: torch.nn.Parameter


def _later_copies(chunks: Sequence[torch.nn.Module]) -> Iterator[_LaterCopy]:
    """Yield the weights on this rank that are copies of weights in earlier chunks."""
    from megatron.core.utils import unwrap_model

    models = unwrap_model(list(chunks))
    # name of a parameter -> index of the first chunk that has it
    first_chunk_of: dict[str, int] = {}
    for chunk_index, model in enumerate(models):
        for name, weight in model.named_parameters():
            # Skip layers: each is on only one stage, but every chunk numbers its layers
            # from 0.
            if "layers." in name:
                continue
            first_chunk_index = first_chunk_of.setdefault(name, chunk_index)
            if first_chunk_index == chunk_index:
                continue
            module_path, _, attribute = name.rpartition(".")
            first_module = models[first_chunk_index].get_submodule(module_path)
            yield _LaterCopy(
                name=name,
                chunk_index=chunk_index,
                weight=weight,
                first_chunk_index=first_chunk_index,
                first_module=first_module,
                first_weight=getattr(first_module, attribute),
            )


def _chunks(call: Call, args: Args, kwargs: Kwargs) -> list[torch.nn.Module]:
    """Return the model that a Bridge method converts, as a list of chunks."""
    model = by_name(call, args, kwargs)["megatron_model"]
    if isinstance(model, list):
        return model
    return [model]


@PATCHES.row("bridge.conversion_tasks", f"{_MODEL_BRIDGE}.build_conversion_tasks")
@PATCHES.row("bridge.quantized_tasks", f"{_MODEL_BRIDGE}.build_export_fp8_tasks")
def _convert_first_copies(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> list[Any]:
    """Bridge converts the last copy on a rank, but an import must write to the first copy, and an
    export must read it.
    """
    chunks = _chunks(call, args, kwargs)
    later_copies = {id(copy.weight): copy for copy in _later_copies(chunks)}
    tasks: list[Any] = call(*args, **kwargs)
    for index, task in enumerate(tasks):
        if task is None:  # Bridge has no Hugging Face name for the weight
            continue
        # Compare by identity: the task of a quantized weight may hold its raw data instead.
        copy = later_copies.get(id(task.param_weight))
        if copy is not None:
            tasks[index] = replace(
                task,
                vp_stage=copy.first_chunk_index,
                megatron_module=copy.first_module,
                param_weight=copy.first_weight,
            )
    return tasks


@PATCHES.row(
    "bridge.streamed_weights", f"{_MODEL_BRIDGE}.stream_weights_hf_to_megatron"
)
def _stream_to_all_copies(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Bridge streams a weight to only one chunk of a rank, so the other copies keep old values."""
    chunks = _chunks(call, args, kwargs)
    later_copies = list(_later_copies(chunks))
    for streamed in call(*args, **kwargs):
        yield streamed
        for copy in later_copies:
            is_same_weight = copy.name == streamed.param_name
            if is_same_weight and copy.first_chunk_index == streamed.vp_stage:
                yield streamed._replace(vp_stage=copy.chunk_index)


@PATCHES.row(
    "bridge.shared_embeddings",
    f"{_MODEL_BRIDGE}._broadcast_shared_embeddings",
    kind="replace",
)
def _fill_copies(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """After loading Hugging Face weights, Bridge fills the copy of a tied embedding from another
    rank, so a copy on the same rank would remain uninitialised.
    """
    import torch

    from megatron_ext.runtime.folded import tie_embeddings

    chunks = _chunks(call, args, kwargs)
    # The copy in the output layer has a different name from the embedding, so the loop below does
    # not reach it.
    tie_embeddings(chunks)
    with torch.no_grad():
        for copy in _later_copies(chunks):
            copy.weight.copy_(copy.first_weight)
