"""Runs stages through Megatron's schedule plans, so that two micro-batches can run as a pair.

A plan cuts each layer into nodes: attention and router, dispatch, experts, combine. Megatron's
`combined_forward_backward_step` runs the nodes of one forward and of one backward in turn, those
that communicate in a stream of their own. It knows neither a schedule nor virtual stages, and the
transport stays where the executor has it, before and after both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import combined_1f1b, utils
from megatron.core.pipeline_parallel import schedules as upstream
from megatron.core.tensor_parallel import random

from megatron_ext.runtime.compute import StageCompute, rng_of_this_step, set_rng_states
from megatron_ext.upstream.signatures import parameters

if TYPE_CHECKING:
    from megatron_ext.observer import Observer
    from megatron_ext.runtime.compute import Tensors
    from megatron_ext.schedules.table.actions import Action, Kind

_Key = tuple[int, int]
# Of a layer, in order; 0.19 and later have another name for the first.
_PARTS = ("attn", "pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")


@dataclass
class PlannedCompute(StageCompute):
    """Runs the actions of a training step with pairs; those outside of pairs take plans too."""

    observers: Sequence[Observer] = ()
    """Observers of the exchanges of tokens."""

    def __post_init__(self) -> None:
        """Make Megatron's stream for communication, once in a process."""
        kind: dict[str, Any] = {}
        if "high_priority" in parameters(f"{utils.__name__}:set_streams"):  # 0.18 and later
            kind["high_priority"] = self.call.config.high_priority_a2a_comm_stream
        utils.set_streams(**kind)

    def run_pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run F of a micro-batch and B or I of another (`executor.RunPair`)."""
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
        given: dict[str, Any] = dict.fromkeys(
            ("forward_step_func", "data_iterator", "f_model", "b_model")
        )
        drawing: AbstractContextManager[None] = nullcontext()
        if forward is not None:
            place = self._stage(forward[0])
            if self._draws_by_microbatch:
                # A backward draws nothing: what recomputes has the numbers of its forward.
                drawing = rng_of_this_step(*forward)
            given |= {
                "forward_step_func": self._planning(forward),
                "data_iterator": place.data.view(forward[1]),
                "f_model": place.model,
                "f_model_chunk_id": place.vp_stage,
                "is_first_microbatch": upstream.check_first_val_step(
                    call.first_val_step, call.forward_only, not self._forwards[forward[0]]
                ),
                "current_microbatch": forward[1],
            }
        if backward is not None:
            saved = self._live.pop(backward)
            given["b_model"] = self._stage(backward[0]).model
        with drawing:
            outputs, num_tokens, found = combined_1f1b.combined_forward_backward_step(
                **given,
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
            outputs = self._made(*forward, inputs, outputs, num_tokens, store)
        if backward is None:
            return outputs, []
        return outputs, self._sent_back(*backward, saved[0], found)

    def _planning(self, key: _Key) -> Callable[..., Any]:
        """Return Megatron's forward step for a micro-batch, in the form that makes a plan."""
        splits = key in self.table.split_backwards

        def around_forward() -> AbstractContextManager[Any]:
            return self.splits.postponing(key[0]) or nullcontext()

        def around_backward() -> AbstractContextManager[Any]:
            return self.splits.defer(*key)

        def step(*args: Any, **kwargs: Any) -> Any:
            plan, loss = self.call.forward_step_func(*args, **kwargs)
            layers = [plan.get_layer(index) for index in range(plan.num_layers())]
            for layer in layers:
                self._keep_what_is_read(layer)
                self._draw_as_in_a_block(layer)
            predicting = [
                layer for layer in layers if isinstance(layer.mtp_post_process, utils.ScheduleNode)
            ]
            if len(predicting) > 1:
                self._predict_apart(predicting)
            for layer in layers if self.observers else ():
                for node in (layer.moe_dispatch, layer.moe_combine):
                    if isinstance(node, utils.ScheduleNode):  # none of a layer without experts
                        node.forward_func = self._observed("F", key, node.forward_func)
                        kind: Kind = "I" if splits else "B"
                        node.backward_func = self._observed(kind, key, node.backward_func)
            config = self.call.config
            if config.recompute_granularity == "full":
                is_partial = config.recompute_method == "block"
                for layer in layers[: config.recompute_num_layers] if is_partial else layers:
                    # Those of MTP keep more than their input.
                    if not isinstance(layer.mtp_post_process, utils.ScheduleNode):
                        self._recompute(layer)
            for part in (plan, *layers) if splits else ():
                for node in vars(part).values():
                    if isinstance(node, utils.ScheduleNode):
                        node.forward_func = self._kept_for_w(node.forward_func, around_forward)
                        node.backward_func = self._kept_for_w(node.backward_func, around_backward)
                        # Where the table says W, not behind the node.
                        node.delay_wgrad_compute = False
            return plan, loss

        return step

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
        predicts = isinstance(layer.mtp_post_process, utils.ScheduleNode)
        if predicts or not (config.sequence_parallel and draws):
            return

        def forked(run: Callable[..., Any], *given: Any) -> Any:
            with random.get_cuda_rng_tracker().fork():
                return run(*given)

        for name in _PARTS:
            if isinstance(node := vars(layer).get(name), utils.ScheduleNode):
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
                given: Any, predicts: Any = predicts, run: Any = predicts.forward_func
            ) -> Any:
                made = run(given)
                predicts.chunk_state.mtp_hidden_states[-1] = predicts.detach(made)
                return made

            predicts.forward_func = hand_on
        first, *others = (
            getattr(layer, _PARTS[0], None) or layer.pre_dispatch_computation for layer in layers
        )
        for node in others:

            def embed(
                *given: Any, state: Any = node.chunk_state, run: Any = node.forward_func
            ) -> Any:
                model = state.model

                def embedding(**tokens: Any) -> Any:
                    made = model.embedding(**tokens)
                    return first.detach(made) if made.requires_grad else made

                state.model = SimpleNamespace(
                    embedding=embedding, decoder=model.decoder, vp_stage=model.vp_stage
                )
                try:
                    return run(*given)
                finally:
                    state.model = model

            node.forward_func = embed

    @staticmethod
    def _recompute(layer: Any) -> None:
        """Let a layer run without a graph, and once more before its backward."""
        parts = [vars(layer).get(name) for name in _PARTS]
        nodes = [part for part in parts if isinstance(part, utils.ScheduleNode)]
        forwards = [node.forward for node in nodes]
        backward = nodes[-1].backward
        kept: list[Any] = []

        def without_graph(forward: Callable[..., Any], given: Any) -> Any:
            if not kept:
                # It may belong to the stream for communication, and is read in this one.
                given.record_stream(torch.cuda.current_stream())
                kept.extend((given, random._get_all_rng_states()))
            with torch.no_grad():
                made = forward(given)
            if forward is not forwards[-1]:
                return made
            for node in nodes:
                node.inputs = node.output = None
            return made.requires_grad_()

        def again(gradient: Any) -> Any:
            value, drawn = kept
            kept.clear()
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
            made = function(*args)
            for observer in self.observers:
                observer.end_exchange(kind, *key)
            return made

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
                made = function(*args)
            for tensor in made if isinstance(made, tuple) else (made,):
                if tensor is not None:
                    # It may belong to the stream for communication, and W may read it: the output
                    # layer's input, for one. That stream would reuse it while W still runs.
                    tensor.record_stream(of_w)
            return made

        return run
