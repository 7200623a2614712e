"""Writes records of runs, as ranks do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.tracing.digest_files import MEGATRONS

LOSSES = (4.9, 4.7, 4.6, 4.5, 4.4)


def write(
    folder: Path,
    losses: Sequence[float] = LOSSES,
    *,
    num_ranks: int = 2,
    step_s: float = 0.1,
    norm: float = 1.5,
    schedules: Sequence[str] = (),
    wires: Sequence[str] | None = None,
    num_slices: Sequence[int] = (),
    departures: Sequence[str] = (),
    changes: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write the records of a pipeline's ranks; only the last rank has the losses.

    `schedules` and `num_slices` belong to the steps; `departures` are those of the first rank.
    `changes` replace a rank's record of its last step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        lines: list[dict[str, Any]] = [
            {
                "rank": rank,
                "world_size": num_ranks,
                "host": "a",
                "device": "cpu",
                "seq_length": 32,
            }
        ]
        for number, loss in enumerate(losses, start=1):
            is_last = rank == num_ranks - 1
            lines.append(
                {
                    "iteration": number,
                    "losses": {"lm loss": loss} if is_last else {},
                    "gradient_norm": norm / number,
                    "skipped": False,
                    "learning_rate": 1e-3,
                    "duration_s": None if number == 1 else step_s,
                    "consumed_samples": 8 * number,
                    "memory_bytes": (1 + rank) << 30,
                    "schedule": schedules[number - 1] if schedules else MEGATRONS,
                    "wires": None if wires is None else list(wires),
                    "num_slices": num_slices[number - 1] if num_slices else None,
                    "departures": list(departures) if rank == 0 == number - 1 else [],
                }
            )
        lines[-1].update((changes or {}).get(rank, {}))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank}.jsonl").write_text(text)
    return folder
