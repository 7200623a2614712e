"""Training on emulated devices, through the host and past it, against the CPU's: bit for bit.

Its streams copy as late as they may (`tests/fake_musa`), so an order that nobody enforces shows.
"""

import pytest

from tests.ranks import run_ranks
from tests.runtime.capture import GPT, PP2, run_here

_IPC = " --pipeline-device-path ipc"
_CASES = {
    "a table": "--pipeline-schedule zb-h1 --pipeline-transport shm",
    "Megatron's own schedule": "--pipeline-transport shm",
    "what arrives first": "--pipeline-schedule 1f1b --use-dpp --pipeline-device-path staged",
    "Megatron's own schedule, from device to device": "--pipeline-transport auto"
    + _IPC,
    "what arrives first, from device to device": "--pipeline-schedule 1f1b --use-dpp"
    + _IPC,
}


def _train(flags, device):
    return run_ranks(2, run_here, "gpt", (GPT + PP2 + flags).split(), device=device)


@pytest.fixture(scope="module")
def on_cpu():
    """Results of Megatron's own schedule on the CPU, over torch.distributed."""
    return _train("", "cpu")


@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("case", _CASES)
def test_training_equals_that_of_the_cpu(case, on_cpu):
    on_musa = _train(_CASES[case], "musa")
    for cpu, musa in zip(on_cpu, on_musa, strict=True):
        assert musa.transports == [
            "DirectTransport" if _IPC in _CASES[case] else "StagedTransport"
        ]
        assert musa.losses == cpu.losses
        assert musa.gradients == cpu.gradients
        assert musa.parameters == cpu.parameters
    assert len(on_musa[-1].losses) == 3
