"""Models that break what they declare: one line on every rank, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_ext import routes
from megatron_ext.errors import ScheduleError, TransportError
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks, start_ranks
from tests.runtime import toy

M = 4
_MESSAGE_TIMEOUT_S = 600.0
"""Longer than a run may last: a rank that waits for a message fails the test."""


class _Stage(torch.nn.Module):
    """A stage of two that goes wrong at its second micro-batch."""

    def __init__(self, config: Any, number: int, mistake: str) -> None:
        super().__init__()
        self.config, self.number, self.mistake = config, number, mistake
        self.model_type, self.vp_stage, self.received = None, None, None
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.calls = 0
        if number == 0:
            routes.declare(self, publishes=["x"], boundary="fixed")
        else:
            routes.declare(self, takes=["x"])

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.received = tensors[0]

    def forward(self, microbatch: int) -> Any:
        wrong = self.mistake if microbatch == 1 else ""
        if self.number == 1:
            if wrong != "never taken":
                routes.take("y" if wrong == "undeclared" else "x")
            return (self.received["x"] @ self.weight).square().sum()
        data = torch.ones(2, 3, requires_grad=True)
        made: torch.Tensor = checkpoint(self._layer, data, wrong, use_reentrant=True)
        if wrong == "another tree":
            return {"x": made, "more": made}
        return {"x": made, "more": {1}} if wrong == "a set" else {"x": made}

    def _layer(self, data: torch.Tensor, wrong: str) -> torch.Tensor:
        made = data @ self.weight
        self.calls += 1
        if wrong == "not published":
            return made
        if wrong == "recomputed otherwise" and torch.is_grad_enabled():
            routes.publish("x", made[:1])
            return made
        if wrong == "published twice":
            routes.publish("x", made)
        published = routes.publish("x", made)
        return made * 2 if wrong == "gradient lost" or published is None else published


def _break(mistake: str) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    toy.start(2)
    use(
        make_pipeline(
            "1f1b", 2, M, transport="shm", message_timeout_s=_MESSAGE_TIMEOUT_S
        )
    )
    get_forward_backward_func()(
        forward_step_func=lambda data, stage: (
            stage(next(data)),
            lambda x: (x, x.item()),
        ),
        data_iterator=iter(range(M)),
        model=_Stage(toy.config(), dist.get_rank(), mistake),
        num_microbatches=M,
        seq_length=1,
        micro_batch_size=1,
    )


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("never taken", "stage 1, micro-batch 1, route 'x': declared but never taken"),
        (
            "undeclared",
            "stage 1, micro-batch 1, route 'y': not declared; call routes.declare",
        ),
        (
            "not published",
            "stage 0, micro-batch 1, route 'x': declared but not published",
        ),
        (
            "published twice",
            "stage 0, micro-batch 1, route 'x': published twice in one forward",
        ),
        (
            "recomputed otherwise",
            "route 'x': published (2, 3) of torch.float32 in the forward pass, but (1, 3) of",
        ),
        (
            "gradient lost",
            "stage 0, micro-batch 1, route 'x': its gradient did not reach",
        ),
        (
            "another tree",
            "for micro-batch 1 is [float32 2x3, float32 2x3], but was [float32 2x3] in an earlier",
        ),
        ("a set", "the output of stage 0 for micro-batch 1 contains a set; return"),
    ],
)
def test_every_rank_says_what_is_wrong(mistake: str, says: str) -> None:
    ended = start_ranks(2, _break, mistake, timeout_s=_MESSAGE_TIMEOUT_S / 5)
    assert ended.exit_codes == [1, 1], ended.describe()
    for log in ended.logs:
        assert says in log.splitlines()[-1]


def _step(stage: toy.Stage) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(  # type: ignore[no-any-return]
        forward_step_func=toy.forward_step,
        data_iterator=toy.samples(M),
        model=stage,
        num_microbatches=M,
        seq_length=toy.LENGTH,
        micro_batch_size=toy.BATCH,
    )


def _declare(declare: Callable[[torch.nn.Module, int], None]) -> None:
    toy.start(2)
    use(make_pipeline("1f1b", 2, M, transport="shm"))
    stage = toy.Stage(toy.config(), dist.get_rank(), None)
    declare(stage, stage.number)
    _step(stage)


def _backwards(stage: torch.nn.Module, number: int) -> None:
    if number == 0:
        routes.declare(stage, takes=["x"])
    else:
        routes.declare(stage, publishes=["x"])


def test_a_route_to_an_earlier_stage() -> None:
    ended = start_ranks(2, _declare, _backwards, timeout_s=60)
    assert ended.exit_codes == [1, 1]
    for log in ended.logs:
        assert (
            "stage 0 takes the route 'x', which stage 1 publishes"
            in log.splitlines()[-1]
        )


def _two_models() -> tuple[str, str]:
    """Let models take turns, of which the last has a route between its outer stages."""
    toy.start(3)
    use(make_pipeline("zb-h1", 3, M))
    config, rank = toy.config(), dist.get_rank()
    plain, other = toy.chunks(config, [rank]), toy.chunks(config, [rank])
    for model in (plain, other, plain):  # a second plain one is none of our business
        assert len(_step(model[0])) == (M if rank == 2 else 0)
    routed = toy.chunks(config, [rank])
    if rank != 1:
        routes.declare(routed[0], **{"takes" if rank else "publishes": ["x"]})
    with pytest.raises((ScheduleError, TransportError)) as raised:
        _step(routed[0])
    time.sleep(2)  # the rank between learns it from a message, not from their end
    return type(raised.value).__name__, str(raised.value)


def test_a_second_model_with_other_routes_is_refused() -> None:
    found = run_ranks(3, _two_models, timeout_s=60)
    assert [kind for kind, _ in found] == [
        "ScheduleError",
        "TransportError",
        "ScheduleError",
    ]
    for _, text in found:
        assert "Stage declares different trees or routes" in text
        assert (
            "give each model its own groups (pg_collection and p2p_communicator)"
            in text
        )
