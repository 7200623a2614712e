"""Megatron-Bridge trains under our schedules with the losses of its own 1F1B, bit for bit.

These run in an environment with megatron-bridge: `bash tests/hosts/run.sh`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import DynamicOrder
from megatron_ext.tools.compare.locate import compare
from megatron_ext.tracing.digest_files import read_folder
from tests.hosts import bridge_runs
from tests.ranks import run_ranks, start_ranks

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron.bridge") is None,
        reason="no megatron-bridge here: bash tests/hosts/run.sh makes an environment with it",
    ),
    pytest.mark.usefixtures("bridge_loaded"),
]

PP2 = {"model.pipeline_model_parallel_size": 2}
UNTIED = {"model.share_embeddings_and_output_weights": False}
DECENTRALIZED = {
    "dist.use_decentralized_pg": True,
    "dist.use_gloo_process_groups": False,
}
SHARDED = {
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "mixed_precision": "bf16_mixed",
    **PP2,
}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}


def trained(
    changes: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    flags: str = "",
    builder: bool = False,
    sizes: tuple[int, int, int] | None = None,
) -> list[bridge_runs.Trained]:
    return run_ranks(
        4,
        bridge_runs.train,
        dict(changes),
        settings,
        builder,
        sizes,
        env={"MEGATRON_EXT_FLAGS": flags},
        timeout_s=280,
    )


@pytest.fixture(scope="module")
def own() -> Any:
    """Return what Bridge's own schedule does, once for each configuration."""
    known: dict[str, bridge_runs.Trained] = {}

    def run(changes: Mapping[str, Any], settings: Any = None) -> bridge_runs.Trained:
        key = repr((sorted(changes.items()), settings))
        if key not in known:
            known[key] = trained(changes, settings)[-1]
            assert known[key].schedule is None
        return known[key]

    return run


@pytest.mark.parametrize(
    ("changes", "settings", "theirs"),
    [
        pytest.param({}, {"transport": "shm"}, {}, id="1f1b over shm"),
        pytest.param({}, {"schedule": "zb-h1"}, {}, id="zb-h1"),
        pytest.param({}, {"schedule": "zb-v"}, {}, id="zb-v, tied"),
        pytest.param(
            UNTIED, {"schedule": "zb-v", "transport": "shm"}, UNTIED, id="zb-v, untied"
        ),
        pytest.param({}, {"dynamic": DynamicOrder()}, {}, id="dynamic order"),
        pytest.param(
            {},
            {"schedule": "interleaved", "chunks": 2, "dynamic": DynamicOrder()},
            {},
            id="dynamic order, interleaved",
        ),
        pytest.param({}, {"schedule": "bitpipe"}, PP2, id="bitpipe"),
        pytest.param(
            SHARDED, {"schedule": "zb-v"}, SHARDED, id="zb-v, bf16, sharded optimizer"
        ),
        pytest.param(
            DECENTRALIZED,
            {"schedule": "zb-h1"},
            DECENTRALIZED,
            id="zb-h1, decentralized groups",
        ),
    ],
)
def test_losses_are_those_of_bridges_own_schedule(
    changes: dict[str, Any], settings: dict[str, Any], theirs: dict[str, Any], own: Any
) -> None:
    expected, ours = own(theirs), trained(changes, settings)
    check(expected, ours)
    assert ours[-1].schedule == settings.get(
        "schedule", "1f1b" if "dynamic" in settings else None
    )
    assert ours[-1].transport == settings.get(
        "transport", "auto" if "dynamic" in settings else "torch"
    )
    assert (sum(rank.reordered for rank in ours) > 0) == ("dynamic" in settings)


def check(expected: bridge_runs.Trained, ours: list[bridge_runs.Trained]) -> None:
    """The rank that logs has Bridge's losses; an evaluation's are where the last stage is."""
    print("Bridge:", [float.fromhex(loss) for loss in expected.losses])
    print("ours:  ", [float.fromhex(loss) for loss in ours[-1].losses])
    assert ours[-1].losses == expected.losses
    assert len(set(expected.losses)) == 4, "nothing was trained"
    assert "none" not in expected.losses
    assert expected.evaluated in [rank.evaluated for rank in ours]


def test_digests_around_a_training_of_bridge_are_compared(tmp_path: Path) -> None:
    """A variable around the launch records them; zb-v cuts the model otherwise."""
    for name, settings in (("own", None), ("zb-v", {"schedule": "zb-v"})):
        run_ranks(
            4,
            bridge_runs.train,
            {},
            settings,
            env={"MEGATRON_EXT_DIGESTS": str(tmp_path / name)},
            timeout_s=280,
        )
    comparison = compare(tmp_path / "own", tmp_path / "zb-v")
    assert comparison.difference is None
    assert comparison.num_steps == 5, "four steps, and the weights before the first"
    headers = [file.header.schedule for file in read_folder(tmp_path / "zb-v")]
    assert headers == ["zb-v"] * 4


def test_iterations_are_skipped_on_ranks_with_several_chunks(own: Any) -> None:
    changes = {"train.iterations_to_skip": [2]}
    assert trained(changes, {"schedule": "zb-v"})[-1].losses == own(changes).losses


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "zb-h1", "slices": 2},
        {"schedule": "zb-h1", "slice_tokens": 12},
        {"schedule": "zb-v", "slice_tokens": "auto", "dynamic": DynamicOrder()},
    ],
    ids=["equal", "by length", "by length, automatic and dynamic"],
)
def test_slices(settings: dict[str, Any], own: Any) -> None:
    expected, ranks = own({}), trained({}, settings)
    assert ranks[-1].steps == 4
    # The rank with the last stage evaluates, and the last rank logs.
    evaluated, *_ = [
        rank.evaluated
        for rank in ranks
        if rank.evaluated and "none" not in rank.evaluated
    ]
    for ours, bridges in (
        (ranks[-1].losses, expected.losses),
        (evaluated, expected.evaluated),
    ):
        # Sums over slices are rounded in other places.
        theirs = list(map(float.fromhex, bridges))
        assert list(map(float.fromhex, ours)) == pytest.approx(theirs, rel=1e-6)


def test_weights_of_hugging_face_reach_the_tied_copy_of_a_folded_pipeline() -> None:
    first, *others = run_ranks(4, bridge_runs.filled_from_hugging_face, timeout_s=280)
    assert first[0] is not None
    assert first[1] is None
    assert others == [[None, None]] * 3  # which hold no copy


def test_flags_in_the_environment(own: Any) -> None:
    ours = trained({}, flags="--pipeline-schedule zb-v --pipeline-transport shm")
    check(own({}), ours)
    assert (ours[0].schedule, ours[0].transport) == ("zb-v", "shm")


def test_sizes_that_configure_was_given_are_compared(own: Any) -> None:
    check(own({}), trained({}, {"schedule": "zb-v"}, sizes=(4, 8, 8)))
    told = run_ranks(
        4, bridge_runs.refused, {}, {"schedule": "zb-v"}, (4, 16, 8), timeout_s=280
    )
    [message] = set(told)
    assert (
        "num_microbatches 16, but Bridge's configuration has 4 and 8; remove" in message
    )


def test_a_model_of_the_newer_form(own: Any) -> None:
    ours = trained({}, {"schedule": "zb-v"}, builder=True)
    check(trained({}, builder=True)[-1], ours)
    assert ours[0].schedule == "zb-v"


def test_masks_belong_to_microbatches(own: Any) -> None:
    """To their stages, too, of which zb-v has as many as Bridge's interleaved schedule."""
    interleaved = {**DROPOUT, "model.virtual_pipeline_model_parallel_size": 2}
    expected = own(interleaved, {"microbatch_rng": True})
    check(expected, trained(DROPOUT, {"schedule": "zb-v", "microbatch_rng": True}))
    assert expected.losses != own({}).losses


def test_the_last_rank_logs_the_losses_of_a_folded_pipeline() -> None:
    def lines(run: Any) -> list[str]:
        assert run.exit_codes == [0] * 4, run.describe()
        return re.findall(r"lm loss(?: value)?: \S+", run.logs[-1])

    theirs = lines(start_ranks(4, bridge_runs.train, {}, timeout_s=280))
    ours = lines(
        start_ranks(4, bridge_runs.train, {}, {"schedule": "zb-v"}, timeout_s=280)
    )
    assert ours == theirs
    assert len(theirs) >= 6  # four steps and two evaluations


def test_the_same_configuration_trains_again_without_us() -> None:
    for ours, theirs in run_ranks(4, bridge_runs.train_twice, timeout_s=280)[-1:]:
        assert (ours.schedule, theirs.schedule) == ("zb-v", None)
        assert ours.losses == theirs.losses


def test_undoing_restores_bridge() -> None:
    assert run_ranks(1, bridge_runs.undone, timeout_s=280) == [[]]


def test_without_its_hook_a_tied_embedding_is_missed() -> None:
    found = start_ranks(4, bridge_runs.train_without_hook, timeout_s=280)
    assert found.values[0] is not None, found.describe()
    assert (
        "the copies of the tied embedding on the first rank are identical, but"
        in found.values[0]
    )


@pytest.mark.parametrize(
    "sharded", [False, True], ids=["whole optimizer", "sharded optimizer"]
)
@pytest.mark.parametrize(
    "saver", [None, {"schedule": "zb-v"}], ids=["from 1f1b", "from zb-v"]
)
def test_a_checkpoint_goes_on_under_the_other_schedule(
    tmp_path: Path, sharded: bool, saver: dict[str, Any] | None, own: Any
) -> None:
    common = {
        "ddp.use_distributed_optimizer": sharded,
        "checkpoint.dist_ckpt_optim_fully_reshardable": True,
    }
    folder = str(tmp_path / "checkpoints")
    saving = {
        "checkpoint.save": folder,
        "checkpoint.save_interval": 2,
        "train.exit_interval": 2,
    }
    trained({**common, **saving}, saver)
    loader = None if saver else {"schedule": "zb-v"}
    resumed = trained({**common, "checkpoint.load": folder}, loader)[-1]
    assert resumed.losses == own(common).losses[2:]


def test_optimizer_state_of_other_stages_is_refused(tmp_path: Path) -> None:
    common = {"ddp.use_distributed_optimizer": True}
    folder = str(tmp_path / "checkpoints")
    saving = {
        "checkpoint.save": folder,
        "checkpoint.save_interval": 2,
        "train.exit_interval": 2,
    }
    trained({**common, **saving})
    loading = {**common, "checkpoint.load": folder}
    told = run_ranks(
        4, bridge_runs.failed, loading, {"schedule": "zb-v"}, timeout_s=280
    )
    for line in told:
        assert "with checkpoint.dist_ckpt_optim_fully_reshardable (and without" in line
        assert "checkpoint.non_persistent_ckpt_type=local) and save" in line
        assert "load only the weights with checkpoint.load_optim=False" in line


def test_optimizer_state_beside_local_checkpoints_knows_its_stages(
    tmp_path: Path, own: Any
) -> None:
    """Local checkpoints keep it in a format that only fits the stages it was saved with."""
    pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra resilience")
    common = {
        "ddp.use_distributed_optimizer": True,
        "checkpoint.non_persistent_ckpt_type": "local",
        "checkpoint.non_persistent_local_ckpt_dir": str(tmp_path / "local"),
    }
    folder = str(tmp_path / "checkpoints")
    saving = {
        "checkpoint.save": folder,
        "checkpoint.save_interval": 2,
        "train.exit_interval": 2,
    }
    trained({**common, **saving}, {"schedule": "zb-v"})
    loading = {"checkpoint.load": folder}
    resumed = trained({**common, **loading}, {"schedule": "zb-v"})[-1]
    sharded = {"ddp.use_distributed_optimizer": True}
    assert resumed.losses == own(sharded).losses[2:]
    for line in run_ranks(
        4, bridge_runs.failed, {**sharded, **loading}, None, timeout_s=280
    ):
        assert "only fits the stages it was saved with" in line


@pytest.mark.parametrize(
    ("changes", "settings", "flags", "message"),
    [
        (
            {"train.global_batch_size": 7},
            {"schedule": "bitpipe"},
            "",
            "use train.global_batch_size=6 or 8",
        ),
        (
            {"model.pipeline_model_parallel_size": 1},
            {"schedule": "zb-v"},
            "",
            "schedule=zb-v needs a pipeline",
        ),
        (
            DECENTRALIZED,
            {"schedule": "bitpipe"},
            "",
            "schedule bitpipe, which mirrors two pipelines, needs Megatron's global",
        ),
        (
            DECENTRALIZED,
            {"schedule": "zb-v"},
            "",
            "schedule zb-v, which sets a layout, needs Megatron's global",
        ),
        (
            DECENTRALIZED,
            {"dynamic": DynamicOrder()},
            "",
            "a dynamic order or microbatch_rng needs Megatron's",
        ),
        (DECENTRALIZED, None, "--trace", "tracing needs Megatron's global process"),
        (
            {
                "model.dist_train": SimpleNamespace(
                    use_dist_train=True, language_world_size=4
                )
            },
            {"schedule": "zb-h1"},
            "",
            "model.dist_train.use_dist_train gives encoder and language model separate",
        ),
        (
            {"checkpoint.async_save": True, "checkpoint.save": "unused"},
            {"schedule": "zb-v"},
            "",
            "remove checkpoint.async_save",
        ),
        (
            {},
            None,
            "--pipeline-schedul zb-v",
            "unknown argument --pipeline-schedul; did you mean --pipeline-schedule",
        ),
        (
            {},
            None,
            "--pipeline-schedule zb-v --trace-dir x",
            "--trace-dir requires --trace",
        ),
        (
            {},
            None,
            "--forward-backward-disaggregating",
            "needs Megatron's own training loop, which supports both roles",
        ),
    ],
)
def test_refused(
    changes: dict[str, Any], settings: dict[str, Any] | None, flags: str, message: str
) -> None:
    told = run_ranks(
        4,
        bridge_runs.refused,
        changes,
        settings,
        env={"MEGATRON_EXT_FLAGS": flags},
        timeout_s=280,
    )
    assert len(set(told)) == 1
    assert message in told[0]
    assert "\n" not in told[0]


def test_the_example() -> None:
    run = start_ranks(4, bridge_runs.run_example, "zb-v", timeout_s=280)
    assert run.exit_codes == [0] * 4, run.describe()
    assert "pipeline schedule: zb-v chunks=2 on 4 ranks, 8 micro-batches" in run.logs[0]
    assert len(re.findall(r"lm loss: [0-9.E+]+", run.logs[-1])) == 4
