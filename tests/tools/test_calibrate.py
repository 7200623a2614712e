"""Costs that were measured: of single layers on a device, and of a traced run, in plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import cli
from megatron_ext.planning.calibration import Passes, factors, part_of
from megatron_ext.planning.hardware import DEVICES, parse_devices
from megatron_ext.planning.layer_costs import FULL, Sharding
from megatron_ext.planning.layer_costs import part_of as by_formula
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.schedules import Costs
from megatron_ext.tools import calibrate
from tests.ranks import run_ranks
from tests.tools.trace.runs import write_run

TINY = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 64 "
    "--max-position-embeddings 64 --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
LARGE = TINY.replace("--hidden-size 64", "--hidden-size 8192")
MOE = f"{TINY} --num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]*2+[1]*6)"
MLA = (
    f"{TINY} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --normalization RMSNorm --qk-layernorm"
)


def calibrated(model: str, path: str) -> int:
    """Run the command on this rank, with few repeats."""
    calibrate._ENOUGH_S = 0.0
    return cli.main(["plan", "--calibrate", path, "--", *model.split()])


@pytest.mark.parametrize(
    ("model", "parts"), [(MOE, ["dense", "moe"]), (MLA, ["dense"])]
)
def test_layers_are_measured_and_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, parts: list[str]
) -> None:
    path = tmp_path / "here.json"
    assert run_ranks(1, calibrated, model, str(path)) == [0]
    written = json.loads(path.read_text())
    assert sorted(written["measured"]) == sorted([*parts, "embedding", "loss"])
    _, device = parse_devices(f"4x{path}")
    sizes = sizes_of_flags(model.split(), "tiny")
    by = Sharding(micro_batch=1, sequence=64)
    for part in parts:
        forward_s, input_s, weight_s = written["seconds"][part]
        assert min(forward_s, input_s) > 0 <= weight_s  # a difference of two times
        planned = part_of(sizes, part, by, device)
        assert planned[:2] == pytest.approx((forward_s, input_s))
        assert planned.weight == pytest.approx(weight_s, rel=1e-6, abs=1e-4)
    words = [
        "plan",
        "--devices",
        f"4x{path}",
        "--global-batch-size",
        "8",
        "--explain",
        "--fix",
    ]
    assert cli.main([*words, "pp=4,tp=1,cp=1", "--", *model.split()]) == 0
    printed = capsys.readouterr().out
    assert "on cpu, flags, 1 x 64 tokens: plan --calibrate" in printed


def test_factors_hold_for_other_shares_of_a_layer() -> None:
    model, base = sizes_of_flags(LARGE.split(), "large"), DEVICES["h100"]
    by = Sharding(sequence=8192)
    plain = by_formula(model, "dense", by, base)
    seconds = Passes(2 * plain.forward, 3 * plain.input, 4 * plain.weight)
    device = replace(base, measured=factors({"dense": seconds}, {"dense": plain}))
    whole = part_of(model, "dense", by, device, FULL)
    assert whole.forward == pytest.approx(2 * plain.forward)
    again = by_formula(model, "dense", by, base, FULL).input - plain.input
    assert whole.input == pytest.approx(3 * plain.input + 2 * again)
    assert again > 0
    assert whole.weight == pytest.approx(4 * plain.weight)
    # Communication keeps its formula.
    half = Sharding(sequence=8192, tensor=2)
    free = replace(base, link_bytes=1e30, network_bytes=1e30, message_s=0.0, hop_s=0.0)
    waits = (
        by_formula(model, "dense", half, base).forward
        - by_formula(model, "dense", half, free).forward
    )
    assert waits > 0
    expected = 2 * by_formula(model, "dense", half, free).forward + waits
    assert part_of(model, "dense", half, device).forward == pytest.approx(expected)
    assert part_of(model, "loss", by, device) == by_formula(model, "loss", by, base)


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_plan_takes_the_costs_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    costs = Costs(0.010, 0.012, 0.008)
    settings = {
        "num_layers": 8,
        "hidden_size": 64,
        "micro_batch_size": 1,
        "seq_length": 64,
    }
    run = write_run(tmp_path, schedule=schedule, costs=costs, settings=settings)

    def planned(*more: str) -> dict[str, Any]:
        fix = f"pp=4,tp=1,cp=1,micro_batch=1,recompute=none,schedule={schedule}"
        words = [
            "plan",
            "--devices",
            "4xcpu",
            "--global-batch-size",
            "8",
            "--fix",
            fix,
            "--json",
        ]
        assert cli.main([*words, *more, "--", *TINY.split()]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]

    found = planned("--trace-dir", str(run))
    # 8 micro-batches of 30 ms on the busiest rank, and the bubble of the schedule.
    bubble = 3 * (0.010 + 0.012 - 0.008) if schedule == "zb-h1" else 3 * 0.030
    assert found["step_s"] == pytest.approx(8 * 0.030 + bubble, rel=0.05)
    assert found["step_s"] != pytest.approx(planned()["step_s"], rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "a.txt"], "unknown file type; use .json"),
        (["--calibrate", "a.json", "--pp", "4"], "so --pp has no effect; remove it"),
        (["--calibrate", "a.json", "--fix", "tp=2"], "accepts only micro_batch"),
        (
            ["--calibrate", "a.json", "--seq-length", "-4"],
            "--seq-length is -4; add, for example",
        ),
        (
            ["--devices", "4xcpu", "--global-batch-size", "8", "--trace-dir", "/no"],
            "/no",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words, "--", *TINY.split()]) != 0
    shown = capsys.readouterr().err.strip()
    assert message in shown
    assert "\n" not in shown


def test_a_trace_of_another_model_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, settings={"num_layers": 12, "hidden_size": 64})
    words = ["--devices", "4xcpu", "--global-batch-size", "8", "--trace-dir", str(run)]
    assert cli.main(["plan", *words, "--", *TINY.split()]) != 0
    assert (
        "contains traces of a model with num_layers 12 instead of 8"
        in capsys.readouterr().err
    )
