"""The error file of a rank that fails, while torchrun may end it at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_ext.upstream.error_file import WholeErrorFile


def _fail() -> None:
    raise ValueError("no more ranks")


def test_torchrun_never_sees_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_text = Path.write_text

    def look(written: Path, *args: Any, **kwargs: Any) -> int:
        assert written != path
        return write_text(written, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", look)
    with pytest.raises(ValueError, match="no more ranks"):
        record(_fail, WholeErrorFile())()
    assert (
        json.loads(path.read_text())["message"]["message"]
        == "ValueError: no more ranks"
    )
    assert list(tmp_path.iterdir()) == [path]


def test_without_torchrun_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no more ranks"):
        record(_fail, WholeErrorFile())()
    assert list(tmp_path.iterdir()) == []
