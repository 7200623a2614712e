"""Stage and message times measured in a traced run, and estimates for other cuts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ArgumentsError, ScheduleError
from megatron_ext.files import read_json
from megatron_ext.schedules.table.costs import SHORTEST, Costs

if TYPE_CHECKING:
    from pathlib import Path

COSTS_FILE = "costs.json"
"""`megatron-ext aggregate` writes this file into a traced run's folder."""
SIZES = (
    *(
        "num_layers",
        "hidden_size",
        "seq_length",
        "micro_batch_size",
        "tensor_model_parallel_size",
    ),
    *("context_parallel_size", "expert_model_parallel_size"),
)
"""The settings that affect a layer's durations."""
_MAX_FILE_BYTES = 1 << 20

StageTimes = tuple[float, float, float]
"""Seconds for a stage's forward pass, input gradient and weight gradient."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """How many seconds a run's actions and messages took."""

    stages: tuple[StageTimes, ...]
    """By stage in the run: times for one micro-batch."""
    latency_s: float
    """Time from the end of an action until another rank has received its output."""
    all_to_all: float = 0.0
    """Share of forward passes and input gradients spent on all-to-all between experts."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings that affect durations, by Megatron's argument names."""

    def check_sizes(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Check that a training run has the same sizes as the traced run.

        Raises:
            ArgumentsError: A size differs.
        """
        for name, size in self.sizes.items():
            value = settings.get(name)
            # Sizes that this training run does not specify cannot be compared.
            if value is not None and value != size:
                flag = f"--{name.replace('_', '-')}"
                raise ArgumentsError(
                    f"{folder} has traces from a run with {flag} {size}, not {value}; trace a run "
                    f"with {flag} {value}, or use --pipeline-schedule auto"
                )

    def costs(self, ranks: int, layers_by_stage: Sequence[int]) -> Costs:
        """Return the costs of the same model with another cut."""
        stages = cut_anew(self.stages, layers_by_stage)
        times_by_pass = zip(*stages, strict=True)
        forward_s, input_s, weight_s = map(sum, times_by_pass)
        # The first three durations, for which tables are generated, are those of
        # 1/ranks of the model.
        return Costs(
            forward_s / ranks,
            input_s / ranks,
            weight_s / ranks,
            latency=self.latency_s,
            stages=stages,
            all_to_all=self.all_to_all,
        )

    def as_json(self) -> str:
        """Return the text that `read` parses."""
        text = json.dumps(asdict(self), indent=1)
        return f"{text}\n"

    @classmethod
    def read(cls, folder: Path) -> MeasuredCosts:
        """Return the measurements for the run whose traces are in a folder.

        Raises:
            ArgumentsError: There are no measurements, or the file is damaged.
        """
        path = folder / COSTS_FILE
        remedy = f"megatron-ext aggregate --trace-dir {folder} writes it"
        try:
            content = read_json(path, _MAX_FILE_BYTES)
            stages = tuple(map(_times, content["stages"]))
            if not stages:
                raise ValueError("it has no stages")
            measured = cls(
                stages=stages,
                latency_s=_time(content["latency_s"]),
                all_to_all=_time(content["all_to_all"]),
                sizes=dict(content["sizes"]),
            )
            # This raises an error for times that the simulator does not accept.
            measured.costs(1, [1] * len(stages))
        except OSError as error:
            reason = error.strerror or error
            raise ArgumentsError(
                f"{path} cannot be read: {reason}; {remedy}"
            ) from error
        except (ValueError, KeyError, TypeError, ScheduleError) as error:
            raise ArgumentsError(f"{path} is damaged: {error}; {remedy}") from error
        return measured


def _times(times: Any) -> StageTimes:
    # If the number of times is not three, unpacking raises an error that `read`
    # reports.
    forward_s, input_s, weight_s = times
    return _time(forward_s), _time(input_s), _time(weight_s)


def _time(value: Any) -> float:
    # Reject bool explicitly, as it is a subclass of int.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < math.inf
    ):
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def cut_anew(
    stages: Sequence[StageTimes], layers_by_stage: Sequence[int]
) -> tuple[StageTimes, ...]:
    """Return the per-stage times for the same model split into different stages.

    Every old stage's time is spread evenly over its part of the model. The embedding and the loss
    may make the first and last stages take longer than their neighbours. Their extra time stays in
    the first and last stages.
    """
    times_by_pass = zip(*stages, strict=True)
    cut_by_pass = [_cut_times(times, layers_by_stage) for times in times_by_pass]
    cut_stages = []
    for forward_s, input_s, weight_s in zip(*cut_by_pass, strict=True):
        # A stage without layers may take no time, but the simulator does not accept
        # zero.
        simulated_s = max(SHORTEST, forward_s)
        cut_stages.append((simulated_s, input_s, weight_s))
    return tuple(cut_stages)


def _cut_times(times: Sequence[float], layers_by_stage: Sequence[int]) -> list[float]:
    """Return the times of one kind of pass for a different cut."""
    # If the ends' extra time were spread over their layers, too, the forecast for
    # interleaved with 16 stages would be 9.5 % too fast.
    embedding = 0.0
    loss = 0.0
    layers = list(times)
    num_old = len(times)
    # With only two stages, each end's only neighbour is the other end, so the extra
    # time cannot be isolated.
    if num_old > 2:
        embedding = max(0.0, times[0] - times[1])
        loss = max(0.0, times[-1] - times[-2])
        layers[0] -= embedding
        layers[-1] -= loss
    # Divide the model into parts so small that both old stages and layers consist of
    # whole parts.
    num_layers = sum(layers_by_stage)
    parts = []
    for time in layers:
        parts += [time / num_layers] * num_layers
    spread = []
    layer_ends = accumulate(layers_by_stage, initial=0)
    for first_layer, end_layer in pairwise(layer_ends):
        first_part = first_layer * num_old
        end_part = end_layer * num_old
        spread.append(sum(parts[first_part:end_part]))
    spread[0] += embedding
    spread[-1] += loss
    return spread
