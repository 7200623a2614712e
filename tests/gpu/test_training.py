"""A tiny GPT on four pipeline ranks that share one GPU, against one process on it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_ext import devices
from tests.runtime.capture import GPT, PP4, Captured, run_here

from . import processes

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

pytestmark = [pytest.mark.gpu, needs_megatron]

# What needs neither Transformer Engine nor Apex.
PLAIN = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion "
)
_CASES = {
    "1f1b": "--pipeline-schedule 1f1b --pipeline-transport shm",
    "Megatron's own schedule": "--pipeline-transport shm",
    "zb-h1": "--pipeline-schedule zb-h1 --pipeline-transport shm",
    "dpp": "--pipeline-schedule 1f1b --use-dpp",
    "dpp staged": "--pipeline-schedule 1f1b --use-dpp --pipeline-device-path staged",
    "ipc": "--pipeline-schedule 1f1b --pipeline-transport shm --pipeline-device-path ipc",
}


def train(flags: str) -> Captured:
    """Train as one rank."""
    devices.current().bind(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    processes.join()
    captured = run_here("gpt", flags.split())
    torch.distributed.destroy_process_group()
    return captured


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Results of one process."""
    directory = tmp_path_factory.mktemp("one") / "run"
    (found,) = processes.run(1, train, GPT + PLAIN, directory=directory)
    return found


@pytest.mark.parametrize("case", _CASES)
def test_four_stages_compute_what_one_process_does(
    case: str,
    one_process: Captured,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    flags = GPT + PP4 + PLAIN + _CASES[case]
    ranks = processes.run(4, train, flags, directory=tmp_path / "run")
    taken = "DirectTransport" if case in ("ipc", "dpp") else "StagedTransport"
    assert [rank.transports for rank in ranks] == [[taken]] * 4
    for loss, alone in zip(ranks[-1].losses, one_process.losses, strict=True):
        assert loss == pytest.approx(alone, rel=1e-6)
    found = {name: digest for rank in ranks for name, digest in rank.gradients[0].items()}
    expected = one_process.gradients[0]
    assert expected.keys() <= found.keys()  # the last stage has the tied weight once more
    same = sum(found[name] == digest for name, digest in expected.items())
    record_property("gradients of the first step equal in all bits", f"{same} of {len(expected)}")
