"""The tiny size of every model trains: the flags of its script, for a few steps on two ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.scripts import dry_run, make_data, megatron_flags
from tests.ranks import losses, run_script

# Llama 3 trains in tests/test_examples.py, through its script.
MODELS = ("mixtral", "deepseek-v2", "deepseek-v3", "gpt", "bert")
_FEW_STEPS = (
    "--train-iters=3",
    "--log-interval=1",
    "--eval-iters=1",
    "--num-workers=0",
)


@pytest.fixture(scope="module", autouse=True)
def _data() -> None:
    make_data("python_reference", "word_pieces")


def train(
    model: str, out: Path, *flags: str, ranks: int = 2, device: str = "cpu", **env: str
) -> list[float]:
    """Train as the script would, and return the losses of three steps."""
    script = f"examples/{model}/run.sh"
    asked = ("--tiny", "--out", str(out), *_FEW_STEPS, *flags)
    words = dry_run(script, *asked, NPROC=str(ranks), **env)
    logs = run_script(
        ranks,
        "pretrain_bert.py" if model == "bert" else "pretrain_gpt.py",
        megatron_flags(words),
        device=device,
        timeout_s=240,
    )
    found = losses(logs)
    assert len(found) == 3
    assert all(map(math.isfinite, found))
    return found


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """The losses of a model on the CPU."""
    return functools.cache(lambda model: train(model, tmp_path_factory.mktemp(model)))


@pytest.mark.parametrize("model", MODELS)
def test_it_learns(model: str, on_cpu: Callable[[str], list[float]]) -> None:
    found = on_cpu(model)
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dualpipe-v", "zb-v", "1f1b", "bitpipe"])
def test_deepseek_in_pairs(schedule: str, tmp_path: Path) -> None:
    """The command of its README, which nothing in the model's own flags but `moe` excludes."""
    flags = f"--bf16 --pipeline-schedule {schedule} --overlap-moe-expert-parallel-comm "
    flags += "--recompute-modules mla_up_proj layernorm "
    flags += "--pipeline-model-parallel-size 4" if schedule == "bitpipe" else ""
    found = train("deepseek-v3", tmp_path, *flags.split(), ranks=4)
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("model", ["llama3", "deepseek-v3"])
def test_moore_threads(
    model: str, tmp_path: Path, on_cpu: Callable[[str], list[float]]
) -> None:
    """On the emulated device: the script takes its flags, and losses are those of the CPU."""
    from tests.fake_musa.build import environment

    found = train(
        model,
        tmp_path,
        "--device-backend",
        "musa",
        device="musa",
        **{**environment(), "MEGATRON_EXT_DEVICE": "auto"},
    )
    assert found == pytest.approx(on_cpu(model), rel=1e-5)
