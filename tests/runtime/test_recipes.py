"""Recipes as people publish them train under a schedule with the log of Megatron's own.

One small training for each rule: the flags that a recipe has for Megatron's schedule stay in the
command line of ours. Runs start from one checkpoint and do not clip gradients, whose norm is added
up rank by rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ext import Disaggregation, DynamicOrder, PipelineConfig, preflight
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.upstream.releases import parse_release
from tests.disaggregation.test_training import FBD, run_role, together
from tests.ranks import run_ranks
from tests.runtime import capture
from tests.runtime.capture import Captured, run_here
from tests.runtime.test_equality import SHARDED, UNCLIPPED, assert_equal, stock
from tests.runtime.test_placed_training import (
    EIGHT_LAYERS,
    EXACT,
    PP2,
    ZB_V,
    start_from,
)
from tests.training.helpers import LLAMA, MLA, MOCK, MOE, report, train

PP2_VPP2 = PP2 + "--num-virtual-stages-per-pipeline-rank 2 "
FIVE_LAYERS = "--num-layers 5 "
ZB_H1 = PP2 + "--pipeline-schedule zb-h1 "


@pytest.mark.parametrize(
    ("flags", "cut", "ours"),
    [
        pytest.param(
            "--num-layers 6 ",
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split ",
            ZB_V,
            id="embedding and loss",
        ),
        pytest.param(
            FIVE_LAYERS, "--decoder-first-pipeline-num-layers 2 ", ZB_V, id="ends"
        ),
        pytest.param(
            EIGHT_LAYERS,
            "--num-virtual-stages-per-pipeline-rank 4 ",
            ZB_H1,
            id="chunks of a line",
        ),
        pytest.param(
            FIVE_LAYERS,
            "--pipeline-model-parallel-layout Et|t|t|t|t|L ",
            ZB_V,
            id="layout of more stages",
        ),
    ],
)
def test_the_cut_follows_the_schedule(
    tmp_path: Path, flags: str, cut: str, ours: str
) -> None:
    flags = start_from(tmp_path, MOCK + flags + EXACT) + cut
    assert report(train(2, flags + ours)) == report(train(2, flags + PP2))


LATE = "--overlap-param-gather-with-optimizer-step "


def _gathering_late(argv: list[str]) -> tuple[Captured, int]:
    """Train as Bridge's recipes do; also return the gathers that the optimizer started.

    Megatron's own command line refuses the setting beside distributed checkpoints, Bridge does not.
    """
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.core.distributed import DistributedDataParallel
    from megatron.training import get_args, training

    set_up, gather, started = (
        training.setup_model_and_optimizer,
        DistributedDataParallel.start_param_sync,
        [],
    )

    def setting_up(*args: Any, **kwargs: Any) -> Any:
        get_args().overlap_param_gather_with_optimizer_step = True
        return set_up(*args, **kwargs)

    def gathering(
        chunk: Any, *args: Any, force_dispatch: bool = False, **kwargs: Any
    ) -> None:
        started.extend([chunk] * force_dispatch)
        gather(chunk, *args, force_dispatch=force_dispatch, **kwargs)

    training.setup_model_and_optimizer = setting_up  # this process is a rank and ends
    DistributedDataParallel.start_param_sync = gathering
    return run_here("gpt", argv), len(started)


@pytest.mark.parametrize(
    "schedule", ["zb-v", "interleaved", "zb-v --use-dpp", "bitpipe"]
)
def test_the_first_chunk_is_gathered_while_the_others_take_their_step(
    schedule: str,
) -> None:
    flags = capture.GPT + UNCLIPPED + SHARDED + PP2
    ours = f"{flags}--pipeline-schedule {schedule} "
    if schedule == "bitpipe":  # two mirrored pipelines of two ranks
        ours = ours.replace(PP2, capture.PP4)
    expected = stock(4, flags)
    steps = len(expected.gradients)
    for found, started in run_ranks(4, _gathering_late, ours.split()):
        assert found.tables
        assert started == steps
        assert found.losses in (expected.losses, [{}] * steps)
        assert found.parameters.items() <= expected.parameters.items()


def test_what_a_table_does_itself_is_dropped(tmp_path: Path) -> None:
    flags = start_from(tmp_path, MOCK + EXACT)
    settings = LATE + "--defer-embedding-wgrad-compute --delay-wgrad-compute "
    settings += "--microbatch-group-size-per-virtual-pipeline-stage 4 "
    run = train(2, flags + ZB_H1 + settings)
    assert report(run) == report(train(2, flags + PP2))
    told = "".join(run.logs)
    assert told.count(" is dropped: ") == 3, told
    assert (
        told.count("--microbatch-group-size-per-virtual-pipeline-stage has no effect")
        == 1
    )


@pytest.mark.parametrize("ours", [ZB_H1, PP2 + "--use-dpp "], ids=["zb-h1", "use-dpp"])
def test_shared_experts_beside_the_dispatcher(tmp_path: Path, ours: str) -> None:
    """The streams of a device are in `tests/devices/test_queued_schedules.py`."""
    experts = (
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 32 "
    )
    experts += MOE + "--disable-bias-linear "
    flags = (
        start_from(tmp_path, MOCK + EXACT + experts) + "--moe-shared-expert-overlap "
    )
    assert report(train(2, flags + ours)) == report(train(2, flags + PP2))


def growing(flags: str) -> str:
    """Return flags of a batch that grows from 4 to 8 samples; only releases before 0.18 ramp up."""
    flags = re.sub(r"--(train-iters|lr-warmup-iters|global-batch-size) \d+ ", "", flags)
    flags += "--train-samples 40 "
    if parse_release(version("megatron-core")) >= (0, 18):
        return flags + "--step-batch-size-schedule 0:4,128:8 "  # in tokens
    return flags + "--rampup-batch-size 4 4 8 --global-batch-size 8 "


@pytest.mark.parametrize(
    "ours", [ZB_V, PP2 + "--pipeline-schedule dualpipe-v ", PP2 + "--use-dpp "]
)
def test_a_batch_that_grows(tmp_path: Path, ours: str) -> None:
    """Each of its sizes has a table of its own."""
    flags = growing(start_from(tmp_path, MOCK + EXACT))
    run = train(2, flags + ours)
    told = report(run)
    assert told == report(train(2, flags + PP2))
    assert all(
        any(f"batch size:     {size} " in line for line in told) for size in (4, 8)
    )


RECIPES = json.loads(
    (Path(__file__).parent / "recipes.json").read_text(encoding="utf-8")
)
"""Published recipes, by name: the schedule to try and the settings."""
QUICK = (0, 1, 2)
"""Trainings of the quick tier."""


def scaled(flags: dict[str, Any]) -> tuple[str, str]:
    """Return a recipe for four ranks, and what of it only our schedules take.

    All settings stay that run on a CPU; each size becomes the smallest that keeps its meaning.
    """

    def value(*names: str) -> Any:
        return next((flags[name] for name in names if flags.get(name)), None)

    pp = 4 if flags["pipeline_model_parallel_size"] >= 12 else 2
    tp = 2 if pp == 2 and (value("tensor_model_parallel_size") or 1) > 1 else 1
    layout = value("pipeline_model_parallel_layout")
    virtual = (
        "num_virtual_stages_per_pipeline_rank",
        "virtual_pipeline_model_parallel_size",
    )
    chunks = 1 if (value(*virtual) or 1) == 1 else 2
    words = [f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp}"]
    words += ["--sequence-parallel"] * (tp > 1 and bool(value("sequence_parallel")))
    words.append(
        LLAMA if not value("multi_latent_attention") else MLA.partition("--mtp")[0]
    )

    first = value(
        "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"
    )
    last = value(
        "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"
    )
    counted = [
        f"--account-for-{end}-in-pipeline-split"
        for end in ("embedding", "loss")
        if value(f"account_for_{end}_in_pipeline_split")
    ]
    if layout:
        given = parse_layout(layout)
        chunks, tail = (
            min(2, len(given) // flags["pipeline_model_parallel_size"]),
            len(given) - 1,
        )
        most = max(stage.count("t") for stage in given)
        kept = [given[0], *given[1 : pp * chunks - 1], given[tail]]
        sizes = [-(-2 * stage.count("t") // most) for stage in kept]
        ends = "m" * kept[-1].count("m") + "L"
        words.append(
            f"--pipeline-model-parallel-layout E{'|'.join('t' * n for n in sizes)}{ends}"
        )
        layers = sum(sizes)
    else:
        layers = 2 * pp * chunks - len(counted)
        if first or last:
            names = [name for name, size in (("first", first), ("last", last)) if size]
            words += [
                f"--decoder-{name}-pipeline-num-layers {chunks}" for name in names
            ]
            layers = 2 * chunks * (pp - len(names)) + chunks * len(names)
        words += counted
        words += [f"--num-virtual-stages-per-pipeline-rank {chunks}"] * (chunks > 1)
    words.append(f"--num-layers {layers}")

    if value("num_experts", "num_moe_experts"):
        words.append(MOE)
        kind = value("moe_token_dispatcher_type")
        words.append(
            f"--moe-token-dispatcher-type {'alltoall' if kind == 'flex' else kind}"
        )
        if (value("expert_model_parallel_size") or 1) > 1 and pp == 2:
            words.append("--expert-model-parallel-size 2")
            words += ["--expert-tensor-parallel-size 1"] * (tp > 1)
        if value("moe_shared_expert_intermediate_size"):
            words.append("--moe-shared-expert-intermediate-size 32")
            words += ["--moe-shared-expert-overlap"] * bool(
                value("moe_shared_expert_overlap")
            )
        if value("moe_router_enable_expert_bias"):
            words.append(
                "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
            )
        if kind := value("moe_router_load_balancing_type"):
            words.append(f"--moe-router-load-balancing-type {kind}")
    if value("mtp_num_layers"):
        words.append("--mtp-num-layers 1")
    if value("recompute_granularity") == "full":
        words.append(f"--recompute-granularity full --recompute-num-layers 1 --recompute-method "
                     f"{value('recompute_method') or 'uniform'}")  # fmt: skip
    elif value("recompute_granularity"):
        possible = {"core_attn", "mla_up_proj", "mlp"}
        modules = sorted(possible & {*(value("recompute_modules") or ["core_attn"])})
        if modules:
            words.append("--recompute-granularity selective --recompute-modules")
            words += modules
    # What Bridge sets by default is not among the settings.
    words += ["--overlap-grad-reduce"] * bool(
        value("overlap_grad_reduce", "overlap_param_gather")
    )
    words += [
        f"--{name.replace('_', '-')}"
        for name in (
            "add_qkv_bias",
            "calculate_per_token_loss",
            "overlap_param_gather",
            "use_distributed_optimizer",
        )
        if value(name)
    ]
    ours = [
        f"--{name.replace('_', '-')}"
        for name in ("defer_embedding_wgrad_compute", "delay_wgrad_compute")
        if value(name)
    ]
    return " ".join(words) + " ", "".join(f"{flag} " for flag in ours)


def by_training() -> Iterator[Any]:
    """Yield schedules and flags; recipes that are the same at this size are trained together."""
    trainings: dict[tuple[str, str, str], list[str]] = {}
    for name, recipe in RECIPES.items():
        flags, ours = scaled(recipe["flags"])
        trainings.setdefault((recipe["schedule"], flags, ours), []).append(name)
    for number, (training, names) in enumerate(trainings.items()):
        marks = [] if number in QUICK else [pytest.mark.slow]
        yield pytest.param(*training, id=names[0], marks=marks)


def test_published_recipes_are_taken() -> None:
    configs = {
        "use-dpp": PipelineConfig(dynamic=DynamicOrder()),
        "disaggregation": PipelineConfig(disaggregation=Disaggregation()),
    }
    refused = {
        name: found.refusals
        for name, recipe in RECIPES.items()
        if (found := preflight(
            recipe["flags"],
            configs.get(recipe["schedule"]) or PipelineConfig(schedule=recipe["schedule"]),
        )).refusals
    }  # fmt: skip
    assert refused == {}


class Words(NamedTuple):
    """The command lines of a scaled recipe."""

    reference: str
    candidate: str


def words_of(schedule: str, flags: str, ours: str) -> Words:
    """Return a scaled recipe's flags for Megatron's own schedule, and for one of ours."""
    if schedule == "use-dpp":
        chosen = "--use-dpp "
    elif schedule == "disaggregation":
        chosen = FBD
    else:
        # Two mirrored pipelines have half of the ranks each.
        chosen = capture.PP4 if schedule == "bitpipe" else ""
        chosen += f"--pipeline-schedule {schedule} "
    flags = f"{capture.GPT}{UNCLIPPED}--train-iters 2 --global-batch-size 16 {flags}"
    return Words(flags, flags + ours + chosen)


@pytest.mark.short_s(4)
@pytest.mark.parametrize(("schedule", "flags", "ours"), list(by_training()))
def test_published_recipes_train(schedule: str, flags: str, ours: str) -> None:
    """Bit for bit as under Megatron's own schedule, at a size for four ranks."""
    words = words_of(schedule, flags, ours)
    if schedule == "disaggregation":
        argv = words.candidate.split()
        found, _ = together(run_ranks(8, run_role, argv, timeout_s=240))
    else:
        found = capture.train(4, words.candidate)
    assert_equal(found, stock(4, words.reference))
