"""Megatron-Bridge's configuration as Megatron's arguments, and back.

What decides whether a schedule fits a job, and what Megatron has to be told to host it, is asked of
arguments with upstream's names (`megatron_ext/config/prepared_arguments.py`). Bridge has them as
fields of several dataclasses, mostly of the same names.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from megatron_ext.config.flags import FIELD_OF

__all__ = ["Place", "Settings"]

_SECTIONS = (
    "rng",
    "optimizer",
    "ddp",
    "dist",
    "checkpoint",
    "validation",
    "train",
    "model",
    "model.transformer",
)
"""Parts of a `ConfigContainer`; of two fields with one name the later is taken."""

_RENAMED = {
    "enable_gloo_process_groups": "use_gloo_process_groups",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
"""Fields whose arguments have other names."""

_EITHER = ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2")
"""Switches that several parts have, of which Bridge takes any."""

_LETTERS = {"embedding": "E", "encoder": "e", "decoder": "t", "mtp": "m", "loss": "L"}
"""Of Megatron's notation for layouts, by the names in lists of layers."""


@dataclass(frozen=True)
class Place:
    """Where a setting stands."""

    section: str
    owner: Any
    field: str

    @property
    def name(self) -> str:
        """What users call it."""
        return f"{self.section}.{self.field}"


class Settings:
    """The configuration of one run of Bridge.

    Args:
        container: A `ConfigContainer`; changed by `write`.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self._places = {
            place.field: place for section in _SECTIONS for place in _places(container, section)
        }
        for dest, field in _RENAMED.items():
            if field in self._places:
                self._places[dest] = self._places[field]
        self._kept: dict[tuple[int, str], tuple[Place, Any]] = {}

    def arguments(self, *, world_size: int, rank: int) -> Namespace:
        """Return the settings under upstream's names.

        Args:
            world_size: Ranks of the job.
            rank: This one's.
        """
        found = {dest: getattr(place.owner, place.field) for dest, place in self._places.items()}
        for name in _EITHER:
            parts = [getattr(self.container, part, None) for part in ("ddp", "optimizer", "dist")]
            found[name] = any(getattr(part, name, False) for part in parts)
        layout = _layout_text(found.get("pipeline_model_parallel_layout"))
        found["pipeline_model_parallel_layout"] = layout
        if layout is not None:  # it says how many stages a rank has
            found["num_virtual_stages_per_pipeline_rank"] = None
        found["data_parallel_size"] = getattr(self.container, "data_parallel_size", None)
        return Namespace(**{**found, "world_size": world_size, "rank": rank})

    def write(self, values: Mapping[str, Any]) -> None:
        """Change settings, by upstream's names; `restore` brings the old values back."""
        self.keep(values)
        for dest, value in values.items():
            place = self._places[dest]
            setattr(place.owner, place.field, value)

    def keep(self, names: Iterable[str]) -> None:
        """Have `restore` bring settings back, also those that Bridge itself completes."""
        for place in (self._places[dest] for dest in names if dest in self._places):
            value = getattr(place.owner, place.field)
            self._kept.setdefault((id(place.owner), place.field), (place, value))

    def restore(self) -> None:
        """Bring the values back that were there before."""
        for place, value in self._kept.values():
            setattr(place.owner, place.field, value)
        self._kept.clear()

    def in_fields(self, message: str, *, from_python: bool) -> str:
        """Return a message that names fields of the configuration instead of flags.

        Args:
            message: With flags of Megatron's and ours.
            from_python: Whether a `PipelineConfig` was given, and no flags of ours.
        """

        def named(match: re.Match[str]) -> str:
            flag = match[0]
            dest = flag[2:].replace("-", "_")
            if dest in self._places:
                return self._places[dest].name
            if dest.removeprefix("no_") in self._places:
                return f"{self._places[dest.removeprefix('no_')].name} False"
            return FIELD_OF.get(flag, flag) if from_python else flag

        return re.sub(r"--[a-z0-9][a-z0-9-]*", named, message)


def _places(container: Any, section: str) -> list[Place]:
    owner = container
    for name in section.split("."):
        owner = getattr(owner, name, None)
    if owner is None or not is_dataclass(owner):
        return []
    return [Place(section, owner, field.name) for field in fields(owner)]


def _layout_text(layout: Any) -> str | None:
    """Return a layout in Megatron's notation: Bridge also takes lists of names, stage by stage."""
    given = getattr(layout, "input_data", layout)
    if given is None or isinstance(given, str):
        return given
    names = [[getattr(layer, "name", layer) for layer in stage] for stage in given]
    return "|".join("".join(_LETTERS[name] for name in stage) for stage in names)
