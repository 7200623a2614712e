"""Features check their purpose: with a patch taken away, each run ends in one line about it.

Programs that do something else than upstream's train on, and keep their own errors.

Runs on the release that is installed: upstream's script where a tree is, else what stands in.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.upstream.signatures import parameters
from tests.ranks import RankRun, losses, start_ranks
from tests.upstream_script.runs import DEEPSEEK, GPT

PP2 = "--pipeline-model-parallel-size 2 "
ZB_V = PP2 + "--pipeline-schedule zb-v "
SHORT = GPT + "--train-iters 2 "


def _run_without(ids: tuple[str, ...], flags: str) -> None:
    from megatron_ext.patches import REGISTRY
    from tests.patches.single import remove
    from tests.ranks import _run_script

    remove(REGISTRY, ids)
    _run_script("pretrain_gpt.py", flags.split())


def _lost(ranks: int, flags: str, *ids: str) -> str:
    """Run without some patches; return the error, which is one line without a traceback."""
    ended: RankRun = start_ranks(ranks, _run_without, ids, SHORT + flags, timeout_s=240)
    assert any(ended.exit_codes), "the run went on without what it was for"
    told = [
        line
        for log in ended.logs
        for line in log.splitlines()
        if "megatron_ext: error:" in line and "should ensure this" in line
    ]
    assert told, ended.describe()
    assert all(patch in told[0] for patch in ids[:1]), told[0]
    assert f"pip install megatron-core=={releases.reference().version}" in told[0]
    return told[0]


needs_loop = pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)
pytestmark = needs_loop


def test_a_tied_copy_that_nobody_fills() -> None:
    told = _lost(
        2, ZB_V, "placement.tied_weights", "placement.tied_weights_of_builders"
    )
    assert "expected that the copies of the tied embedding on the first" in told
    assert "(the second is zero)" in told


def test_tied_copies_that_drift_apart() -> None:
    assert "they differ by up to" in _lost(2, ZB_V, "placement.tied_gradients")


def test_a_loss_that_is_not_where_it_is_logged() -> None:
    told = _lost(
        2, ZB_V + "--untie-embeddings-and-output-weights ", "placement.train_step"
    )
    assert "reaches the rank that logs, but it did not" in told


def test_forward_ranks_that_are_not_frozen() -> None:
    told = _lost(
        4,
        PP2 + "--forward-backward-disaggregating ",
        "disaggregation.model",
        "disaggregation.model_of_builders",
    )
    assert "forward ranks keep no gradients" in told


def test_weight_gradients_that_do_not_wait_are_a_line() -> None:
    flags = SHORT + PP2 + "--pipeline-schedule zb-h1 "
    for ids, lines in ((("split_backward.linear",), 1), ((), 0)):
        ended = start_ranks(2, _run_without, ids, flags, timeout_s=240)
        assert ended.exit_codes == [0, 0], ended.describe()
        assert "".join(ended.logs).count("deferred a weight gradient to W") == lines


@pytest.mark.short_s(4)
def test_a_schedule_that_is_not_run() -> None:
    told = _lost(2, PP2 + "--pipeline-schedule zb-h1 ", "schedules.forward_backward")
    assert "steps run its table, but the first step ran a different schedule" in told


def test_a_transport_that_carries_nothing() -> None:
    told = _lost(2, PP2 + "--pipeline-transport shm ", "pipeline.messages")
    assert "--pipeline-transport shm: expected that it carries tensors between" in told


FEW_MICROBATCHES = GPT + "--num-layers 8 --micro-batch-size 1 --global-batch-size 4 "
CSV = ("0F0,0F1,,0I0,0W0,0B1", "1F0,1B0,1F1,1B1")


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--pipeline-schedule dualpipe-v"),
        (4, "--pipeline-schedule dualpipe"),
        (
            4,
            "--pipeline-schedule dualpipe-v --global-batch-size 12 --rampup-batch-size 4 4 16",
        ),
        (2, "--pipeline-schedule csv:{table} --global-batch-size 2"),
    ],
    ids=["dualpipe-v", "dualpipe", "rampup", "csv"],
)
def test_a_rank_that_splits_no_backward_trains_on(
    tmp_path: Path, ranks: int, flags: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\n".join(CSV) + "\n")
    flags = f"{FEW_MICROBATCHES}--pipeline-model-parallel-size {ranks} {flags.format(table=table)}"
    if "--rampup" in flags:
        calculator = (
            "megatron.core.num_microbatches_calculator:init_num_microbatches_calculator"
        )
        if "step_batch_size_schedule" in parameters(calculator):
            pytest.skip("from 0.19 on Megatron ignores --rampup-batch-size")
        flags = flags.replace(
            "--train-iters 5", "--train-samples 32"
        )  # by samples only
    ended = start_ranks(ranks, _run_without, (), flags, timeout_s=240)
    assert not any(ended.exit_codes), ended.describe()
    assert len(losses(ended.logs)) >= 4


def _train_with_backward_hooks(flags: str) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    made = TransformerLayer.__init__

    def hooked(self: TransformerLayer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.register_full_backward_hook(lambda *_: None)

    TransformerLayer.__init__ = hooked
    _run_without((), flags)


@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_full_backward_hooks_change_nothing(schedule: str) -> None:
    """Hooks make a view of a stage's output, whose memory cannot be freed after it was sent."""
    flags = f"{SHORT}{PP2}--pipeline-schedule {schedule} "
    hooked = start_ranks(2, _train_with_backward_hooks, flags, timeout_s=240)
    assert not any(hooked.exit_codes), hooked.describe()
    plain = start_ranks(2, _run_without, (), flags, timeout_s=240)
    assert losses(hooked.logs) == losses(plain.logs)


def _fail_on_the_last_rank(flags: str) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def fault(*_: object) -> None:
        assert 2 * None  # type: ignore[operator]

    def hooked(self: TransformerLayer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.register_forward_hook(fault)

    if os.environ["RANK"] == "1":
        made, TransformerLayer.__init__ = TransformerLayer.__init__, hooked
    _run_without((), flags)


def test_the_traceback_of_a_users_error_in_the_first_step_survives() -> None:
    ended = start_ranks(2, _fail_on_the_last_rank, SHORT + ZB_V, timeout_s=240)
    assert ended.exit_codes == [1, 1]
    lines = ended.logs[1].splitlines()
    assert "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'" in lines
    assert "    assert 2 * None  # type: ignore[operator]" in lines
    assert "pip install" not in "".join(ended.logs)


def test_nothing_is_lost_where_all_patches_are() -> None:
    ended: RankRun = start_ranks(
        2, _run_without, (), SHORT + ZB_V + DEEPSEEK, timeout_s=240
    )
    assert not any(ended.exit_codes), ended.describe()
