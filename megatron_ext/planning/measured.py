"""Measured stage and message times from a traced run, and estimates for other cuts."""

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
"""Settings on which a layer's durations depend."""
_MAX_FILE_BYTES = 1 << 20

StageTimes = tuple[float, float, float]
"""Seconds of a stage's forward pass, input gradient and weight gradient."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds that the actions and messages in a run took."""

    stages: tuple[StageTimes, ...]
    """Times for one micro-batch on each stage in the run."""
    latency_s: float
    """Time from the end of an action until another rank has received its output."""
    all_to_all: float = 0.0
    """Share of all-to-all between experts in forward passes and input gradients."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings on which durations depend, by the names of Megatron's arguments."""

    def check_sizes(self, settings: Mapping[str, Any], folder: Path) -> None:
        """Check that a training run has the same sizes as the traced run.

        Raises:
            ArgumentsError: A size differs.
        """
        for name, size in self.sizes.items():
            value = settings.get(name)
            # A size that this training run does not state cannot be compared.
            if value is not None and value != size:
                flag = f"--{name.replace('_', '-')}"
                raise ArgumentsError(
                    f"{folder} has the traces of a run with {flag} {size}, not {value}; trace a "
                    f"run with {flag} {value}, or use --pipeline-schedule auto"
                )

    def costs(self, ranks: int, layers_by_stage: Sequence[int]) -> Costs:
        """Return the costs of the same model with another cut."""
        stages = cut_anew(self.stages, layers_by_stage)
        forward_s, input_s, weight_s = (
            sum(times) for times in zip(*stages, strict=True)
        )
        # The first three durations are those of 1/ranks of the model, for which tables are
        # generated.
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
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> MeasuredCosts:
        """Return the measurements from the run whose traces are in a folder.

        Raises:
            ArgumentsError: There are no measurements, or the file is damaged.
        """
        path = folder / COSTS_FILE
        remedy = f"megatron-ext aggregate --trace-dir {folder} writes it"
        try:
            content = read_json(path, _MAX_FILE_BYTES)
            stages = tuple(_times(times) for times in content["stages"])
            if not stages:
                raise ValueError("it has no stages")
            measured = cls(
                stages=stages,
                latency_s=_time(content["latency_s"]),
                all_to_all=_time(content["all_to_all"]),
                sizes=dict(content["sizes"]),
            )
            # This call raises an error for times that no simulation accepts.
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
    # If there are not three times, unpacking raises an error that `read` reports.
    forward_s, input_s, weight_s = times
    return _time(forward_s), _time(input_s), _time(weight_s)


def _time(value: Any) -> float:
    # Reject bool explicitly, because it is a subclass of int.
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
    """Return the times on each stage if the same model is cut into other stages.

    The time of each old stage is spread evenly over its part of the model. The first and the last
    stage may take longer than their neighbours because of the embedding and the loss. That extra
    time stays in the first and the last stage.
    """
    by_pass = [
        _cut_times(times, layers_by_stage) for times in zip(*stages, strict=True)
    ]
    stages = []
    for forward, input_gradient, weight in zip(*by_pass, strict=True):
        # A stage without layers may take no time, but the simulator requires some.
        stages.append((max(SHORTEST, forward), input_gradient, weight))
    return tuple(stages)


def _cut_times(times: Sequence[float], layers_by_stage: Sequence[int]) -> list[float]:
    """Return the times for one kind of pass with another cut."""
    # If the extra time of the ends were spread over their layers, too, interleaving in 16 stages
    # would come out 9.5 % too fast.
    embedding = loss = 0.0
    layers = list(times)
    num_old = len(times)
    # With only two stages, each end's neighbour is the other end, so its extra time cannot be
    # separated.
    if num_old > 2:
        embedding = max(0.0, times[0] - times[1])
        loss = max(0.0, times[-1] - times[-2])
        layers[0] -= embedding
        layers[-1] -= loss
    # Divide the model into parts that are small enough for both old stages and layers to consist of
    # whole parts.
    num_layers = sum(layers_by_stage)
    parts = []
    for time in layers:
        parts += [time / num_layers] * num_layers
    spread = []
    for first, end in pairwise(accumulate(layers_by_stage, initial=0)):
        spread.append(sum(parts[first * num_old : end * num_old]))
    spread[0] += embedding
    spread[-1] += loss
    return spread
