"""Flags that contradict each other, and numbers of processes, are refused with what would work."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

import pytest

from megatron_ext.config import active
from megatron_ext.config.entrances import prepare
from megatron_ext.config.incompatible import RULES, refusals
from megatron_ext.errors import ArgumentsError
from tests.ranks import parse
from tests.runtime.capture import GPT, PP2

FBD = "--forward-backward-disaggregating "
MERGED = FBD + "--ignore-forward-tensor-parallel "
MOE = "--num-experts 4 --swiglu --disable-bias-linear "
MTP = "--mtp-num-layers 1 --position-embedding-type rope "
SHIP = (
    "--fbd-activations ship --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 "
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "


@pytest.mark.parametrize(
    ("flags", "world", "rule"),
    [
        (FBD + PP2, 6, ("needs 2 x TP x PP = 2 x 1 x 2 = 4 for each replica of the model (an even "
         "data-parallel size, which it halves); start 4 or 8 processes")),
        (MERGED + PP2 + TP2, 8, ("(TP + 1) x PP = (2 + 1) x 2 = 6 for each replica of the model; "
         "start 6 or 12 processes")),
        (FBD + PP2 + "--pipeline-schedule zb-h1", 4, "it has its own schedule"),
        (FBD + PP2 + "--pipeline-device-path ipc", 4, "go through the host; remove it"),
        (FBD + PP2 + "--enable-bitpipe-schedule", 4, "it has its own schedule"),
        (MERGED + TP2 + MOE, 3, "expert shards are not merged"),
        (FBD + PP2 + "--fbd-activations ship", 4, "add --recompute-granularity full"),
        (FBD + PP2 + SHIP + MTP, 4, "but not those of multi-token prediction"),
        (MERGED + PP2 + TP2 + "--hidden-dropout 0.1", 6, "different masks than a stage's shards"),
        ("--ignore-forward-tensor-parallel", 1, "-disaggregating; add --forward-backward"),
        ("--fbd-activations ship", 1, "-disaggregating; add --forward-backward"),
        (FBD + PP2 + "--fbd-forward-device cpu", 4, "was removed; remove it"),
        ("--pipeline-schedule fbd " + PP2, 2, "use --forward-backward-disaggregating"),
    ],
)  # fmt: skip
def test_what_is_refused(flags: str, world: int, rule: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        parse("gpt", (GPT + flags).split(), {"WORLD_SIZE": str(world)})
    assert rule in str(caught.value)
    assert active.job() is None


@pytest.mark.parametrize(
    ("flags", "recomputes"),
    [
        ("", False),
        ("--recompute-granularity selective", False),
        ("--recompute-granularity selective --recompute-modules moe", True),
        ("--recompute-activations --recompute-modules moe", True),
        ("--moe-layer-recompute", True),
    ],
)
def test_forwards_order_experts_as_recomputed_layers_do(
    flags: str, recomputes: bool
) -> None:
    """Megatron turns the deprecated flags into recomputation after our flags are read."""
    parse("gpt", (GPT + FBD + PP2 + MOE + flags).split(), {"WORLD_SIZE": "4"})
    job = active.job()
    assert job is not None
    assert job.recomputes_routers is recomputes


@pytest.mark.parametrize(
    "cut",
    [
        "--num-layers-per-virtual-pipeline-stage 1",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-layout Et|t|t|tL",
    ],
)
def test_each_rank_has_one_stage(cut: str, caplog: pytest.LogCaptureFixture) -> None:
    args = parse("gpt", (GPT + FBD + PP2 + cut).split(), {"WORLD_SIZE": "4"})
    assert args.virtual_pipeline_model_parallel_size is None
    assert args.pipeline_model_parallel_layout == "Ett|ttL"
    instead = cut.split(maxsplit=1)[0]
    assert (
        f"--pipeline-model-parallel-layout 'Ett|ttL' in place of {instead}"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("dest", "value", "rule"),
    [
        (
            "rerun_mode",
            "report_stats",
            "--rerun-mode report_stats: it reruns each step",
        ),
        (
            "error_injection_rate",
            5,
            "--error-injection-rate: injected errors are found by rerunning",
        ),
        (
            "freeze_all_layers",
            True,
            "backward ranks have nothing to do; remove one of them",
        ),
        ("moe_use_upcycling", True, "forward ranks neither load nor save checkpoints"),
        (
            "full_validation",
            True,
            "backward ranks do not read the validation data; remove them",
        ),
        ("use_torch_fsdp2", True, "use --use-distributed-optimizer instead"),
    ],
)
def test_what_upstreams_flags_can_ask_for_is_refused(
    dest: str, value: object, rule: str
) -> None:
    args = parse("gpt", (GPT + PP2).split(), {"WORLD_SIZE": "4"})
    args.forward_backward_disaggregating = True
    setattr(args, dest, value)
    with pytest.raises(ArgumentsError, match=rule):
        prepare(args)
    assert active.job() is None


def test_each_role_is_an_ordinary_job() -> None:
    """The flags describe four replicas, so there are two; each micro-batch has 2 of 8 samples."""
    flags = (
        GPT + FBD + PP2 + "--use-distributed-optimizer --save x --save-interval 1"
    ).split()
    found = []
    for rank in range(8):
        args = parse("gpt", flags, {"WORLD_SIZE": "8", "RANK": str(rank)})
        found.append((args.rank, args.world_size, args.data_parallel_size, args.save))
    assert [rank for rank, *_ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(world, replicas) for _, world, replicas, _ in found} == {(4, 2)}
    assert [save for *_, save in found] == [None, "x"] * 4


def test_forward_ranks_have_an_optimizer_of_nothing() -> None:
    """Megatron configures one there, too, and takes these with the distributed optimizer only."""
    flags = (
        f"{GPT}{FBD}{PP2}--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
        "--use-precision-aware-optimizer --optimizer-cpu-offload --exp-avg-dtype bf16 --bf16 "
    )
    args = parse("gpt", flags.split(), {"WORLD_SIZE": "8"})
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in fields(OptimizerConfig)}
    OptimizerConfig(
        **{name: value for name, value in vars(args).items() if name in names}
    )
    assert args.num_distributed_optimizer_instances == 1


@pytest.mark.parametrize(("optimizer", "shares"), [("adam", True), ("muon", False)])
def test_replicas_send_shards_if_they_have_equal_ones(
    optimizer: str, shares: bool
) -> None:
    flags = f"{GPT}{PP2}--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
    args = parse("gpt", flags.split(), {"WORLD_SIZE": "8"})
    args.forward_backward_disaggregating, args.optimizer = True, optimizer
    prepare(args)
    job = active.job()
    assert job is not None
    assert job.shares_weights is shares


def test_one_process_instead_of_two_shards() -> None:
    flags = (GPT + MERGED + PP2 + TP2).split()
    args = parse("gpt", flags, {"WORLD_SIZE": "6", "RANK": "3"})
    assert (args.rank, args.world_size, args.tensor_model_parallel_size) == (1, 2, 1)
    assert not args.sequence_parallel
    args = parse("gpt", flags, {"WORLD_SIZE": "6", "RANK": "5"})
    assert (args.rank, args.world_size, args.tensor_model_parallel_size) == (3, 4, 2)


def test_the_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    parse("gpt", (GPT + FBD + PP2).split(), {"WORLD_SIZE": "4"})
    assert (
        "pipeline schedule: fbd activations=recompute on 4 processes: 2 forward and 2 backward "
        "ranks, 1 replica(s), 4 micro-batches: makespan 15 forward passes of one stage"
        in caplog.text
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_what_depends_on_a_dropped_setting_is_dropped_too(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Forward ranks write no files, so have no place for profiles; they recompute nothing."""
    args = parse("gpt", (GPT + PP2).split(), {"WORLD_SIZE": "4"})
    vars(args).update(
        forward_backward_disaggregating=True,
        rank=rank,
        profile=True,
        use_pytorch_profiler=True,
        tensorboard_dir="tensorboard",
        logits_save_dir="logits",
        recompute_granularity="full",
        recompute_method="uniform",
        distribute_saved_activations=True,
    )
    prepare(args)
    job = active.job()
    assert job is not None
    is_backward = job.role == "backward"
    assert args.profile is is_backward
    assert args.distribute_saved_activations is is_backward
    assert args.tensorboard_dir == ("tensorboard" if is_backward else None)
    assert args.logits_save_dir == ("logits" if is_backward else None)
    assert ("profiles backward ranks only" in caplog.text) is (rank == 0)


@pytest.mark.parametrize(
    "name", ["hybrid_context_parallel", "dynamic_context_parallel"]
)
def test_both_names_of_hybrid_context_parallelism_are_refused(name: str) -> None:
    """Megatron's dev branch has the second."""
    [refusal] = refusals(FBD.strip(), Namespace(**{name: True}), RULES["roles"])
    assert refusal.reason.endswith("Megatron runs its own schedule for it")
