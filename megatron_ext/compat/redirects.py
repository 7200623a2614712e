"""Building blocks of redirect tables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ext.devices.backend import Redirect

__all__ = ["answering", "calling", "nvtx_redirects", "returning", "to"]


def to(value: Any) -> Callable[[Any], object]:
    """Return a `Redirect.make` that yields `value`."""
    return lambda _original: value


def calling(function: Callable[..., Any]) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function forwards to `function`.

    Each redirect gets a distinct function, so that undo recognises its copies elsewhere even if
    `function` serves several redirects or is bound to other names.
    """

    def make(_original: Any) -> object:
        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    return make


def answering(function: Callable[[], Any]) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function calls `function` and ignores its arguments."""

    def make(original: Any) -> object:
        def answer(*_args: Any, **_kwargs: Any) -> Any:
            return function()

        answer.__name__ = getattr(original, "__name__", "answer")
        return answer

    return make


def returning(result: Any) -> Callable[[Any], object]:
    """Return a `Redirect.make` whose function returns `result` and ignores its arguments."""
    return answering(lambda: result)


def nvtx_redirects() -> Iterator[Redirect]:
    """List the redirects of the markers for NVIDIA's profiler, which raise in other builds."""
    reason = "marks ranges for NVIDIA's profiler, which sees no other device"
    for name in ("mark", "range_end", "range_pop", "range_push", "range_start"):
        yield Redirect(f"torch.cuda.nvtx:{name}", returning(0), reason)
    yield Redirect("torch.cuda.nvtx:range", to(_unmarked), reason)


@contextlib.contextmanager
def _unmarked(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield
