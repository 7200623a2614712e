"""Transfers weights and buffers from backward ranks, which train the model, to forward ranks.

Before each training step and each evaluation, a backward rank sends its model's current state:
buffers, and weights in buckets. A forward rank receives this state before its first forward pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
_MAKE_OWN_BUFFERS = (
    "megatron.core.models.common.embeddings.",
    "megatron.core.transformer.moe.",
)


def _message(job: Job, number: int, *, header: bool = False) -> Message:
    """Return the identity of a message that carries a bucket or a transfer's header."""
    return Message("W", job.place.pp, number, header=header)


class _Weight(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    num_shards: int
    """Number of backward ranks that each hold a shard of the weight. The forward rank holds all
    shards."""
    gated: bool
    """Whether the weight fuses two matrices, so that each shard holds a part of both."""

    @property
    def numel(self) -> int:
        """Number of elements in one message."""
        return self.parameter.numel() // self.num_shards


class _Slot(NamedTuple):
    """A weight's position in a bucket."""

    weight: _Weight
    start: int
    """Index of the weight's first element in the message."""


@dataclass
class _Bucket:
    """Weights of one dtype, sent in one message by each rank that holds a part of them."""

    slots: list[_Slot] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The message's dtype."""
        return self.slots[0].weight.parameter.dtype

    def flat(self) -> torch.Tensor:
        """Return a copy of all weights, concatenated."""
        flat_weights = []
        for slot in self.slots:
            parameter = slot.weight.parameter
            flat_weights.append(parameter.detach().reshape(-1))
        return torch.cat(flat_weights)


def _weights(job: Job, chunks: Sequence[torch.nn.Module]) -> Iterator[_Weight]:
    """Yield a stage's weights, in the same order in both roles."""
    is_merged = job.ranks.merged and job.role == "forward"
    [model] = unwrap_model(list(chunks))
    has_gates = bool(model.config.gated_linear_unit)
    for name, parameter in model.named_parameters():
        num_shards = 1
        if is_merged and getattr(parameter, "tensor_model_parallel", False):
            num_shards = job.ranks.tp
        is_gated = has_gates and ".linear_fc1." in name
        yield _Weight(name, parameter, num_shards, gated=is_gated)


def _portions(weights: Iterable[_Weight]) -> Iterator[_Bucket]:
    """Yield buckets of up to 32 MiB, each with weights of a single dtype."""
    # Both roles compute the same message sizes and buckets, so no layout is sent.
    bucket = _Bucket()
    numel = 0
    for weight in weights:
        parameter = weight.parameter
        num_bytes = (numel + weight.numel) * parameter.element_size()
        if bucket.slots:
            is_full = num_bytes > _BUCKET_BYTES
            has_other_dtype = bucket.dtype != parameter.dtype
            if is_full or has_other_dtype:
                yield bucket
                bucket = _Bucket()
                numel = 0
        slot = _Slot(weight, numel)
        bucket.slots.append(slot)
        numel += weight.numel
    if bucket.slots:
        yield bucket


# For each bucket: the names of its weights and the indices of their first elements.
_Layout = list[list[tuple[str, int]]]


def _shared_buckets(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Yield Megatron's buffers and buckets. Each replica updates a shard of every bucket."""
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                yield buffer, bucket


def _layout(chunks: Sequence[torch.nn.Module]) -> _Layout:
    [model] = unwrap_model(list(chunks))
    names = {parameter: name for name, parameter in model.named_parameters()}
    layout: _Layout = []
    for buffer, bucket in _shared_buckets(chunks):
        entries = []
        for parameter in bucket.params_list:
            # Do not use `param_to_index`, which ignores the padding that aligns
            # weights.
            start_in_buffer, *_ = buffer.param_index_map[parameter]
            start = start_in_buffer - bucket.offset
            entries.append((names[parameter], start))
        layout.append(entries)
    return layout


def _frozen(weights: Iterable[_Weight], layout: _Layout) -> list[_Bucket]:
    """Return buckets of the frozen weights, which Megatron's buckets do not contain."""
    trained: set[str] = set()
    for entries in layout:
        for name, _start in entries:
            trained.add(name)
    frozen_weights = [weight for weight in weights if weight.name not in trained]
    return list(_portions(frozen_weights))


def _buffers(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return a stage's buffers that must be identical in both roles, by name.

    Includes all buffers except the non-persistent ones in Megatron's position embeddings and
    experts.
    """
    [model] = unwrap_model(list(chunks))
    buffers: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        # Each role computes these buffers itself: position tables, which grow with the longest
        # sequence so far, token counts, and copies of weights.
        makes_own = type(module).__module__.startswith(_MAKE_OWN_BUFFERS)
        unsaved = module._non_persistent_buffers_set if makes_own else ()
        for name, buffer in module.named_buffers(path, recurse=False):
            name_in_module = name.rpartition(".")[2]
            if name_in_module not in unsaved:
                buffers[name] = buffer
    return buffers


class _BufferForm(NamedTuple):
    """A buffer's header. Its dtype and shape may change from step to step."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class _Side:
    """One end of the transfers, with the wrapped model."""

    def __init__(
        self,
        job: Job,
        wire: Transport,
        chunks: Sequence[torch.nn.Module],
    ) -> None:
        self._job = job
        self._wire = wire
        self._chunks = chunks
        ranks = job.ranks
        self._partners = [ranks.rank(place) for place in job.weight_partners]
        # Buffers may differ between replicas, so take them only from the same replica.
        twins = ranks.twins(job.place)
        self._twins = [ranks.rank(place) for place in twins]


class WeightSender(_Side):
    """The sender, on a backward rank."""

    def __init__(
        self,
        job: Job,
        wire: Transport,
        chunks: Sequence[torch.nn.Module],
    ) -> None:
        super().__init__(job, wire, chunks)
        if job.shares_weights:
            layout = _layout(chunks)
            self._unshared = _frozen(_weights(job, chunks), layout)
            # The layout stays the same during training, so send it only once.
            wire.begin([], 1)
            header = _message(job, 0, header=True)
            encoded = _encoded(layout)
            self._isend(encoded, self._partners, header)
        else:
            weights = _weights(job, chunks)
            self._unshared = list(_portions(weights))

    def transfer(self) -> None:
        """Send the model's current state.

        Raises:
            ScheduleError: A weight is no longer stored in Megatron's buffers.
        """
        # Send before the step instead of after the optimizer, because a training loop
        # may change weights between steps, for example by pruning, clipping or
        # averaging. Send every weight, because writes to `.data` cannot be detected.
        self._send_buffers()
        self._wire.begin([], 1)
        # Do not flush, because this step's forward passes overlap with these sends.
        number = 0
        for flat in self._shared_flats():
            number += 1
            message = _message(self._job, number)
            self._isend(flat, self._partners, message)
        for flat in self._whole_flats():
            number += 1
            message = _message(self._job, number)
            self._isend(flat, self._twins, message)

    def _send_buffers(self) -> None:
        """Send the headers of all buffers, followed by their bytes in one message."""
        forms = []
        contents = []
        for name, buffer in _buffers(self._chunks).items():
            dtype = str(buffer.dtype).removeprefix("torch.")
            form = _BufferForm(name, dtype, list(buffer.shape))
            forms.append(form)
            flat = buffer.detach().reshape(-1)
            contents.append(flat.view(torch.uint8))
        # Use two wire steps, because only the first message tells the receiver whether a second one
        # follows.
        self._wire.begin([], 1)
        header = _message(self._job, 0, header=True)
        encoded = _encoded(forms)
        self._isend(encoded, self._twins, header)
        if contents:
            self._wire.begin([], 1)
            packed = torch.cat(contents).cpu()
            message = _message(self._job, 0)
            self._isend(packed, self._twins, message)

    def _isend(
        self,
        tensor: torch.Tensor,
        targets: Iterable[int],
        message: Message,
    ) -> None:
        for target in targets:
            self._wire.isend(tensor, target, message)

    # Both methods copy buckets, because the next optimizer step may start before the buckets are
    # sent.

    def _shared_flats(self) -> Iterator[torch.Tensor]:
        """Yield this replica's shard of every bucket of shared weights, on the host."""
        if not self._job.shares_weights:
            return
        # With the distributed optimizer and --overlap-param-gather, replicas gather weights only in
        # their next forward pass. Instead of waiting for that, each replica sends its updated shard
        # to the forward ranks in all replicas, which join each bucket's shards.
        num_replicas = self._job.ranks.dp
        replica = self._job.place.dp
        for _, bucket in _shared_buckets(self._chunks):
            self._check_storage(bucket)
            flat = bucket.param_data.view(-1)
            shard = flat.tensor_split(num_replicas)[replica]
            yield shard.detach().clone().cpu()

    def _whole_flats(self) -> Iterator[torch.Tensor]:
        """Yield the unshared buckets, on the host: frozen weights, or all weights."""
        if not self._job.shares_weights:
            # Otherwise, the gather would run in the replicas' next forward pass, after this
            # transfer.
            for chunk in self._chunks:
                if not isinstance(chunk, DistributedDataParallel):
                    continue
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
        for bucket in self._unshared:
            yield bucket.flat().cpu()

    def _check_storage(self, bucket: Any) -> None:
        """Check that a bucket's weights are stored in Megatron's buffer, whose shards are sent.

        Raises:
            ScheduleError: A weight is stored elsewhere.
        """
        storage = bucket.param_data.untyped_storage().data_ptr()
        for parameter in bucket.params_list:
            if parameter.untyped_storage().data_ptr() == storage:
                continue
            [model] = unwrap_model(list(self._chunks))
            name = next(
                name for name, weight in model.named_parameters() if weight is parameter
            )
            raise ScheduleError(
                f"{name}.data was replaced, but Megatron gathers weights in a buffer, and forward "
                f"ranks get what the buffer holds; write into the weight ({name}.data.copy_(...)), "
                "or remove --overlap-param-gather"
            )


class WeightReceiver(_Side):
    """The receiver, on a forward rank."""

    def __init__(
        self,
        job: Job,
        wire: Transport,
        chunks: Sequence[torch.nn.Module],
    ) -> None:
        super().__init__(job, wire, chunks)
        weights = list(_weights(job, chunks))
        self._shared: list[_Bucket] = []
        if job.shares_weights:
            # All backward ranks have the same layout, so one header is enough.
            encoded, *_ = self._recv_alone(self._partners, header=True)
            layout: _Layout = _decoded(encoded)
            by_name = {weight.name: weight for weight in weights}
            for entries in layout:
                bucket = _Bucket()
                for name, start in entries:
                    slot = _Slot(by_name[name], start)
                    bucket.slots.append(slot)
                self._shared.append(bucket)
            self._unshared = _frozen(weights, layout)
        else:
            self._unshared = list(_portions(weights))

    def transfer(self) -> None:
        """Wait for the backward ranks' model state and load it.

        Raises:
            ScheduleError: Buffers differ between the backward ranks of a merged forward rank.
            TransportError: The backward ranks did not send the state in time, or have exited.
        """
        self._load_buffers()
        # The wire requires all messages in a step to be announced before the first one arrives.
        buckets = self._shared + self._unshared
        expected = []
        for number, bucket in enumerate(buckets, start=1):
            message = _message(self._job, number)
            for source in self._sources_of(number):
                arrival = Expected(
                    source,
                    message,
                    None,
                    bucket.dtype,
                )
                expected.append(arrival)
        self._wire.begin(expected, len(buckets))
        num_shards = len(self._twins)
        for number, bucket in enumerate(buckets, start=1):
            sources = self._sources_of(number)
            message = _message(self._job, number)
            shards = [self._recv(source, message) for source in sources]
            if len(sources) > num_shards:
                # Sources are ordered by replica: join the parts from each tensor-parallel rank.
                shards = [
                    torch.cat(shards[shard::num_shards]) for shard in range(num_shards)
                ]
            _unpack(bucket, shards)

    def _sources_of(self, number: int) -> list[int]:
        """Return the ranks that send a bucket; shared buckets have lower numbers, from 1."""
        if number <= len(self._shared):
            return self._partners
        return self._twins

    def _load_buffers(self) -> None:
        """Receive all buffers and replace this rank's buffers."""
        # All backward ranks in a stage have the same modules, so one header describes all of them.
        header, *_ = self._recv_alone(self._twins, header=True)
        forms = [_BufferForm(*form) for form in _decoded(header)]
        if not forms:
            return
        contents = self._recv_alone(self._twins, header=False)
        own_buffers = _buffers(self._chunks)
        begin = 0
        [model] = unwrap_model(list(self._chunks))
        for form in forms:
            num_bytes = math.prod(form.shape) * form.torch_dtype.itemsize
            end = begin + num_bytes
            content = contents[0][begin:end]
            # A merged forward rank has one copy of this buffer, so its backward ranks must agree.
            for shard_content in contents[1:]:
                other_copy = shard_content[begin:end]
                if not torch.equal(other_copy, content):
                    raise ScheduleError(
                        f"the buffer {form.name} differs between tensor-parallel ranks, but a "
                        "merged forward rank holds one; remove --ignore-forward-tensor-parallel"
                    )
            # Clone, because the buffer may start at an address that is not aligned for its dtype.
            buffer = content.clone().view(form.torch_dtype).view(form.shape)
            own_buffer = own_buffers.get(form.name)
            if own_buffer is not None:
                # Replace the data instead of copying into it, because routers change a
                # buffer's dtype in their first forward pass.
                own_buffer.data = buffer.to(own_buffer.device)
            else:
                # A module on the backward rank created this buffer during a forward pass.
                path, _, name = form.name.rpartition(".")
                model.get_submodule(path).register_buffer(name, buffer)
            begin = end

    def _recv_alone(
        self,
        sources: Sequence[int],
        *,
        header: bool,
    ) -> list[torch.Tensor]:
        """Receive one message of bytes from each source, in a separate wire step."""
        message = _message(self._job, 0, header=header)
        expected = []
        for source in sources:
            arrival = Expected(
                source,
                message,
                None,
                torch.uint8,
            )
            expected.append(arrival)
        self._wire.begin(expected, 1)
        return [self._recv(source, message) for source in sources]

    def _recv(self, source: int, message: Message) -> torch.Tensor:
        try:
            return self._wire.recv(source, message, self._job.timeout_s)
        except TransportError as error:
            raise type(error)(
                f"{self._job.name_of(None)} waits for {self._job.name_of(source)}: {error}"
            ) from error


def _encoded(content: Any) -> torch.Tensor:
    """Return the content as JSON in a tensor of bytes."""
    text = json.dumps(content)
    # A bytearray, because torch warns about memory that it may not write to.
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _decoded(encoded: torch.Tensor) -> Any:
    text = encoded.cpu().numpy().tobytes()
    return json.loads(text)


@torch.no_grad()
def _unpack(bucket: _Bucket, shards: Sequence[torch.Tensor]) -> None:
    """Copy one bucket, received as shards, into a forward rank's weights."""
    for weight, start in bucket.slots:
        parameter = weight.parameter
        end = start + weight.numel
        parts = [shard[start:end] for shard in shards]
        if weight.num_shards == 1:
            parameter.copy_(parts[0].view_as(parameter))
            continue
        dim: int = parameter.partition_dim  # type: ignore[attr-defined]
        shape = list(parameter.shape)
        shape[dim] //= weight.num_shards
        matrices = [part.view(shape) for part in parts]
        if weight.gated:
            # Each shard holds parts of both matrices. The whole weight holds all parts
            # of the first matrix, followed by all parts of the second.
            gates = []
            values = []
            for matrix in matrices:
                gate, value = matrix.chunk(2, dim)
                gates.append(gate)
                values.append(value)
            matrices = gates + values
        parameter.copy_(torch.cat(matrices, dim))
