"""Runs stages with Megatron's schedule plans, so that two micro-batches can run as a pair.

A plan cuts each layer into nodes: attention and router, dispatch, experts, combine. Megatron's
`combined_forward_backward_step` alternates the nodes of one forward pass and one backward pass, and
runs nodes that communicate on a separate stream. The function does not depend on a schedule or on
virtual stages. The executor still receives all messages before a pair and sends all messages after
it.
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
    from megatron_ext.features.pairs.waiting_weights import SideStreams, WaitingWeights
    from megatron_ext.observer import Observer
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action, Kind

_Key = tuple[int, int]
"""(stage, micro-batch)."""
# A layer's nodes in order. The first two names refer to the same node: the second one
# has been used since 0.19.
_PARTS = ("attn", "pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")


def _nodes_of(layer: Any) -> list[Any]:
    """Return a layer's nodes in execution order."""
    # Some nodes may be missing: a dense layer has no dispatch or combine.
    nodes = [vars(layer).get(name) for name in _PARTS]
    return [node for node in nodes if isinstance(node, utils.ScheduleNode)]


def _predicts(layer: Any) -> bool:
    """Return whether a layer belongs to multi-token prediction."""
    return isinstance(layer.mtp_post_process, utils.ScheduleNode)


@dataclass
class PlannedCompute(StageCompute):
    """Runs the actions of a training step with pairs. Actions outside pairs use plans as well."""

    weights: WaitingWeights | None = None
    """Runs W before its place in the table. If None, W runs at its place in the table."""
    streams: SideStreams | None = None
    """The streams of actions and W, or None if actions run on the current stream."""
    observers: Sequence[Observer] = field(default=(), init=False)
    """Observers of token exchanges."""

    def __post_init__(self) -> None:
        """Create Megatron's communication stream, once per process."""
        # `SideStreams` has already set Megatron's stream.
        if self.streams is not None:
            return
        kind: dict[str, Any] = {}
        # Since 0.18, the stream's priority can be set.
        if "high_priority" in parameters(f"{utils.__name__}:set_streams"):
            kind["high_priority"] = self.call.config.high_priority_a2a_comm_stream
        utils.set_streams(**kind)

    def observe(self, observers: Sequence[Observer]) -> None:
        """Report token exchanges to the observers that override the corresponding callbacks."""
        self.observers = [
            observer for observer in observers if overrides(observer, "end_exchange")
        ]

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context for a step, which may select a stream."""
        if self.streams is None:
            return nullcontext()
        return self.streams.around_step()

    def run(self, action: Action, inputs: Tensors) -> Tensors:
        """Run one action; see `StageCompute.run`."""
        # Parts of this W may already have run.
        if action.kind == "W" and self.weights is not None:
            self.weights.finish(action.stage, action.microbatch)
            return []
        return super().run(action, inputs)

    def ended(self, action: Action) -> None:
        """Run or launch the W that can run after an action."""
        if self.weights is not None and action.kind != "W":
            self.weights.ended(action)

    def run_pair(
        self,
        forward: Action,
        backward: Action,
        inputs: Tensors,
        gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Run F of one micro-batch and B or I of another; see `StageCompute.run_pair`."""
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
        """Run F alone; see `StageCompute.forward`."""
        outputs, _ = self._together(
            forward=(stage, microbatch),
            inputs=inputs,
            backward=None,
            gradients=[],
        )
        return outputs

    def backward(
        self,
        stage: int,
        microbatch: int,
        gradients: Tensors,
        *,
        split: bool,
    ) -> Tensors:
        """Run B or I alone; see `StageCompute.backward`."""
        # `split` is not needed here, because the plan was built with it.
        _, input_gradients = self._together(
            forward=None,
            inputs=[],
            backward=(stage, microbatch),
            gradients=gradients,
        )
        return input_gradients

    def _together(
        self,
        forward: _Key | None,
        inputs: Tensors,
        backward: _Key | None,
        gradients: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Run a forward pass, a backward pass or both, and return the outputs of each."""
        call = self.call
        saved_inputs: Tensors = []
        saved_outputs: Tensors = []
        store: list[Any] = []
        # Megatron runs the forward pass if `f_model` is set, and the backward pass if `b_model` is
        # set.
        arguments: dict[str, Any] = dict.fromkeys(
            ("forward_step_func", "data_iterator", "f_model", "b_model")
        )
        drawing: AbstractContextManager[None] = nullcontext()
        if forward is not None:
            arguments |= self._arguments_of_forward(forward)
            if self._draws_by_microbatch:
                # A backward pass draws no new random numbers, because recomputation
                # restores the generator states.
                drawing = rng_of_this_step(*forward)
        if backward is not None:
            # Remove the entry before the backward pass so that autograd can free
            # tensors while the pass runs.
            saved_inputs, saved_outputs = self._live.pop(backward)
            stage, _ = backward
            arguments["b_model"] = self._stage(stage).model
        with drawing:
            outputs, num_tokens, input_gradients = (
                combined_1f1b.combined_forward_backward_step(
                    **arguments,
                    num_microbatches=call.num_microbatches,
                    input_tensor=inputs,
                    forward_data_store=store,
                    b_input_tensor=saved_inputs,
                    b_output_tensor=saved_outputs,
                    b_output_tensor_grad=gradients,
                    config=call.config,
                    collect_non_loss_data=call.collect_non_loss_data,
                )
            )
        if forward is not None:
            for output in outputs:
                # An expert layer ends on the communication stream, so its output's
                # memory belongs to that stream.
                output.record_stream(torch.cuda.current_stream())
            outputs = self._keep(*forward, inputs, outputs, num_tokens, store)
        if backward is None:
            return outputs, []
        sent_back = self._sent_back(*backward, saved_inputs, input_gradients)
        return outputs, sent_back

    def _arguments_of_forward(self, key: _Key) -> dict[str, Any]:
        """Return the forward pass's arguments for Megatron's combined step."""
        stage, microbatch = key
        place = self._stage(stage)
        is_first = not self._forwards[stage]
        return {
            "forward_step_func": self._planning(key),
            "data_iterator": place.data.view(microbatch),
            "f_model": place.model,
            "f_model_chunk_id": place.vp_stage,
            "is_first_microbatch": upstream.check_first_val_step(
                self.call.first_val_step,
                self.call.forward_only,
                is_first,
            ),
            "current_microbatch": microbatch,
        }

    def _planning(self, key: _Key) -> Callable[..., Any]:
        """Return a micro-batch's forward step, which builds a plan and adapts it for us."""
        splits = key in self.table.split_backwards

        def step(*args: Any, **kwargs: Any) -> Any:
            plan, loss = self.call.forward_step_func(*args, **kwargs)
            num_layers = plan.num_layers()
            layers = [plan.get_layer(index) for index in range(num_layers)]
            for layer in layers:
                self._keep_what_is_read(layer)
                self._draw_as_in_a_block(layer)
            predicting = [layer for layer in layers if _predicts(layer)]
            if len(predicting) > 1:
                self._predict_apart(predicting)
            # The order matters: recomputation must run nodes that are already observed,
            # and the deferral of weight gradients must wrap both.
            if self.observers:
                backward_kind: Kind = "I" if splits else "B"
                for index, layer in enumerate(layers):
                    self._observe(layer, index, key, backward_kind)
            for layer in self._recomputed(layers):
                self._recompute(layer)
            if splits:
                for part in (plan, *layers):
                    self._defer_weights(part, key)
            return plan, loss

        return step

    def _recomputed(self, layers: list[Any]) -> list[Any]:
        """Return the layers that full recomputation reruns before their backward pass."""
        config = self.call.config
        if config.recompute_granularity != "full":
            return []
        if config.recompute_method == "block":
            layers = layers[: config.recompute_num_layers]
        # Multi-token prediction layers keep more than their input, so do not recompute them.
        return [layer for layer in layers if not _predicts(layer)]

    def _observe(
        self,
        layer: Any,
        index: int,
        key: _Key,
        backward_kind: Kind,
    ) -> None:
        """Report a layer's token exchanges to the observers.

        `index` is the layer's position in the stage.
        """
        for node in (layer.moe_dispatch, layer.moe_combine):
            # Layers without experts lack these nodes.
            if isinstance(node, utils.ScheduleNode):
                node.forward_func = self._observed(
                    "F",
                    key,
                    index,
                    node.forward_func,
                )
                node.backward_func = self._observed(
                    backward_kind,
                    key,
                    index,
                    node.backward_func,
                )

    def _defer_weights(self, part: Any, key: _Key) -> None:
        """Make the nodes of a plan or a layer defer weight gradients to W."""
        stage, microbatch = key

        def around_forward() -> AbstractContextManager[Any]:
            return self.splits.postponing(stage) or nullcontext()

        def around_backward() -> AbstractContextManager[Any]:
            return self.splits.defer(stage, microbatch)

        for node in vars(part).values():
            if isinstance(node, utils.ScheduleNode):
                node.forward_func = self._kept_for_w(node.forward_func, around_forward)
                node.backward_func = self._kept_for_w(
                    node.backward_func,
                    around_backward,
                )
                # The table places W, so Megatron must not run it right after the node.
                node.delay_wgrad_compute = False

    def _keep_what_is_read(self, layer: Any) -> None:
        """Prevent freeing or reusing tensors that another part of the layer reads later."""
        config = self.call.config
        dispatch = layer.moe_dispatch
        dispatcher = config.moe_token_dispatcher_type
        if config.num_moe_experts == config.expert_model_parallel_size:
            # A single expert reads the dispatched tokens directly, including in W.
            # Several experts read a sorted copy of them.
            layer.mlp.free_input = False
        if dispatcher == "allgather" and isinstance(dispatch, utils.ScheduleNode):
            # The input is a view of the tensor that the router reads.
            dispatch.free_input = False
            gather = dispatch.forward_func

            def gather_copy(*args: Any) -> Any:
                # Clone the result: all layers gather into the same buffer, so the
                # partner's backward pass would overwrite it.
                return gather(*args).clone()

            dispatch.forward_func = gather_copy

    def _draw_as_in_a_block(self, layer: Any) -> None:
        """Make a layer draw random numbers from its tensor-parallel rank's generators.

        With sequence parallelism, Megatron's block selects these generators around all layers, but
        plans do so only for multi-token prediction layers. In all other layers, tensor-parallel
        ranks would use the same dropout mask for their different parts, and the mask would also
        differ from the one used without pairs.
        """
        config = self.call.config
        draws = (
            config.hidden_dropout
            or config.attention_dropout
            or config.moe_input_jitter_eps
        )
        if _predicts(layer) or not (config.sequence_parallel and draws):
            return

        def forked(run: Callable[..., Any], *arguments: Any) -> Any:
            with random.get_cuda_rng_tracker().fork():
                return run(*arguments)

        for node in _nodes_of(layer):
            node.forward_func = partial(forked, node.forward_func)

    @staticmethod
    def _predict_apart(layers: list[Any]) -> None:
        """Make each of several multi-token prediction layers run backward exactly once.

        The last layer joins the outputs of all layers. If these outputs kept their graphs, the last
        layer's backward pass would run through the other layers' graphs and free them, so the
        outputs are detached.

        In addition, all of these layers embed tokens. Megatron's own backward pass sums the
        gradients of these embeddings before adding them to the weight's gradient. To get the same
        sum, all embeddings belong to the graph of the first layer, which runs backward last.
        """
        # Detach the outputs of all layers except the last.
        for layer in layers[:-1]:
            predicts = layer.mtp_post_process

            def predict_detached(
                hidden_states: Any,
                predicts: Any = predicts,
                run: Any = predicts.forward_func,
            ) -> Any:
                output = run(hidden_states)
                predicts.chunk_state.mtp_hidden_states[-1] = predicts.detach(output)
                return output

            predicts.forward_func = predict_detached
        # Let the first node of the first layer collect the gradients of all embeddings.
        nodes = []
        for layer in layers:
            node = getattr(layer, _PARTS[0], None) or layer.pre_dispatch_computation
            nodes.append(node)
        first_node = nodes[0]
        for node in nodes[1:]:

            def embed(
                *arguments: Any,
                state: Any = node.chunk_state,
                run: Any = node.forward_func,
            ) -> Any:
                model = state.model

                def embedding(**tokens: Any) -> Any:
                    embedded = model.embedding(**tokens)
                    if not embedded.requires_grad:
                        return embedded
                    return first_node.detach(embedded)

                # The node gets the embedding from the model, so replace the model
                # meanwhile.
                state.model = SimpleNamespace(
                    embedding=embedding,
                    decoder=model.decoder,
                    vp_stage=model.vp_stage,
                )
                try:
                    return run(*arguments)
                finally:
                    state.model = model

            node.forward_func = embed

    @staticmethod
    def _recompute(layer: Any) -> None:
        """Make a layer run forward without a graph and, in its backward pass, again with one."""
        nodes = _nodes_of(layer)
        forwards = [node.forward for node in nodes]
        backward = nodes[-1].backward
        # The layer's input and the generator states before the layer. Empty until the
        # layer runs.
        input_and_states: list[Any] = []

        def without_graph(forward: Callable[..., Any], value: Any) -> Any:
            if not input_and_states:
                # The tensor may belong to the communication stream, but is later read
                # here.
                value.record_stream(torch.cuda.current_stream())
                states = random._get_all_rng_states()
                input_and_states.extend((value, states))
            with torch.no_grad():
                output = forward(value)
            if forward is not forwards[-1]:
                return output
            # After the last node, free everything that the nodes saved.
            for node in nodes:
                node.inputs = None
                node.output = None
            return output.requires_grad_()

        def again(gradient: Any) -> Any:
            value, drawn = input_and_states
            input_and_states.clear()
            # Run the forward pass with the earlier generator states, then restore the
            # current ones.
            states = random._get_all_rng_states()
            set_rng_states(*drawn)
            for node, forward in zip(nodes, forwards, strict=True):
                # Deleting the attribute exposes the class's method again.
                del node.forward
                node.detached = ()
                node.before_detached = ()
                value = forward(value)
            del nodes[-1].backward
            set_rng_states(*states)
            return backward(gradient)

        for node, forward in zip(nodes, forwards, strict=True):
            node.forward = partial(without_graph, forward)
        nodes[-1].backward = again

    def _observed(
        self,
        kind: Kind,
        key: _Key,
        layer: int,
        function: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Wrap a token exchange to report it to the observers."""

        def run(*args: Any) -> Any:
            for observer in self.observers:
                observer.begin_exchange()
            output = function(*args)
            for observer in self.observers:
                observer.end_exchange(kind, *key, layer)
            return output

        return run

    @staticmethod
    def _kept_for_w(
        function: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Callable[..., Any]:
        """Wrap part of a layer to run in a context of the split and keep its results for W.

        Every part enters its own context. In a pair, the partner's parts run between an action's
        parts and may belong to a different W, or to none.
        """
        of_w = torch.cuda.current_stream()

        def run(*args: Any) -> Any:
            with context():
                output = function(*args)
            tensors = output if isinstance(output, tuple) else (output,)
            for tensor in tensors:
                if tensor is not None:
                    # The tensor may belong to the communication stream and be read by
                    # W, such as the output layer's input. Without this call, that
                    # stream could reuse the memory while W is still running.
                    tensor.record_stream(of_w)
            return output

        return run
