"""Forecasts of `megatron-ext plan` against steps and memory that others measured and published.

    python benchmarks/planner.py

`planner_rows.json` holds the rows: 43 of SimuMax v1.2 (docs/b200: time and allocated memory) and
those of Megatron-Bridge's performance summary whose model and device the planner knows
(throughput). One row of each source set a rate (`hardware.py` names it), SimuMax's rows of Llama
with one stage the bytes of a logit; nothing else was fitted to them.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ext.planning.hardware import parse_devices
from megatron_ext.planning.layout_search import Layout, Question, search
from megatron_ext.planning.model_sizes import sizes_of_flags

ROWS = Path(__file__).with_suffix("").with_name("planner_rows.json")


def forecast_of(row: dict[str, Any], flags: str) -> Layout:
    """Return the plan of a row, whose sizes are all fixed."""
    model = sizes_of_flags(flags.split(), row["model"])
    count, device = parse_devices(row["devices"])
    names = ("tp", "pp", "cp", "ep", "micro_batch", "vp")
    schedule = "interleaved" if row["vp"] > 1 else "1f1b"
    fixed = {name: row[name] for name in names}
    fixed |= {"recompute": frozenset(), "schedule": schedule}
    if row["source"] == "SimuMax" and row["pp"] > 1:
        fixed["layout"] = [model.num_layers // row["pp"]] * row["pp"]
    job = Question(
        model=model,
        # Bridge recomputes where it has to, which its summary does not say.
        device=replace(device, memory_gib=1e6),
        num_devices=count,
        global_batch=row["global_batch"],
        sequence=row["sequence"],
        is_8bit=row["precision"] != "bf16",
        fused_loss=True,
        overlaps=row["overlap"],
        fixed=fixed,
    )
    return search(job).plans[0]


def measured() -> list[tuple[dict[str, Any], Layout, float, float | None]]:
    """Return each row with its plan and the errors of time and memory, as shares."""
    data = json.loads(ROWS.read_text(encoding="utf-8"))
    found = []
    for row in data["rows"]:
        plan = forecast_of(row, data["models"][row["model"]])
        if "step_s" in row:
            error = plan.step_s / row["step_s"] - 1
        else:
            error = row["tflops"] / plan.tflops - 1
        memory = max(plan.memory_gib) / row["memory_gib"] - 1 if "memory_gib" in row else None
        found.append((row, plan, error, memory))
    return found


def summary(errors: Sequence[float]) -> str:
    """Return mean and worst of the absolute errors in percent."""
    sizes = [abs(error) for error in errors]
    return f"{100 * statistics.mean(sizes):.1f} | {100 * max(sizes):.1f}"


def main() -> None:
    """Print the tables of docs/planning.md."""
    rows = measured()
    print("| source | model | rows | time, mean % | worst % | memory, mean % | worst % |")
    print("|---|---|---|---|---|---|---|")
    for source in ("SimuMax", "Megatron-Bridge"):
        own = [each for each in rows if each[0]["source"] == source]
        for model in [*dict.fromkeys(row["model"] for row, *_ in own), "all"]:
            some = [each for each in own if model in ("all", each[0]["model"])]
            memory = [each for *_, each in some if each is not None]
            tail = summary(memory) if memory else "- | -"
            print(
                f"| {source} | {model} | {len(some)} | {summary([e[2] for e in some])} | {tail} |"
            )
    heads = "model|devices|TP|PP|VPP|CP|EP|precision|measured|forecast|time off"
    print(f"\n| {heads.replace('|', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row, plan, error, _ in rows:
        if row["source"] == "Megatron-Bridge":
            sizes = " | ".join(str(row[name]) for name in ("tp", "pp", "vp", "cp", "ep"))
            figures = f"{row['tflops']} | {plan.tflops:.0f} | {100 * error:+.0f} %"
            print(
                f"| {row['model']} | {row['devices']} | {sizes} | {row['precision']} | {figures} |"
            )


if __name__ == "__main__":
    main()
