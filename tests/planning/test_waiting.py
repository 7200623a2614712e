"""`--pipeline-waiting-weights auto`: as many W as fit beside what a forecast needs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext import cli
from megatron_ext.config import automatic
from megatron_ext.config.entrances import running
from megatron_ext.config.hosting import inspect, preflight
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.waiting import MAX_WAITING, most_waiting
from megatron_ext.upstream.signatures import parameters
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks
from tests.runtime.capture import GPT, PP2
from tests.runtime.test_equality import EP2, PAIRED

if TYPE_CHECKING:
    from megatron_ext.config.refusals import Preflight

_MODEL = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --swiglu --seq-length 1024 "
    "--max-position-embeddings 1024 --bf16 --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 2048 --moe-token-dispatcher-type alltoall "
)
_JOB = (
    f"{_MODEL}--expert-model-parallel-size 4 --pipeline-model-parallel-size 4 "
    "--micro-batch-size 1 --global-batch-size 256 --use-distributed-optimizer "
    "--transformer-impl local "
)
_PAIRS = "--pipeline-schedule zb-h1 --overlap-moe-expert-parallel-comm "
_AUTO = "--pipeline-waiting-weights auto "
_RESERVE_GIB = DEVICES["h100"].reserve_gib


def _checked(flags: str, memory_gib: float | None = 79.1) -> Preflight:
    device = None
    if memory_gib is not None:
        device = replace(DEVICES["h100"], memory_gib=memory_gib)
    return preflight(flags, world_size=16, device_kind=device)


def _line(answer: Preflight) -> str:
    [line] = [line for line in answer.changes if line.startswith(_AUTO.rstrip())]
    return line


@given(
    table_gib=st.floats(0, 100),
    weights_gib=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    limit_gib=st.floats(1, 100),
)
def test_the_largest_number_that_fits(
    table_gib: float, weights_gib: list[float], limit_gib: float
) -> None:
    def layout_with(number: int) -> SimpleNamespace:
        memory_gib = tuple(table_gib + number * each for each in weights_gib)
        return SimpleNamespace(memory_gib=memory_gib)

    answer = most_waiting(layout_with, limit_gib)  # type: ignore[arg-type]
    assert answer.needed_gib == max(layout_with(answer.number).memory_gib)
    assert answer.needed_gib <= limit_gib or answer.number == 0
    if answer.number < MAX_WAITING:
        assert answer.next_gib == max(layout_with(answer.number + 1).memory_gib)
        assert answer.next_gib > limit_gib
    else:
        assert answer.next_gib is None
    assert layout_with(answer.number).memory_gib[answer.rank] == answer.needed_gib


def test_auto_takes_the_memory_that_is_free() -> None:
    """With less of it fewer W wait, and the table is the one of that number."""
    roomy = _checked(f"{_JOB}{_PAIRS}{_AUTO}")
    assert roomy.config.waiting_weights == MAX_WAITING, _line(roomy)
    assert f"auto: {MAX_WAITING}, because rank " in _line(roomy)
    assert "and more than 8 gain little" in _line(roomy)
    needed_gib = float(_line(roomy).partition(" needs ")[2].split()[0])
    tight = _checked(f"{_JOB}{_PAIRS}{_AUTO}", needed_gib + _RESERVE_GIB - 0.3)
    number = tight.config.waiting_weights
    assert 0 < number < MAX_WAITING, _line(tight)
    assert "and with one more a rank would need " in _line(tight)
    by_number = _checked(f"{_JOB}{_PAIRS}--pipeline-waiting-weights {number} ")
    assert tight.pipeline.full == by_number.pipeline.full
    assert running(tight.pipeline) == running(by_number.pipeline)
    none = _checked(f"{_JOB}{_PAIRS}{_AUTO}", 6.0)
    assert none.config.waiting_weights == 0
    assert "auto: 0, because with one, a rank would need " in _line(none)


@pytest.mark.parametrize(
    ("flags", "memory_gib", "reason"),
    [
        ("", None, "the memory of the job's devices is unknown"),
        (
            "--transformer-impl transformer_engine ",
            79.1,
            "its matrix products share one workspace",
        ),
        ("--sequence-parallel --tensor-model-parallel-size 2 ", 79.1, "W gathers its"),
        ("--pipeline-schedule 1f1b ", 79.1, "1f1b does not split backward passes"),
        ("--expert-model-parallel-size 1 ", 79.1, "no actions run as pairs"),
        (
            (
                "--recompute-granularity full --recompute-method block "
                "--recompute-num-layers 2 "
            ),
            79.1,
            "the planner would recompute each layer by itself",
        ),
    ],
)
def test_auto_says_why_none_waits(
    flags: str, memory_gib: float | None, reason: str
) -> None:
    answer = _checked(f"{_JOB}{_PAIRS}{_AUTO}{flags}", memory_gib)
    assert f"{_AUTO.rstrip()}: 0, because " in _line(answer)
    assert reason in _line(answer)
    if answer.accepted:
        assert answer.config.waiting_weights == 0


def test_without_the_flag_w_runs_where_the_table_has_it() -> None:
    answer = _checked(f"{_JOB}{_PAIRS}")
    assert answer.config.waiting_weights == 0
    assert not [line for line in answer.changes if "waiting" in line]


def test_a_configuration_takes_auto() -> None:
    config = PipelineConfig(schedule="zb-h1", pairs=True, waiting_weights="auto")
    assert config.num_waiting == 0, "until the sizes of the job are known"
    settings = preflight(f"{_JOB}{_PAIRS}", world_size=16).checked_args
    answer = preflight(settings, config, world_size=16, device_kind=DEVICES["h100"])
    assert answer.config.waiting_weights == MAX_WAITING
    with pytest.raises(ConfigurationError, match="compares tables without it"):
        PipelineConfig(schedule="auto", waiting_weights="auto")


def test_a_word_that_is_not_auto_is_refused() -> None:
    [refusal] = _checked(f"{_JOB}{_PAIRS}--pipeline-waiting-weights many ").refusals
    assert "many is neither a whole number nor auto" in str(refusal)


def test_a_rank_in_a_job_says_what_its_device_has() -> None:
    """The ranks here are CPUs, whose memory the planner does not know."""
    require_training()
    flags = f"{GPT}{PP2}{EP2}{PAIRED['zb-h1'][1]}--global-batch-size 16 {_PAIRS}"
    [[result]] = run_ranks(1, outcomes, [("gpt", flags + _AUTO, 4)])
    assert isinstance(result, dict), result
    [line] = [line for line in result["log"] if "waiting-weights" in line]
    assert line.endswith("auto: 0, because the memory of the job's devices is unknown")


@pytest.mark.usefixtures("emulated_musa")
def test_a_rank_with_a_device_takes_its_free_memory() -> None:
    """With megatron-core 0.16, no W can wait on a device, and the rank says so."""
    require_training()
    flags = f"{GPT}{PP2}{EP2}{PAIRED['zb-h1'][1]}--global-batch-size 16 {_PAIRS}"
    [[result]] = run_ranks(1, outcomes, [("gpt", flags + _AUTO, 4)], device="musa")
    assert isinstance(result, dict), result
    [line] = [line for line in result["log"] if "waiting-weights" in line]
    if "comp_stream" in parameters("megatron.core.pipeline_parallel.utils:set_streams"):
        assert (
            "auto: 0, because --pipeline-waiting-weights 8 needs megatron-core" in line
        )
        return
    assert "auto: 8, because rank " in line
    assert " GiB of 75.0 by forecast" in line
    [line] = [line for line in result["log"] if line.startswith("pipeline schedule")]
    assert "lets up to 8 more W wait" in line


def test_ranks_compare_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with --pipeline-schedule auto; tables that differ would not fit together."""
    monkeypatch.setattr(automatic, "memory_here", lambda: DEVICES["h100"])
    args = _checked(f"{_JOB}{_PAIRS}{_AUTO}").checked_args
    answer = inspect(args, in_job=True)
    assert answer.choice is not None, answer.refusals
    assert answer.choice.flags == f"--pipeline-waiting-weights {MAX_WAITING}"
    assert answer.choice.basis == "for h100 with 74.1 GiB"


def test_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--devices 16xh100 --global-batch-size 256 -- {_MODEL}".split()
    fixed = "pp=4,ep=4,tp=1,cp=1,micro_batch=1,schedule=zb-h1,pairs=yes"
    assert cli.main(["plan", "--fix", fixed, *words]) == 0
    printed = capsys.readouterr().out
    assert (
        "--pipeline-waiting-weights 8 fits with the first layout, because rank"
        in printed
    )
    assert cli.main(["plan", "--json", "--fix", fixed, *words]) == 0
    assert json.loads(capsys.readouterr().out)["waiting_weights"] == 8
    whole = fixed.replace("zb-h1", "1f1b")
    assert cli.main(["plan", "--json", "--fix", whole, *words]) == 0
    assert json.loads(capsys.readouterr().out)["waiting_weights"] == 0
