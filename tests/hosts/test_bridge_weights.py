"""Weights go from Hugging Face into every placement, and back, as under Bridge's own 1F1B.

These run in an environment with megatron-bridge: `bash tests/hosts/run.sh`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts import bridge_weights_runs
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.hosts.bridge_weights_runs import Moved

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron.bridge") is None,
        reason="no megatron-bridge here: bash tests/hosts/run.sh makes an environment with it",
    ),
    pytest.mark.usefixtures("bridge_loaded"),
]

PP2 = {"pipeline_model_parallel_size": 2}
EXPERTS = {**PP2, "expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, dict[str, str]]]:
    """Return the folder of a model's files and the digests of its weights, by kind."""
    models: dict[str, tuple[Path, dict[str, str]]] = {}

    def model(kind: str) -> tuple[Path, dict[str, str]]:
        if kind not in models:
            folder = tmp_path_factory.mktemp("hugging_face") / kind.replace(" ", "-")
            [digests] = run_ranks(
                1, bridge_weights_runs.save_model, folder, kind, timeout_s=280
            )
            models[kind] = folder, digests
        return models[kind]

    return model


@pytest.fixture(scope="module")
def moved(saved: Any) -> Callable[..., list[Moved]]:
    """Return what four ranks do with a model; Bridge's own schedule runs once for each model."""
    own: dict[str, list[Moved]] = {}

    def run(
        kind: str, changes: Mapping[str, Any], settings: Mapping[str, Any] | None
    ) -> list[Moved]:
        key = repr((kind, sorted(changes.items())))
        if settings is None and key in own:
            return own[key]
        folder, _ = saved(kind)
        ranks = run_ranks(
            4,
            bridge_weights_runs.train,
            folder,
            kind,
            dict(changes),
            settings,
            timeout_s=280,
        )
        if settings is None:
            own[key] = ranks
        return ranks

    return run


@pytest.mark.parametrize(
    ("kind", "changes", "schedule", "theirs"),
    [
        ("qwen3", {}, "zb-v", {}),
        ("qwen3", {}, "bitpipe", PP2),
        ("deepseek-v3", {}, "zb-h1", {}),
        ("deepseek-v3", {}, "zb-v", {}),
        ("deepseek-v3", {}, "v-half", {}),
        ("deepseek-v3", {}, "dualpipe-v", {}),
        ("deepseek-v3", {}, "dualpipe", PP2),
        ("deepseek-v3", {}, "bitpipe", PP2),
        ("deepseek-v3", EXPERTS, "zb-v", EXPERTS),
        ("tied deepseek-v3", {}, "zb-v", {}),
    ],
)
def test_weights_in_and_out_are_those_of_bridges_own_schedule(
    kind: str,
    changes: dict[str, Any],
    schedule: str,
    theirs: dict[str, Any],
    saved: Any,
    moved: Any,
) -> None:
    _, file = saved(kind)
    expected = moved(kind, theirs, None)[-1]
    ours = moved(kind, changes, {"schedule": schedule})
    assert ours[-1].losses == expected.losses
    assert expected.trained != expected.loaded, "nothing was trained"
    for rank in ours:
        assert rank.copies == [None, None, None]
        assert rank.streamed == []
        for weights in (rank.loaded, rank.reloaded):
            assert weights == expected.loaded
        assert rank.trained == expected.trained
    assert expected.loaded.items() >= file.items()


def test_a_checkpoint_of_a_folded_pipeline_becomes_files_of_hugging_face(
    tmp_path: Path, saved: Any
) -> None:
    """One process converts it, whatever schedule trained it."""
    folder, _ = saved("deepseek-v3")
    checkpoints = tmp_path / "checkpoints"
    trained = run_ranks(
        4,
        bridge_weights_runs.train,
        folder,
        "deepseek-v3",
        {},
        {"schedule": "zb-v"},
        checkpoints,
        timeout_s=280,
    )
    [exported] = run_ranks(
        1,
        bridge_weights_runs.export_checkpoint,
        folder,
        "deepseek-v3",
        checkpoints,
        timeout_s=280,
    )
    assert exported == trained[0].trained
