"""Checks that a trace file only contains data that ranks write (`tracing.records`).

Code that reads traces computes with these values, compares them across ranks and embeds them in
pages. A value of the wrong type would cause an error far away from the file that contains it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_ext.tracing.records import ACTION_NAMES, Header

MAX_NUMBER = 1 << 63
"""All valid sizes, ranks and times in nanoseconds are below this."""

_WHOLE_ATTRIBUTES = (
    "stage",
    "microbatch",
    "slice",
    "part",
    "header",
    "on",
    "to",
    "from",
    "bytes",
    "layer",
)
_TEXT_ATTRIBUTES = ("cause", "for", "of")
_ATTRIBUTE_TYPES: dict[str, type] = {
    **dict.fromkeys(_WHOLE_ATTRIBUTES, int),
    **dict.fromkeys(_TEXT_ATTRIBUTES, str),
}
_NONE: frozenset[str] = frozenset()
_ACTION_ATTRIBUTES = frozenset(("stage", "microbatch"))
_NEEDED_ATTRIBUTES: dict[str, frozenset[str]] = {
    **dict.fromkeys(ACTION_NAMES.values(), _ACTION_ATTRIBUTES),
    "exchange": frozenset(("of", "stage", "microbatch")),
    "send": frozenset(("to", "bytes")),
    "receive": frozenset(("from", "for", "bytes")),
}
"""Span category -> the attributes that readers need."""

_WHOLE_FIGURES = ("microbatches", "memory_bytes", "activation_bytes", "out_of_order")

_WHOLE_SETTINGS = (
    *("num_layers", "dpp_extra_activations", "waiting_weights"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_TEXT_SETTINGS = ("cpus", "device", "transport", "dpp_policy")


def check_header(header: Header) -> None:
    """Reject a header that no rank could have written.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A rank or a setting is impossible.
    """
    texts = (header.host, header.clock, header.run)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
    numbers = (
        header.rank,
        header.num_ranks,
        header.clock_ns,
        header.wall_ns,
    )
    for number in numbers:
        _check_whole(number)
    if len(header.sizes) != 3 or header.rank >= header.num_ranks:
        raise ValueError(f"no job has rank {header.rank}")
    places = (header.data, header.pipeline, header.tensor)
    for place, size in zip(places, header.sizes, strict=True):
        _check_whole(place)
        _check_whole(size)
        if place >= size:
            raise ValueError(f"a group of {size} ranks has no rank {place}")
    _check_settings(header.settings)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Reject settings that readers cannot display or compute with.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is impossible.
    """
    for name, value in settings.items():
        # Treat None like a missing setting.
        if value is None:
            continue
        if not isinstance(value, str | int | float):
            raise TypeError(f"the setting {name} is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"the setting {name} is {value}")
        if name in _WHOLE_SETTINGS:
            _check_whole(value)
        if name in _TEXT_SETTINGS and not isinstance(value, str):
            raise TypeError(f"the setting {name} is {value!r}")
    stash_ratio = settings.get("stash_ratio", 1.0)
    if not 1 <= stash_ratio <= MAX_NUMBER:
        raise ValueError(f"the setting stash_ratio is {stash_ratio}, which is below 1")


def check_span(category: str, attributes: Mapping[str, Any]) -> None:
    """Reject a span that no rank could have written.

    Raises:
        LookupError: An attribute is missing.
        TypeError: An attribute has the wrong type.
    """
    # Files contain millions of spans, so limit this to one set comparison and one loop.
    # Together, they take 0.5 us per span, a tenth of the time needed to read the span.
    if not _NEEDED_ATTRIBUTES.get(category, _NONE) <= attributes.keys():
        raise LookupError(f"attributes of {category}")
    for name, value in attributes.items():
        if not isinstance(value, _ATTRIBUTE_TYPES.get(name, object)):
            raise TypeError(f"{name} is {value!r}")


def check_figures(figures: Mapping[str, Any]) -> None:
    """Reject iteration figures that no rank could have written.

    Raises:
        LookupError: The iteration number is missing.
        TypeError: A figure has the wrong type.
        ValueError: A number is impossible.
    """
    _check_whole(figures["iteration"])
    for name in _WHOLE_FIGURES:
        _check_whole(figures.get(name, 0))
    wires = figures.get("wires", {})
    for peer, wire in wires.items():
        if not peer.isdecimal() or not isinstance(wire, str):
            raise ValueError(f"the wire to rank {peer} is {wire!r}")
    for sizes in figures.get("slice_sizes", ()):
        if not all(0 <= size <= 1 for size in sizes):
            raise ValueError(f"the sizes of slices are {sizes!r}")
    lengths = figures.get("lengths", {})
    for microbatch, (tokens, sum_of_squares) in lengths.items():
        _check_whole(int(microbatch))
        _check_whole(tokens)
        _check_whole(sum_of_squares)


def _check_whole(number: object) -> None:
    # In Python, True is an int.
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{number!r} is not a whole number")
    if not 0 <= number < MAX_NUMBER:
        raise ValueError(f"{number} is impossible")
