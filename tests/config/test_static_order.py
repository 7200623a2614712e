"""The pipeline whose ranks run the table's own order, with which a dynamic one is compared."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.config.active import Pipeline
from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.schedules import Costs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"device_path": "ipc"},
        {"node_ips": ("10.0.0.1",)},
        {"checksums": True},
        {"costs": Costs(1, 2, 3)},
        {"chunks": 2},
        {"schedule": "bitpipe", "options": {"order": "paper"}},
    ],
)
def test_what_a_dynamic_order_implies_stays(settings: dict[str, Any]) -> None:
    pipeline = Pipeline(PipelineConfig(dynamic=DynamicOrder(), **settings), 4, 8)
    static = pipeline.static()
    assert static.dynamic is None
    assert static.transport == pipeline.transport == "auto"
    assert static.name == pipeline.name
    assert static.full.num_stages == pipeline.full.num_stages
