"""Trains with each feature in this environment, and compares with Megatron's own schedule.

    python -m tests.versions.matrix RESULTS.json [NAME...]

Both start from one checkpoint and must log the same losses and norms, digit by digit. `run.sh` runs
this for each release, and `table.py` prints the results.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Literal
from zlib import crc32

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.examples import test_boundaries as boundaries
from tests.ranks import RankRun, RanksFailed
from tests.training.helpers import bert_flags
from tests.upstream_script.runs import DEEPSEEK, GPT, UNTIED, run
from tests.versions.table import is_sound

PP2 = "--pipeline-model-parallel-size 2 "
ZB_V = PP2 + "--pipeline-schedule zb-v "
OVERLAP = "--overlap-grad-reduce --overlap-param-gather "
EXCHANGE = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
STREAMS = "--enable-mhc-connections --spec tests.upstream_script.streams LAYER "
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel "
"""A single process cannot use these flags; its checkpoint is the same without them."""

# The clipping norm is summed rank by rank, so its order depends on the placement.
SAME = "--clip-grad 0 --train-iters 4 --eval-iters 1 --eval-interval 2 --lr-warmup-iters 0 "


@dataclass(frozen=True)
class Case:
    """A feature: the model to compare with, and the flags of both sides."""

    name: str
    flags: str
    model: str = ""
    reference_flags: str = PP2
    ranks: int = 2
    reference_ranks: int | None = None
    script: Literal["pretrain_gpt.py", "pretrain_bert.py"] = "pretrain_gpt.py"
    since: releases.Release = (0, 16)


CASES = (
    Case("1f1b over shm", PP2 + "--pipeline-transport shm "),
    Case("zb-h1", PP2 + "--pipeline-schedule zb-h1 "),
    Case("zb-v, tied", ZB_V),
    Case("zb-v, untied", ZB_V, model=UNTIED),
    Case(
        "bitpipe",
        "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule ",
        model="--num-layers 8 --use-distributed-optimizer --bf16 ",
        ranks=4,
    ),
    Case("--use-dpp", PP2 + "--pipeline-schedule interleaved --use-dpp "),
    Case(
        "disaggregation",
        PP2 + "--forward-backward-disaggregating ",
        ranks=4,
        reference_ranks=2,
    ),
    Case("experts with bias, MLA, MTP", ZB_V, model=DEEPSEEK),
    Case(
        "experts in pairs, zb-v",
        ZB_V + EXCHANGE + "--overlap-moe-expert-parallel-comm ",
        model=DEEPSEEK,
        reference_flags=PP2 + EXCHANGE,
        ranks=4,
    ),
    Case("tensor and sequence parallel, zb-v", ZB_V, model=TENSOR, ranks=4),
    Case(
        "overlapped distributed optimizer, zb-v",
        ZB_V + OVERLAP,
        model="--use-distributed-optimizer --global-batch-size 16 ",
        reference_flags=PP2 + OVERLAP,
        ranks=4,
    ),
    Case(
        "hyper-connections, zb-v, against one stage",
        ZB_V,
        model=STREAMS + "--recompute-granularity selective --recompute-modules mhc ",
        reference_flags="",
        reference_ranks=1,
        since=(0, 20),
    ),
    Case("BERT, zb-v", ZB_V, script="pretrain_bert.py"),
)


def has_script(name: str) -> bool:
    """Return whether this release has a script of Megatron-LM, or its wheel stands in for it."""
    tree = upstream.find_tree()
    if tree is not None:
        return (tree / name).is_file()
    return name == "pretrain_gpt.py" and releases.has_training()


def told(ended: RankRun) -> list[str]:
    """Return the log lines of each step and evaluation, without times."""
    if any(ended.exit_codes):
        raise RanksFailed(ended.describe())
    times = re.compile(r"^ \[.*?\]| elapsed time per iteration \(ms\): [\d.]+ \|")
    logged = [
        times.sub("", line)
        for line in "\n".join(ended.logs).splitlines()
        if re.search(r"iteration +\d+/|validation loss at", line)
    ]
    if not any(" loss: " in line for line in logged):
        raise RanksFailed(f"no loss was logged\n{ended.describe()}")
    return logged


class Absent(Exception):
    """Something is missing in this release, which is not an error."""


class Comparisons:
    """Runs and compares cases; starts and Megatron runs common to several cases run only once.

    Args:
        folder: Folder for checkpoints and data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = cache(self._make_start)
        self._theirs = cache(self._run_theirs)
        self._base = cache(self._make_base)

    def of(self, case: Case) -> tuple[list[str], list[str]]:
        """Return the log lines of our side and of Megatron's.

        Raises:
            Absent: Neither this release nor a substitute for it has the script.
        """
        if not has_script(case.script):
            raise Absent(case.script)
        if (releases.installed_release() or case.since) < case.since:
            raise Absent(case.name.partition(",")[0])
        reference = self._theirs(
            case.script,
            case.model,
            case.reference_flags,
            case.reference_ranks or case.ranks,
        )
        start = self._start(case.script, case.model)
        return told(run(case.ranks, start + case.flags, script=case.script)), reference

    def of_checkpoints(self) -> tuple[list[str], list[str]]:
        """Train under zb-v, continue under 1F1B, and the reverse; both must match plain zb-v."""
        resharded = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
        flags = self._base("pretrain_gpt.py") + resharded
        resumed_logs, whole_logs = [], []
        for saved, resumed in ((ZB_V, PP2), (PP2, ZB_V)):
            path = self._new_folder()
            told(
                run(
                    2,
                    f"{flags}{saved}--save {path} --save-interval 2 --exit-interval 2 ",
                )
            )
            resumed_logs += told(run(2, f"{flags}{resumed}--load {path} "))
            whole_logs += told(run(2, f"{flags}{saved}--load {path} "))
        return resumed_logs, whole_logs

    def of_boundaries(self) -> tuple[list[str], list[str]]:
        """Train models whose stages exchange trees and routes, and the same models in one stage."""
        return _boundaries(2, "zb-v", transport="shm"), _boundaries(1, None)

    def _run_theirs(self, script: str, model: str, flags: str, ranks: int) -> list[str]:
        return told(run(ranks, self._start(script, model) + flags, script=script))

    def _make_start(self, script: str, model: str) -> str:
        """Save a checkpoint with one process; return the flags of runs that start from it."""
        flags, path = self._base(script), self._new_folder()
        saving = f"--train-iters 1 --save {path} --save-interval 1 "
        told(run(1, f"{flags}{model.replace(TENSOR, '')}{saving}", script=script))
        return f"{flags}{model}--load {path} --finetune "

    def _make_base(self, script: str) -> str:
        if script == "pretrain_gpt.py":
            return GPT + SAME
        data = self._new_folder()
        # The fast tokenizer, which 0.16 uses only on request, lists its words in a different order
        # in each process, and the masks depend on that order.
        slow = "--tokenizer-hf-no-use-fast " if releases.has_training() else ""
        return (
            f"{bert_flags(data)}{slow}--hidden-dropout 0 --attention-dropout 0 {SAME}"
        )

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))


def _boundaries(ranks: int, schedule: str | None, **settings: str) -> list[str]:
    """Train the models of `examples/boundaries`; return losses, and checksums of gradients."""
    lines = []
    for model in boundaries.MODELS:
        losses, gradients = boundaries.train(ranks, model, schedule, **settings)
        lines += [f"{model} loss: {loss!r}" for replica in losses for loss in replica]
        checksums = {
            name: crc32(gradient.tobytes()) for name, gradient in gradients.items()
        }
        lines += [
            f"{model} {name}: {checksum:08x}"
            for name, checksum in sorted(checksums.items())
        ]
    return lines


def tests(
    comparisons: Comparisons,
) -> dict[str, Callable[[], tuple[list[str], list[str]]]]:
    """Return all comparisons by name."""
    named = {case.name: partial(comparisons.of, case) for case in CASES}
    return {
        **named,
        "checkpoint to another schedule": comparisons.of_checkpoints,
        "trees and routes, zb-v": comparisons.of_boundaries,
    }


def judge(
    name: str, test: Callable[[], tuple[list[str], list[str]]]
) -> dict[str, object]:
    """Run a comparison; print and return the result."""
    try:
        logged, reference = test()
    except Absent as absent:
        print(f"{name}: no {absent} here", flush=True)
        return {"absent": str(absent)}
    except (AssertionError, OSError) as error:
        traceback.print_exc()
        print(f"{name}: FAILED", flush=True)
        return {"error": str(error).splitlines()[-1]}
    equal = logged == reference
    print(f"{name}: {'equal' if equal else 'DIFFERS'}", flush=True)
    if not equal:
        print(
            "\n".join(f"  {a}\n  {b}" for a, b in zip(logged, reference, strict=False))
        )
    return {"equal": equal, "ours": logged, "theirs": reference}


def main() -> int:
    """Run the named comparisons, or all of them, and write the results."""
    results, names = Path(sys.argv[1]), sys.argv[2:]
    version = releases.core_version()
    results_by_name: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="megatron_ext_versions_") as folder:
        all_tests = tests(Comparisons(Path(folder)))
        unknown = sorted(set(names) - set(all_tests))
        if unknown:
            sys.exit(f"no case {', '.join(unknown)}; there are: {'; '.join(all_tests)}")
        for name in names or all_tests:
            results_by_name[name] = judge(f"{version} {name}", all_tests[name])
    about = {
        "version": version,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": metadata.version("torch"),
        "loop": loop(),
    }
    results.write_text(json.dumps({**about, **results_by_name}, indent=1) + "\n")
    return 0 if all(is_sound(result) for result in results_by_name.values()) else 1


def loop() -> str:
    """Return which training loop runs here."""
    if upstream.find_tree() is not None:
        return "upstream's script"
    return "the wheel"


if __name__ == "__main__":
    sys.exit(main())
