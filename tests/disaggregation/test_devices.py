"""Forward ranks may compute on another kind of device than backward ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.config.active import clear_configuration
from megatron_ext.config.environment import of_forward_rank
from megatron_ext.errors import ArgumentsError
from tests.ranks import losses, parse
from tests.runtime.capture import GPT, PP2

FBD = "--forward-backward-disaggregating "
ON_CPU = FBD + PP2 + "--fbd-forward-device cpu "


@pytest.mark.parametrize(
    ("flags", "rank", "world", "expected"),
    [
        (ON_CPU, 0, 4, "cpu"),
        (ON_CPU, 1, 4, None),
        (ON_CPU, 2, 4, "cpu"),
        (FBD + PP2 + "--fbd-forward-device=musa", 0, 4, "musa"),
        (PP2 + "--fbd-forward-device cpu", 0, 4, None),
        (ON_CPU, 0, 5, None),
        (FBD + PP2, 0, 4, None),
    ],
)
def test_who_is_told_what(flags: str, rank: int, world: int, expected: str | None) -> None:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    assert of_forward_rank(flags.split(), environ) == expected


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (ON_CPU + "--hidden-dropout 0.1", "another device draws other masks"),
        (FBD + PP2 + "--fbd-forward-device musa", "came after the cpu backend was armed"),
        (PP2 + "--fbd-forward-device cpu", "but there are none; add --forward-backward"),
    ],
)
def test_what_is_refused(flags: str, rule: str) -> None:
    try:
        with pytest.raises(ArgumentsError, match=rule):
            parse("gpt", (GPT + flags).split(), {"WORLD_SIZE": "4", "RANK": "0"})
    finally:
        clear_configuration()


@pytest.mark.slow
def test_forwards_on_the_cpu_and_backwards_on_musa(tmp_path: Path) -> None:
    """The emulated device computes as the CPU does, so losses equal those of a job on it."""
    musa = "--device-backend musa "
    # Forward ranks are on hosts without such a device.
    found = started(tmp_path, GPT + ON_CPU + musa, [False, True, False, True])
    expected = started(tmp_path, GPT + PP2 + musa, [True, True])
    assert losses(found) == losses(expected)
    assert len(losses(found)) == 3


def started(directory: Path, flags: str, has_musa: list[bool]) -> list[str]:
    """Train in fresh processes, some of which see the emulated device; return their logs."""
    from tests.fake_musa.build import environment

    base = {name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_DEVICE"}
    world = str(len(has_musa))
    base |= {"MASTER_ADDR": "localhost", "MASTER_PORT": _free_port(), "WORLD_SIZE": world}
    base |= {"LOCAL_WORLD_SIZE": world, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "megatron_ext", "pretrain_gpt.py"]
    words = [*program, *flags.split()]
    logs = [directory / f"{world}-{rank}.log" for rank in range(len(has_musa))]
    ranks = []
    for rank, path in enumerate(logs):
        mine = environment() if has_musa[rank] else {}
        env = {**base, **mine, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as log:
            ranks.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    texts = [path.read_text() for path in logs]
    assert codes == [0] * len(has_musa), texts[0] + texts[1]
    return texts


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])
