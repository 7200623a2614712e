"""The CPU backend under torch's CUDA build on a machine without a driver.

That is what `pip install torch` gives on Linux. torch asks `torch.accelerator` where Megatron asks
`torch.cuda`; where the two disagree a training dies in its data loader or in its optimizer.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.devices.cuda_build import is_real
from tests.examples.scripts import LLAMA3, bash
from tests.training.helpers import MOCK

_PRETEND = "from tests.devices.cuda_build import pretend; pretend()\n"
_ARM = "import torch, megatron_ext, megatron.core\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_python("-c", _PRETEND + code, *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_host_is_no_accelerator() -> None:
    run(f"""{_ARM}
from torch import accelerator
assert torch.cuda.is_available()
assert not accelerator.is_available()
assert accelerator.current_accelerator() is None
assert accelerator.current_accelerator(check_available=True) is None
assert accelerator.device_count() == 0
assert torch._C._get_accelerator() == torch.device("cpu")
assert torch._C._accelerator_getAccelerator() is None
assert torch.get_device_module() is torch.cpu
""")


def test_whoever_does_not_ask_first_gets_the_answers_of_torch_cuda() -> None:
    run(f"""{_ARM}
from torch import accelerator
for name in ("current_stream", "memory_allocated", "memory_reserved", "max_memory_allocated",
             "max_memory_reserved", "synchronize", "empty_cache", "reset_peak_memory_stats"):
    if hasattr(accelerator, name):
        assert type(getattr(accelerator, name)()) is type(getattr(torch.cuda, name)()), name
assert accelerator.current_stream() is torch.cuda.current_stream()
side = torch.cuda.Stream()
accelerator.set_stream(side)
assert torch.cuda.current_stream() is side
accelerator.set_device_index(accelerator.current_device_index())
with accelerator.device_index(0):
    torch.ones(1).record_stream(accelerator.current_stream())
""")


def test_a_loader_an_optimizer_and_forked_random_numbers() -> None:
    run(f"""{_ARM}
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
for workers in (0, 1):
    batches = list(DataLoader(range(3), pin_memory=True, num_workers=workers))
    assert [int(batch) for batch in batches] == [0, 1, 2]
weight = torch.ones(2, requires_grad=True)
for reentrant in (True, False):
    checkpoint(torch.square, weight, use_reentrant=reentrant).sum().backward()
torch.optim.Adam([weight]).step()
before = torch.get_rng_state()
with torch.random.fork_rng():
    torch.rand(1)
assert torch.equal(torch.get_rng_state(), before)
""")


def test_undoing_it_gives_the_build_back() -> None:
    run("""import torch
from torch import accelerator
before = {**vars(accelerator)}
asked = torch._C._accelerator_getAccelerator()
import megatron_ext, megatron.core
changed = {name for name, value in vars(accelerator).items() if before.get(name) is not value}
assert len(changed) >= 8, changed
megatron_ext.deactivate()
assert {**vars(accelerator)} == before
assert accelerator.current_accelerator() == asked == torch.device("cuda")
""")


@pytest.mark.slow
def test_a_training(tmp_path: Path) -> None:
    """With worker processes of the data loader, an evaluation, a checkpoint and its resumption."""
    flags = (
        f"{MOCK}--num-workers 1 --save {tmp_path} --load {tmp_path} --save-interval 2"
    )
    code = """
import os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost",
                  MASTER_PORT="0")
from megatron_ext.training import runner
raise SystemExit(runner.run("pretrain_gpt.py", sys.argv[1:]))
"""
    first = run(code, *flags.split(), "--exit-interval", "2")
    assert "validation loss at iteration 2" in first.stdout
    resumed = run(code, *flags.split())
    assert re.search(r"iteration +3/ +3 .* lm loss: \d", resumed.stdout)
    assert "iteration        2/" not in resumed.stdout


@pytest.mark.e2e
@pytest.mark.skipif(
    not is_real(), reason="needs torch's CUDA build on a machine without a driver"
)
@pytest.mark.parametrize("flags", [(), ("--pipeline-schedule", "zb-v", "--use-dpp")])
def test_the_first_command_of_the_readme(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    few = ("--train-iters", "4", "--log-interval", "1", "--eval-iters", "1")
    done = bash(
        LLAMA3, "--tiny", "--out", str(tmp_path), *few, *flags, MEGATRON_EXT_DEVICE=None
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"run.sh: loss \S+ at iteration 1, \S+ at iteration 4", done.stdout
    )
