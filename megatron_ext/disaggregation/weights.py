"""Transfers new weights from backward ranks, which train them, to forward ranks.

After each optimizer step a backward rank announces whether it updated its weights and sends them in
buckets. A forward rank receives them before its next forward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model

from megatron_ext.errors import TransportError
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.config.roles import Job
    from megatron_ext.transport.base import Transport

_BUCKET_BYTES = 32 << 20


def _message(job: Job, number: int, *, header: bool = False) -> Message:
    """Return the name of a bucket, or of the header that describes the layout of sharded ones."""
    return Message("W", job.place.pp, number, header=header)


class _Weight(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    num_shards: int
    """Backward ranks that hold parts of it, for one forward rank with the whole."""
    gated: bool
    """True if it fuses two matrices, so that each shard has a part of both."""

    @property
    def numel(self) -> int:
        """Elements in one message."""
        return self.parameter.numel() // self.num_shards


# Weights, each with the index of its first element within one message.
_Bucket = list[tuple[_Weight, int]]


def _weights(job: Job, chunks: Sequence[torch.nn.Module]) -> Iterator[_Weight]:
    """Yield the weights of a stage, in the same order for both roles."""
    merged = job.ranks.merged and job.role == "forward"
    num_shards = job.ranks.tp if merged else 1
    for module in unwrap_model(list(chunks)):
        gated = bool(module.config.gated_linear_unit)
        for name, parameter in module.named_parameters():
            sharded = getattr(parameter, "tensor_model_parallel", False)
            fused = gated and ".linear_fc1." in name
            yield _Weight(name, parameter, num_shards if sharded else 1, fused)


def _portions(weights: Iterable[_Weight]) -> Iterator[_Bucket]:
    """Yield buckets of weights of one dtype, up to 32 MiB each, the same for both roles."""
    # Cut by the sizes of what travels, which both roles compute alike, so no layout has to travel.
    bucket: _Bucket = []
    size = 0
    for weight in weights:
        size_of_one = weight.parameter.element_size()
        other_dtype = bucket and _dtype(bucket) != weight.parameter.dtype
        if bucket and (other_dtype or (size + weight.numel) * size_of_one > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((weight, size))
        size += weight.numel
    if bucket:
        yield bucket


def _dtype(bucket: _Bucket) -> torch.dtype:
    return bucket[0][0].parameter.dtype


def _flat(bucket: _Bucket) -> torch.Tensor:
    return torch.cat([weight.parameter.detach().reshape(-1) for weight, _ in bucket])


# By bucket: the names of weights and their first elements.
_Layout = list[list[tuple[str, int]]]


def _shared_buckets(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Yield Megatron's buffers and buckets; each replica updates a shard of every bucket."""
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from ((buffer, bucket) for bucket in buffer.buckets)


def _layout(chunks: Sequence[torch.nn.Module]) -> _Layout:
    modules = unwrap_model(list(chunks))
    names = {p: name for module in modules for name, p in module.named_parameters()}
    return [
        # Not `param_to_index`: that ignores the alignment of weights.
        [(names[p], buffer.param_index_map[p][0] - bucket.offset) for p in bucket.params_list]
        for buffer, bucket in _shared_buckets(chunks)
    ]


def _buffers(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what routers save besides their weights, such as the bias of their experts."""
    return [
        buffer
        for chunk in unwrap_model(list(chunks))
        for module in chunk.modules()
        if isinstance(module, Router)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _travels_as(buffer: torch.Tensor) -> torch.dtype:
    # Routers keep their bias in fp32, but only from their first forward on.
    return torch.float32 if buffer.is_floating_point() else buffer.dtype


def _frozen(weights: Iterable[_Weight], layout: _Layout) -> list[_Bucket]:
    """Return buckets of the weights that are in none of Megatron's: those that do not train."""
    trained = {name for bucket in layout for name, _ in bucket}
    return list(_portions(weight for weight in weights if weight.name not in trained))


class _Side:
    """One end of the transfers, with its model in its wrappers."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._wire = wire
        self._chunks = chunks
        self._partners = [job.ranks.rank(place) for place in job.weight_partners]
        # Of shared weights, those that only the first transfer has.
        self._frozen: list[_Bucket] = []


class WeightSender(_Side):
    """The side of a backward rank."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(job, wire, chunks)
        self._buckets = list(_portions(_weights(job, chunks)))
        if job.shares_weights:
            layout = _layout(chunks)
            self._frozen = _frozen(_weights(job, chunks), layout)
            encoded = bytearray(json.dumps(layout).encode())
            wire.begin([], 1)
            self._isend(torch.frombuffer(encoded, dtype=torch.uint8), _message(job, 0, header=True))

    def catch_up(self) -> None:
        """Do nothing: this side has the weights."""

    def step_done(self, *, updated: bool) -> None:
        """Send buffers, and the weights or the message that they are unchanged."""
        # With loss scaling the optimizer may have skipped the step, but buffers have changed.
        states = [buffer.to(_travels_as(buffer)) for buffer in _buffers(self._chunks)]
        parts = [state.reshape(-1).view(torch.uint8).cpu() for state in states]
        self._wire.begin([], 1)
        notice = torch.cat([torch.tensor([updated], dtype=torch.uint8), *parts])
        self._isend(notice, _message(self._job, 0))
        if updated:
            self._wire.begin([], 1)
            # Nothing is flushed: the next forwards and the loading of data overlap with these
            # sends.
            for number, flat in enumerate(self._flats(), start=1):
                self._isend(flat.cpu(), _message(self._job, number))

    def _isend(self, tensor: torch.Tensor, message: Message) -> None:
        for target in self._partners:
            self._wire.isend(tensor, target, message)

    def _flats(self) -> Iterator[torch.Tensor]:
        """Yield this replica's shard of each bucket, or whole buckets with all updates gathered."""
        # Copies: the next optimizer step may begin before the tensors are sent.
        if self._job.shares_weights:
            # Replicas gather weights only in their next forward (the distributed optimizer with
            # --overlap-param-gather). Instead of waiting for that, each sends its updated shard to
            # the forward ranks of all replicas, which assemble the buckets of Megatron's gradient
            # buffers.
            shared = (bucket.param_data.view(-1) for _, bucket in _shared_buckets(self._chunks))
            for whole in chain(shared, map(_flat, self._frozen)):
                shares = whole.tensor_split(self._job.ranks.dp)
                yield shares[self._job.place.dp].detach().clone()
            self._frozen = []
            return
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        yield from map(_flat, self._buckets)


class WeightReceiver(_Side):
    """The side of a forward rank."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(job, wire, chunks)
        self._due = 0  # transfers that have not been received yet
        weights = list(_weights(job, chunks))
        if job.shares_weights:
            message = _message(job, 0, header=True)
            self._begin({message: torch.uint8})
            # All backward ranks have the same layout.
            [encoded, *_] = [self._recv(source, message) for source in self._partners]
            layout: _Layout = json.loads(encoded.numpy().tobytes())
            by_name = {weight.name: weight for weight in weights}
            self._buckets = [
                [(by_name[name], start) for name, start in bucket] for bucket in layout
            ]
            self._frozen = _frozen(weights, layout)
        else:
            self._buckets = list(_portions(weights))

    def _begin(self, expected: Mapping[Message, torch.dtype]) -> None:
        """Expect messages from each partner."""
        of_all = [
            Expected(source, message, None, dtype)
            for message, dtype in expected.items()
            for source in self._partners
        ]
        self._wire.begin(of_all, len(expected))

    def _recv(self, source: int, message: Message) -> torch.Tensor:
        try:
            return self._wire.recv(source, message, self._job.timeout_s)
        except TransportError as error:
            raise type(error)(
                f"{self._job.name_of(None)} waits for {self._job.name_of(source)}: {error}"
            ) from error

    def step_done(self, *, updated: bool) -> None:
        """Expect a transfer; only the other side knows whether weights were updated."""
        self._due += 1

    def catch_up(self) -> None:
        """Wait for the weights of the next step, and load them if they are new."""
        for _ in range(self._due):
            self.receive()
        self._due = 0

    def receive(self) -> None:
        """Receive one transfer."""
        self._begin({_message(self._job, 0): torch.uint8})
        notices = [self._recv(source, _message(self._job, 0)) for source in self._partners]
        taken = 1  # all sources hold the same buffers
        for buffer in _buffers(self._chunks):
            dtype = _travels_as(buffer)
            end = taken + buffer.numel() * dtype.itemsize
            buffer.data = notices[0][taken:end].clone().view(dtype).view(buffer.shape)
            taken = end
        if any(bool(notice[0]) for notice in notices):
            buckets, self._frozen = self._buckets + self._frozen, []
            messages = [_message(self._job, number + 1) for number in range(len(buckets))]
            self._begin(dict(zip(messages, map(_dtype, buckets), strict=True)))
            for bucket, message in zip(buckets, messages, strict=True):
                parts = [self._recv(source, message) for source in self._partners]
                if self._job.shares_weights:
                    # Ordered by replica: one bucket for each tensor-parallel rank.
                    num_shards = len(parts) // self._job.ranks.dp
                    parts = [torch.cat(parts[shard::num_shards]) for shard in range(num_shards)]
                _unpack(bucket, parts)


@torch.no_grad()
def _unpack(bucket: _Bucket, shards: Sequence[torch.Tensor]) -> None:
    """Copy a bucket of each shard into the weights of a forward rank."""
    for weight, start in bucket:
        parameter = weight.parameter
        parts = [shard[start : start + weight.numel] for shard in shards]
        if weight.num_shards == 1:
            parameter.copy_(parts[0].view_as(parameter))
            continue
        dim: int = parameter.partition_dim  # type: ignore[attr-defined]
        shape = list(parameter.shape)
        shape[dim] //= weight.num_shards
        matrices = [part.view(shape) for part in parts]
        if weight.gated:
            halves = zip(*(matrix.chunk(2, dim) for matrix in matrices), strict=True)
            matrices = [half for half_of_all in halves for half in half_of_all]
        parameter.copy_(torch.cat(matrices, dim))
