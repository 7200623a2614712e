"""Formats a comparison's answer as text for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ext.text_table import aligned
from megatron_ext.tools.compare.outcome import Answer, Row, is_noise

if TYPE_CHECKING:
    from megatron_ext.tools.compare.run_records import Deviation, Deviations

HEADER = (
    "", "step ms", "80 % of steps", "speed", "tokens/s", "memory GiB", "bubble %", "losses",
    "gradient norms",
)  # fmt: skip
_MAX_LABEL = 40


def answer_text(answer: Answer) -> str:
    """Return the table, the notes on its rows, the verdict, and the flags to keep."""
    reference = answer.rows[0]
    table: list[Sequence[str]] = [HEADER]
    for row in answer.rows:
        table.append(cells(row, reference))
    lines = [aligned(table)]
    for row in answer.rows:
        if row.reason:
            lines.append(f"{row.label}: {row.reason}")
        if row.repeats is not None and not row.repeats.are_none:
            lines.append(
                f"{row.label}: two runs with the same flags differ; see compare --self"
            )
        lines += [f"{row.label}: {note}" for note in row.notes]
        if row.located:
            lines.append(f"{row.label}: {row.located}")
    lines += ["", answer.verdict]
    if answer.keep:
        lines.append(f"{answer.keep_heading}: {shlex.join(answer.keep)}")
    return "\n".join(lines)


def cells(row: Row, reference: Row) -> list[str]:
    """Return the columns of `HEADER` for a row."""
    label = row.label
    if len(label) > _MAX_LABEL:
        label = f"{label[: _MAX_LABEL - 3]}..."
    range_text = ""
    if row.fast_s is not None and row.slow_s is not None:
        range_text = f"{1e3 * row.fast_s:.1f} to {1e3 * row.slow_s:.1f}"
    speed = ""
    if row.speed is not None:
        speed = f"{row.speed:.2f} x"
        # ~ marks a difference that is no larger than the differences between rounds.
        if is_noise(row, reference):
            speed = f"~ {speed}"
    step_ms = tokens = memory_gib = bubble_percent = ""
    if row.step_s is not None:
        step_ms = f"{1e3 * row.step_s:.1f}"
    if row.tokens_per_s is not None:
        tokens = f"{row.tokens_per_s:,.0f}"
    if row.memory_bytes:
        memory_gib = f"{row.memory_bytes / 2**30:.2f}"
    if row.bubble_ratio is not None:
        bubble_percent = f"{100 * row.bubble_ratio:.1f}"
    loss = _difference_text(row, "loss")
    norm = _difference_text(row, "norm")
    return [
        label,
        step_ms,
        range_text,
        speed,
        tokens,
        memory_gib,
        bubble_percent,
        loss,
        norm,
    ]


def _difference_text(row: Row, kind: str) -> str:
    if row.judgement == "failed":
        return "failed"
    difference: Deviations | None = row.deviations
    if difference is None:
        return ""
    deviation: Deviation | None = getattr(difference, kind)
    if deviation is None and row.judgement == "unproven":
        return "unproven"
    if deviation is None:
        num_compared = {"loss": difference.num_losses, "norm": difference.num_norms}
        return "bit-equal" if num_compared[kind] else "none"
    return f"{deviation.relative:.1e} at {deviation.iteration}"
