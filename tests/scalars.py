"""Reads the TensorBoard files of a run."""

from __future__ import annotations

from pathlib import Path

import pytest


def written_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by tag; exactly one process must have written."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    [file] = directory.glob("events.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
