"""Our flags on upstream's parser, the device's defaults and rules, and how mistakes end."""

from __future__ import annotations

import argparse
import logging

import pytest

from megatron_ext import devices
from megatron_ext.config.entrances import prepare
from megatron_ext.devices.cpu import CpuDevice
from megatron_ext.errors import ArgumentsError
from megatron_ext.patches.arguments import prepare_parser
from tests.ranks import start_script
from tests.training.helpers import errors

_TINY = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 1
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 16 --eval-interval 10
    --eval-iters 0
""".split()


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices._PROCESS, "device", CpuDevice())


def _parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--distributed-backend", default="nccl", choices=["nccl", "gloo"]
    )
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    return prepare_parser(parser).parse_args(argv)


def test_the_devices_needs_become_the_parsers_defaults() -> None:
    args = _parse()
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")
    prepare(args)


def test_help_is_printed_where_a_text_is_no_format() -> None:
    parser = argparse.ArgumentParser(prog="pretrain_gpt.py")
    flag = parser.add_argument("--moe-factor")
    flag.help = (
        "a factor (e.g. 1.10 = 10%)."  # as in 0.19; Python 3.14 would refuse it earlier
    )
    parser.add_argument(
        "--sequences", default=3, help="50%% of %(default)s of %(prog)s"
    )
    printed = prepare_parser(parser).format_help()
    assert "a factor (e.g. 1.10 = 10%)." in printed
    assert "50% of 3 of pretrain_gpt.py" in printed


def test_a_contrary_flag_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ArgumentsError, match=r"--transformer-impl is 'transformer_engine', but cpu ne"
    ):
        prepare(_parse("--transformer-impl", "transformer_engine"))


@pytest.mark.parametrize("place", ["file", "command line", "environment"])
def test_a_file_in_place_of_flags_leaves_ours_out(
    place: str, monkeypatch: pytest.MonkeyPatch, a_training_loop: None
) -> None:
    from megatron.training import yaml_arguments

    read = argparse.Namespace(yaml_cfg="run.yaml")
    if place == "file":
        read.pipeline_schedule = "zb-v"
    elif place == "command line":
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--pipeline-schedule=zb-v"])
    else:
        monkeypatch.setenv("MEGATRON_EXT_FLAGS", "--pipeline-schedule zb-v")
    with pytest.raises(
        ArgumentsError, match="--pipeline-schedule has no effect with --yaml-cfg"
    ):
        yaml_arguments.validate_yaml(read)


def test_all_mistakes_are_told_at_once() -> None:
    args = _parse(
        "--transformer-impl", "transformer_engine", "--context-parallel-size", "2"
    )
    with pytest.raises(ArgumentsError) as caught:
        prepare(args)
    assert len(str(caught.value).splitlines()) == 2


def test_nccl_on_the_cpu_becomes_gloo_with_a_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = _parse("--distributed-backend", "nccl")
    with caplog.at_level(logging.WARNING):
        prepare(args)
    assert args.distributed_backend == "gloo"
    assert "--distributed-backend nccl: gloo is used" in caplog.text


def test_a_device_named_too_late_is_an_error_that_says_how() -> None:
    with pytest.raises(ArgumentsError, match="set MEGATRON_EXT_DEVICE=musa"):
        prepare(_parse("--device-backend", "musa"))
    prepare(_parse("--device-backend", "cpu"))


def test_a_namespace_without_our_flags_is_fine() -> None:
    prepare(argparse.Namespace())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 3", "world size"),
        ("--pipeline-model-parallel-size 0", "must be a whole number of at least 1"),
        ("--num-attention-heads 0", "--num-attention-heads is 0: must be at least 1"),
        ("--transformer-impl transformer_engine", "local"),
        ("--context-parallel-size 2", "context-parallel"),
        ("--device-backend musa", "MEGATRON_EXT_DEVICE"),
    ],
)
def test_upstreams_script_refuses_in_one_line(
    flags: str, message: str, megatron_lm_path: object
) -> None:
    [line] = set(errors(start_script(2, "pretrain_gpt.py", [*_TINY, *flags.split()])))
    assert message in line


def test_an_assertion_without_a_message_shows_its_condition(
    megatron_lm_path: object,
) -> None:
    flags = [*_TINY, "--num-dataset-builder-threads", "0"]
    [line] = errors(start_script(1, "pretrain_gpt.py", flags))
    assert "assert args.num_dataset_builder_threads > 0 (arguments.py:" in line


def test_upstreams_script_lists_the_patches_on_demand(megatron_lm_path: object) -> None:
    run = start_script(2, "pretrain_gpt.py", [*_TINY, "--ext-list-patches"])
    assert run.exit_codes == [0, 0], run.describe()
    assert (
        "arguments.validate  [wrap, order 0; installed, active, intact]" in run.logs[0]
    )
    assert "arguments.validate  [" not in run.logs[1]
