"""Stages with experts: layers that exchange tokens with other ranks, alone or in pairs.

A layer computes attention, sends its tokens to their experts, computes the experts and sends the
results back. Attention and experts each account for half of the layer's computation. An expert
group's ranks meet in both exchanges, which then take the time of an all-to-all. Outside pairs, all
four parts run one after another in one stream. In a pair, Megatron's
`combined_forward_backward_step` runs them according to its plan for a layer, with exchanges in a
separate stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
from megatron.core import parallel_state
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.pipeline_parallel import combined_1f1b
from megatron.core.pipeline_parallel import utils as pipeline_utils

from megatron_ext.runtime.split import SplitBackward
from megatron_ext.schedules import Kind, Schedule

from .device_probe import DeviceProbe, TimedOp
from .ops import ExpertTimes, Part
from .stage import MESSAGE_SHAPE, Chunk, Passing, Probe, first, weight_product


class ExpertProbe(DeviceProbe):
    """Makes each part of a layer spend its time in the stream that it runs in."""

    split: SplitBackward | None = None
    """Tells whether the running backward defers its weight gradients to W."""

    def enqueue(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Enqueue the time of a W, in parts. The parts of other ops enqueue their own time."""
        if kind != "W":
            return
        assert isinstance(self.times, ExpertTimes)
        for layer in reversed(range(self.times.num_layers)):
            self.part("experts", kind, (stage, microbatch), layer)
            self.part("attention", kind, (stage, microbatch), layer)

    def part(self, part: Part, kind: Kind, place: tuple[int, int], layer: int) -> None:
        """Enqueue the time of a layer's part, after a meeting if the part exchanges tokens."""
        times = self.times
        assert isinstance(times, ExpertTimes)
        share = 1.0
        if part in ("dispatch", "combine"):
            if not times.all_to_all:
                return
            _meet(self.device)
            share = times.exchange_share
        expert_rank = parallel_state.get_expert_model_parallel_rank()
        lasts_us = 1e6 * times.part_s(part, kind, *place, layer, expert_rank)
        num_waves = times.weight_waves if kind == "W" else 1
        for _ in range(num_waves):
            torch.ops.fake_musa.spend(self.device.index, lasts_us / num_waves, share)

    def chunk(self, config: Any, vp_stage: int | None, number: int) -> Chunk:
        return ExpertChunk(self, config, vp_stage, number)

    def record_plans(
        self, split: SplitBackward | None = None, table: Schedule | None = None
    ) -> None:
        """Record what plans run. Both ops of a pair get the same time."""
        self.split = split
        rows = () if table is None else table.rows
        split_backwards = {a[:3:2] for row in rows for a in row if a.kind == "W"}
        step = combined_1f1b.combined_forward_backward_step
        parameters = inspect.signature(step)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            arguments = parameters.bind(*args, **kwargs).arguments
            model = arguments["f_model"]
            names: list[tuple[int, Kind, int]] = []
            if model is not None:
                key = model.number, arguments["current_microbatch"]
                names.append((key[0], "F", key[1]))
            if arguments["b_model"] is not None:
                stage, microbatch = first(arguments["b_output_tensor"]).benchmark_key
                kind: Kind = "I" if (stage, microbatch) in split_backwards else "B"
                names.append((stage, kind, microbatch))
            with TimedOp(self, *names):
                if model is not None:
                    self.current = key
                outputs, num_tokens, num_zeros = step(*args, **kwargs)
                if model is not None:
                    first(outputs).benchmark_key = key
            return outputs, num_tokens, num_zeros

        combined_1f1b.combined_forward_backward_step = recorded


def _meet(device: torch.device) -> None:
    """Make the current stream wait until the expert group's other ranks have arrived."""
    group = parallel_state.get_expert_model_parallel_group()
    operations = []
    for peer in torch.distributed.get_process_group_ranks(group):
        if peer == torch.distributed.get_rank():
            continue
        for operation in (torch.distributed.isend, torch.distributed.irecv):
            buffer = torch.empty(1, device=device)
            operations.append(torch.distributed.P2POp(operation, buffer, peer, group))
    for work in torch.distributed.batch_isend_irecv(operations):
        work.wait()


class _Layer(torch.nn.Module):
    """A layer with experts, split into four parts that are functions of `[s, b, h]`."""

    def __init__(self, probe: ExpertProbe, index: int) -> None:
        super().__init__()
        self.probe = probe
        self.index = index
        """Index within the stage."""
        self.place = (0, 0)
        """(stage, micro-batch) of the running forward."""
        weight = torch.zeros(MESSAGE_SHAPE[-1], 1, device=probe.device)
        self.weights = torch.nn.ParameterList([weight, weight.clone()])

    def run(self, part: Part, x: torch.Tensor) -> torch.Tensor:
        """Run one part."""
        self.probe.part(part, "F", self.place, self.index)
        # Clone, because Megatron would replace a view.
        output: torch.Tensor = Passing.apply(x, self._spending("I", part)).clone()
        if part in ("attention", "experts"):
            from_weights = weight_product(x, self.weights[part == "experts"])
            output = output + Passing.apply(from_weights, self._spending("W", part))
        return output

    def _spending(
        self, kind: Kind, part: Part
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that spends a gradient's time. Weight gradients may be left to W."""
        place = self.place
        probe = self.probe

        def passes(gradient: torch.Tensor) -> torch.Tensor:
            if kind == "I" or probe.split is None or not probe.split.is_deferring:
                probe.part(part, kind, place, self.index)
            return gradient.clone() if kind == "I" else gradient

        return passes


class ExpertChunk(Chunk):
    """A chunk of layers with experts that runs in one stream or by a plan."""

    def __init__(
        self, probe: Probe, config: Any, vp_stage: int | None, number: int
    ) -> None:
        super().__init__(probe, config, vp_stage, number)
        assert isinstance(probe, ExpertProbe)
        assert isinstance(probe.times, ExpertTimes)
        self.parts = [_Layer(probe, index) for index in range(probe.times.num_layers)]
        self.layers = torch.nn.ModuleList(self.parts)

    def begin(
        self, data: Iterator[dict[str, torch.Tensor]], microbatch: int
    ) -> torch.Tensor:
        """Return the input of the first layer."""
        for layer in self.parts:
            layer.place = (self.number, microbatch)
        activation = self._given(data) + self.stage.z
        self.stage.probe.keep(activation)
        return activation

    def forward(self, data: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Run everything in one stream."""
        x = self.begin(data, self.stage.probe.current[1])
        for layer in self.parts:
            for part in get_args(Part):
                x = layer.run(part, x)
        return x

    def build_schedule_plan(
        self, data: Iterator[dict[str, torch.Tensor]]
    ) -> _ChunkPlan:
        """Return the plan that Megatron runs, in a pair or alone."""
        return _ChunkPlan(self, data)


class _Node(pipeline_utils.ScheduleNode):
    """A part of a layer."""

    delay_wgrad_compute = False

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed with the others or by W."""


class _LayerPlan(plans.TransformerLayerSchedulePlan):
    """The parts of one layer, under Megatron's names."""

    get_fp8_context = get_low_precision_context = staticmethod(
        nullcontext
    )  # by patch release

    def __init__(self, layer: _Layer, event: Any) -> None:
        streams = (pipeline_utils.get_comp_stream, pipeline_utils.get_comm_stream)
        nodes = {
            part: _Node(partial(layer.run, part), streams[index % 2], event, name=part)
            for index, part in enumerate(get_args(Part))
        }
        self.config = SimpleNamespace(ep_overlap_early_attn_memory_release=False)
        self.pre_dispatch_computation = nodes["attention"]
        self.moe_dispatch, self.mlp = nodes["dispatch"], nodes["experts"]
        self.moe_combine = nodes["combine"]
        self.mtp_post_process = pipeline_utils.NoopScheduleNode()


class _ChunkPlan(plans.TransformerModelChunkSchedulePlan):
    """The layers of one chunk."""

    def __init__(
        self, chunk: ExpertChunk, data: Iterator[dict[str, torch.Tensor]]
    ) -> None:
        self._model_chunk_state = SimpleNamespace()
        self._event = torch.cuda.Event()
        begin = partial(chunk.begin, data, chunk.stage.probe.current[1])
        self.pre_process = _Node(
            begin, pipeline_utils.get_comp_stream, self._event, name="begin"
        )
        self.post_process = None
        self.vp_stage = chunk.vp_stage
        self._transformer_layers = [
            _LayerPlan(layer, self._event) for layer in chunk.parts
        ]
