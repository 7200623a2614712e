"""Brings new weights from backward ranks, which train them, to forward ranks.

After each optimizer step a backward rank says whether it updated its weights (with loss scaling it
may have skipped the step) and sends them in buckets; sends return at once, so the next forwards and
the loading of data overlap with them. A forward rank takes them before its next forward. The first
transfer makes both roles equal, whatever they were initialised or loaded with.

Where replicas gather each other's weights only in their next forward (the distributed optimizer
with --overlap-param-gather), nobody waits for that: each replica sends the share that it updated to
the forward ranks of all replicas, and they put the buckets of Megatron's gradient buffers together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_ext.messages import Message
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.disaggregation.link import RoleLink

__all__ = ["WeightReceiver", "WeightSender"]

_BUCKET_BYTES = 32 << 20
_LAYOUT = 1
"""Part of the first message that says how shared buckets are filled."""


def _message(job: Job, number: int, part: int = 0) -> Message:
    return Message("W", job.place.pp, number, part)


class _Weight(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    num_shards: int
    """Backward ranks that hold it in parts, for one forward rank with the whole."""
    gated: bool
    """Whether it holds two matrices, so that each shard has a part of both."""

    @property
    def numel(self) -> int:
        """Elements in one message."""
        return self.parameter.numel() // self.num_shards


class _Placed(NamedTuple):
    """A weight in a bucket."""

    weight: _Weight
    start: int
    """Its first element, counted in one message."""


_Bucket = list[_Placed]


def _weights(job: Job, chunks: Sequence[torch.nn.Module]) -> Iterator[_Weight]:
    """Yield the weights of a stage; the same in the same order for either role."""
    merged = job.ranks.merged and job.role == "forward"
    num_shards = job.ranks.tp if merged else 1
    for module in unwrap_model(list(chunks)):
        gated = bool(module.config.gated_linear_unit)
        for name, parameter in module.named_parameters():
            sharded = getattr(parameter, "tensor_model_parallel", False)
            fused = gated and ".linear_fc1." in name
            yield _Weight(name, parameter, num_shards if sharded else 1, fused)


def _portions(weights: Iterable[_Weight]) -> Iterator[_Bucket]:
    """Yield weights of one dtype, some megabytes each; the same portions for either role."""
    bucket: _Bucket = []
    size = 0
    for weight in weights:
        size_of_one = weight.parameter.element_size()
        other_dtype = bucket and bucket[0].weight.parameter.dtype != weight.parameter.dtype
        if bucket and (other_dtype or (size + weight.numel) * size_of_one > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(_Placed(weight, size))
        size += weight.numel
    if bucket:
        yield bucket


_Layout = list[list[tuple[str, int]]]
"""By bucket, the names of weights and where each begins."""


def _shared_buckets(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Yield Megatron's buckets, of which each replica updates a share, and the buffer of each."""
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from ((buffer, bucket) for bucket in buffer.buckets)


def _layout(chunks: Sequence[torch.nn.Module]) -> _Layout:
    modules = unwrap_model(list(chunks))
    names = {p: name for module in modules for name, p in module.named_parameters()}
    return [
        # Not `param_to_index`: that leaves out how weights are aligned.
        [(names[p], buffer.param_index_map[p][0] - bucket.offset) for p in bucket.params_list]
        for buffer, bucket in _shared_buckets(chunks)
    ]


class WeightSender:
    """The side of a backward rank.

    Args:
        job: Whose weights they are.
        link: To the forward ranks with the same weights.
        chunks: The model of this rank, in its wrappers.
    """

    def __init__(self, job: Job, link: RoleLink, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._link = link
        self._chunks = chunks
        self._buckets = list(_portions(_weights(job, chunks)))
        self._targets = [job.ranks.rank(place) for place in job.weight_partners]
        self.num_transfers = 0
        self.busy_s = 0.0
        """Time for which new weights kept this process, so far."""
        if job.shares_weights:
            layout = bytearray(json.dumps(_layout(chunks)).encode())
            link.begin([], 1)
            self._isend(torch.frombuffer(layout, dtype=torch.uint8), _message(job, 0, _LAYOUT))

    def send(self, *, updated: bool) -> None:
        """Send the weights, or that they are what they were."""
        begin_s = time.perf_counter()
        self._link.begin([], 1)
        self._isend(torch.tensor([updated], dtype=torch.uint8), _message(self._job, 0))
        if updated:
            self._link.begin([], 1)
            flats = self._shares() if self._job.shares_weights else self._whole()
            for number, flat in enumerate(flats, start=1):
                self._isend(flat.cpu(), _message(self._job, number))
            self.num_transfers += 1
        self.busy_s += time.perf_counter() - begin_s

    def _isend(self, tensor: torch.Tensor, message: Message) -> None:
        for target in self._targets:
            self._link.wire.isend(tensor, target, message)

    # Copies in both: the next optimizer step may come before they have left.

    def _whole(self) -> Iterator[torch.Tensor]:
        """Yield each bucket, once this replica knows what the others updated."""
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        for bucket in self._buckets:
            yield torch.cat([placed.weight.parameter.detach().reshape(-1) for placed in bucket])

    def _shares(self) -> Iterator[torch.Tensor]:
        """Yield what this replica updated of each bucket."""
        ranks = self._job.ranks
        for _, bucket in _shared_buckets(self._chunks):
            share = bucket.param_data.view(-1).chunk(ranks.dp)[self._job.place.dp]
            yield share.detach().clone()


class WeightReceiver:
    """The side of a forward rank.

    Args:
        job: Whose weights they are.
        link: To the backward ranks with the same weights, or parts of them.
        chunks: The model of this rank, in its wrappers.
    """

    def __init__(self, job: Job, link: RoleLink, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._link = link
        self._sources = [job.ranks.rank(place) for place in job.weight_partners]
        weights = list(_weights(job, chunks))
        self._buckets = self._filled(weights) if job.shares_weights else list(_portions(weights))
        self.num_transfers = 0
        self.busy_s = 0.0
        """Time from the news that there are new weights until they were here, so far."""

    def _filled(self, weights: Sequence[_Weight]) -> list[_Bucket]:
        """Ask backward ranks, whose layouts are the same, how they fill their buckets."""
        message = _message(self._job, 0, _LAYOUT)
        self._link.begin(
            [Expected(source, message, None, torch.uint8) for source in self._sources], 1
        )
        [told, *_] = [self._link.recv_from(source, message) for source in self._sources]
        layout: _Layout = json.loads(told.cpu().numpy().tobytes())
        by_name = {weight.name: weight for weight in weights}
        return [[_Placed(by_name[name], start) for name, start in bucket] for bucket in layout]

    def receive(self) -> None:
        """Wait for the weights of the next step, if there are new ones, and take them over."""
        self._link.begin([self._expected(rank, 0, torch.uint8) for rank in self._sources], 1)
        said = [self._link.recv_from(rank, _message(self._job, 0)) for rank in self._sources]
        begin_s = time.perf_counter()
        if any(bool(updated) for updated in said):
            self._link.begin(
                [
                    self._expected(rank, number, bucket[0].weight.parameter.dtype)
                    for number, bucket in enumerate(self._buckets, start=1)
                    for rank in self._sources
                ],
                len(self._buckets),
            )
            for number, bucket in enumerate(self._buckets, start=1):
                message = _message(self._job, number)
                parts = [self._link.recv_from(rank, message) for rank in self._sources]
                _unpack(bucket, self._by_shard(parts))
            self.num_transfers += 1
        self.busy_s += time.perf_counter() - begin_s

    def _by_shard(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Put what replicas sent together to a whole bucket of each tensor-parallel shard."""
        if not self._job.shares_weights:
            return parts
        num_shards = len(parts) // self._job.ranks.dp  # replicas come one after the other
        return [torch.cat(list(parts[shard::num_shards])) for shard in range(num_shards)]

    def _expected(self, twin: int, number: int, dtype: torch.dtype) -> Expected:
        return Expected(twin, _message(self._job, number), None, dtype)


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
