"""The flags of schedules, through upstream's parser and validation and the embedded trainer's."""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import devices
from megatron_ext.errors import ArgumentsError, UserError
from megatron_ext.schedules import (
    csv_io,
    generate,
    plan,
    registered,
    transport_flags,
)
from megatron_ext.schedules.choice import Choice, current, use
from megatron_ext.schedules.costs import UNIT, Costs
from megatron_ext.schedules.training_flags import add_flags, check, prepare
from tests.ranks import run_ranks, start_script

MODEL = (
    "--num-layers 16 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 5 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 "
)
PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 16 "
KEPT = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "data_parallel_size",
    "pipeline_model_parallel_layout", "overlap_p2p_comm", "dist_ckpt_optim_fully_reshardable",
    "global_batch_size",
)  # fmt: skip

# The printed command lines of BitPipe's README, paths aside, without the launcher's part.
SEED = (
    "--pipeline-model-parallel-size 8 --enable-bitpipe-schedule {} --lr-decay-style {} "
    "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 "
    "--data-path DATA --vocab-file VOCAB {} --data-impl mmap --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl"
)
BERT = SEED.format(
    "--num-layers 64 --hidden-size 2560 --num-attention-heads 64 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --lr 0.0001 "
    "--train-iters 1000000 --lr-decay-iters 990000",
    "linear",
    "",
)
GPT = SEED.format(
    "--num-layers 96 --hidden-size 3072 --num-attention-heads 32 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --lr 0.00015 "
    "--train-iters 500000 --lr-decay-iters 320000",
    "cosine",
    "--merge-file MERGES",
)


def parse(way: str, model: str, flags: str, world: int) -> Namespace:
    """Parse and validate as a training script does."""
    if way == "embedded":
        from megatron_ext.training.arguments import parse as parse_embedded

        return parse_embedded(model, flags.split(), {"WORLD_SIZE": str(world)})  # type: ignore[arg-type]
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = ["pretrain.py", *flags.split()]
    os.environ.update(RANK="0", WORLD_SIZE=str(world))
    tokenizer = {"gpt": "GPT2BPETokenizer", "bert": "BertWordPieceLowerCase"}[model]
    return validate_args(parse_args(), {"tokenizer_type": tokenizer})


def outcomes(way: str, cases: list[tuple[str, str, int]]) -> list[dict[str, Any] | str]:
    """Return for each (model, flags, world size) what comes of it, or the error."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    found: list[dict[str, Any] | str] = []
    for model, flags, world in cases:
        lines.clear()
        try:
            args = parse(way, model, flags, world)
        except UserError as error:
            found.append(str(error))
            continue
        result = {name: getattr(args, name) for name in KEPT}
        choice = current()
        if choice is not None:
            table = choice.schedule(choice.num_microbatches)
            result.update(rows=table.rows, pp=choice.pp, timeout_s=choice.timeout_s)
        found.append({**result, "chosen": choice is not None, "log": list(lines)})
    return found


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("upstream", marks=pytest.mark.tree)]
)
def way(request: pytest.FixtureRequest) -> str:
    """The two ways to start a training."""
    if request.param == "upstream":
        request.getfixturevalue("megatron_lm_path")
    return str(request.param)


def run(way: str, *cases: tuple[str, int]) -> list[Any]:
    return run_ranks(1, outcomes, way, [("gpt", MODEL + flags, world) for flags, world in cases])[0]


def tables() -> list[tuple[str, Any]]:
    """Flags that plan prints, and the rows of the table that it shows them for."""
    found = []
    for generator in registered().values():
        for variant in generator.variants:
            for costs in (UNIT, Costs(1, 1.2, 0.8, latency=0.1)):
                table = generate(generator.name, 4, 8, costs=costs, **variant)  # type: ignore[arg-type]
                found.append((plan.training_flags(table, costs), table.rows))
    found.append((f"{PP4}--enable-bitpipe-schedule --bitpipe-routing local",
                  generate("bitpipe", 4, 8, routing="local").rows))  # fmt: skip
    return found


def test_the_flags_that_plan_prints_run_what_it_shows(way: str) -> None:
    planned = tables()
    results = run(way, *((f"{flags} --global-batch-size 16", 4) for flags, _ in planned))
    for (flags, rows), result in zip(planned, results, strict=True):
        assert isinstance(result, dict), f"{flags}: {result}"
        assert result["rows"] == rows, flags


RUNNING = (
    "pipeline schedule: bitpipe order=zb on 8 ranks (two mirrored pipelines of 4), 16 "
    "micro-batches: bubble 1.5 (3.0 %), peak 8 activations, simulated for costs 1,1,1; "
    "messages over torch"
)
TOLD: dict[str, tuple[str, int, dict[str, Any]]] = {
    "twins": (
        (
            "--pipeline-model-parallel-size 8 --global-batch-size 32 --enable-bitpipe-schedule "
            "--use-distributed-optimizer --distributed-timeout-minutes 3"
        ),
        8,
        {
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 4,
            "data_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et" + "|t" * 15 + "L",
            "dist_ckpt_optim_fully_reshardable": True,
            "pp": 8,
            "timeout_s": 180.0,
            "log": [RUNNING],
        },
    ),
    "v on two ranks": (
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 16 --pipeline-schedule zb-v "
            "--no-overlap-p2p-communication --pipeline-costs 1,2,1.5,0.25"
        ),
        4,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "data_parallel_size": 2,
            "overlap_p2p_comm": True,
            "pipeline_model_parallel_layout": "Etttt|tttt|tttt|ttttL",
            "pp": 2,
        },
    ),
    "own layout": (
        PP4 + "--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|(ttt|)*4t|t|tL",
        4,
        {
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|(ttt|)*4t|t|tL",
        },
    ),
    "loop": (
        PP4 + "--pipeline-schedule interleaved",
        4,
        {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": None},
    ),
    "loop of layers": (
        PP4 + "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1",
        4,
        {"virtual_pipeline_model_parallel_size": 4},
    ),
    "line": (
        PP4 + "--pipeline-schedule zb-h1",
        4,
        {"virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": None},
    ),
    "megatron's own": (
        PP4 + "--use-distributed-optimizer",
        4,
        {"chosen": False, "log": [], "dist_ckpt_optim_fully_reshardable": False},
    ),
}  # fmt: skip


def test_what_megatron_is_told(way: str) -> None:
    results = run(way, *((flags, world) for flags, world, _ in TOLD.values()))
    for (name, (_, _, wanted)), result in zip(TOLD.items(), results, strict=True):
        assert isinstance(result, dict), f"{name}: {result}"
        assert {key: result[key] for key in wanted} == wanted, name


def test_the_published_command_lines_run_as_printed(way: str) -> None:
    for model, flags, layers in (("bert", BERT, 64), ("gpt", GPT, 96)):
        [[result]] = run_ranks(1, outcomes, way, [(model, flags, 8)])
        assert isinstance(result, dict), result
        assert result["pipeline_model_parallel_size"] == 4
        assert result["pipeline_model_parallel_layout"].count("t") == layers
        assert any("--data-impl mmap is ignored" in line for line in result["log"])


REFUSED = {
    "name": (PP4 + "--pipeline-schedule zb_v", 4, ["no schedule 'zb_v'", "zb-v"]),
    "two names": (PP4 + "--enable-bitpipe-schedule --pipeline-schedule zb-v", 4, ["leave one"]),
    "foreign option": (
        PP4 + "--pipeline-schedule zb-v --bitpipe-order zb", 4,
        ["--bitpipe-order is for bitpipe, and zb-v was chosen"],
    ),
    "option alone": (PP4 + "--bitpipe-order zb", 4, ["none was chosen"]),
    "transport without a pipeline": (
        "--pipeline-transport shm", 1, ["--pipeline-model-parallel-size 1 has none; leave it out"],
    ),
    "transport for other groups": (
        PP4 + "--pipeline-transport shm --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 12", 4,
        ["--pipeline-transport shm with 6 micro-batches", "take 4 or 8 micro-batches"],
    ),
    "addresses without a wire": (
        PP4 + "--node-ips 10.0.0.1", 4, ["--pipeline-transport torch has none; take"],
    ),
    "costs alone": (PP4 + "--pipeline-costs 1,1,1", 4, ["add --pipeline-schedule NAME"]),
    "costs": (
        PP4 + "--pipeline-schedule zb-v --pipeline-costs 1,2", 4,
        ["--pipeline-costs: costs are three numbers", "'1,2'"],
    ),
    "pp 1": ("--pipeline-schedule zb-v", 1, ["needs a pipeline", "take at least 2"]),
    "odd": (
        "--pipeline-model-parallel-size 5 --enable-bitpipe-schedule", 5,
        ["--pipeline-model-parallel-size 5 must be even", "take 4 or 6", "zb-v"],
    ),
    "two mirrored": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe --global-batch-size 16", 2,
        ["at least 4; take 4"],
    ),
    "world": (PP4 + "--enable-bitpipe-schedule", 6, ["world size 6", "pipeline 4", "start 4"]),
    "few": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v --global-batch-size 12", 4,
        ["with 3 micro-batches (--global-batch-size 12 / (--micro-batch-size 2 x 2 data-parallel))",
         "--global-batch-size 16, or --pipeline-schedule v-half for this batch size"],
    ),
    "batch": (
        "--pipeline-model-parallel-size 8 --enable-bitpipe-schedule --global-batch-size 14", 8,
        ["global batch of 14", "2 replicas (two for each mirrored", "--global-batch-size 12 or 16"],
    ),
    "paper": (
        PP4 + "--enable-bitpipe-schedule --bitpipe-order paper --global-batch-size 12", 4,
        ["units of pp = 4, got 6", "--global-batch-size 16, or"],
    ),
    "layers of a v": (
        PP4 + "--pipeline-schedule zb-v --num-layers 12", 4,
        ["12 does not divide into the schedule's 8 stages", "take 8 or 16"],
    ),
    "layers of a loop": (
        PP4 + "--pipeline-schedule interleaved --num-layers 12", 4,
        ["12 layers do not divide into the 8 stages", "--num-layers 8 or 16"],
    ),
    "chunks of a line": (
        PP4 + "--pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2", 4,
        ["has one stage on each rank", "makes 2", "take --pipeline-schedule interleaved"],
    ),
    "chunks of a v": (
        PP4 + "--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 2", 4,
        ["by itself, which excludes --num-layers-per-virtual-pipeline-stage 2"],
    ),
    "one chunk": (
        PP4 + "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 4", 4,
        ["makes 1", "take --pipeline-schedule 1f1b"],
    ),
    "layout": (
        PP4 + "--pipeline-schedule zb-v --pipeline-model-parallel-layout Et*4|t*4|t*4|t*4L", 4,
        ["has 4 stages, but the schedule has 8"],
    ),
    "uneven ends": (
        PP4 + "--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1", 4,
        ["cannot run with --decoder-first", "first and last stage share a rank"],
    ),
    "deferred": (
        PP4 + "--pipeline-schedule zb-h1 --defer-embedding-wgrad-compute", 4,
        ["cannot run with --defer-embedding-wgrad-compute", "use Megatron's own schedule"],
    ),
    "groups": (
        PP4 + "--pipeline-schedule 1f1b --microbatch-group-size-per-virtual-pipeline-stage 4", 4,
        ["the order of micro-batches is part of the schedule"],
    ),
}  # fmt: skip


def test_what_cannot_run_is_refused_with_what_can(way: str) -> None:
    results = run(way, *((flags, world) for flags, world, _ in REFUSED.values()))
    for (name, (_, _, parts)), message in zip(REFUSED.items(), results, strict=True):
        assert isinstance(message, str), f"{name} was accepted"
        assert not [part for part in parts if part not in message], f"{name}: {message}"


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_every_batch_of_a_ramp_up_is_checked() -> None:
    """Only upstream's script ramps up."""
    ramping = "--pipeline-schedule interleaved --rampup-batch-size 4 4 100"
    (message,) = run("upstream", (PP4.replace("16", "32") + ramping, 4))
    assert isinstance(message, str), "was accepted"
    assert "with 2 micro-batches (--global-batch-size 4" in message
    assert "take 4 micro-batches" in message


@pytest.fixture
def args() -> Iterator[Namespace]:
    """Arguments as parsed, enough for a schedule."""
    parser = ArgumentParser()
    add_flags(parser)
    yield Namespace(
        **vars(parser.parse_args([])),
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        world_size=4,
        micro_batch_size=1,
        global_batch_size=8,
        num_layers=8,
    )
    use(None)


def choose(args: Namespace, name: str) -> Choice:
    args.pipeline_schedule = name
    prepare(args)
    choice = current()
    assert choice is not None
    return choice


def test_preparing_again_changes_nothing(args: Namespace) -> None:
    first = choose(args, "zb-h1")
    said = vars(args).copy()
    again = choose(args, "zb-h1")
    assert again == first
    assert vars(args) == said


def test_another_schedule_starts_from_what_was_said(args: Namespace) -> None:
    args.num_layers = 16
    choose(args, "interleaved")
    assert args.num_virtual_stages_per_pipeline_rank == 2
    choose(args, "zb-h1")
    assert args.num_virtual_stages_per_pipeline_rank is None


def test_without_a_schedule_megatrons_own_runs_again(args: Namespace) -> None:
    choose(args, "zb-h1")
    prepare(Namespace())
    assert current() is None
    check(Namespace())


def test_every_step_of_a_ramp_up_has_a_table(args: Namespace) -> None:
    args.global_batch_size, args.rampup_batch_size = 12, ["4", "4", "100"]
    choice = choose(args, "1f1b")
    assert choice.num_microbatches == 12
    args.rampup_batch_size = ["4", "3", "100"]
    with pytest.raises(ArgumentsError, match="does not lead from 4 to the --global-batch-size 12"):
        prepare(args)


@pytest.mark.parametrize(("name", "crossings"), [("bitpipe", 2), ("dualpipe", 0)])
def test_first_and_last_stage_are_of_one_replica(name: str, crossings: int) -> None:
    """Tokens and labels of a micro-batch come from one sampler."""
    placement = Choice(name, 8, 16).placement
    assert len(placement.twin_hops) == crossings


def test_megatron_has_to_agree(args: Namespace) -> None:
    choose(args, "1f1b")
    args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 1, 2
    with pytest.raises(ArgumentsError, match="prepared for 1 chunks, but Megatron made 2"):
        check(args)
    assert current() is None


@pytest.mark.parametrize(
    ("schedule", "refused"), [("zb-h1", True), ("gpipe", False)], ids=["split", "whole"]
)
def test_layers_that_cannot_be_split_are_refused(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, schedule: str, refused: bool
) -> None:
    from megatron_ext.schedules.runtime import te_layers

    monkeypatch.setattr(te_layers, "why_not", lambda args: f"{args.transformer_impl} is too old")
    args.transformer_impl, args.data_parallel_size = "transformer_engine", 1
    choose(args, schedule)
    if not refused:
        check(args)
        return
    with pytest.raises(ArgumentsError, match="but transformer_engine is too old; or take 1f1b"):
        check(args)


@pytest.mark.parametrize(
    ("dest", "value", "schedule"),
    [
        ("cuda_graph_impl", "local", "1f1b"),
        ("enable_cuda_graph", True, "1f1b"),
        ("overlap_moe_expert_parallel_comm", True, "1f1b"),
        ("delay_wgrad_compute", True, "zb-h1"),
        ("fine_grained_activation_offloading", True, "1f1b"),
        ("use_megatron_fsdp", True, "1f1b"),
        ("use_torch_fsdp2", True, "1f1b"),
        ("decoder_num_layers", 4, "1f1b"),
        ("defer_embedding_wgrad_compute", True, "1f1b"),
        ("is_hybrid_model", True, "zb-v"),
        ("account_for_loss_in_pipeline_split", True, "zb-v"),
        ("use_mp_args_from_checkpoint_args", True, "bitpipe"),
    ],
)
def test_features_that_order_computation_are_refused(
    args: Namespace, dest: str, value: object, schedule: str
) -> None:
    setattr(args, dest, value)
    args.pipeline_schedule = schedule
    with pytest.raises(ArgumentsError, match=f"--pipeline-schedule {schedule} cannot run with"):
        prepare(args)


def test_optimizer_instances_are_refused_where_backwards_are_split(args: Namespace) -> None:
    args.num_distributed_optimizer_instances, args.overlap_grad_reduce = 2, True
    choose(args, "1f1b")
    with pytest.raises(ArgumentsError, match="--num-distributed-optimizer-instances > 1"):
        choose(args, "zb-h1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.rsplit("\n", 2)[0] + "\n", "rows"),
        (lambda text: text.replace("3F7,", ""), "3B7 cannot run here: 3F7 has to run before it"),
        (lambda text: text.replace("2F1", "2F1,2F1"), ">>2F1<<"),
        (lambda text: text.replace("0F2", "0F2x"), "'0F2x' is not an action"),
        (lambda text: text.replace("1F0,1F1,1F2", "1B0,1F0,1F1,1F2", 1), ">>1B0<<"),
    ],
    ids=["truncated", "missing", "duplicated", "no action", "early"],
)  # fmt: skip
def test_a_bad_file_is_shown_with_its_row(
    args: Namespace, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(damage(csv_io.dumps(generate("1f1b", 4, 8)).replace("\r", "")))
    with pytest.raises(UserError) as caught:
        choose(args, f"csv:{path}")
    assert message in str(caught.value)


def test_a_file_of_another_size_says_which_flags_fit(args: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(csv_io.dumps(generate("zb-h1", 4, 6)))
    with pytest.raises(UserError, match=r"runs 6 micro-batches, not 8 .* --global-batch-size 6,"):
        choose(args, f"csv:{path}")
    args.global_batch_size = 6
    assert choose(args, f"csv:{path}").schedule(6).rows == generate("zb-h1", 4, 6).rows
    args.pipeline_model_parallel_size = args.world_size = 2  # what was changed since is not undone
    with pytest.raises(UserError, match="take --pipeline-model-parallel-size 4"):
        choose(args, f"csv:{path}")


def test_ranks_that_wait_in_a_circle_are_shown(args: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    args.pipeline_model_parallel_size = args.world_size = args.global_batch_size = 2
    with pytest.raises(UserError, match="the order of the ranks is cyclic"):
        choose(args, f"csv:{path}")


def test_mistakes_end_in_one_line(way: str) -> None:
    flags = MODEL + "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe-v"
    run = start_script(2, "pretrain_gpt.py", flags.split(), embedded=way == "embedded")
    assert run.exit_codes == [2, 2], run.describe()
    assert "Traceback" not in "".join(run.logs)
    [line] = [
        line for log in run.logs for line in log.splitlines() if "megatron_ext: error" in line
    ]
    assert "--pipeline-schedule dualpipe-v with 1 micro-batches" in line


def test_auto_leaves_the_devices_of_one_host_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(world_size: int = 2, **asked: Any) -> str:
        return transport_flags.transport(Namespace(world_size=world_size, **asked))

    caplog.set_level("INFO", logger="megatron_ext")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert chosen(pipeline_transport="auto") == "auto"  # on the CPU
    monkeypatch.setattr(devices, "current", lambda: SimpleNamespace(reaches_peers=True))
    assert chosen(pipeline_transport="shm") == "shm"
    assert chosen(pipeline_transport="auto", use_dpp=True) == chosen(use_dpp=True) == "auto"
    assert chosen(4, pipeline_transport="auto") == "auto"  # on two hosts
    assert not caplog.records
    assert chosen(pipeline_transport="auto") == chosen() == "torch"
    [told] = caplog.messages
    assert told.startswith("--pipeline-transport auto: torch.distributed")
