"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks


def queue_process(script: str, patched: bool) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    if patched:
        queue = filesystem_async._get_write_results_queue()
        queue.put("written")
        assert queue.get() == "written"
        assert main.__file__ == script
    else:
        with without("dist_checkpointing.queue_process"), pytest.raises(EOFError):
            filesystem_async._get_write_results_queue()


@pytest.mark.parametrize("patched", [True, False])
def test_the_queue_does_without_the_script(tmp_path: Path, patched: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ImportError('this needs python -m megatron_ext')\n")
    run_ranks(1, queue_process, str(script), patched)
