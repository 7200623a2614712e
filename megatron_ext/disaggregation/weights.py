"""Transfers weights and buffers from backward ranks, which train them, to forward ranks.

Before each training step, and before each evaluation, a backward rank sends what its model holds
now: weights in buckets, and buffers. A forward rank receives them before its first forward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.message import Message
from megatron_ext.transport.base import Expected

if TYPE_CHECKING:
    from megatron_ext.config.roles import Job
    from megatron_ext.transport.base import Transport

_BUCKET_BYTES = 32 << 20
_MAKE_OWN_BUFFERS = ("megatron.core.models.common.embeddings.", "megatron.core.transformer.moe.")


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


def _frozen(weights: Iterable[_Weight], layout: _Layout) -> list[_Bucket]:
    """Return buckets of the weights that are in none of Megatron's: those that do not train."""
    trained = {name for bucket in layout for name, _ in bucket}
    return list(_portions(weight for weight in weights if weight.name not in trained))


def _buffers(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the buffers of a stage that both roles must have alike, by name.

    They are all buffers but the unsaved ones of Megatron's position embeddings and experts.
    """
    [model] = unwrap_model(list(chunks))
    buffers: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        # Each role makes these itself: tables of positions, which grow with the sequences that it
        # has seen, counts of tokens, and copies of weights.
        makes_own = type(module).__module__.startswith(_MAKE_OWN_BUFFERS)
        unsaved = module._non_persistent_buffers_set if makes_own else ()
        named = module.named_buffers(path, recurse=False)
        buffers.update((n, buffer) for n, buffer in named if n.rpartition(".")[2] not in unsaved)
    return buffers


class _BufferForm(NamedTuple):
    """A buffer as it travels; dtype and shape may change from step to step."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class _Side:
    """One end of the transfers; holds the wrapped model."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        self._job = job
        self._wire = wire
        self._chunks = chunks
        self._partners = [job.ranks.rank(place) for place in job.weight_partners]
        # Buffers of replicas may differ, so they come from the same replica alone.
        self._twins = [job.ranks.rank(place) for place in job.ranks.twins(job.place)]


class WeightSender(_Side):
    """The side of a backward rank."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(job, wire, chunks)
        if job.shares_weights:
            layout = _layout(chunks)
            self._unshared = _frozen(_weights(job, chunks), layout)
            self._isend(_encoded(layout), self._partners, _message(job, 0, header=True))
        else:
            self._unshared = list(_portions(_weights(job, chunks)))

    def transfer(self) -> None:
        """Send what the model holds now.

        Raises:
            ScheduleError: Megatron's buffers do not hold a weight any more.
        """
        # Not after the optimizer's step: a training loop may change weights between two steps, as
        # pruning, clipping and averaging do, and `.data` leaves no mark of it.
        buffers = _buffers(self._chunks)
        forms = [
            _BufferForm(name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape))
            for name, buffer in buffers.items()
        ]
        self._isend(_encoded(forms), self._twins, _message(self._job, 0, header=True))
        if buffers:
            contents = [
                buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers.values()
            ]
            self._isend(torch.cat(contents).cpu(), self._twins, _message(self._job, 0))
        self._wire.begin([], 1)
        # Nothing is flushed: the forwards of this step overlap with these sends.
        flats = chain(
            ((flat, self._partners) for flat in self._shared_flats()),
            ((flat, self._twins) for flat in self._whole_flats()),
        )
        for number, (flat, targets) in enumerate(flats, start=1):
            for target in targets:
                self._wire.isend(flat, target, _message(self._job, number))

    def _isend(self, tensor: torch.Tensor, targets: Iterable[int], message: Message) -> None:
        """Send the only message of a step of the wire."""
        self._wire.begin([], 1)
        for target in targets:
            self._wire.isend(tensor, target, message)

    # Buckets are copied: the next optimizer step may begin before they are sent.

    def _shared_flats(self) -> Iterator[torch.Tensor]:
        """Yield this replica's shard of each bucket of shared weights, on the host."""
        if not self._job.shares_weights:
            return
        # Replicas gather weights only in their next forward (the distributed optimizer with
        # --overlap-param-gather). Instead of waiting for that, each sends its updated shard to the
        # forward ranks of all replicas, which assemble the buckets of Megatron's gradient buffers.
        for _, bucket in _shared_buckets(self._chunks):
            self._check_storage(bucket)
            shards = bucket.param_data.view(-1).tensor_split(self._job.ranks.dp)
            yield shards[self._job.place.dp].detach().clone().cpu()

    def _whole_flats(self) -> Iterator[torch.Tensor]:
        """Yield the other buckets, on the host: of frozen weights, or of all that none shares."""
        if not self._job.shares_weights:
            ddps = [chunk for chunk in self._chunks if isinstance(chunk, DistributedDataParallel)]
            for ddp in ddps:
                if ddp.ddp_config.overlap_param_gather:
                    ddp.start_param_sync(force_sync=True)
        for bucket in self._unshared:
            yield _flat(bucket).cpu()

    def _check_storage(self, bucket: Any) -> None:
        """Check that Megatron's buffer, a shard of which is sent, holds a bucket's weights."""
        storage = bucket.param_data.untyped_storage().data_ptr()
        for parameter in bucket.params_list:
            if parameter.untyped_storage().data_ptr() == storage:
                continue
            [model] = unwrap_model(list(self._chunks))
            name = next(name for name, weight in model.named_parameters() if weight is parameter)
            raise ScheduleError(
                f"{name}.data was replaced, but Megatron gathers weights in a buffer, and forward "
                f"ranks get what the buffer holds; write into the weight ({name}.data.copy_(...)), "
                "or leave --overlap-param-gather out"
            )


class WeightReceiver(_Side):
    """The side of a forward rank."""

    def __init__(self, job: Job, wire: Transport, chunks: Sequence[torch.nn.Module]) -> None:
        super().__init__(job, wire, chunks)
        weights = list(_weights(job, chunks))
        self._shared: list[_Bucket] = []
        if job.shares_weights:
            # All backward ranks have the same layout.
            layout: _Layout = _decoded(self._recv_one(self._partners, header=True)[0])
            by_name = {weight.name: weight for weight in weights}
            self._shared = [[(by_name[name], start) for name, start in bucket] for bucket in layout]
            self._unshared = _frozen(weights, layout)
        else:
            self._unshared = list(_portions(weights))

    def transfer(self) -> None:
        """Wait for what the backward ranks' models hold, and load it.

        Raises:
            ScheduleError: A merged forward rank cannot hold their buffers.
            TransportError: They have not sent it in time, or are gone.
        """
        self._load_buffers()
        buckets = [(bucket, self._partners) for bucket in self._shared]
        buckets += [(bucket, self._twins) for bucket in self._unshared]
        expected = [
            Expected(source, _message(self._job, number), None, _dtype(bucket))
            for number, (bucket, sources) in enumerate(buckets, start=1)
            for source in sources
        ]
        self._wire.begin(expected, len(buckets))
        num_shards = len(self._twins)
        for number, (bucket, sources) in enumerate(buckets, start=1):
            shards = [self._recv(source, _message(self._job, number)) for source in sources]
            if len(sources) > num_shards:
                # Ordered by replica: the parts of one bucket for each tensor-parallel rank.
                shards = [torch.cat(shards[shard::num_shards]) for shard in range(num_shards)]
            _unpack(bucket, shards)

    def _load_buffers(self) -> None:
        headers = [_decoded(header) for header in self._recv_one(self._twins, header=True)]
        forms = [_BufferForm(*form) for form in headers[0]]
        if not forms:
            return
        contents = self._recv_one(self._twins, header=False)
        mine, begin = _buffers(self._chunks), 0
        [model] = unwrap_model(list(self._chunks))
        for form in forms:
            end = begin + math.prod(form.shape) * form.torch_dtype.itemsize
            # A merged forward rank has one buffer where its backward ranks have one each.
            parts = [content[begin:end] for content in contents]
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise ScheduleError(
                    f"the buffer {form.name} differs between tensor-parallel ranks, and a merged "
                    "forward rank holds one; leave --ignore-forward-tensor-parallel out"
                )
            buffer = parts[0].clone().view(form.torch_dtype).view(form.shape)
            if form.name in mine:
                # Routers change the dtype of a buffer in their first forward.
                mine[form.name].data = buffer.to(mine[form.name].device)
            else:
                path, _, name = form.name.rpartition(".")
                model.get_submodule(path).register_buffer(name, buffer)
            begin = end

    def _recv_one(self, sources: Sequence[int], *, header: bool) -> list[torch.Tensor]:
        """Receive the only message of a step of the wire, bytes, from each source."""
        message = _message(self._job, 0, header=header)
        self._wire.begin([Expected(source, message, None, torch.uint8) for source in sources], 1)
        return [self._recv(source, message) for source in sources]

    def _recv(self, source: int, message: Message) -> torch.Tensor:
        try:
            return self._wire.recv(source, message, self._job.timeout_s)
        except TransportError as error:
            raise type(error)(
                f"{self._job.name_of(None)} waits for {self._job.name_of(source)}: {error}"
            ) from error


def _encoded(content: Any) -> torch.Tensor:
    """Return JSON as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _decoded(encoded: torch.Tensor) -> Any:
    return json.loads(encoded.cpu().numpy().tobytes())


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
