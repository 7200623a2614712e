"""Training on the emulated device over shared memory, against the CPU's: bit for bit.

Its streams copy as late as they may (`tests/fake_musa`), so an order that nobody enforces shows.
"""

import pytest

from tests.ranks import run_ranks
from tests.schedules.runtime.capture import GPT, PP2, run_here

_CASES = {
    "a table": ("StagedTransport", "--pipeline-schedule zb-h1 --pipeline-transport shm"),
    "Megatron's own schedule": ("StagedTransport", "--pipeline-transport shm"),
    "what arrives first": ("StagedTransport", "--pipeline-schedule 1f1b --use-dpp"),
    "one host": ("TorchTransport", "--pipeline-schedule 1f1b --pipeline-transport auto"),
}


@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("case", _CASES)
def test_training_equals_that_of_the_cpu(case):
    transport, flags = _CASES[case]
    argv = (GPT + PP2 + flags).split()
    on_cpu, on_musa = (run_ranks(2, run_here, "gpt", argv, device=d) for d in ("cpu", "musa"))
    for cpu, musa in zip(on_cpu, on_musa, strict=True):
        assert musa.transports == [transport]
        assert musa.losses == cpu.losses
        assert musa.gradients == cpu.gradients
        assert musa.parameters == cpu.parameters
    assert len(on_musa[-1].losses) == 3
