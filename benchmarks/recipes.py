"""How many training recipes each schedule accepts, by `megatron_ext.preflight`.

    python benchmarks/recipes.py FILE [--why SCHEDULE] [--json FILE]

FILE is a JSON list of recipes: `flags` (settings by the names of Megatron's arguments, of its
configuration objects or of Megatron-Bridge's), `name`, `source`, `pp`, `gpus`, and `counted`
(whether the sums include the recipe). Recipes without a pipeline are left out. `--why` lists what
one schedule refuses: recipes by rule, of at least 256 GPUs, and those that nothing else refuses.

Tables of thousands of micro-batches take seconds to prove, so a long step is cut: it keeps four
rounds of the pipeline and what is left over.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json
from megatron_ext import Disaggregation, DynamicOrder, PipelineConfig, preflight

SCHEDULES = {
    name: PipelineConfig(schedule=name)
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v", "bitpipe")
}
SCHEDULES["use-dpp"] = PipelineConfig(dynamic=DynamicOrder())
SCHEDULES["disaggregation"] = PipelineConfig(disaggregation=Disaggregation())
LARGE = 256
"""GPUs of a large recipe."""


def shorter(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a recipe with at most six rounds of micro-batches in a step."""
    sizes = ("tensor_model", "pipeline_model", "context")
    tp, pp, cp = (flags.get(f"{kind}_parallel_size") or 1 for kind in sizes)
    batch, micro_batch = flags.get("global_batch_size"), flags.get("micro_batch_size")
    if not batch or not micro_batch or flags.get("rampup_batch_size"):
        return flags
    step = micro_batch * max(1, (flags.get("world_size") or tp * pp * cp) // (tp * pp * cp))
    if batch % step or batch // step <= 6 * pp:
        return flags
    return {**flags, "global_batch_size": step * (4 * pp + batch // step % (2 * pp))}


def refused(recipe: dict[str, Any], config: PipelineConfig) -> list[str]:
    """Return the rules that refuse a recipe under a configuration, each once."""
    found = preflight(shorter(recipe["flags"]), config)
    return list(dict.fromkeys(refusal.rule for refusal in found.refusals))


def main() -> None:
    """Print the table, or what refuses recipes under one schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="the recipes")
    parser.add_argument("--why", choices=SCHEDULES, metavar="SCHEDULE", help="rank its refusals")
    add_json(parser)
    args = parser.parse_args()

    recipes = [one for one in json.loads(args.file.read_text()) if (one["pp"] or 1) > 1]
    if args.why:
        chosen = [one for one in recipes if one["counted"]]
        reasons = [(one, refused(one, SCHEDULES[args.why])) for one in chosen]
        ranks = Counter(rule for _, rules in reasons for rule in rules)
        print(f"{'rule':<45}{'all':>6}{'large':>7}{'alone':>7}")
        for rule, count in ranks.most_common():
            named = [(one, rules) for one, rules in reasons if rule in rules]
            large = sum((one["gpus"] or 0) >= LARGE for one, _ in named)
            alone = sum(len(rules) == 1 for _, rules in named)
            print(f"{rule:<45}{count:>6}{large:>7}{alone:>7}")
        return

    groups = {source: [one for one in recipes if one["source"] == source]
              for source in dict.fromkeys(one["source"] for one in recipes)}  # fmt: skip
    counted = [one for one in recipes if one["counted"]]
    groups["SUM counted"] = counted
    groups[f"SUM counted >= {LARGE}"] = [one for one in counted if (one["gpus"] or 0) >= LARGE]
    groups["SUM all"] = recipes
    accepts = {
        (id(one), name): not refused(one, config)
        for one in recipes
        for name, config in SCHEDULES.items()
    }
    print(f"{'source':<22}{'PP>1':>5}" + "".join(f"{name:>15}" for name in SCHEDULES))
    table = {}
    for source, chosen in groups.items():
        row = {name: sum(accepts[id(one), name] for one in chosen) for name in SCHEDULES}
        shares = (
            f"{count} ({100 * count / max(1, len(chosen)):.0f} %)".rjust(15)
            for count in row.values()
        )
        print(f"{source:<22}{len(chosen):>5}" + "".join(shares))
        table[source] = {"recipes": len(chosen), **row}
    if args.json:
        write_json(args.json, table)


if __name__ == "__main__":
    main()
