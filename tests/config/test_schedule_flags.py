"""The flags of schedules, through upstream's parser and validation."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import preflight
from megatron_ext.config import active
from megatron_ext.config.flags import FLAGS, parse_words
from megatron_ext.config.incompatible import RULES, refusals
from megatron_ext.errors import UserError
from megatron_ext.schedules import generate, registered
from megatron_ext.schedules.comparison import training_flags
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.costs import UNIT, Costs
from tests.ranks import parse, require_training, run_ranks, start_script
from tests.training.helpers import errors

MODEL = (
    "--num-layers 16 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 5 --eval-interval 5 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
)
PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 16 "
KEPT = (
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "data_parallel_size",
    "pipeline_model_parallel_layout", "overlap_p2p_comm", "dist_ckpt_optim_fully_reshardable",
    "global_batch_size", "disable_parameter_transpose_cache", "variable_seq_lengths",
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


def outcomes(cases: list[tuple[str, str, int]]) -> list[dict[str, Any] | str]:
    """Return for each (model, flags, world size) what comes of it, or the error."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    found: list[dict[str, Any] | str] = []
    for model, flags, world in cases:
        lines.clear()
        try:
            args = parse(model, flags.split(), {"WORLD_SIZE": str(world)})
        except UserError as error:
            found.append(str(error))
            continue
        result = {name: getattr(args, name, None) for name in KEPT}
        pipeline = active.pipeline()
        if pipeline is not None:
            rows, timeout_s = pipeline.full.rows, pipeline.timeout_s
            result.update(rows=rows, pp=pipeline.pp, timeout_s=timeout_s)
        found.append({**result, "chosen": pipeline is not None, "log": list(lines)})
    return found


def run(*cases: tuple[str, int]) -> list[Any]:
    require_training()
    return run_ranks(
        1, outcomes, [("gpt", MODEL + flags, world) for flags, world in cases]
    )[0]


def tables() -> list[tuple[str, Any]]:
    """Flags that plan prints, and the rows of the table that it shows them for."""
    found = []
    for generator in registered().values():
        for variant in generator.variants:
            for costs in (UNIT, Costs(1, 1.2, 0.8, latency=0.1)):
                table = generate(generator.name, 4, 8, costs=costs, **variant)  # type: ignore[arg-type]
                found.append((training_flags(table, costs), table.rows))
    found.append((f"{PP4}--enable-bitpipe-schedule --bitpipe-routing local",
                  generate("bitpipe", 4, 8, routing="local").rows))  # fmt: skip
    return found


def test_the_flags_that_plan_prints_run_what_it_shows() -> None:
    planned = tables()
    results = run(*((f"{flags} --global-batch-size 16", 4) for flags, _ in planned))
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
    "layers of a v": (
        PP4 + "--pipeline-schedule zb-v --num-layers 12",
        4,
        {"pipeline_model_parallel_layout": "Ett|tt|tt|tt|t|t|t|tL"},
    ),
    "layers of a loop": (
        PP4 + "--pipeline-schedule interleaved --num-layers 12",
        4,
        {
            "pipeline_model_parallel_layout": "Et|t|tt|tt|tt|tt|t|tL",
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "chunks of a line": (
        PP4 + "--pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2",
        4,
        {
            "pipeline_model_parallel_layout": "Etttt|tttt|tttt|ttttL",
            "virtual_pipeline_model_parallel_size": None,
        },
    ),
    "layers of a chunk of a v": (
        PP4 + "--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 4",
        4,
        {
            "pipeline_model_parallel_layout": "E" + "|".join(["tt"] * 8) + "L",
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "one chunk": (
        PP4 + "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 4",
        4,
        {"virtual_pipeline_model_parallel_size": 2},
    ),
    "ends": (
        PP4 + "--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 3",
        4,
        {"pipeline_model_parallel_layout": "E|ttt|ttt|ttt|ttt|tt|tt|L"},
    ),
    "embedding and loss": (
        PP4 + "--pipeline-schedule zb-v --num-layers 14 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        4,
        {"pipeline_model_parallel_layout": "Et|tt|tt|tt|tt|tt|tt|tL"},
    ),
    "layout of more stages": (
        PP4 + "--pipeline-schedule zb-v --num-layers 29 --pipeline-model-parallel-layout "
        "Et|(tt|)*14L",
        4,
        {"pipeline_model_parallel_layout": "Ettt|tttt|tttt|tttt|tttt|tttt|tttt|ttL"},
    ),
    "groups": (
        PP4 + "--pipeline-schedule 1f1b --microbatch-group-size-per-virtual-pipeline-stage 8",
        4,
        {"virtual_pipeline_model_parallel_size": None},
    ),
    "line": (
        PP4 + "--pipeline-schedule zb-h1",
        4,
        {"virtual_pipeline_model_parallel_size": None, "pipeline_model_parallel_layout": None},
    ),
    "slices": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slices 4",
        4,
        # Else layers of Transformer Engine that fuse it would lose gradients.
        {"disable_parameter_transpose_cache": True},
    ),
    "slices by length": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slice-tokens 8 --pipeline-balance pack "
        "--variable-seq-lengths",
        4,
        {"disable_parameter_transpose_cache": True, "variable_seq_lengths": True},
    ),
    "slices whose length follows from each step": (
        PP4 + "--pipeline-schedule zb-v --pipeline-slice-tokens auto --sequence-parallel "
        "--tensor-model-parallel-size 2",
        8,
        {"disable_parameter_transpose_cache": True},
    ),
    "a checkpoint that is converted": (
        PP4 + "--pipeline-schedule zb-v --use-distributed-optimizer --ckpt-format torch "
        "--ckpt-convert-format torch_dist --ckpt-convert-save D --load D",
        4,
        {"dist_ckpt_optim_fully_reshardable": True},
    ),
    "megatron's own": (
        PP4 + "--use-distributed-optimizer",
        4,
        {"chosen": False, "log": [], "dist_ckpt_optim_fully_reshardable": False},
    ),
}  # fmt: skip


def test_local_checkpoints_keep_their_form() -> None:
    """Megatron would end at the first one; it needs a package of NVIDIA's to take the flags."""
    words = f"{PP4}{MODEL}--pipeline-schedule zb-h1 "
    words += "--use-distributed-optimizer --non-persistent-ckpt-type "
    for kind, set_by_us in (("local", False), ("global", True)):
        found = preflight((words + kind).split(), world_size=4)
        assert found.accepted, found.refusals
        assert ("dist_ckpt_optim_fully_reshardable" in found.arguments) == set_by_us


def test_what_megatron_is_told() -> None:
    results = run(*((flags, world) for flags, world, _ in TOLD.values()))
    for (name, (_, _, wanted)), result in zip(TOLD.items(), results, strict=True):
        assert isinstance(result, dict), f"{name}: {result}"
        assert {key: result[key] for key in wanted} == wanted, name


def test_the_published_command_lines_run_as_printed() -> None:
    for model, flags, layers in (("bert", BERT, 64), ("gpt", GPT, 96)):
        require_training()
        [[result]] = run_ranks(1, outcomes, [(model, flags, 8)])
        assert isinstance(result, dict), result
        assert result["pipeline_model_parallel_size"] == 4
        assert result["pipeline_model_parallel_layout"].count("t") == layers
        assert any("--data-impl mmap is ignored" in line for line in result["log"])


REFUSED = {
    "name": (PP4 + "--pipeline-schedule zb_v", 4, ["no schedule 'zb_v'", "zb-v"]),
    "two names": (PP4 + "--enable-bitpipe-schedule --pipeline-schedule zb-v", 4, ["remove one"]),
    "foreign option": (
        PP4 + "--pipeline-schedule zb-v --bitpipe-order zb", 4,
        ["--bitpipe-order is an option of bitpipe, but zb-v was chosen"],
    ),
    "option alone": (PP4 + "--bitpipe-order zb", 4, ["none was chosen"]),
    "transport without a pipeline": (
        "--pipeline-transport shm", 1, ["-size 1 has only one; remove it"],
    ),
    "transport for other groups": (
        PP4 + "--pipeline-transport shm --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 12", 4,
        ["--pipeline-transport shm with 6 micro-batches (--global-batch-size 12 / (",
         "use --global-batch-size 8 or 16, or --pipeline-schedule interleaved"],
    ),
    "addresses without a wire": (
        PP4 + "--node-ips 10.0.0.1", 4, ["--pipeline-transport torch has none; use"],
    ),
    "costs alone": (PP4 + "--pipeline-costs 1,1,1", 4, ["add --pipeline-schedule NAME"]),
    "costs": (
        PP4 + "--pipeline-schedule zb-v --pipeline-costs 1,2", 4,
        ["--pipeline-costs: costs must be three numbers", "'1,2'"],
    ),
    "length costs": (
        PP4 + "--pipeline-schedule zb-v --pipeline-balance pack --pipeline-length-costs 1", 4,
        ["--pipeline-length-costs: the cost of a length must be two numbers A,B"],
    ),
    "length costs alone": (
        PP4 + "--pipeline-schedule zb-v --pipeline-length-costs 1,2", 4,
        ["--pipeline-length-costs requires --pipeline-balance, --pipeline-slices or", "; add"],
    ),
    "pp 1": ("--pipeline-schedule zb-v", 1, ["zb-v needs a pipeline", "use --pipeline-model-"]),
    "pp 1, bitpipe": ("--enable-bitpipe-schedule", 1, ["bitpipe-schedule needs a pipeline"]),
    "odd": (
        "--pipeline-model-parallel-size 5 --enable-bitpipe-schedule", 5,
        ["--pipeline-model-parallel-size 5 must be even", "4 or 6, or --pipeline-schedule zb-v"],
    ),
    "two mirrored": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipe --global-batch-size 16", 2,
        ["at least 4; use --pipeline-model-parallel-size 4"],
    ),
    "world": (PP4 + "--enable-bitpipe-schedule", 6, ["world size 6", "pipeline 4", "start 4"]),
    "batch": (
        "--pipeline-model-parallel-size 8 --enable-bitpipe-schedule --global-batch-size 14", 8,
        ["global batch of 14", "2 replicas (two for each mirrored", "--global-batch-size 12 or 16"],
    ),
    "shared out experts": (
        PP4 + "--pipeline-schedule 1f1b --pipeline-balance pack --num-experts 4 "
        "--moe-router-load-balancing-type global_aux_loss", 4,
        ["--pipeline-balance pack cannot run with --moe-router-load-balancing-type global_aux_loss",
         "use --moe-router-load-balancing-type aux_loss or seq_aux_loss"],
    ),
    **{
        f"slices with {flags}": (
            PP4 + f"--pipeline-schedule zb-h1 --pipeline-slices 4 {flags}", 4,
            [f"--pipeline-slices 4 cannot run with {refused}", remedy],
        )
        for flags, refused, remedy in [
            ("--moe-expert-capacity-factor 1", "--moe-expert-capacity-factor: experts",
             "remove it"),
            ("--moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type other",
             "use --moe-router-load-balancing-type aux_loss"),
            ("--window-size 4,0", "--window-size: Megatron's sliding-window mask",
             "remove --pipeline-slices"),
            ("--reset-attention-mask --tensor-model-parallel-size 2",
             "--reset-attention-mask and", "remove one of them"),
            ("--pipeline-balance order", "--pipeline-balance: it cuts all micro-batches alike",
             "use --pipeline-slice-tokens 4096 without --pipeline-slices, or remove one of"),
            ("--variable-seq-lengths", "--variable-seq-lengths: it cuts all micro-batches alike",
             "use --pipeline-slice-tokens 4096 without --pipeline-slices, or remove one of"),
        ]
    },
    "slices by length with windows": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slice-tokens 8 --window-size 4,0", 4,
        ["--pipeline-slice-tokens 8 cannot run with --window-size",
         "remove --pipeline-slice-tokens"],
    ),
    "slices by length of mirrored pipelines": (
        PP4 + "--pipeline-schedule bitpipe --pipeline-slice-tokens 8", 4,
        ["--pipeline-schedule bitpipe cannot generate; use --pipeline-schedule zb-h1, or one of"],
    ),
    "slices by length that ranks cannot divide": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slice-tokens 1 --sequence-parallel "
        "--tensor-model-parallel-size 2", 8,
        ["--pipeline-slice-tokens 1: 2 tensor-parallel ranks", "use --pipeline-slice-tokens 2"],
    ),
    "slices of Megatron's schedule": (
        PP4 + "--pipeline-slices 4", 4,
        ["--pipeline-slices 4 requires one of this package's schedules;",
         "add --pipeline-schedule NAME"],
    ),
    "a layout for Megatron's schedule": (
        PP4 + "--pipeline-layout auto", 4,
        ["--pipeline-layout auto requires one of this package's schedules;",
         "add --pipeline-schedule NAME"],
    ),
    "two layouts": (
        PP4 + "--pipeline-schedule 1f1b --pipeline-layout auto "
        "--pipeline-model-parallel-layout Etttt|tttt|tttt|ttttL", 4,
        ["--pipeline-layout auto cuts the layers, and so does", "remove one of them"],
    ),
    "slices without end": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slices 65", 4,
        ["--pipeline-slices 65: a micro-batch has 1 to 64 slices; use --pipeline-slices 4"],
    ),
    "slices without a token": (
        PP4 + "--pipeline-schedule zb-h1 --pipeline-slices 40", 4,
        ["a sequence of 32 tokens cannot be cut into 40 slices", "use fewer (--pipeline-slices)"],
    ),
    "slices of mirrored roles": (
        PP4 + "--forward-backward-disaggregating --pipeline-slices 4", 8,
        ["cannot run with --forward-backward-disaggregating: its tables have no slices; remove"],
    ),
    "balance of Megatron's schedule": (
        PP4 + "--pipeline-balance pack", 4,
        ["--pipeline-balance pack requires one of this package's schedules;",
         "add --pipeline-schedule NAME"],
    ),
}  # fmt: skip


def test_what_cannot_run_is_refused_with_what_can() -> None:
    results = run(*((flags, world) for flags, world, _ in REFUSED.values()))
    for (name, (_, _, parts)), message in zip(REFUSED.items(), results, strict=True):
        assert isinstance(message, str), f"{name} was accepted"
        assert not [part for part in parts if part not in message], f"{name}: {message}"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"masked_softmax_fusion": True, "bf16": True, "transformer_impl": "local"},
            "--no-masked-softmax-fusion",
        ),
        (
            {"transformer_impl": "inference_optimized"},
            "use --transformer-impl local or",
        ),
        ({"mtp_num_layers": 1, "mtp_use_repeated_layer": True}, "remove it"),
        ({"context_parallel_size": 2}, "remove it"),
        ({"hybrid_layer_pattern": "M*"}, "remove --pipeline-slices"),
        ({"experimental_attention_variant": "dsa"}, "remove --pipeline-slices"),
        ({"sft": True, "micro_batch_size": 2}, "use --micro-batch-size 1"),
        ({"fp8": "hybrid"}, "use --bf16 instead"),
    ],
)
def test_slices_refuse_what_the_cpu_corrects_or_lacks(
    settings: dict[str, object], remedy: str
) -> None:
    [refusal] = refusals("slices 4", Namespace(**settings), RULES["slices"])
    assert remedy in refusal.remedy
    fine = {
        "masked_softmax_fusion": True,
        "apply_rope_fusion": True,
        "transformer_impl": "local",
    }
    sizes = {"context_parallel_size": 1, "tensor_model_parallel_size": 1, "bf16": False}
    assert refusals("slices 4", Namespace(**fine, **sizes), RULES["slices"]) == []


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_every_batch_of_a_ramp_up_is_checked(tmp_path: Path) -> None:
    """Only upstream's script ramps up."""
    sizes = PP4.replace("16", "32") + "--train-samples 400 --rampup-batch-size 4 4 100 "
    table = tmp_path / "table.csv"
    table.write_text(table_files.csv_text(generate("1f1b", 4, 16)))
    model = MODEL.replace("--train-iters 5 ", "")
    accepted, message = run_ranks(
        1, outcomes,
        [("gpt", f"{model}{sizes}--pipeline-schedule {name}", 4)
         for name in ("interleaved", f"csv:{table}")],
    )[0]  # fmt: skip
    assert not isinstance(accepted, str), accepted
    assert isinstance(message, str), "was accepted"
    assert "not 2 micro-batches (--global-batch-size 4" in message


def test_mistakes_end_in_one_line() -> None:
    flags = (
        MODEL
        + "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 5 "
    )
    flags += "--pipeline-model-parallel-layout Et|t|t|tL"
    run = start_script(2, "pretrain_gpt.py", flags.split())
    [line] = set(errors(run))
    assert "t 5 times (--num-layers)" in line


@pytest.mark.parametrize(("value", "expected"), [("", "auto"), (" 3", 3), (" 0", 0)])
def test_waiting_weights_without_a_number_are_automatic(
    value: str, expected: int | str
) -> None:
    words = f"--pipeline-waiting-weights{value} --pipeline-schedule zb-h1"
    parsed = parse_words(words.split(), FLAGS)
    assert parsed.pipeline_waiting_weights == expected
    assert parsed.pipeline_schedule == "zb-h1"
