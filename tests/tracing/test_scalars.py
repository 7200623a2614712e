"""Bubble, traffic and order reach TensorBoard, W&B and the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.tracing import scalars
from tests.ranks import _run_script, require_training, run_ranks, run_script
from tests.runtime.capture import GPT, PP2
from tests.scalars import written_scalars

TAGS = {"pipeline/bubble", "pipeline/sent bytes per s", "pipeline/out of order"}


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found = written_scalars(directory)
    return {tag: values for tag, values in found.items() if tag.startswith("pipeline/")}


def check(found: dict[str, list[tuple[int, float]]]) -> None:
    assert found.keys() == TAGS
    assert all([step for step, _ in values] == [1, 2, 3] for values in found.values())
    assert all(0 < value < 1 for _, value in found["pipeline/bubble"])
    assert all(value > 0 for _, value in found["pipeline/sent bytes per s"])
    assert all(value == 0 for _, value in found["pipeline/out of order"])


def on_a_terminal(argv: list[str]) -> None:
    sys.stdout.isatty = lambda: True  # this process is a rank and ends
    lines: list[str] = []
    sys.stdout.write = lines.append
    _run_script("pretrain_gpt.py", argv)
    import torch.distributed as dist

    expected = 3 if dist.get_rank() == 3 else 0
    assert sum(line.startswith(" pipeline: bubble ") for line in lines) == expected, (
        lines
    )


def test_training_without_a_tree_writes_them_and_a_line_on_a_terminal(
    tmp_path: Path,
) -> None:
    require_training()
    argv = f"{GPT}{PP2}--pipeline-schedule 1f1b --tensorboard-dir {tmp_path}".split()
    run_ranks(4, on_a_terminal, argv)
    check(read(tmp_path))


def test_upstreams_script_writes_them(tmp_path: Path, megatron_lm_path: Path) -> None:
    argv = f"{GPT}{PP2}--pipeline-schedule 1f1b --tensorboard-dir {tmp_path}".split()
    run_script(2, "pretrain_gpt.py", argv)
    check(read(tmp_path))


def test_weights_and_biases_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], int]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((values, step))

    values = 0.25, 2.0**20, 0.5
    tags = "pipeline/bubble", "pipeline/sent bytes per s", "pipeline/out of order"
    found = dict(zip(tags, values, strict=True))
    monkeypatch.setattr(scalars, "since_last", lambda: found)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    scalars.report(7, None, Run())
    assert logged == [(found, 7)]
    assert scalars.line_of(found) == (
        " pipeline: bubble 25.0 %, 1.0 MiB/s between ranks, 50.0 % of the actions out of order"
    )
    del found["pipeline/bubble"]
    assert scalars.line_of(found).startswith(
        " pipeline: 1.0 MiB/s between ranks, 50.0 %"
    )


def counted(is_host: bool) -> dict[str, float] | None:
    """Return the scalars of a rank that computed 6 s of its own 8 or 10."""
    import torch.distributed as dist

    from megatron_ext import devices
    from megatron_ext.runtime import runtime

    dist.init_process_group("gloo")
    wall_s = 10.0 - 2 * dist.get_rank()
    measured = runtime.Measured(actions=4, busy_s=6.0, wall_s=wall_s)
    runtime.totals = lambda: (measured, 0)  # this process is a rank and ends
    in_force = SimpleNamespace(last_counts=None)
    runtime.in_force = lambda: in_force
    device = devices.current()
    type(device).is_host = is_host
    return scalars.since_last()


def test_a_rank_whose_actions_are_over_waits_for_the_last_one() -> None:
    found = run_ranks(2, counted, True)
    assert [each["pipeline/bubble"] for each in found] == pytest.approx([0.4, 0.4])


def test_the_time_of_calls_is_no_time_of_a_device() -> None:
    [first, second] = run_ranks(2, counted, False)
    assert first.keys() == second.keys() == TAGS - {"pipeline/bubble"}
