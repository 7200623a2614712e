"""Published sizes: both ways take their flags, and models have the published parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.upstream import releases
from tests.examples.scripts import dry_run, megatron_flags, value_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Size:
    """A model as its script has it, and as it is published."""

    example: str
    name: str
    nodes: int
    replicas: int
    microbatches: int
    parameters: float
    """By the authors, without layers that predict further tokens."""
    dense_layers: int | None = None
    """How many layers come before those with experts; None without experts, or only with them."""

    recompute: list[str] | None = None
    """Recomputed parts; of Llama 3 8B a whole layer, which counts as its attention."""

    @property
    def script(self) -> str:
        return "pretrain_bert.py" if self.example == "bert" else "pretrain_gpt.py"


MLA = ["layernorm", "mla_up_proj", "moe"]
SIZES = (
    Size("llama3", "8b", 1, 4, 128, 8.03e9, recompute=["core_attn"]),
    Size("llama3", "70b", 8, 2, 64, 70.6e9),
    Size("mixtral", "8x7b", 2, 4, 64, 46.7e9, recompute=["core_attn", "moe"]),
    Size("deepseek-v2", "v2", 8, 16, 16, 235.7e9, 1, MLA),
    Size("deepseek-v2", "v2-lite", 1, 2, 32, 15.7e9, 1, MLA),
    Size("deepseek-v3", "v3", 32, 16, 64, 671.0e9, 3, MLA),
    # 11 and 5 billion by their authors, who round; 12 layers hidden^2 and the embeddings.
    Size("gpt", "11b", 1, 1, 16, 12 * 96 * 3072**2 + 51328 * 3072),
    Size("gpt", "1b", 1, 2, 8, 12 * 16 * 2048**2 + 52352 * 2048),
    Size("bert", "5b", 1, 1, 8, 12 * 64 * 2560**2 + 29696 * 2560),
    Size("bert", "340m", 1, 2, 4, 335e6),
)
RELEASE = releases.installed_release() or (0, 0)
# Megatron has BERT up to 0.17. The local layers of 0.19 refuse MLA with whole queries.
ABSENT = {"bert"} if RELEASE >= (0, 18) else set()
ABSENT |= {"v2-lite"} if RELEASE >= (0, 19) else set()
SIZES = tuple(size for size in SIZES if ABSENT.isdisjoint((size.example, size.name)))
IDS = [f"{size.example}-{size.name}" for size in SIZES]


def flags_of(size: Size) -> list[str]:
    """The flags of the script; data and tokenizer are the user's."""
    nodes = {"NNODES": str(size.nodes), "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    words = dry_run(f"examples/{size.example}/run.sh", "--size", size.name, **nodes)
    assert value_of(words, "--nproc-per-node") == "8"
    return [*megatron_flags(words), "--data-path", "corpus"]


def parse(script: str, flags: list[str], world: int) -> Any:
    """Upstream's own parsing and validation, in a process of its own."""
    import os
    import sys

    from megatron.training.arguments import parse_args, validate_args

    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = [script, *flags]
    return validate_args(parse_args())


def facts(size: Size, flags: list[str]) -> dict[str, Any]:
    """Upstream's arguments for the flags."""
    from megatron.training.arguments import core_transformer_config_from_args

    args = parse(size.script, flags, 8 * size.nodes)
    config = core_transformer_config_from_args(args)
    samples = args.micro_batch_size * args.data_parallel_size
    return {
        "replicas": args.data_parallel_size,
        "microbatches": args.global_batch_size // samples,
        "config": type(config).__name__,
        "recompute": config.recompute_granularity and sorted(config.recompute_modules),
        "parameters": parameters(size, flags, args.num_layers),
    }


def parameters(size: Size, flags: list[str], num_layers: int) -> int:
    """Count the parameters of two shallow models without memory; each further layer adds as many.

    Layers without experts come first, so that the models differ by one of the others.
    """
    dense = size.dense_layers or 0
    shallow, deeper = (count(size, flags, dense, extra) for extra in (1, 2))
    return shallow + (num_layers - dense - 1) * (deeper - shallow)


def count(size: Size, flags: list[str], dense: int, extra: int) -> int:
    """Build a model of some layers on torch's meta device, undivided."""
    import torch
    from megatron.training.global_vars import set_args

    cut = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers".split()
    cut += [str(dense + extra), "--expert-model-parallel-size", "1"]
    if size.dense_layers is not None:
        cut += ["--moe-layer-freq", f"([0]*{dense}+[1]*{extra})"]
    skipped = {
        "--num-layers-per-virtual-pipeline-stage",
        "--decoder-last-pipeline-num-layers",
    }
    kept = [
        word
        for before, word in zip(["", *flags], flags, strict=False)
        if not {before, word} & skipped
    ]
    memoryless = ["--use-cpu-initialization", "--no-initialization"]
    args = parse(size.script, [*kept, *cut, *memoryless], 1)
    set_args(args)
    with torch.device("meta"):
        model = build(size, args)
    return sum(
        p.numel() for name, p in model.named_parameters() if not name.startswith("mtp.")
    )


def build(size: Size, args: Any) -> Any:
    """Build the whole model by upstream's own builder."""
    if size.example == "bert":
        import pretrain_bert

        return pretrain_bert.model_provider()
    import gpt_builders

    return gpt_builders.gpt_builder(args, pre_process=True, post_process=True)


def all_facts(sizes: list[tuple[Size, list[str]]]) -> list[dict[str, Any]]:
    """The facts of every size, in one process: upstream parses as often as it is asked to."""
    from tests.patches.single import start_parallel

    start_parallel()
    return [facts(size, flags) for size, flags in sizes]


@pytest.fixture(scope="module")
def found(megatron_lm_path: Path) -> dict[str, dict[str, Any]]:
    [measured] = run_ranks(1, all_facts, [(size, flags_of(size)) for size in SIZES])
    return dict(zip(IDS, measured, strict=True))


@pytest.mark.tree
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_upstream_takes_the_flags(size: Size, found: dict[str, dict[str, Any]]) -> None:
    fact = found[f"{size.example}-{size.name}"]
    assert (fact["replicas"], fact["microbatches"]) == (
        size.replicas,
        size.microbatches,
    )
    assert fact["config"].startswith("MLA") == size.example.startswith("deepseek")
    assert fact["recompute"] == size.recompute


@pytest.mark.tree
@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_parameters_are_the_published_ones(
    size: Size, found: dict[str, dict[str, Any]]
) -> None:
    counted = found[f"{size.example}-{size.name}"]["parameters"]
    assert counted == pytest.approx(size.parameters, rel=0.01)
