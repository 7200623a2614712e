"""Forecasts of `megatron-ext plan` compared with published measurements of step time and memory.

    python benchmarks/planner.py [--layouts] [--ranks [N]] [--json FILE]
    python benchmarks/planner.py --memory [--json FILE]
    python benchmarks/planner.py --measured [--json FILE]
    python benchmarks/planner.py --trained [--json FILE]

`planner_rows.json` contains the rows: 43 from SimuMax v1.2 (docs/b200: time and allocated memory)
and 143 from Megatron-Bridge's performance summary, 26.02 to 26.08 (throughput), with the flags, the
recomputation and the layout of that release's recipes (tags v0.3.0 to v0.6.0; v0.4.2 for 26.04.01).
Half of the latter's configurations are `fitted`: shuffled by `random.Random(0)`, with all rows of a
configuration on the same side, they determined 29 rates in `hardware.py` and `layer_costs.py`.

`--layouts` also prints how evenly hand-written layouts divide the work, and `--ranks` prints where
the published layouts rank among all layouts (half an hour). `--memory` runs upstream's training
script on CPU ranks, `--measured` runs layouts on sleeping stages, and `--trained` runs upstream's
script on the emulated device. Each takes about five minutes. docs/results-planning.md contains the
output, and says what each comparison leaves out.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # ranks are started by the tests' launcher

from benchmarks.harness import ranks
from benchmarks.harness.command import machine, markdown, options, write_json
from benchmarks.harness.metrics import seconds_of
from benchmarks.harness.ops import OpTimes, Sizes
from benchmarks.harness.systems import Own
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.hardware import DEVICES, parse_devices
from megatron_ext.planning.layer_costs import Sharding
from megatron_ext.planning.layout_forecast import Layout, forecast, stage_parts
from megatron_ext.planning.layout_search import search
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.question import Question
from megatron_ext.planning.techniques import Techniques, techniques_of_flags
from megatron_ext.schedules import Kind
from megatron_ext.schedules.table import placement as place
from megatron_ext.schedules.table.cuts import cut, loads, parse_layout
from megatron_ext.tools.calibrate import of_trace
from megatron_ext.tools.trace.aggregate import read_run
from megatron_ext.tools.trace.forecast import predict
from tests.fake_musa.queued import queued
from tests.ranks import run_ranks, train_here

_ACCURACY = 0.05
"""Mean error on the rows that were not fitted. Layouts that differ by less count as tied."""

_STEPS = 3
"""Number of measured steps per layout or training run, after a warm-up step."""
_RANKS = 8
"""Number of ranks with sleeping stages."""
_SLEEPING = (
    "--num-layers 30 --hidden-size 2048 --num-attention-heads 16 --swiglu --vocab-size 128000 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408 "
    "--moe-layer-freq ([0]*6+[1]*24) --ffn-hidden-size 5632 --seq-length 4096"
)
"""Dense layers followed by layers with experts, and a vocabulary that costs as much as several
layers."""
_STEP_S = 1.0
"""Approximate duration of a step with sleeping stages."""
_MESSAGE_S = 250e-6
"""Time from the end of a sleep to the start of the next one on another rank, over shared memory."""
_TRAINED_RANKS = 4
_TRAINED = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 "
    "--seq-length 128 --vocab-size 1000 --padded-vocab-size 1024 --transformer-impl local "
    "--make-vocab-size-divisible-by 512 --untie-embeddings-and-output-weights "
)
"""This model's loss costs about as much as two layers."""
_TRAINING = (
    "--micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer --mock-data "
    "--num-workers 0 --lr 1e-3 --eval-iters 0 --eval-interval 100 --hidden-dropout 0 "
    "--attention-dropout 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm "
)
_KERNELS = {
    "kernel_us": 20, "flops_per_us": 2500, "bytes_per_us": 600, "lag_us": 1e5, **ranks.DEVICE_COSTS
}  # fmt: skip
"""A layer's forward takes about 15 ms. Kernels do not use the processor, so a few cores can run
many ranks at once."""
_SIMUMAX_GEMM = 0.460
"""Share of peak speed that bf16 matrix products reach on SimuMax's B200, fitted to its rows. Its
micro-benchmarks show 0.49."""

ROWS = Path(__file__).with_suffix("").with_name("planner_rows.json")


def question_of(row: dict[str, Any], flags: str, techniques: str | None) -> Question:
    """Return the planner's question for a row, with all sizes fixed.

    Args:
        row: A row from the file.
        flags: Megatron's flags for the row's model.
        techniques: Flags for the row's techniques, or None for Megatron's defaults.
    """
    model = sizes_of_flags(flags.split(), row["model"])
    count, device = parse_devices(row["devices"])
    if row["source"] == "SimuMax":
        device = replace(device, gemm=_SIMUMAX_GEMM)
    names = ("tp", "pp", "cp", "ep", "micro_batch", "vp")
    mode = row.get("recompute", "none")
    fixed = {name: row[name] for name in names}
    fixed |= {"recompute": frozenset(() if mode == "none" else mode.split("+"))}
    if row["pp"] > 1:
        fixed["schedule"] = "interleaved" if row["vp"] > 1 else "1f1b"
        fixed["layout"] = [stage.count("t") for stage in parse_layout(row["layout"])]
    plain = Techniques(precision=row["precision"])
    if techniques is not None:
        plain = techniques_of_flags(techniques.split(), row["precision"])
    if plain.graphs == "auto":  # as these recipes do
        plain = replace(plain, graphs="layers")
    fixed["pairs"] = plain.overlaps_experts
    return Question(
        model=model,
        # No memory limit, because some recipes also shard the weights or offload
        # activations to the host.
        device=replace(device, memory_gib=1e6),
        num_devices=count,
        global_batch=row["global_batch"],
        sequence=row["sequence"],
        pair_rules=RULES["pairs"],
        techniques=plain,
        fused_loss=True,
        overlaps=row.get("overlap", True),
        fixed=fixed,
    )


Measured = tuple[dict[str, Any], Layout, float, float | None]


def measured(*, asks_for_recipes: bool = True) -> list[Measured]:
    """Return each row with its plan and the relative errors of time and memory."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    measured_rows = []
    for row in data["rows"]:
        techniques = row.get("flags")
        if techniques is not None and not asks_for_recipes:
            techniques = ""
        plan = search(question_of(row, data["models"][row["model"]], techniques)).plans[
            0
        ]
        if "step_s" in row:
            error = plan.step_s / row["step_s"] - 1
        else:
            error = row["tokens_per_s"] / plan.tokens_per_s - 1
        memory = (
            max(plan.memory_gib) / row["memory_gib"] - 1
            if "memory_gib" in row
            else None
        )
        measured_rows.append((row, plan, error, memory))
    return measured_rows


def summary(errors: Sequence[float]) -> tuple[str, str]:
    """Return the mean and the largest absolute error in percent, or dashes if there are none."""
    sizes = [100 * abs(error) for error in errors]
    return (
        (f"{statistics.mean(sizes):.1f}", f"{max(sizes):.1f}") if sizes else ("-", "-")
    )


def grouped(
    rows: Sequence[tuple[Sequence[str], Sequence[float | None]]],
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield every name, and "all", with the errors of its rows by kind.

    Args:
        rows: For each row, its names and its errors by kind, which may be None.
    """
    names = dict.fromkeys(
        name for kind in zip(*(row[0] for row in rows), strict=True) for name in kind
    )
    for name in [*names, "all"]:
        errors_by_row = [
            errors for names_of_row, errors in rows if name in (*names_of_row, "all")
        ]
        yield (
            name,
            [
                [e for e in kind if e is not None]
                for kind in zip(*errors_by_row, strict=True)
            ],
        )


def by_hand() -> list[tuple[str, int, str, float, float]]:
    """Return model, ranks, hand-written layout, its largest share of the work, and our layout's.

    Shares are based on the planner's costs for an H100 and multiplied by the number of ranks, so 1
    means an even division.
    """
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    device = parse_devices("1xh100")[1]
    compared = []
    for model, pp, layout in data["layouts"]:
        sizes = sizes_of_flags(data["models"][model].split(), model)
        experts = 8 if sizes.num_experts else 1
        sharding = Sharding(
            sequence=4096, expert=experts, techniques=techniques_of_flags(())
        )
        parts, *ends = parts_of(sizes, sharding, device)
        layers, (first, last) = ([part.work for part in some] for some in (parts, ends))
        hand_counts = [stage.count("t") for stage in parse_layout(layout)]
        placement = place.linear(pp)
        if len(hand_counts) > pp:
            placement = place.loop(pp, len(hand_counts) // pp)
        planned_counts = cut(
            layers, first, last, placement, least_last=min(1, hand_counts[-1])
        )
        mean = (sum(layers) + first + last) / pp
        shares = [
            max(loads(counts, layers, first, last, placement)) / mean
            for counts in (hand_counts, planned_counts)
        ]
        compared.append((model, pp, layout, shares[0], shares[1]))
    return compared


def slowed() -> tuple[Question, float]:
    """Return the planned job, and how many times slower its sleeping stages are than an H100."""
    job = Question(
        model=sizes_of_flags(_SLEEPING.split(), "30 layers"),
        device=DEVICES["h100"],
        num_devices=_RANKS,
        global_batch=16,
        sequence=4096,
        pair_rules=RULES["pairs"],
        fixed={"tp": 1, "cp": 1, "ep": 1, "recompute": frozenset()},
    )
    first = search(replace(job, fixed={**job.fixed, "pp": _RANKS}), keep=1).plans[0]
    factor = _STEP_S / first.pipeline_s
    device = replace(job.device, message_s=_MESSAGE_S / factor, link_bytes=1e18)
    return replace(job, device=device), factor


def layouts(job: Question) -> Iterator[Layout]:
    """Yield every layout on half and on all of the ranks, with two micro-batch sizes."""
    for pp in (_RANKS // 2, _RANKS):
        for micro_batch in (1, 2):
            for chunks in (1, 2, 3, 4):
                fixed = {
                    **job.fixed,
                    "pp": pp,
                    "micro_batch": micro_batch,
                    "vp": chunks,
                }
                plans = search(replace(job, fixed=fixed), keep=1000).plans
                yield from plans
                if chunks == 1:  # the planner only uses gpipe if asked to
                    plan = forecast(job, plans[0].sizes, "gpipe", 1)
                    assert plan is not None
                    yield plan


def name_of(plan: Layout) -> str:
    """Return a layout's schedule and chunks."""
    return plan.schedule if plan.chunks == 1 else f"{plan.schedule} x{plan.chunks}"


@dataclass(frozen=True)
class _CutTimes(OpTimes):
    """Times for the stages of a cut."""

    stages: tuple[dict[Kind, float], ...] = ()
    """Seconds per kind of action, by stage."""

    def seconds(self, kind: Kind, stage: int, microbatch: int) -> float:
        return self.stages[stage][kind]


def sleeping_s(plan: Layout, factor: float) -> float:
    """Return a layout's median step time, converted to seconds on an H100.

    The stages sleep `factor` times as long. Replicas of the pipeline run concurrently.
    """
    stages: list[dict[Kind, float]] = []
    for part in stage_parts(plan):
        forward_s, input_s, weight_s = (
            factor * seconds for seconds in (part.forward, part.input, part.weight)
        )
        stages.append(
            {"F": forward_s, "B": input_s + weight_s, "I": input_s, "W": weight_s}
        )
    sizes = plan.sizes
    name = plan.schedule
    chunks = plan.chunks if name == "interleaved" else None
    longest_s = factor * plan.pipeline_s / sizes.num_microbatches
    by_rank = ranks.run(
        ranks.measure,
        Own(name, PipelineConfig(schedule=name, chunks=chunks, transport="shm")),
        Sizes(sizes.pp, sizes.num_microbatches, longest_s, warmup=1, steps=_STEPS),
        [_CutTimes(0.0, 1.0, stages=tuple(stages))] * _STEPS,
        replicas=_RANKS // sizes.pp,
    )
    return statistics.median(map(seconds_of, zip(*by_rank, strict=True))) / factor


def chosen(
    rows: Sequence[dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the layout with the shortest forecast, the fastest one, and how far apart they are."""
    first = min(rows, key=lambda row: row["forecast_s"])
    fastest = min(rows, key=lambda row: row["measured_s"])
    behind = 100 * (first["measured_s"] / fastest["measured_s"] - 1)
    return first, fastest, f"{behind:.1f} % behind the fastest that was measured"


def run_layouts() -> list[dict[str, Any]]:
    """Run the layouts on sleeping stages, and print their forecasts by schedule and the choice."""
    job, factor = slowed()
    rows: list[dict[str, Any]] = []
    for plan in layouts(job):
        rows.append({
            "schedule": plan.schedule,
            "name": name_of(plan),
            "pp": plan.sizes.pp,
            "layout": plan.layout,
            "micro_batch": plan.sizes.micro_batch,
            "forecast_s": plan.pipeline_s,
            "measured_s": sleeping_s(plan, factor),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr)
    off = [
        ((row["schedule"],), (row["forecast_s"] / row["measured_s"] - 1,))
        for row in rows
    ]
    lines = [
        (name, str(len(errors)), *summary(errors)) for name, [errors] in grouped(off)
    ]
    print(markdown(("schedule", "layouts", "off, mean %", "worst %"), lines))
    first, fastest, behind = chosen(rows)
    slowest_s = max(row["measured_s"] for row in rows)
    print(
        f"\nThe planner chooses {first['name']} on {first['pp']} ranks, {behind} "
        f"({fastest['name']} on {fastest['pp']}); the slowest takes "
        f"{slowest_s / fastest['measured_s']:.1f} times as long."
    )
    return rows


def run_trainings() -> list[dict[str, Any]]:
    """Trace one schedule, train with all on the emulated device, and print the forecasts."""
    print(machine())
    with tempfile.TemporaryDirectory(prefix="megatron_ext_trained_") as scratch:
        rows: list[dict[str, Any]] = [
            {
                "command": command,
                "schedule": schedule,
                "forecast_s": guess_s,
                "measured_s": took_s,
            }
            for command, schedule, guess_s, took_s in trainings(Path(scratch))
        ]
    table = [
        (row["schedule"], f"`{row['command']}`", f"{row['forecast_s']:.3f}",
         f"{row['measured_s']:.3f}", f"{100 * (row['forecast_s'] / row['measured_s'] - 1):+.1f}")
        for row in rows
    ]  # fmt: skip
    print(
        markdown(
            ("schedule", "forecast by", "forecast s", "measured s", "off %"), table
        )
    )
    off = [
        ((row["command"],), (row["forecast_s"] / row["measured_s"] - 1,))
        for row in rows
    ]
    for command, [errors] in list(grouped(off))[:-1]:
        mean, worst = summary(errors)
        print(
            f"\n`{command}`: {len(errors)} rows, off by {mean} % on average and {worst} % at worst"
        )
    first, fastest, behind = chosen(rows)
    print(
        f"\nThe shortest forecast is that of {first['schedule']}, {behind} ({fastest['schedule']})."
    )
    return rows


def trainings(scratch: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yield each training run's forecasting command, schedule, forecast and measured time.

    The times for `plan --devices` cover only the pipeline. The others cover whole steps.
    """
    train(f"--pipeline-schedule zb-h1 --trace --trace-interval 1 --trace-dir {scratch}")
    model = sizes_of_flags(_TRAINED.split(), "16 layers")
    message_s = 1e-6 * ranks.DEVICE_COSTS["message_us"]
    device = replace(
        DEVICES["cpu"], memory_gib=1e3, message_s=message_s, link_bytes=1e18
    )
    job = Question(
        model=model,
        device=replace(device, measured=of_trace(scratch, model, device)),
        num_devices=_TRAINED_RANKS,
        global_batch=8,
        sequence=128,
        pair_rules=RULES["pairs"],
        techniques=techniques_of_flags(model.flags),
        fixed={
            "tp": 1, "pp": _TRAINED_RANKS, "cp": 1, "ep": 1, "micro_batch": 1,
            "recompute": frozenset(),
        },
    )  # fmt: skip
    choices: list[dict[str, Any]] = [
        *({"vp": chunks} for chunks in (1, 2, 3, 4)), {"vp": 1, "schedule": "gpipe"}
    ]  # fmt: skip
    for choice in choices:
        for plan in search(
            replace(job, fixed={**job.fixed, **choice}), keep=1000
        ).plans:
            _, pipeline_s = train(plan.flags.replace("'", ""))
            yield (
                "plan --devices --trace-dir",
                name_of(plan),
                plan.pipeline_s,
                pipeline_s,
            )
    for prediction in predict(read_run(scratch)).predictions:
        if "--use-dpp" in prediction.flags and prediction.bounds_memory:
            step_s, _ = train(prediction.flags)
            yield "plan --trace-dir", prediction.schedule, prediction.step_s, step_s


def train(flags: str) -> tuple[float, float]:
    """Return the median times of a step and of its pipeline, in seconds."""
    argv = (
        f"{_TRAINED}{_TRAINING}--train-iters {_STEPS + 1} "
        f"--pipeline-model-parallel-size {_TRAINED_RANKS} {flags}"
    )
    env = queued(connections=32, stuck_s=60, **_KERNELS)
    by_rank = run_ranks(
        _TRAINED_RANKS,
        time_training,
        argv.split(),
        timeout_s=300,
        env=env,
        device="musa",
    )
    slowest = [
        tuple(map(max, zip(*step, strict=True))) for step in zip(*by_rank, strict=True)
    ]
    print(argv, slowest, file=sys.stderr)
    step_s, pipeline_s = map(statistics.median, zip(*slowest[1:], strict=True))
    return step_s, pipeline_s


def time_training(argv: list[str]) -> list[tuple[float, float]]:
    """Train as one rank and return, per step, the device's and the pipeline's seconds."""
    import torch

    from megatron_ext import devices

    device = devices.current()  # must precede the import of Megatron
    from megatron.training import training

    def timed(call: Any, into: list[float]) -> Any:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            device.synchronize()
            torch.distributed.barrier()
            begin = device.timing_event()
            end = device.timing_event()
            begin.record()
            result = call(*args, **kwargs)
            end.record()
            device.synchronize()
            into.append(1e-3 * begin.elapsed_time(end))
            return result

        return run

    steps_s: list[float] = []
    pipelines_s: list[float] = []
    function = training.get_forward_backward_func
    training.get_forward_backward_func = lambda *a, **kw: timed(
        function(*a, **kw), pipelines_s
    )
    training.train_step = timed(training.train_step, steps_s)
    train_here("gpt", argv)
    return list(zip(steps_s, pipelines_s, strict=True))


def run_models() -> list[dict[str, Any]]:
    """Train each model to measure memory, and print errors by model, parallelism and schedule."""
    from tests.planning import model_memory  # imports Megatron and torch

    rows = []
    for case in model_memory.cases():
        for guess, held in model_memory.compared(case):
            rows.append(
                (case, (guess.static / held.static - 1, guess.kept / held.kept - 1))
            )
            print(f"{' / '.join(case)}: {rows[-1][1]}", file=sys.stderr)
    lines = [
        (name, str(len(weights)), *summary(weights), *summary(activations))
        for name, (weights, activations) in grouped(rows)
    ]
    print(markdown(("", "ranks", "weights, mean %", "worst %", "activations, mean %", "worst %"),
                   lines))  # fmt: skip
    return [
        {**case._asdict(), "weights_off": weights, "activations_off": activations}
        for case, (weights, activations) in rows
    ]


def places(most_devices: int) -> list[tuple[int | None, float]]:
    """Return how the layout of each Megatron-Bridge configuration compares with all others.

    Only sizes are compared: tp, pp, cp, ep and micro-batch. The first value is the position among
    the sizes of the best 30 layouts, or None. The second is how much longer the best layout with
    these sizes takes than the best of all, as a fraction, or infinity if it does not fit by
    forecast.
    """
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    comparisons: list[tuple[int | None, float]] = []
    names = ("tp", "pp", "cp", "ep", "micro_batch")
    configurations: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        if (
            row["source"] != "SimuMax"
            and parse_devices(row["devices"])[0] <= most_devices
        ):
            key = " ".join(
                str(row[name]) for name in ("model", "devices", "precision", *names)
            )
            configurations.setdefault(key, row)
    for key, row in configurations.items():
        job = question_of(row, data["models"][row["model"]], row["flags"])
        job = replace(job, fixed={}, device=parse_devices(row["devices"])[1])
        plans = search(job, keep=30).plans
        sizes = list(
            dict.fromkeys(
                tuple(getattr(p.sizes, name) for name in names) for p in plans
            )
        )
        published_sizes = tuple(row[name] for name in names)
        rank = sizes.index(published_sizes) + 1 if published_sizes in sizes else None
        published_plans = search(
            replace(job, fixed=dict(zip(names, published_sizes, strict=True))), keep=1
        ).plans
        behind = (
            published_plans[0].step_s / plans[0].step_s - 1
            if published_plans
            else math.inf
        )
        comparisons.append((rank, behind))
        best_layout = " ".join(
            map(str, (*sizes[0], plans[0].schedule, sorted(plans[0].sizes.mode)))
        )
        print(
            f"{key}: {rank}, {100 * behind:.1f} % behind {best_layout}", file=sys.stderr
        )
    return comparisons


def print_errors(rows: Sequence[Measured], plain: Sequence[Measured]) -> None:
    """Print time and memory errors by source and model. `plain` contains the rows without flags."""
    simumax = [
        (error, memory) for row, _, error, memory in rows if row["source"] == "SimuMax"
    ]
    time, memory = (
        [error for error in some if error is not None]
        for some in zip(*simumax, strict=True)
    )
    head: tuple[str, ...] = (
        "SimuMax, rows",
        "time, mean %",
        "worst %",
        "memory, mean %",
        "worst %",
    )
    print(markdown(head, [(str(len(time)), *summary(time), *summary(memory))]) + "\n")
    errors_by_model = []
    errors_without_flags = []
    for (row, _, error, _), (_, _, plain_error, _) in zip(rows, plain, strict=True):
        if row["source"] == "Megatron-Bridge":
            not_fitted = None if row["fitted"] else error
            errors_by_model.append(((row["model"],), (not_fitted,)))
            errors_without_flags.append(plain_error)
    lines = []
    for model, (errors,) in grouped(errors_by_model):
        if errors:
            lines.append((model, str(len(errors)), *summary(errors)))
    head = ("Megatron-Bridge", "rows not fitted", "mean %", "worst %")
    print(markdown(head, lines))
    mean, _ = summary(errors_without_flags)
    print(
        f"\nWithout flags, the mean error over all {len(errors_without_flags)} rows is {mean} %."
    )


def main(words: Sequence[str] = ()) -> None:
    """Print the tables in docs/results-planning.md."""
    parser = options(__doc__, figures=True)
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="also print hand-written layouts: the worst one for each model",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="?", const=1_000_000, default=0, metavar="N",
        help="where the published layouts rank, for configurations with up to N devices",
    )  # fmt: skip
    parser.add_argument(
        "--memory", action="store_true", help="train on CPU ranks to measure memory"
    )
    parser.add_argument(
        "--measured", action="store_true", help="run layouts on sleeping stages"
    )
    parser.add_argument(
        "--trained", action="store_true", help="train on the emulated device"
    )
    args = parser.parse_args(words)
    for is_requested, part in (
        (args.measured, run_layouts), (args.trained, run_trainings), (args.memory, run_models)
    ):  # fmt: skip
        if is_requested:
            ranks.clean_up_when_terminated()
            write_json(args.json, part())
            return
    rows = measured()
    print_errors(rows, measured(asks_for_recipes=False))
    write_json(args.json, [
        {**row, "forecast_s": plan.step_s, "forecast_tokens_per_s": plan.tokens_per_s,
         "time_off": error, "memory_off": memory_error}
        for row, plan, error, memory_error in rows
    ])  # fmt: skip
    if args.layouts:
        layouts_by_hand = by_hand()
        layouts = []
        for model in dict.fromkeys(row[0] for row in layouts_by_hand):
            of_model = [row for row in layouts_by_hand if row[0] == model]
            worst = max(of_model, key=lambda row: row[3] / row[4])
            _, count, layout, hand_share, planned_share = worst
            text = layout.replace("|", "\\|")
            layouts.append(
                (
                    model,
                    str(count),
                    f"`{text}`",
                    f"{hand_share:.3f}",
                    f"{planned_share:.3f}",
                )
            )
        columns = (
            "model",
            "ranks",
            "furthest from ours",
            "busiest rank, mean 1",
            "ours",
        )
        print("\n" + markdown(columns, layouts))
    if args.ranks:
        comparisons = places(args.ranks)
        first = sum(rank is not None and rank <= 5 for rank, _ in comparisons)
        tied = sum(behind <= _ACCURACY for _, behind in comparisons)
        large = sum(behind == math.inf for _, behind in comparisons)
        print(
            f"\n{first} of {len(comparisons)} published layouts rank in the top five; {tied} are "
            f"within {100 * _ACCURACY:g} % of the first by forecast, {large} do not fit by forecast"
        )


if __name__ == "__main__":
    from benchmarks import planner  # ranks look up what they run by its module's name

    planner.main(sys.argv[1:])
