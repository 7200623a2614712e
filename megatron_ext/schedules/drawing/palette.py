"""The colours used in all pictures: in `plot`, in the trace report and on the website.

People with any kind of colour blindness can tell any two of the colours apart (a test computes how
well), and every colour has a matching text colour. A rank's even chunks are drawn in the strong
shade and its odd chunks in the pale shade.
"""

from __future__ import annotations

KINDS = {
    "F": ("#124bc3", "#8fb3f2"),
    "B": ("#1f9fa8", "#a4eef2"),
    "I": ("#f5ac00", "#fff2a8"),
    "W": ("#8f3c4e", "#e390b4"),
    "R": ("#4f4a1c", "#d0bfa0"),
}
"""By kind of action: the colours for even and odd chunks."""

SPANS = {"move": "#dd5c20", "after": "#9bbbe0"}
"""Trace spans other than actions: messages, and the work after the pipeline."""

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputation",
}

_PAGES = {
    "light": {
        "page": "#ffffff",
        "panel": "#f6f8fa",
        "text": "#1f2328",
        "quiet": "#59636e",
        "line": "#d1d9e0",
        "wait": "#dfe3e8",
    },
    "dark": {
        "page": "#14171c",
        "panel": "#1c2128",
        "text": "#e6edf3",
        "quiet": "#9aa4b0",
        "line": "#343b45",
        "wait": "#3a414c",
    },
}
_DARK_INK = "#111418"
_LIGHT_INK = "#ffffff"


def variables(theme: str) -> str:
    """Return a theme's colours (`light` or `dark`) as CSS variables on one line."""
    colours = {**_PAGES[theme], **SPANS}
    for kind, (even, odd) in KINDS.items():
        colours[kind] = even
        colours[f"{kind}-odd"] = odd
    declarations = []
    for name, colour in colours.items():
        declarations.append(f"--{name}: {colour};")
    return " ".join(declarations)


def ink(colour: str) -> str:
    """Return the text colour, dark or light, that has more contrast with a background."""
    if contrast(_LIGHT_INK, colour) > contrast(_DARK_INK, colour):
        return _LIGHT_INK
    return _DARK_INK


def contrast(first: str, second: str) -> float:
    """Return the contrast between two colours as defined by WCAG, from 1 to 21."""
    # WCAG adds 0.05 for light reflected by the screen.
    luminances = [_luminance(first), _luminance(second)]
    darker = min(luminances)
    lighter = max(luminances)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    """Return a colour's relative luminance as defined by WCAG, from 0 to 1."""
    components = bytes.fromhex(colour[1:])
    red, green, blue = [_linear(component / 255) for component in components]
    # These are the weights of the sRGB primaries. Green has the largest weight because
    # the eye is most sensitive to it.
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: float) -> float:
    """Convert an sRGB component to a linear value, both from 0 to 1."""
    if value <= 0.04045:
        return value / 12.92
    linear: float = ((value + 0.055) / 1.055) ** 2.4
    return linear


def ansi(text: str, colour: str) -> str:
    """Return the text with escape codes that give it a background colour in a terminal."""
    # 48;2 selects an RGB background, and 38;2 selects an RGB text colour.
    background = _ansi_rgb(colour)
    foreground = _ansi_rgb(ink(colour))
    return f"\x1b[48;2;{background};38;2;{foreground}m{text}\x1b[0m"


def _ansi_rgb(colour: str) -> str:
    components = bytes.fromhex(colour[1:])
    return ";".join(map(str, components))
