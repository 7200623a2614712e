"""A `PipelineConfig` refuses what cannot be when it is made, in the words of whoever made it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ext
from megatron_ext import Disaggregation, DynamicOrder, PipelineConfig, Tracing
from megatron_ext.config import completion
from megatron_ext.config.cut import UserCut
from megatron_ext.config.flags import add_arguments, pipeline_config
from megatron_ext.config.hosting import inspect
from megatron_ext.errors import ArgumentsError, ScheduleError, UserError
from megatron_ext.schedules.table.costs import Costs


def _completed(args: Namespace, config: PipelineConfig) -> PipelineConfig:
    settings = vars(args)
    return completion.completed(settings, UserCut.of(settings), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zb_v"}, "no schedule 'zb_v'"),
        ({"schedule": "fbd"}, "schedule=fbd needs forward and backward ranks"),
        (
            {"schedule": "zb-v", "options": {"order": "zb"}},
            "zb-v has no option 'order'",
        ),
        ({"schedule": "interleaved", "chunks": 1}, "at least 2 chunks, got 1"),
        ({"schedule": "csv:x", "chunks": 2}, "schedule=csv:x: the file fixes chunks"),
        (
            {"costs": Costs()},
            "costs requires one of this package's schedules; add schedule=NAME",
        ),
        (
            {"weights_at_once": True},
            "weights_at_once requires one of this package's schedules; add sched",
        ),
        (
            {"stash_ratio": 1.65},
            "stash_ratio requires one of this package's schedules; add schedule=NAME",
        ),
        (
            {
                "disaggregation": Disaggregation(),
                "transport": "shm",
                "node_ips": ["10.0.0.1"],
            },
            "transport=shm has none; use transport=auto",
        ),
        (
            {"transport": "pigeon"},
            "transport 'pigeon' must be one of torch, auto, shm, tcp, rdma",
        ),
        (
            {"dynamic": DynamicOrder(), "transport": "torch"},
            "remove transport=torch",
        ),
        ({"node_ips": ("10.0.0.1",)}, "transport=torch has none; use transport=auto"),
        (
            {"device_path": "ipc"},
            "device_path=ipc needs shared memory, but transport is torch",
        ),
        ({"device": "tpu"}, "device=tpu must be one of auto"),
        (
            {"hang_timeout_s": 0.0},
            "hang_timeout_s=0.0 must be a positive number of seconds",
        ),
        (
            {"message_timeout_s": -1.0},
            "message_timeout_s=-1.0 must be a positive number",
        ),
        ({"stash_ratio": 0.5}, "stash_ratio=0.5 must be at least 1"),
        ({"chunks": 0}, "chunks=0 must be at least 1"),
        ({"chunks": "2"}, "chunks '2' must be a whole number or None"),
        (
            {"slice_tokens": "long"},
            "slice_tokens 'long' must be a whole number or auto or None",
        ),
        (
            {"schedule": "zb-v", "costs": (1, 2)},
            "costs (1, 2) must be a Costs object or None",
        ),
        ({"dynamic": True}, "dynamic True must be a DynamicOrder object or None"),
        ({"tracing": True}, "tracing True must be a Tracing object or None"),
        ({"transport": 3}, "transport 3 must be one of torch, auto, shm"),
        ({"options": [1]}, "options [1] must be a dict with values by name"),
        (
            {"schedule": "bitpipe", "options": {"order": None}},
            "must be a dict with values",
        ),
        ({"node_ips": "10.0.0.1"}, "node_ips '10.0.0.1' must be a tuple of strings"),
        ({"checksums": 1}, "checksums 1 must be True or False"),
        ({"hang_timeout_s": True}, "hang_timeout_s True must be a number or None"),
        ({"stash_ratio": "1"}, "stash_ratio '1' must be a number"),
        (
            {"disaggregation": Disaggregation(), "schedule": "1f1b"},
            "it has its own schedule",
        ),
        (
            {"disaggregation": Disaggregation(), "transport": "torch"},
            "are two jobs; use transport=auto",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        PipelineConfig(**settings)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DynamicOrder(extra_activations=-1),
            "extra_activations=-1: a rank cannot keep",
        ),
        (
            lambda: DynamicOrder(policy="depth-first", extra_activations=1),
            "policy=depth-first has no memory bound",
        ),
        (lambda: Tracing(interval=0), "interval=0 must be at least 1"),
        (lambda: Tracing(interval=1.5), "interval 1.5 must be a whole number"),
        (
            lambda: DynamicOrder(policy="x"),
            "policy 'x' must be one of hint, breadth-first",
        ),
        (lambda: Tracing(interval=3, iterations=4), "must be between 1 and interval=3"),
    ],
)
def test_parts_check_themselves(make: Any, message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        make()
    assert message in str(caught.value)


def test_what_is_meant_is_taken() -> None:
    assert Tracing(directory="traces").directory == Path("traces")  # type: ignore[arg-type]
    config = PipelineConfig(transport="tcp", node_ips=["10.0.0.1"], message_timeout_s=5)  # type: ignore[arg-type]
    assert config.node_ips == ("10.0.0.1",)


def test_completion_shows_what_is_exported_and_nothing_else() -> None:
    names = {name for name in dir(megatron_ext) if not name.startswith("__")}
    assert names == set(megatron_ext.__all__) - {"__version__"}
    assert {"Costs", "LengthCost", "PipelineConfig", "configure"} <= names
    for name in names:
        getattr(megatron_ext, name)
    assert megatron_ext.Costs is Costs


def test_it_is_frozen_and_travels() -> None:
    config = PipelineConfig(
        schedule="bitpipe", options={"order": "paper"}, tracing=Tracing()
    )
    with pytest.raises(FrozenInstanceError):
        config.schedule = "zb-v"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, transport="shm").options == {"order": "paper"}
    with pytest.raises(ScheduleError):
        replace(config, schedule="zb-v")


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("", PipelineConfig()),
        ("--enable-bitpipe-schedule", PipelineConfig(schedule="bitpipe")),
        (
            "--pipeline-schedule zb-v --pipeline-costs 1,2,1 --pipeline-transport shm",
            PipelineConfig(schedule="zb-v", costs=Costs(1, 2, 1), transport="shm"),
        ),
        (
            "--use-dpp --dpp-extra-activations 2 --hang-timeout 5",
            PipelineConfig(
                dynamic=DynamicOrder(extra_activations=2), hang_timeout_s=5.0
            ),
        ),
        (
            "--forward-backward-disaggregating --fbd-activations ship --trace",
            PipelineConfig(
                disaggregation=Disaggregation(activations="ship"), tracing=Tracing()
            ),
        ),
    ],
)
def test_flags_are_one_translation(flags: str, config: PipelineConfig) -> None:
    parser = add_arguments(ArgumentParser())
    assert pipeline_config(parser.parse_args(flags.split())) == config


@pytest.mark.parametrize(
    ("installed", "settings", "ratio"),
    [
        (True, {}, 1.6875),
        (True, {"tensor_model_parallel_size": 8}, 2.625),
        (True, {"tensor_model_parallel_size": 1}, 1),
        (True, {"sequence_parallel": False}, 1),
        (True, {"transformer_impl": "local"}, 1),
        (False, {}, 1),
    ],
)
def test_what_transformer_engine_keeps_for_w_follows_from_flags(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    settings: dict[str, Any],
    ratio: float,
) -> None:
    monkeypatch.setattr(
        completion, "find_spec", lambda name: name if installed else None
    )
    args = add_arguments(ArgumentParser()).parse_args(["--pipeline-schedule", "zb-v"])
    te = {"transformer_impl": "transformer_engine", "sequence_parallel": True}
    vars(args).update({**te, "tensor_model_parallel_size": 4, **settings})
    assert _completed(args, pipeline_config(args)).stash_ratio == ratio


@pytest.mark.parametrize(
    ("settings", "ratio", "at_once"),
    [
        ({"recompute_granularity": "selective"}, 1, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, 1.25, False),
        ({"recompute_modules": ["moe_act"]}, 1, False),  # without a granularity it has no effect
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, 16, True),
        ({"recompute_granularity": "full", "recompute_method": "uniform",
          "recompute_num_layers": 2}, 32, True),
        ({"recompute_granularity": "full", "recompute_method": "block",
          "recompute_num_layers": 1}, 1.8125, False),
        ({"recompute_granularity": "full", "recompute_method": "block",
          "recompute_num_layers": 2}, 16, True),
    ],
)  # fmt: skip
def test_what_recomputation_leaves_for_w_follows_from_flags(
    settings: dict[str, Any], ratio: float, at_once: bool
) -> None:
    """zb-v on 2 ranks, so 8 layers are 2 in each of 4 stages."""
    args = add_arguments(ArgumentParser()).parse_args(["--pipeline-schedule", "zb-v"])
    vars(args).update({"pipeline_model_parallel_size": 2, "num_layers": 8, **settings})
    config = _completed(args, pipeline_config(args))
    assert (config.stash_ratio, config.weights_at_once) == (ratio, at_once)
    assert _completed(args, PipelineConfig(schedule="zb-v")) == config
    args.pipeline_schedule = "csv:file"  # whose order is the user's
    assert not _completed(args, pipeline_config(args)).weights_at_once


def test_flags_are_named_where_flags_were_given() -> None:
    parser = add_arguments(ArgumentParser())
    args = parser.parse_args("--use-dpp --pipeline-transport torch".split())
    with pytest.raises(
        ArgumentsError, match=r"--use-dpp needs to know .* remove --pipeline-transport"
    ):
        inspect(args).raise_refusals()


def test_it_costs_no_import_of_torch() -> None:
    code = (
        "import sys, megatron_ext; megatron_ext.PipelineConfig(schedule='zb-v'); "
        "print(*{'torch', 'numpy', 'megatron.core'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelines'"):
        _ = megatron_ext.Pipelines
