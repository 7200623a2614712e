"""Carries tensors for Megatron's own schedules over a megatron_ext transport.

Megatron's 1F1B and interleaved schedules run unmodified; only their P2P communication is replaced,
at `P2PCommunicator._communicate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_ext.config import active
from megatron_ext.devices import device_of
from megatron_ext.errors import ScheduleError, reason_for_peers
from megatron_ext.runtime.connect import links_of, open_transport
from megatron_ext.runtime.program import Peers, Table, make_table, shape_between_stages
from megatron_ext.transport.base import Expected
from megatron_ext.transport.observed import observed
from megatron_ext.upstream.signatures import default_groups

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline
    from megatron_ext.message import MessageKind
    from megatron_ext.schedules.table.communication import Transfer


@dataclass
class _Request:
    """A request with Megatron's interface. A send's request is complete from the start."""

    arrive: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the tensor. Further calls do nothing."""
        if self.arrive is not None:
            self.arrive()
            self.arrive = None


# Megatron's schedules match tensors by call order, not by name. So the n-th tensor in a
# direction gets the name of the n-th message in our table for the same schedule, which
# is the same on the sender and the receiver.
class MegatronPipeline:
    """The messages of Megatron's own schedule on one pipeline, in table order.

    `call` contains the first step's keyword arguments. The constructor is collective over the job.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Any,
        call: Mapping[str, Any],
    ) -> None:
        model = call["model"]
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        config = get_model_config(chunks[0])
        self._pipeline = pipeline
        # Keep a reference, so that the group's id, the key of `MegatronPipelines`, stays unique.
        self._group = groups.pp
        self._peers = Peers(dist.get_process_group_ranks(groups.pp))
        self._device = device_of(chunks)
        self._dtype = config.pipeline_dtype
        # Number of micro-batches -> table.
        self._tables: dict[int, Table] = {}
        length = call.get("decoder_seq_length") or call["seq_length"]
        micro_batch_size = call["micro_batch_size"]
        shape = shape_between_stages(config, groups, length, micro_batch_size)
        table = self._table(call["num_microbatches"])
        transport = open_transport(
            pipeline,
            self._device,
            links=links_of(table, self._peers),
            shapes={"F": [shape], "B": [shape]},
            dtype=self._dtype,
        )
        observers = active.required().observers
        self.transport = observed(transport, observers)

    def _table(self, num_microbatches: int) -> Table:
        if num_microbatches not in self._tables:
            self._tables[num_microbatches] = make_table(
                self._pipeline,
                num_microbatches,
                self._group.rank(),
                backward=True,
            )
        return self._tables[num_microbatches]

    def begin(self, num_microbatches: int, forward_only: bool) -> None:
        """Begin a step; evaluations run their forward passes in training order."""
        table = self._table(num_microbatches)
        sent: list[Transfer] = []
        for exchange in table.exchanges:
            for transfer in exchange.outputs:
                if transfer.verb == "SEND":
                    sent.append(transfer)
        kinds: tuple[MessageKind, ...] = ("F", "B")
        if forward_only:  # an evaluation sends no gradients
            kinds = ("F",)
        # The transport matches messages by name, so a send does not block, regardless of the order
        # in which the peer receives.
        self._to_send = _by_kind(sent, kinds)
        self._to_receive = _by_kind(table.arrivals, kinds)
        expected = []
        for queue in self._to_receive.values():
            for transfer in queue:
                arrival = Expected(
                    source=self._peers.of(transfer),
                    message=transfer.message,
                    shape=None,
                    dtype=self._dtype,
                )
                expected.append(arrival)
        self.transport.begin(expected, table.slots)

    def send(self, tensor: torch.Tensor, kind: MessageKind) -> _Request:
        """Send the next tensor in a direction, `[s, b, h]`."""
        transfer = self._next(self._to_send, kind, "sends")
        target = self._peers.of(transfer)
        self.transport.isend(tensor, target, transfer.message)
        # The request is already complete, because the transport holds the storage.
        return _Request()

    def receive(self, kind: MessageKind) -> tuple[torch.Tensor, _Request]:
        """Return an empty leaf that requires grad, and the request that fills it."""
        # Assign the name here, because Megatron may wait for the requests in a different order.
        transfer = self._next(self._to_receive, kind, "receives")
        source = self._peers.of(transfer)
        message = transfer.message
        timeout_s = self._pipeline.timeout_s
        # The tensor starts empty. Its shape is sent with it, so variable lengths do not have to be
        # exchanged beforehand.
        tensor = torch.empty(
            0,
            dtype=self._dtype,
            device=self._device,
            requires_grad=True,
        )

        def arrive() -> None:
            tensor.data = self.transport.recv(source, message, timeout_s)

        return tensor, _Request(arrive)

    def communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, _Request] | None]:
        """Exchange a step's tensors, in place of `P2PCommunicator._communicate`.

        Activations go to the next pipeline rank and gradients to the previous one, `[s, b, h]`
        each. If `wait_on_reqs` is false, received tensors stay empty until their request's `wait()`
        fills them.

        Returns:
            (activation, gradient, requests). `requests` has Megatron's keys; it is None if all
            requests are complete.

        Raises:
            ScheduleError: Megatron sends or receives more tensors than the table has messages.
            TransportError: A message timed out, or a peer failed.
        """
        requests: dict[str, _Request] = {}
        if tensor_send_prev is not None:
            requests["send_prev"] = self.send(tensor_send_prev, "B")
        if tensor_send_next is not None:
            requests["send_next"] = self.send(tensor_send_next, "F")
        activation = None
        gradient = None
        if recv_prev:
            activation, requests["recv_prev"] = self.receive("F")
        if recv_next:
            gradient, requests["recv_next"] = self.receive("B")
        if wait_on_reqs:
            for request in requests.values():
                request.wait()
            return activation, gradient, None
        return activation, gradient, requests

    def _next(
        self,
        queues: dict[MessageKind, deque[Transfer]],
        kind: MessageKind,
        verb: str,
    ) -> Transfer:
        if not queues.get(kind):
            raise ScheduleError(
                f"Megatron's schedule {verb} more tensors than the table of {self._pipeline.name} "
                f"has messages; use --pipeline-transport torch"
            )
        return queues[kind].popleft()


def _by_kind(
    transfers: Iterable[Transfer],
    kinds: Iterable[MessageKind],
) -> dict[MessageKind, deque[Transfer]]:
    """Return a queue of transfers for each kind, in table order."""
    queues: dict[MessageKind, deque[Transfer]] = {}
    for kind in kinds:
        queues[kind] = deque()
    for transfer in transfers:
        queue = queues.get(transfer.message.kind)
        if queue is not None:
            queue.append(transfer)
    return queues


@dataclass
class MegatronPipelines:
    """Runs Megatron's own schedules; our transport carries their messages."""

    by_group: dict[int, MegatronPipeline] = field(default_factory=dict)
    """Id of the pipeline group -> pipeline, which references the group, so the id stays unique."""
    running: MegatronPipeline | None = None
    """The pipeline whose step is running."""

    def step(self, schedule: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
        """Run one step of Megatron's schedule, with the transport carrying its messages."""
        pipeline = active.transport_only()
        assert pipeline is not None, "the patch acts only while there is a pipeline"
        assert self.running is None, "a step inside a step"
        groups = keywords.get("pg_collection") or default_groups()
        group_id = id(groups.pp)
        pipeline_of_group = self.by_group.get(group_id)
        if pipeline_of_group is None:
            pipeline_of_group = MegatronPipeline(pipeline, groups, keywords)
            self.by_group[group_id] = pipeline_of_group
        self.running = pipeline_of_group
        is_evaluation = bool(keywords.get("forward_only"))
        if not is_evaluation:
            for observer in active.required().observers:
                observer.begin_carried_step()
        try:
            pipeline_of_group.begin(keywords["num_microbatches"], is_evaluation)
            result = schedule(**keywords)
            pipeline_of_group.transport.flush(pipeline.timeout_s)
        except BaseException as error:
            pipeline_of_group.transport.abort(reason_for_peers(error))
            raise
        finally:
            self.running = None
        return result

    def abort(self, reason: str) -> None:
        """Abort the transports. Called from a thread other than the training thread."""
        # Copy the values, because the training thread may add a pipeline meanwhile.
        pipelines = list(self.by_group.values())
        for pipeline_of_group in pipelines:
            pipeline_of_group.transport.abort(reason)

    def close(self) -> None:
        """Close the transports."""
        for pipeline_of_group in self.by_group.values():
            pipeline_of_group.transport.close()
