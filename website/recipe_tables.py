"""Prints the table of docs/recipes.md, or with --refused docs/reference/refused.md."""

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

HEAD = """# Settings that schedules refuse or drop

<!-- Generated: python website/recipe_tables.py --refused > docs/reference/refused.md -->

Every rule that a job is checked by before it starts. `megatron-ext doctor --devices 64xh100 --
pretrain_gpt.py FLAGS` applies them to your flags. [recipes.md](../recipes.md) has the table of
features by schedule. "None: dropped" means that the job runs without the setting, and one line of
the log says so.

"""
SCHEDULES = {
    name: PipelineConfig(schedule=name)
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v", "bitpipe")
}
SCHEDULES["use-dpp"] = PipelineConfig(dynamic=DynamicOrder())
SCHEDULES["disaggregation"] = PipelineConfig(disaggregation=Disaggregation())

SIZES = (
    "--num-layers 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer --hidden-dropout 0 "
    "--attention-dropout 0 --disable-bias-linear "
)
"""Flags that all schedules accept on 64 GPUs, to which those of `FEATURES` are added."""
_EXPERTS = "--num-experts 64 --moe-token-dispatcher-type alltoall"
_FLEX = "--num-experts 64 --moe-token-dispatcher-type flex --expert-model-parallel-size 4"
_TENSOR = "--tensor-model-parallel-size 4 --sequence-parallel"
FEATURES = {
    "tensor and sequence parallelism": _TENSOR,
    "context parallelism": "--context-parallel-size 2",
    "expert parallelism, DeepEP or HybridEP": _FLEX,
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
    "a layout of another number of stages":
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
"""Features of recipes, as flags."""
_SCOPES = {
    "schedule": "all our schedules, disaggregation",
    "dropped": "none: dropped",
    "dropped_by_split": "none: dropped where backwards are split",
    "whole": "none: dropped where backwards are split; `--use-dpp` leaves them whole",
    "unfused": "schedules that split backwards",
    "dropped_by_line": "none: dropped where each rank has one stage",
    "dropped_by_slices": "none: dropped by `--pipeline-slices`",
    "unpaired": "none: `--overlap-moe-expert-parallel-comm` is dropped",
    "dropped_by_roles": "none: dropped by disaggregation",
    "folded": "V and W placements",
    "placed": "V and W placements, in programs that build their model",
    "pairs": "`--overlap-moe-expert-parallel-comm` with our schedules",
    "chunks": "our schedules with several stages on each rank",
    "twins": "two mirrored pipelines",
    "microbatch_rng": "`--microbatch-rng` under Megatron's own schedules",
    "chosen": "`--use-dpp`",
    "crossed": "`--use-dpp` on mirrored pipelines",
    "balance": "`--pipeline-balance`",
    "slices": "`--pipeline-slices`",
    "lengths": "`--variable-seq-lengths`",
    "stock_lengths": "`--variable-seq-lengths` under Megatron's own schedules",
    "roles": "disaggregation",
    "transport": "our transports under Megatron's own schedules",
}
"""Under which schedules each group of rules holds."""


def features() -> str:
    """Return, in Markdown, which features go with which schedules."""

    def look(flags: str, config: PipelineConfig) -> Preflight:
        return preflight(shlex.split(SIZES + flags), config, world_size=64)

    plain = {name: look("", config) for name, config in SCHEDULES.items()}
    lines = [f"| feature | {' | '.join(SCHEDULES)} |", "|---" * (len(SCHEDULES) + 1) + "|"]
    for feature, flags in FEATURES.items():
        cells = []
        for name, config in SCHEDULES.items():
            found, usual = look(flags, config), plain[name]
            changes = " ".join(set(found.changes) - set(usual.changes))
            cells.append(
                "**no**" if not found.accepted
                else "dropped" if " is dropped: " in changes
                else "cut anew" if " stages of " in changes
                else "in part" if set(found.notices) - set(usual.notices)
                else "yes"
            )  # fmt: skip
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def refused() -> str:
    """Return the page of all settings that schedules refuse or drop."""
    lines = ["| setting | with | why not | instead |", "|---|---|---|---|"]
    for group, rules in RULES.items():
        for rule in rules:
            remedy = rule.remedy.replace("SUBJECT", "the schedule")
            cells = f"{rule.flag} | {_SCOPES[group]} | {rule.reason} | {remedy}"
            lines.append(f"| {reworded(cells, in_flags)} |")
    return HEAD + "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write((refused() if "--refused" in sys.argv else features()) + "\n")
