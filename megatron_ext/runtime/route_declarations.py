"""What modules declare with `megatron_ext.routes.declare`, kept on the modules themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["Boundary", "Declared", "attach", "declared"]

Boundary = Literal["fixed", "varies"]

_ATTRIBUTE = "_megatron_ext_routes"


@dataclass(frozen=True)
class Declared:
    """The declarations of one or more modules."""

    publishes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    boundary: Boundary | None = None


def attach(module: torch.nn.Module, declarations: Declared) -> None:
    """Attach declarations to a module, in place of its former ones."""
    setattr(module, _ATTRIBUTE, declarations)


def declared(chunk: torch.nn.Module) -> Declared:
    """Return the combined declarations of all modules of a stage."""
    found: list[Declared] = [
        getattr(module, _ATTRIBUTE) for module in chunk.modules() if hasattr(module, _ATTRIBUTE)
    ]
    boundaries = [each.boundary for each in found if each.boundary is not None]
    varies = "varies" in boundaries
    return Declared(
        tuple(name for each in found for name in each.publishes),
        tuple(sorted({name for each in found for name in each.takes})),
        "varies" if varies else ("fixed" if boundaries else None),
    )
