"""The 3D demo: its layout, its traffic, and the losses of a single process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.schedules import generate, simulate
from megatron_ext.schedules.drawing import svg
from tests.ranks import RankRun, start_ranks

DEMO = Path(__file__).parents[2] / "examples/megatron-demo/megatron_demo.py"
LAYERS, MICROBATCHES, STEPS = 8, 4, 5
ACTIVATION_BYTES = 2 * 16 * 32 * 4  # micro-batch x sequence x hidden x fp32
LAYOUT = """\
DP replica 0:
  Stage 0: CPU 0 (tp=0), CPU 1 (tp=1)
  Stage 1: CPU 2 (tp=0), CPU 3 (tp=1)

DP replica 1:
  Stage 0: CPU 4 (tp=0), CPU 5 (tp=1)
  Stage 1: CPU 6 (tp=0), CPU 7 (tp=1)

TP groups:  [0,1], [2,3], [4,5], [6,7]   <- AllReduce every forward
PP groups:  [0,2], [1,3], [4,6], [5,7]   <- send/recv activations
DP groups:  [0,4], [1,5], [2,6], [3,7]   <- AllReduce after backward
"""


def demo(*flags: str) -> None:
    """Run the script on this rank, as torchrun does."""
    import runpy

    sys.argv = [str(DEMO), "--cpu", *flags]
    runpy.run_path(str(DEMO), run_name="__main__")


def run(tp: int, pp: int, dp: int, *flags: str) -> RankRun:
    sizes = ("--tp", str(tp), "--pp", str(pp), "--dp", str(dp))
    return start_ranks(tp * pp * dp, demo, *sizes, *flags)


def losses(printed: str) -> list[tuple[float, float]]:
    """Loss of each step: of the ranks together, and of a single process."""
    found = re.findall(r"step \d: loss ([\d.]+), in a single process ([\d.]+)", printed)
    return [(float(together), float(alone)) for together, alone in found]


def messages(printed: str) -> dict[str, tuple[int, int]]:
    """Messages and bytes of a step, by strategy."""
    found = re.findall(
        r"^  (TP|PP|DP) +(\d+) messages +(\d+) bytes", printed, re.MULTILINE
    )
    return {name: (int(count), int(size)) for name, count, size in found}


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "schedule"),
    [(2, 2, 2, "gpipe"), (2, 2, 1, "1f1b"), (2, 1, 1, "gpipe"), (1, 2, 1, "zb-v")],
)
def test_losses_are_those_of_a_single_process(
    tp: int, pp: int, dp: int, schedule: str
) -> None:
    ended = run(tp, pp, dp, "--schedule", schedule)
    assert not any(ended.exit_codes), ended.describe()
    found = losses(ended.logs[0])
    assert len(found) == STEPS
    assert [together for together, _ in found] == pytest.approx(
        [alone for _, alone in found], abs=2e-5
    )
    assert found[-1][0] < found[0][0]
    assert not any(ended.logs[1:])


def test_the_layout_and_what_is_sent_are_those_of_its_readme() -> None:
    printed = run(2, 2, 2).logs[0]
    readme = DEMO.with_name("README.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```text\n(DP replica.*?)```", readme, re.DOTALL)
    assert shown.replace("GPU", "CPU") in printed
    assert LAYOUT in printed
    sent = messages(printed)
    # Of each rank: two all-reduces in the forward and two in the backward of its blocks.
    count = 8 * (LAYERS // 2) * MICROBATCHES * 4
    assert sent["TP"] == (count, count * ACTIVATION_BYTES)
    # An activation down and a gradient up, of each micro-batch, in each of four pipelines.
    count = 4 * MICROBATCHES * 2
    assert sent["PP"] == (count, count * ACTIVATION_BYTES)
    assert sent["DP"][0] == 8


def test_one_process_sends_nothing() -> None:
    assert messages(run(1, 1, 1).logs[0]) == {"TP": (0, 0), "PP": (0, 0), "DP": (0, 0)}


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (
            1,
            "--tp 2 --pp 2 --dp 1",
            "world size 1 must equal tp x pp x dp = 2 x 2 x 1 = 4",
        ),
        (1, "--tp 0", "all sizes are at least 1"),
        (2, "--pp 2 --schedule bitpipe", "--schedule bitpipe mirrors two pipelines"),
        (2, "--pp 2 --schedule no-such", "--schedule there is no schedule 'no-such'"),
    ],
)
def test_mistakes_end_in_one_line(ranks: int, flags: str, message: str) -> None:
    ended = start_ranks(ranks, demo, *flags.split())
    assert ended.exit_codes == [2] * ranks
    assert ended.logs[0].startswith(f"megatron_demo: error: {message}")
    assert len("".join(ended.logs).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "torch finds no GPU; add --cpu"),
        (
            ["--cpu", "--tp", "2"],
            "world size 0 must equal tp x pp x dp = 2 x 1 x 1 = 2: torchrun --nproc_per_node=2",
        ),
    ],
)
def test_without_gpus_and_torchrun_the_remedy_is_named(
    flags: list[str], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"megatron_demo: error: {message}\n"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_pictures_of_its_readme_are_current(name: str) -> None:
    drawn = svg.draw(simulate(generate(name, 4, 8)))
    command = f"megatron-ext plot {name} --pp 4 --microbatches 8 -o {name}.svg"
    assert DEMO.with_name(f"{name}.svg").read_text(encoding="utf-8") == drawn, (
        f"run `{command}`"
    )
