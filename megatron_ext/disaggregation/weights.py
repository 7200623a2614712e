"""Brings new weights from backward ranks, which train them, to forward ranks.

After each optimizer step a backward rank says whether it updated its weights (with loss scaling it
may have skipped the step) and sends them in buckets; sends return at once, so the next forwards and
the loading of data overlap with them. A forward rank takes them before its next forward. The first
transfer makes both roles equal, whatever they were initialised or loaded with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_ext.transport.base import Expected, Key

if TYPE_CHECKING:
    from megatron_ext.disaggregation.job import Job
    from megatron_ext.disaggregation.link import RoleLink

__all__ = ["WeightReceiver", "WeightSender"]

_BUCKET_BYTES = 32 << 20


class _BucketKey(Key):
    """Identity of a message about weights: the first says whether any follow."""

    __slots__ = ()

    def __str__(self) -> str:
        if self.microbatch == 0:
            return "whether the weights were updated"
        return f"bucket {self.microbatch - 1} of the weights"


def _key(job: Job, number: int) -> _BucketKey:
    # No gradient goes to a forward rank, and there is no such stage.
    return _BucketKey("B", job.ranks.pp, number)


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


class _Buckets:
    """The weights of a stage in the order and the portions in which they travel."""

    def __init__(self, job: Job, chunks: Sequence[torch.nn.Module]) -> None:
        self.job = job
        merged = job.ranks.merged and job.role == "forward"
        self._tp = job.ranks.tp if merged else 1
        self.buckets = list(self._portions(unwrap_model(list(chunks))))

    def _portions(self, modules: Sequence[torch.nn.Module]) -> Iterator[list[_Weight]]:
        """Yield weights of one dtype, some megabytes each; the same portions for either role."""
        bucket: list[_Weight] = []
        size = 0
        for weight in self._weights(modules):
            num_bytes = weight.numel * weight.parameter.element_size()
            other_dtype = bucket and bucket[0].parameter.dtype != weight.parameter.dtype
            if bucket and (other_dtype or size + num_bytes > _BUCKET_BYTES):
                yield bucket
                bucket, size = [], 0
            bucket.append(weight)
            size += num_bytes
        if bucket:
            yield bucket

    def _weights(self, modules: Sequence[torch.nn.Module]) -> Iterator[_Weight]:
        for module in modules:
            gated = bool(module.config.gated_linear_unit)  # type: ignore[union-attr]
            for name, parameter in module.named_parameters():
                sharded = getattr(parameter, "tensor_model_parallel", False)
                fused = gated and ".linear_fc1." in name
                yield _Weight(name, parameter, self._tp if sharded else 1, fused)


class WeightSender:
    """The side of a backward rank.

    Args:
        job: Whose weights they are.
        link: To the forward rank with the same weights.
        chunks: The model of this rank, in its wrappers.
    """

    def __init__(self, job: Job, link: RoleLink, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._link = link
        self._chunks = chunks
        self._buckets = _Buckets(job, chunks)
        [twin] = job.ranks.twins(job.place)
        self._twin = job.ranks.rank(twin)

    def send(self, *, updated: bool) -> None:
        """Send the weights, or that they are what they were."""
        self._link.begin([], 1)
        said = torch.tensor([updated], dtype=torch.uint8)
        self._link.wire.isend(said, self._twin, _key(self._job, 0))
        if not updated:
            return
        self._gather()
        self._link.begin([], 1)
        for number, bucket in enumerate(self._buckets.buckets, start=1):
            # A copy: the next optimizer step may come before it has left.
            flat = torch.cat([weight.parameter.detach().reshape(-1) for weight in bucket])
            self._link.wire.isend(flat.cpu(), self._twin, _key(self._job, number))

    def _gather(self) -> None:
        """Fetch what other replicas updated, where forward passes would do it later."""
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


class WeightReceiver:
    """The side of a forward rank.

    Args:
        job: Whose weights they are.
        link: To the backward ranks with the same weights, or shards of them.
        chunks: The model of this rank, in its wrappers.
    """

    def __init__(self, job: Job, link: RoleLink, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._link = link
        self._buckets = _Buckets(job, chunks).buckets
        self._twins = [job.ranks.rank(twin) for twin in job.ranks.twins(job.place)]
        self.transfer_s = 0.0
        """Time from the news that there are new weights until they were here, so far."""

    def receive(self) -> None:
        """Wait for the weights of the next step, if there are new ones, and take them over."""
        self._link.begin([self._expected(twin, 0, torch.uint8) for twin in self._twins], 1)
        said = [self._link.recv_from(twin, _key(self._job, 0)) for twin in self._twins]
        begin_s = time.perf_counter()
        if any(bool(updated) for updated in said):
            self._link.begin(
                [
                    self._expected(twin, number, bucket[0].parameter.dtype)
                    for number, bucket in enumerate(self._buckets, start=1)
                    for twin in self._twins
                ],
                len(self._buckets),
            )
            for number, bucket in enumerate(self._buckets, start=1):
                key = _key(self._job, number)
                _unpack(bucket, [self._link.recv_from(twin, key) for twin in self._twins])
        self.transfer_s += time.perf_counter() - begin_s

    def _expected(self, twin: int, number: int, dtype: torch.dtype) -> Expected:
        return Expected(twin, _key(self._job, number), None, dtype)


@torch.no_grad()
def _unpack(bucket: Sequence[_Weight], shards: Sequence[torch.Tensor]) -> None:
    """Copy a bucket of each shard into the weights of a forward rank."""
    sizes = [weight.numel for weight in bucket]
    by_weight = zip(*(shard.split(sizes) for shard in shards), strict=True)
    for weight, parts in zip(bucket, by_weight, strict=True):
        parameter = weight.parameter
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
