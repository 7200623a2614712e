"""What a step with forward and backward ranks cannot run."""

from __future__ import annotations

import pytest
import torch

from megatron_ext import routes
from megatron_ext.disaggregation.step import _refuse_trees
from megatron_ext.errors import ScheduleError


def test_a_model_that_hands_on_more_than_one_tensor_is_refused() -> None:
    chunk = torch.nn.Sequential(torch.nn.Identity())
    _refuse_trees([chunk])
    routes.declare(chunk[0], takes=["x"])
    with pytest.raises(ScheduleError, match="leave --forward-backward-disaggregating out"):
        _refuse_trees([chunk])
