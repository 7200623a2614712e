"""What excludes slices by length: flags, the doctor, Bridge and programs refuse the same."""

from __future__ import annotations

import re
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import megatron_ext
from megatron_ext import PipelineConfig
from megatron_ext.errors import UserError
from megatron_ext.hosts.bridge import Settings
from megatron_ext.planning.hardware import parse_devices
from megatron_ext.tools.doctor.flight import check_training
from tests.ranks import run_ranks

SIZES = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 16 --vocab-size 1024 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 64 "
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --disable-bias-linear "
    "--transformer-impl local --no-masked-softmax-fusion --hidden-dropout 0 "
    "--attention-dropout 0 "
)
MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 16,
    "add_bias_linear": False,
    "pipeline_model_parallel_size": 2,
}


class Refused(NamedTuple):
    """Settings that cannot run, as flags and as fields of the model's configuration."""

    slice_tokens: int
    flags: str
    fields: dict[str, Any]
    remedy: str
    """The flag to use or to leave out."""


CASES = {
    "fewer tokens than ranks": Refused(
        slice_tokens=8,
        flags="--sequence-parallel --tensor-model-parallel-size 16 ",
        fields={"sequence_parallel": True, "tensor_model_parallel_size": 16},
        remedy="use --pipeline-slice-tokens 16 or more",
    ),
    "windows": Refused(
        slice_tokens=64,
        flags="--window-size 4,0 ",
        fields={"window_size": (4, 0)},
        remedy="remove --pipeline-slice-tokens",
    ),
    "context parallelism": Refused(
        slice_tokens=64,
        flags="--context-parallel-size 2 ",
        fields={"context_parallel_size": 2},
        remedy="remove --pipeline-slice-tokens",
    ),
    "experts that gather equal numbers of tokens": Refused(
        slice_tokens=64,
        flags="--num-experts 4 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type allgather ",
        fields={
            "num_moe_experts": 4,
            "expert_model_parallel_size": 2,
            "moe_token_dispatcher_type": "allgather",
        },
        remedy="use --moe-token-dispatcher-type alltoall",
    ),
}


def _lines_of_flags(refused: Refused) -> list[str]:
    words = f"{SIZES}--pipeline-slice-tokens {refused.slice_tokens} {refused.flags}"
    answer = megatron_ext.preflight(words.split(), world_size=64)
    return [str(refusal) for refusal in answer.refusals]


def _lines_of_bridge(refused: Refused) -> list[str]:
    fields = {
        "moe_token_dispatcher_type": "alltoall",
        "sequence_parallel": False,
        "tensor_model_parallel_size": 1,
        **MODEL,
        **refused.fields,
    }
    # Bridge's configurations are dataclasses.
    model = make_dataclass("Model", fields)(**fields)
    settings = Settings(SimpleNamespace(model=model))
    config = PipelineConfig(schedule="zb-h1", slice_tokens=refused.slice_tokens)
    answer = megatron_ext.preflight(
        settings.arguments(world_size=64, rank=0), config, world_size=64
    )
    return [str(refusal) for refusal in answer.refusals]


def _lines_of_programs(cases: list[Refused]) -> list[list[str]]:
    from megatron.core.transformer import TransformerConfig

    lines_by_case = []
    for refused in cases:
        megatron_ext.configure(
            PipelineConfig(schedule="zb-h1", slice_tokens=refused.slice_tokens),
            pipeline_ranks=2, num_microbatches=16, num_layers=8,
        )  # fmt: skip
        lines: list[str] = []
        try:
            TransformerConfig(
                **MODEL, pipeline_dtype="float32", cp_comm_type="p2p", **refused.fields
            )
        except UserError as error:
            lines = str(error).splitlines()
        lines_by_case.append(lines)
        megatron_ext.deconfigure()
    return lines_by_case


@pytest.mark.parametrize("name", CASES)
def test_flags_and_bridge_refuse_in_one_line(name: str) -> None:
    refused = CASES[name]
    [line] = _lines_of_flags(refused)
    assert refused.remedy in line
    assert _lines_of_bridge(refused) == [line]
    words = f"{SIZES}--pipeline-slice-tokens {refused.slice_tokens} {refused.flags}"
    findings = check_training(words.split(), *parse_devices("64xh100"))
    failures = [str(finding) for finding in findings if finding.level == "FAIL"]
    assert failures == [f"FAIL training: {line}"]


def test_programs_are_refused_when_they_build_their_model() -> None:
    [lines_by_case] = run_ranks(1, _lines_of_programs, list(CASES.values()))
    for refused, lines in zip(CASES.values(), lines_by_case, strict=True):
        [line] = lines
        # Programs know settings by the names of fields.
        remedy = refused.remedy.replace("--pipeline-", "").replace("--", "")
        words = re.split("[ =_-]", remedy)
        assert re.search("[ =_-]".join(words), line.partition("; ")[2]), line


def test_a_sequence_of_too_many_slices_is_refused() -> None:
    refused = Refused(slice_tokens=7, flags="", fields={}, remedy="")
    [line] = _lines_of_flags(refused)
    assert line == (
        "--pipeline-slice-tokens 7: --seq-length 512 would have 74 slices, but a micro-batch can "
        "have only 64; use --pipeline-slice-tokens 8 or more"
    )
    assert _lines_of_flags(refused._replace(slice_tokens=8)) == []


def test_experts_of_one_rank_may_gather() -> None:
    gathering = CASES["experts that gather equal numbers of tokens"]
    flags = gathering.flags.replace("parallel-size 2", "parallel-size 1")
    assert _lines_of_flags(gathering._replace(flags=flags)) == []
