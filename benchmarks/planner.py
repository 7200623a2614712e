"""Forecasts of `megatron-ext plan` against steps and memory that others measured and published.

    python benchmarks/planner.py [--layouts] [--ranks [N]] [--json FILE]
    python benchmarks/planner.py --memory [--json FILE]
    python benchmarks/planner.py --measured [--json FILE]
    python benchmarks/planner.py --trained [--json FILE]

`planner_rows.json` holds the rows: 43 of SimuMax v1.2 (docs/b200: time and allocated memory), and
143 of the performance summary of Megatron-Bridge, 26.02 to 26.08 (throughput), with the flags, the
recomputation and the layout of the recipes of that release (tags v0.3.0 to v0.6.0; v0.4.2 for
26.04.01). Half of the configurations of the latter
(`fitted`, shuffled by `random.Random(0)`, all rows of a configuration on one side) chose 29 rates
of `hardware.py` and `layer_costs.py`. SimuMax's rows chose one, and those of Llama with one stage
the bytes of a logit. Nothing else was fitted, but errors of all rows were in sight when the first
formulas were made; later ones were chosen on the fitted rows alone.

`--json` writes each row, with its forecast. `--layouts` prints how evenly layouts that people wrote
share the work, in recipes of Megatron-Bridge and Primus, beside the planner's cut. `--ranks` lets
the planner search for each configuration, and prints where the published layout ranks, how many
are as good as the first within the accuracy of the forecast, and how many do not fit: half an hour.

With `--memory` upstream's script trains one step here on 4 CPU ranks, five minutes: six kinds of
models, each under every schedule, the parallelisms in turn, with Megatron's own layers in bf16.
Printed is how far the planner is from what each rank holds: weights, gradients and optimizer; and
what autograd, and weight gradients that wait, keep at most. Temporaries and messages are left out.

With `--measured` the pipelines of layouts run here, five minutes: more than 40 layouts of 8 ranks,
all schedules, with the planner's cut of a model of 30 layers. Stages sleep what their layers cost
by the forecast, slowed down; messages are real. Printed are how far forecasts are from the median
step, and whether the planner's choice is the fastest. The pipeline is compared, without reductions
and optimizer.

With `--trained` upstream's script trains here on 4 ranks of the emulated device, five minutes: a
GPT of 16 layers, under every schedule with the planner's cut, then in every dynamic order by the
policy `hint`. One trace of zb-h1 gives the costs of all forecasts. Static schedules are compared
with `plan --devices --trace-dir`, by their pipelines; dynamic orders with `plan --trace-dir`, by
their whole steps. Last comes whether the planner's choice is the fastest.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import planned, ranks, trained
from benchmarks.harness.command import machine, markdown, options, write_json
from megatron_ext.config.incompatible import RULES
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.hardware import parse_devices
from megatron_ext.planning.layer_costs import Sharding
from megatron_ext.planning.layout_search import Layout, Question, search
from megatron_ext.planning.model_sizes import sizes_of_flags
from megatron_ext.planning.techniques import Techniques, techniques_of_flags
from megatron_ext.schedules.table import placement as place
from megatron_ext.schedules.table.cuts import cut, loads, parse_layout

if TYPE_CHECKING:
    from tests.planning.model_memory import Case

_ACCURACY = 0.05
"""Mean error on rows that nothing was fitted to: layouts that are closer are tied."""

_STEPS = 3
"""Measured of each layout or training, after another one."""
_SIMUMAX_GEMM = 0.460
"""Share of the peak of products in bf16 on the B200 of SimuMax, chosen on its rows; its
micro-benchmarks have 0.49."""

ROWS = Path(__file__).with_suffix("").with_name("planner_rows.json")


def question_of(row: dict[str, Any], flags: str, techniques: str | None) -> Question:
    """Return the question of a row, whose sizes are all fixed.

    Args:
        row: A row of the file.
        flags: Megatron's flags of its model.
        techniques: Those of its techniques; None: Megatron's own, without any.
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
    if plain.graphs == "auto":  # as these recipes have it
        plain = replace(plain, graphs="layers")
    fixed["pairs"] = plain.overlaps_experts
    return Question(
        model=model,
        # Some recipes shard the weights as well, or keep activations on the host.
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
    """Return each row with its plan and the errors of time and memory, as shares."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    found = []
    for row in data["rows"]:
        techniques = row.get("flags")
        if techniques is not None and not asks_for_recipes:
            techniques = ""
        plan = search(question_of(row, data["models"][row["model"]], techniques)).plans[0]
        if "step_s" in row:
            error = plan.step_s / row["step_s"] - 1
        else:
            error = row["tokens_per_s"] / plan.tokens_per_s - 1
        memory = max(plan.memory_gib) / row["memory_gib"] - 1 if "memory_gib" in row else None
        found.append((row, plan, error, memory))
    return found


def summary(errors: Sequence[float]) -> tuple[str, str]:
    """Return mean and worst of the absolute errors in percent; dashes if there are none."""
    sizes = [100 * abs(error) for error in errors]
    return (f"{statistics.mean(sizes):.1f}", f"{max(sizes):.1f}") if sizes else ("-", "-")


def by_hand() -> list[tuple[str, int, str, float, float]]:
    """Return model, ranks and layout that people wrote, its worst share of the work, and ours.

    Shares are of the planner's costs on an H100, and times the ranks: 1 is even.
    """
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    device, found = parse_devices("1xh100")[1], []
    for model, pp, layout in data["layouts"]:
        sizes = sizes_of_flags(data["models"][model].split(), model)
        experts = 8 if sizes.num_experts else 1
        by = Sharding(sequence=4096, expert=experts, techniques=techniques_of_flags(()))
        parts, *ends = parts_of(sizes, by, device)
        layers, (first, last) = ([part.work for part in some] for some in (parts, ends))
        theirs = [stage.count("t") for stage in parse_layout(layout)]
        placement = place.linear(pp)
        if len(theirs) > pp:
            placement = place.loop(pp, len(theirs) // pp)
        ours = cut(layers, first, last, placement, least_last=min(1, theirs[-1]))
        mean = (sum(layers) + first + last) / pp
        shares = [max(loads(c, layers, first, last, placement)) / mean for c in (theirs, ours)]
        found.append((model, pp, layout, shares[0], shares[1]))
    return found


def measure() -> list[dict[str, Any]]:
    """Run the layouts; return the figures of each, in seconds of the H100."""
    job, factor = planned.slowed()
    found = []
    for plan in planned.layouts(job, (4, planned.RANKS), (1, 2)):
        found.append({
            "schedule": plan.schedule,
            "name": plan.schedule if plan.chunks == 1 else f"{plan.schedule} x{plan.chunks}",
            "pp": plan.sizes.pp,
            "layout": plan.layout,
            "micro_batch": plan.sizes.micro_batch,
            "forecast_s": plan.pipeline_s,
            "measured_s": planned.measured_s(plan, factor, _STEPS),
        })  # fmt: skip
        print(found[-1], file=sys.stderr)
    return found


def print_measured(rows: Sequence[dict[str, Any]]) -> None:
    """Print the forecasts by schedule, and the planner's choice among all."""
    lines = []
    for schedule in [*dict.fromkeys(row["schedule"] for row in rows), "all"]:
        own = [row for row in rows if schedule in (row["schedule"], "all")]
        errors = [row["forecast_s"] / row["measured_s"] - 1 for row in own]
        lines.append((schedule, str(len(own)), *summary(errors)))
    print(markdown(("schedule", "layouts", "off, mean %", "worst %"), lines))
    chosen = min(rows, key=lambda row: row["forecast_s"])
    fastest = min(rows, key=lambda row: row["measured_s"])
    slowest = max(rows, key=lambda row: row["measured_s"])
    behind = 100 * (chosen["measured_s"] / fastest["measured_s"] - 1)
    print(
        f"\nThe planner takes {chosen['name']} on {chosen['pp']} ranks, {behind:.1f} % behind the "
        f"fastest that was measured ({fastest['name']} on {fastest['pp']}); the slowest takes "
        f"{slowest['measured_s'] / fastest['measured_s']:.1f} times as long."
    )


def print_trained(rows: Sequence[trained.Trained]) -> None:
    """Print each training beside its forecast, and what is off."""
    table = [
        (row.schedule, f"`{row.command}`", f"{row.forecast_s:.3f}", f"{row.measured_s:.3f}",
         f"{100 * (row.forecast_s / row.measured_s - 1):+.1f}")
        for row in rows
    ]  # fmt: skip
    print(markdown(("schedule", "forecast by", "forecast s", "measured s", "off %"), table))
    for command in dict.fromkeys(row.command for row in rows):
        off = [row.forecast_s / row.measured_s - 1 for row in rows if row.command == command]
        mean, worst = summary(off)
        print(f"\n`{command}`: {len(off)} rows, off {mean} % in the mean, {worst} at worst")
    chosen = min(rows, key=lambda row: row.forecast_s)
    fastest = min(rows, key=lambda row: row.measured_s)
    behind = 100 * (chosen.measured_s / fastest.measured_s - 1)
    print(
        f"\nThe shortest by forecast is {chosen.schedule}, {behind:.1f} % behind the fastest that "
        f"was measured ({fastest.schedule})."
    )


def memory() -> list[tuple[Case, float, float]]:
    """Return by case and rank how far forecasts of weights and of activations are, as shares."""
    from tests.planning import model_memory  # with Megatron, and torch

    found = []
    for case in model_memory.cases():
        for forecast, held in model_memory.compared(case):
            off = (forecast.static / held.static - 1, forecast.kept / held.kept - 1)
            print(f"{' / '.join(case)}: {off}", file=sys.stderr)
            found.append((case, *off))
    return found


def print_memory(rows: Sequence[tuple[Case, float, float]]) -> None:
    """Print the errors by model, parallelism and schedule."""
    names = dict.fromkeys(each for by in (0, 1, 2) for each in (case[by] for case, *_ in rows))
    lines = []
    for name in [*names, "all"]:
        own = [row for row in rows if name == "all" or name in row[0]]
        weights, kept = summary([off for _, off, _ in own]), summary([off for *_, off in own])
        lines.append((name, str(len(own)), *weights, *kept))
    print(markdown(("", "ranks", "weights, mean %", "worst %", "activations, mean %", "worst %"),
                   lines))  # fmt: skip


def places(most_devices: int) -> list[tuple[int | None, float]]:
    """Return for each configuration of Megatron-Bridge how its layout compares to all others.

    Sizes alone are compared: tp, pp, cp, ep and micro-batch. First is the rank among the sizes of
    the best 30 layouts; None: it is not among them. Second is how much longer the best layout of
    these sizes takes than the best of all, as a share; infinite: it does not fit by forecast.
    """
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    found: list[tuple[int | None, float]] = []
    names = ("tp", "pp", "cp", "ep", "micro_batch")
    configurations: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        if row["source"] != "SimuMax" and parse_devices(row["devices"])[0] <= most_devices:
            key = " ".join(str(row[name]) for name in ("model", "devices", "precision", *names))
            configurations.setdefault(key, row)
    for key, row in configurations.items():
        job = question_of(row, data["models"][row["model"]], row["flags"])
        job = replace(job, fixed={}, device=parse_devices(row["devices"])[1])
        plans = search(job, keep=30).plans
        sizes = list(dict.fromkeys(tuple(getattr(p.sizes, name) for name in names) for p in plans))
        theirs = tuple(row[name] for name in names)
        rank = sizes.index(theirs) + 1 if theirs in sizes else None
        own = search(replace(job, fixed=dict(zip(names, theirs, strict=True))), keep=1).plans
        behind = own[0].step_s / plans[0].step_s - 1 if own else math.inf
        found.append((rank, behind))
        ours = " ".join(map(str, (*sizes[0], plans[0].schedule, sorted(plans[0].sizes.mode))))
        print(f"{key}: {rank}, {100 * behind:.1f} % behind {ours}", file=sys.stderr)
    return found


def print_errors(rows: Sequence[Measured], plain: Sequence[Measured]) -> None:
    """Print errors of time and memory by source and model."""

    def by_model(source: str) -> Iterator[tuple[str, list[Measured], list[float]]]:
        """Yield each model and all, with its rows, and the errors of its rows without flags."""
        own, bare = (
            [each for each in table if each[0]["source"] == source] for table in (rows, plain)
        )
        for model in [*dict.fromkeys(row["model"] for row, *_ in own), "all"]:
            some, without_flags = (
                [each for each in table if model in (each[0]["model"], "all")]
                for table in (own, bare)
            )
            yield model, some, [error for _, _, error, _ in without_flags]

    lines: list[tuple[str, ...]] = []
    for model, some, _ in by_model("SimuMax"):
        memory = [each for *_, each in some if each is not None]
        time = summary([each[2] for each in some])
        lines.append(("SimuMax", model, str(len(some)), *time, *summary(memory)))
    print(markdown(("source", "model", "rows", "time, mean %", "worst %", "memory, mean %",
                    "worst %"), lines) + "\n")  # fmt: skip
    lines = []
    for model, some, without_flags in by_model("Megatron-Bridge"):
        cells = [model]
        for fitted in (True, False):
            errors = [each[2] for each in some if each[0]["fitted"] == fitted]
            cells += [str(len(errors)), *summary(errors)]
        lines.append((*cells, *summary(without_flags)))
    head = ("Megatron-Bridge", "fitted to, rows", "mean %", "worst %", "others, rows", "mean %",
            "worst %", "all without flags, mean %", "worst %")  # fmt: skip
    print(markdown(head, lines))


def main(words: Sequence[str] = ()) -> None:
    """Print the tables of docs/planning.md."""
    parser = options(__doc__)
    parser.add_argument("--layouts", action="store_true", help="also layouts made by hand")
    parser.add_argument(
        "--ranks", type=int, nargs="?", const=1_000_000, default=0, metavar="N",
        help="where the published layouts rank, of configurations of up to N devices",
    )  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="train on CPU ranks, for memory")
    parser.add_argument("--measured", action="store_true", help="run layouts on sleeping stages")
    parser.add_argument("--trained", action="store_true", help="train on the emulated device")
    args = parser.parse_args(words)
    if args.measured or args.trained or args.memory:
        ranks.clean_up_when_terminated()
    if args.measured:
        own = measure()
        print_measured(own)
        write_json(args.json, own)
        return
    if args.trained:
        print(machine())
        trainings = trained.trainings(_STEPS)
        print_trained(trainings)
        write_json(args.json, [row._asdict() for row in trainings])
        return
    if args.memory:
        held = memory()
        print_memory(held)
        write_json(args.json, [
            {**case._asdict(), "weights_off": weights, "activations_off": kept}
            for case, weights, kept in held
        ])  # fmt: skip
        return
    rows = measured()
    print_errors(rows, measured(asks_for_recipes=False))
    write_json(args.json, [
        {**row, "forecast_s": plan.step_s, "forecast_tokens_per_s": plan.tokens_per_s,
         "time_off": error, "memory_off": memory_error}
        for row, plan, error, memory_error in rows
    ])  # fmt: skip
    if args.layouts:
        layouts = []
        for model, count, layout, theirs, ours in by_hand():
            text = layout.replace("|", "\\|")
            layouts.append((model, str(count), f"`{text}`", f"{theirs:.3f}", f"{ours:.3f}"))
        columns = ("model", "ranks", "by hand", "busiest rank, mean 1", "ours")
        print("\n" + markdown(columns, layouts))
    if args.ranks:
        found = places(args.ranks)
        first = sum(rank is not None and rank <= 5 for rank, _ in found)
        tied = sum(behind <= _ACCURACY for _, behind in found)
        large = sum(behind == math.inf for _, behind in found)
        print(
            f"\n{first} of {len(found)} published layouts rank in the first five; {tied} are "
            f"within {100 * _ACCURACY:g} % of the first by forecast, {large} do not fit by forecast"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
