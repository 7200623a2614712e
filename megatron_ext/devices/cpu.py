"""Uses the host as a device: all of Megatron runs on CPUs, with gloo collectives.

Upstream asserts at start-up that CUDA is available. Redirects make `torch.cuda`'s functions report
the host (see `host`), map every CUDA device name to the CPU (see `translate`), and make every
process group a gloo group. This backend is meant for laptops, CI and tests, not for speed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.devices import host
from megatron_ext.devices.backend import Device, Redirect
from megatron_ext.devices.lacks import CUDA_ONLY, TRANSFORMER_ENGINE_ONLY, TRITON_ONLY
from megatron_ext.devices.translate import (
    answering,
    calling,
    collective_redirects,
    nvtx_redirects,
    returning,
    spelling_redirects,
    tensor_redirects,
    to,
)
from megatron_ext.errors import DeviceError
from megatron_ext.rules import read_rules
from megatron_ext.sockets import OpenSocket, open_sockets

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo

    from megatron_ext.devices.sharing import Sharing


_LOG = logging.getLogger(__name__)


class CpuDevice(Device):
    """The `cpu` backend with gloo collectives."""

    name = "cpu"
    distributed_backend = "gloo"
    is_host = True
    environment: Mapping[str, tuple[str, str]] = {
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            "1",
            "upstream refuses tensor parallelism without it on the GPU generation that we report",
        ),
        "TORCHDYNAMO_DISABLE": (
            "1",
            "compiling small host kernels takes longer than running them",
        ),
    }
    argument_defaults: Mapping[str, tuple[object, str]] = {
        "transformer_impl": ("local", "Transformer Engine has no CPU kernels"),
        "apply_rope_fusion": (False, "the fused rotary embedding is a CUDA kernel"),
        "gradient_accumulation_fusion": (
            False,
            "fused gradient accumulation is a CUDA kernel",
        ),
        "no_persist_layer_norm": (True, "the persistent layer norm is a CUDA kernel"),
        "masked_softmax_fusion": (False, "the fused softmax is a CUDA kernel"),
        "distributed_backend": ("gloo", "NCCL only moves GPU memory"),
        # Every group is already a gloo group, so the additional groups would be redundant.
        "enable_gloo_process_groups": (False, ""),
    }
    lacks = (
        *TRANSFORMER_ENGINE_ONLY,
        *CUDA_ONLY,
        *TRITON_ONLY,
        *read_rules("""
            overlap_p2p_comm_warmup_flush
                --overlap-p2p-communication-warmup-flush relies on NCCL's stream order: with gloo
                the evaluation never ends; remove it
            async_save & use_persistent_ckpt_worker
                --use-persistent-ckpt-worker would read parameters from shared memory while training
                changes them (on a GPU they are copied to the host first); remove --async-save
        """),
    )
    known_lacks = (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"Only transformer-engine>=",
        r"'pin_memory' argument is set as true",
    )

    def __init__(self) -> None:
        self._connections: GlooConnections | None = None
        """Connections in gloo's groups; None until `follow_collectives`."""

    def missing(self) -> str | None:
        """Check for gloo; every torch build includes everything else that this backend needs."""
        import torch

        has_gloo = (
            torch.distributed.is_available() and torch.distributed.is_gloo_available()
        )
        if not has_gloo:
            return f"torch {torch.__version__} was built without gloo; install a stock build"
        return None

    def redirects(self) -> Iterator[Redirect]:
        """List the redirects that make `torch.cuda` and its names mean the host."""
        yield from _namespaces()
        yield from spelling_redirects("cpu")
        yield from tensor_redirects("cpu")
        yield from collective_redirects("gloo")
        yield from _gloo(lambda: self._connections)

    def torch_device(self, _local_rank: int = 0) -> torch.device:
        """Return the host's device."""
        import torch

        return torch.device("cpu")

    def peak_memory_bytes(self) -> int:
        """Return this process's peak resident memory."""
        return host.peak_rss_bytes()

    def follow_collectives(self) -> None:
        """Remember the connections of new gloo groups."""
        if self._connections is None:
            self._connections = GlooConnections()
        self._connections.are_shut_down = False

    def abort_collectives(self) -> None:
        """Shut down gloo's connections, because its `abort` does not unblock waiting ranks."""
        if self._connections is not None:
            self._connections.shut_down()
            _keep_stuck_groups()

    def timing_event(self) -> Any:
        """Return an event that records the host's clock."""
        return host.Event()

    def sharing(self, _device: torch.device) -> Sharing:
        """Raise an error: processes on one host already share its memory.

        Raises:
            DeviceError: Always.
        """
        raise DeviceError(
            "--pipeline-device-path ipc bypasses host memory, but the device cpu is the host; "
            "remove it"
        )


_ANSWERS = "answers for the host in place of a GPU"
_NO_ACCELERATOR = (
    "the host is not an accelerator, though a CUDA build of torch reports one"
)

# Name in `torch.cuda` -> name of the same function in `torch.accelerator`.
_OF_ACCELERATOR = {
    "current_device": "current_device_index",
    "current_stream": "current_stream",
    "device": "device_index",
    "empty_cache": "empty_cache",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "set_device": "set_device_index",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}


def _context(original: Any) -> object:
    """Return a context manager that does nothing, with a separate class for each redirect."""
    # Undo identifies copies of our values in other modules by identity, so two redirects must not
    # share a value.
    return type(original.__name__, (nullcontext,), {})


def _namespaces() -> Iterator[Redirect]:
    """List the redirects of `torch.cuda` and `torch.accelerator`; torch itself calls the latter."""
    import torch

    generator = torch.default_generator
    nothing = returning(None)

    def seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def set_state(new_state: torch.Tensor, *_device: Any, **_named: Any) -> None:
        generator.set_state(new_state)

    def free_and_total_bytes() -> tuple[int, int]:
        total_bytes = host.total_memory_bytes()
        return total_bytes - host.rss_bytes(), total_bytes

    answers: dict[str, Callable[[Any], object]] = {
        # The device. It has no index, because torch rejects index 0 if there is no accelerator.
        "is_available": returning(True),
        "is_initialized": returning(True),
        "is_bf16_supported": returning(True),
        "is_current_stream_capturing": returning(False),
        "device_count": to(host.local_world_size),
        "current_device": returning(torch.device("cpu")),
        "device": _context,
        # The same capability as in `host.properties`.
        "get_device_capability": returning((8, 0)),
        "get_device_name": answering(lambda: host.properties().name),
        "get_device_properties": answering(host.properties),
        # Streams and events.
        "Event": to(host.Event),
        "Stream": to(host.Stream),
        "StreamContext": _context,
        "current_stream": returning(host.STREAM),
        "default_stream": returning(host.STREAM),
        "stream": answering(nullcontext),
        # Random numbers. torch.manual_seed calls manual_seed_all, so the latter must seed the
        # generator directly: calling torch.manual_seed would recurse forever.
        "default_generators": to(host.Generators()),
        "get_rng_state": answering(generator.get_state),
        "get_rng_state_all": answering(lambda: [generator.get_state()]),
        "initial_seed": to(generator.initial_seed),
        "manual_seed": calling(seed),
        "manual_seed_all": calling(seed),
        "seed": to(generator.seed),
        "set_rng_state": calling(set_state),
        "set_rng_state_all": to(lambda states: set_state(states[0])),
        # torch queues these calls until CUDA is initialised, which never happens here, so a
        # restored random number state would be silently lost.
        "_lazy_call": to(lambda function, **_kwargs: function()),
        # Memory.
        "device_memory_used": answering(host.rss_bytes),
        "max_memory_allocated": answering(host.peak_rss_bytes),
        "max_memory_reserved": answering(host.peak_rss_bytes),
        "mem_get_info": answering(free_and_total_bytes),
        "memory_allocated": answering(host.rss_bytes),
        "memory_reserved": answering(host.rss_bytes),
        "memory_stats": answering(host.memory_stats),
        "reset_peak_memory_stats": answering(host.reset_peak_rss),
    }
    without_effect = (
        "_lazy_init", "empty_cache", "init", "ipc_collect", "seed_all", "set_device",
        "set_stream", "synchronize",
    )  # fmt: skip
    for name in without_effect:
        answers[name] = nothing
    for kind in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"):
        answers[f"{kind}Tensor"] = to(getattr(torch, f"{kind}Tensor"))
    for name, make in answers.items():
        # Some names are newer than the oldest supported torch.
        if hasattr(torch.cuda, name):
            yield Redirect(f"torch.cuda:{name}", make, _ANSWERS)
    for name in ("get_rng_state", "set_rng_state"):
        yield Redirect(f"torch.cuda.random:{name}", answers[name], _ANSWERS)
    yield from nvtx_redirects()
    yield Redirect(
        "torch:Tensor.record_stream", nothing, "has nothing to do on the host"
    )

    # A CUDA build of torch names CUDA here even without a GPU, because it trusts
    # `torch.cuda.is_available`, which we have redirected.
    denials = {
        "torch.accelerator:is_available": returning(False),
        "torch.accelerator:current_accelerator": nothing,
        "torch.accelerator:device_count": returning(0),
        "torch._C:_get_accelerator": returning(torch.device("cpu")),
        # Since torch 2.14, `torch.get_device_module` calls this function instead.
        "torch._C:_accelerator_getAccelerator": nothing,
    }
    for target, make in denials.items():
        yield Redirect(target, make, _NO_ACCELERATOR)
    # Some code calls torch.accelerator without this check, because torch.cuda is available. Such
    # code gets the same results as from torch.cuda.
    for name, accelerator_name in _OF_ACCELERATOR.items():
        if hasattr(torch.accelerator, accelerator_name):
            yield Redirect(
                f"torch.accelerator:{accelerator_name}", answers[name], _ANSWERS
            )


def _gloo(followed: Callable[[], GlooConnections | None]) -> Iterator[Redirect]:
    """List the redirects for gloo's groups and collectives.

    `followed` returns the object that remembers the connections of new groups, or None.
    """
    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        yield Redirect(
            f"{module}:all_gather_into_tensor",
            _flat_gather,
            "gloo requires input and output with the same number of dimensions, NCCL only with the "
            "same size",
        )
    yield Redirect(
        "torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
        partial(_one_worker, followed=followed),
        "a group's two worker threads free the same memory if they finish coalesced collectives at "
        "the same time",
    )
    yield Redirect(
        "torch.distributed.distributed_c10d:Work.wait",
        partial(_ends_with_abort, followed=followed),
        "gloo leaves some collectives waiting when their connections are shut down",
    )


class GlooConnections:
    """The connections in gloo's groups, which another thread can shut down.

    Each rank in a group listens on a separate port, and any two ranks connect. So a connection
    belongs to the group if either end uses the port of one of the ranks' listeners. This rule
    excludes connections that other threads open at the same time.
    """

    def __init__(self) -> None:
        self._sockets: set[OpenSocket] = set()
        self.are_shut_down = False
        """Whether the connections were shut down and no new attempt has begun since."""

    @contextmanager
    def listeners_opened(self) -> Iterator[list[int]]:
        """Yield a list that, once the body has run, contains the ports that the body listens on."""
        before = open_sockets()
        ports: list[int] = []
        yield ports
        for opened in open_sockets() - before:
            if (port := opened.listening_port()) is not None:
                ports.append(port)

    @contextmanager
    def opened_to_peers(
        self,
        store: Any,
        rank: int,
        size: int,
        ports: list[int],
    ) -> Iterator[None]:
        """Remember the connections that the body opens between the ranks in a group.

        The body is collective over the group's ranks, which exchange their listeners' ports through
        the group's store.
        """
        ports_text = ",".join(map(str, ports))
        store.set(f"megatron_ext/ports/{rank}", ports_text)
        before = open_sockets()
        yield
        # One of two ranks connects to the other's listener, so either end may have the listener's
        # port.
        ports_of_peers: set[int] = set()
        for peer in range(size):
            text = store.get(f"megatron_ext/ports/{peer}").decode()
            for port in text.split(","):
                if port:  # the text is empty if that rank has no listener
                    ports_of_peers.add(int(port))
        for opened in open_sockets() - before:
            ends = opened.tcp_ends()
            if ends is None:
                continue
            is_in_group = ends.own_port in ports or ends.peer_port in ports_of_peers
            if is_in_group:
                self._sockets.add(opened)
        # Another thread may have called `shut_down` while the body was connecting the
        # ranks.
        if self.are_shut_down:
            self.shut_down()

    def shut_down(self) -> int:
        """Shut down and forget all connections; return how many were still open."""
        self.are_shut_down = True
        sockets = self._sockets
        self._sockets = set()
        return sum(opened.shut_down() for opened in sockets)


_TURN = timedelta(seconds=0.2)
"""How long a collective may take to end after its connections have been shut down."""


# Gloo reports a failed connection to a collective that is waiting for its peer to be
# ready. But once the peer is ready, gloo's own thread writes the data, and if this
# write fails, nothing is reported (`Pair::signalException` looks at `buf`, not at
# `ubuf`). The collective then waits for minutes, until it times out. We saw this once
# in every 40 to 100 rank losses.
def _ends_with_abort(
    original: Callable[..., Any], *, followed: Callable[[], GlooConnections | None]
) -> Callable[..., Any]:
    """Make a wait for a collective end soon after its connections are shut down."""
    kinds = import_module("torch._C._distributed_c10d").OpType
    # These wait in the calling thread, and if they time out, the connection is closed.
    messages = {int(kinds.SEND), int(kinds.RECV), int(kinds.RECVANYSOURCE)}

    def wait(work: Any, *timeout: Any, **named: Any) -> Any:
        connections = followed()
        if connections is None or timeout or named:
            return original(work, *timeout, **named)
        if work._get_op_type() in messages:
            return original(work)
        while not work.is_completed():
            # At the end of the turn, this raises the same kind of error as a failed collective.
            with suppress(RuntimeError):
                original(work, _TURN)
            if connections.are_shut_down and not work.is_completed():
                raise RuntimeError("the collective was aborted because a rank was lost")
        return original(work)

    return wait


def _keep_stuck_groups() -> None:
    """Keep the groups in which a collective is still waiting, so that they are never destroyed.

    Destroying a group waits for its worker thread.
    """
    import torch
    from torch.distributed import BarrierOptions, distributed_c10d

    options: Any = BarrierOptions()
    options.device = torch.device("cpu")
    # A group runs one collective at a time. Behind a stuck one, a barrier never starts;
    # otherwise it fails immediately, since there are no connections.
    groups = list(distributed_c10d._world.pg_map)
    barriers = [(group, group.barrier(options)) for group in groups]
    deadline_s = time.monotonic() + _TURN.total_seconds()
    for group, barrier in barriers:
        remaining_s = max(0.001, deadline_s - time.monotonic())
        with suppress(RuntimeError):
            barrier.wait(timedelta(seconds=remaining_s))
        if not barrier.is_completed():
            _LOG.warning(
                "a gloo collective is still waiting although its connections were shut down; its "
                "group is kept until the process exits"
            )
            # A global list would be cleared, and the group destroyed, when the process exits.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _flat_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Flatten the tensors in a gather if they have different numbers of dimensions."""

    def all_gather_into_tensor(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if output_tensor.dim() != input_tensor.dim():
            # The output must be a view, because the caller reads the result from its own tensor.
            output_tensor = output_tensor.view(-1)
            input_tensor = input_tensor.reshape(-1)
        return original(output_tensor, input_tensor, *args, **kwargs)

    return all_gather_into_tensor


# torch gives each gloo group two worker threads. Both threads write the name of every
# finished collective to a shared string, without a lock (`ProcessGroupGloo::runLoop`,
# torch 2.13). Names of 16 characters or more, such as those of coalesced collectives,
# are on the heap. If two such collectives finish at the same moment, both threads free
# the same memory, and the process crashes later, somewhere else. The distributed
# optimizer gathers parameters with coalesced collectives, and models with several
# chunks have several of them in flight. A single worker runs collectives in call order,
# which is the same on all ranks anyway.
def _one_worker(
    original: Callable[..., None],
    *,
    followed: Callable[[], GlooConnections | None] = lambda: None,
) -> Callable[..., None]:
    def default_options(
        timeout: timedelta | None = None, enable_reconfigure: bool = False
    ) -> Any:
        """Return torch's default options, but with one thread.

        `enable_reconfigure` was added in torch 2.15.
        """
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        # torch reads this variable only for its own default options, which these options replace.
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if interfaces:
            names = interfaces.split(",")
            devices = [gloo.create_device(interface=name) for name in names]
        else:
            devices = [gloo.create_default_device()]
        options._devices = devices
        options._threads = 1
        if timeout is not None:
            options._timeout = timeout
        if enable_reconfigure:
            options.enable_reconfigure = True
        return options

    def initialize(
        group: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        *last: Any,
        **named: Any,
    ) -> None:
        # The constructor has two overloads, with options or with a time-out. Respect options that
        # the caller has chosen.
        has_options = "options" in named or (
            last and not isinstance(last[0], timedelta)
        )
        if has_options:
            original(group, store, rank, size, *last, **named)
            return
        connections = followed()
        if connections is None:
            original(group, store, rank, size, default_options(*last, **named))
            return
        # Creating the options' device starts listening; the constructor connects the
        # ranks.
        with connections.listeners_opened() as ports:
            options = default_options(*last, **named)
        with connections.opened_to_peers(store, rank, size, ports):
            original(group, store, rank, size, options)

    return initialize
