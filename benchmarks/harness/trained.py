"""Trainings of upstream's script on the emulated device, beside their forecasts.

The device runs behind its host: kernels take time by their operations and bytes and leave the
processor alone, so few cores train on many ranks at once.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.config.incompatible import RULES
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layout_search import Question, search
from megatron_ext.planning.model_sizes import sizes_of_flags
from megatron_ext.planning.techniques import techniques_of_flags
from megatron_ext.tools.calibrate import of_trace
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tools.trace.forecast import predict
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks, train_here

from .ranks import DEVICE_COSTS

_RANKS, _BATCH, _SEQUENCE = 4, 8, 128
_MODEL = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 "
    f"--seq-length {_SEQUENCE} --vocab-size 1000 --padded-vocab-size 1024 --transformer-impl local "
    "--make-vocab-size-divisible-by 512 --untie-embeddings-and-output-weights "
)
"""Its loss weighs about two layers."""
_TRAINING = (
    f"--micro-batch-size 1 --global-batch-size {_BATCH} --tokenizer-type NullTokenizer --mock-data "
    "--num-workers 0 --lr 1e-3 --eval-iters 0 --eval-interval 100 --hidden-dropout 0 "
    "--attention-dropout 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm "
)
_COSTS = {"kernel_us": 20, "flops_per_us": 2500, "bytes_per_us": 600, "lag_us": 1e5, **DEVICE_COSTS}
"""A forward of a layer takes about 15 ms."""


class Trained(NamedTuple):
    """A training beside its forecast, in seconds."""

    command: str
    schedule: str
    forecast_s: float
    measured_s: float
    """Median of its steps, or of their pipelines, as forecast."""


def trainings(steps: int) -> list[Trained]:
    """Trace one schedule, then train with all; `steps` are measured, after another."""
    with tempfile.TemporaryDirectory(prefix="megatron_ext_trained_") as scratch:
        return list(_trained(steps, Path(scratch)))


def _trained(steps: int, scratch: Path) -> Iterator[Trained]:
    _train("--pipeline-schedule zb-h1 --trace --trace-interval 1 "
           f"--trace-dir {scratch}", steps)  # fmt: skip
    model = sizes_of_flags(_MODEL.split(), "16 layers")
    message_s = 1e-6 * DEVICE_COSTS["message_us"]
    device = replace(DEVICES["cpu"], memory_gib=1e3, message_s=message_s, link_bytes=1e18)
    job = Question(
        model=model,
        device=replace(device, measured=of_trace(scratch, model, device)),
        num_devices=_RANKS,
        global_batch=_BATCH,
        sequence=_SEQUENCE,
        pair_rules=RULES["pairs"],
        techniques=techniques_of_flags(model.flags),
        fixed={
            "tp": 1, "pp": _RANKS, "cp": 1, "ep": 1, "micro_batch": 1, "recompute": frozenset()
        },
    )  # fmt: skip
    # Nothing is planned with gpipe, unless it is named.
    choices: list[dict[str, Any]] = [
        *({"vp": chunks} for chunks in (1, 2, 3, 4)), {"vp": 1, "schedule": "gpipe"}
    ]  # fmt: skip
    questions = (replace(job, fixed={**job.fixed, **choice}) for choice in choices)
    for plan in (plan for each in questions for plan in search(each, keep=1000).plans):
        name = plan.schedule if plan.chunks == 1 else f"{plan.schedule} x{plan.chunks}"
        _, pipeline_s = _train(plan.flags.replace("'", ""), steps)
        yield Trained("plan --devices --trace-dir", name, plan.pipeline_s, pipeline_s)
    for found in predict(read_run(scratch)).predictions:
        if "--use-dpp" in found.flags and found.bounds_memory:
            step_s, _ = _train(found.flags, steps)
            yield Trained("plan --trace-dir", found.schedule, found.step_s, step_s)


def _train(flags: str, steps: int) -> tuple[float, float]:
    """Return the median times of a step and of its pipeline, in seconds."""
    argv = f"{_MODEL}{_TRAINING}--train-iters {steps + 1} --pipeline-model-parallel-size {_RANKS} "
    argv += flags
    env = queued(connections=32, stuck_s=60, **_COSTS)
    by_rank = run_ranks(_RANKS, measure, argv.split(), timeout_s=300, env=env, device="musa")
    slowest = [tuple(map(max, zip(*step, strict=True))) for step in zip(*by_rank, strict=True)]
    print(argv, slowest, file=sys.stderr)
    step_s, pipeline_s = map(statistics.median, zip(*slowest[1:], strict=True))
    return step_s, pipeline_s


def measure(argv: list[str]) -> list[tuple[float, float]]:
    """Train as one rank; return the seconds of each step of its device, and of its pipeline."""
    import torch

    from megatron_ext import devices

    device = devices.current()  # before Megatron is imported
    from megatron.training import training

    def timed(call: Any, into: list[float]) -> Any:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            device.synchronize()
            torch.distributed.barrier()
            begin, end = device.timing_event(), device.timing_event()
            begin.record()
            made = call(*args, **kwargs)
            end.record()
            device.synchronize()
            into.append(1e-3 * begin.elapsed_time(end))
            return made

        return run

    steps_s: list[float] = []
    pipelines_s: list[float] = []
    function = training.get_forward_backward_func
    training.get_forward_backward_func = lambda *a, **kw: timed(function(*a, **kw), pipelines_s)
    training.train_step = timed(training.train_step, steps_s)
    train_here("gpt", argv)
    return list(zip(steps_s, pipelines_s, strict=True))
