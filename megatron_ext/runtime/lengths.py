"""Reads and checks a micro-batch's sequence lengths and estimates their cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.length_cost import LengthCost


@contextmanager
def refusing_long_sequences(
    model: torch.nn.Module,
    stage: int,
    microbatch: int,
    cp_size: int,
    *,
    num_earlier: int = 0,
) -> Iterator[None]:
    """Check how many tokens a first stage reads within this context, which upstream does not do.

    The tokens may follow `num_earlier` tokens of the same sequence.

    Raises:
        ScheduleError: A sequence is empty, or has more tokens than the model has positions.
    """
    # Otherwise, a sequence that is too long causes an index error in the embedding (on
    # a GPU, a device-side assertion), or no error at all with rotary embeddings.
    reader = unwrap_model(model)
    limit = getattr(reader, "max_sequence_length", None)
    if limit is None or not getattr(reader, "pre_process", False):
        yield
        return

    def check(
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        packed = kwargs.get("packed_seq_params")
        longest = 0
        if tokens is not None:
            num_tokens = tokens.shape[-1]
            if num_tokens == 0:
                # Megatron's attention would fail in a reshape, with an error that mentions
                # neither the data nor the micro-batch.
                raise ScheduleError(
                    f"stage {stage}, micro-batch {microbatch} has no tokens, but Megatron's "
                    "layers need at least one; give it one token with loss_mask 0, or train with "
                    "--pipeline-slice-tokens, which pads such micro-batches in training steps"
                )
            longest = num_earlier + num_tokens * cp_size
        # The lengths of packed samples replace that of the row.
        if packed is not None:
            if packed.max_seqlen_q is not None:
                longest = int(packed.max_seqlen_q)
            elif packed.cu_seqlens_q is not None:
                lengths = packed.cu_seqlens_q.diff()
                longest = int(lengths.max())
        if longest > limit:
            raise ScheduleError(
                f"stage {stage}, micro-batch {microbatch}: a sequence has {longest} tokens, but "
                f"the model has {limit} positions; shorten the sequences, or raise "
                "--max-position-embeddings"
            )

    with reader.register_forward_pre_hook(check, with_kwargs=True):
        yield


class ItemSize(NamedTuple):
    """A micro-batch's size, which determines its cost."""

    tokens: int
    """Number of tokens, including padding."""
    sum_of_squares: int
    """Sum of the squared lengths of its samples."""


def packed_bounds_of(item: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the bounds of a micro-batch's packed samples, `[n]` or `[b, n]`; None without packing.

    Padded bounds take precedence if there are any, as in Megatron's script.
    """
    # With Megatron's packing scheduler, middle stages read only the bounds. Use the
    # padded bounds, which give the same size as on stages with tokens; if the sizes
    # differed, stages would choose different orders.
    bounds: torch.Tensor | None = item.get("cu_seqlens_padded")
    if bounds is None:
        bounds = item.get("cu_seqlens")
    return bounds


def packed_bounds_in(item: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the bounds of a micro-batch's packed samples in one row; empty if they are unknown.

    If there is padding between samples, the forward step decides which bounds the model gets.
    """
    bounds = item.get("cu_seqlens")
    padded_bounds = item.get("cu_seqlens_padded")
    if bounds is None:
        bounds = padded_bounds
    if bounds is None:
        return ()
    if padded_bounds is not None and not torch.equal(bounds, padded_bounds):
        return ()
    return tuple(bounds.flatten().tolist())


def item_size(item: Any) -> ItemSize | None:
    """Return the size of a micro-batch, or None if its lengths are unknown.

    The item has `tokens`, `[b, s]`. With packed samples, it has `cu_seqlens`, `[n]` or `[b, n]`:
    the start of each sample and the end of the last one, which may be repeated. `cu_seqlens_padded`
    has the same bounds with padding.
    """
    if not isinstance(item, Mapping):
        return None
    tokens = item.get("tokens")
    bounds = packed_bounds_of(item)
    if bounds is None:
        if tokens is None:
            return None
        num_tokens = tokens.numel()
        row_length = int(tokens.shape[-1])
        return ItemSize(num_tokens, num_tokens * row_length)
    lengths = bounds.long().diff(dim=-1)
    sum_of_squares = int(lengths.square().sum())
    if tokens is None:
        num_tokens = int(bounds[..., -1].sum())
        return ItemSize(num_tokens, sum_of_squares)
    return ItemSize(tokens.numel(), sum_of_squares)


def sample_lengths(item: Any) -> list[int]:
    """Return the number of tokens in each sample, along a micro-batch's sequence.

    The micro-batch must have a size (`item_size`). Without packing, its rows are treated as one
    sample. Tokens after the last packed sample are treated as another sample.
    """
    tokens = item.get("tokens")
    bounds = packed_bounds_of(item)
    if bounds is None:
        return [int(tokens.shape[-1])]
    samples: list[int] = bounds.long().flatten().diff().tolist()
    num_packed = sum(samples)
    if tokens is not None:
        num_after = int(tokens.shape[-1]) - num_packed
        if num_after > 0:
            samples.append(num_after)
    return samples


def cost_of_model(config: Any) -> LengthCost:
    """Return the function from sample length to cost for a model with this `TransformerConfig`."""
    num_experts = 1
    ffn_width = config.ffn_hidden_size
    if config.num_moe_experts:
        num_experts = config.moe_router_topk
        ffn_width = config.moe_ffn_hidden_size or ffn_width
    shared_width = config.moe_shared_expert_intermediate_size or 0
    num_query_heads = config.num_attention_heads
    num_key_heads = config.num_query_groups or num_query_heads
    return LengthCost.of_model(
        config.hidden_size,
        num_experts * ffn_width + shared_width,
        gated=bool(config.gated_linear_unit),
        query_width=config.kv_channels * num_query_heads,
        key_width=config.kv_channels * num_key_heads,
    )
