"""Checks that a forward step passes a slice's own data to the model.

A forward step runs once per slice. If it computes tokens, positions or labels from a slice instead
of taking them from the item, they may be wrong: positions start at 0 in every slice, and shifted
labels lack the next slice's first token. That would train a different model without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError

# Position embeddings that use `position_ids`. All others count positions themselves.
READ_POSITIONS = ("learned_absolute", "mrope")


class CheckedSteps:
    """Forward steps whose inputs for slices have been checked, by model.

    Comparing tensors makes the host wait for the device, so each forward step is checked only in
    its first training step that cuts micro-batches.
    """

    def __init__(self) -> None:
        self._codes_of: WeakKeyDictionary[torch.nn.Module, set[Any]] = (
            WeakKeyDictionary()
        )

    def includes(self, chunk: torch.nn.Module, forward_step: Any) -> bool:
        """Return whether this forward step has been checked with this chunk's model."""
        codes = self._codes_of.get(unwrap_model(chunk), ())
        return _code_of(forward_step) in codes

    def add(self, chunk: torch.nn.Module, forward_step: Any) -> None:
        """Record that this forward step has been checked with this chunk's model."""
        codes = self._codes_of.setdefault(unwrap_model(chunk), set())
        codes.add(_code_of(forward_step))


def _code_of(forward_step: Any) -> Any:
    """Return what stays the same if a program creates its forward step again in every step."""
    function = forward_step
    while True:
        if isinstance(function, partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            break
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def has_later_predictions(model: Any) -> bool:
    """Return whether multi-token prediction reads a whole micro-batch's data on this stage."""
    if getattr(model, "mtp_process", False):
        return True
    is_last = getattr(model, "post_process", False)
    num_layers = getattr(model.config, "mtp_num_layers", None)
    return bool(is_last and num_layers)


def check_inputs(
    model: Any,
    arguments: Mapping[str, Any],
    fields: Mapping[str, torch.Tensor],
    begin: int,
    title: str,
    *,
    only_later_predictions: bool,
) -> None:
    """Check that the arguments of `GPTModel.forward` are parts of a micro-batch's fields.

    Only the arguments that this stage reads are checked. `fields` contains the slice's part of each
    field along the sequence, `begin` is the slice's first token, and `title` names the slice. With
    `only_later_predictions`, check only what multi-token prediction takes from the whole
    micro-batch.

    Raises:
        ScheduleError: An argument differs from its field.
    """
    ahead = has_later_predictions(model)
    if only_later_predictions and not ahead:
        return
    for argument in _read_arguments(model, arguments):
        received = arguments.get(argument)
        if not isinstance(received, torch.Tensor):
            continue
        name = argument
        if argument == "input_ids" and "tokens" in fields:
            name = "tokens"
        candidates = list(fields.values())
        if ahead:
            # For later tokens, the field of this name is read, whatever the forward step passes.
            candidates = [fields[name]] if name in fields else []
        # The axes of a multimodal position, `[3, b, s]`, may come from different fields.
        axes = [received]
        if received.ndim > 2:
            axes = list(received)
        for axis in axes:
            if any(_are_equal(axis, candidate) for candidate in candidates):
                continue
            raise ScheduleError(
                _reason(argument, name, axis, fields.get(name), begin, title)
                + _remedy(name, may_declare=not ahead)
            )


def _read_arguments(model: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments of `GPTModel.forward` that a stage reads."""
    embedding_type = getattr(model, "position_embedding_type", None)
    embeds = model.pre_process and arguments.get("decoder_input") is None
    if getattr(model, "mtp_process", False):
        embeds = True
    if embeds:
        yield "input_ids"
    # Rotary positions are applied in the layers of every stage.
    reads_positions = embeds or embedding_type == "mrope"
    if reads_positions and embedding_type in READ_POSITIONS:
        yield "position_ids"
    if model.post_process:
        yield "labels"
        if has_later_predictions(model):
            yield "loss_mask"


def _are_equal(received: torch.Tensor, field: torch.Tensor) -> bool:
    if not _fits(received, field):
        return False
    # Forward steps may convert a field, or move it to the device.
    expected = field.to(received.device, received.dtype)
    return torch.equal(received.expand_as(expected), expected)


def _fits(received: torch.Tensor, field: torch.Tensor) -> bool:
    """Return whether a tensor has the shape of a field `[b, s]`, or one row for all samples."""
    num_samples, num_tokens = field.shape
    return received.shape in (
        (num_tokens,),
        (1, num_tokens),
        (num_samples, num_tokens),
    )


def _reason(
    argument: str,
    name: str,
    received: torch.Tensor,
    field: torch.Tensor | None,
    begin: int,
    title: str,
) -> str:
    passes = f"{title}: the forward step passes {argument} to the model that"
    if field is None:
        return f"{passes} are not in the data"
    if not _fits(received, field):
        return (
            f"{passes} have the shape {list(received.shape)}, not {list(field.shape)}"
        )
    expected = field.to(received.device, received.dtype)
    received = received.expand_as(expected)
    row, index = (received != expected).nonzero()[0].tolist()
    return (
        f"{passes} are {received[row, index].item()} at token {begin + index}, but the data's "
        f"{name} are {expected[row, index].item()}"
    )


def _remedy(name: str, *, may_declare: bool) -> str:
    remedy = (
        "; what is computed from a slice alone is wrong at the slice's ends, so take "
        f"{name} from the data iterator's items (for fields [b, s] with other names, set "
        "forward_step.fields_along_sequence)"
    )
    if may_declare:
        remedy += (
            "; if the forward step changes every token separately, set "
            "forward_step.runs_in_slices = True"
        )
    return f"{remedy}; or disable slices"


def check_counts(
    counts: Sequence[float],
    nums_unmasked: Sequence[int],
    num_samples: int,
    title: str,
) -> None:
    """Check that a loss function does not return an average over each slice.

    `counts` are the numbers of tokens that it returned for the slices of a micro-batch,
    `nums_unmasked` are the numbers of tokens that the slices' loss masks keep.

    Raises:
        ScheduleError: It counted one token, or one per sample, in every slice.
    """
    if len(counts) < 2:
        return
    count = counts[0]
    is_constant = all(other == count for other in counts)
    is_of_average = is_constant and count in (1, num_samples)
    if is_of_average and min(nums_unmasked) > count:
        raise ScheduleError(
            f"{title}: the loss function counts {count:g} tokens in every slice, but the loss "
            f"masks keep {list(nums_unmasked)}, so it seems to return an average over a slice, "
            "from which the average over the micro-batch cannot be computed; return (sum of "
            "losses, number of tokens, report), or disable slices"
        )
