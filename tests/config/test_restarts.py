"""What a job needs to go on after a loss, and what it could keep."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

import pytest

from megatron_ext import Disaggregation, PipelineConfig, preflight
from megatron_ext.config import restarts
from megatron_ext.config.refusals import Preflight
from tests.commands import run_python

SIZES = {
    "pipeline_model_parallel_size": 4,
    "world_size": 4,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "num_layers": 32,
    "seq_length": 64,
}
LOCAL = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "/fast"}
RESTART = {"inprocess_restart": True, "inprocess_granularity": "rank", "load": "saved"}


def checked(schedule: str, **settings: Any) -> Preflight:
    return preflight({**SIZES, **settings}, PipelineConfig(schedule=schedule))


@pytest.mark.parametrize(
    ("schedule", "directory"),
    [
        ("zb-v", "v-of-8-stages"),
        ("v-half", "v-of-8-stages"),
        ("bitpipe", "w-of-8-stages"),
    ],
)
def test_local_checkpoints_of_folded_pipelines_lie_apart(
    schedule: str, directory: str
) -> None:
    answer = checked(schedule, **LOCAL)
    assert answer.accepted, answer.refusals
    path = answer.arguments["non_persistent_local_ckpt_dir"]
    assert path == f"/fast/{directory}"
    assert any(path in change for change in answer.changes)
    # What was rewritten once stays: a host gives its configuration back.
    again = checked(schedule, **{**LOCAL, "non_persistent_local_ckpt_dir": path})
    assert "non_persistent_local_ckpt_dir" not in again.arguments


def test_local_checkpoints_of_megatrons_own_placements_stay_where_they_are() -> None:
    for schedule in ("1f1b", "zb-h1", "interleaved"):
        assert (
            "non_persistent_local_ckpt_dir" not in checked(schedule, **LOCAL).arguments
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"load": None}, ["without --load"]),
        ({"inprocess_granularity": "node"}, ["--inprocess-granularity rank"]),
    ],
)
def test_what_a_loss_would_cost_is_said(
    change: dict[str, Any], said: list[str]
) -> None:
    notices = checked("zb-h1", **{**RESTART, **change}).notices
    about_restarts = [
        notice for notice in notices if notice.startswith("--inprocess-restart")
    ]
    assert len(about_restarts) == len(said)
    for notice, words in zip(about_restarts, said, strict=True):
        assert words in notice


def test_a_process_without_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Preflight(pipeline=checked("zb-h1").pipeline)
    monkeypatch.setattr(restarts, "find_spec", lambda name: None)
    restarts.check_restart(answer, Namespace(**RESTART), in_job=True)
    [refusal] = answer.refusals
    assert "pip install 'megatron-ext[resilience]'" in str(refusal)
    monkeypatch.setattr(restarts, "find_spec", find_spec)
    answer = Preflight(pipeline=answer.pipeline)
    restarts.check_restart(
        answer, Namespace(**RESTART), in_job=False
    )  # the job runs elsewhere
    assert answer.refusals == []


INCOMPLETE = """\
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"):
    module = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    sys.modules[name] = module
"""
"""NVRx without the modules that restarts need, as an installation for other purposes may be."""


def test_an_incomplete_library_is_refused_only_if_restarts_are_wanted() -> None:
    code = f"""{INCOMPLETE}
import megatron.core, megatron_ext
from argparse import Namespace
from megatron_ext.config import restarts
from megatron_ext.config.refusals import Preflight
from tests.commands import run_python
from megatron_ext.patches.registry import REGISTRY
megatron_ext.activate()
REGISTRY.raise_mismatches()
answer = Preflight(transport_only="shm")
restarts.check_restart(answer, Namespace(**{RESTART!r}), in_job=True)
print(answer.refusals[0])
"""
    done = run_python("-c", code)
    assert "has no nvidia_resiliency_ext.inprocess.wrap.Wrapper" in done.stdout, (
        done.stderr
    )


def test_ranks_with_roles_are_not_replaced() -> None:
    config = PipelineConfig(disaggregation=Disaggregation())
    answer = preflight({**SIZES, "world_size": 8, **RESTART}, config)
    [refusal] = [
        refusal for refusal in answer.refusals if refusal.rule == "inprocess_restart"
    ]
    assert "cannot take over a role" in str(refusal)
