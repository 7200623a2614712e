"""The unmodified scripts train under every schedule, with the losses of Megatron's own."""

from __future__ import annotations

import re

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream.flag_list import megatron_flags
from tests.training.helpers import bert_flags, report, train
from tests.upstream_script.runs import GPT, run, save_start

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "
EVERY = [
    *(
        PP2 + f"--pipeline-schedule {name} "
        for name in ("1f1b", "gpipe", "zb-h1", "interleaved")
    ),
    *(
        PP2 + f"--pipeline-schedule {name} "
        for name in ("zb-v", "v-half", "dualpipe-v")
    ),
    PP2 + "--pipeline-schedule interleaved --use-dpp ",
    PP4 + "--pipeline-schedule dualpipe ",
    PP4 + "--enable-bitpipe-schedule ",
    PP4 + "--enable-bitpipe-schedule --bitpipe-order paper --bitpipe-routing local ",
]
ZB_V = PP2 + "--pipeline-schedule zb-v "
PATIENT = PP2 + "--pipeline-schedule zb-h1 --use-dpp --dpp-extra-activations 0 "
"""Ranks wait for the head of this table (patience.py), which shows in nothing but time."""
# All on four ranks with two replicas. The norm that clips is added up rank by rank.
SAME = "--num-layers 8 --global-batch-size 16 --clip-grad 0 --train-iters 2 "


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    start = save_start(tmp_path_factory.mktemp("schedules") / "start", GPT + SAME)
    return start, report(run(4, start + PP2))


@pytest.mark.parametrize("schedule", [ZB_V, PATIENT])
def test_the_log_says_what_runs_and_how_it_went(
    gpt: tuple[str, list[str]], schedule: str
) -> None:
    start, stock = gpt
    ended = run(4, start + schedule)
    assert report(ended) == stock
    said = re.findall(r"pipeline schedule: (.*)", "".join(ended.logs))
    assert len(said) == 2, "what runs, and how it went"
    assert ("dynamic order by hint" in said[0]) == ("--use-dpp" in schedule)
    assert re.search(
        r"measured over 2 steps: .* % of actions out of order, .* % of the time",
        said[1],
    )


@pytest.mark.parametrize(
    "schedule",
    [
        PP2 + "--pipeline-schedule interleaved --pipeline-balance pack ",
        PP4 + "--enable-bitpipe-schedule --pipeline-balance order ",
    ],
)
def test_equal_lengths_keep_their_place(
    gpt: tuple[str, list[str]], schedule: str
) -> None:
    start, stock = gpt
    assert report(run(4, start + schedule)) == stock


@pytest.mark.parametrize(
    "align", ["", "--no-align-grad-reduce "], ids=["aligned", "free"]
)
@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved", "zb-h1", "zb-v", "1f1b --use-dpp"]
)
def test_reductions_of_buckets(
    gpt: tuple[str, list[str]], name: str, align: str
) -> None:
    start, stock = gpt
    flags = PP2 + "--overlap-grad-reduce --ddp-num-buckets 4 " + align
    assert report(run(4, f"{start}{flags}--pipeline-schedule {name} ")) == stock


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved --use-dpp"])
def test_training_with_all_layers_frozen(
    gpt: tuple[str, list[str]], schedule: str
) -> None:
    """From 0.20 on such a step is forward only, and yet no evaluation."""
    destinations = {flag.dest for flag in megatron_flags()}
    if "freeze_all_layers" not in destinations:
        pytest.skip("this release of Megatron cannot freeze all layers")
    start, _ = gpt
    frozen = start + PP2 + "--freeze-all-layers "
    assert report(run(4, f"{frozen}--pipeline-schedule {schedule} ")) == report(
        run(4, frozen)
    )


@pytest.mark.parametrize("schedule", ["", "--num-layers-per-virtual-pipeline-stage 2 "])
def test_own_schedules_over_shared_memory(
    gpt: tuple[str, list[str]], schedule: str
) -> None:
    start, stock = gpt
    ended = run(4, start + PP2 + schedule + "--pipeline-transport shm ")
    assert report(ended) == stock
    assert "pipeline schedule: Megatron's own; messages over shm" in "".join(ended.logs)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    directory = tmp_path_factory.mktemp("bert")
    flags = bert_flags(directory) + SAME + "--hidden-dropout 0 --attention-dropout 0 "
    saving = f"--train-iters 1 --lr-warmup-iters 0 --save {directory}/start --save-interval 1 "
    saved = f"{flags}{saving}--no-save-optim --no-save-rng "
    report(train(1, saved, script="pretrain_bert.py"))
    start = f"{flags}--load {directory}/start --finetune "
    stock = report(train(4, start + PP2, script="pretrain_bert.py"))
    assert any("sop loss" in line for line in stock)
    return start, stock


@pytest.mark.parametrize("schedule", EVERY)
def test_bert(bert: tuple[str, list[str]], schedule: str) -> None:
    start, stock = bert
    assert report(train(4, start + schedule, script="pretrain_bert.py")) == stock


RAMP = "--rampup-batch-size 4 4 16 --global-batch-size 12 --train-samples 45 "


@pytest.mark.slow
@pytest.mark.skipif(
    (releases.installed_release() or (0, 18)) >= (0, 18),
    reason="Megatron ignores --rampup-batch-size from 0.18 on (tests/runtime/test_recipes.py)",
)
def test_a_batch_that_grows_in_a_dynamic_order() -> None:
    """With 2, then 4, then 6 micro-batches, each of which has a table; 5 samples are left over."""
    flags = GPT.replace("--train-iters 5 ", "") + PP2 + RAMP
    dynamic, stock = (run(2, flags + order) for order in ("--use-dpp ", ""))
    assert "1f1b on 2 ranks, 6 micro-batches: dynamic order" in "".join(dynamic.logs)
    lines = report(dynamic)
    assert lines == report(stock)
    sizes = [
        int(size)
        for line in lines
        for size in re.findall(r"global batch size: +(\d+)", line)
    ]
    assert sizes == [4, 4, 8, 12, 12]
