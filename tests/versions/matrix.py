"""Trains under each feature in the environment that runs it, against Megatron's own schedule there.

    python -m tests.versions.matrix RESULTS.json [NAME...]

Both start from one checkpoint and have to log the same losses and norms, digit by digit. `run.sh`
runs this for each release and `table.py` prints what came out.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ext import releases, upstream
from tests.ranks import RankRun, RanksFailed
from tests.upstream_script.runs import DEEPSEEK, GPT, run

PP2 = "--pipeline-model-parallel-size 2 "
# The norm that clips is added up rank by rank: in another order for another placement.
BASE = (
    GPT.replace("--eval-iters 0", "--eval-iters 1").replace(
        "--eval-interval 10", "--eval-interval 2"
    )
    + "--clip-grad 0 --train-iters 4 "
)


@dataclass(frozen=True)
class Case:
    """A feature: what it is compared on, and the flags of either side."""

    name: str
    ours: str
    model: str = ""
    theirs: str = PP2
    ranks: int = 2
    their_ranks: int | None = None


CASES = (
    Case("1f1b over shm", PP2 + "--pipeline-transport shm "),
    Case("zb-h1", PP2 + "--pipeline-schedule zb-h1 "),
    Case("zb-v, tied", PP2 + "--pipeline-schedule zb-v "),
    Case(
        "bitpipe",
        "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule ",
        model="--num-layers 8 --use-distributed-optimizer --bf16 ",
        ranks=4,
    ),
    Case("--use-dpp", PP2 + "--pipeline-schedule interleaved --use-dpp "),
    Case("disaggregation", PP2 + "--forward-backward-disaggregating ", ranks=4, their_ranks=2),
    Case("experts with bias, MLA, MTP", PP2 + "--pipeline-schedule zb-v ", model=DEEPSEEK),
    Case(
        "tensor and sequence parallel, zb-v",
        PP2 + "--pipeline-schedule zb-v ",
        model="--tensor-model-parallel-size 2 --sequence-parallel ",
        ranks=4,
    ),
)

SPLITTABLE = ("--tensor-model-parallel-size 2 --sequence-parallel ",)
"""Flags that a single process cannot take; its checkpoint is the same without them."""


def told(ended: RankRun) -> list[str]:
    """Return what was logged of each step and each evaluation, without times."""
    if any(ended.exit_codes):
        raise RanksFailed(ended.describe())
    times = re.compile(r"^ \[.*?\]| elapsed time per iteration \(ms\): [\d.]+ \|")
    found = [
        times.sub("", line)
        for line in "\n".join(ended.logs).splitlines()
        if re.search(r"iteration +\d+/|validation loss at", line)
    ]
    if not any(" loss: " in line for line in found):
        raise RanksFailed(f"no loss was logged\n{ended.describe()}")
    return found


def compare(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """Return what our side and theirs logged."""
    alone = case.model
    for flags in SPLITTABLE:
        alone = alone.replace(flags, "")
    # Not without its optimizer: the embedded trainer has no such flag, and --finetune leaves it.
    told(run(1, f"{BASE}{alone}--train-iters 1 --save {folder} --save-interval 1 "))
    start = f"{BASE}{case.model}--load {folder} --finetune "
    theirs = told(run(case.their_ranks or case.ranks, start + case.theirs))
    return told(run(case.ranks, start + case.ours)), theirs


def checkpoint(folder: Path) -> tuple[list[str], list[str]]:
    """Train under zb-v, go on under 1F1B, and the other way round; both have to meet zb-v."""
    flags = BASE + "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    zb_v = PP2 + "--pipeline-schedule zb-v "
    ours, theirs = [], []
    for number, (saved, resumed) in enumerate(((zb_v, PP2), (PP2, zb_v))):
        path = folder / str(number)
        told(run(2, f"{flags}{saved}--save {path} --save-interval 2 --exit-interval 2 "))
        ours += told(run(2, f"{flags}{resumed}--load {path} "))
        theirs += told(run(2, f"{flags}{saved}--load {path} "))
    return ours, theirs


def tests() -> dict[str, Callable[[Path], tuple[list[str], list[str]]]]:
    """Return all comparisons by name."""
    named: dict[str, Callable[[Path], tuple[list[str], list[str]]]] = {
        case.name: lambda folder, case=case: compare(case, folder)  # type: ignore[misc]
        for case in CASES
    }
    return {**named, "checkpoint to another schedule": checkpoint}


def main() -> int:
    """Run the comparisons that are named, or all; write what came out."""
    results, names = Path(sys.argv[1]), sys.argv[2:]
    tree = upstream.find_tree()
    found: dict[str, object] = {
        "version": releases.core_version(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "loop": "upstream's script" if tree else "the wheel" if releases.has_training() else "ours",
    }
    failed = False
    for name, test in tests().items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="megatron_ext_versions_") as folder:
            try:
                ours, theirs = test(Path(folder))
            except (AssertionError, OSError) as error:
                traceback.print_exc()
                found[name] = {"error": str(error).splitlines()[-1]}
                failed = True
                continue
        equal = ours == theirs
        failed = failed or not equal
        found[name] = {"equal": equal, "ours": ours, "theirs": theirs}
        print(f"{found['version']} {name}: {'equal' if equal else 'DIFFERS'}", flush=True)
        if not equal:
            print("\n".join(f"  {a}\n  {b}" for a, b in zip(ours, theirs, strict=False)))
    results.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
