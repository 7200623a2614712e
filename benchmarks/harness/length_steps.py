"""Steps of sleeping stages with micro-batches of different lengths.

The data contain each token's position in its sample. Stages pass it on, so every op can derive its
time from its input: a part that grows with the number of tokens, and attention, which grows with
their positions. Like real ones, backwards spend the time of attention twice in I and never in W.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from megatron_ext.config.active import Active, Pipeline, activate_configuration
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.runtime import runtime
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.schedules import Kind
from megatron_ext.schedules.table.length_cost import LengthCost

from .megatron_core import set_up
from .ops import OpTimes
from .own import emulate_split
from .stage import MESSAGE_SHAPE, Probe

_WARMUP_S = 1e-3
"""Forward of the longest sample in the first step."""


class LengthStep(NamedTuple):
    """One step on one rank."""

    begin_s: float
    end_s: float
    peak_live: float
    """Maximum activations alive, in units of a sample of `SEQUENCE_LENGTH` tokens on one stage."""
    tables_s: float
    """Time for the step's table and messages."""


@dataclass(frozen=True)
class LengthTimes(OpTimes):
    """Times of ops, based on the tokens and positions in their inputs."""

    length_cost: LengthCost
    costs: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict, hash=False
    )
    """(stage, number) of an op -> its cost without attention, and that of attention, relative to a
    sample of `SEQUENCE_LENGTH` tokens."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        linear, attention = self.costs[stage, microbatch]
        cost = {
            "F": linear + attention,
            "B": 2 * (linear + attention),
            "I": linear + 2 * attention,
            "W": linear,
        }[kind]
        return self.forward_s * self.share * cost

    def note(self, op: tuple[int, int], activation: torch.Tensor) -> None:
        """Note the cost of the op that computes this activation, `[s, 1, h]`."""
        longest = self.length_cost.of_length(MESSAGE_SHAPE[0])
        positions = float(activation.detach()[:, 0, 0].double().sum())
        # Up to position p, attention costs quadratic * p^2.
        self.costs[op] = (
            self.length_cost.linear * len(activation) / longest,
            self.length_cost.quadratic * 2 * positions / longest,
        )


class LengthProbe(Probe):
    """Notes the cost of each op when the stage hands over its activation."""

    def keep(self, activation: torch.Tensor) -> None:
        """Count a new activation and note its op's cost."""
        super().keep(activation)
        assert isinstance(self.times, LengthTimes)
        self.times.note(self.current, activation)


def _items(packs: Sequence[Sequence[int]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a micro-batch for each pack of samples."""
    for samples in packs:
        # Use the middle of each token, so the sum over a sample is
        # half its squared length.
        positions = [torch.arange(length) + 0.5 for length in samples]
        bounds = list(accumulate(samples, initial=0))
        yield {
            "tokens": torch.cat(positions)[None],
            "cu_seqlens": torch.tensor([bounds], dtype=torch.int32),
        }


def measure(
    config: PipelineConfig,
    pp: int,
    steps: Sequence[Sequence[Sequence[int]]],
    length_cost: LengthCost,
    forward_s: float,
) -> list[LengthStep]:
    """Return this rank's record of each step.

    Args:
        config: The system's pipeline.
        pp: Number of pipeline ranks.
        steps: By step and micro-batch: the tokens in its samples, at most `SEQUENCE_LENGTH` in
            total.
        length_cost: Cost of a sample by length.
        forward_s: Forward of a sample of `SEQUENCE_LENGTH` tokens on 1/pp of the model.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    pipeline = Pipeline(config, pp, len(steps[0]))
    activate_configuration(Active(pipeline.config, pipeline))
    split = runtime.in_force().splits
    share = pp / pipeline.placement.num_stages
    probe = LengthProbe(LengthTimes(forward_s, share, length_cost))
    emulate_split(probe, split)
    stages, keywords = set_up(
        pipeline.placement,
        len(steps[0]),
        probe,
        lambda: "I" if split.is_deferring else "B",
        variable_seq_lengths=True,
    )
    records = []
    # The first step connects the ranks.
    for number, packs in enumerate([steps[0], *steps]):
        step_forward_s = _WARMUP_S if number == 0 else forward_s
        probe.times = LengthTimes(step_forward_s, share, length_cost)
        data: list[Any] = [_items(packs) if stage == 0 else None for stage in stages]
        keywords |= {"data_iterator": data, "num_microbatches": len(packs)}
        tables_s = _tables_s()
        probe.meet()
        begin_s = time.perf_counter()
        forward_backward(**keywords)
        end_s = time.perf_counter()
        _, peak_live = probe.take()
        records.append(
            LengthStep(begin_s, end_s, share * peak_live, _tables_s() - tables_s)
        )
    probe.meet()  # no rank may exit while others wait for its messages
    return records[1:]


def _tables_s() -> float:
    return sum(model.measured.tables_s for model in runtime.in_force())
