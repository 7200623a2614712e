"""Each refusal names the nearest flags that work, and pasting them works."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megatron_ext import preflight
from megatron_ext.config import command_line
from megatron_ext.config.incompatible import RULES, refusals

if TYPE_CHECKING:
    from megatron_ext.rules import Rule

SIZES = (
    "--num-layers 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 "
    "--pipeline-model-parallel-size 4 --hidden-dropout 0 --attention-dropout 0 "
    "--disable-bias-linear --hidden-size 64 --num-attention-heads 4 --vocab-size 1024 "
)
EXPERTS = "--num-experts 64 --moe-token-dispatcher-type alltoall "
ZB_V = "--pipeline-schedule zb-v "
FBD = "--forward-backward-disaggregating "
SHIP = (
    "--fbd-activations ship --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 "
)
MERGED = "--ignore-forward-tensor-parallel --tensor-model-parallel-size 2 "
OFFLOAD = "--fine-grained-activation-offloading --offload-modules core_attn "

CASES: dict[str, tuple[str, list[str]]] = {
    "schedule": (
        ZB_V,
        [
            "--cpu-offloading-num-layers 1",
            "--use-megatron-fsdp",
            "--decoder-num-layers 4",
            "--use-legacy-models",
            "--ckpt-format torch_dcp",
            "--tensor-parallel-num-weight-shards 2",
            EXPERTS.replace("alltoall", "flex")
            + "--moe-flex-dispatcher-backend ncclep",
        ],
    ),
    "unfused": (
        ZB_V,
        [f"{EXPERTS}--use-transformer-engine-op-fuser --moe-single-grouped-weight"],
    ),
    "folded": (
        ZB_V,
        [
            f"--hybrid-override-pattern {'M*M-' * 8}",
        ],
    ),
    "chunks": (
        ZB_V,
        [
            "--multiple-validation-sets",
            "--perform-rl-step",
            "--moe-routing-trace-path traces",
        ],
    ),
    "twins": ("--pipeline-schedule bitpipe ", ["--use-mp-args-from-checkpoint-args"]),
    "pairs": (
        f"{ZB_V}{EXPERTS}--overlap-moe-expert-parallel-comm --expert-model-parallel-size 4 --bf16 ",
        [
            "--recompute-granularity full --recompute-num-layers 1 --fp8-format hybrid",
            "--recompute-granularity selective --recompute-modules core_attn moe",
            "--moe-layer-recompute",
            "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64",
            "--mtp-num-layers 1 --mtp-detach-heads",
            f"--hybrid-layer-pattern {'M*M-' * 8} --pipeline-schedule zb-h1",
            "--variable-seq-lengths",
            "--mlp-chunks-for-training 2",
            "--pipeline-schedule 1f1b --perform-rl-step",
            OFFLOAD,
            "--pipeline-schedule 1f1b --overlap-dispatch-backward-with-experts-wgrad",
        ],
    ),
    "waiting_weights": (
        (
            f"--pipeline-schedule zb-h1 {EXPERTS}--overlap-moe-expert-parallel-comm "
            "--expert-model-parallel-size 4 --bf16 --transformer-impl local "
            "--pipeline-waiting-weights 2 "
        ),
        [
            "--sequence-parallel --tensor-model-parallel-size 2",
            "--transformer-impl transformer_engine",
        ],
    ),
    "microbatch_rng": (
        "--microbatch-rng ",
        ["--cuda-graph-impl local", "--overlap-moe-expert-parallel-comm"],
    ),
    "slices_by_length": (
        "--pipeline-schedule zb-h1 --pipeline-slice-tokens 64 --transformer-impl local ",
        [
            "--num-experts 64 --expert-model-parallel-size 4",
        ],
    ),
    "chosen": (
        "--use-dpp ",
        [
            OFFLOAD,
            "--fp8-format hybrid --tp-only-amax-red",
            EXPERTS + "--moe-router-load-balancing-type global_aux_loss",
            "--moe-enable-routing-replay --recompute-granularity selective",
        ],
    ),
    "crossed": ("--use-dpp --pipeline-schedule bitpipe ", ["--overlap-param-gather"]),
    "balance": (
        "--pipeline-schedule 1f1b --pipeline-balance order ",
        [
            "--logits-load-dir teacher",
            EXPERTS + "--moe-router-load-balancing-type global_aux_loss",
            "--perform-rl-step",
        ],
    ),
    "lengths": (
        "--variable-seq-lengths ",
        [
            "--num-experts 64",
            "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
        ],
    ),
    "lengths_without_table": ("--variable-seq-lengths ", ["--cuda-graph-impl local"]),
    "slices": (
        "--pipeline-schedule zb-h1 --pipeline-slices 4 --transformer-impl local ",
        [
            "--transformer-impl inference_optimized",
            "--context-parallel-size 2",
            EXPERTS + "--moe-router-load-balancing-type global_aux_loss",
            EXPERTS + "--moe-expert-capacity-factor 1.0",
            EXPERTS + "--mlp-chunks-for-training 2",
            "--mtp-num-layers 1 --mtp-use-repeated-layer",
            "--mtp-num-layers 2 --mtp-hsm",
            f"--hybrid-layer-pattern {'M*M-' * 8}",
            "--experimental-attention-variant dsa",
            "--window-size 4,0",
            "--sft --micro-batch-size 2",
            "--reset-attention-mask --tensor-model-parallel-size 2",
            "--bf16",
            "--fp8-format hybrid --no-masked-softmax-fusion",
            "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
            OFFLOAD,
            "--logits-save-dir teacher --logits-save-top-k 4",
            "--save-dgrads-interval 1 --save saved",
            "--decoder-seq-length 4096",
            "--perform-rl-step",
            "--moe-enable-routing-replay",
        ],
    ),
    "roles": (
        FBD,
        [
            OFFLOAD,
            "--fp8-format hybrid",
            "--hybrid-context-parallel",
            "--freeze-all-layers",
            "--perform-rl-step",
            "--inprocess-restart",
            "--log-energy",
            "--moe-use-upcycling",
            MERGED + "--num-experts 8 --world-size 48",
            SHIP + "--mtp-num-layers 1",
            SHIP + f"--hybrid-layer-pattern {'M*M-' * 8}",
            "--use-tp-pp-dp-mapping",
            "--use-mp-args-from-checkpoint-args",
            "--rerun-mode report_stats",
            "--error-injection-rate 5",
            "--full-validation",
            "--fbd-activations ship",
            SHIP.replace("uniform", "block").replace("ship", "recompute")
            + EXPERTS
            + "--moe-router-topk 4",
            SHIP + "--fp8-format hybrid --fp8-recipe tensorwise",
            MERGED + "--hidden-dropout 0.1 --world-size 48",
        ],
    ),
    "transport": (
        "--pipeline-transport shm ",
        [
            "--use-ring-exchange-p2p",
            "--decoder-num-layers 4",
            "--microbatch-group-size-per-virtual-pipeline-stage 4",
            "--cuda-graph-impl full_iteration",
        ],
    ),
}
"""By group of rules: the flags that it is for, and for each rule the flags that it refuses."""

ON_OBJECTS = (
    "dropped",
    "dropped_by_split",
    "whole",
    "dropped_by_line",
    "dropped_by_slices",
    "unpaired",
    "placed",
)
"""Groups that refuse what a program has built; as flags they are dropped, or cut the model."""

OTHERS = [
    "--enable-bitpipe-schedule --pipeline-schedule zb-v",
    "--pipeline-layout auto",
    "--pipeline-schedule zb-v --pipeline-layout auto --num-layers 7",
    "--pipeline-schedule zb-v --bitpipe-order zb",
    "--dpp-policy hint",
    "--trace-interval 5",
    "--ignore-forward-tensor-parallel --tensor-model-parallel-size 2 --world-size 48",
    "--use-dpp --dpp-extra-activations -1",
    "--use-dpp --dpp-policy depth-first --dpp-extra-activations 2",
    "--pipeline-costs 1,1,1",
    "--pipeline-schedule zb-v --pipeline-length-costs 1,2",
    "--pipeline-balance order",
    "--pipeline-slices 4 --transformer-impl local",
    "--pipeline-slices 65 --transformer-impl local --pipeline-schedule zb-h1",
    "--pipeline-slices 4 --transformer-impl local --pipeline-schedule zb-h1 --variable-seq-lengths",
    (
        "--pipeline-slices 4 --transformer-impl local --pipeline-schedule zb-h1 "
        "--pipeline-balance order"
    ),
    "--pipeline-slice-tokens 63 --transformer-impl local --pipeline-schedule zb-h1",
    (
        "--pipeline-slice-tokens 64 --transformer-impl local --pipeline-schedule zb-h1 "
        "--sequence-parallel --tensor-model-parallel-size 128 --world-size 512"
    ),
    "--pipeline-schedule zb-h1 --pipeline-waiting-weights 2 --transformer-impl local",
    (
        f"--pipeline-schedule 1f1b {EXPERTS}--overlap-moe-expert-parallel-comm --bf16 "
        "--expert-model-parallel-size 4 --transformer-impl local --pipeline-waiting-weights 2"
    ),
    FBD + "--pipeline-schedule zb-h1",
    FBD + "--pipeline-transport torch",
    FBD + "--pipeline-device-path ipc",
    FBD + "--pipeline-balance order",
    "--pipeline-schedule fbd",
    "--use-dpp --pipeline-transport torch",
    "--use-dpp --decoder-num-layers 4",
    "--enable-bitpipe-schedule --use-megatron-fsdp",
    "--pipeline-schedule zb-v --tensor-model-parallel-size 0",
    "--node-ips 10.0.0.1",
    "--pipeline-checksum",
    "--pipeline-checksum --pipeline-transport shm --pipeline-device-path ipc",
    "--pipeline-device-path ipc",
    "--pipeline-schedule zb-v --pipeline-model-parallel-size 1",
    "--pipeline-schedule bitpipe --pipeline-model-parallel-size 2",
    (
        "--pipeline-schedule bitpipe --pipeline-model-parallel-size 5 --world-size 60 "
        "--global-batch-size 120"
    ),
    "--pipeline-schedule zb-v --global-batch-size 63",
    "--pipeline-schedule bitpipe --global-batch-size 48",
    "--pipeline-schedule dualpipe --eval-global-batch-size 100",
    "--pipeline-schedule zb-v --heterogeneous-layers-config-path layers.json",
    "--pipeline-schedule zb-v --rampup-batch-size 8 8 100",
    "--pipeline-schedule zb-v --rampup-batch-size 16 48 100",
    "--pipeline-schedule zb-v --step-batch-size-schedule '0:16 1K:24 2.5M:64'",
    "--pipeline-schedule zb-v --step-batch-size-schedule '0:8 1K:12'",
    "--pipeline-schedule zb-v --step-batch-size-schedule linear",
    "--pipeline-transport shm --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 96",
    "--pipeline-transport shm --num-layers-per-virtual-pipeline-stage 3",
    "--pipeline-transport shm --pipeline-model-parallel-size 1",
    (
        "--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 2"
    ),
    "--pipeline-schedule zb-v --pipeline-layout auto --pipeline-model-parallel-layout E|t*32|||||L",
    "--pipeline-schedule zb-v --pipeline-model-parallel-layout E|t*8|t*8L",
    "--pipeline-schedule zb-h1 --is-hybrid-model --num-layers 30",
]
"""Flags that other checks refuse."""


@pytest.fixture(autouse=True)
def _flags_of_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules are for flags of five releases, of which the installed one lacks some."""
    monkeypatch.setattr(command_line, "megatron_flags", lambda: ())


def options(words: str) -> dict[str, list[str]]:
    """Return the values of each flag; the last use of a flag counts."""
    found: dict[str, list[str]] = {}
    for word in shlex.split(words):
        if word.startswith("--"):
            flag, found[word] = word, []
        else:
            found[flag].append(word)
    return found


def pasted(
    given: dict[str, list[str]], reason: str, remedy: str
) -> Iterator[dict[str, list[str]]]:
    """Yield the flags after each alternative of a remedy.

    Args:
        given: The refused flags.
        reason: The message before the remedy; "it" and "them" are flags that it names.
        remedy: Alternatives after ", or ": `remove it`, `remove FLAGS`, `remove one of them`,
            `use Megatron's own schedule`, or `use FLAGS`, perhaps `instead` of those that
            the reason names, or `without` others.
    """
    subject, _, refused = reason.partition(" cannot run with ")
    its = [
        flag
        for flag in re.findall(r"--[a-z0-9-]+", refused or subject)
        if flag in given
    ]
    for way in re.split(
        r",? or (?=use |remove |add |--)",
        re.sub(r", (which|such as) [^,;]*| or more$", "", remedy),
    ):
        if way == "remove one of them":
            for flag in [
                one for one in re.findall(r"--[a-z0-9-]+", reason) if one in given
            ]:
                yield {one: values for one, values in given.items() if one != flag}
            continue
        if way in ("remove it", "remove them"):
            out, flags = its[:1] if refused == "" else its, ""
        elif way == "use Megatron's own schedule":
            out, flags = re.findall(r"--[a-z0-9-]+", subject), ""
        elif left := re.fullmatch(r"remove (--.*)", way):
            out, flags = re.findall(r"--[a-z0-9-]+", left[1]), ""
        else:
            used = re.fullmatch(
                r"(?:use |add )?(--.*?)( instead)?(?: without (--.*))?", way
            )
            assert used, f"no flags: {way}"
            flags = used[1]
            out = [
                *(its if used[2] else ()),
                *re.findall(r"--[a-z0-9-]+", used[3] or ""),
            ]
        kept = {flag: values for flag, values in given.items() if flag not in out}
        if not flags:
            assert out, f"names nothing that was given: {way}"
            yield kept
            continue
        *before, last = re.split(r" (?=--)", flags)
        flag, _, values = last.partition(" ")
        for value in re.split(r", | or ", values):
            added = options(
                f"{' '.join(before)} {flag} {value}".replace("NAME", "zb-v")
            )
            opposites = {re.sub("^--(no-)?", "--" if f.startswith("--no-") else "--no-", f)
                         for f in added}  # fmt: skip
            yield {f: v for f, v in kept.items() if f not in opposites} | added


def check(given: dict[str, list[str]]) -> list[tuple[str, str, str]]:
    """Return (rule, reason, remedy) of each refusal."""
    words = [word for flag, values in given.items() for word in (flag, *values)]
    worlds = int(given.get("--world-size", ["64"])[0])
    found = preflight(words, world_size=worlds)
    return [(one.rule, one.reason, one.remedy) for one in found.refusals]


RULES_BY_FLAGS = [
    pytest.param(rule, base + flags, id=f"{group} {rule.reads[0]} {flags.split()[-1]}")
    for group, (base, cases) in CASES.items()
    for rule, flags in zip(RULES[group], cases, strict=True)
]


@pytest.mark.parametrize(("rule", "flags"), RULES_BY_FLAGS)
def test_the_remedy_of_a_rule_works_when_pasted(rule: Rule, flags: str) -> None:
    given = options(SIZES + flags)
    [(name, reason, remedy)] = check(given)
    assert name == rule.reads[0]
    ways = list(pasted(given, reason, remedy))
    assert ways
    for way in ways:
        assert check(way) == [], way


@pytest.mark.parametrize("flags", OTHERS)
def test_the_remedy_of_another_check_works_when_pasted(flags: str) -> None:
    given = options(SIZES + flags)
    [(_, reason, remedy)] = check(given)
    ways = list(pasted(given, reason, remedy))
    assert ways
    for way in ways:
        assert check(way) == [], way


def test_all_rules_are_tried() -> None:
    later = {"dropped_by_roles"}  # tests/config/test_preflight.py
    assert set(CASES) | set(ON_OBJECTS) | later == set(RULES)
    for group in ON_OBJECTS:
        for rule in RULES[group]:
            [refusal] = refusals(
                "zb-v", Namespace(**dict.fromkeys(rule.reads, True)), [rule]
            )
            assert refusal.remedy in ("remove it", "remove them")
            assert (
                refusals("zb-v", Namespace(**dict.fromkeys(rule.reads)), [rule]) == []
            )
