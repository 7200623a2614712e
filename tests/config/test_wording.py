"""One error in the words of each of its readers: flags, fields, and Bridge's names."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext import preflight
from megatron_ext.config.flags import (
    FIELD_OF,
    FLAG_OF,
    MEGATRON_FIELDS,
    add_arguments,
    in_fields,
    in_flags,
    pipeline_config,
    with_flags,
)
from megatron_ext.config.incompatible import RULES
from megatron_ext.config.pipeline_config import (
    Disaggregation,
    DynamicOrder,
    PipelineConfig,
    Tracing,
)
from megatron_ext.config.refusals import Preflight, Refusal
from megatron_ext.errors import ArgumentsError, ConfigurationError, in_python
from megatron_ext.hosts.bridge import Settings
from megatron_ext.rules import dest_of
from megatron_ext.schedules.table.length_cost import LengthCost

ROLES = {"disaggregation": Disaggregation()}

MISTAKES: list[dict[str, Any]] = [
    {"device": "tpu"},
    {"length_costs": LengthCost(1, 0)},
    {"stash_ratio": 0.5},
    {"node_ips": ("10.0.0.1",)},
    {"message_timeout_s": -1.0},
    {"hang_timeout_s": 0.0},
    {"slices": 65},
    {"slices": 4, **ROLES},
    {"slices": 4, "pairs": True, "schedule": "zb-v"},
    {"slices": 4, "balance": "order", "schedule": "zb-v"},
    {"slices": 4, "variable_seq_lengths": True, "schedule": "zb-v"},
    {"slices": 4},
    {"slice_tokens": 8},
    {"slice_tokens": 0, "schedule": "zb-v"},
    {"slice_tokens": 8, "slices": 2, "schedule": "zb-v"},
    {"slice_tokens": 8, "pairs": True, "schedule": "zb-v"},
    {"slice_tokens": 8, "schedule": "v-half"},
    {"slice_tokens": 8, **ROLES},
    {"schedule": "zb-v", **ROLES},
    {"pairs": True, **ROLES},
    {"balance": "order", **ROLES},
    {"transport": "torch", **ROLES},
    {"device_path": "ipc", **ROLES},
    {"chunks": 0},
    {"balance": "pack"},
    {"pairs": True},
    {"weights_at_once": True},
    {"schedule": "csv:x", "chunks": 2},
    {"schedule": "fbd"},
    {"dynamic": DynamicOrder(), "transport": "torch"},
    {"checksums": True},
    {"checksums": True, "device_path": "ipc", "transport": "shm"},
    {"device_path": "ipc"},
]
"""One for each rule of `PipelineConfig` about values and their combinations."""


@pytest.mark.parametrize("settings", MISTAKES, ids=str)
def test_a_mistake_has_no_flags_in_python_and_no_fields_on_a_command_line(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PipelineConfig(**settings)
    error = caught.value
    assert "--" not in str(error)
    assert str(error) == error.worded(in_python)
    flags = error.worded(in_flags)
    # Whatever has a flag is called by it.
    named = [
        field for field in FLAG_OF if re.search(rf"{{{field}[:}}]", error.template)
    ]
    assert all(FLAG_OF[field] in flags for field in named)
    assert not any(f"{field}=" in flags for field in FLAG_OF)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--pipeline-slices 4 --pipeline-balance order --pipeline-schedule zb-v",
            (
                "--pipeline-slices 4 cannot run with --pipeline-balance: it cuts all micro-batches "
                "alike; use --pipeline-slice-tokens 4096 without --pipeline-slices, or remove one "
                "of them"
            ),
        ),
        (
            "--pipeline-slices 65",
            "--pipeline-slices 65: a micro-batch has 1 to 64 slices; use --pipeline-slices 4 or 8",
        ),
    ],
)
def test_a_command_line_gets_flags(words: str, message: str) -> None:
    [refusal] = preflight(words).refusals
    assert str(refusal) == message
    args = add_arguments(ArgumentParser()).parse_args(words.split())
    with pytest.raises(ConfigurationError) as caught:
        pipeline_config(args)
    assert caught.value.worded(in_flags) == message


def test_parts_are_named_by_their_fields() -> None:
    with pytest.raises(
        ConfigurationError, match="iterations=4 must be between 1 and interval=3"
    ):
        Tracing(interval=3, iterations=4)
    with pytest.raises(
        ConfigurationError, match="extra_activations=2: policy=breadth-first has"
    ):
        DynamicOrder(policy="breadth-first", extra_activations=2)


def test_a_value_may_look_like_a_template() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PipelineConfig(schedule="csv:{slices}", chunks=2)
    assert str(caught.value).startswith("schedule=csv:{slices}: the file fixes chunks")


@dataclass
class _Model:
    context_parallel_size: int = 2


def test_a_refusal_has_a_form_for_each_reader() -> None:
    settings = Settings(SimpleNamespace(model=_Model()))
    answer = Preflight()
    with answer.collecting("slices"):
        raise ConfigurationError(
            "{slices:4} cannot run with --context-parallel-size=2; use --no-rope or --seed=1"
        )
    [refusal] = answer.refusals
    assert str(refusal) == (
        "--pipeline-slices 4 cannot run with --context-parallel-size 2; use --no-rope or --seed 1"
    )
    assert (refusal.rule, refusal.remedy) == ("slices", "use --no-rope or --seed 1")
    assert refusal.worded(in_fields) == (
        "slices=4 cannot run with context_parallel_size=2; use rope=False or seed=1"
    )
    assert refusal.worded(settings.in_fields) == (
        "slices=4 cannot run with model.context_parallel_size=2; use rope=False or seed=1"
    )
    assert refusal.worded(settings.in_flags) == (
        "--pipeline-slices 4 cannot run with model.context_parallel_size=2; use --no-rope or "
        "--seed 1"
    )
    with pytest.raises(ArgumentsError, match=r"^slices=4 cannot run with model"):
        answer.raise_refusals(settings.in_fields)


SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32"

MISCOUNTED = (
    "micro-batch-size 2 --global-batch-size 5",
    "rampup-batch-size 1 2 10 --global-batch-size 4",
    "pipeline-model-parallel-layout Et|tL",
    "seq-length -1",
)
"""Flags whose batch, cut or size is impossible."""


@pytest.mark.parametrize("words", MISCOUNTED)
def test_errors_of_batches_and_of_the_cut_have_a_form_for_each_reader(
    words: str,
) -> None:
    """In Python no flag is left, and every value belongs to its field."""
    answer = preflight(
        f"{SIZES} --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2 "
        f"--pipeline-schedule zb-v --{words}"
    )
    [refusal] = answer.refusals
    on_command_line, in_program = str(refusal), refusal.worded(in_fields)
    assert not re.search(r"--[a-z0-9-]+=", on_command_line)
    assert "--" not in in_program
    settings = re.findall(
        r"(--[a-z0-9-]+) (-?[0-9]+|Et[|]tL)(?![0-9 ]*[0-9])", on_command_line
    )
    assert settings
    for flag, value in settings:
        assert in_fields(flag, value) in in_program


@pytest.mark.parametrize("group", RULES)
def test_each_rule_has_a_form_for_each_reader(group: str) -> None:
    """Settings of Megatron's are flags, fields of its objects, or fields of Bridge's."""
    subject = with_flags("slices", "4")
    for rule in RULES[group]:
        cause = f"{subject} cannot run with {rule.flag}: {rule.reason}"
        refusal = Refusal(rule.reads[0], cause, rule.remedy.replace("SUBJECT", subject))
        flags = re.findall(r"--[a-z0-9-]+", refusal.cause + refusal.way_out)
        on_command_line, in_program = str(refusal), refusal.worded(in_fields)
        assert on_command_line.startswith("--pipeline-slices 4 cannot run with ")
        assert all(flag in on_command_line for flag in flags)
        assert not re.search(r"--[a-z0-9-]+=", on_command_line)
        assert in_program.startswith("slices=4 cannot run with ")
        assert "--" not in in_program
        # Bridge has all of Megatron's in one part here, and says so.
        dests = [dest_of(flag) for flag in flags if flag not in FIELD_OF]
        fields = [dest.removeprefix("no_") for dest in dests]
        model = make_dataclass(
            "Model", [(name, Any, None) for name in dict.fromkeys(fields)]
        )()
        in_bridge = refusal.worded(Settings(SimpleNamespace(model=model)).in_fields)
        assert in_bridge.count("model.") == len(dests)
        for name, bridge_name in MEGATRON_FIELDS.items():
            in_bridge = in_bridge.replace(f"model.{name}", bridge_name)
        assert in_bridge.replace("model.", "") == in_program
