"""The palette: anybody can tell its colours apart, and read text on them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import dist

import pytest

from megatron_ext.schedules.drawing import palette

SEEN = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.1523, 1.0526, -0.2049),
        (0.1145, 0.7863, 0.0992),
        (-0.0039, -0.0481, 1.0520),
    ),
    "deuteranopia": (
        (0.3673, 0.8606, -0.2280),
        (0.2801, 0.6725, 0.0474),
        (-0.0118, 0.0429, 0.9690),
    ),
    "tritanopia": (
        (1.2555, -0.0767, -0.1788),
        (-0.0784, 0.9309, 0.1476),
        (0.0047, 0.6914, 0.3039),
    ),
}
"""Linear RGB as people see it (Machado, Oliveira and Fernandes 2009, severity 1)."""
APART = 0.05
"""In OKLab, where about 0.02 is a just noticeable difference."""


def oklab(colour: str, seen: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    r, g, b = (
        min(1, max(0, sum(a * c for a, c in zip(row, linear, strict=True))))
        for row in seen
    )
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("eyes", SEEN)
def test_everybody_can_tell_the_colours_apart(eyes: str) -> None:
    even = [colours[0] for colours in palette.KINDS.values()]
    odd = [colours[1] for colours in palette.KINDS.values()]
    groups = [[*even, *palette.SPANS.values()], odd, *palette.KINDS.values()]
    for group in groups:
        for one, other in combinations(group, 2):
            assert dist(oklab(one, SEEN[eyes]), oklab(other, SEEN[eyes])) > APART, (
                one,
                other,
            )


def test_text_can_be_read_on_every_colour() -> None:
    colours = [
        *palette.SPANS.values(),
        *(c for both in palette.KINDS.values() for c in both),
    ]
    for colour in colours:
        assert palette.contrast(colour, palette.ink(colour)) > 4.5, colour


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_on_every_page(theme: str) -> None:
    entries = (
        entry.split(":")
        for entry in palette.variables(theme).split(";")
        if entry.strip()
    )
    colours = {name.strip(): colour.strip() for name, colour in entries}
    for page in ("--page", "--panel"):
        for text in ("--text", "--quiet"):
            assert palette.contrast(colours[page], colours[text]) > 4.5
