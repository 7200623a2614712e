"""A rank that is killed in training ends the others soon, with its name, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks

from . import toy

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import TransportName

pytestmark = pytest.mark.skipif(
    find_spec("megatron_ext.transport._C") is None,
    reason="the native module is not built",
)

NUM_RANKS, M = 3, 4
_SURVIVES_S = 10.0
_STARTS_S = 60.0
_MOST_DEATHS = 100
_ALL_S = 100 + (_STARTS_S + _SURVIVES_S) * _MOST_DEATHS
"""However slow the machine is, each death has its own limits; this one only ends what hangs."""


def _train(rank: int, directory: Path, schedule: str, transport: TransportName) -> None:
    """Train for ever."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS)
    )
    store = dist.FileStore(str(directory / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=NUM_RANKS)
    chosen = make_pipeline(schedule, NUM_RANKS, M, transport=transport)
    use(chosen)
    config = toy.config()
    [stage] = chosen.placement.stages_of[rank]
    [model] = toy.chunks(config, [stage])
    while True:
        get_forward_backward_func()(
            forward_step_func=toy.forward_step, data_iterator=toy.samples(M), model=model,
            num_microbatches=M, seq_length=toy.LENGTH, micro_batch_size=toy.BATCH,
        )  # fmt: skip
        (directory / f"{rank} trains").touch()


def _start(rank: int, directory: Path, schedule: str, transport: TransportName) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _train(rank, directory, schedule, transport)
        except BaseException as error:
            (directory / f"{rank} says").write_text(f"{type(error).__name__}: {error}")
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(3)
    return pid


def _wait_for(pids: set[int], deadline: float) -> None:
    """Reap all; fail if one still runs at the deadline."""
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        assert time.monotonic() < deadline, f"{len(pids)} survivors still run"
        time.sleep(0.01 if pid == 0 else 0)


def _kill_one(
    chooser: random.Random, directory: Path, transport: TransportName
) -> float:
    """Train, kill a rank somewhere in a step; return how long the others went on."""
    directory.mkdir()
    schedule = chooser.choice(["1f1b", "gpipe", "zb-h1"])
    pids = {
        rank: _start(rank, directory, schedule, transport) for rank in range(NUM_RANKS)
    }
    deadline = time.monotonic() + _STARTS_S
    while len(list(directory.glob("* trains"))) < NUM_RANKS:
        assert time.monotonic() < deadline, "the ranks do not train"
        time.sleep(0.005)
    time.sleep(chooser.uniform(0, 0.05))
    victim = chooser.randrange(NUM_RANKS)
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    _wait_for(set(pids.values()), killed + _SURVIVES_S)
    lasted_s = time.monotonic() - killed
    for rank in set(range(NUM_RANKS)) - {victim}:
        said = (directory / f"{rank} says").read_text()
        assert f"rank {victim} on host" in said, said
        assert f"(wire {transport}) died" in said, said
        assert said.startswith(("PeerDied: ", "PeerAborted: ")), said
    return lasted_s


def _kill_again_and_again(num_deaths: int) -> list[float]:
    chooser = random.Random(num_deaths)
    lasted_s = [
        _kill_one(
            chooser, Path(f"death {number}").resolve(), ("shm", "tcp")[number % 2]
        )
        for number in range(num_deaths)
    ]
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    assert "memfd:megatron_ext" not in Path("/proc/self/maps").read_text()
    return lasted_s


@pytest.mark.timeout(
    _ALL_S + 600
)  # which may begin with the wait for another run's end
@pytest.mark.parametrize(
    "num_deaths", [12, pytest.param(_MOST_DEATHS, marks=pytest.mark.slow)]
)
def test_survivors_of_a_killed_rank_name_it_and_end(num_deaths: int) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    [lasted_s] = run_ranks(1, _kill_again_and_again, num_deaths, timeout_s=_ALL_S)
    assert len(lasted_s) == num_deaths
    new = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert [name for name in new if "megatron_ext" in name or "mext" in name] == []
    print(
        f"{num_deaths} ranks killed; the others ended after at most {max(lasted_s):.2f} s"
    )
