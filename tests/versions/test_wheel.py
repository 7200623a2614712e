"""`pretrain_gpt.py` on the wheel's own training loop, without a Megatron-LM tree (0.17 and later).

That its losses are those of upstream's script is what `run.sh` shows, with a tree and without.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from tests.commands import run_package
from tests.ranks import _run_script, start_ranks
from tests.upstream_script.runs import GPT

pytestmark = [
    pytest.mark.skipif(
        not releases.has_training(),
        reason="the wheel of megatron-core 0.16 has no training loop",
    ),
    pytest.mark.slow,
]

ONE = GPT.replace("--train-iters 5", "--train-iters 1")


@pytest.fixture(autouse=True)
def no_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_model_trains_from_the_wheel_alone() -> None:
    done = run_package("pretrain_gpt.py", *ONE.split())
    assert done.returncode == 0, done.stderr
    assert "trains GPT with the wheel's megatron.training" in done.stdout
    assert "lm loss: " in done.stdout


def test_tensor_parallel_ranks_evaluate_another_batch() -> None:
    release = releases.installed_release()
    if release is not None and release < (0, 18):
        pytest.skip("before 0.18 evaluations have the batch of the training")
    flags = ONE.replace("--eval-iters 0", "--eval-iters 1 --eval-micro-batch-size 4 ")
    flags += "--tensor-model-parallel-size 2 "
    argv = ["pretrain_gpt.py", flags.split()]
    done = start_ranks(2, _run_script, *argv, env={"MEGATRON_LM_PATH": ""})
    assert done.exit_codes == [0, 0], done.describe()
    assert "validation loss at" in done.logs[-1]


def _with_sensors(flags: str) -> None:
    import torch

    from megatron_ext import devices

    devices.current().lacks = ()  # this process is a rank and ends
    for sensor in ("temperature", "power_draw", "utilization", "clock_rate"):
        setattr(torch.cuda, sensor, lambda: 1)
    _run_script("pretrain_gpt.py", flags.split())


def test_steps_are_timed_as_upstreams_script_times_them() -> None:
    flags = ONE + "--log-straggler --timing-log-level 2 "
    done = start_ranks(1, _with_sensors, flags, env={"MEGATRON_LM_PATH": ""})
    assert done.exit_codes == [0], done.describe()
    assert "MnRtt/Rnk: " in done.logs[0]
    assert "batch-generator" in done.logs[0]


@pytest.mark.parametrize("flags", ["--sft", "--experimental-attention-variant dsa"])
def test_what_only_the_script_does_is_refused_in_one_line(flags: str) -> None:
    flag = flags.partition(" ")[0]
    release = releases.installed_release()
    if "variant" in flag and release is not None and release >= (0, 19):
        pytest.skip("from 0.19 on the wheel builds such models itself")
    done = run_package("pretrain_gpt.py", *ONE.split(), *flags.split())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    [line] = [
        line for line in done.stderr.splitlines() if "megatron_ext: error" in line
    ]
    assert f"{flag} needs upstream's own pretrain_gpt.py" in line
    assert "megatron-ext upstream fetch" in line
