"""Nobody runs so far ahead of a slow process that what it sends fills memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks import run_ranks
from tests.runtime import capture
from tests.runtime.capture import GPT, PP2, PP4

from .test_training import FBD, RECOMPUTE, assert_equal, run_role, together

if TYPE_CHECKING:
    from megatron_ext.message import Message
    from megatron_ext.schedules.table.actions import Action

MANY = GPT.replace("--global-batch-size 8", "--global-batch-size 40").replace(
    "--train-iters 3", "--train-iters 2"
)


def watched(argv: list[str], slow: int) -> tuple[str, Any, tuple[int, int]]:
    """Train as one rank; also return the most messages that waited here, sent and received.

    Backward ranks of stage `slow` take their time.
    """
    from megatron_ext.disaggregation.role_compute import BackwardCompute
    from megatron_ext.transport.native_transport import NativeTransport

    most = [0, 0]
    send, run = NativeTransport.isend, BackwardCompute.run

    def sending(self: Any, tensor: Any, target: int, message: Message) -> None:
        send(self, tensor, target, message)
        for peer in self._endpoint.peers() if message.kind in ("F", "B") else ():
            most[0] = max(most[0], peer.num_queued)
            most[1] = max(most[1], peer.num_arrived)

    def late(self: BackwardCompute, action: Action, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02 if action.stage == slow and action.kind == "B" else 0)
        return run(self, action, *args, **kwargs)

    setattr(NativeTransport, "isend", sending)  # noqa: B010
    setattr(BackwardCompute, "run", late)  # noqa: B010
    return *run_role(argv), (most[0], most[1])


@pytest.mark.parametrize(
    ("parallel", "pp", "slow", "flags"),
    [
        (PP2, 2, 1, ""),
        (PP2, 2, 0, RECOMPUTE + "--fbd-activations ship "),
        pytest.param(PP4, 4, 1, "", marks=pytest.mark.slow),
    ],
)
def test_little_waits_for_a_slow_rank(
    parallel: str, pp: int, slow: int, flags: str
) -> None:
    """Twenty micro-batches; a forward rank would have sent all before the second is needed."""
    argv = (MANY + parallel + flags + FBD).split()
    by_rank = run_ranks(2 * pp, watched, argv, slow, timeout_s=100)
    waiting = [max(most) for *_, most in by_rank]
    assert 2 < max(waiting) <= 2 * pp + 2, waiting
    plain = MANY + parallel + (RECOMPUTE if flags else "")
    ours, _ = together([(role, captured) for role, captured, _ in by_rank])
    assert_equal(ours, capture.train(pp, plain))
