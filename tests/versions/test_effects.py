"""What features are for is checked: with a patch taken away, each run ends in one line about it.

Runs on the release that is installed: upstream's script where a tree is, else what stands in.
"""

from __future__ import annotations

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.ranks import RankRun, run_ranks, start_ranks
from tests.upstream_script.runs import DEEPSEEK, GPT

PP2 = "--pipeline-model-parallel-size 2 "
ZB_V = PP2 + "--pipeline-schedule zb-v "
SHORT = GPT + "--train-iters 2 "


def _run_without(ids: tuple[str, ...], flags: str) -> None:
    from megatron_ext.patches import REGISTRY
    from tests.ranks import _run_script

    REGISTRY.remove(ids)
    _run_script("pretrain_gpt.py", flags.split(), embedded=False)


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
    told = _lost(2, ZB_V, "placement.tied_weights", "placement.tied_weights_of_builders")
    assert "--pipeline-schedule zb-v: the copies of the tied embedding" in told
    assert "(the second is zero)" in told


def test_tied_copies_that_drift_apart() -> None:
    assert "they differ by up to" in _lost(2, ZB_V, "placement.tied_gradients")


def test_a_loss_that_is_not_where_it_is_logged() -> None:
    told = _lost(2, ZB_V + "--untie-embeddings-and-output-weights ", "placement.train_step")
    assert "is brought to the rank that logs, but there was none" in told


@pytest.mark.skipif(
    upstream.find_tree() is None, reason="only upstream's script fetches through this function"
)
def test_a_first_rank_without_labels() -> None:
    # Before 0.18 only tensor-parallel ranks beside the first lack them.
    moved = (releases.installed_release() or (0, 0)) >= (0, 18)
    several = "" if moved else "--tensor-model-parallel-size 2 "
    told = _lost(4 if several else 2, ZB_V + several, "placement.batch")
    assert "gets labels too" in told


def test_forward_ranks_that_are_not_frozen() -> None:
    told = _lost(
        4,
        PP2 + "--forward-backward-disaggregating ",
        "disaggregation.model",
        "disaggregation.model_of_builders",
    )
    assert "forward ranks keep no gradients" in told


def test_weight_gradients_that_do_not_wait() -> None:
    told = _lost(2, PP2 + "--pipeline-schedule zb-h1 ", "split_backward.linear")
    assert "gradients of weights wait for W, but none" in told


def test_a_schedule_that_is_not_run() -> None:
    told = _lost(2, PP2 + "--pipeline-schedule zb-h1 ", "schedules.forward_backward")
    assert "steps run its table, but the first step ran another schedule" in told


def test_a_transport_that_carries_nothing() -> None:
    told = _lost(2, PP2 + "--pipeline-transport shm ", "pipeline.messages")
    assert "--pipeline-transport shm: it carries tensors between stages" in told


def _check_gloo_groups(created: bool) -> str:
    from megatron_ext.errors import EffectMissing
    from megatron_ext.patches import effects
    from tests.patches.single import start_parallel

    start_parallel(create_gloo_process_groups=created)
    try:
        effects.check_gloo(off=True)
    except EffectMissing as error:
        return str(error)
    return ""


def test_gloo_groups_that_are_made_all_the_same() -> None:
    [told] = run_ranks(1, _check_gloo_groups, True)
    assert "no second gloo group is made for each group, but there are some" in told
    assert run_ranks(1, _check_gloo_groups, False) == [""]


def _run_with_flags_of_old(flags: str) -> None:
    from megatron_ext.upstream import signatures

    signatures._RENAMED.clear()
    _run_without((), flags)


@pytest.mark.skipif(
    (releases.installed_release() or (0, 0)) < (0, 17), reason="0.16 has no flag of another name"
)
def test_a_default_of_the_device_whose_flag_was_renamed() -> None:
    ended = start_ranks(1, _run_with_flags_of_old, SHORT, timeout_s=240)
    assert "no second gloo group is made" in ended.logs[0], ended.describe()


def test_nothing_is_lost_where_all_patches_are() -> None:
    ended: RankRun = start_ranks(2, _run_without, (), SHORT + ZB_V + DEEPSEEK, timeout_s=240)
    assert not any(ended.exit_codes), ended.describe()
