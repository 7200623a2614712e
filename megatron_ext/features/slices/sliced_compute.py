"""Runs micro-batches in slices: cuts batches and keeps keys and values.

A micro-batch's slices run their forward passes in order and their backward passes in reverse order.
A slice's attention reads the keys and values of all earlier slices, so each layer keeps them. By
the time a slice's backward pass starts, the gradients of its keys and values are complete. The
idea is from SlimPipe (arXiv 2504.14519) and Seq1F1B (arXiv 2406.03488).

A slice may be empty, because all replicas must have the same number of slices for the collectives
inside their layers to match. Megatron's layers fail without tokens, so an empty slice runs a few
padding tokens, which add nothing to losses, gradients or counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_ext.config import active
from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError
from megatron_ext.features.slices.slice_inputs import (
    CheckedSteps,
    check_counts,
    check_inputs,
)
from megatron_ext.features.slices.sliceable import (
    changes_each_token,
    check_model,
    declared_fields,
    declares_slices,
    fields_beyond_tokens,
    sliced_layers,
)
from megatron_ext.features.slices.sliced_layers import running_slice
from megatron_ext.runtime.compute import MicrobatchData, StageCompute
from megatron_ext.runtime.lengths import packed_bounds_in, refusing_long_sequences
from megatron_ext.schedules.table.slices import token_bounds
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action


class _LayerBuffer:
    """The keys (or values) in one layer for one micro-batch, and the sum of their gradients."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None
        """The micro-batch's tokens, `[s, b, heads, width]`. Each forward pass writes its
        slice."""
        self.gradient: torch.Tensor | None = None
        """Sum of the gradients from later slices, `[s, b, heads, width]`, for all tokens that later
        slices read."""
        self._last_read: torch.Tensor | None = None
        """The tensor that the layer read last. Its version counts in-place changes."""

    def write(self, tensor: torch.Tensor, begin: int, num_tokens: int) -> None:
        """Write a slice, `[s, ...]`, to its place in a sequence of `num_tokens` tokens.

        Raises:
            ScheduleError: The layer has changed the tensor that it read last.
        """
        if self.tokens is None:
            shape = (num_tokens, *tensor.shape[1:])
            self.tokens = tensor.new_empty(shape)
        if self._last_read is not None and self._last_read._version > 0:
            raise ScheduleError(
                "a layer changed the keys or values of earlier slices in place, so later slices "
                "would read the changed values; write key = key * 2 instead of key.mul_(2), or "
                "disable slices"
            )
        end = begin + len(tensor)
        self.tokens[begin:end].copy_(tensor)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return these tokens without copying them."""
        assert self.tokens is not None
        # Later slices are written to the buffer before this slice's backward pass reads
        # its tokens. Autograd would reject a view as modified, because a view shares
        # the buffer's version counter. `data` returns an alias whose counter starts at
        # 0.
        alias = self.tokens[begin:end].data
        # Keep a detached tensor: the alias itself will hold its slice's autograd graph.
        self._last_read = alias.detach()
        return alias

    def add_gradient(self, gradient: torch.Tensor, begin: int) -> None:
        """Add the gradient, `[s, ...]`, of the tokens starting at `begin`."""
        end = begin + len(gradient)
        # The last slice runs its backward pass first and reads the most tokens, so later gradients
        # fit into this tensor.
        if self.gradient is None:
            shape = (end, *gradient.shape[1:])
            self.gradient = gradient.new_zeros(shape)
        # `+=` on an indexed tensor would also copy the sum onto itself.
        self.gradient[begin:end].add_(gradient)

    def release(self) -> None:
        """Free the memory."""
        self.tokens = None
        self.gradient = None
        self._last_read = None


class _Joined(torch.autograd.Function):
    """Appends a slice's keys (or values) to the earlier slices' keys (or values).

    Earlier slices are not autograd inputs. Each earlier slice has a separate graph, whose backward
    pass runs later and adds the gradients that this slice's backward pass stores in the buffer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        buffer: _LayerBuffer,
        running: RunningSlice,
        first: int,
    ) -> torch.Tensor:
        """Return the tokens from `first` to the end of the slice."""
        ctx.buffer = buffer
        ctx.first = first
        ctx.begin = running.begin
        ctx.end = running.end
        ctx.is_first_slice = running.number == 0
        # A recomputation would only rewrite the values that the buffer already has.
        if not running.is_backward:
            buffer.write(tensor, running.begin, running.num_tokens)
        return buffer.read(first, running.end)

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor, None, None, None]:
        buffer = ctx.buffer
        first = ctx.first
        begin = ctx.begin
        num_earlier = begin - first
        slice_gradient = gradients[0][num_earlier:]
        # All later slices, which attend to this one, have run their backward passes. Earlier slices
        # do not attend to it, so its gradient is complete.
        if buffer.gradient is not None and begin < len(buffer.gradient):
            slice_gradient = slice_gradient + buffer.gradient[begin : ctx.end]
        if num_earlier > 0:
            earlier_gradient = gradients[0][:num_earlier]
            buffer.add_gradient(earlier_gradient, first)
        # The first slice runs its backward pass last.
        if ctx.is_first_slice:
            buffer.release()
        return slice_gradient, None, None, None


@dataclass
class _Balanced:
    """One router's sums over the slices so far, `[experts]` each."""

    counts: torch.Tensor | float = 0.0
    """Number of tokens sent to each expert."""
    probabilities: torch.Tensor | float = 0.0
    """Sum of the router's probabilities for each expert."""


class _Balance(torch.autograd.Function):
    """A slice's balancing loss: `factor` times its probabilities times all slices' counts.

    A slice's value is the amount that it adds to the loss so far, so the values add up to the
    micro-batch's loss. In a recomputation, the value is 0. The gradient also depends on the counts
    from later slices, which are known by the time a backward pass runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        probabilities: torch.Tensor,
        counts: torch.Tensor,
        sums: _Balanced,
        factor: float,
        weight: float,
        recomputes: bool,
    ) -> torch.Tensor:
        ctx.sums = sums
        ctx.factor = factor * weight
        if recomputes:
            return probabilities.new_zeros(())
        counts_before = torch.as_tensor(sums.counts)
        before = torch.sum(sums.probabilities * counts_before)
        sums.probabilities = sums.probabilities + probabilities
        sums.counts = sums.counts + counts
        total = torch.sum(sums.probabilities * sums.counts)
        return (total - before) * factor

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        of_probabilities = gradients[0] * ctx.factor * ctx.sums.counts
        return of_probabilities, None, None, None, None, None


_LayerBuffers = tuple[_LayerBuffer, _LayerBuffer]
"""One layer's keys and its values."""


@dataclass
class _Microbatch:
    """State that the layers in one stage keep for one micro-batch."""

    attention: dict[int, _LayerBuffers] = field(default_factory=dict)
    """Layer id -> its keys and its values."""
    balanced: defaultdict[tuple[int, int], _Balanced] = field(
        default_factory=lambda: defaultdict(_Balanced)
    )
    """(router id, index of the balancing loss) -> sums over the slices so far."""
    packed: Any = None
    """Megatron's `PackedSeqParams` for the whole micro-batch. None if each row is one sequence."""
    documents_read: Callable[[], tuple[int, ...]] = tuple
    """Returns `documents` if this rank has them on the host, else an empty tuple."""
    check_inputs: Callable[[Mapping[str, Any]], None] | None = None
    """Checks the arguments of `GPTModel.forward` for the running slice; None if they need no
    check."""
    documents: tuple[int, ...] = ()
    """The first token of each packed sequence, followed by the number of tokens, which may be
    repeated."""
    ahead: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )
    """For multi-token prediction: tensor name -> the whole tensor `[b, s]` shifted by 0, 1,
    ... tokens, each with the sum of its entries."""


class _Rolled(NamedTuple):
    """A tensor that multi-token prediction shifts."""

    name: str
    """Name of the unshifted tensor (`_LOOKS_AHEAD`)."""
    shift: int
    """Number of tokens by which the tensor is shifted."""
    tensor: torch.Tensor


@dataclass
class RunningSlice:
    """The slice whose pass is running, and what Megatron's layers compute for it.

    The patches in `sliced_layers.py` call these methods instead of Megatron's functions.
    """

    state: _Microbatch
    number: int
    """Position of the slice in its micro-batch."""
    begin: int
    """First token of the slice."""
    end: int
    """The token after the slice's last token."""
    num_tokens: int
    """Number of tokens in the whole micro-batch."""
    is_backward: bool
    """Whether this is a backward pass. A layer that runs its forward pass during a backward pass is
    being recomputed."""
    num_padding: int
    """Number of padding tokens that run if the slice is empty."""
    _mask: torch.Tensor | None = None
    """True where a token must not attend, `[1, 1, s, tokens up to the end of the slice]`. All
    layers share it."""
    _packed: Any = None
    """Megatron's `PackedSeqParams` for attention in this slice. All layers share it."""
    _first_packed: int = 0
    """First token of the first packed sequence with tokens in the slice."""
    _router: Any = None
    """The router that is running."""
    _num_losses: int = 0
    """How many balancing losses this router has computed so far."""
    _counts_only: bool = False
    """Whether the router runs only to count tokens for its balancing losses."""
    _rolled: dict[int, _Rolled] = field(default_factory=dict)
    """Id of one of the slice's tensors -> what it is."""

    @property
    def is_empty(self) -> bool:
        """Whether the slice has no tokens, so only padding runs."""
        return self.begin == self.end

    @property
    def share(self) -> float:
        """Fraction of the micro-batch's tokens in this slice. The micro-batch must not be empty."""
        return (self.end - self.begin) / self.num_tokens

    def with_earlier(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the tokens from `first` to the end of the slice.

        `key` and `value` belong to the slice, `[s, ...]` each.

        Raises:
            ScheduleError: `key` or `value` has more or fewer tokens than the slice.
        """
        new_buffers = (_LayerBuffer(), _LayerBuffer())
        buffers = self.state.attention.setdefault(id(layer), new_buffers)
        if self.is_empty:
            return key, value
        num_tokens = self.end - self.begin
        if len(key) != num_tokens or len(value) != num_tokens:
            raise ScheduleError(
                f"{type(layer).__name__} has keys for {len(key)} and values for {len(value)} "
                f"tokens in a slice of {num_tokens}; pass keys and values for all tokens in the "
                "slice, [s, ...] each, or disable slices"
            )
        keys, values = buffers
        joined_key = _Joined.apply(key, keys, self, first)
        joined_value = _Joined.apply(value, values, self, first)
        return joined_key, joined_value

    def attend(
        self,
        call: Any,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """Return a slice's attention output, `[s, b, h]`, over all tokens up to the slice's end.

        This runs the forward pass of Megatron's `DotProductAttention` or `TEDotProductAttention`.
        The queries are `[s, b, heads, width]`, or `[s, heads, width]` if sequences are packed. The
        mask is `[b, 1, s, tokens up to the end of the slice]`, and True where a token must not
        attend. None means causal attention.
        """
        packed = arguments.get("packed_seq_params")
        first = 0
        if packed is not None and not self.is_empty:
            arguments["packed_seq_params"], first = self._packed_in_slice(packed)
        key, value = self.with_earlier(layer, key, value, first)
        has_own_masks = not isinstance(layer, DotProductAttention)  # Transformer Engine
        if has_own_masks:
            # Transformer Engine passes only addresses to its kernels, and makes
            # queries, keys and values contiguous if they are parts of one projection.
            # Here, keys and values have their own memory, so it assumes that the
            # queries are contiguous.
            query = query.contiguous()
            if first > 0:
                # Transformer Engine rejects keys that start in the middle of their memory.
                key = key.clone()
                value = value.clone()
        # A slice has fewer queries than keys, and its last query may attend to the last
        # key, so the causal mask must be aligned to the bottom right.
        if packed is not None:
            if has_own_masks:
                attn_mask_type = _PACKED_BOTTOM_RIGHT
                # For self-attention, Transformer Engine's unfused attention would use
                # the query lengths for the keys as well.
                unfused: Any = layer.unfused_attention
                unfused.attention_type = "cross"
        elif has_own_masks:  # which ignore mask tensors for causal attention
            attn_mask_type = AttnMaskType.causal_bottom_right
        elif attention_mask is None:
            attention_mask = self._causal_mask(len(query), len(key), query.device)
        else:
            _check_mask(attention_mask, len(query), len(key))
        arguments["attn_mask_type"] = attn_mask_type
        result: torch.Tensor = call(query, key, value, attention_mask, **arguments)
        return result

    def _packed_in_slice(self, packed: Any) -> tuple[Any, int]:
        """Return the packed sequences' bounds for attention in this slice.

        Returns:
            Megatron's `PackedSeqParams` for queries of the slice and keys up to its end, and the
            first token of the first sequence that has tokens in the slice.
        """
        if self._packed is None:  # all layers share it
            documents = self.state.documents
            # Find the sequences that contain the slice's first and last token. There
            # may be empty sequences in between.
            last_index = len(documents) - 1
            end_index = min(bisect_left(documents, self.end), last_index)
            first_index = min(bisect_right(documents, self.begin), end_index) - 1
            first = documents[first_index]
            in_slice = slice(first_index, end_index + 1)
            starts = documents[in_slice]
            if starts[-1] <= self.begin:
                # Padding after the last sequence reads no keys.
                first = self.begin
            # Compute the bounds on the device: copying them from the host would make
            # the host wait for the device.
            whole_bounds = self.state.packed.cu_seqlens_q[in_slice]
            query_bounds = whole_bounds.clamp(self.begin, self.end)
            key_bounds = whole_bounds.clamp(first, self.end)
            self._packed = replace(
                packed,
                cu_seqlens_q=query_bounds - self.begin,
                cu_seqlens_kv=key_bounds - first,
                max_seqlen_q=_longest(starts, self.begin, self.end),
                max_seqlen_kv=_longest(starts, first, self.end),
            )
            self._first_packed = first
        return self._packed, self._first_packed

    def _causal_mask(
        self,
        num_queries: int,
        num_keys: int,
        device: torch.device,
    ) -> torch.Tensor:
        if self._mask is None:  # all layers share it
            mask = torch.ones(
                num_queries,
                num_keys,
                dtype=torch.bool,
                device=device,
            )
            # Align the diagonal to the bottom right.
            mask.triu_(num_keys - num_queries + 1)
            self._mask = mask[None, None]
        return self._mask

    def begin_forward(self, arguments: dict[str, Any]) -> None:
        """Convert the arguments of `GPTModel.forward` from a micro-batch to this slice.

        `arguments` maps names to arguments and is modified in place.

        Raises:
            ScheduleError: There is padding between packed sequences, or a padding mask, or an
                argument is not the slice's part of the data.
        """
        state = self.state
        packed = arguments.get("packed_seq_params")
        if arguments.get("padding_mask") is not None:
            raise ScheduleError(
                "GPTModel.forward's padding_mask cannot be used in slices, because their routers "
                "count all tokens; remove the mask, or disable slices"
            )
        if state.check_inputs is not None and not self.is_empty:
            state.check_inputs(arguments)
        if packed is not None:
            if self.number == 0:
                self._keep_packed(packed)
            arguments["packed_seq_params"] = self._packed_as_one_sequence()
        if state.ahead:
            # Megatron shifts the mask, which `roll` does for slices. Since 0.17,
            # Megatron has also weighted the losses of later tokens by the sum of the
            # mask, so pass the whole micro-batch's mask.
            whole_mask, _ = state.ahead["loss_mask"][0]
            arguments["loss_mask"] = whole_mask

    def _keep_packed(self, packed: Any) -> None:
        """Save the bounds of the micro-batch's packed sequences for all of its slices."""
        bounds = packed.cu_seqlens_q
        padded_bounds = packed.cu_seqlens_q_padded
        is_padded = False
        if padded_bounds is not None and padded_bounds is not bounds:
            is_padded = not torch.equal(padded_bounds, bounds)
        if packed.qkv_format != "thd" or is_padded:
            actual_format = packed.qkv_format
            if is_padded:
                actual_format = f"{actual_format} with padding"
            raise ScheduleError(
                "packed sequences in slices must have the format thd and no padding between them, "
                f"not {actual_format}; pack them as thd without padding, or disable slices"
            )
        self.state.packed = packed
        documents = self.state.documents_read()
        if len(documents) != len(bounds):
            # This rank did not read the data, and the step has not read it ahead. The copy waits
            # for the device, so do this only once per micro-batch.
            documents = tuple(bounds.tolist())
        self.state.documents = documents

    def _packed_as_one_sequence(self) -> Any:
        """Return Megatron's `PackedSeqParams` for the slice as if it were one sequence.

        Fused kernels then apply the rotary positions of its tokens (`positions`) in order. With
        several sequences, they would start every sequence at the table's first position.
        Attention still gets the separate sequences (`attend`).
        """
        whole_packed = self.state.packed
        num_tokens = self.end - self.begin
        changes: dict[str, Any] = {
            "cu_seqlens_q_padded": None,
            "cu_seqlens_kv_padded": None,
        }
        if self.is_empty:
            num_tokens = self.num_padding
            changes["max_seqlen_q"] = num_tokens
            changes["max_seqlen_kv"] = num_tokens
        # Do not create the tensor from a list: the host would have to wait until the
        # device has copied the list.
        bounds = whole_packed.cu_seqlens_q.new_zeros(2)
        bounds[1:] = num_tokens
        if hasattr(whole_packed, "tokens_per_sample"):
            # Sample lengths matter only if several rows are packed into one, which
            # slices do not support.
            changes["tokens_per_sample"] = None
        return replace(
            whole_packed,
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            **changes,
        )

    def positions(self, call: Any, arguments: Mapping[str, Any]) -> Any:
        """Return a slice's rotary positions, `[s, 1, 1, width]`.

        `call` is the `forward` method of one of Megatron's position tables.
        """
        if not arguments.get("packed_seq"):
            offset_arguments = {**arguments, "offset": self.begin}
            return call(**offset_arguments)
        result = call(**arguments)
        if isinstance(result, tuple):
            table, *further = result
            return (self._positions_in(table), *further)
        return self._positions_in(result)

    def _positions_in(self, table: torch.Tensor) -> torch.Tensor:
        """Return a position table's rows for the tokens in a packed slice."""
        places = torch.arange(self.num_tokens, device=table.device)
        # A table with a row for each token counts positions across all sequences. For any other
        # table, count them within each sequence.
        if len(table) != self.num_tokens:
            starts = self.state.packed.cu_seqlens_q.to(places.dtype)
            document_of = torch.bucketize(places, starts, right=True) - 1
            places = places - starts[document_of]
        if self.is_empty:
            return table[: self.num_padding]
        return table[places[self.begin : self.end]]

    def look_ahead(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> None:
        """Record the names of the tensors that multi-token prediction will shift, `[b, s]` each."""
        tokens = _Rolled("tokens", 0, input_ids)
        positions = _Rolled("position_ids", 0, position_ids)
        for rolled in (tokens, positions):
            self._rolled.setdefault(id(rolled.tensor), rolled)

    def roll(
        self,
        call: Any,
        tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run Megatron's `roll_tensor`: shift a tensor left and fill in from the next slice.

        Returns:
            The shifted tensor, `[b, s]`, and its sum over the whole micro-batch. For a mask, this
            sum is the divisor of the loss.
        """
        # Megatron copies labels before it shifts them, so their id is unknown here.
        default = "labels"
        if tensor.is_floating_point():
            default = "loss_mask"
        # Megatron cannot shift an empty tensor. The sum is a divisor, so return 1.
        if self.num_tokens == 0:
            return torch.zeros_like(tensor), torch.ones_like(tensor.sum())
        unshifted = _Rolled(default, 0, tensor)
        rolled = self._rolled.get(id(tensor), unshifted)
        new_shift = rolled.shift + 1
        all_shifted = self.state.ahead[rolled.name]
        if "packed_seq_params" in kwargs:
            kwargs["packed_seq_params"] = self.state.packed
        # The first slice shifts the whole tensors, and later slices reuse them.
        while len(all_shifted) <= new_shift:
            last_whole, _ = all_shifted[-1]
            all_shifted.append(call(last_whole, *args, **kwargs))
        shifted_whole, total = all_shifted[new_shift]
        part = shifted_whole[:, self.begin : self.end]
        if self.is_empty:
            part = torch.zeros_like(tensor)
        # Keep a reference to the tensor, because the id of a freed tensor may be reused.
        self._rolled[id(part)] = _Rolled(rolled.name, new_shift, part)
        return part, total

    def route(
        self,
        call: Any,
        router: torch.nn.Module,
        logits: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run Megatron's `TopKRouter.routing` and count tokens for its balancing losses."""
        self._router = router
        self._num_losses = 0
        if self.is_empty:
            with _without_counts(router):
                return call(logits, *args, **kwargs)
        in_training = router.training and not self.is_backward
        will_be_recomputed = in_training and not torch.is_grad_enabled()
        if will_be_recomputed:
            # Megatron computes these losses only in the recomputation. But a slice's
            # backward pass needs the counts from all slices, so run the router here for
            # its counts. Do not add to the token counts for the experts' bias, because
            # the recomputation will do that.
            self._counts_only = True
            # Megatron computes losses only if gradients are enabled.
            with _without_counts(router), torch.enable_grad():
                call(logits, *args, **kwargs)
            self._counts_only = False
            self._num_losses = 0
        return call(logits, *args, **kwargs)

    def balance(
        self,
        probs: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        total_num_tokens: float,
        topk: int,
        num_experts: int,
        moe_aux_loss_coeff: float,
        fused: bool = False,
    ) -> torch.Tensor:
        """Return a slice's share of its micro-batch's balancing loss, a scalar.

        Replaces Megatron's `switch_load_balancing_loss_func`, whose `fused` kernel computes the
        same loss.
        """
        if self.is_empty:
            return probs.new_zeros(())
        key = (id(self._router), self._num_losses)
        sums = self.state.balanced[key]
        self._num_losses += 1
        # Counts and probabilities are sums over slices, so only this factor depends on the number
        # of tokens in the micro-batch.
        all_tokens = total_num_tokens / self.share
        divisor = topk * all_tokens * all_tokens
        factor = num_experts * moe_aux_loss_coeff / divisor
        loss: torch.Tensor = _Balance.apply(
            probs.sum(dim=0),
            tokens_per_expert,
            sums,
            factor,
            self._weight(),
            self.is_backward,
        )
        return loss

    def z_loss(self, average: torch.Tensor) -> torch.Tensor:
        """Return a slice's share of its micro-batch's z-loss, from the average over the slice."""
        # If only the counts are needed, the recomputation adds this loss.
        if self._counts_only or self.is_empty:
            return average * 0
        loss = average * self.share
        weight = self._weight()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)
        return loss

    def _weight(self) -> float:
        """Return the weight for the gradients of the running router's losses."""
        # With a per-token loss, Megatron multiplies the gradient by the number of tokens in the
        # slice. The correct factor is the number of tokens in the whole micro-batch.
        if self._router.calculate_per_token_loss:
            return 1 / self.share
        return 1.0


class KeptState:
    """State that layers keep for sliced micro-batches until their last backward pass."""

    def __init__(self) -> None:
        # A plain attribute, because autograd may run a backward pass, including
        # recomputation, in another thread.
        self.running: RunningSlice | None = None
        self.microbatches: defaultdict[tuple[int, int], _Microbatch] = defaultdict(
            _Microbatch
        )
        """(stage, micro-batch) -> state of the layers."""

    @contextmanager
    def of(
        self,
        stage: int,
        microbatch: int,
        number: int,
        bounds: Sequence[int],
        *,
        backward: bool,
        num_padding: int = 1,
    ) -> Iterator[None]:
        """Make layers compute slice `number` inside this context.

        `bounds` gives the first token of each slice, followed by the number of tokens. An empty
        slice runs `num_padding` tokens.
        """
        begin, end = bounds[number : number + 2]
        state = self.microbatches[stage, microbatch]
        self.running = RunningSlice(
            state,
            number,
            begin,
            end,
            num_tokens=bounds[-1],
            is_backward=backward,
            num_padding=num_padding,
        )
        try:
            yield
        finally:
            self.running = None

    def clear(self) -> None:
        """Drop all state after a failed step."""
        self.running = None
        self.microbatches.clear()


@contextmanager
def _without_counts(router: Any) -> Iterator[None]:
    """Let a router run without counting tokens for its experts' bias."""
    bias_counts = getattr(router, "local_tokens_per_expert", None)
    if bias_counts is None:
        yield
        return
    before = bias_counts.clone()
    yield
    bias_counts.copy_(before)


# Megatron passes a mask type's name to Transformer Engine, but its `AttnMaskType` lacks
# this type.
_PACKED_BOTTOM_RIGHT: Any = SimpleNamespace(name="padding_causal_bottom_right")


def _longest(bounds: Sequence[int], first: int, last: int) -> int:
    """Return the largest distance between two bounds, limited to the range `first` to `last`."""
    limited_bounds = [min(max(bound, first), last) for bound in bounds]
    return max(end - begin for begin, end in pairwise(limited_bounds))


def _check_mask(mask: torch.Tensor, num_queries: int, num_keys: int) -> None:
    """Check that an attention mask covers the earlier slices' tokens as well.

    Raises:
        ScheduleError: The forward step has made the mask from a slice's tokens.
    """
    if mask.shape[-2:] != (num_queries, num_keys):
        raise ScheduleError(
            f"attention_mask {list(mask.shape)} in a slice of {num_queries} tokens must end with "
            f"[{num_queries}, {num_keys}], because a slice attends to earlier slices; take it from "
            "the data iterator's items, [b, 1, s, s], pass None for causal attention, or disable "
            "slices"
        )


def with_earlier_slices(
    layer: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Join keys and values with those of the running micro-batch's earlier slices.

    A custom model with causal attention that declares `runs_in_slices = True` must call this once
    in every forward pass of a layer, with the keys and values of its tokens, `[s, ...]` each.
    Outside slices, the arguments are returned unchanged. All slices read the same memory, so do not
    modify the results in place.

    Returns:
        The keys and values of the micro-batch's tokens up to the last token in `key`, and the
        position of the first token in `key`.
    """
    active.required()
    running = running_slice()
    if running is None:
        return key, value, 0
    begin = running.begin
    if running.is_empty:
        begin = 0
    all_keys, all_values = running.with_earlier(layer, key, value)
    return all_keys, all_values, begin


_ALONG_SEQUENCE = ("tokens", "input_ids", "labels", "loss_mask", "position_ids")
# Name prefixes of fields that describe packed sequences.
_OF_PACKED = ("cu_seqlens", "max_seqlen")
# Fields whose later tokens multi-token prediction reads.
_LOOKS_AHEAD = ("tokens", "position_ids", "labels", "loss_mask")


class SlicedData(MicrobatchData):
    """A chunk's data items, each of which is read once and cut into slices.

    `view` and `take` expect a slice number instead of a micro-batch number.

    Args:
        data: The whole items.
        bounds: [micro-batch] -> the first token of each slice, followed by the number of tokens.
        num_slices: Slice `s` of micro-batch `m` has number `m * num_slices + s`.
        num_padding: Number of padding tokens in an empty slice.
        packed_bounds: [micro-batch] -> the bounds of its packed sequences, if the step has read
            them ahead.
        required: Names of the fields that an item must have if it is cut.
        declared: Names of fields along the sequence, in addition to Megatron's.
        keeps_copies: Whether to copy each slice's fields when it is taken (`copies_of`).
    """

    def __init__(
        self,
        data: MicrobatchData,
        bounds: Sequence[Sequence[int]],
        num_slices: int,
        num_padding: int = 1,
        packed_bounds: Sequence[tuple[int, ...]] = (),
        required: Sequence[str] = (),
        declared: Sequence[str] = (),
        *,
        keeps_copies: bool = False,
    ) -> None:
        super().__init__(data.iterator, data.exchange, data.observers)
        self._required = required
        self._along_sequence = (*_ALONG_SEQUENCE, *declared)
        self._bounds = bounds
        self._num_slices = num_slices
        self._num_padding = num_padding
        # Slice number -> its fields. Fields are kept for later slices, because an
        # iterator yields each item only once.
        self._parts: dict[int, dict[str, Any]] = {}
        # Micro-batch -> bounds of its packed sequences.
        self._documents = dict(enumerate(packed_bounds))
        self.keeps_copies = keeps_copies
        # The slice taken last, and copies of its fields along the sequence.
        self._copies: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    def view(self, number: int) -> Iterator[Any] | None:
        """Return an iterator that yields one slice, or None if there is no data."""
        has_data = self.iterator is not None
        if has_data and not hasattr(self.iterator, "__next__"):
            raise ScheduleError(
                f"slices are cut from an iterator's items, but the data is a "
                f"{type(self.iterator).__name__}; pass iter(data), or disable slices"
            )
        return super().view(number)

    def take(self, number: int) -> dict[str, Any]:
        """Return a slice and drop it."""
        if number not in self._parts:
            self.whole(number // self._num_slices)
        part = self._parts.pop(number)
        if self.keeps_copies:
            # Forward steps may change an item and its tensors in place.
            copies = {}
            for name in self._along_sequence:
                if part.get(name) is not None:
                    copies[name] = part[name].clone()
            self._copies = (number, copies)
        return part

    def copies_of(self, number: int) -> dict[str, torch.Tensor]:
        """Return the slice's fields along the sequence if it was taken last, else {}.

        They are as they were before the forward step could change them.
        """
        last_number, copies = self._copies
        if number != last_number:
            return {}
        return copies

    def whole(self, microbatch: int) -> Mapping[str, Any] | None:
        """Read a micro-batch, cut it into slices and return it whole; None without data."""
        if self.iterator is None:
            return None
        item: Mapping[str, Any] = super().take(microbatch)
        bounds = self._bounds[microbatch]
        has_several_slices = len(bounds) > 2
        slices = _cut(item, bounds, self._num_padding, self._along_sequence)
        for name in self._required:
            if has_several_slices and item.get(name) is None:
                raise ScheduleError(
                    f"the data has no {name}, and the forward step cannot compute all of them "
                    f"from a slice's tokens alone; add {name} to the data iterator's items, or "
                    "disable slices"
                )
        first_number = microbatch * self._num_slices
        self._parts |= dict(enumerate(slices, first_number))
        if microbatch not in self._documents:
            self._documents[microbatch] = _documents_on_host(item)
        return item

    def check_all_taken(self) -> None:
        """Check that the forward step has called `next` for every slice, or for none."""
        super().check_all_taken()
        if self._parts:
            microbatch, slice_index = divmod(min(self._parts), self._num_slices)
            raise ScheduleError(
                f"the forward step did not call next() for slice {slice_index} of micro-batch "
                f"{microbatch}; with slices, call it once each time, or disable slices"
            )

    def documents(self, microbatch: int) -> tuple[int, ...]:
        """Return the bounds of packed sequences if this rank has them on the host, else ()."""
        return self._documents.get(microbatch, ())


def _documents_on_host(item: Mapping[str, Any]) -> tuple[int, ...]:
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        bounds = item.get(name)
        if bounds is not None and bounds.device.type != "cpu":
            return ()
    return packed_bounds_in(item)


def _cut(
    item: Any,
    bounds: Sequence[int],
    num_padding: int = 1,
    along_sequence: Sequence[str] = _ALONG_SEQUENCE,
) -> list[dict[str, Any]]:
    """Cut a micro-batch into slices. Empty slices get `num_padding` tokens, all 0.

    A micro-batch contains, by name:
    - tensors along the sequence, `[b, s]`, with the names in `along_sequence`;
    - the attention mask, `[b, 1, s, s]`, True where a token must not attend;
    - fields that every slice gets whole: bounds of packed sequences, `[1, sequences + 1]`, and
      per-sample values, `[b]`.
    """
    if not isinstance(item, Mapping):
        raise ScheduleError(
            f"slices are cut from a dict with tokens, labels, loss_mask and position_ids, but the "
            f"data iterator yields a {type(item).__name__}; disable slices"
        )
    num_tokens = bounds[-1]
    mask_shape = (num_tokens, num_tokens)
    slices: list[dict[str, Any]] = []
    for begin, end in pairwise(bounds):
        fields = {}
        for name, tensor in item.items():
            if name not in along_sequence and _is_whole_in_slices(name, tensor):
                fields[name] = tensor
            elif tensor is None:
                fields[name] = None
            elif name in along_sequence and tensor.shape[1:] == (num_tokens,):
                fields[name] = tensor[:, begin:end].contiguous()
                if begin == end:
                    padding_shape = (len(tensor), num_padding)
                    fields[name] = tensor.new_zeros(padding_shape)
            elif name == "attention_mask" and tensor.shape[2:] == mask_shape:
                # Rows are the slice's tokens; columns are all tokens up to the slice's
                # end.
                fields[name] = tensor[:, :, begin:end, :end].contiguous()
                if begin == end:
                    padding_shape = (*tensor.shape[:2], num_padding, num_padding)
                    mask = tensor.new_ones(padding_shape)
                    fields[name] = mask.triu(1)
            else:
                shape = list(getattr(tensor, "shape", ()))
                remedy = "remove it from the data"
                if shape[1:] == [num_tokens]:
                    # The name does not show whether each slice needs only its own part.
                    remedy = (
                        "if it has one value per token, set "
                        f"forward_step.fields_along_sequence = ({name!r},)"
                    )
                raise ScheduleError(
                    f"{name} {shape} of a micro-batch with {num_tokens} tokens cannot be cut into "
                    f"slices; {remedy}, or disable slices"
                )
        slices.append(fields)
    return slices


def _is_whole_in_slices(name: str, tensor: Any) -> bool:
    """Return whether every slice gets this field of a micro-batch unchanged."""
    num_dims = getattr(tensor, "ndim", 0)
    if num_dims == 2 and name.startswith(_OF_PACKED):
        return len(tensor) == 1
    # Per-sample values, such as a data set index, have no token dimension.
    return num_dims < 2


@runtime_checkable
class CutAhead(Protocol):
    """A step's data that was cut into slices when it was read ahead."""

    @property
    def slice_bounds(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batch in the table -> first token of each slice, and the number of tokens."""

    @property
    def packed_bounds(self) -> tuple[tuple[int, ...], ...]:
        """Micro-batch in the table -> the bounds of its packed samples; empty without packing."""


@dataclass
class SlicedCompute(StageCompute):
    """Runs the actions in a table with slices.

    `StageCompute` treats each slice as a micro-batch, numbered across the step. A micro-batch with
    a single slice runs as if it were not sliced.
    """

    layer_state: KeptState = field(default_factory=KeptState, kw_only=True)
    """State that layers keep from slice to slice."""
    checked_steps: CheckedSteps = field(default_factory=CheckedSteps, kw_only=True)
    """Forward steps whose inputs have been checked in earlier steps."""
    _stages_checked: set[int] = field(default_factory=set, init=False)
    """Stages whose inputs were checked in this step."""
    _nums_unmasked: dict[int, int] = field(default_factory=dict, init=False)
    """Slice number -> number of tokens that its loss mask keeps, if the step is checked."""
    _num_samples: int = field(default=0, init=False)
    """Number of samples in the micro-batch that was checked last."""
    _num_tokens_of: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """Slice number -> tokens counted by the loss function, on the rank with the last stage."""
    _number: int = field(default=0, init=False)
    """Number of the slice whose forward pass is running."""

    def __post_init__(self) -> None:
        """Cut the step's data into slices and postpone dividing the losses."""
        call = self.call
        schedule = self.table.schedule
        self._num_slices = schedule.num_slices
        read_ahead: object = call.read_ahead
        self._bounds: Sequence[Sequence[int]] = ()
        packed_bounds: Sequence[tuple[int, ...]] = ()
        if isinstance(read_ahead, CutAhead):
            self._bounds = read_ahead.slice_bounds
            packed_bounds = read_ahead.packed_bounds
        # With sequence parallelism, tensor-parallel ranks hold equal parts of a slice.
        self._multiple = 1
        if call.config.sequence_parallel:
            self._multiple = call.config.tensor_model_parallel_size
        if not self._bounds:
            bounds = token_bounds(schedule.slices, call.seq_length, self._multiple)
            self._bounds = [bounds] * schedule.num_microbatches
        self._user_step = call.forward_step_func
        sliced_data: list[MicrobatchData] = []
        for data, chunk in zip(call.data, call.chunks, strict=True):
            chunk_data = SlicedData(
                data,
                self._bounds,
                self._num_slices,
                num_padding=self._multiple,
                packed_bounds=packed_bounds,
                required=fields_beyond_tokens(chunk),
                declared=declared_fields(self._user_step),
                keeps_copies=self._needs_check(chunk),
            )
            sliced_data.append(chunk_data)
        self.call = replace(
            call,
            data=sliced_data,
            forward_step_func=self._forward_step,
        )

    def _needs_check(self, chunk: torch.nn.Module) -> bool:
        """Return whether to check what the forward step passes to this chunk's model."""
        # Models of one's own may use different data.
        if declares_slices(chunk):
            return False
        return not self.checked_steps.includes(chunk, self._user_step)

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action; see `StageCompute.run`.

        Raises:
            ScheduleError: The model, its data or its loss function does not support slices.
        """
        stage, kind, microbatch, slice_index = action
        number = self._numbered(action)
        numbered = action._replace(microbatch=number, slice=0)
        if kind == "W":  # reads no keys or values
            return super().run(numbered, inputs)
        if kind == "F" and not self._forwards[stage]:
            # Check once per step: hooks may change between steps, but checking a large model takes
            # milliseconds.
            check_model(self._stage(stage).model)
        is_forward = kind == "F"
        is_first_slice = slice_index == 0
        is_last_slice = slice_index == len(self._bounds[microbatch]) - 2
        begins_cut = is_forward and is_first_slice and not self._is_whole(microbatch)
        if begins_cut:
            self._begin_microbatch(stage, microbatch, inputs)
        # Megatron calls the loss function inside the forward pass, without the slice number.
        self._number = number
        with self._layers_in_slice(action):
            outputs = super().run(numbered, inputs)
        if begins_cut:
            self._check_effect(stage, microbatch)
        if is_forward and is_last_slice and self._stage(stage).is_last:
            self._complete_loss(stage, microbatch)
        # The first slice's backward pass is the micro-batch's last one.
        if not is_forward and is_first_slice:
            self.layer_state.microbatches.pop((stage, microbatch), None)
        return outputs

    def _is_whole(self, microbatch: int) -> bool:
        """Return whether a micro-batch runs as a single slice that has tokens."""
        bounds = self._bounds[microbatch]
        return len(bounds) == 2 and bounds[-1] > 0

    def _layers_in_slice(self, action: Action) -> AbstractContextManager[None]:
        """Return the context in which layers compute an action's slice."""
        stage, kind, microbatch, slice_index = action
        if self._is_whole(microbatch):
            return nullcontext()
        return self.layer_state.of(
            stage,
            microbatch,
            slice_index,
            self._bounds[microbatch],
            backward=kind != "F",
            num_padding=self._multiple,
        )

    def _begin_microbatch(self, stage: int, microbatch: int, inputs: Tensors) -> None:
        """Prepare the state that a micro-batch's slices share."""
        data = self._stage(stage).data
        assert isinstance(data, SlicedData)
        state = self.layer_state.microbatches[stage, microbatch]
        state.documents_read = partial(data.documents, microbatch)
        if data.keeps_copies:
            state.check_inputs = partial(self._check_inputs, stage)
        if getattr(self.call.config, "mtp_num_layers", None):
            self._look_ahead(stage, microbatch, inputs)

    def _check_inputs(self, stage: int, arguments: Mapping[str, Any]) -> None:
        """Check what the forward step passes to the model for the running slice.

        On tensor-parallel ranks without data, there is nothing to compare with.
        """
        number = self._number
        place = self._stage(stage)
        assert isinstance(place.data, SlicedData)
        fields = place.data.copies_of(number)
        if not fields:
            return
        microbatch, slice_index = divmod(number, self._num_slices)
        is_declared = changes_each_token(self._user_step)
        check_inputs(
            unwrap_model(place.model),
            arguments,
            fields,
            self._bounds[microbatch][slice_index],
            f"slice {slice_index} of micro-batch {microbatch}",
            only_later_predictions=is_declared,
        )
        if place.is_last and "loss_mask" in fields and not is_declared:
            mask = fields["loss_mask"]
            num_unmasked = int(mask.count_nonzero())
            self._nums_unmasked[number] = num_unmasked
            self._num_samples = len(mask)
        self._stages_checked.add(stage)

    def _check_effect(self, stage: int, microbatch: int) -> None:
        """Check that all layers in a stage kept keys and values, i.e. that the patch works."""
        model = self._stage(stage).model
        if declares_slices(model):
            return
        num_layers = len(sliced_layers(model))
        state = self.layer_state.microbatches[stage, microbatch]
        num_kept = len(state.attention)
        if num_kept != num_layers:
            raise ScheduleError(
                f"only {num_kept} of {num_layers} layers in stage {stage} kept keys and values "
                "for later slices (patch slices.attention); disable slices"
            )

    def saved_tensors(self, action: Action) -> tuple[Tensors, Tensors] | None:
        """Return the inputs and outputs kept for a backward pass; None once the pass has run."""
        numbered = action._replace(microbatch=self._numbered(action))
        return super().saved_tensors(numbered)

    def end_step(self) -> None:
        """Convert the reports' keys from slice numbers to micro-batches."""
        for stage in self._stages_checked:
            self.checked_steps.add(self._stage(stage).model, self._user_step)
        report_of_microbatch = {}
        for number, report in self.reports.items():
            microbatch = number // self._num_slices
            report_of_microbatch[microbatch] = report
        self.reports = report_of_microbatch

    def _numbered(self, action: Action) -> int:
        return action.microbatch * self._num_slices + action.slice

    def _checking_lengths(
        self,
        model: torch.nn.Module,
        stage: int,
        number: int,
    ) -> AbstractContextManager[None]:
        place = self._place_of(number)
        if place.is_empty:
            return nullcontext()
        return refusing_long_sequences(
            model,
            stage,
            place.microbatch,
            self.call.cp_group_size,
            num_earlier=place.begin,
        )

    def _place_of(self, number: int) -> _Place:
        """Return the place of the slice with this number."""
        microbatch, slice_index = divmod(number, self._num_slices)
        bounds = self._bounds[microbatch]
        return _Place(microbatch, bounds[slice_index], bounds[slice_index + 1])

    def _forward_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the user's forward step without dividing its loss by the slice's token count.

        `_complete_loss` divides the loss by the micro-batch's token count.
        """
        number = self._number
        place = self._place_of(number)
        length = place.end - place.begin
        if place.is_empty:
            length = self._multiple
        with _sequence_length(length):
            output, loss_of = self._user_step(*args, **kwargs)

        def loss(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            results = loss_of(tensor, *args, **kwargs)
            if len(results) != 3:
                raise ScheduleError(
                    "the loss function returns an average over a slice, from which the average "
                    "over the micro-batch cannot be computed; return (sum of losses, number of "
                    "tokens, report)"
                )
            total, num_tokens, report = results
            # Padding must not count, even if the loss function uses no mask.
            if place.is_empty:
                total = total * 0
                num_tokens = torch.zeros_like(num_tokens)
                zeros = {}
                for name, value in report.items():
                    zeros[name] = torch.zeros_like(torch.as_tensor(value))
                report = zeros
            self._num_tokens_of[number] = num_tokens
            if self._has_megatrons_divisor(place.microbatch):
                return total, num_tokens, report
            # Megatron divides by this number of tokens, so return 1.
            return total, torch.ones_like(num_tokens), report

        return output, loss

    def _look_ahead(self, stage: int, microbatch: int, inputs: Tensors) -> None:
        """Keep the whole tensors that multi-token prediction reads.

        The tensor-parallel rank that has the data sends them to the other ranks.
        """
        place = self._stage(stage)
        model = unwrap_model(place.model)
        predicts = place.is_last or getattr(model, "mtp_process", False)
        if not predicts:
            return
        assert isinstance(place.data, SlicedData)
        item = place.data.whole(microbatch)
        device = device_of(self.call.chunks)
        group = parallel_state.get_tensor_model_parallel_group()
        ahead = self.layer_state.microbatches[stage, microbatch].ahead
        for name in _LOOKS_AHEAD:
            dtype = torch.int64
            if name == "loss_mask":
                dtype = torch.float32
            if item is not None:
                if item.get(name) is None:
                    raise ScheduleError(
                        f"the data has no {name}, of which multi-token prediction reads the next "
                        f"slice's; add {name} to the data iterator's items, or disable slices"
                    )
                tensor = item[name].to(device, dtype)
            else:
                received = inputs[0]
                assert received is not None, "the first stage predicts no later tokens"
                # Micro-batches may differ in size, and this rank sees only activations.
                num_samples = received.shape[1]
                num_tokens = self._bounds[microbatch][-1]
                shape = (num_samples, num_tokens)
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if group.size() > 1:
                source = parallel_state.get_tensor_model_parallel_src_rank()
                dist.broadcast(tensor, source, group=group)
            ahead[name] = [(tensor, tensor.sum())]

    def _complete_loss(self, stage: int, microbatch: int) -> None:
        """Divide a micro-batch's losses by its token count and add up its slices' reports.

        The micro-batch's backward passes have not started, because the first one waits for the last
        slice's forward pass.
        """
        num_slices = len(self._bounds[microbatch]) - 1
        first = microbatch * self._num_slices
        numbers = range(first, first + num_slices)
        counts = [self._num_tokens_of.pop(number) for number in numbers]
        self._check_counts(microbatch, dict(zip(numbers, counts, strict=True)))
        if not self._has_megatrons_divisor(microbatch):
            total_count = torch.stack(counts).sum()
            num_tokens = torch.clamp(total_count, min=1)
            for number in numbers:
                _, outputs = self._live[stage, number]
                assert outputs[0] is not None
                outputs[0] /= num_tokens  # in place, as in Megatron
        reports = [self.reports.pop(number) for number in numbers]
        self.reports[first] = {name: _sum(name, reports) for name in reports[0]}

    def _check_counts(self, microbatch: int, count_of: dict[int, torch.Tensor]) -> None:
        """Check the numbers of tokens that the loss function returned, by slice number."""
        counts = []
        nums_unmasked = []
        for number, count in count_of.items():
            # Slices that were not checked are empty.
            if number in self._nums_unmasked:
                counts.append(float(count))
                nums_unmasked.append(self._nums_unmasked.pop(number))
        check_counts(
            counts,
            nums_unmasked,
            self._num_samples,
            f"micro-batch {microbatch}",
        )

    def _has_megatrons_divisor(self, microbatch: int) -> bool:
        """Return whether Megatron itself divides a micro-batch's loss correctly."""
        # With a per-token loss, Megatron itself divides gradients by the step's token
        # count. For a micro-batch with a single slice, Megatron has already divided the
        # loss.
        has_per_token_loss = self.call.config.calculate_per_token_loss
        return has_per_token_loss or self._is_whole(microbatch)


class _Place(NamedTuple):
    """The place of a slice in its step."""

    microbatch: int
    begin: int
    """First token of the slice."""
    end: int
    """The token after the slice's last token."""

    @property
    def is_empty(self) -> bool:
        """Whether the slice has no tokens, so only padding runs."""
        return self.begin == self.end


@contextmanager
def _sequence_length(num_tokens: int) -> Iterator[None]:
    """Make Megatron's scripts read batches of this length instead of whole sequences.

    On tensor-parallel ranks, the scripts take the length of their buffers from the arguments.
    """
    arguments = megatron_arguments()
    if arguments is None:
        yield
        return
    whole_length = arguments.seq_length
    arguments.seq_length = num_tokens
    try:
        yield
    finally:
        arguments.seq_length = whole_length


def _sum(name: str, reports: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a reported value for all slices, `[2]`: its sum over tokens, and the token count."""
    values = [torch.as_tensor(report[name]) for report in reports]
    if any(value.numel() != 2 for value in values):
        raise ScheduleError(
            f"the loss function reports a slice's {name} as a single number, from which the "
            "micro-batch's value cannot be computed; report a tensor with the sum of losses and "
            "the number of tokens"
        )
    return torch.stack(values).sum(dim=0)
