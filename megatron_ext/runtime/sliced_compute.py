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
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import unwrap_model

from megatron_ext.config import active
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.compute import MicrobatchData, StageCompute
from megatron_ext.schedules.table.slices import token_bounds
from megatron_ext.upstream.signatures import megatron_arguments

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action

__all__ = ["KeptState", "SlicedCompute", "SlicedData", "with_earlier_slices"]


@dataclass
class _Running:
    """The slice whose forward or backward runs."""

    kept: _Microbatch
    number: int
    """Position of the slice in its micro-batch."""
    begin: int
    """First of its tokens."""
    share: float
    """Its tokens, as a share of the micro-batch's."""
    mask: torch.Tensor | None = None
    """True where a token must not attend, `[1, 1, s, tokens up to its end]`; for all layers."""
    num_losses: int = 0
    """Balancing losses so far; in a forward, layers come in the same order for all slices."""


class _Kept:
    """The keys of one layer for one micro-batch, `[s, b, heads, width]` by slice, or its values."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        """What later slices add to the gradient of a slice."""


class _Joined(torch.autograd.Function):
    """Appends the keys, or values, of a slice to those of the slices before it.

    The slices before are no inputs to autograd: each has a graph of its own, whose backward runs
    later and takes the gradients that this one leaves.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, kept: _Kept, number: int) -> torch.Tensor:
        # A view would keep the projection that queries, keys and values are parts of. Recomputation
        # runs this again, with the same result.
        kept.made[number] = own.detach().contiguous()
        ctx.kept, ctx.number = kept, number
        return torch.cat([kept.made[part] for part in range(number + 1)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        kept, number = ctx.kept, ctx.number
        lengths = [len(kept.made[part]) for part in range(number + 1)]
        *before, own = gradients[0].split(lengths)
        for part, gradient in enumerate(before):
            if part in kept.gradients:
                kept.gradients[part] += gradient
            else:
                kept.gradients[part] = gradient.clone()
        del kept.made[number]
        later = kept.gradients.pop(number, None)
        return own if later is None else own + later, None, None


@dataclass
class _Balanced:
    """Sums over the slices so far in one router, `[experts]` each."""

    counts: torch.Tensor | float = 0.0
    """Tokens sent to each expert."""
    probabilities: torch.Tensor | float = 0.0


class _Balance(torch.autograd.Function):
    """The balancing loss of a slice: `factor` times its probabilities times all slices' counts.

    Its value is what the slice adds to the loss of the slices so far, so that values add up to the
    micro-batch's. Its gradient needs the counts of later slices, which are known in a backward.
    """

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, counts: torch.Tensor, sums: _Balanced, factor: float
    ) -> torch.Tensor:
        ctx.sums, ctx.factor = sums, factor
        before = torch.sum(sums.probabilities * torch.as_tensor(sums.counts))
        sums.probabilities, sums.counts = sums.probabilities + own, sums.counts + counts
        return (torch.sum(sums.probabilities * sums.counts) - before) * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0] * ctx.factor * ctx.sums.counts, None, None, None


@dataclass
class _Microbatch:
    """State of one micro-batch that the layers of a stage keep."""

    attention: dict[int, tuple[_Kept, _Kept]] = field(default_factory=dict)
    """Keys and values by id of the layer."""
    balanced: defaultdict[int, _Balanced] = field(default_factory=lambda: defaultdict(_Balanced))
    """By position of a balancing loss in a forward."""


class KeptState:
    """State of micro-batches in slices, kept by layers from first forward to last backward.

    The running slice is a plain attribute: autograd may run a backward, and with it recomputation,
    in another thread.
    """

    def __init__(self) -> None:
        self.running: _Running | None = None
        self.microbatches: defaultdict[tuple[int, int], _Microbatch] = defaultdict(_Microbatch)
        """By stage and number."""

    @contextmanager
    def of(self, stage: int, microbatch: int, number: int, bounds: Sequence[int]) -> Iterator[None]:
        """Let the layers that run in the block compute a slice.

        Args:
            stage: Global index of the stage.
            microbatch: 0 to m-1.
            number: Position of the slice in it.
            bounds: The first token of each slice, and the number of all tokens.
        """
        begin, end = bounds[number : number + 2]
        kept = self.microbatches[stage, microbatch]
        self.running = _Running(kept, number, begin, (end - begin) / bounds[-1])
        try:
            yield
        finally:
            self.running = None

    def with_earlier(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens up to the end of the slice, `[s, ...]` each."""
        running = self.running
        assert running is not None
        keys, values = running.kept.attention.setdefault(id(layer), (_Kept(), _Kept()))
        key = _Joined.apply(key, keys, running.number)
        return key, _Joined.apply(value, values, running.number)

    def attend(
        self,
        call: Any,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> torch.Tensor:
        """Return the attention of a slice, `[s, b, h]`, over all tokens up to its end.

        Args:
            call: `DotProductAttention.forward` of Megatron's.
            layer: The layer.
            query: Of the slice, `[s, b, heads, width]`.
            key: Of the slice, `[s, b, groups, width]`.
            value: Of the slice, `[s, b, groups, width]`.
            attention_mask: True where a token must not attend, `[b, 1, s, tokens up to its end]`;
                None: to those after it.
            others: Further arguments of `call`.

        Raises:
            ScheduleError: Sequences are packed.
        """
        if others.get("packed_seq_params") is not None:
            raise ScheduleError(
                "a micro-batch of packed sequences cannot run in slices; leave the slices out"
            )
        key, value = self.with_earlier(layer, key, value)
        running = self.running
        assert running is not None
        if attention_mask is None:
            if running.mask is None:
                rows = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
                running.mask = rows.triu_(len(key) - len(query) + 1)[None, None]
            attention_mask = running.mask
        result: torch.Tensor = call(query, key, value, attention_mask, **others)
        return result

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

        Takes the arguments of Megatron's `switch_load_balancing_loss_func`.

        Args:
            probs: Of the tokens of the slice on this rank, `[tokens, experts]`.
            tokens_per_expert: Tokens of the slice that each expert gets, `[experts]`.
            total_num_tokens: Tokens of the slice.
            topk: Experts of a token.
            num_experts: All of them.
            moe_aux_loss_coeff: Factor of the loss.
            fused: Ignored; Megatron's kernel computes the same.
        """
        running = self.running
        assert running is not None
        sums = running.kept.balanced[running.num_losses]
        running.num_losses += 1
        all_tokens = total_num_tokens / running.share
        factor = num_experts * moe_aux_loss_coeff / (topk * all_tokens * all_tokens)
        loss: torch.Tensor = _Balance.apply(probs.sum(dim=0), tokens_per_expert, sums, factor)
        return loss

    def clear(self) -> None:
        """Forget all after a failed step."""
        self.running = None
        self.microbatches.clear()


def with_earlier_slices(
    layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Join keys and values with those of the earlier slices of the micro-batch that runs.

    For causal attention of a model of one's own, which declares `runs_in_slices = True`: call it
    once in each forward of the layer. Outside slices it returns what it gets.

    Args:
        layer: The layer; it keeps them.
        key: Of the tokens that the layer got, `[s, ...]`.
        value: The same of values.

    Returns:
        Keys and values of all tokens of the micro-batch up to the last one of `key`, and the
        position of the first one of `key`.
    """
    state = active.required().state(KeptState)
    if state.running is None:
        return key, value, 0
    return *state.with_earlier(layer, key, value), state.running.begin


_ALONG_SEQUENCE = ("tokens", "input_ids", "labels", "loss_mask", "position_ids")


class SlicedData(MicrobatchData):
    """Cuts the items of another `MicrobatchData`, each read once, into slices.

    Args:
        whole: The micro-batches.
        bounds: The first token of each slice, and the number of all tokens.
    """

    def __init__(self, whole: MicrobatchData, bounds: Sequence[int]) -> None:
        super().__init__(None)
        self._whole, self._bounds = whole, bounds
        self._parts: dict[int, dict[str, Any]] = {}

    def view(self, number: int) -> Iterator[Any] | None:
        """Return an iterator over one slice, numbered through all micro-batches of the step."""
        microbatch, part = divmod(number, len(self._bounds) - 1)
        items = self._whole.view(microbatch)
        return None if items is None else self._items(items, number - part, number)

    def _items(self, items: Iterator[Any], first: int, number: int) -> Iterator[Any]:
        if number == first:
            for part, item in enumerate(_cut(next(items), self._bounds)):
                self._parts[first + part] = item
        yield self._parts.pop(number)


def _cut(item: Any, bounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the slices of a micro-batch.

    Args:
        item: What the data iterator gives: tensors `[b, s]` by name, and the attention mask
            `[b, 1, s, s]`, True where a token must not attend.
        bounds: As `SlicedData` takes them.

    Raises:
        ScheduleError: It is something else.
    """
    if not isinstance(item, Mapping):
        raise ScheduleError(
            f"slices are cut from a dict with tokens, labels, loss_mask and position_ids, but the "
            f"data iterator gives a {type(item).__name__}; leave the slices out"
        )
    parts: list[dict[str, Any]] = [{} for _ in bounds[1:]]
    for name, tensor in item.items():
        if tensor is None:
            cut = [None for _ in parts]
        elif name in _ALONG_SEQUENCE and tensor.shape[1:] == (bounds[-1],):
            cut = [tensor[:, begin:end].contiguous() for begin, end in pairwise(bounds)]
        elif name == "attention_mask" and tensor.shape[2:] == (bounds[-1], bounds[-1]):
            cut = [tensor[:, :, begin:end, :end].contiguous() for begin, end in pairwise(bounds)]
        else:
            raise ScheduleError(
                f"{name} {list(getattr(tensor, 'shape', ()))} of a micro-batch cannot be cut into "
                f"slices of {bounds[-1]} tokens; leave it out of the data, or leave the slices out"
            )
        for part, tensor_of_slice in zip(parts, cut, strict=True):
            part[name] = tensor_of_slice
    return parts


@dataclass
class SlicedCompute(StageCompute):
    """Runs the actions of a table of slices.

    To `StageCompute`, a slice is a micro-batch of its own, numbered through the step.
    """

    _num_tokens_of: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """By number of a slice: what the loss function counts, on the rank of the last stage."""
    _number: int = field(default=0, init=False)
    """The slice whose forward runs."""

    def __post_init__(self) -> None:
        """Cut the data of the step, and keep apart what the loss of a slice is divided by."""
        call = self.call
        self.kept = active.required().state(KeptState)
        multiple = call.config.tensor_model_parallel_size if call.config.sequence_parallel else 1
        self._bounds = token_bounds(self.table.schedule.slices, call.seq_length, multiple)
        self.call = replace(
            call,
            data=[SlicedData(data, self._bounds) for data in call.data],
            forward_step_func=self._forward_step,
        )
        self._whole_call = call

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action for the executor (`executor.Compute`).

        Raises:
            ScheduleError: The model, its data or its loss function are not made for slices.
        """
        stage, kind, microbatch, part = action
        number = self._numbered(action)
        numbered = action._replace(microbatch=number, slice=0)
        if kind == "W":
            return super().run(numbered, inputs)
        if kind == "F" and part == 0:
            _check_model(self._stage(stage).model)
        self._number = number
        with self.kept.of(stage, microbatch, part, self._bounds):
            outputs = super().run(numbered, inputs)
        if kind == "F":
            if part == 0:
                self._check_kept(stage, microbatch)
            is_last_slice = part == self.table.schedule.num_slices - 1
            if is_last_slice and self._stage(stage).is_last:
                self._complete_loss(stage, microbatch)
        elif part == 0:
            del self.kept.microbatches[stage, microbatch]
        return outputs

    def saved_tensors(self, action: Action) -> tuple[Tensors, Tensors] | None:
        """Return the inputs and outputs kept for a backward; None once it has run."""
        return super().saved_tensors(action._replace(microbatch=self._numbered(action)))

    def _numbered(self, action: Action) -> int:
        return action.microbatch * self.table.schedule.num_slices + action.slice

    def _forward_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the user's forward step, whose loss is divided by the tokens of the micro-batch."""
        number = self._number
        part = number % self.table.schedule.num_slices
        arguments = megatron_arguments()
        # Scripts give tensor-parallel ranks buffers of this length: upstream's, in `get_batch_on_
        # this_tp_rank`, and that of the wheel (`training/wheel.py`), so one patch would not do.
        if arguments is not None:
            arguments.seq_length = self._bounds[part + 1] - self._bounds[part]
        try:
            output, loss_of = self._whole_call.forward_step_func(*args, **kwargs)
        finally:
            if arguments is not None:
                arguments.seq_length = self._bounds[-1]

        def loss(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = loss_of(tensor, *args, **kwargs)
            if len(found) != 3:
                raise ScheduleError(
                    "the loss function returns an average over a slice, which says nothing about "
                    "the micro-batch; return (sum of losses, number of tokens, report)"
                )
            total, num_tokens, report = found
            self._num_tokens_of[number] = num_tokens
            if self.call.config.calculate_per_token_loss:
                return total, num_tokens, report
            return total, torch.ones_like(num_tokens), report  # divided when all are counted

        return output, loss

    def _complete_loss(self, stage: int, microbatch: int) -> None:
        """Divide the losses of a micro-batch by its tokens, and add up the reports of its slices.

        No backward of it has run: the first waits for the forward of its last slice.
        """
        first = microbatch * self.table.schedule.num_slices
        numbers = range(first, first + self.table.schedule.num_slices)
        counts = [self._num_tokens_of.pop(number) for number in numbers]
        if not self.call.config.calculate_per_token_loss:
            whole = torch.clamp(torch.stack(counts).sum(), min=1)
            for number in numbers:
                outputs = self._live[stage, number][1]
                assert outputs[0] is not None
                outputs[0] /= whole  # in place, as Megatron divides it
        reports = [self.reports.pop(number) for number in numbers]
        self.reports[first] = {name: _sum(name, reports) for name in reports[0]}

    def _check_kept(self, stage: int, microbatch: int) -> None:
        """Check the effect of the patches: each layer has kept keys and values."""
        model = unwrap_model(self._stage(stage).model)
        if getattr(model, "runs_in_slices", False):
            return
        layers = len(model.decoder.layers)
        kept = len(self.kept.microbatches[stage, microbatch].attention)
        if kept != layers:
            raise ScheduleError(
                f"{kept} of {layers} layers of stage {stage} kept keys and values for later slices "
                "(patch slices.attention); leave the slices out"
            )


def _sum(name: str, reports: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a figure of all slices together, `[2]`: a sum over tokens, and their number."""
    values = [torch.as_tensor(report[name]) for report in reports]
    if any(value.numel() != 2 for value in values):
        raise ScheduleError(
            f"the loss function reports {name} of a slice as one number, which says nothing about "
            "the micro-batch; report a tensor of the sum of losses and the number of tokens"
        )
    return torch.stack(values).sum(dim=0)


def _check_model(model: torch.nn.Module) -> None:
    """Check that all that connects tokens of a sequence is attention that keeps its state.

    Raises:
        ScheduleError: Something else might.
    """
    from megatron.core.models.gpt import GPTModel  # other models need not import it

    reader = unwrap_model(model)
    if getattr(reader, "runs_in_slices", False):  # see with_earlier_slices
        return
    wrong = None
    if type(reader) is not GPTModel:
        wrong = f"a {type(reader).__name__}"
    elif getattr(reader, "mtp_process", False):
        wrong = "a model with multi-token prediction"
    else:
        for layer in reader.decoder.layers:
            core: Any = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            if type(core) is not DotProductAttention:
                wrong = f"a layer with {type(core).__name__}"
            elif core.attn_mask_type is not AttnMaskType.causal:
                wrong = "attention to later tokens"
    if wrong is not None:
        raise ScheduleError(
            f"slices are for a GPTModel with causal DotProductAttention in all layers "
            f"(--transformer-impl local), and for models that declare runs_in_slices "
            f"(docs/slices.md), not for {wrong}; leave the slices out"
        )
