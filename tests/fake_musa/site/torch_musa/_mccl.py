"""`mccl`: collectives for device tensors, carried by gloo on the same bytes.

It is as strict as the real one where gloo is not: it accepts only dense tensors of this device, and
matches sends and receives by order, whatever their tags. On a device that computes at once, an
operation starts when it is called and the host waits for it; on a device that runs behind the host,
it is a task in a stream (`_communicator.py`).
"""

import os

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from . import _communicator
from ._communicator import Communicator, Operation

# From 2.15 on torch records collectives under their group's name, but C++ knows no name for a group
# written in Python.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


class _Together(dist.Work):
    """Several operations as one. They use the same communicator, so they end in order."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def wait(self, timeout=None):
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(None)
        return future


class _Work(_Together):
    """The running gloo operations, and the work to do when they have ended."""

    def __init__(self, operation):
        super().__init__(operation.start())
        self._finish = operation.finish

    def wait(self, timeout=None):
        super().wait(timeout)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


def _is_async():
    return torch.ops.fake_musa.is_async()


def _alias(tensor):
    if tensor.device.type != "musa":
        raise ValueError(
            f"mccl: Tensors must be MUSA and dense, got one on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError("mccl: Tensors must be contiguous")
    alias = (
        torch.ops.fake_musa.raw_alias if _is_async() else torch.ops.fake_musa.cpu_alias
    )
    return alias(tensor.detach())


def _aliases(tensors):
    return [_alias(tensor) for tensor in tensors]


def _flat(tensor):
    return _alias(tensor).view(-1)


def _copied_options(opts, kind):
    """Return a copy of options, because the operation may start after the caller's are freed."""
    options = kind()
    for name in ("reduceOp", "rootRank", "rootTensor", "timeout"):
        if opts is not None and hasattr(opts, name):
            setattr(options, name, getattr(opts, name))
    return options


class ProcessGroupMCCL(dist.ProcessGroup):
    """A process group named mccl, whose work is done by an internal gloo group."""

    def __init__(self, store, rank, size, timeout, name):
        super().__init__(rank, size)
        self._name = name
        self._store = store
        self._timeout = timeout
        self._communicators = {}
        self._batch = None
        with _communicator.host_waits_for(f"the other ranks of group {name}"):
            self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        if _is_async():
            _communicator.join_board(store, rank, size)

    def getBackendName(self):
        return "mccl"

    @property
    def group_name(self):
        """Return the name; torch sets it later for backends in C++, but not for those in Python."""
        return self._name

    @property
    def _device_types(self):
        return [torch.device("musa")]

    def _get_backend(self, device):
        """Return itself; from 2.14 on, torch also calls this on groups in Python to batch sends."""
        return self if device.type == "musa" else super()._get_backend(device)

    def _run(self, name, start, tensors, finish=None):
        """Start an operation of all ranks, or have the device start it."""
        operation = Operation(f"{name} of {self._name}", start, tensors, finish)
        if not _is_async():
            return _Work(operation)
        return self._communicator().submit([operation])

    def _communicator(self, peer=None):
        """Return the communicator of all ranks or of two; the first use waits for the others."""
        ranks = range(self.size()) if peer is None else sorted({self.rank(), peer})
        key = tuple(ranks)
        if peer is None:
            key = "all"
        if key not in self._communicators:
            name = f"{self._name}, ranks {', '.join(map(str, ranks))} of it"
            communicator = Communicator(
                name, self._store, self.rank(), list(ranks), str(key), self._timeout
            )
            self._communicators[key] = communicator
        return self._communicators[key]

    # -- reductions --------------------------------------------------------------------------------

    def _reducing(self, name, start, opts, outputs, tensors):
        """Run a reduction; gloo has no average, so use a sum and a division."""
        if opts.reduceOp != ReduceOp.AVG:
            return self._run(name, lambda: [start(opts)], tensors)
        opts.reduceOp = ReduceOp.SUM
        size = self.size()

        def divide():
            for output in outputs:
                output.div_(size)

        return self._run(name, lambda: [start(opts)], tensors, divide)

    def allreduce(self, tensors, opts=None):
        aliases, opts = _aliases(tensors), _copied_options(opts, c10d.AllreduceOptions)
        start = self._gloo.allreduce
        return self._reducing(
            "all_reduce", lambda o: start(aliases, o), opts, aliases, tensors
        )

    def allreduce_coalesced(self, tensors, opts):
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors, opts):
        aliases, opts = _aliases(tensors), _copied_options(opts, c10d.ReduceOptions)
        start = self._gloo.reduce
        return self._reducing(
            "reduce", lambda o: start(aliases, o), opts, aliases, tensors
        )

    def reduce_scatter(self, outputs, inputs, opts):
        works = [
            self.reduce_scatter_single(
                output, torch.cat([part.view(-1) for part in parts]), opts
            )
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self._together(works)

    def reduce_scatter_single(self, output, source, opts=None):
        aliases, opts = (
            (_flat(output), _flat(source)),
            _copied_options(opts, c10d.ReduceScatterOptions),
        )
        start = self._gloo._reduce_scatter_base
        tensors = [output, source]
        return self._reducing(
            "reduce_scatter", lambda o: start(*aliases, o), opts, aliases[:1], tensors
        )

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        tensors = zip(outputs, inputs, strict=True)
        return self._together(
            [self.reduce_scatter_single(*both, opts) for both in tensors]
        )

    # -- other collectives -------------------------------------------------------------------------

    def broadcast(self, tensors, opts):
        aliases, opts = _aliases(tensors), _copied_options(opts, c10d.BroadcastOptions)
        return self._run(
            "broadcast", lambda: [self._gloo.broadcast(aliases, opts)], tensors
        )

    def allgather(self, outputs, inputs, opts=None):
        opts = _copied_options(opts, c10d.AllgatherOptions)
        aliases = [_aliases(output) for output in outputs], _aliases(inputs)
        tensors = [*inputs, *(tensor for output in outputs for tensor in output)]
        return self._run(
            "all_gather", lambda: [self._gloo.allgather(*aliases, opts)], tensors
        )

    def all_gather_single(self, output, source, opts=None):
        aliases, opts = (
            (_flat(output), _flat(source)),
            _copied_options(opts, c10d.AllgatherOptions),
        )
        start = self._gloo._allgather_base
        return self._run(
            "all_gather", lambda: [start(*aliases, opts)], [output, source]
        )

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        tensors = zip(outputs, inputs, strict=True)
        return self._together([self.all_gather_single(*both, opts) for both in tensors])

    def all_to_all_single(
        self, output, source, output_splits, source_splits, opts=None
    ):
        aliases, opts = (
            (_alias(output), _alias(source)),
            _copied_options(opts, c10d.AllToAllOptions),
        )
        splits = list(output_splits), list(source_splits)
        start = self._gloo.alltoall_base
        return self._run(
            "all_to_all", lambda: [start(*aliases, *splits, opts)], [output, source]
        )

    def gather(self, outputs, inputs, opts):
        opts = _copied_options(opts, c10d.GatherOptions)
        aliases = [_aliases(output) for output in outputs], _aliases(inputs)
        tensors = [*inputs, *(tensor for output in outputs for tensor in output)]
        return self._run("gather", lambda: [self._gloo.gather(*aliases, opts)], tensors)

    def scatter(self, outputs, inputs, opts):
        opts = _copied_options(opts, c10d.ScatterOptions)
        aliases = (
            _aliases(outputs),
            [_aliases(tensors_of_rank) for tensors_of_rank in inputs],
        )
        tensors = list(outputs)
        for tensors_of_rank in inputs:
            tensors += tensors_of_rank
        return self._run(
            "scatter", lambda: [self._gloo.scatter(*aliases, opts)], tensors
        )

    def barrier(self, opts=None):
        work = self._run("barrier", lambda: [self._gloo.barrier()], [])
        if _is_async():
            work.block_host()
        return work

    # -- between two ranks -------------------------------------------------------------------------

    def send(self, tensors, peer, tag=0):
        return self._transfer(f"send to {peer}", self._gloo.send, tensors, peer, (2, 4))

    def recv(self, tensors, peer, tag=0):
        return self._transfer(
            f"recv from {peer}", self._gloo.recv, tensors, peer, (4, 2)
        )

    def _transfer(self, name, start, tensors, peer, stamp_tags):
        aliases, batched = _aliases(tensors), self._batch is not None

        def meet(turn_s):
            turn = torch.tensor([turn_s], dtype=torch.float64)
            turn_of_peer = torch.zeros(1).double()
            send_tag, recv_tag = (tag + int(batched) for tag in stamp_tags)
            works = (
                self._gloo.send([turn], peer, send_tag),
                self._gloo.recv([turn_of_peer], peer, recv_tag),
            )
            return works, turn_of_peer

        # An operation in a batch does not use the communicator of its two ranks.
        operation = Operation(
            f"{name} of {self._name}",
            lambda: [start(aliases, peer, int(batched))],
            tensors,
            meet=meet if torch.ops.fake_musa.lags() else None,
        )
        if not _is_async():
            return _Work(operation)
        if not batched:
            return self._communicator(peer).submit([operation])
        self._batch.append(operation)
        return None

    def transfer_together(self, post):
        """Have the device start all sends and receives of `post` at once."""
        self._batch = []
        try:
            post()
            operations = self._batch
        finally:
            self._batch = None
        return self._communicator().submit(operations)

    def _together(self, works):
        return works[0] if len(works) == 1 else _Together(works)

    # Names of these functions before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(options, _own_options):
    return ProcessGroupMCCL(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
    )


def _batch_isend_irecv(p2p_op_list):
    """Replaces torch's function, which groups operations only for backends written in C++."""
    group = p2p_op_list[0].group or dist.group.WORLD
    if not isinstance(group, ProcessGroupMCCL) or not _is_async():
        return _torchs_batch_isend_irecv(p2p_op_list)

    def post():
        for operation in p2p_op_list:
            operation.op(
                operation.tensor,
                operation.peer,
                group=operation.group,
                tag=operation.tag,
            )

    return [group.transfer_together(post)]


_torchs_batch_isend_irecv = dist.batch_isend_irecv


def register():
    dist.Backend.register_backend("mccl", _create, extended_api=True, devices=["musa"])
    dist.is_mccl_available = dist.distributed_c10d.is_mccl_available = lambda: True
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = (
        _batch_isend_irecv
    )
    os.register_at_fork(after_in_child=_communicator.forget)
