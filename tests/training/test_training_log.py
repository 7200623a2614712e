"""Lines and TensorBoard tags, as upstream's tools look for them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.scalars import written_scalars

from .helpers import LLAMA, MOCK, MOE, train

LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {8}(?P<step>\d)/ {7}3 \|"
    r" consumed samples: {11,12}(?P<samples>\d+) \| elapsed time per iteration \(ms\): \d+\.\d \|"
    r" learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \| global batch size: {5}8 \|"
    r" lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \| load_balancing_loss: \d\.\d{6}E[+-]\d\d \|"
    r" loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| number of skipped iterations:   0 \|"
    r" number of nan iterations:   0 \|"
)


def test_lines_and_tags(tmp_path: Path) -> None:
    run = train(2, f"{MOCK}{LLAMA}{MOE}--tensorboard-dir {tmp_path}")
    assert not any(run.exit_codes), run.describe()
    assert "iteration" not in run.logs[0], "the last rank reports alone"
    steps = [match.groupdict() for match in map(LINE.fullmatch, run.logs[1].splitlines()) if match]
    assert [(step["step"], step["samples"]) for step in steps] == [
        ("1", "8"), ("2", "16"), ("3", "24")
    ]  # fmt: skip
    # Warm-up of one step to 1e-3, then linear decay to 1e-4 at the last of three.
    assert [step["lr"] for step in steps] == ["1.000000E-03", "5.500000E-04", "1.000000E-04"]
    assert re.search(
        r"^-+\n validation loss at iteration 2 \| lm loss value: \d\.\d{6}E\+00 \| "
        r"lm loss PPL: \d\.\d{6}E\+\d\d \| \n-+$",
        run.logs[1],
        re.MULTILINE,
    )
    tags = written_scalars(tmp_path)
    assert {
        "lm loss", "lm loss vs samples", "learning-rate", "batch-size", "grad-norm", "loss-scale",
        "lm loss validation", "lm loss validation vs samples", "load_balancing_loss",
    } <= tags.keys()  # fmt: skip
    assert tags["batch-size"] == [(1, 8.0), (2, 8.0), (3, 8.0)]
    assert [step for step, _ in tags["lm loss vs samples"]] == [8, 16, 24]
    assert f"{tags['lm loss'][0][1]:.6E}" == steps[0]["loss"]
