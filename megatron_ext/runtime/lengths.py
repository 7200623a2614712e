"""Checks the lengths of micro-batches: of what a model reads, and of what its stages hand on.

Upstream checks neither. A sequence that is too long ends in an index error of the embedding (on a
GPU in an assertion of the device), or with rotary embeddings not at all. A tensor of another length
than the step was told hangs the pipeline, or shifts what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError

if TYPE_CHECKING:
    import torch

__all__ = ["check_handed_on", "refusing_long_sequences"]


@contextmanager
def refusing_long_sequences(
    model: torch.nn.Module, stage: int, microbatch: int, cp_size: int
) -> Iterator[None]:
    """Check the tokens that a first stage reads inside the block.

    Models without a maximum, and other stages, read what they like.

    Args:
        model: The chunk of the stage, in its wrappers.
        stage: Global index of the stage, for the message.
        microbatch: 0 to m-1, for the message.
        cp_size: Context-parallel ranks; each reads its part of a sequence.

    Raises:
        ScheduleError: A sequence has more tokens than the model has positions.
    """
    reader = unwrap_model(model)
    limit = getattr(reader, "max_sequence_length", None)
    if limit is None or not getattr(reader, "pre_process", False):
        yield
        return

    def check(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        longest = _longest(args[0] if args else kwargs.get("input_ids"), kwargs, cp_size)
        if longest > limit:
            raise ScheduleError(
                f"stage {stage}, micro-batch {microbatch}: a sequence has {longest} tokens, the "
                f"model has {limit} positions; cut or pack the data to that, or raise "
                "--max-position-embeddings"
            )

    hook = reader.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _longest(tokens: torch.Tensor | None, kwargs: dict[str, Any], cp_size: int) -> int:
    """Return the length of the longest sequence of a batch `[b, s]`, packed or not."""
    packed = kwargs.get("packed_seq_params")
    if packed is not None and packed.max_seqlen_q is not None:
        return int(packed.max_seqlen_q)
    if packed is not None and packed.cu_seqlens_q is not None:
        return int(packed.cu_seqlens_q.diff().max())
    return 0 if tokens is None else tokens.shape[-1] * cp_size


def check_handed_on(
    stage: int,
    microbatch: int,
    tensors: Sequence[torch.Tensor | None],
    shapes: Sequence[tuple[int, ...] | None],
) -> None:
    """Check what a stage hands on against the shapes that the next stage expects.

    Args:
        stage: Global index of the stage.
        microbatch: 0 to m-1.
        tensors: Its outputs, `[s, b, h]` each.
        shapes: The expected shapes; None: any. Empty: nothing is known.

    Raises:
        ScheduleError: They differ.
    """
    for tensor, shape in zip(tensors, shapes, strict=False):
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            raise ScheduleError(
                f"stage {stage}, micro-batch {microbatch}: hands on {list(tensor.shape)}, and the "
                f"step was called for {list(shape)}; if lengths differ between micro-batches, add "
                "--variable-seq-lengths (variable_seq_lengths of the model's configuration)"
            )
