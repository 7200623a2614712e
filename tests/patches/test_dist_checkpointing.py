"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks


def queue_process(script: str, patched: bool) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    name = "get_write_results_queue"  # with an underscore before 0.19
    make_queue = getattr(filesystem_async, name, None) or getattr(filesystem_async, f"_{name}")
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    if patched:
        queue = make_queue()
        queue.put("written")
        assert queue.get() == "written"
        assert main.__file__ == script
    else:
        with without("dist_checkpointing.queue_process"), pytest.raises(EOFError):
            make_queue()


@pytest.mark.parametrize("patched", [True, False])
def test_the_queue_does_without_the_script(tmp_path: Path, patched: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ImportError('this needs python -m megatron_ext')\n")
    run_ranks(1, queue_process, str(script), patched)


def common_state(directory: str, patched: bool) -> None:
    """Save and load arguments with an enum, as a Python does that pickles enums as `getattr`."""
    import enum
    import pickle
    from argparse import Namespace

    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.transformer.enums import AttnBackend

    def by_name(member: enum.Enum, _protocol: int) -> object:
        return getattr, (type(member), member.name)

    start_parallel()
    enum.Enum.__reduce_ex__ = AttnBackend.__reduce_ex__ = by_name  # type: ignore[assignment]
    state, path = {"args": Namespace(attention_backend=AttnBackend.flash)}, Path(directory)
    if hasattr(common, "save_common"):  # from 0.17 on
        save, load = common.save_common, common.load_common
    else:
        save = common.TorchCommonSaveStrategy("torch", 1).save_common
        load = common.TorchCommonLoadStrategy().load_common
    if patched:
        save(state, path)
        assert load(path)["args"].attention_backend is AttnBackend.flash
        assert pickle.dumps(AttnBackend.flash).count(b"getattr")  # only Megatron's file changed
    else:
        with without("dist_checkpointing.enums_by_value"):
            save(state, path)
        with pytest.raises(pickle.UnpicklingError, match="getattr"):
            load(path)


@pytest.mark.parametrize("patched", [True, False])
def test_enums_are_written_by_value(tmp_path: Path, patched: bool) -> None:
    run_ranks(1, common_state, str(tmp_path), patched)
