"""Upstream's unmodified script trains on the emulated MUSA device as it does on the CPU.

Losses are compared as they are logged: seven digits.
"""

import pytest

from tests.ranks import losses, run_script
from tests.upstream_script import runs

pytestmark = [
    pytest.mark.tree,
    pytest.mark.usefixtures("megatron_lm_path", "emulated_musa"),
]

_PP2 = "--pipeline-model-parallel-size 2 "
_TP2 = "--tensor-model-parallel-size 2 "
_SHARDED = "--use-distributed-optimizer "
_STEPS = 5


def _train(flags, device):
    logs = run_script(
        2, "pretrain_gpt.py", flags.split(), timeout_s=runs.TIMEOUT_S, device=device
    )
    return losses(logs)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(_PP2, id="pp2"),
        pytest.param(
            _PP2 + "--num-layers-per-virtual-pipeline-stage 1", id="pp2-vpp2-overlap"
        ),
        pytest.param(_TP2, id="tp2"),
        pytest.param(_TP2 + "--sequence-parallel", id="tp2-sp"),
        pytest.param(
            _SHARDED + "--overlap-grad-reduce --overlap-param-gather", id="dp2-sharded"
        ),
        pytest.param(_PP2 + "--bf16", id="pp2-bf16"),
        pytest.param(_TP2 + "--fp16 --initial-loss-scale 1024", id="tp2-fp16"),
        pytest.param("--distributed-backend nccl", id="dp2-script-written-for-gpus"),
        pytest.param(
            runs.MIXTRAL
            + "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            id="moe-ep2",
        ),
        pytest.param(runs.DEEPSEEK + _PP2, id="mla-mtp-pp2"),
    ],
)
def test_losses_equal_those_of_the_cpu(flags):
    on_cpu = _train(runs.GPT + flags, "cpu")
    on_musa = _train(runs.GPT + flags, "musa")
    assert len(on_cpu) == _STEPS
    assert on_musa == pytest.approx(on_cpu, rel=1e-6)


@pytest.mark.slow
def test_a_sharded_run_resumes(tmp_path):
    flags = (
        runs.GPT + _SHARDED + f"--save {tmp_path} --load {tmp_path} --save-interval 3 "
    )
    whole = _train(runs.GPT + _SHARDED, "musa")
    first = _train(flags + "--exit-interval 3", "musa")
    rest = _train(flags, "musa")
    assert first == whole[:3]
    assert runs.step_losses(rest) == pytest.approx(
        runs.step_losses(whole)[3:], rel=1e-6
    )
