"""Runs stages through Megatron's schedule plans, so that two micro-batches can run as a pair.

A plan cuts each layer into nodes: attention and router, dispatch, experts, combine. Megatron's
`combined_forward_backward_step` runs the nodes of one forward and of one backward in turn, those
that communicate in a stream of their own. It knows neither a schedule nor virtual stages, and the
transport stays where the executor has it, before and after both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b, utils
from megatron.core.pipeline_parallel import schedules as upstream
from megatron.core.tensor_parallel import random

from megatron_ext.observer import overrides
from megatron_ext.runtime.compute import StageCompute, rng_of_this_step, set_rng_states
from megatron_ext.upstream.signatures import parameters

if TYPE_CHECKING:
    from megatron_ext.observer import Observer
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action, Kind

_Key = tuple[int, int]
# Of a layer, in order; 0.19 and later have another name for the first.
_PARTS = ("attn", "pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")


def _nodes_of(layer: Any) -> list[Any]:
    """Return the nodes of a layer in the order in which they run."""
    # A dense layer, for one, has none for dispatch and combine.
    nodes = [vars(layer).get(name) for name in _PARTS]
    return [node for node in nodes if isinstance(node, utils.ScheduleNode)]


def _predicts(layer: Any) -> bool:
    """Return whether a layer is one of multi-token prediction."""
    return isinstance(layer.mtp_post_process, utils.ScheduleNode)


@dataclass
class PlannedCompute(StageCompute):
    """Runs the actions of a training step with pairs; those outside of pairs take plans too."""

    observers: Sequence[Observer] = field(default=(), init=False)
    """Observers of the exchanges of tokens."""

    def __post_init__(self) -> None:
        """Make Megatron's stream for communication, once in a process."""
        kind: dict[str, Any] = {}
        if "high_priority" in parameters(f"{utils.__name__}:set_streams"):  # 0.18 and later
            kind["high_priority"] = self.call.config.high_priority_a2a_comm_stream
        utils.set_streams(**kind)

    def observe(self, observers: Sequence[Observer]) -> None:
        """Let those observers that want to see the exchanges of tokens."""
        self.observers = [o for o in observers if overrides(o, "end_exchange")]

    def run_pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run F of a micro-batch and B or I of another, see `StageCompute.run_pair`."""
        for tensor in inputs:
            if tensor is not None:
                tensor.requires_grad_()
        return self._together(
            (forward.stage, forward.microbatch),
            inputs or [None] * self.num_inputs,
            (backward.stage, backward.microbatch),
            gradients or [None],
        )

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        """Run F alone, see `StageCompute.forward`."""
        return self._together((stage, microbatch), inputs, None, [])[0]

    def backward(self, stage: int, microbatch: int, gradients: Tensors, *, split: bool) -> Tensors:
        """Run B or I alone, see `StageCompute.backward`; its plan knows whether it is split."""
        return self._together(None, [], (stage, microbatch), gradients)[1]

    def _together(
        self, forward: _Key | None, inputs: Tensors, backward: _Key | None, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run a forward, a backward, or both; return the outputs of each."""
        call = self.call
        saved: tuple[Tensors, Tensors] = ([], [])
        store: list[Any] = []
        # Megatron runs what has a model: the forward, the backward, or both in turn.
        arguments: dict[str, Any] = dict.fromkeys(
            ("forward_step_func", "data_iterator", "f_model", "b_model")
        )
        drawing: AbstractContextManager[None] = nullcontext()
        if forward is not None:
            arguments |= self._arguments_of_forward(forward)
            if self._draws_by_microbatch:
                # A backward draws nothing: what recomputes has the numbers of its forward.
                drawing = rng_of_this_step(*forward)
        if backward is not None:
            # Gone from here before the backward runs, so that it frees what it has used.
            saved = self._live.pop(backward)
            arguments["b_model"] = self._stage(backward[0]).model
        with drawing:
            outputs, num_tokens, input_gradients = combined_1f1b.combined_forward_backward_step(
                **arguments,
                num_microbatches=call.num_microbatches,
                input_tensor=inputs,
                forward_data_store=store,
                b_input_tensor=saved[0],
                b_output_tensor=saved[1],
                b_output_tensor_grad=gradients,
                config=call.config,
                collect_non_loss_data=call.collect_non_loss_data,
            )
        if forward is not None:
            for output in outputs:
                # A layer of experts ends in the stream for communication, which owns its memory.
                output.record_stream(torch.cuda.current_stream())
            outputs = self._keep(*forward, inputs, outputs, num_tokens, store)
        if backward is None:
            return outputs, []
        return outputs, self._sent_back(*backward, saved[0], input_gradients)

    def _arguments_of_forward(self, key: _Key) -> dict[str, Any]:
        """Return what Megatron's step of a forward and a backward takes for a forward."""
        stage, microbatch = key
        place, is_first = self._stage(stage), not self._forwards[stage]
        return {
            "forward_step_func": self._planning(key),
            "data_iterator": place.data.view(microbatch),
            "f_model": place.model,
            "f_model_chunk_id": place.vp_stage,
            "is_first_microbatch": upstream.check_first_val_step(
                self.call.first_val_step, self.call.forward_only, is_first
            ),
            "current_microbatch": microbatch,
        }

    def _planning(self, key: _Key) -> Callable[..., Any]:
        """Return Megatron's forward step for a micro-batch, in the form that makes a plan."""
        splits = key in self.table.split_backwards

        def step(*args: Any, **kwargs: Any) -> Any:
            plan, loss = self.call.forward_step_func(*args, **kwargs)
            layers = [plan.get_layer(index) for index in range(plan.num_layers())]
            for layer in layers:
                self._keep_what_is_read(layer)
                self._draw_as_in_a_block(layer)
            predicting = [layer for layer in layers if _predicts(layer)]
            if len(predicting) > 1:
                self._predict_apart(predicting)
            # In this order: what recomputes runs the nodes that observers see, and what leaves
            # weight gradients to W wraps both.
            if self.observers:
                backward_kind: Kind = "I" if splits else "B"
                for layer in layers:
                    self._observe(layer, key, backward_kind)
            for layer in self._recomputed(layers):
                self._recompute(layer)
            if splits:
                for part in (plan, *layers):
                    self._defer_weights(part, key)
            return plan, loss

        return step

    def _recomputed(self, layers: list[Any]) -> list[Any]:
        """Return the layers that full recomputation runs once more before their backward."""
        config = self.call.config
        if config.recompute_granularity != "full":
            return []
        if config.recompute_method == "block":
            layers = layers[: config.recompute_num_layers]
        # Those of multi-token prediction keep more than their input.
        return [layer for layer in layers if not _predicts(layer)]

    def _observe(self, layer: Any, key: _Key, backward_kind: Kind) -> None:
        """Let observers see the exchanges of tokens of a layer."""
        for node in (layer.moe_dispatch, layer.moe_combine):
            if isinstance(node, utils.ScheduleNode):  # none of a layer without experts
                node.forward_func = self._observed("F", key, node.forward_func)
                node.backward_func = self._observed(backward_kind, key, node.backward_func)

    def _defer_weights(self, part: Any, key: _Key) -> None:
        """Let the nodes of a plan, or of a layer, leave weight gradients to W."""
        stage, microbatch = key

        def around_forward() -> AbstractContextManager[Any]:
            return self.splits.postponing(stage) or nullcontext()

        def around_backward() -> AbstractContextManager[Any]:
            return self.splits.defer(stage, microbatch)

        for node in vars(part).values():
            if isinstance(node, utils.ScheduleNode):
                node.forward_func = self._kept_for_w(node.forward_func, around_forward)
                node.backward_func = self._kept_for_w(node.backward_func, around_backward)
                # Where the table says W, not behind the node.
                node.delay_wgrad_compute = False

    def _keep_what_is_read(self, layer: Any) -> None:
        """Let nothing of a layer be freed or overwritten that another part of it still reads."""
        config, dispatch = self.call.config, layer.moe_dispatch
        dispatcher = config.moe_token_dispatcher_type
        if config.num_moe_experts == config.expert_model_parallel_size:
            # A single expert reads the dispatched tokens, in W too; several read a sorted copy.
            layer.mlp.free_input = False
        if dispatcher == "allgather" and isinstance(dispatch, utils.ScheduleNode):
            dispatch.free_input = False  # a view of what the router reads
            gather = dispatch.forward_func
            # It gathers into a buffer of all layers, which the partner's backward writes next.
            dispatch.forward_func = lambda *args: gather(*args).clone()

    def _draw_as_in_a_block(self, layer: Any) -> None:
        """Let a layer draw from the generators of its tensor-parallel rank.

        With sequence parallelism Megatron's block enters them around all layers, and plans do so
        for layers of multi-token prediction only. In the others, tensor-parallel ranks would drop
        the same elements of their parts, and others than without pairs.
        """
        config = self.call.config
        draws = config.hidden_dropout or config.attention_dropout or config.moe_input_jitter_eps
        if _predicts(layer) or not (config.sequence_parallel and draws):
            return

        def forked(run: Callable[..., Any], *arguments: Any) -> Any:
            with random.get_cuda_rng_tracker().fork():
                return run(*arguments)

        for node in _nodes_of(layer):
            node.forward_func = partial(forked, node.forward_func)

    @staticmethod
    def _predict_apart(layers: list[Any]) -> None:
        """Let each of several layers of multi-token prediction run backwards once.

        The last one puts the outputs of all together: with their graphs, its backward would run
        through those of the others and free them. And all of them embed tokens. Megatron's own
        backward adds the sum of these gradients to the weight, not one after the other. So here the
        layer that runs backwards last, the first one, has the embeddings of all.
        """
        for layer in layers[:-1]:
            predicts = layer.mtp_post_process

            def hand_on(
                hidden_states: Any, predicts: Any = predicts, run: Any = predicts.forward_func
            ) -> Any:
                output = run(hidden_states)
                predicts.chunk_state.mtp_hidden_states[-1] = predicts.detach(output)
                return output

            predicts.forward_func = hand_on
        first_node, *later_nodes = (
            getattr(layer, _PARTS[0], None) or layer.pre_dispatch_computation for layer in layers
        )
        for node in later_nodes:

            def embed(
                *arguments: Any, state: Any = node.chunk_state, run: Any = node.forward_func
            ) -> Any:
                model = state.model

                def embedding(**tokens: Any) -> Any:
                    embedded = model.embedding(**tokens)
                    if not embedded.requires_grad:
                        return embedded
                    return first_node.detach(embedded)

                state.model = SimpleNamespace(
                    embedding=embedding, decoder=model.decoder, vp_stage=model.vp_stage
                )
                try:
                    return run(*arguments)
                finally:
                    state.model = model

            node.forward_func = embed

    @staticmethod
    def _recompute(layer: Any) -> None:
        """Let a layer run without a graph, and once more before its backward."""
        nodes = _nodes_of(layer)
        forwards = [node.forward for node in nodes]
        backward = nodes[-1].backward
        input_and_states: list[Any] = []

        def without_graph(forward: Callable[..., Any], value: Any) -> Any:
            if not input_and_states:
                # It may belong to the stream for communication, and is read in this one.
                value.record_stream(torch.cuda.current_stream())
                input_and_states.extend((value, random._get_all_rng_states()))
            with torch.no_grad():
                output = forward(value)
            if forward is not forwards[-1]:
                return output
            for node in nodes:
                node.inputs = node.output = None
            return output.requires_grad_()

        def again(gradient: Any) -> Any:
            value, drawn = input_and_states
            input_and_states.clear()
            states = random._get_all_rng_states()
            set_rng_states(*drawn)
            for node, forward in zip(nodes, forwards, strict=True):
                del node.forward
                node.detached = node.before_detached = ()
                value = forward(value)
            del nodes[-1].backward
            set_rng_states(*states)
            return backward(gradient)

        for node, forward in zip(nodes, forwards, strict=True):
            node.forward = partial(without_graph, forward)
        nodes[-1].backward = again

    def _observed(self, kind: Kind, key: _Key, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an exchange of tokens that observers see."""

        def run(*args: Any) -> Any:
            for observer in self.observers:
                observer.begin_exchange()
            output = function(*args)
            for observer in self.observers:
                observer.end_exchange(kind, *key)
            return output

        return run

    @staticmethod
    def _kept_for_w(
        function: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[..., Any]:
        """Return a part of a layer that runs in a context of the split, and whose results W reads.

        Each part enters its own: in a pair the partner's parts come between, which may have another
        W, or none.
        """
        of_w = torch.cuda.current_stream()

        def run(*args: Any) -> Any:
            with context():
                output = function(*args)
            tensors = output if isinstance(output, tuple) else (output,)
            for tensor in tensors:
                if tensor is not None:
                    # It may belong to the stream for communication, and W may read it: the output
                    # layer's input, for one. That stream would reuse it while W still runs.
                    tensor.record_stream(of_w)
            return output

        return run
