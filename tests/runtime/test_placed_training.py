"""Pipelines that end on the rank where they began train, log and resume as Megatron's own do.

Runs start from one checkpoint: what a rank draws for its layers depends on the rank. Gradients are
not clipped, because their norm is added up rank by rank, in another order for another placement.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runtime import capture
from tests.runtime.capture import GPT
from tests.training.helpers import MLA, MOCK, MOE, NO_DROPOUT, report, train
from tests.training.helpers import errors as user_errors

PP2 = "--pipeline-model-parallel-size 2 "
ZB_V = PP2 + "--pipeline-schedule zb-v "
BITPIPE = "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule "
EXACT = NO_DROPOUT + "--clip-grad 0 --split 80,10,10 "
EIGHT_LAYERS = "--num-layers 8 "
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable "
TWO_MTP = MLA.replace("--mtp-num-layers 1", "--mtp-num-layers 2")


def start_from(directory: Path, flags: str, script: str = "pretrain_gpt.py") -> str:
    """Save what one process draws; return the flags that start any run from it."""
    saving = f"{flags} --train-iters 1 --lr-warmup-iters 0 --eval-iters 0 "
    ended = train(1, f"{saving} --save {directory} --save-interval 1", script=script)
    assert ended.exit_codes == [0], ended.describe()
    return f"{flags} --load {directory} --finetune "


@pytest.mark.parametrize(
    ("num_ranks", "flags", "theirs", "ours"),
    [
        pytest.param(2, MOCK, PP2, ZB_V, id="tied"),
        pytest.param(2, MOCK + MOE + TWO_MTP, PP2, ZB_V, id="moe-two-mtp-layers"),
        pytest.param(
            4,
            MOCK + "--bf16 --calculate-per-token-loss " + SHARDED,
            PP2,
            ZB_V,
            id="bf16-per-token-sharded",
        ),
        pytest.param(
            4,
            MOCK,
            PP2 + "--tensor-model-parallel-size 2 --sequence-parallel",
            ZB_V + "--tensor-model-parallel-size 2 --sequence-parallel",
            id="tp2",
        ),
        pytest.param(4, MOCK + EIGHT_LAYERS + SHARDED, PP2, BITPIPE, id="bitpipe"),
    ],
)
def test_the_log_is_megatrons(
    tmp_path: Path, num_ranks: int, flags: str, theirs: str, ours: str
) -> None:
    flags = start_from(tmp_path, flags + EXACT)
    assert report(train(num_ranks, flags + ours)) == report(
        train(num_ranks, flags + theirs)
    )


@pytest.mark.tree
def test_the_segments_of_a_hybrid_model(tmp_path: Path, megatron_lm_path: Path) -> None:
    """The segments of zb-v are uneven, as given; Megatron's two stages have other ones."""
    script = "pretrain_hybrid.py"
    if not (megatron_lm_path / script).exists():
        pytest.skip(f"{megatron_lm_path} has no {script}")
    flags = (
        MOCK + EXACT + "--spec tests.runtime.hybrid_layers spec --disable-bias-linear "
    )
    pattern = "--hybrid-layer-pattern "
    flags = start_from(tmp_path, f"{flags}{pattern}M*-M*-M ", script)
    ours = train(2, f"{flags}{pattern}M*|-|M*-|M {ZB_V}", script=script)
    assert report(ours) == report(
        train(2, f"{flags}{pattern}M*-|M*-M {PP2}", script=script)
    )


def test_a_tied_head_starts_as_the_embedding(tmp_path: Path) -> None:
    """From random weights, without a checkpoint that would tie them."""
    drawn = (
        MOCK
        + EXACT
        + "--lr 0 --min-lr 0 --eval-iters 0 --train-iters 1 --lr-warmup-iters 0 "
    )
    fresh = report(train(2, f"{drawn}{ZB_V} --save {tmp_path} --save-interval 1"))
    loaded = report(train(1, f"{drawn} --load {tmp_path} --finetune"))
    assert fresh == loaded


def test_tied_embeddings_with_mtp() -> None:
    """Megatron cannot save these; weights are drawn by name."""
    flags = GPT + EXACT + TWO_MTP.replace("--untie-embeddings-and-output-weights ", "")
    ours, theirs = (capture.train(2, flags + pp) for pp in (ZB_V, PP2))
    assert "embedding.word_embeddings.weight@tp0" in ours.gradients[0]
    assert (ours.losses, ours.gradients) == (theirs.losses, theirs.gradients)


@pytest.mark.short_s(4)
@pytest.mark.parametrize(
    ("num_ranks", "flags", "saved", "others"),
    [
        pytest.param(2, "", ZB_V, [(2, PP2)], id="replicated-from-v"),
        pytest.param(2, "", PP2, [(2, ZB_V)], id="replicated-to-v"),
        # Replicas read each a part, so both copies of an embedding come from one tensor.
        pytest.param(
            4, "", PP2, [(4, ZB_V + "--ckpt-fully-parallel-load ")], id="parallel-to-v"
        ),
        pytest.param(
            2, SHARDED, ZB_V, [(2, PP2 + RESHARDABLE), (1, "")], id="sharded-from-v"
        ),
        pytest.param(2, SHARDED, PP2 + RESHARDABLE, [(2, ZB_V)], id="sharded-to-v"),
    ],
)
def test_resume_under_another_schedule(
    tmp_path: Path,
    num_ranks: int,
    flags: str,
    saved: str,
    others: list[tuple[int, str]],
) -> None:
    """A run goes on under another schedule, and in one process, as it does under its own."""
    flags = f"{MOCK}{EXACT}--eval-iters 0 --train-iters 4 {flags}"
    report(
        train(
            num_ranks,
            f"{flags}{saved}--save {tmp_path} --save-interval 2 --exit-interval 2",
        )
    )
    went_on, *elsewhere = (
        report(train(number, f"{flags}{schedule}--load {tmp_path}"))
        for number, schedule in [(num_ranks, saved), *others]
    )
    assert all(lines == went_on for lines in elsewhere)


def test_optimizer_state_of_other_stages_is_refused(tmp_path: Path) -> None:
    flags = MOCK + EXACT + "--use-distributed-optimizer --train-iters 4 --eval-iters 0 "
    saving = f"{flags}{PP2}--save {tmp_path} --save-interval 1 "
    assert len(report(train(2, f"{saving}--exit-interval 2"))) == 2
    going_on = f"{flags}{ZB_V}--load {tmp_path} "
    told = user_errors(train(2, going_on))
    assert "only fits the stages it was saved with" in told[0]
    assert "resume once under the old schedule with --dist-ckpt-optim" in told[0]
    assert "--no-load-optim" in told[0]
    assert len(report(train(2, f"{going_on}--no-load-optim"))) == 2
    resumed_once = f"{saving}{RESHARDABLE}--load {tmp_path} --exit-interval 3"
    assert len(report(train(2, resumed_once))) == 1
    assert len(report(train(2, going_on))) == 1


def test_local_checkpoints_of_sharded_optimizers_resume_under_their_placement(
    tmp_path: Path,
) -> None:
    """Their optimizer state fits the same stages only; so does that of the job's other ones."""
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra resilience")
    flags = f"{GPT}--eval-iters 0 --lr-decay-iters 9 --use-distributed-optimizer "
    whole = capture.train(2, f"{flags}{ZB_V}")
    saving = f"{flags}{ZB_V}--save {tmp_path}/saved "
    saving += "--non-persistent-ckpt-type local --non-persistent-save-interval 1 "
    saving += f"--non-persistent-local-ckpt-dir {tmp_path}/local "
    capture.train(2, f"{saving}--save-interval 100 --exit-interval 2")
    resuming = f"{saving}--load {tmp_path}/saved "
    went_on = capture.train(2, f"{resuming}--save-interval {len(whole.losses)}")
    assert went_on.losses == whole.losses[2:]
    assert went_on.parameters == whole.parameters
    elsewhere = f"{MOCK}{EXACT}--use-distributed-optimizer --train-iters 9 {PP2}"
    told = user_errors(train(2, f"{elsewhere}--load {tmp_path}/saved "))
    assert "only fits the stages it was saved with" in told[0]


writes_enums = pytest.mark.skipif(
    (3, 11) <= sys.version_info < (3, 11, 4),
    reason="this Python writes enums into these files that Megatron cannot load",
)
BY_RANK = "--ckpt-format torch --eval-iters 0 "
EXPERTS = "--expert-model-parallel-size 2 --swiglu --disable-bias-linear "


@writes_enums
@pytest.mark.parametrize(
    ("num_ranks", "flags", "schedule"),
    [
        pytest.param(2, "", ZB_V, id="zb-v"),
        pytest.param(4, f"--bf16 {MOE}{SHARDED}{EXPERTS}", ZB_V, id="sharded"),
        pytest.param(4, MLA + "--num-layers 7 ", BITPIPE, id="bitpipe"),
    ],
)
def test_files_by_rank_resume_bit_for_bit(
    tmp_path: Path, num_ranks: int, flags: str, schedule: str
) -> None:
    """A run that goes on from files of each rank computes what an uninterrupted one does."""
    flags = f"{GPT}{BY_RANK}--lr-decay-iters 9 {flags}{schedule}"
    whole = capture.train(num_ranks, flags)
    capture.train(
        num_ranks, f"{flags}--save {tmp_path} --save-interval 2 --exit-interval 2"
    )
    went_on = capture.train(num_ranks, f"{flags}--load {tmp_path}")
    assert (went_on.losses, went_on.gradients) == (
        whole.losses[2:],
        whole.gradients[2:],
    )
    assert went_on.parameters == whole.parameters


@writes_enums
def test_files_by_rank_load_for_their_stages_alone(tmp_path: Path) -> None:
    """Anywhere else weights would get into other layers, which Megatron does not see."""
    flags = MOCK + EXACT + BY_RANK + "--train-iters 3 "
    theirs, ours, names = tmp_path / "theirs", tmp_path / "ours", tmp_path / "names"
    one_chunk = tmp_path / "one_chunk"
    two_chunks = f"{PP2}--num-layers-per-virtual-pipeline-stage 1 "
    saves = "--save-interval 2 --exit-interval 2"
    report(train(2, f"{flags}{two_chunks}--save {theirs} {saves}"))
    report(train(2, f"{flags}{ZB_V}--save {ours} {saves}"))
    report(train(2, f"{flags}{PP2}--save {one_chunk} {saves}"))
    layout = "--pipeline-model-parallel-layout Ett|t|t|L "
    for folder, schedule, saved, mine in (
        (theirs, ZB_V, "Megatron's own", "ranks 0: 0 and 3, 1: 1 and 2"),
        (ours, two_chunks, "ranks 0: 0 and 3, 1: 1 and 2", "Megatron's own"),
        (
            one_chunk,
            f"{two_chunks}--pipeline-schedule interleaved ",
            "Megatron's own (1 per rank)",
            "Megatron's own (2 per rank)",
        ),
        (
            ours,
            ZB_V + layout,
            "ranks 0: 0 and 3, 1: 1 and 2",
            "ranks 0: 0 and 3, 1: 1 and 2",
        ),
    ):
        [line] = set(
            user_errors(train(2, f"{flags}{schedule}--finetune --load {folder}"))
        )
        assert f" are {saved}" in line
        assert f"stages are {mine}" in line
    # Another table with the same stages is not another model, and names can be had. Megatron reads
    # a checkpoint's arguments before there is a schedule.
    whole = report(train(2, f"{flags}{ZB_V}--load {ours}"))
    v_half = f"{PP2}--pipeline-schedule v-half --use-checkpoint-args "
    assert report(train(2, f"{flags}{v_half}--load {ours}")) == whole
    converts = f"--ckpt-convert-format torch_dist --ckpt-convert-save {names} "
    assert train(2, f"{flags}{ZB_V}--load {ours} {converts}").exit_codes == [0, 0]
    named = flags.replace(BY_RANK, "--eval-iters 0 ")
    assert (
        report(train(2, f"{named}{two_chunks}--load {names / 'torch_dist'}")) == whole
    )
