"""Runs micro-batches in slices of their sequence: cuts batches, and keeps keys and values.

Forwards of a micro-batch's slices run in order, backwards in reverse. Attention of a slice reads
the keys and values of all slices before it, so each layer keeps them. Their gradients are complete
when the backward of the slice that made them begins. Sources of the idea: SlimPipe (arXiv
2504.14519) and Seq1F1B (arXiv 2406.03488).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_ext.config import active
from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError
from megatron_ext.features.slices.sliceable import check_model, declares_slices, sliced_layers
from megatron_ext.runtime.compute import MicrobatchData, StageCompute
from megatron_ext.schedules.table.slices import token_bounds

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action


class _Kept:
    """The keys of one layer for one micro-batch, `[s, b, heads, width]` by slice, or its values."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        """Sums that later slices add to the gradient of a slice."""


class _Joined(torch.autograd.Function):
    """Appends the keys, or values, of a slice to those of the slices before it.

    The slices before are no inputs to autograd: each has a graph of its own, whose backward runs
    later and takes the gradients that this one leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, layer_state: _Kept, number: int, is_freed: bool
    ) -> torch.Tensor:
        # A view would keep the projection that queries, keys and values are parts of. Recomputation
        # runs this again, with the same result.
        if is_freed:
            layer_state.made[number] = tensor.detach().clone()
        else:
            layer_state.made[number] = tensor.detach().contiguous()
        ctx.kept, ctx.number = layer_state, number
        return torch.cat([layer_state.made[part] for part in range(number + 1)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layer_state, number = ctx.kept, ctx.number
        lengths = [len(layer_state.made[part]) for part in range(number + 1)]
        *before, own_gradient = gradients[0].split(lengths)
        for part, gradient in enumerate(before):
            if part in layer_state.gradients:
                layer_state.gradients[part] += gradient
            else:
                # A view would keep the gradients of all tokens in memory.
                layer_state.gradients[part] = gradient.clone()
        # Later slices, which attend to it, are through; earlier ones never do.
        del layer_state.made[number]
        later_gradient = layer_state.gradients.pop(number, None)
        if later_gradient is not None:
            own_gradient = own_gradient + later_gradient
        return own_gradient, None, None, None


@dataclass
class _Balanced:
    """Sums over the slices so far in one router, `[experts]` each."""

    counts: torch.Tensor | float = 0.0
    """Tokens sent to each expert."""
    probabilities: torch.Tensor | float = 0.0


class _Balance(torch.autograd.Function):
    """The balancing loss of a slice: `factor` times its probabilities times all slices' counts.

    Its value is what the slice adds to the loss of the slices so far, so that values add up to the
    micro-batch's; 0 in a recomputation. Its gradient needs the counts of later slices, which are
    known in a backward.
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
        ctx.sums, ctx.factor = sums, factor * weight
        if recomputes:
            return probabilities.new_zeros(())
        before = torch.sum(sums.probabilities * torch.as_tensor(sums.counts))
        sums.probabilities, sums.counts = sums.probabilities + probabilities, sums.counts + counts
        return (torch.sum(sums.probabilities * sums.counts) - before) * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0] * ctx.factor * ctx.sums.counts, None, None, None, None, None


@dataclass
class _Microbatch:
    """State that the layers of one stage keep for one micro-batch."""

    attention: dict[int, tuple[_Kept, _Kept]] = field(default_factory=dict)
    """Keys and values by id of the layer."""
    balanced: defaultdict[tuple[int, int], _Balanced] = field(
        default_factory=lambda: defaultdict(_Balanced)
    )
    """By id of a router and position among its balancing losses."""
    packed: Any = None
    """Megatron's `PackedSeqParams` of the whole micro-batch; None: one sequence in each row."""
    documents: tuple[int, ...] = ()
    """The first token of each packed sequence, and the number of all tokens."""
    ahead: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """For multi-token prediction, by name: the whole `[b, s]` shifted by 0, 1, ... tokens, and the
    sum of its entries."""


class _Document(NamedTuple):
    """A packed sequence that has tokens in a slice."""

    first: int
    """Its first token, perhaps of an earlier slice."""
    begin: int
    """The first of its tokens in the slice."""
    end: int
    """The token after the last of them."""


@dataclass
class RunningSlice:
    """The slice whose forward or backward runs, and what Megatron's layers compute in it.

    `sliced_layers.py` calls its methods in place of Megatron's functions.
    """

    kept: _Microbatch
    number: int
    """Position of the slice in its micro-batch."""
    begin: int
    """First of its tokens."""
    end: int
    """The token after its last one."""
    share: float
    """Tokens of the slice, as a share of the micro-batch's."""
    is_backward: bool
    """Whether layers that run are recomputed."""
    _mask: torch.Tensor | None = None
    """True where a token must not attend, `[1, 1, s, tokens up to its end]`; for all layers."""
    _router: Any = None
    """The router that runs."""
    _num_losses: int = 0
    """Balancing losses of this router so far."""
    _counts_only: bool = False
    """Whether the router runs only for the counts of its balancing losses."""
    _rolled: dict[int, tuple[str, int, torch.Tensor]] = field(default_factory=dict)
    """By id of a tensor of the slice: its name, and by how many tokens it is shifted."""

    def with_earlier(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens up to the end of the slice, `[s, ...]` each."""
        keys, values = self.kept.attention.setdefault(id(layer), (_Kept(), _Kept()))
        # Megatron frees the memory of what it recomputes behind attention.
        config: Any = layer.config
        is_freed = (
            config.recompute_granularity == "selective"
            and "mla_up_proj" in config.recompute_modules
        )
        key = _Joined.apply(key, keys, self.number, is_freed)
        return key, _Joined.apply(value, values, self.number, is_freed)

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
        """Return the attention of a slice, `[s, b, h]`, over all tokens up to its end.

        Runs `forward` of Megatron's `DotProductAttention` or `TEDotProductAttention`, whose queries
        are `[s, b, heads, width]`, or `[s, heads, width]` if packed. The mask is `[b, 1, s, tokens
        up to its end]`, True where a token must not attend; None: causal.
        """
        key, value = self.with_earlier(layer, key, value)
        has_own_masks = not isinstance(layer, DotProductAttention)  # Transformer Engine
        if has_own_masks:
            # Its kernels get addresses alone: it copies parts of one projection, but takes queries
            # for contiguous where keys and values have memory of their own.
            query = query.contiguous()
        packed = arguments.get("packed_seq_params")
        if packed is not None:
            documents = self._documents()
            first = documents[0].first
            if first > 0:
                # Clones, because Transformer Engine refuses views.
                key, value = key[first:].clone(), value[first:].clone()
            arguments["packed_seq_params"] = _packed_as_in_slice(packed, documents)
            if has_own_masks:
                attn_mask_type = _PACKED_BOTTOM_RIGHT
                # Its attention without kernels else takes the lengths of queries for all.
                unfused: Any = layer.unfused_attention
                unfused.attention_type = "cross"
        elif has_own_masks:  # it reads none for causal attention
            attn_mask_type = AttnMaskType.causal_bottom_right
        elif attention_mask is None:
            attention_mask = self._causal_mask(len(query), len(key), query.device)
        arguments["attn_mask_type"] = attn_mask_type
        result: torch.Tensor = call(query, key, value, attention_mask, **arguments)
        return result

    def _documents(self) -> list[_Document]:
        """Return the packed sequences that have tokens in the slice."""
        documents = []
        for first, end in pairwise(self.kept.documents):
            if first < self.end and self.begin < end:
                documents.append(_Document(first, max(first, self.begin), min(end, self.end)))
        return documents

    def _causal_mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        if self._mask is None:  # the same for all layers
            ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
            self._mask = ones.triu_(num_keys - num_queries + 1)[None, None]
        return self._mask

    def begin_forward(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of `GPTModel.forward` from those of a micro-batch to a slice's.

        They are given by name, and changed in place.

        Raises:
            ScheduleError: There is padding between packed sequences, or a mask of padding.
        """
        state, packed = self.kept, arguments.get("packed_seq_params")
        if arguments.get("padding_mask") is not None:
            raise ScheduleError(
                "padding_mask of GPTModel's forward cannot be used in slices, whose routers count "
                "all tokens; leave the mask out, or leave the slices out"
            )
        if packed is not None:
            if self.number == 0:
                self._keep_packed(packed)
            arguments["packed_seq_params"] = self._packed_as_one_sequence()
        if state.ahead:
            # Megatron only shifts it, which `roll` does, and from 0.17 on weighs the losses of
            # later tokens by its sum, which has to be that of the micro-batch.
            arguments["loss_mask"] = state.ahead["loss_mask"][0][0]

    def _keep_packed(self, packed: Any) -> None:
        """Keep where the packed sequences of the micro-batch begin, for all its slices."""
        # A wait for the device, so once for each micro-batch.
        bounds = packed.cu_seqlens_q.tolist()
        padded = packed.cu_seqlens_q_padded
        is_padded = padded is not None and padded.tolist() != bounds
        if packed.qkv_format != "thd" or is_padded:
            raise ScheduleError(
                f"packed sequences of format {packed.qkv_format} with padding between them "
                "cannot run in slices; pack without padding, or leave the slices out"
            )
        self.kept.packed = packed
        self.kept.documents = tuple(dict.fromkeys(bounds))

    def _packed_as_one_sequence(self) -> Any:
        """Return Megatron's `PackedSeqParams` of the slice as if it were one sequence.

        Then rotary positions, those of its tokens (`positions`), are read in order; fused kernels
        begin each sequence with the first position otherwise. Attention gets the sequences.
        """
        whole_packed = self.kept.packed
        bounds = _sums([self.end - self.begin], whole_packed.cu_seqlens_q)
        unset = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
        if hasattr(whole_packed, "tokens_per_sample"):
            # Lengths of samples only matter where several are packed into one: slices take one.
            unset["tokens_per_sample"] = None
        return replace(whole_packed, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **unset)

    def positions(self, call: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the rotary positions of a slice, `[s, 1, 1, width]`.

        `call` is Megatron's `forward` of a table of positions.
        """
        if not arguments.get("packed_seq"):
            return call(**{**arguments, "offset": self.begin})
        result = call(**arguments)
        if isinstance(result, tuple):
            table, *further = result
            return (self._positions_in(table), *further)
        return self._positions_in(result)

    def _positions_in(self, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table of positions for the tokens of a packed slice."""
        documents = self.kept.documents
        num_tokens = documents[-1]
        places = torch.arange(num_tokens, device=table.device)
        if len(table) != num_tokens:  # else positions count through all sequences
            starts = torch.tensor(documents, device=table.device)
            document_of = torch.bucketize(places, starts, right=True) - 1
            places = places - starts[document_of]
        return table[places[self.begin : self.end]]

    def look_ahead(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Learn which tensors of the slice a layer of multi-token prediction shifts, `[b, s]`."""
        for name, tensor in (("tokens", input_ids), ("position_ids", position_ids)):
            self._rolled.setdefault(id(tensor), (name, 0, tensor))

    def roll(
        self, call: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run Megatron's `roll_tensor`: shift a tensor of the slice by a token of the next slice.

        Returns it, `[b, s]`, and the sum over the whole micro-batch: of a mask, the divisor of the
        loss.
        """
        # Megatron copies the labels before it shifts them.
        default = "labels"
        if tensor.is_floating_point():
            default = "loss_mask"
        name, shift, _ = self._rolled.get(id(tensor), (default, 0, tensor))
        shifted = self.kept.ahead[name]
        if "packed_seq_params" in kwargs:
            kwargs["packed_seq_params"] = self.kept.packed
        while len(shifted) < shift + 2:  # in the first slice only: others find it
            shifted.append(call(shifted[-1][0], *args, **kwargs))
        shifted_whole, total = shifted[shift + 1]
        part = shifted_whole[:, self.begin : self.end]
        # With the tensor: the id of one that is gone may become another's.
        self._rolled[id(part)] = name, shift + 1, part
        return part, total

    def route(
        self, call: Any, router: torch.nn.Module, logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run Megatron's `TopKRouter.routing`, and count the tokens of its balancing losses."""
        self._router, self._num_losses = router, 0
        if not torch.is_grad_enabled() and router.training and not self.is_backward:
            # Megatron leaves these losses to the recomputation of a layer, which is too late: its
            # slice then needs the counts of all. That counts tokens for the bias of experts too,
            # and this forward must not.
            bias_counts = getattr(router, "local_tokens_per_expert", None)
            before = None if bias_counts is None else bias_counts.clone()
            self._counts_only = True
            with torch.enable_grad():  # without, Megatron computes no losses
                call(logits, *args, **kwargs)
            self._counts_only, self._num_losses = False, 0
            if bias_counts is not None:
                bias_counts.copy_(before)
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
        """Return the share of a slice in the balancing loss of its micro-batch, a scalar.

        In place of Megatron's `switch_load_balancing_loss_func`, whose `fused` kernel computes the
        same.
        """
        sums = self.kept.balanced[id(self._router), self._num_losses]
        self._num_losses += 1
        # Counts and probabilities of slices add up, so only this factor needs the whole.
        all_tokens = total_num_tokens / self.share
        factor = num_experts * moe_aux_loss_coeff / (topk * all_tokens * all_tokens)
        loss: torch.Tensor = _Balance.apply(
            probs.sum(dim=0), tokens_per_expert, sums, factor, self._weight(), self.is_backward
        )
        return loss

    def z_loss(self, average: torch.Tensor) -> torch.Tensor:
        """Return a slice's share in the z-loss of its micro-batch, from the one of its tokens."""
        if self._counts_only:
            return average * 0  # the recomputation adds it
        loss, weight = average * self.share, self._weight()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)
        return loss

    def _weight(self) -> float:
        """Return the weight of a router's gradients, which Megatron may multiply by tokens."""
        if self._router.calculate_per_token_loss:
            return 1 / self.share
        return 1.0


class KeptState:
    """State of micro-batches in slices, kept by layers from first forward to last backward."""

    def __init__(self) -> None:
        # A plain attribute: autograd may run a backward, and with it recomputation, in another
        # thread.
        self.running: RunningSlice | None = None
        self.microbatches: defaultdict[tuple[int, int], _Microbatch] = defaultdict(_Microbatch)
        """By stage and number."""

    @contextmanager
    def of(
        self, stage: int, microbatch: int, number: int, bounds: Sequence[int], *, backward: bool
    ) -> Iterator[None]:
        """Let layers in the block compute slice `number`; slices begin and end at `bounds`."""
        begin, end = bounds[number : number + 2]
        state = self.microbatches[stage, microbatch]
        share = (end - begin) / bounds[-1]
        self.running = RunningSlice(state, number, begin, end, share, backward)
        try:
            yield
        finally:
            self.running = None

    def clear(self) -> None:
        """Forget all after a failed step."""
        self.running = None
        self.microbatches.clear()


# Megatron hands on a mask's name, but `AttnMaskType` lacks this one of Transformer Engine's.
_PACKED_BOTTOM_RIGHT: Any = SimpleNamespace(name="padding_causal_bottom_right")


def _packed_as_in_slice(packed: Any, documents: Sequence[_Document]) -> Any:
    """Return Megatron's `PackedSeqParams` for queries of a slice and keys up to its end."""
    num_queries = [document.end - document.begin for document in documents]
    num_keys = [document.end - document.first for document in documents]
    return replace(
        packed,
        cu_seqlens_q=_sums(num_queries, packed.cu_seqlens_q),
        cu_seqlens_kv=_sums(num_keys, packed.cu_seqlens_kv),
        max_seqlen_q=max(num_queries),
        max_seqlen_kv=max(num_keys),
    )


def _sums(lengths: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=like.dtype, device=like.device)


def with_earlier_slices(
    layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Join keys and values with those of the earlier slices of the micro-batch that runs.

    For causal attention of a model of one's own, which declares `runs_in_slices = True`: call it
    once in each forward of the layer, with those of the tokens that it got, `[s, ...]` each.
    Outside slices it returns what it gets.

    Returns:
        Keys and values of all tokens of the micro-batch up to the last one of `key`, and the
        position of the first one of `key`.
    """
    runtimes: Any = active.required().runtimes
    running = None if runtimes is None else runtimes.kept.running
    if running is None:
        return key, value, 0
    return *running.with_earlier(layer, key, value), running.begin


_ALONG_SEQUENCE = ("tokens", "input_ids", "labels", "loss_mask", "position_ids")
_OF_PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_LOOKS_AHEAD = ("tokens", "position_ids", "labels", "loss_mask")


class SlicedData(MicrobatchData):
    """The items of a chunk's data, each read once and cut into slices, which `view` numbers.

    Numbers run through all micro-batches of the step. `bounds` has the first token of each slice,
    and the number of all tokens.
    """

    def __init__(self, data: MicrobatchData, bounds: Sequence[int]) -> None:
        super().__init__(data.iterator, data.exchange, data.observers)
        self._bounds, self._count = bounds, len(bounds) - 1
        # Slices that come later find theirs here: an iterator gives each item once.
        self._parts: dict[int, dict[str, Any]] = {}

    def view(self, number: int) -> Iterator[Any] | None:
        """Return an iterator over a slice; None without data."""
        if self.iterator is not None and not hasattr(self.iterator, "__next__"):
            raise ScheduleError(
                f"slices are cut from what an iterator gives, but the data comes from a "
                f"{type(self.iterator).__name__}; give iter(data), or leave the slices out"
            )
        return super().view(number)

    def take(self, number: int) -> dict[str, Any]:
        """Return and drop a slice."""
        if number not in self._parts:
            self.whole(number // self._count)
        return self._parts.pop(number)

    def whole(self, microbatch: int) -> Mapping[str, Any] | None:
        """Return a micro-batch before its slices are read; None without data."""
        if self.iterator is None:
            return None
        item: Mapping[str, Any] = super().take(microbatch)
        self._parts |= dict(enumerate(_cut(item, self._bounds), microbatch * self._count))
        return item


def _cut(item: Any, bounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the slices of a micro-batch."""
    # The data iterator gives tensors `[b, s]` by name, the attention mask `[b, 1, s, s]`, True
    # where a token must not attend, and what each slice gets whole: bounds of packed sequences,
    # `[1, sequences + 1]`, and figures of samples, `[b]`.
    if not isinstance(item, Mapping):
        raise ScheduleError(
            f"slices are cut from a dict with tokens, labels, loss_mask and position_ids, but the "
            f"data iterator gives a {type(item).__name__}; leave the slices out"
        )
    num_tokens = bounds[-1]
    slices: list[dict[str, Any]] = []
    for begin, end in pairwise(bounds):
        fields = {}
        for name, tensor in item.items():
            if _is_whole_in_slices(name, tensor):
                fields[name] = tensor
            elif name in _ALONG_SEQUENCE and tensor.shape[1:] == (num_tokens,):
                fields[name] = tensor[:, begin:end].contiguous()
            elif name == "attention_mask" and tensor.shape[2:] == (num_tokens, num_tokens):
                fields[name] = tensor[:, :, begin:end, :end].contiguous()
            else:
                shape = list(getattr(tensor, "shape", ()))
                raise ScheduleError(
                    f"{name} {shape} of a micro-batch cannot be cut into slices of {num_tokens} "
                    "tokens; leave it out of the data, or leave the slices out"
                )
        slices.append(fields)
    return slices


def _is_whole_in_slices(name: str, tensor: Any) -> bool:
    """Return whether each slice gets a field of a micro-batch as it is."""
    if tensor is None:
        return True
    if name in _OF_PACKED:
        return len(tensor) == 1
    # Figures of samples have no tokens: the data set that each is from, for one.
    return name not in _ALONG_SEQUENCE and getattr(tensor, "ndim", 0) < 2


@dataclass
class SlicedCompute(StageCompute):
    """Runs the actions of a table of slices.

    To `StageCompute`, a slice is a micro-batch of its own, numbered through the step.
    """

    kept: KeptState = field(default_factory=KeptState, kw_only=True)
    """What layers keep from slice to slice."""
    _num_tokens_of: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """By number of a slice: what the loss function counts, on the rank of the last stage."""
    _number: int = field(default=0, init=False)
    """The slice whose forward runs."""

    def __post_init__(self) -> None:
        """Cut the data of the step, and keep apart what the loss of a slice is divided by."""
        call, schedule = self.call, self.table.schedule
        # Tensor-parallel ranks hold equal parts of a slice.
        multiple = 1
        if call.config.sequence_parallel:
            multiple = call.config.tensor_model_parallel_size
        self._num_slices = schedule.num_slices
        self._bounds = token_bounds(schedule.slices, call.seq_length, multiple)
        self._user_step = call.forward_step_func
        self.call = replace(
            call,
            data=[SlicedData(data, self._bounds) for data in call.data],
            forward_step_func=self._forward_step,
        )

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action, as `StageCompute.run`.

        Raises:
            ScheduleError: The model, its data or its loss function are not made for slices.
        """
        stage, kind, microbatch, part = action
        number = self._numbered(action)
        numbered = action._replace(microbatch=number, slice=0)
        if kind == "W":  # needs nothing that layers keep
            return super().run(numbered, inputs)
        if kind == "F" and part == 0:
            # Once in a step: hooks come and go between steps, and a large model takes milliseconds.
            if not self._forwards[stage]:
                check_model(self._stage(stage).model)
            if getattr(self.call.config, "mtp_num_layers", None):
                self._look_ahead(stage, microbatch, inputs)
        # For the loss function, which Megatron calls inside without saying for which slice.
        self._number = number
        with self.kept.of(stage, microbatch, part, self._bounds, backward=kind != "F"):
            outputs = super().run(numbered, inputs)
        if kind == "F" and part == 0:
            self._check_effect(stage, microbatch)
        if kind == "F" and part == self._num_slices - 1 and self._stage(stage).is_last:
            self._complete_loss(stage, microbatch)
        if kind != "F" and part == 0:  # the last of its backwards
            del self.kept.microbatches[stage, microbatch]
        return outputs

    def _check_effect(self, stage: int, microbatch: int) -> None:
        """Check that all layers of a stage have kept keys and values: patches may be out of use."""
        model = self._stage(stage).model
        if declares_slices(model):
            return
        num_layers = len(sliced_layers(model))
        num_kept = len(self.kept.microbatches[stage, microbatch].attention)
        if num_kept != num_layers:
            raise ScheduleError(
                f"{num_kept} of {num_layers} layers of stage {stage} kept keys and values "
                "for later slices (patch slices.attention); leave the slices out"
            )

    def saved_tensors(self, action: Action) -> tuple[Tensors, Tensors] | None:
        """Return the inputs and outputs kept for a backward; None once it has run."""
        return super().saved_tensors(action._replace(microbatch=self._numbered(action)))

    def _numbered(self, action: Action) -> int:
        return action.microbatch * self._num_slices + action.slice

    def _forward_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the user's forward step, whose loss is divided by the tokens of the micro-batch."""
        number = self._number
        output, loss_of = self._user_step(*args, **kwargs)

        def loss(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            results = loss_of(tensor, *args, **kwargs)
            if len(results) != 3:
                raise ScheduleError(
                    "the loss function returns an average over a slice, which says nothing about "
                    "the micro-batch; return (sum of losses, number of tokens, report)"
                )
            total, num_tokens, report = results
            self._num_tokens_of[number] = num_tokens
            if self.call.config.calculate_per_token_loss:
                return total, num_tokens, report
            return total, torch.ones_like(num_tokens), report  # divided when all are counted

        return output, loss

    def _look_ahead(self, stage: int, microbatch: int, inputs: Tensors) -> None:
        """Keep what multi-token prediction reads of the next slices, by the rank with data."""
        place = self._stage(stage)
        if not (place.is_last or getattr(unwrap_model(place.model), "mtp_process", False)):
            return
        assert isinstance(place.data, SlicedData)
        item, device = place.data.whole(microbatch), device_of(self.call.chunks)
        group = parallel_state.get_tensor_model_parallel_group()
        ahead = self.kept.microbatches[stage, microbatch].ahead
        for name in _LOOKS_AHEAD:
            dtype = torch.int64
            if name == "loss_mask":
                dtype = torch.float32
            if item is not None:
                tensor = item[name].to(device, dtype)
            else:
                received = inputs[0]
                assert received is not None, "the first stage predicts no later tokens"
                # Micro-batches may have several sizes, and only activations come here.
                shape = received.shape[1], self._bounds[-1]
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if group.size() > 1:
                source = parallel_state.get_tensor_model_parallel_src_rank()
                dist.broadcast(tensor, source, group=group)
            ahead[name] = [(tensor, tensor.sum())]

    def _complete_loss(self, stage: int, microbatch: int) -> None:
        """Divide the losses of a micro-batch by its tokens, and add up the reports of its slices.

        No backward of it has run: the first waits for the forward of its last slice.
        """
        first = microbatch * self._num_slices
        numbers = range(first, first + self._num_slices)
        counts = [self._num_tokens_of.pop(number) for number in numbers]
        # Per token, Megatron divides gradients by the tokens of the step.
        if not self.call.config.calculate_per_token_loss:
            num_tokens = torch.clamp(torch.stack(counts).sum(), min=1)
            for number in numbers:
                outputs = self._live[stage, number][1]
                assert outputs[0] is not None
                outputs[0] /= num_tokens  # in place, as Megatron divides it
        reports = [self.reports.pop(number) for number in numbers]
        self.reports[first] = {name: _sum(name, reports) for name in reports[0]}


def _sum(name: str, reports: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a figure of all slices together, `[2]`: a sum over tokens, and their number."""
    values = [torch.as_tensor(report[name]) for report in reports]
    if any(value.numel() != 2 for value in values):
        raise ScheduleError(
            f"the loss function reports {name} of a slice as one number, which says nothing about "
            "the micro-batch; report a tensor of the sum of losses and the number of tokens"
        )
    return torch.stack(values).sum(dim=0)
