"""`megatron_ext.configure` says what to build, and what it puts in force can be ended."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_ext
from megatron_ext import DynamicOrder, PipelineConfig
from megatron_ext.config import active
from megatron_ext.errors import UserError
from tests.ranks import run_ranks

Case = tuple[dict[str, Any], dict[str, Any]]
"""Settings, and sizes that differ from the usual ones."""


def configured(cases: list[Case]) -> list[dict[str, Any] | str]:
    """Configure this process for each case in turn; return what to build, or the error."""
    return [_configured(settings, sizes) for settings, sizes in cases]


def _configured(settings: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any] | str:
    usual = {"pipeline_ranks": 4, "num_microbatches": 8, "num_layers": 16}
    try:
        build = megatron_ext.configure(PipelineConfig(**settings), **{**usual, **sizes})
    except UserError as error:
        assert active.active() is None
        return str(error)
    megatron_ext.deconfigure()
    return {**build.transformer, "replicas": build.replicas, "m": build.num_microbatches}


_BUILT: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"pipeline_model_parallel_size": 4, "m": 8, "replicas": 1}),
    (
        {"schedule": "bitpipe"},
        {},
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": "Ett|tt|tt|tt|tt|tt|tt|ttL",
            "overlap_p2p_comm": True,
            "replicas": 2,
            "m": 4,
        },
    ),
    (
        {"schedule": "interleaved", "chunks": 4},
        {},
        {
            "virtual_pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": None,
            "overlap_p2p_comm": False,
            "batch_p2p_comm": True,
        },
    ),
    (
        {"schedule": "zb-v"},
        {"layout": "Et|" + "tt|" * 6 + "tttL"},
        {"pipeline_model_parallel_layout": "Et|" + "tt|" * 6 + "tttL"},
    ),
    ({"dynamic": DynamicOrder()}, {"seed": 1}, {"pipeline_model_parallel_size": 4}),
]

_REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"schedule": "zb-v"},
        {"pipeline_ranks": 1},
        "needs a pipeline, pipeline_ranks 1 makes none",
    ),
    ({"schedule": "bitpipe"}, {"pipeline_ranks": 5}, "must be even and at least 4; use 4 or"),
    ({"schedule": "bitpipe"}, {"num_microbatches": 7}, "must be even for the two mirrored"),
    (
        {"schedule": "zb-v"},
        {"num_layers": 12},
        "num_layers 12 must be a multiple of the 8 stages",
    ),
    ({"dynamic": DynamicOrder()}, {}, "need a seed; pass seed"),
    ({"disaggregation": megatron_ext.Disaggregation()}, {}, "both roles"),
    ({"device": "musa"}, {}, "device musa came after the cpu backend was armed"),
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any] | str]:
    """What came of each case. One process makes them all, one after the other."""
    cases = [(settings, sizes) for settings, sizes, _ in [*_BUILT, *_REFUSED]]
    [made] = run_ranks(1, configured, cases)
    return made


@pytest.mark.parametrize("index", range(len(_BUILT)), ids=lambda index: str(_BUILT[index][0]))
def test_what_to_build(found: list[dict[str, Any] | str], index: int) -> None:
    made = found[index]
    assert isinstance(made, dict), made
    assert made | _BUILT[index][2] == made


@pytest.mark.parametrize("index", range(len(_REFUSED)), ids=lambda index: _REFUSED[index][2])
def test_what_cannot_be_is_refused(found: list[dict[str, Any] | str], index: int) -> None:
    told = found[len(_BUILT) + index]
    assert isinstance(told, str), told
    assert _REFUSED[index][2] in told


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_ranks": 4}, "give num_microbatches, num_layers too"),
        (
            {"pipeline_ranks": 4, "num_microbatches": 8, "num_layers": 16, "chunks": 2},
            "configure has no size chunks; sizes are pipeline_ranks, num_microbatches,",
        ),
    ],
)
def test_sizes_are_complete_and_known(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_ext.configure(PipelineConfig(schedule="zb-v"), **sizes)
    assert active.active() is None


def one_after_the_other() -> list[str]:
    """Tell which schedule Megatron hands out; its modules were imported before."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch import distributed

    from tests.patches.single import start_parallel

    start_parallel(pipeline_model_parallel_size=2)
    assert distributed.get_world_size() == 2
    found = [get_forward_backward_func().__module__]
    sizes = {"pipeline_ranks": 2, "num_microbatches": 4, "num_layers": 2}
    for end in (megatron_ext.deconfigure, megatron_ext.deactivate):
        megatron_ext.configure(PipelineConfig(schedule="zb-h1"), **sizes)
        found.append(get_forward_backward_func().__module__)
        end()
        found.append(get_forward_backward_func().__module__)
        assert active.active() is None
    return found


def test_it_ends_with_deconfigure_and_with_deactivate() -> None:
    own, ours = "megatron.core.pipeline_parallel.schedules", "megatron_ext.runtime.entry"
    assert run_ranks(2, one_after_the_other) == [[own, ours, own, ours, own]] * 2
