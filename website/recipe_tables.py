"""Prints the table of docs/recipes.md or, with `refused`, the page docs/reference/refused.md."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from megatron_ext import Disaggregation, DynamicOrder, PipelineConfig, preflight
from megatron_ext.config.flags import in_flags
from megatron_ext.config.incompatible import RULES
from megatron_ext.errors import reworded

if TYPE_CHECKING:
    from megatron_ext.config.refusals import Preflight

HEAD = """# Settings that schedules reject or drop

<!-- Generated: python website/recipe_tables.py refused > docs/reference/refused.md -->

This page lists the rules that every job is checked against before it starts. To check your flags on
any machine, run `megatron-ext doctor --devices 64xh100 -- pretrain_gpt.py FLAGS`.
[recipes.md](../recipes.md) has a table of features by schedule. If a setting is dropped, the job
runs without it and logs this in one line.
"""
SCHEDULES = {
    name: PipelineConfig(schedule=name)
    for name in (
        "1f1b",
        "interleaved",
        "zb-h1",
        "zb-v",
        "v-half",
        "dualpipe-v",
        "bitpipe",
    )
}
SCHEDULES["use-dpp"] = PipelineConfig(dynamic=DynamicOrder())
SCHEDULES["disaggregation"] = PipelineConfig(disaggregation=Disaggregation())

SIZES = (
    "--num-layers 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer --hidden-dropout 0 "
    "--attention-dropout 0 --disable-bias-linear "
)
"""Flags that all schedules accept on 64 GPUs. The flags of each feature are added to them."""
_EXPERTS = "--num-experts 64 --moe-token-dispatcher-type alltoall"
_FLEX = (
    "--num-experts 64 --moe-token-dispatcher-type flex --expert-model-parallel-size 4"
)
_TENSOR = "--tensor-model-parallel-size 4 --sequence-parallel"
FEATURES = {
    "tensor and sequence parallelism": _TENSOR,
    "context parallelism": "--context-parallel-size 2",
    "expert parallelism (DeepEP, HybridEP)": _FLEX,
    "`--moe-router-enable-expert-bias`": f"{_EXPERTS} --moe-router-enable-expert-bias",
    "`--moe-shared-expert-overlap`":
        f"{_EXPERTS} --moe-shared-expert-intermediate-size 1024 --moe-shared-expert-overlap",
    "`--mtp-num-layers`": "--mtp-num-layers 1",
    "`--overlap-grad-reduce`, `--overlap-param-gather`":
        "--overlap-grad-reduce --overlap-param-gather",
    "`--overlap-param-gather-with-optimizer-step`": "--overlap-param-gather-with-optimizer-step",
    "`--num-distributed-optimizer-instances` 2 with `--overlap-grad-reduce`":
        "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    "`--use-megatron-fsdp`": "--use-megatron-fsdp",
    "full recomputation":
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "`--fine-grained-activation-offloading`":
        "--fine-grained-activation-offloading --offload-modules core_attn",
    "`--cpu-offloading-num-layers`": "--cpu-offloading-num-layers 1",
    "`--no-gradient-accumulation-fusion`": "--no-gradient-accumulation-fusion",
    "`--tp-comm-overlap`": f"{_TENSOR} --tp-comm-overlap",
    "`--fp8-recipe delayed`": "--fp8-format hybrid --fp8-recipe delayed",
    "`--fp8-recipe mxfp8`": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "`--fp8-param-gather`": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
    "`--delay-wgrad-compute`": "--delay-wgrad-compute",
    "`--defer-embedding-wgrad-compute`": "--defer-embedding-wgrad-compute",
    "`--overlap-moe-expert-parallel-comm`": f"{_FLEX} --overlap-moe-expert-parallel-comm --bf16",
    "`--overlap-dispatch-backward-with-experts-wgrad`":
        f"{_EXPERTS} --overlap-dispatch-backward-with-experts-wgrad",
    "CUDA graphs": "--cuda-graph-impl transformer_engine",
    "`--moe-paged-stash`": f"{_EXPERTS} --moe-paged-stash",
    "`--use-transformer-engine-op-fuser` with experts":
        f"{_EXPERTS} --use-transformer-engine-op-fuser",
    "virtual stages": "--num-layers-per-virtual-pipeline-stage 2",
    "a layout with a different number of stages":
        f"--pipeline-model-parallel-layout Et*4|{'t*4|' * 14}L --num-layers 60",
    "layers of the first and last stage":
        "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
    "embedding and loss in the split":
        "--num-layers 30 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    "hybrid models (Mamba)": f"--hybrid-layer-pattern {'M*M-M*M-' * 4}",
    "`--ckpt-format torch`": "--ckpt-format torch --save checkpoints",
    "`--non-persistent-ckpt-type local`": "--non-persistent-ckpt-type local",
    "`--rampup-batch-size`": "--rampup-batch-size 64 64 1000",
    "`--step-batch-size-schedule`": "--step-batch-size-schedule '0:64 1B:128'",
}  # fmt: skip
"""The flags of each feature of recipes."""
_SCOPES = {
    "schedule": "Rejected by all schedules and disaggregation",
    "unfused": "Rejected by schedules that split backward passes",
    "folded": "Rejected by V and W placements",
    "placed": "Rejected by V and W placements, in programs that build their model",
    "chunks": "Rejected by schedules with several stages per rank",
    "twins": "Rejected by mirrored pipelines",
    "pairs": "Rejected with `--overlap-moe-expert-parallel-comm`",
    "waiting_weights": "Rejected with `--pipeline-waiting-weights`",
    "slices": "Rejected with `--pipeline-slices` and `--pipeline-slice-tokens`",
    "slices_by_length": "Rejected with `--pipeline-slice-tokens`",
    "chosen": "Rejected with `--use-dpp`",
    "crossed": "Rejected with `--use-dpp` on mirrored pipelines",
    "lengths": "Rejected with `--variable-seq-lengths`",
    "balance": "Rejected with `--pipeline-balance`",
    "roles": "Rejected with disaggregation",
    "lengths_without_table": "Rejected with `--variable-seq-lengths` under Megatron's own "
    "schedules",
    "microbatch_rng": "Rejected with `--microbatch-rng` under Megatron's own schedules",
    "transport": "Rejected with a transport of this package under Megatron's own schedules",
    "dropped": "Dropped by all schedules and disaggregation",
    "dropped_by_split": "Dropped by schedules that split backward passes",
    "whole": "Dropped by schedules that split backward passes, but kept with `--use-dpp`",
    "dropped_by_line": "Dropped by schedules with one stage per rank",
    "unpaired": "Settings that disable `--overlap-moe-expert-parallel-comm`",
    "dropped_by_slices": "Dropped with `--pipeline-slices`",
    "dropped_by_roles": "Dropped with disaggregation",
}
"""The heading of each group of rules."""


def features() -> str:
    """Return, in Markdown, which features work with which schedules.

    A list names the features that all schedules treat alike. A table has all other features, with
    one column for all schedules that treat them alike.
    """

    def look(flags: str, config: PipelineConfig) -> Preflight:
        return preflight(shlex.split(SIZES + flags), config, world_size=64)

    plain = {name: look("", config) for name, config in SCHEDULES.items()}
    alike: dict[str, list[str]] = {"yes": [], "dropped": [], "**no**": []}
    rows: dict[str, list[str]] = {}
    for feature, flags in FEATURES.items():
        cells = []
        for name, config in SCHEDULES.items():
            found, usual = look(flags, config), plain[name]
            changes = " ".join(set(found.changes) - set(usual.changes))
            cells.append(
                "**no**" if not found.accepted
                else "dropped" if " is dropped: " in changes
                else "split again" if " stages of " in changes
                else "in part" if set(found.notices) - set(usual.notices)
                else "yes"
            )  # fmt: skip
        if len(set(cells)) == 1 and cells[0] in alike:
            alike[cells[0]].append(feature)
        else:
            rows[feature] = cells
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, column in zip(SCHEDULES, zip(*rows.values(), strict=True), strict=True):
        columns.setdefault(column, []).append(name)
    lines = [
        f"- **yes** under all: {', '.join(alike['yes'])}",
        f"- **dropped** by all: {', '.join(alike['dropped'])}",
        f"- **no** under all: {', '.join(alike['**no**'])}",
        "",
        f"| feature | {' | '.join(', '.join(names) for names in columns.values())} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in zip(rows, *columns, strict=True):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def refused() -> str:
    """Return the page of all settings that schedules refuse or drop."""
    lines = []
    for group in sorted(RULES, key=list(_SCOPES).index):
        lines += [
            f"\n## {_SCOPES[group]}\n",
            "| setting | reason | remedy |",
            "|---|---|---|",
        ]
        for rule in RULES[group]:
            remedy = rule.remedy.replace("SUBJECT", "the schedule")
            lines.append(
                f"| {reworded(f'{rule.flag} | {rule.reason} | {remedy}', in_flags)} |"
            )
    return HEAD + "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write((refused() if "refused" in sys.argv else features()) + "\n")
