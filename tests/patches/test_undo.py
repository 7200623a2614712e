"""Undoing the activation restores everything: every attribute, by identity, and the environment."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.patches.attributes import held
from tests.ranks import _run_script, run_ranks
from tests.runtime.capture import GPT, PP2

_PROGRAM = """
import os, sys
import megatron_ext  # not active: MEGATRON_EXT_DISABLE
from megatron_ext import patches
from megatron_ext.patches import listing
from tests.patches.attributes import described, different, held

MEGATRONS_OWN = ["torch.storage:_load_from_bytes"]  # megatron.core replaces it from 0.19 on

def import_everything():
    patches.REGISTRY.register(patches.rows())
    listing.import_targets()

import torch
import torch._dynamo, torch._inductor.config  # which Megatron imports; they change torch
torch.compile(lambda: None)()  # from 0.19 on Megatron's import compiles, which changes it too
if sys.argv[1] == "megatron":
    import_everything()
for _ in range(2):  # the second time megatron.core is there in any case
    before, environment = held(), dict(os.environ)
    megatron_ext.activate()
    import_everything()
    changed = different(before, held())
    assert len(changed) > 150, changed
    assert torch.cuda.is_available()
    megatron_ext.deactivate()
    assert len(before) > 80_000, len(before)
    print("attributes", [a for a in different(before, held()) if a not in MEGATRONS_OWN])
    if "megatron.legacy.fused_kernels" in sys.modules:  # of a tree; it empties this when imported
        environment.setdefault("TORCH_CUDA_ARCH_LIST", "")
    assert dict(os.environ) == environment
    assert torch.FloatTensor([1.0]).tolist() == [1.0]
    assert not torch.cuda.is_available()
"""


@pytest.mark.parametrize("imported", ["megatron", "torch"])
def test_every_attribute_is_the_same_object_again(imported: str) -> None:
    done = run_python(
        "-c", _PROGRAM, imported, MEGATRON_EXT_DISABLE="1", TORCHDYNAMO_DISABLE="0"
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("attributes")]
    assert (
        found == ["attributes []"] * 2
    )  # a tree sets up logging, whose lines are there too


_IMPORT = """
import json, sys
import megatron_ext
from megatron_ext import patches
from megatron_ext.patches import listing
from tests.patches.attributes import described
patches.REGISTRY.register(patches.rows())
listing.import_targets()
import torch._dynamo, torch.distributed.tensor
megatron_ext.deactivate()
json.dump(described(), sys.stdout)
"""


@pytest.mark.short_s(10)
def test_what_was_imported_while_active_is_as_without_us_too() -> None:
    """Modules that copied names from `torch.cuda` while those were ours."""
    texts = []
    for disabled in ("1", "0"):
        done = run_python("-c", _IMPORT, MEGATRON_EXT_DISABLE=disabled)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout.splitlines()[-1]))
    without, undone = texts
    assert len(without) > 100_000
    shared = without.keys() & undone.keys()  # torch.compile imports more of torch
    assert len(shared) > 100_000
    assert [
        place for place in without.keys() - shared if place.startswith("megatron.")
    ] == []
    assert {
        place: undone[place] for place in shared if undone[place] != without[place]
    } == {}


def train_and_undo(argv: list[str]) -> tuple[list[str], list[str], bool]:
    import megatron_ext

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    _run_script("pretrain_gpt.py", argv)
    megatron_ext.deactivate()
    ours = [
        place
        for place, value in held().items()
        if "megatron_ext"
        in f"{type(value).__module__} {getattr(value, '__module__', '')}"
    ]
    same = all(
        signal.getsignal(number) == handler for number, handler in handlers.items()
    )
    return ours, [thread.name for thread in threading.enumerate()], same


def test_nothing_is_left_after_a_training(tmp_path: Path) -> None:
    flags = f"{GPT}{PP2}--use-dpp --trace --trace-dir {tmp_path} --hang-timeout 60"
    for ours, threads, same_handlers in run_ranks(2, train_and_undo, flags.split()):
        assert ours == []
        assert [name for name in threads if "megatron_ext" in name] == []
        assert same_handlers
