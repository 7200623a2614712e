"""`mccl`: collectives for device tensors, carried by gloo on the same bytes.

As strict as the real one where gloo is not: only dense tensors of this device, and send and receive
match by order, whatever their tags say.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


class _Work(dist.Work):
    """One or more gloo operations under way, and what remains to be done when they have ended."""

    def __init__(self, works, finish=None):
        super().__init__()
        self._works = works
        self._finish = finish

    def wait(self, timeout=None):
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(None)
        return future


def _alias(tensor):
    if tensor.device.type != "musa":
        raise ValueError(f"mccl: Tensors must be MUSA and dense, got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError("mccl: Tensors must be contiguous")
    return torch.ops.fake_musa.cpu_alias(tensor.detach())


def _aliases(tensors):
    return [_alias(tensor) for tensor in tensors]


def _flat(tensor):
    return _alias(tensor).view(-1)


class ProcessGroupMCCL(dist.ProcessGroup):
    """A process group whose name is mccl and whose work is done by a gloo group of its own."""

    def __init__(self, store, rank, size, timeout, name):
        super().__init__(rank, size)
        self._name = name
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "mccl"

    @property
    def group_name(self):
        """Backends written in C++ are told it later, those in Python are not."""
        return self._name

    @property
    def _device_types(self):
        return [torch.device("musa")]

    def _reduce(self, start, outputs, opts):
        """Start a reduction; gloo has no average, so that is a sum and a division."""
        if opts.reduceOp != ReduceOp.AVG:
            return _Work([start(opts)])
        opts.reduceOp = ReduceOp.SUM
        size = self.size()

        def divide():
            for output in outputs:
                output.div_(size)

        return _Work([start(opts)], divide)

    def allreduce(self, tensors, opts=None):
        aliases = _aliases(tensors)
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._reduce(lambda opts: self._gloo.allreduce(aliases, opts), aliases, opts)

    def allreduce_coalesced(self, tensors, opts):
        single = dist.AllreduceOptions()
        works = []
        for tensor in tensors:
            single.reduceOp = opts.reduceOp
            works.append(self.allreduce([tensor], single))
        return _Work(works)

    def broadcast(self, tensors, opts):
        return _Work([self._gloo.broadcast(_aliases(tensors), opts)])

    def reduce(self, tensors, opts):
        aliases = _aliases(tensors)
        return self._reduce(lambda opts: self._gloo.reduce(aliases, opts), aliases, opts)

    def allgather(self, outputs, inputs, opts=None):
        opts = dist.AllgatherOptions() if opts is None else opts
        return _Work([self._gloo.allgather([_aliases(o) for o in outputs], _aliases(inputs), opts)])

    def all_gather_single(self, output, source, opts=None):
        opts = dist.AllgatherOptions() if opts is None else opts
        return _Work([self._gloo._allgather_base(_flat(output), _flat(source), opts)])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return _Work([self.all_gather_single(output, source, opts) for output, source in pairs])

    def reduce_scatter(self, outputs, inputs, opts):
        works = [
            self.reduce_scatter_single(output, torch.cat([part.view(-1) for part in parts]), opts)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return _Work(works)

    def reduce_scatter_single(self, output, source, opts):
        aliases = _flat(output), _flat(source)
        start = self._gloo._reduce_scatter_base
        return self._reduce(lambda opts: start(*aliases, opts), aliases[:1], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        works = []
        for output, source in zip(outputs, inputs, strict=True):
            single = dist.ReduceScatterOptions()
            single.reduceOp = opts.reduceOp
            works.append(self.reduce_scatter_single(output, source, single))
        return _Work(works)

    def all_to_all_single(self, output, source, output_splits, source_splits, opts=None):
        opts = dist.AllToAllOptions() if opts is None else opts
        aliases = _alias(output), _alias(source)
        return _Work([self._gloo.alltoall_base(*aliases, output_splits, source_splits, opts)])

    def gather(self, outputs, inputs, opts):
        return _Work([self._gloo.gather([_aliases(o) for o in outputs], _aliases(inputs), opts)])

    def scatter(self, outputs, inputs, opts):
        return _Work([self._gloo.scatter(_aliases(outputs), [_aliases(i) for i in inputs], opts)])

    def send(self, tensors, peer, tag=0):
        return _Work([self._gloo.send(_aliases(tensors), peer, 0)])

    def recv(self, tensors, peer, tag=0):
        return _Work([self._gloo.recv(_aliases(tensors), peer, 0)])

    def barrier(self, opts=None):
        return _Work([self._gloo.barrier()])

    # The names of these before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create(options, _own_options):
    return ProcessGroupMCCL(
        options.store, options.group_rank, options.group_size, options.timeout, options.group_id
    )


def register():
    dist.Backend.register_backend("mccl", _create, extended_api=True, devices=["musa"])
    dist.is_mccl_available = dist.distributed_c10d.is_mccl_available = lambda: True
